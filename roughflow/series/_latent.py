"""States that were not observed, behind values that were: their density, its mode, and draws around it.

Values are states with normal errors, Yᵢ = X(tᵢ) + εᵢ. With the states in coordinates, and a flat prior for the
first of a series, the joint density is

    log g(y₀ | x₀) + Σ log p(xᵢ₊₁ | xᵢ) + log g(yᵢ₊₁ | xᵢ₊₁),

and the likelihood its integral over all the states: by importance sampling from the normal distribution with the
mode and the second derivatives of the joint density, which is the distribution itself if the SDE is linear.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..sde import AbstractSDE, noise_dimension
from ._bridges import Bridges, bridges
from ._chain import Chain
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Transition
from ._transition import in_chunks
from .models import AbstractNamedSDE

MOST = 100  # steps to the mode
SLACK = 0.1  # nats that a step may lose: derivatives are those of weighted paths with their chart held
NEAR = 1e-12  # nats left to gain, at which the mode is found
DAMPING, FACTOR = 1e-2, 10.0  # the least that is not zero, and what it changes by
CHUNK = 1024  # transitions of draws at a time


class Values(eqx.Module):
    """Observed values of all series, one after the other."""

    values: Array  # (n, d)
    first: Array  # (n,), whether a series begins there
    series: Array  # (n,), which one it is
    before: Array  # (N,), the place of the state that each transition starts from
    times: Array  # (N,), of transitions
    dt: Array  # (N,)
    count: int = eqx.field(static=True)  # of series


class Joint(eqx.Module):
    """The joint density of states in coordinates and values."""

    sde: AbstractSDE
    noise: Array  # (d,), standard deviations of the errors
    observed: Values
    coordinates: AbstractCoordinates
    effort: Effort
    exact: bool = eqx.field(static=True)

    def inside(self, z: Array) -> Array:
        """Whether coordinates `(d,)` are those of a state."""
        x = self.coordinates.to_state(z)
        back = self.coordinates.from_state(jnp.where(self.coordinates.contains(x), x, jnp.nan))
        return jnp.all(jnp.abs(back - z) < 1e-6 * (1 + jnp.abs(z)))

    def error(self, z: Array, value: Array, first: Array) -> Array:
        """log g of one value; with the flat prior in the state where a series begins."""
        x = self.coordinates.to_state(z)
        log_prob = jnp.sum(jax.scipy.stats.norm.logpdf(value, x, self.noise))
        return log_prob - jnp.where(first, self.coordinates.log_volume(x), 0)

    def likeliest(self, start: Array, end: Array, time: Array, dt: Array) -> Array:
        """The log-density in coordinates of a transition: exact, or by its likeliest path alone."""
        if self.exact:
            return self._known(start, end, dt)
        size = self.effort.num_functions * noise_dimension(self.sde, start.size)
        step, zero = Transition(start, end, time, dt), jnp.zeros((1, size), start.dtype)
        return bridges(self.sde, self.coordinates, step, zero, self.effort).log_weights[0]

    def transition(self, start: Array, end: Array, time: Array, dt: Array, noise: Array) -> Array:
        """The same, exact, or by an estimate that is right on average."""
        if self.exact:
            return self._known(start, end, dt)
        drawn = bridges(self.sde, self.coordinates, Transition(start, end, time, dt), noise, self.effort)
        weights = jnp.where(drawn.found, drawn.log_weights, -jnp.inf)
        return jax.nn.logsumexp(weights) - jnp.log(len(noise))

    def _known(self, start: Array, end: Array, dt: Array) -> Array:
        assert isinstance(self.sde, AbstractNamedSDE)
        x0, x1 = self.coordinates.to_state(start), self.coordinates.to_state(end)
        value = self.sde.exact_log_prob(x0, x1, dt)
        assert value is not None
        return value - self.coordinates.log_volume(x1)


class Expansion(eqx.Module):
    """The joint density around a path of states: to the second order, but for terms of other states than
    neighbours, which are none."""

    path: Array  # (n, d)
    value: Array
    slope: Array  # (n, d)
    diagonal: Array  # (n, d, d), of the negative second derivatives
    below: Array  # (n, d, d)

    @staticmethod
    def at(joint: Joint, path: Array) -> "Expansion":
        d, observed = path.shape[1], joint.observed
        of_value = lambda z, value, first: _second(lambda z: joint.error(z, value, first), z)
        value, slope, bend = jax.vmap(of_value)(path, observed.values, observed.first)

        def of_transition(item: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            both, time, dt = item
            return _second(lambda both: joint.likeliest(both[:d], both[d:], time, dt), both)

        i = observed.before
        both = jnp.concatenate([path[i], path[i + 1]], axis=1)
        step, slopes, bends = in_chunks(of_transition, (both, observed.times, observed.dt), len(i), CHUNK)
        slope = slope.at[i].add(slopes[:, :d]).at[i + 1].add(slopes[:, d:])
        bend = bend.at[i].add(bends[:, :d, :d]).at[i + 1].add(bends[:, d:, d:])
        below = jnp.zeros_like(bend).at[i].set(-bends[:, d:, :d])
        total = jnp.sum(value) + jnp.sum(step)
        total = jnp.where(jnp.all(jax.vmap(joint.inside)(path)), total, -jnp.inf)
        return Expansion(path, total, slope, -bend, below)


class Search(eqx.Module):
    """Newton's method for the mode, damped where it goes astray (Levenberg 1944, Marquardt 1963)."""

    best: Expansion
    damping: Array
    next: Array  # (n, d)
    valid: Array  # whether there was a step to take
    count: Array
    found: Array

    @staticmethod
    def mode(joint: Joint, start: Array) -> "Search":
        blank = jnp.zeros((*start.shape, start.shape[1]), start.dtype)
        lowest, zero = jnp.full((), -jnp.inf, start.dtype), jnp.zeros((), start.dtype)
        nowhere = Expansion(start, lowest, jnp.zeros_like(start), blank, blank)
        yes, no = jnp.ones((), bool), jnp.zeros((), bool)
        search = Search(nowhere, zero, start, yes, jnp.zeros((), int), no)
        going = lambda search: ~search.found & (search.count < MOST)
        return jax.lax.while_loop(going, lambda search: search.step(joint), search)

    def step(self, joint: Joint) -> "Search":
        new = Expansion.at(joint, self.next)
        finite = jnp.isfinite(new.value) & jnp.all(jnp.isfinite(new.slope))
        better = finite & (new.value >= self.best.value - SLACK)
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, self.best)
        less = jnp.where(self.damping > DAMPING, self.damping / FACTOR, 0)
        more = jnp.maximum(FACTOR * self.damping, DAMPING)
        damping = jnp.where(better & self.valid, less, more)
        scale = jnp.abs(jnp.diagonal(best.diagonal, axis1=1, axis2=2))
        added = (damping * scale)[..., None] * jnp.eye(scale.shape[1], dtype=scale.dtype)
        chain = Chain.of(best.diagonal + added, best.below)
        move = chain.backward(chain.forward(best.slope[..., None]))[..., 0]
        gain = 0.5 * jnp.sum(best.slope * move)
        valid = jnp.isfinite(gain)
        path = jnp.where(valid, best.path + move, best.path)
        found = better & valid & (damping == 0) & (gain < NEAR)
        return Search(best, damping, path, valid, self.count + 1, found)


def log_likelihood(joint: Joint, mode: Expansion, key: PRNGKeyArray) -> tuple[Array, Array]:
    """The log-likelihood of each series, and its standard error, `(count,)` each."""
    observed, (n, d) = joint.observed, mode.path.shape
    chain = Chain.of(mode.diagonal, mode.below)
    half = jax.random.normal(key, (n, d, num_draws(joint.effort) // 2), mode.path.dtype)
    normal = jnp.concatenate([half, -half], axis=2)
    paths = jnp.moveaxis(mode.path[..., None] + chain.backward(normal), 2, 1)  # (n, M, d)
    log_probs = chain.half_log_det()[:, None] + jnp.sum(jax.scipy.stats.norm.logpdf(normal), axis=1)
    errors = jax.vmap(jax.vmap(joint.error, in_axes=(0, None, None)))(paths, observed.values, observed.first)
    inside = jax.vmap(jax.vmap(joint.inside))(paths)
    parts = jnp.where(inside, errors - log_probs, -jnp.inf)
    weights = jnp.zeros((observed.count, parts.shape[1]), parts.dtype).at[observed.series].add(parts)
    steps = _transitions(joint, paths, key)
    weights = weights.at[observed.series[observed.before]].add(steps)
    weights = jnp.where(jnp.isnan(weights), -jnp.inf, weights)
    return jax.vmap(lambda one: Bridges(one, jnp.isfinite(one)).log_mean())(weights)


def _transitions(joint: Joint, paths: Array, key: PRNGKeyArray) -> Array:
    """Of all draws `(n, M, d)`, `(N, M)`."""
    observed, (_, draws, d) = joint.observed, paths.shape
    size = joint.effort.num_functions * noise_dimension(joint.sde, d)

    def one(item: tuple[Array, Array, Array, Array, Array]) -> Array:
        start, end, time, dt, i = item
        half = jax.random.normal(jax.random.fold_in(key, i), (draws, num_inner(joint.effort) // 2, size))
        noise = jnp.concatenate([half, -half], axis=1)
        return jax.vmap(lambda a, b, v: joint.transition(a, b, time, dt, v))(start, end, noise)

    i = observed.before
    items = (paths[i], paths[i + 1], observed.times, observed.dt, i)
    return in_chunks(one, items, len(i), max(CHUNK // draws, 1))


def num_draws(effort: Effort) -> int:
    """Of all the states."""
    return 4 * effort.num_paths


def num_inner(effort: Effort) -> int:
    """Paths of each transition of a draw: few, as there are many draws."""
    return 2 * max(effort.num_paths // 8, 1)


def _second(function, at: Array) -> tuple[Array, Array, Array]:
    """A function's value, gradient and second derivatives, forwards."""

    def first(at: Array) -> tuple[Array, tuple[Array, Array]]:
        pushed = lambda direction: jax.jvp(function, (at,), (direction,))
        value, slope = jax.vmap(pushed, out_axes=(None, 0))(jnp.eye(at.size, dtype=at.dtype))
        return slope, (value, slope)

    bend, (value, slope) = jax.jacfwd(first, has_aux=True)(at)
    return value, slope, bend
