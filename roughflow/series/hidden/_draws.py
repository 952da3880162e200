"""Hidden states of a series: the most likely ones, weighted draws, particles, a grid and a filter."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..._linear import cholesky, solve_lower, solve_upper
from ..._programs import jit
from ...transition import in_chunks, linear
from ..models import Normal
from ._state_space import STEP, StateSpace


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

    @staticmethod
    def of_free(diagonal: Array, below: Array, free: Array) -> "Chain":
        """The same with the components that are not free `(n, d)` replaced by independent ones."""
        mask = free.astype(diagonal.dtype)
        later = jnp.roll(mask, -1, axis=0)
        own = diagonal * mask[:, :, None] * mask[:, None] + jax.vmap(jnp.diag)(1 - mask)
        return Chain.of(own, below * later[:, :, None] * mask[:, None])

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


MAX_ITERATIONS = 100  # Newton steps to the mode
SLACK = 1e-6  # nats that a step may lose to rounding
NEAR = 1e-10  # nats: the mode is found when a step would gain less
DAMPING, FACTOR = 1e-2, 10.0  # smallest nonzero damping, and its growth factor
CHUNK = 4096  # transitions evaluated at a time


class Expansion(eqx.Module):
    """Second-order expansion of the joint density around a sequence of states, by local terms.

    Derivatives of transitions are central differences: nested derivatives of a transition take ten times as
    long to compile, and neither the mode nor the width of the draws biases the likelihood.
    """

    path: Array  # (n, d)
    values: Array  # (n,), the log-densities of values
    steps: Array  # (N,), and of transitions
    own: Array  # (n, d), gradients of `values`
    ties: Array  # (N, 2d), gradients of `steps` at both ends
    bends: Array  # (n, d, d), Hessians of `values`
    tie_bends: Array  # (N, 2d, 2d), and of `steps`
    inside: Array

    @staticmethod
    def at(space: StateSpace, path: Array) -> "Expansion":
        (_n, d), rows, i = path.shape, space.rows, space.rows.before

        def of_value(z: Array, row: tuple) -> tuple[Array, Array, Array]:
            return _second(lambda z: space.observation(z, *row), z)

        def of_transition(item: tuple[Array, ...]) -> tuple[Array, Array, Array]:
            both, time, dt, fixed = item
            width = space.widths(both[:d], time, dt)
            joint = lambda both: space.transition(both[:d], both[d:], time, dt, fixed)
            return differences(joint, both, STEP * jnp.concatenate([width, width]))

        value, own, bend = jax.vmap(of_value)(path, observations(space))
        both = jnp.concatenate([path[i], path[i + 1]], axis=1)
        items = (both, rows.times[i], rows.dt, rows.fixed[i + 1])
        step, ties, bends = in_chunks(of_transition, items, len(i), CHUNK)
        inside = jnp.all(jax.vmap(space.coordinates.is_inside)(path))
        return Expansion(path, value, step, own, ties, bend, bends, inside)

    def value(self) -> Array:
        return jnp.where(self.inside, jnp.sum(self.values) + jnp.sum(self.steps), -jnp.inf)

    def slope(self, space: StateSpace) -> Array:
        """The gradient in the free components, `(n, d)`."""
        i, d = space.rows.before, self.path.shape[1]
        slope = self.own.at[i].add(self.ties[:, :d]).at[i + 1].add(self.ties[:, d:])
        return jnp.where(space.rows.fixed, 0, slope)

    def chain(self, space: StateSpace, damping: Array | float = 0.0) -> Chain:
        """The factor of the negative Hessian."""
        i, d = space.rows.before, self.path.shape[1]
        bend = self.bends.at[i].add(self.tie_bends[:, :d, :d]).at[i + 1].add(self.tie_bends[:, d:, d:])
        below = jnp.zeros_like(bend).at[i].set(-self.tie_bends[:, d:, :d])
        scale = jnp.abs(jnp.diagonal(bend, axis1=1, axis2=2))
        return Chain.of_free(jax.vmap(jnp.diag)(damping * scale) - bend, below, ~space.rows.fixed)


def observations(space: StateSpace) -> tuple:
    """The arguments of `StateSpace.observation` after the state, for all states."""
    rows, errors = space.rows, space.deviations()
    errors = jnp.ones_like(rows.values) if errors is None else errors
    return rows.times, rows.values, rows.seen, rows.fixed, errors, rows.first


def differences(function: Callable[[Array], Array], at: Array, size: Array) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of a function of few variables, by central differences."""
    n = at.size
    rows, columns = np.triu_indices(n, 1)
    moves = jnp.diag(size)
    pairs = moves[rows] + moves[columns]
    points = jnp.concatenate([jnp.zeros((1, n)), moves, -moves, pairs, -pairs])
    values = jax.vmap(lambda move: function(at + move))(points)
    value, ahead, behind = values[0], values[1 : n + 1], values[n + 1 : 2 * n + 1]
    both, neither = jnp.split(values[2 * n + 1 :], 2)
    curve = ahead + behind - 2 * value
    cross = 0.5 * (both + neither - 2 * value - curve[rows] - curve[columns])
    bend = jnp.diag(curve).at[rows, columns].set(cross).at[columns, rows].set(cross)
    return value, (ahead - behind) / (2 * size), bend / size[:, None] / size[None]


def _second(function: Callable[[Array], Array], at: Array) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of a function, in forward mode."""

    def first(at: Array) -> tuple[Array, tuple[Array, Array]]:
        value, slope = linear(function, at)
        return slope, (value, slope)

    bend, (value, slope) = jax.jacfwd(first, has_aux=True)(at)
    return value, slope, bend


class Search(eqx.Module):
    """The most likely states, by Newton's method with Levenberg–Marquardt damping."""

    best: Expansion
    damping: Array
    next: Array  # (n, d)
    valid: Array  # whether there was an admissible step
    count: Array
    found: Array

    @staticmethod
    def mode(space: StateSpace, start: Array) -> "Search":
        """The search from a sequence of coordinates `(n, d)`."""
        shapes = eqx.filter_eval_shape(lambda: Expansion.at(space, start))
        nowhere = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)  # outside, so of value −inf
        yes, no = jnp.ones((), bool), jnp.zeros((), bool)
        search = Search(nowhere, jnp.zeros(()), space.pinned(start), yes, jnp.zeros((), int), no)
        going = lambda search: ~search.found & (search.count < MAX_ITERATIONS)
        return jax.lax.while_loop(going, lambda search: search.step(space), search)

    def step(self, space: StateSpace) -> "Search":
        new = Expansion.at(space, self.next)
        finite = jnp.isfinite(new.value()) & jnp.all(jnp.isfinite(new.slope(space)))
        better = finite & (new.value() >= self.best.value() - SLACK)
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, self.best)
        less = jnp.where(self.damping > DAMPING, self.damping / FACTOR, 0)
        more = jnp.maximum(FACTOR * self.damping, DAMPING)
        damping = jnp.where(better & self.valid, less, more)
        chain, slope = best.chain(space, damping), best.slope(space)
        move = chain.backward(chain.forward(slope[..., None]))[..., 0]
        gain = 0.5 * jnp.sum(slope * move)
        valid = jnp.isfinite(gain)
        path = jnp.where(valid, best.path + move, best.path)
        found = better & valid & (damping == 0) & (gain < NEAR)
        return Search(best, damping, path, valid, self.count + 1, found)


def expansion_at_mode(space: StateSpace, start: Array) -> tuple[Expansion, Array]:
    """The expansion around the most likely states, and whether they were found.

    Differentiable in the parameters by the implicit function theorem: one Newton step from the mode, which is
    held.
    """
    held = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, space)
    search = jax.lax.stop_gradient(Search.mode(held, start))
    mode = search.best
    chain = mode.chain(held)
    at_mode = Expansion.at(space, space.pinned(mode.path))
    move = chain.backward(chain.forward(at_mode.slope(space)[..., None]))[..., 0]
    # The step is zero at these parameters, up to rounding, but has derivatives.
    move = move - jax.lax.stop_gradient(move)
    return eqx.tree_at(lambda one: one.path, at_mode, at_mode.path + move), search.found


def log_likelihood(
    space: StateSpace, mode: Expansion, key: PRNGKeyArray, num_draws: int
) -> tuple[Array, Array, Array]:
    """The log-likelihood of each series, its standard error, and the effective number of draws, `(count,)`
    each, by importance sampling around the most likely states.

    The log-weight of a draw is a sum over states. Its odd part o = Σ oᵢ adds ½ Var o to the logarithm of the
    mean, and where weights are uneven the sample variance of o dominates the error. Since oᵢ and oⱼ are
    nearly independent for distant states, Var o is replaced by the sum of the covariances of nearby states,
    which has a much smaller error.
    """
    rows, (n, d) = space.rows, mode.path.shape
    chain, free = mode.chain(space), ~rows.fixed
    half = jax.random.normal(key, (n, d, num_draws // 2), mode.path.dtype) * free[..., None]
    normal = jnp.concatenate([half, -half], axis=2)
    moves = jnp.moveaxis(chain.backward(normal), 2, 1)  # (n, M, d)
    paths = mode.path[:, None] + moves
    density = jnp.where(free[..., None], jax.scipy.stats.norm.logpdf(normal), 0)
    drawn = chain.half_log_det()[:, None] + jnp.sum(density, axis=1)
    local = _local_terms(space, paths)
    by_series = lambda parts: jnp.zeros((rows.count, parts.shape[1])).at[rows.series].add(parts)
    weights = by_series(local - drawn)
    weights = jnp.where(jnp.isnan(weights), -jnp.inf, weights)
    # The odd part without its linear term: the gradient is zero at the mode.
    i = rows.before
    own, ties = jax.lax.stop_gradient((mode.own, mode.ties))
    slope = jnp.einsum("nmd,nd->nm", moves, own)
    slope = slope.at[i].add(jnp.einsum("nmd,nd->nm", moves[i], ties[:, :d]))
    slope = slope.at[i].add(jnp.einsum("nmd,nd->nm", moves[i + 1], ties[:, d:]))
    odd = 0.5 * jnp.subtract(*jnp.split(local - slope, 2, axis=1))
    odd = jnp.where(jnp.isfinite(odd), odd, 0)
    reach = jax.lax.stop_gradient(chain.memory())
    excess = 0.5 * (by_series(odd) ** 2 - by_series(odd * _near_sums(odd, reach)))
    value, error = jax.vmap(_log_mean)(weights, excess)
    share = jax.nn.softmax(weights, axis=1)
    return value, jax.lax.stop_gradient(error), jax.lax.stop_gradient(1 / jnp.sum(share**2, axis=1))


def _local_terms(space: StateSpace, paths: Array) -> Array:
    """Log-densities `(n, M)` of values, and of the transitions from each state, for draws `(n, M, d)`."""
    rows, i = space.rows, space.rows.before
    own = jax.vmap(lambda z, row: jax.vmap(lambda z: space.observation(z, *row))(z))(
        paths, observations(space)
    )
    own = jnp.where(jax.vmap(jax.vmap(space.coordinates.is_inside))(paths), own, -jnp.inf)

    def one(item: tuple[Array, ...]) -> Array:
        start, end, time, dt, fixed = item
        return jax.vmap(lambda a, b: space.transition(a, b, time, dt, fixed))(start, end)

    items = (paths[i], paths[i + 1], rows.times[i], rows.dt, rows.fixed[i + 1])
    return own.at[i].add(in_chunks(one, items, len(i), max(8 * CHUNK // paths.shape[1], 1)))


def _log_mean(weights: Array, excess: Array) -> tuple[Array, Array]:
    """The logarithm of the mean of weights `(M,)`, whose second half is antithetic to the first, less the
    mean of `excess` `(M/2,)`; and its standard error."""
    top = jnp.max(weights)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    pairs = jnp.mean(jnp.reshape(jnp.exp(weights - top), (2, -1)), axis=0)
    mean = jnp.mean(pairs)
    relative = pairs / mean
    error = jnp.sqrt(jnp.sum((relative - excess - 1 + jnp.mean(excess)) ** 2) / (pairs.size - 1) / pairs.size)
    # Correct the bias of the logarithm of a mean (Jensen).
    low = 0.5 * jnp.sum((relative - 1) ** 2) / (pairs.size - 1) / pairs.size
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


REPLICATES = 8  # independent runs of the particles, for their standard error


def particles(space: StateSpace, mode: Expansion, key: PRNGKeyArray, count: int) -> tuple[Array, Array]:
    """The log-likelihood of all series and its standard error, by particles guided by the most likely states.

    The draws of `log_likelihood` are made one state at a time, from the last to the first, and resampled
    where their weights are uneven (efficient importance sampling with resampling, Scharth & Kohn 2016). The
    weight of a step is the remainder of the local second-order expansion, so it is even for a linear model,
    and the variance of the log-likelihood grows only linearly with the length.
    """
    rows, (n, d) = space.rows, mode.path.shape
    chain, free = mode.chain(space), ~rows.fixed
    linked = jnp.zeros(n, bool).at[rows.before].set(True)
    place = jnp.clip(jnp.cumsum(linked) - 1, 0)  # the transition that leaves each state
    ahead = jnp.minimum(jnp.arange(n) + 1, n - 1)
    link = (linked, mode.steps[place], mode.ties[place], mode.tie_bends[place], rows.dt[place])
    local = (mode.path, mode.values, mode.own, mode.bends)
    items = (chain.diagonal, chain.below, free, local, link, mode.path[ahead], rows.fixed[ahead])

    def step(carried: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], Array]:
        (moves, log_w), (item, row, key) = carried, now
        factor, tie, free, (at, value, own, bend), (linked, step, ties, tie_bend, dt), later, fixed = item
        key_draw, key_choice = jax.random.split(key)
        share = jax.nn.softmax(log_w)
        uneven = jnp.sum(share**2) * count > 2
        chosen = jnp.where(uneven, systematic(share, key_choice), jnp.arange(count))
        log_w = jnp.where(uneven, jnp.zeros(count), log_w)
        moves = moves[chosen]
        normal = jax.random.normal(key_draw, moves.shape) * free[None]
        new = solve_upper(factor, normal.T - tie.T @ moves.T).T
        quadratic = lambda e, v, g, h: v + e @ g + 0.5 * e @ h @ e

        def remainder(e: Array, e_later: Array) -> Array:
            both = jnp.concatenate([e, e_later])
            left = space.observation(at + e, *row) - quadratic(e, value, own, bend)
            left = jnp.where(space.coordinates.is_inside(at + e), left, -jnp.inf)
            tied = space.transition(at + e, later + e_later, row[0], dt, fixed)
            return left + jnp.where(linked, tied - quadratic(both, step, ties, tie_bend), 0)

        weight = jax.vmap(remainder)(new, moves)
        weight = log_w + jnp.where(jnp.isnan(weight), -jnp.inf, weight)
        mean = jax.nn.logsumexp(weight) - jnp.log(count)
        return (new, weight - mean), mean

    def run(key: PRNGKeyArray) -> Array:
        start = jnp.zeros((count, d)), jnp.zeros(count)
        given = (items, observations(space), jax.random.split(key, n))
        return jnp.sum(jax.lax.scan(step, start, given, reverse=True)[1])

    # One run after another, so that memory does not grow with their number.
    logs = jax.lax.map(run, jax.random.split(key, REPLICATES))
    laplace = mode.value() + 0.5 * jnp.log(2 * jnp.pi) * jnp.sum(free) - jnp.sum(chain.half_log_det())
    ratio = jnp.exp(logs - jnp.max(logs))
    error = jnp.std(ratio, ddof=1) / jnp.mean(ratio) / np.sqrt(REPLICATES)
    return laplace + jnp.max(logs) + jnp.log(jnp.mean(ratio)), error


PARTICLES = 2048
FIRST_WIDTH = 3.0  # of the draws of the first state, in standard deviations given all values


class FilteredDraws(eqx.Module):
    """The states given the values so far, from particles: `mean` `(n, d)`, `deviation` `(n, d)`, the
    probability `uniform` `(n,)` of a smaller value than the observed one, and draws `last` `(K, d)` of the
    last state."""

    mean: Array
    deviation: Array
    uniform: Array
    last: Array


@functools.partial(jit, level=1)
def particle_filter(
    space: StateSpace, mode: Expansion, key: PRNGKeyArray, count: int, column: int
) -> FilteredDraws:
    """A particle filter whose draws use the next value (Doucet, Godsill & Andrieu 2000): normal, by the
    linearised model. `column` is the value whose probabilities are returned."""
    rows, d = space.rows, mode.path.shape[1]
    wide = FIRST_WIDTH**2 * mode.chain(space).variances()
    lead = jnp.clip(jnp.cumsum(~rows.first) - 1, 0)
    times = rows.times[rows.before][lead], rows.dt[lead]
    pinned = space.pinned(mode.path)
    unit = jnp.eye(d)

    def move(z: Array, key: PRNGKeyArray, now: tuple) -> tuple[Array, Array, Array]:
        """A draw of the next state of one particle, its log-weight, and the chance of a smaller value."""
        row, (time, dt), at, begin = now
        normal = space.step(z, time, dt)
        mean, covariance = jnp.where(row[5], at, normal.mean), jnp.where(row[5], begin, normal.covariance)
        key_draw, key_next = jax.random.split(key)
        gain, rest, gap = _updated(space, mean, covariance, row, at)
        fixed = row[3]
        factor = cholesky(jnp.where(fixed[:, None] | fixed[None], unit, rest))
        white = jnp.where(fixed, 0, jax.random.normal(key_draw, (d,)))
        new = jnp.where(fixed, at, mean + gain @ gap + factor @ white)
        drawn = jnp.sum(jnp.where(fixed, 0, jax.scipy.stats.norm.logpdf(white) - jnp.log(jnp.diag(factor))))
        weight = space.observation(new, *row) - drawn
        weight = weight + jnp.where(row[5], 0, space.transition(z, new, time, dt, fixed))
        weight = jnp.where(space.coordinates.is_inside(new), weight, -jnp.inf)
        uniform = _below(space, normal, space.sample(z, time, dt, key_next), row, at, column)
        return new, jnp.where(jnp.isnan(weight), -jnp.inf, weight), uniform

    def step(carried: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], tuple]:
        (particles, log_w), (*given, key) = carried, now
        key_move, key_choice = jax.random.split(key)
        new, weight, uniform = jax.vmap(lambda z, k: move(z, k, tuple(given)))(
            particles, jax.random.split(key_move, count)
        )
        before = jax.nn.softmax(log_w)
        good = ~jnp.isnan(uniform)
        uniform = jnp.sum(jnp.where(good, before * uniform, 0)) / jnp.sum(jnp.where(good, before, 0))
        weight = weight + jnp.where(given[0][5], 0, log_w)
        share = jax.nn.softmax(weight)
        x = jax.vmap(space.coordinates.to_state)(new)
        mean = share @ x
        deviation = jnp.sqrt(share @ (x - mean[None]) ** 2)
        chosen = systematic(share, key_choice)
        return (new[chosen], jnp.zeros(count)), (mean, deviation, uniform)

    n = len(rows.first)
    start = jnp.broadcast_to(pinned[:1], (count, d)), jnp.zeros(count)
    given = (observations(space), times, pinned, wide, jax.random.split(key, n))
    (last, _), shown = jax.lax.scan(step, start, given)
    mean, deviation, uniform = shown
    return FilteredDraws(mean, deviation, uniform, jax.vmap(space.coordinates.to_state)(last))


def _updated(
    space: StateSpace, mean: Array, covariance: Array, row: tuple, at: Array
) -> tuple[Array, Array, Array]:
    """The gain, the covariance and the innovation of one update with the values that are components of the
    state; without effect otherwise."""
    _, value, seen, fixed, error, _ = row
    d = len(mean)
    c = 0 if space.observe is not None else min(value.size, d)
    x = space.coordinates.to_state(mean)
    slopes = space.slopes(x)
    wide = lambda part, fill: jnp.concatenate([part[:c], jnp.full(d - c, fill, part.dtype)])
    noisy = wide(seen, False) & ~fixed
    gap = jnp.where(fixed, at - mean, jnp.where(noisy, slopes * (wide(value, 0.0) - x), 0))
    loose = jnp.where(noisy, (slopes * wide(error, 1.0)) ** 2, 0)
    mask = jnp.where(fixed | noisy, 1.0, 0.0)
    inner = mask[:, None] * mask[None] * covariance + jnp.diag(loose + 1 - mask)
    # A fixed component without variance (the first state) is left where it is.
    inner = inner + jnp.diag(jnp.where(jnp.diag(inner) > 0, 0.0, 1.0))
    factor = cholesky(inner)
    half = solve_lower(factor, mask[:, None] * covariance)
    return solve_upper(factor, half).T, covariance - half.T @ half, gap


def _below(space: StateSpace, normal: Normal, drawn: Array, row: tuple, at: Array, column: int) -> Array:
    """The probability of a value below the observed one, given the state before it."""
    time, value, seen, _, error, _ = row
    x = space.coordinates.to_state(drawn)
    if space.observe is not None:
        distribution = space.observe(time, x)
        if not hasattr(distribution, "cdf"):
            return jnp.full((), jnp.nan)
        below = jnp.ravel(distribution.cdf(jnp.where(seen, value, 1.0)))[column]
    elif space.deviations() is not None:
        below = jax.scipy.stats.norm.cdf(value[column], x[column], error[column])
    else:
        spread = jnp.sqrt(normal.covariance[column, column])
        below = jax.scipy.stats.norm.cdf(at[column], normal.mean[column], spread)
    return below


def systematic(weights: Array, key: PRNGKeyArray) -> Array:
    """Systematic resampling: indices `(K,)` in random order (Carpenter, Clifford & Fearnhead 1999)."""
    key_shift, key_order = jax.random.split(key)
    count = len(weights)
    points = (jnp.arange(count) + jax.random.uniform(key_shift)) / count
    places = jnp.searchsorted(jnp.cumsum(weights), points)
    return jax.random.permutation(key_order, jnp.minimum(places, count - 1))
