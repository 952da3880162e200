"""Hidden states of a series: the most likely states, and particles guided by them."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..._linear import cholesky, solve_lower, solve_upper
from ..._programs import jit
from ...density import systematic
from ...transition import in_chunks, linear
from ..models import Normal
from ._state_space import Rows, StateSpace


class Chain(eqx.Module):
    """Cholesky factor L of a block-tridiagonal precision matrix LLᵀ: its diagonal blocks and the blocks below
    them."""

    diagonal: Array  # (n, d, d)
    below: Array  # (n, d, d), the last block is zero

    @staticmethod
    def of(diagonal: Array, below: Array) -> "Chain":
        """Factorise a precision matrix given by its blocks, `(n, d, d)` each; NaN if it is not positive
        definite."""

        def state(carried: Array, blocks: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            own, next_ = blocks
            factor = cholesky(own - carried)
            tie = solve_lower(factor, next_.T).T
            return tie @ tie.T, (factor, tie)

        return Chain(*jax.lax.scan(state, jnp.zeros_like(diagonal[0]), (diagonal, below))[1])

    @staticmethod
    def of_free(diagonal: Array, below: Array, free: Array) -> "Chain":
        """Factorise a precision matrix in which the components outside the mask `free` `(n, d)` are replaced
        by independent ones of variance 1."""
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
        """L⁻ᵀ times `right` `(n, d, k)`, which maps standard normal draws to draws with this precision
        matrix."""

        def state(later: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, tie, own = now
            solved = solve_upper(factor, own - tie.T @ later)
            return solved, solved

        return jax.lax.scan(
            state, jnp.zeros_like(right[0]), (self.diagonal, self.below, right), reverse=True
        )[1]

    def variances(self) -> Array:
        """The covariance matrix of each state, `(n, d, d)`."""
        unit = jnp.eye(self.diagonal.shape[-1], dtype=self.diagonal.dtype)

        def state(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            factor, tie = now
            half = solve_upper(factor, unit)
            own = half @ (unit + tie.T @ later @ tie) @ half.T
            return own, own

        return jax.lax.scan(state, jnp.zeros_like(unit), (self.diagonal, self.below), reverse=True)[1]


MAX_ITERATIONS = 100  # maximum number of Newton steps to the mode
# The following tuples have a value for double and one for single precision.
STEP = (1e-3, 0.1)  # step of finite differences, in standard deviations of a transition
SLACK = (1e-6, 0.03)  # in nats; a step may lose this much because of rounding errors
NEAR = (1e-10, 3e-3)  # in nats; the mode is found when a step would gain less
DAMPING, FACTOR = 1e-8, 10.0  # smallest nonzero damping, and its growth factor
CHUNK = 4096  # transitions evaluated at a time


class Expansion(eqx.Module):
    """Second-order expansion of the joint log-density around a sequence of states, as a sum of local terms.

    Derivatives of transitions are central differences: nested derivatives of a transition take ten times as
    long to compile, and errors in the mode or in the width of the draws do not bias the likelihood.
    """

    path: Array  # (n, d)
    values: Array  # (n,), the log-densities of values
    steps: Array  # (N,), the log-densities of transitions
    own: Array  # (n, d), gradients of `values`
    ties: Array  # (N, 2d), gradients of `steps` at both ends
    bends: Array  # (n, d, d), Hessians of `values`
    tie_bends: Array  # (N, 2d, 2d), Hessians of `steps`
    inside: Array

    @staticmethod
    def at(space: StateSpace, path: Array) -> "Expansion":
        rows, i = space.rows, space.rows.before

        def of_value(z: Array, row: tuple) -> tuple[Array, Array, Array]:
            return _second(lambda z: space.observation(z, *row), z)

        def of_transition(item: tuple[Array, ...]) -> tuple[Array, Array, Array]:
            start, end, time, dt, fixed = item
            width = STEP[_single(path)] * space.widths(start, time, dt)

            def to_ends(move: Array) -> Array:
                log_density = space.transition_from(start + move, time, dt)  # computed once for all ends
                return jax.vmap(lambda move: log_density(end + move, fixed))(_moves(width))

            return differences(jax.vmap(to_ends)(_moves(width)), width)

        value, own, bend = jax.vmap(of_value)(path, observations(space))
        items = (path[i], path[i + 1], rows.times[i], rows.dt, rows.fixed[i + 1])
        step, ties, bends = in_chunks(of_transition, items, len(i), CHUNK)
        inside = jnp.all(jax.vmap(space.coordinates.is_inside)(path))
        return Expansion(path, value, step, own, ties, bend, bends, inside)

    def value(self) -> Array:
        return jnp.where(self.inside, jnp.sum(self.values) + jnp.sum(self.steps), -jnp.inf)

    def slope(self, space: StateSpace) -> Array:
        """The gradient with respect to the free components, `(n, d)`."""
        i, d = space.rows.before, self.path.shape[1]
        slope = self.own.at[i].add(self.ties[:, :d]).at[i + 1].add(self.ties[:, d:])
        return jnp.where(space.rows.fixed, 0, slope)

    def chain(self, space: StateSpace, damping: Array | None = None) -> Chain:
        """The Cholesky factor of the negative Hessian; if `damping` is positive, that of a positive definite
        approximation of it."""
        i, d = space.rows.before, self.path.shape[1]
        own, ties = self.bends, self.tie_bends
        if damping is not None:
            own, ties = jax.lax.cond(damping > 0, _concave, lambda *bends: bends, own, ties)
        bend = own.at[i].add(ties[:, :d, :d]).at[i + 1].add(ties[:, d:, d:])
        below = jnp.zeros_like(bend).at[i].set(-ties[:, d:, :d])
        if damping is not None:
            scale = jnp.abs(jnp.diagonal(bend, axis1=1, axis2=2))
            bend = bend - jax.vmap(jnp.diag)(damping * scale)
        return Chain.of_free(-bend, below, ~space.rows.fixed)


def _concave(*bends: Array) -> tuple[Array, ...]:
    """Hessians `(n, k, k)` with their positive eigenvalues replaced by zero."""
    return tuple(-jax.vmap(positive_part)(-bend) for bend in bends)


def observations(space: StateSpace) -> tuple:
    """The arguments of `StateSpace.observation` other than the state, for all states."""
    rows, errors = space.rows, space.deviations()
    errors = jnp.ones_like(rows.values) if errors is None else errors
    return rows.times, rows.values, rows.seen, rows.fixed, errors, rows.first


def _moves(size: Array) -> Array:
    """The displacements `(1 + n + n², n)` for central differences, in none, one or two coordinates."""
    rows, columns = np.triu_indices(size.size, 1)
    one = jnp.diag(size)
    two = one[rows] + one[columns]
    return jnp.concatenate([jnp.zeros((1, size.size)), one, -one, two, -two])


def differences(table: Array, size: Array) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of a function of two points, by central differences. `table` contains its
    values at all pairs of `_moves`."""
    n = size.size
    rows, columns = np.triu_indices(n, 1)

    def of_one(values: Array) -> tuple[Array, Array]:
        ahead, behind = values[1 : n + 1], values[n + 1 : 2 * n + 1]
        both, neither = jnp.split(values[2 * n + 1 :], 2)
        curve = ahead + behind - 2 * values[0]
        cross = 0.5 * (both + neither - 2 * values[0] - curve[rows] - curve[columns])
        bend = jnp.diag(curve).at[rows, columns].set(cross).at[columns, rows].set(cross)
        return 0.5 * (ahead - behind), bend

    (slope_start, start), (slope_end, end) = of_one(table[:, 0]), of_one(table[0])
    moved = table[1 : 2 * n + 1, 1 : 2 * n + 1].reshape(2, n, 2, n)
    tie = 0.25 * (moved[0, :, 0] + moved[1, :, 1] - moved[0, :, 1] - moved[1, :, 0])
    bend, both = jnp.block([[start, tie], [tie.T, end]]), jnp.concatenate([size, size])
    return table[0, 0], jnp.concatenate([slope_start, slope_end]) / both, bend / both[:, None] / both[None]


def _second(function: Callable[[Array], Array], at: Array) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of a function, in forward mode."""

    def first(at: Array) -> tuple[Array, tuple[Array, Array]]:
        value, slope = linear(function, at)
        return slope, (value, slope)

    bend, (value, slope) = jax.jacfwd(first, has_aux=True)(at)
    return value, slope, bend


UPDATES = 8  # number of Newton steps when a filter is updated with one value
LONGEST_UPDATE = 2.0  # maximum length of such a step, in standard deviations
# Maximum variance of the prior of the first state around a typical state, relative to that of one step.
FIRST_STEPS = 1000


@functools.partial(jit, level=1)
def smoothed_guess(space: StateSpace, start: Array) -> Array:
    """Coordinates `(n, d)` from an extended Kalman smoother, as the start of the search for the most likely
    states. `start` `(d,)` is a typical state."""
    rows, (n, d) = space.rows, space.rows.fixed.shape
    unit, pinned = jnp.eye(d), space.pinned(jnp.broadcast_to(start, (n, d)))
    wide = space.normal(start, rows.times[0], jnp.median(rows.dt)).covariance * min(n, FIRST_STEPS)

    def predicted(z: Array, covariance: Array, time: Array, dt: Array) -> tuple[Array, Array, Array]:
        moves = jnp.diag(STEP[_single(z)] * space.widths(z, time, dt))
        mean = lambda move: space.normal(z + move, time, dt).mean
        grow = (jax.vmap(mean)(moves) - jax.vmap(mean)(-moves)).T / (2 * jnp.diag(moves))[None]
        normal = space.normal(z, time, dt)
        return grow, normal.mean, grow @ covariance @ grow.T + normal.covariance

    def updated(mean: Array, covariance: Array, row: tuple) -> tuple[Array, Array]:
        deviation = jnp.sqrt(jnp.maximum(jnp.diag(covariance), 0))

        def expanded(z: Array) -> tuple[Array, Array]:
            _, slope, bend = _second(lambda z: space.observation(z, *row), z)
            return slope, positive_part(-bend)

        def step(z: Array, _: None) -> tuple[Array, None]:
            slope, bend = expanded(z)
            pull = covariance @ (slope + bend @ (z - mean))
            move = mean + jnp.linalg.solve(unit + covariance @ bend, pull) - z
            new = z + jnp.clip(move, -LONGEST_UPDATE * deviation, LONGEST_UPDATE * deviation)
            good = jnp.all(jnp.isfinite(new)) & space.coordinates.is_inside(new)
            return jnp.where(good, new, z), None

        z, _ = jax.lax.scan(step, mean, None, length=UPDATES)
        return z, jnp.linalg.solve(unit + covariance @ expanded(z)[1], covariance)

    def ahead(carried: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], tuple]:
        row, (time, dt), at = now
        first = row[5]
        grow, mean, covariance = predicted(*carried, time, dt)
        mean, covariance = jnp.where(first, start, mean), jnp.where(first, wide, covariance)
        good = jnp.all(jnp.isfinite(mean)) & space.coordinates.is_inside(mean)
        mean = jnp.where(good, mean, carried[0])
        covariance = jnp.where(good & jnp.all(jnp.isfinite(covariance)), covariance, wide)
        z, spread = updated(*_given(Normal(mean, covariance), at, row[3]), row)
        good = jnp.all(jnp.isfinite(z)) & jnp.all(jnp.isfinite(spread)) & space.coordinates.is_inside(z)
        z, spread = jnp.where(good, z, at), jnp.where(good, spread, wide)
        return (z, spread), (z, spread, mean, covariance, grow)

    given = (observations(space), incoming(space), pinned)
    _, (z, spread, mean, covariance, grow) = jax.lax.scan(ahead, (start, wide), given)

    def back(later: tuple[Array, ...], now: tuple) -> tuple[tuple[Array, ...], Array]:
        (shift, grow, covariance, first), (z, spread, mean, *rest) = later, now
        move = spread @ grow.T @ jnp.linalg.solve(covariance, shift)
        best = z + jnp.where(first | ~jnp.all(jnp.isfinite(move)), 0, move)
        best = jnp.where(space.coordinates.is_inside(best), best, z)
        return (best - mean, *rest), best

    zero = jnp.zeros(d), unit, unit, jnp.ones((), bool)
    return jax.lax.scan(back, zero, (z, spread, mean, grow, covariance, rows.first), reverse=True)[1]


class Search(eqx.Module):
    """The most likely states, by Newton's method. If a step fails, the positive eigenvalues of the Hessians
    of all terms are removed and Levenberg–Marquardt damping is added."""

    best: Expansion
    damping: Array
    next: Array  # (n, d)
    valid: Array  # whether there was an admissible step
    count: Array
    found: Array

    @staticmethod
    def mode(space: StateSpace, start: Array) -> "Search":
        """Search for the mode, from a sequence of coordinates `(n, d)`."""
        shapes = eqx.filter_eval_shape(lambda: Expansion.at(space, start))
        # A point outside the state space, with value −inf.
        nowhere = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        yes, no = jnp.ones((), bool), jnp.zeros((), bool)
        search = Search(nowhere, jnp.zeros(()), space.pinned(start), yes, jnp.zeros((), int), no)
        going = lambda search: ~search.found & (search.count < MAX_ITERATIONS)
        return jax.lax.while_loop(going, lambda search: search.step(space), search)

    def step(self, space: StateSpace) -> "Search":
        new = Expansion.at(space, self.next)
        finite = jnp.isfinite(new.value()) & jnp.all(jnp.isfinite(new.slope(space)))
        better = finite & (new.value() >= self.best.value() - SLACK[_single(self.next)])
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, self.best)
        less = jnp.where(self.damping > DAMPING, self.damping / FACTOR, 0)
        more = jnp.maximum(FACTOR * self.damping, DAMPING)
        damping = jnp.where(better & self.valid, less, more)
        chain, slope = best.chain(space, damping), best.slope(space)
        move = chain.backward(chain.forward(slope[..., None]))[..., 0]
        gain = 0.5 * jnp.sum(slope * move)
        valid = jnp.isfinite(gain)
        path = jnp.where(valid, best.path + move, best.path)
        found = better & valid & (damping == 0) & (gain < NEAR[_single(path)])
        return Search(best, damping, path, valid, self.count + 1, found)


def without_derivatives(space: StateSpace) -> StateSpace:
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, space)


def expansion_at_mode(space: StateSpace, start: Array) -> tuple[Expansion, Array]:
    """The expansion around the most likely states, and whether these states were found.

    The result is differentiable in the parameters by the implicit function theorem: one Newton step from the
    mode, which is held constant, carries the derivatives.
    """
    held = without_derivatives(space)
    search = jax.lax.stop_gradient(Search.mode(held, start))
    mode = search.best
    chain = mode.chain(held)
    at_mode = Expansion.at(space, space.pinned(mode.path))
    move = chain.backward(chain.forward(at_mode.slope(space)[..., None]))[..., 0]
    # The step is zero at these parameters, up to rounding, but has derivatives.
    move = move - jax.lax.stop_gradient(move)
    return eqx.tree_at(lambda one: one.path, at_mode, at_mode.path + move), search.found


def laplace_log_likelihood(space: StateSpace, mode: Expansion) -> Array:
    """Laplace's approximation of the log-likelihoods of all series."""
    rows, free = space.rows, jnp.sum(~space.rows.fixed, axis=1)
    own = mode.values - mode.chain(space).half_log_det() + 0.5 * jnp.log(2 * jnp.pi) * free
    own = own.at[rows.before].add(mode.steps)
    return by_series(rows, own)


MAX_TOGETHER = 2**22  # runs with more particles in total, summed over states, run one after another
REPLICATES = 8  # number of independent runs, from which the standard error is estimated
PARTICLES = 2048  # number of particles for filtered states and residuals
FIRST_WIDTH = 1.1  # standard deviation of draws of the first state, relative to that given all values
EVEN = 0.5  # particles are resampled if the fraction of effective ones is below this


def _single(array: Array) -> bool:
    return array.dtype == jnp.float32


def positive_part(matrix: Array) -> Array:
    """A symmetric matrix with its negative eigenvalues replaced by zero."""
    values, vectors = jnp.linalg.eigh(0.5 * (matrix + matrix.T))
    return (vectors * jnp.maximum(values, 0)[None]) @ vectors.T


class Guide(eqx.Module):
    """The density of later values given each state, approximated by exp(sᵀe − ½ eᵀBe) in the distance e to
    the most likely state; and the same approximation including the value at the state itself."""

    slope: Array  # (n, d)
    bend: Array  # (n, d, d), positive semidefinite
    all_slope: Array  # (n, d)
    all_bend: Array  # (n, d, d)

    @staticmethod
    def of(space: StateSpace, mode: Expansion, far: bool) -> "Guide":
        """Compute the guide by eliminating states from the last to the first. Without `far`, later values are
        ignored."""
        rows, (n, d) = space.rows, mode.path.shape
        linked = jnp.zeros(n, bool).at[rows.before].set(far)
        place = jnp.clip(jnp.cumsum(jnp.zeros(n, bool).at[rows.before].set(True)) - 1, 0)
        free = jnp.roll(~rows.fixed, -1, axis=0)
        items = (mode.own, mode.bends, mode.ties[place], mode.tie_bends[place], linked, free)

        def step(later: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], tuple]:
            (a, b), (own, bend, tie, tie_bend, linked, free) = later, now
            inner = jnp.where(free[:, None] & free[None], b - tie_bend[d:, d:], jnp.eye(d))
            factor = cholesky(inner)
            push = solve_lower(factor, jnp.where(free, a + tie[d:], 0))
            turn = solve_lower(factor, jnp.where(free[:, None], tie_bend[d:, :d], 0))
            slope, curve = tie[:d] + turn.T @ push, positive_part(-tie_bend[:d, :d] - turn.T @ turn)
            good = linked & jnp.all(jnp.isfinite(slope)) & jnp.all(jnp.isfinite(curve))
            slope, curve = jnp.where(good, slope, 0), jnp.where(good, curve, 0)
            whole = own + slope, positive_part(curve - bend)
            return whole, (slope, curve, *whole)

        zero = jnp.zeros(d), jnp.zeros((d, d))
        return Guide(*jax.lax.scan(step, zero, items, reverse=True)[1])


class Cloud(eqx.Module):
    """Particles at all states, their log-weights, and the indices of their ancestors; the log-density of each
    value given earlier values; and the probability of a smaller value."""

    z: Array  # (n, K, d)
    log_weight: Array  # (n, K)
    origin: Array  # (n, K)
    log_prob: Array  # (n,)
    uniform: Array  # (n,)


class Guided(eqx.Module):
    """A particle filter with normal proposals, which are proportional to the density of the next state of the
    SDE times the guide (twisted particle filters, Guarniero, Johansen & Lee 2017). For a linear model all
    weights are equal."""

    space: StateSpace
    mode: Expansion
    guide: Guide
    count: int = eqx.field(static=True)
    # The observed column whose probabilities are computed.
    column: int | None = eqx.field(static=True, default=None)

    def draw(self, normal: Normal, at: Array, fixed: Array, guide: tuple, white: Array) -> tuple:
        """A draw from the proposal given the known components, computed from standard normal draws `white`,
        and its log-density."""
        centre, slope, bend = guide
        unit = jnp.eye(len(at))
        mean, covariance = _given(normal, at, fixed)
        factor = cholesky(jnp.where(fixed[:, None] | fixed[None], unit, covariance))
        half = jnp.where(fixed[:, None] | fixed[None], 0, factor)
        root = cholesky(unit + half.T @ bend @ half)
        root = jnp.where(jnp.all(jnp.isfinite(root)), root, unit)
        pull = solve_lower(root, half.T @ (slope - bend @ (mean - centre)))
        drawn = mean + half @ solve_upper(root, pull + white)
        own = jnp.where(fixed, 0, jax.scipy.stats.norm.logpdf(white) - jnp.log(jnp.diag(factor)))
        return drawn, jnp.sum(own + jnp.log(jnp.diag(root)))

    def move(self, z: Array, white: Array, key: PRNGKeyArray, now: tuple) -> tuple[Array, Array, Array]:
        """The next state of one particle, its log-weight, and the probability of a smaller value."""
        row, (time, dt), at, begin, guide, before = now
        first, fixed, centre = row[5], row[3], guide[0]
        space = self.space
        step = space.normal(z, time, dt)
        normal = Normal(jnp.where(first, centre, step.mean), jnp.where(first, begin, step.covariance))
        tilt = centre, *(jnp.where(first, 0, part) for part in guide[3:])
        drawn, log_density = self.draw(normal, at, fixed, tilt, white)
        new = jnp.where(fixed, at, drawn)
        weight = space.observation(new, *row) - log_density + _quadratic(new, *guide[:3])
        gone = space.transition(z, new, time, dt, fixed) - _quadratic(z, *before)
        weight = weight + jnp.where(first, 0, gone)
        weight = jnp.where(space.coordinates.is_inside(new) & ~jnp.isnan(weight), weight, -jnp.inf)
        if self.column is None:
            return new, weight, jnp.zeros(())
        drawn = space.sample(z, time, dt, key)
        return new, weight, _below(space, step, drawn, row, at, self.column)

    def step(self, carried: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], tuple]:
        (z, log_w), (*given, key) = carried, now
        key_choice, key_move, key_next = jax.random.split(key, 3)
        share = jax.nn.softmax(log_w)
        uneven = jnp.sum(share**2) * self.count * EVEN > 1
        origin = jnp.where(uneven, systematic(share, jax.random.uniform(key_choice)), jnp.arange(self.count))
        z, log_w = z[origin], jnp.where(uneven, 0.0, log_w)
        white, keys = jax.random.normal(key_move, z.shape), jax.random.split(key_next, self.count)
        z, weight, uniform = jax.vmap(lambda *one: self.move(one[0], one[1], one[2], tuple(given)))(
            z, white, keys
        )
        # The probability of a smaller value is averaged with the weights from before the observed value.
        share = jnp.where(jnp.isnan(uniform), 0, jnp.exp(log_w))
        uniform = jnp.sum(jnp.where(share > 0, share * uniform, 0)) / jnp.sum(share)
        weight = weight + jnp.where(given[0][5], 0, log_w)
        mean = jax.nn.logsumexp(weight) - jnp.log(self.count)
        log_w = jnp.where(jnp.isfinite(mean), weight - mean, 0)
        return (z, log_w), (z, log_w, origin, mean, uniform)

    def run(self, key: PRNGKeyArray) -> Cloud:
        space, mode = self.space, self.mode
        n, d = mode.path.shape
        times = incoming(space)
        back = lambda a: jnp.concatenate([a[:1], a[:-1]])
        guide = (mode.path, *jax.tree.leaves(self.guide))
        before = tuple(back(part) for part in guide[:3])
        begin = FIRST_WIDTH**2 * mode.chain(space).variances()
        given = (observations(space), times, space.pinned(mode.path), begin, guide, before)
        start = jnp.broadcast_to(mode.path[:1], (self.count, d)), jnp.zeros(self.count)
        _, shown = jax.lax.scan(lambda *now: self.step(*now), start, (*given, jax.random.split(key, n)))
        return Cloud(*shown)


def guided_log_likelihood(
    space: StateSpace, mode: Expansion, key: PRNGKeyArray, count: int
) -> tuple[Array, Array]:
    """The log-likelihoods of all series and their standard errors, by runs of `count` guided particles."""
    guided = Guided(space, mode, Guide.of(space, mode, True), count)
    run = lambda key: by_series(space.rows, guided.run(key).log_prob)
    logs = _replicated(run, key, mode.path, count)
    value = jax.nn.logsumexp(logs, axis=0) - np.log(REPLICATES)
    return value, jnp.std(jnp.exp(logs - value[None]), axis=0, ddof=1) / np.sqrt(REPLICATES)


def _replicated(run: Callable[[PRNGKeyArray], Any], key: PRNGKeyArray, path: Array, count: int) -> Any:
    """The results of independent runs, which run one after another if they need much memory."""
    together = len(path) * count * REPLICATES <= MAX_TOGETHER
    return jax.lax.map(run, jax.random.split(key, REPLICATES), batch_size=REPLICATES if together else 1)


def by_series(rows: Rows, logs: Array) -> Array:
    """Sums over the states of each series."""
    return jnp.zeros(rows.count).at[rows.series].add(logs)


def smoothed_by_particles(
    space: StateSpace, mode: Expansion, key: PRNGKeyArray, count: int
) -> tuple[Array, Array]:
    """Means and standard deviations `(n, d)` of the states given all values."""
    guided, rows = Guided(space, mode, Guide.of(space, mode, True), count), space.rows
    last = jnp.append(rows.first[1:], True)

    def moments(key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        cloud = guided.run(key)
        x = jax.vmap(jax.vmap(space.coordinates.to_state))(cloud.z)

        def back(later: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], tuple]:
            (place, weight), (x, log_w, origin, last) = later, now
            place = jnp.where(last, jnp.arange(count), place)
            weight = jnp.where(last, jax.nn.softmax(log_w), weight)
            mine = x[place]
            return (origin[place], weight), (weight @ mine, weight @ mine**2)

        start = jnp.arange(count), jnp.zeros(count)
        items = (x, cloud.log_weight, cloud.origin, last)
        mean, square = jax.lax.scan(back, start, items, reverse=True)[1]
        return mean, square, by_series(rows, cloud.log_prob)

    mean, square, logs = _replicated(moments, key, mode.path, count)
    share = jax.nn.softmax(logs, axis=0)[:, rows.series, None]
    mean, square = jnp.sum(share * mean, axis=0), jnp.sum(share * square, axis=0)
    return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0))


def incoming(space: StateSpace) -> tuple[Array, Array]:
    """Start times and durations `(n,)` of the transitions into all states. The first state of a series is
    assigned those of an arbitrary transition."""
    link = jnp.clip(jnp.cumsum(~space.rows.first) - 1, 0)
    return space.rows.times[space.rows.before][link], space.rows.dt[link]


def _quadratic(z: Array, centre: Array, slope: Array, bend: Array) -> Array:
    move = z - centre
    return slope @ move - 0.5 * move @ bend @ move


def _given(normal: Normal, at: Array, fixed: Array) -> tuple[Array, Array]:
    """The mean and covariance of a normal vector given that its components in the mask `fixed` have the
    values in `at`."""
    mask = fixed.astype(at.dtype)
    inner = mask[:, None] * mask[None] * normal.covariance + jnp.diag(1 - mask)
    # Known components of the first state may have zero variance; they contain no information.
    inner = inner + jnp.diag(jnp.where(jnp.diag(inner) > 0, 0.0, 1.0))
    factor = cholesky(inner)
    half = solve_lower(factor, mask[:, None] * normal.covariance)
    gap = solve_lower(factor, mask * (at - normal.mean))
    return normal.mean + half.T @ gap, normal.covariance - half.T @ half


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
