"""Hidden states of a series: their joint density, its mode, draws, and a particle filter."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._linear import cholesky, solve_lower, solve_upper
from .._programs import jit
from ..sde import AbstractSDE, noise_dimension
from ..transition import AbstractCoordinates, Effort, Transition, bridges, in_chunks, linear
from ._residuals import LIMIT, distance
from ._simulation import draw, is_known, refined, warn_of_exits
from .models import exact_transition


class Chain(eqx.Module):
    """Cholesky factor L of a block-tridiagonal precision LLᵀ: its diagonal blocks and those below."""

    diagonal: Array  # (n, d, d)
    below: Array  # (n, d, d), the last block is zero

    @staticmethod
    def of(diagonal: Array, below: Array) -> "Chain":
        """Factorise a precision given by its blocks, `(n, d, d)` each; NaN if it is not positive definite."""

        def state(carried: Array, blocks: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            own, next_ = blocks
            factor = cholesky(own - carried)
            tie = solve_lower(factor, next_.T).T
            return tie @ tie.T, (factor, tie)

        return Chain(*jax.lax.scan(state, jnp.zeros_like(diagonal[0]), (diagonal, below))[1])

    def half_log_det(self) -> Array:
        """log det L, split into one term per state, `(n,)`."""
        return jnp.sum(jnp.log(jnp.diagonal(self.diagonal, axis1=1, axis2=2)), axis=-1)

    def forward(self, right: Array) -> Array:
        """L⁻¹ times `right` `(n, d, k)`."""

        def state(carried: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, tie, own = now
            solved = solve_lower(factor, own - carried)
            return tie @ solved, solved

        return jax.lax.scan(state, jnp.zeros_like(right[0]), (self.diagonal, self.below, right))[1]

    def backward(self, right: Array) -> Array:
        """L⁻ᵀ times `right` `(n, d, k)`, which maps standard normal numbers to draws."""

        def state(later: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, tie, own = now
            solved = solve_upper(factor, own - tie.T @ later)
            return solved, solved

        return jax.lax.scan(
            state, jnp.zeros_like(right[0]), (self.diagonal, self.below, right), reverse=True
        )[1]

    def memory(self) -> Array:
        """The approximate lag, in states, at which correlations drop to 1 %, as in a stationary chain."""
        ties = jnp.mean(jnp.sum(self.below**2, axis=2), axis=0)
        own = jnp.mean(jnp.sum(self.diagonal**2, axis=2), axis=0)
        return 2 * jnp.log(0.01) / jnp.log(jnp.clip(jnp.max(ties / own), 1e-4, 0.9999))

    def variances(self) -> Array:
        """The covariance matrix of each state, `(n, d, d)`."""
        unit = jnp.eye(self.diagonal.shape[-1], dtype=self.diagonal.dtype)

        def state(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            factor, tie = now
            half = solve_upper(factor, unit)
            own = half @ (unit + tie.T @ later @ tie) @ half.T
            return own, own

        return jax.lax.scan(state, jnp.zeros_like(unit), (self.diagonal, self.below), reverse=True)[1]


MOST = 100  # maximum number of Newton steps to the mode
SLACK = 0.1  # nats that a step may lose, because derivatives treat the chart of the paths as constant
NEAR = 1e-12  # nats: the mode is found when a step would gain less
DAMPING, FACTOR = 1e-2, 10.0  # smallest nonzero damping, and its growth factor
CHUNK = 1024  # number of transitions of draws evaluated at a time


class Values(eqx.Module):
    """The observed values of all series, concatenated."""

    values: Array  # (n, d)
    first: Array  # (n,), whether a series begins here
    series: Array  # (n,), index of the series
    before: Array  # (N,), index of the state that each transition starts from
    times: Array  # (N,), start times of transitions
    dt: Array  # (N,)
    count: int = eqx.field(static=True)  # of series


class Joint(eqx.Module):
    """The joint density of the values and the states, in the coordinates of the SDE."""

    sde: AbstractSDE
    noise: Array  # (d,), standard deviations of the measurement errors
    observed: Values
    coordinates: AbstractCoordinates
    effort: Effort
    exact: bool = eqx.field(static=True)

    def error(self, z: Array, value: Array, first: Array) -> Array:
        """Log-density of one value given its state; includes the flat prior where a series begins."""
        x = self.coordinates.to_state(z)
        log_prob = jnp.sum(jax.scipy.stats.norm.logpdf(value, x, self.noise))
        return log_prob - jnp.where(first, self.coordinates.log_volume(x), 0)

    def likeliest(self, start: Array, end: Array, time: Array, dt: Array) -> Array:
        """Log-density of a transition in coordinates: exact, or by its most likely path only."""
        if self.exact:
            return self._known(start, end, dt)
        size = self.effort.num_functions * noise_dimension(self.sde, start.size)
        step, zero = Transition(start, end, time, dt), jnp.zeros((1, size), start.dtype)
        return bridges(self.sde, self.coordinates, step, zero, self.effort).log_weights[0]

    def transition(self, start: Array, end: Array, time: Array, dt: Array, noise: Array) -> Array:
        """Log-density of a transition in coordinates: exact, or an unbiased estimate."""
        if self.exact:
            return self._known(start, end, dt)
        drawn = bridges(self.sde, self.coordinates, Transition(start, end, time, dt), noise, self.effort)
        weights = jnp.where(drawn.found, drawn.log_weights, -jnp.inf)
        return jax.nn.logsumexp(weights) - jnp.log(len(noise))

    def _known(self, start: Array, end: Array, dt: Array) -> Array:
        x0, x1 = self.coordinates.to_state(start), self.coordinates.to_state(end)
        known = exact_transition(self.sde, x0, dt)
        assert known is not None
        return known.log_prob(x1) - self.coordinates.log_volume(x1)


class Expansion(eqx.Module):
    """Second-order expansion of the joint density around a sequence of states."""

    path: Array  # (n, d)
    value: Array
    own: Array  # (n, d), gradients of the terms of single values
    ties: Array  # (N, 2d), gradients of transitions at both ends
    slope: Array  # (n, d), total gradient
    diagonal: Array  # (n, d, d), diagonal blocks of the negative Hessian
    below: Array  # (n, d, d)

    @staticmethod
    def at(joint: Joint, path: Array) -> "Expansion":
        d, observed = path.shape[1], joint.observed
        of_value = lambda z, value, first: _second(lambda z: joint.error(z, value, first), z)
        value, own, bend = jax.vmap(of_value)(path, observed.values, observed.first)

        def of_transition(item: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            both, time, dt = item
            return _second(lambda both: joint.likeliest(both[:d], both[d:], time, dt), both)

        i = observed.before
        both = jnp.concatenate([path[i], path[i + 1]], axis=1)
        step, ties, bends = in_chunks(of_transition, (both, observed.times, observed.dt), len(i), CHUNK)
        slope = own.at[i].add(ties[:, :d]).at[i + 1].add(ties[:, d:])
        bend = bend.at[i].add(bends[:, :d, :d]).at[i + 1].add(bends[:, d:, d:])
        below = jnp.zeros_like(bend).at[i].set(-bends[:, d:, :d])
        total = jnp.sum(value) + jnp.sum(step)
        total = jnp.where(jnp.all(jax.vmap(joint.coordinates.is_inside)(path)), total, -jnp.inf)
        return Expansion(path, total, own, ties, slope, -bend, below)

    @staticmethod
    def nowhere(path: Array, count: int) -> "Expansion":
        """An expansion of value −inf with `count` transitions, worse than any other."""
        n, d = path.shape
        zero, blank = jnp.zeros_like(path), jnp.zeros((n, d, d), path.dtype)
        ties = jnp.zeros((count, 2 * d), path.dtype)
        return Expansion(path, jnp.full((), -jnp.inf, path.dtype), zero, ties, zero, blank, blank)


class Search(eqx.Module):
    """The mode, by Newton's method with Levenberg–Marquardt damping."""

    best: Expansion
    damping: Array
    next: Array  # (n, d)
    valid: Array  # whether there was an admissible step
    count: Array
    found: Array

    @staticmethod
    def mode(joint: Joint, start: Array) -> "Search":
        nowhere, zero = Expansion.nowhere(start, len(joint.observed.dt)), jnp.zeros((), start.dtype)
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
        added = jax.vmap(jnp.diag)(damping * scale)
        chain = Chain.of(best.diagonal + added, best.below)
        move = chain.backward(chain.forward(best.slope[..., None]))[..., 0]
        gain = 0.5 * jnp.sum(best.slope * move)
        valid = jnp.isfinite(gain)
        path = jnp.where(valid, best.path + move, best.path)
        found = better & valid & (damping == 0) & (gain < NEAR)
        return Search(best, damping, path, valid, self.count + 1, found)


def log_likelihood(joint: Joint, mode: Expansion, key: PRNGKeyArray) -> tuple[Array, Array]:
    """The log-likelihood of each series, and its standard error, `(count,)` each.

    The log-weight of a draw is a sum over states. Its odd part o = Σ oᵢ adds ½ Var o to the logarithm of the
    mean, and where weights are uneven the sample variance of o dominates the error. Since oᵢ and oⱼ are
    nearly independent for distant states, Var o is replaced by the sum of the covariances of nearby states,
    which has a much smaller error.
    """
    observed, (n, d) = joint.observed, mode.path.shape
    chain = Chain.of(mode.diagonal, mode.below)
    half = jax.random.normal(key, (n, d, num_draws(joint.effort) // 2), mode.path.dtype)
    normal = jnp.concatenate([half, -half], axis=2)
    moves = jnp.moveaxis(chain.backward(normal), 2, 1)  # (n, M, d)
    paths = mode.path[:, None] + moves
    drawn = chain.half_log_det()[:, None] + jnp.sum(jax.scipy.stats.norm.logpdf(normal), axis=1)
    errors = jax.vmap(jax.vmap(joint.error, in_axes=(0, None, None)))(paths, observed.values, observed.first)
    errors = jnp.where(jax.vmap(jax.vmap(joint.coordinates.is_inside))(paths), errors, -jnp.inf)
    steps = _transitions(joint, paths, key)
    by_series = lambda parts: jnp.zeros((observed.count, parts.shape[1])).at[observed.series].add(parts)
    local = errors.at[observed.before].add(steps)
    weights = by_series(local - drawn)
    weights = jnp.where(jnp.isnan(weights), -jnp.inf, weights)
    # The odd part without its linear term: the gradient is zero at the mode.
    i = observed.before
    linear = jnp.einsum("nmd,nd->nm", moves, mode.own)
    linear = linear.at[i].add(jnp.einsum("nmd,nd->nm", moves[i], mode.ties[:, :d]))
    linear = linear.at[i].add(jnp.einsum("nmd,nd->nm", moves[i + 1], mode.ties[:, d:]))
    odd = 0.5 * jnp.subtract(*jnp.split(local - linear, 2, axis=1))
    odd = jnp.where(jnp.isfinite(odd), odd, 0)
    excess = 0.5 * (by_series(odd) ** 2 - by_series(odd * _near_sums(odd, chain.memory())))
    return jax.vmap(_log_mean)(weights, excess)


def _log_mean(weights: Array, excess: Array) -> tuple[Array, Array]:
    """The logarithm of the mean of weights `(M,)`, whose second half is antithetic to the first, less the
    mean of `excess` `(M/2,)`; and its standard error."""
    top = jnp.max(weights)
    top = jnp.where(jnp.isfinite(top), top, 0)
    pairs = jnp.mean(jnp.reshape(jnp.exp(weights - top), (2, -1)), axis=0)
    mean = jnp.mean(pairs)
    relative = pairs / mean
    error = jnp.std(relative - excess, ddof=1) / jnp.sqrt(pairs.size)
    # Correct the bias of the logarithm of a mean (Jensen).
    low = 0.5 * jnp.var(relative, ddof=1) / pairs.size
    return top + jnp.log(mean) + low - jnp.mean(excess), error


def _near_sums(terms: Array, reach: Array) -> Array:
    """The sum of the terms `(n, K)` within `reach` states of each, smooth in the reach."""
    n = len(terms)
    sums = jnp.concatenate([jnp.zeros_like(terms[:1]), jnp.cumsum(terms, axis=0)])

    def upto(place: Array) -> Array:
        place = jnp.clip(place, 0, n)
        low = jnp.minimum(jnp.floor(place).astype(int), n - 1)
        part = (place - low)[:, None]
        return (1 - part) * sums[low] + part * sums[low + 1]

    return upto(jnp.arange(n) + 1 + reach) - upto(jnp.arange(n) - reach)


def _transitions(joint: Joint, paths: Array, key: PRNGKeyArray) -> Array:
    """Log-densities `(N, M)` of the transitions of all draws `(n, M, d)`."""
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
    """Number of draws of the hidden states."""
    return 4 * effort.num_paths


def num_inner(effort: Effort) -> int:
    """The effort for each transition of a draw: small, as there are many draws."""
    return 2 * max(effort.num_paths // 8, 1)


def _second(function: Callable[[Array], Array], at: Array) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of a function, in forward mode."""

    def first(at: Array) -> tuple[Array, tuple[Array, Array]]:
        value, slope = linear(function, at)
        return slope, (value, slope)

    bend, (value, slope) = jax.jacfwd(first, has_aux=True)(at)
    return value, slope, bend


PARTICLES = 2048


class Filtered(eqx.Module):
    """Predictive probabilities of all values but the first of each series. `uniform` `(N,)` is P(Y ≤ y |
    earlier values) for the first column, and `log_prob` `(N,)` the log-density. `last` `(K, d)` are draws of
    the last state given all values."""

    uniform: Array
    log_prob: Array
    last: Array


def particle_filter(joint: Joint, key: PRNGKeyArray, count: int) -> Filtered:
    """Filter with exact transitions, or with steps short enough that halving them does not change the
    result."""
    if is_known(joint.sde, joint.observed.values[0]):
        return _run(joint, key, count, jnp.asarray(1))
    change = lambda a, b: distance(np.asarray(a.uniform), np.asarray(b.uniform), count)
    found = refined(lambda num_steps: _run(joint, key, count, num_steps), change, LIMIT)
    warn_of_exits(int(jnp.isnan(found.last).any(axis=1).sum()), count)
    return found


@functools.partial(jit, level=1)
def _run(joint: Joint, key: PRNGKeyArray, count: int, num_steps: Array) -> Filtered:
    """The bootstrap particle filter (Gordon, Salmond & Smith 1993) with systematic resampling."""
    observed, coordinates = joint.observed, joint.coordinates
    # The transition that leads to each value; arbitrary where a series begins.
    lead = jnp.clip(jnp.cumsum(~observed.first) - 1, 0)
    many = (observed.values, observed.first, observed.times[lead], observed.dt[lead])

    def step(particles: Array, now: tuple) -> tuple[Array, tuple[Array, Array]]:
        (value, first, time, dt), key = now
        key_move, key_start, key_choice = jax.random.split(key, 3)
        one = lambda x, key: draw(joint.sde, coordinates, x, time, dt, num_steps, key)
        moved = jax.vmap(one)(particles, jax.random.split(key_move, count))
        # With a flat prior, the first state is normal around the first value, restricted to the state space.
        normal = jax.random.normal(key_start, particles.shape)
        fresh = jax.vmap(lambda normal: value + joint.noise * normal)(normal)
        inside = coordinates.contains(fresh)
        fresh = fresh[jnp.where(inside, jnp.arange(count), jnp.argmax(inside))]
        log_g = jax.vmap(lambda x: jnp.sum(jax.scipy.stats.norm.logpdf(value, x, joint.noise)))(moved)
        log_g = jnp.where(jnp.isnan(log_g), -jnp.inf, log_g)
        log_w = jnp.where(first, jnp.where(inside, 0.0, -jnp.inf), log_g)
        uniform = jnp.nanmean(jax.scipy.stats.norm.cdf(value[0], moved[:, 0], joint.noise[0]))
        log_prob = jax.nn.logsumexp(log_w) - jnp.log(count)
        chosen = _systematic(jax.nn.softmax(log_w), key_choice)
        return jnp.where(first, fresh, moved)[chosen], (uniform, log_prob)

    start = jnp.zeros((count, observed.values.shape[1]), observed.values.dtype)  # overwritten
    last, (uniform, log_prob) = jax.lax.scan(step, start, (many, jax.random.split(key, len(observed.first))))
    later = observed.before + 1
    return Filtered(uniform[later], log_prob[later], last)


def _systematic(weights: Array, key: PRNGKeyArray) -> Array:
    """Systematic resampling: indices `(K,)` in random order (Carpenter, Clifford & Fearnhead 1999)."""
    key_shift, key_order = jax.random.split(key)
    count = len(weights)
    points = (jnp.arange(count) + jax.random.uniform(key_shift)) / count
    places = jnp.searchsorted(jnp.cumsum(weights), points)
    return jax.random.permutation(key_order, jnp.minimum(places, count - 1))


def filtered_residuals(filtered: Filtered) -> np.ndarray:
    """Residuals of a one-dimensional series from its filter."""
    if filtered.last.shape[1] != 1:
        raise ValueError(f"residuals require one component; this series has {filtered.last.shape[1]}")
    least = 0.5 / (len(filtered.last) + 1)
    return np.clip(np.asarray(filtered.uniform, float), least, 1 - least)
