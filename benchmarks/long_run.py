"""Long references for densities without a closed form, by code that shares nothing with `roughflow.density`.

p(x) = E g(x, δ) over independent standard normal numbers δ. In the pull-back chart δ is the path and g is
p(x | path). In the endpoint chart δ is the start and the path less its first coefficient, that one is solved
for, and g is its density over the determinant of the map.

No mode is ever searched for: draws from the prior say where the mass is, a normal distribution with their
weighted mean and covariance covers all of it, several bundles included, and draws of both are pooled
(population Monte Carlo, Cappé et al. 2004; balance heuristic, Veach & Guibas 1995). A quarter of the draws
comes from the prior to the end, so no weight is larger than four times the prior's.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

import roughflow as rf
from roughflow.flow import NoDivergence

PRIOR_SHARE = 0.25
WIDER = 1.3  # factor on the covariance
ROUNDS = 4  # of adaptation
LEARN = 2**11  # draws a point in each of them
REACH, HALVINGS = 12.0, 44  # of a bisection
PAIRS = 2**13  # of a point and a draw that are solved together: few stay in a processor's cache


@dataclass(frozen=True)
class LongRun:
    """log p (k,), its standard error, the effective number of draws and the largest one's share."""

    log_prob: np.ndarray
    standard_error: np.ndarray
    effective: np.ndarray
    largest: np.ndarray


class Normals(eqx.Module):
    """One normal distribution a point: mean (k, size) and the Cholesky factor of its covariance."""

    mean: Array
    root: Array


class AbstractChart(eqx.Module):
    """What δ is. A module: flows of one shape share a program."""

    flow: rf.StochasticFlow

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Of δ."""

    @abc.abstractmethod
    def log_g(self, x: Array, delta: Array) -> Array:
        """(k, K) for x of shape (k, d) and δ of shape (k, K, size)."""


class PullBackChart(AbstractChart):
    """δ is the path, g = p(x | path)."""

    @property
    def size(self) -> int:
        return self.flow.driver.num_functions * self.flow.noise_dimension

    def log_g(self, x: Array, delta: Array) -> Array:
        flow = self.flow
        shape = (*delta.shape[:-1], flow.driver.num_functions, flow.noise_dimension)
        path = flow.driver.path(jnp.reshape(delta, shape), flow.t1)
        return flow.without_errors().log_prob_given_path(x[:, None], path)


class EndpointChart(AbstractChart):
    """δ is the start, whitened, and ω₁, ω₂, …; g = N(ω₀; 0, I) / |det ∂Z_T/∂ω₀| at the ω₀ that leads to x,
    zero where Newton's method finds none.

    For a base `rf.Normal` and a square diffusion. It is right if no other ω₀ leads to x: the problem it is
    used for has noise close to the identity.
    """

    newton: int = eqx.field(static=True, default=8)

    @property
    def size(self) -> int:
        return self.flow.driver.num_functions * self.flow.dimension

    def log_g(self, x: Array, delta: Array) -> Array:
        flow, d = self.flow, self.flow.dimension
        plain = eqx.tree_at(lambda f: f.divergence, flow, NoDivergence()).without_errors()
        start = flow.base.loc + flow.base.scale * delta[..., :d]
        others = jnp.reshape(delta[..., d:], (*delta.shape[:-1], -1, d))

        def end(first: Array) -> Array:
            path = flow.driver.path(jnp.concatenate([first[..., None, :], others], axis=-2), flow.t1)
            return plain.push_forward(start, path)[0]

        first = self.solve(end, x[:, None], start)
        value, slope = with_slope(end, first)
        found = jnp.linalg.norm(value - x[:, None], axis=-1) < 1e-6
        log_normal = jnp.sum(jax.scipy.stats.norm.logpdf(first), axis=-1)
        return jnp.where(found, log_normal - jnp.linalg.slogdet(slope)[1], -jnp.inf)

    def solve(self, end, x: Array, like: Array) -> Array:
        """ω₀ with end(ω₀) = x."""

        def step(_, first: Array) -> Array:
            value, slope = with_slope(end, first)
            move = jnp.linalg.solve(slope, (x - value)[..., None])[..., 0]
            far = jnp.linalg.norm(move, axis=-1, keepdims=True)
            move = move * jnp.minimum(1, 2 / jnp.maximum(far, 1e-9))
            return jnp.where(jnp.all(jnp.isfinite(move), axis=-1, keepdims=True), first + move, 0.5 * first)

        return jax.lax.fori_loop(0, self.newton, step, jnp.zeros_like(like))


def with_slope(end, first: Array) -> tuple[Array, Array]:
    """A map of each row, and its Jacobian there."""
    along = lambda e: jax.jvp(end, (first,), (jnp.broadcast_to(e, first.shape),))
    return jax.vmap(along, out_axes=(None, -1))(jnp.eye(first.shape[-1], dtype=first.dtype))


class MonotoneChart(EndpointChart):
    """The same in one dimension, where Z_T grows with ω₀ if the noise is positive: by bisection, so that the
    one ω₀ there is is always found."""

    def solve(self, end, x: Array, like: Array) -> Array:
        def halve(_, sides: tuple[Array, Array]) -> tuple[Array, Array]:
            middle = 0.5 * (sides[0] + sides[1])
            below = end(middle) < x
            return jnp.where(below, middle, sides[0]), jnp.where(below, sides[1], middle)

        sides = jnp.full_like(like, -REACH), jnp.full_like(like, REACH)
        return jax.lax.fori_loop(0, HALVINGS, halve, sides)[0]


def long_run(chart: AbstractChart, x: np.ndarray, *, draws: int, key: PRNGKeyArray) -> LongRun:
    """At least `draws` draws for each of the points x (k, d), in groups of points that fit in memory."""
    group = min(len(x), PAIRS // LEARN)
    parts = []
    for at in range(0, len(x), group):
        rows = np.arange(at, at + group) % len(x)  # the last group is filled up: one compilation
        keys = iter(jax.random.split(jax.random.fold_in(key, at), ROUNDS + draws // LEARN + 1))
        part = _group(chart, jnp.asarray(x)[rows], draws, keys)
        parts.append(jax.tree.map(lambda a, at=at: a[: len(x) - at], part))
    return LongRun(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _group(chart: AbstractChart, x: Array, draws: int, keys: Iterator[PRNGKeyArray]) -> list[np.ndarray]:
    size = chart.size
    normals = Normals(jnp.zeros((len(x), size)), jnp.broadcast_to(jnp.eye(size), (len(x), size, size)))
    for _ in range(ROUNDS):
        normals = _step(chart, x, normals, next(keys))[1]
    sums = [_step(chart, x, normals, next(keys))[0] for _ in range(-(-draws // LEARN))]
    ones, squares, top = (np.array(column, float) for column in zip(*sums, strict=True))
    count = LEARN * len(sums)
    log_sum = np.logaddexp.reduce(ones, axis=0)
    effective = np.exp(2 * log_sum - np.logaddexp.reduce(squares, axis=0))
    error = np.sqrt((1 / effective - 1 / count).clip(0))
    return [log_sum - np.log(count), error, effective, np.exp(top.max(axis=0) - log_sum)]


@eqx.filter_jit
def _step(chart: AbstractChart, x: Array, now: Normals, key: PRNGKeyArray):
    """Draw from prior and normals, weigh, and fit the normals anew."""
    k, size = now.mean.shape
    noise = jax.random.normal(key, (k, LEARN, size), x.dtype)
    plain = round(PRIOR_SHARE * LEARN)
    moved = now.mean[:, None] + jnp.einsum("kij,knj->kni", now.root, noise[:, plain:])
    delta = jnp.concatenate([noise[:, :plain], moved], axis=1)
    log_prior = -0.5 * jnp.sum(delta**2, axis=-1)
    white = jax.scipy.linalg.solve_triangular(
        now.root, jnp.swapaxes(delta - now.mean[:, None], 1, 2), lower=True
    )
    log_volume = jnp.sum(jnp.log(jnp.diagonal(now.root, axis1=1, axis2=2)), axis=-1)
    log_normal = -0.5 * jnp.sum(white**2, axis=1) - log_volume[:, None]
    pooled = jnp.logaddexp(np.log(PRIOR_SHARE) + log_prior, np.log1p(-PRIOR_SHARE) + log_normal)
    log_g = chart.log_g(x, delta)
    log_w = eqx.error_if(log_g, jnp.any(jnp.isnan(log_g)), "a solve failed") + log_prior - pooled
    sums = [jax.nn.logsumexp(power * log_w, axis=1) for power in (1, 2)]
    return (*sums, jnp.max(log_w, axis=1)), jax.vmap(_fit)(delta, log_w)


def _fit(delta: Array, log_w: Array) -> Normals:
    """Weighted mean and covariance; weights are flattened until enough draws have a say."""
    size = delta.shape[1]
    powers = 0.8 ** jnp.arange(24, dtype=delta.dtype)
    relative = jax.nn.softmax(powers[:, None] * jnp.where(jnp.isfinite(log_w), log_w, -1e30), axis=1)
    effective = 1 / jnp.sum(relative**2, axis=1)
    enough = effective > 4 * size
    best = jnp.where(jnp.any(enough), jnp.argmax(enough), len(powers) - 1)
    w, count = relative[best], effective[best]
    mean = w @ delta
    offset = delta - mean
    covariance = (count * (offset.T * w) @ offset + size * jnp.eye(size)) / (count + size)
    return Normals(mean, jnp.linalg.cholesky(WIDER * covariance))
