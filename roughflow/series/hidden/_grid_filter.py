"""The filter for a series with one hidden component, on a moving grid.

If all other components are observed exactly, or there are none, the density of the hidden component given the
values so far is a function of one variable. Its values at the nodes of a window that moves with the series
are updated by the midpoint rule: predict with the density of a step, and multiply by the density of the value
(Kitagawa 1987). The windows come from pilot runs of the same filter and its backward pass, with a kernel
widened to the spacing of the nodes. After each run, the windows are fitted to the range of the states given
all values.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._linear import cholesky, solve_lower
from ..._programs import in_double_precision, jit
from ._particles import incoming, observations
from ._state_space import Rows, StateSpace

EULER, BRIDGE, EXACT, PILOT = "euler", "bridge", "exact", "pilot"
SPACING = 1.1  # spacing of the nodes, in standard deviations of a step
SIZES = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # few sizes, so that programs are reused
PILOT_SIZE = 96
TAIL = 1e-9  # probability outside a window, on each side
MARGIN = 1.25  # width of a window, relative to the range of the states
ROUNDS = 12  # maximum number of rounds of the pilot
ACROSS = 16  # number of nodes for each observed component at times between its values
REACH = 5.0  # range of these nodes on each side, in standard deviations
FLOOR = 1e-3  # minimum variance given the hidden component after a step, relative to that of the step


class Mesh(eqx.Module):
    """Windows of the hidden component in coordinates, each with `size` nodes. The `scheme` takes `steps`
    steps from one state to the next, with `across` nodes for each observed component at times in between."""

    low: Array  # (n,)
    high: Array  # (n,)
    component: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    steps: int = eqx.field(static=True)
    scheme: str = eqx.field(static=True)
    across: int = eqx.field(static=True, default=ACROSS)

    def finer(self) -> "Mesh":
        """A mesh whose nodes are 1.5 times as dense, in windows that are 20 % wider."""
        wide = 0.1 * (self.high - self.low)
        return dataclasses.replace(
            self,
            low=self.low - wide,
            high=self.high + wide,
            size=int(np.ceil(1.8 * self.size)),
            across=int(np.ceil(1.5 * self.across)),
        )

    def with_steps(self, steps: int) -> "Mesh":
        """A mesh with another number of steps. With more steps, each has less noise and needs more nodes."""
        size = int(np.ceil(self.size * max(steps / self.steps, 1) ** 0.5))
        return dataclasses.replace(self, steps=steps, size=size)

    def nodes(self, low: Array, high: Array) -> Array:
        """The midpoints of `size` equal cells between `low` and `high`."""
        part = (jnp.arange(self.size) + 0.5) / self.size
        part = jnp.reshape(part, (1,) * low.ndim + part.shape)
        return low[..., None] + (high - low)[..., None] * part


class Points(eqx.Module):
    """Quadrature nodes `z` `(N, d)` for the state, in coordinates, with the logarithms of their weights;
    `same` indicates whether the observed components are the same at all nodes."""

    z: Array
    log_weight: Array  # (N,)
    noise: Array  # (N, d, d), for the scheme `bridge`: σσᵀ with the observed components at the step's start
    same: bool = eqx.field(static=True)


class Filter(eqx.Module):
    """The hidden component on the grid: nodes `(n, m)`, their log-probabilities `ahead` `(n, m)` given
    earlier values and `now` `(n, m)` given the values so far, and the log-density of each value given earlier
    values."""

    nodes: Array
    ahead: Array
    now: Array
    log_prob: Array


def _conditional(mean: Array, covariance: Array, i: int) -> tuple[Array, Array, Array, Array]:
    """The distribution of component i of a normal vector given the others: slopes, mean, standard deviation,
    and the Cholesky factor of the covariance of the others."""
    if len(mean) == 1:
        return jnp.zeros(0), mean[0], jnp.sqrt(covariance[0, 0]), jnp.zeros((0, 0))
    others = np.delete(np.arange(len(mean)), i)
    factor = cholesky(covariance[np.ix_(others, others)])
    half = solve_lower(factor, covariance[others, i])
    deviation = jnp.sqrt(jnp.maximum(covariance[i, i] - jnp.sum(half**2), 0))
    return half, mean[i], deviation, factor


def _normal(value: Array, deviation: Array) -> Array:
    return -0.5 * (value / deviation) ** 2 - jnp.log(deviation) - 0.5 * float(np.log(2 * np.pi))


class Kernel(eqx.Module):
    """The log-density of one step between nodes, in coordinates.

    `euler`: normal in the state. `pilot`: normal in coordinates, widened by `wide`. `exact`: the density of
    the SDE. `bridge`: the hidden component is normal with the moments of a second-order step; given its
    values at both ends, the other components are normal, with noise averaged over the Brownian bridge between
    these values. For Heston's SDE, the conditional variance of the price is then (V₀ + V₁)/2 up to O(dt²),
    not V₀.
    """

    space: StateSpace
    i: int = eqx.field(static=True)
    scheme: str = eqx.field(static=True)

    def __call__(self, source: Array, target: Points, time: Array, dt: Array, wide: Array) -> Array:
        """The log-density from one node to all nodes of the target, `(N,)`."""
        others = np.delete(np.arange(len(source)), self.i)
        h, o = target.z[:, self.i], target.z[:, others]
        if self.scheme == BRIDGE:
            one, noise = self._bridge(source, time, dt), target.noise
            if target.same:
                return jax.vmap(one, in_axes=(0, None, 0))(h, o[0], noise)
            return jax.vmap(one)(h, o, noise)
        if self.scheme == EXACT:
            none = jnp.zeros(len(source), bool)
            one = lambda h, o: self.space.transition(source, self._state(h, o), time, dt, none)
        else:
            one = self._joint(source, time, dt, wide)
        return jax.vmap(one, in_axes=(0, None))(h, o[0]) if target.same else jax.vmap(one)(h, o)

    def _state(self, h: Array, o: Array) -> Array:
        return jnp.insert(o, self.i, h)

    def _joint(self, source: Array, time: Array, dt: Array, wide: Array) -> Any:
        """The joint normal density: that of the observed components, times that of the hidden component given
        them."""
        space, i = self.space, self.i
        euler = self.scheme == EULER
        others = np.delete(np.arange(len(source)), i)
        if euler:
            step = space.euler_step(source, time, dt)
            mean, covariance = step.mean, step.covariance
        else:
            step = space.step(source, time, dt)
            mean, covariance = step.mean, step.covariance.at[i, i].add(wide**2)
        half, middle, deviation, factor = _conditional(mean, covariance, i)
        # If the hidden component has no noise given the others, its density has a peak that no grid resolves.
        deviation = jnp.maximum(deviation, 1e-12)

        def log_prob(h: Array, o: Array) -> Array:
            target = self._state(h, o)
            x = space.coordinates.to_state(target) if euler else target
            gap = solve_lower(factor, (x - mean)[others]) if len(others) else x[:0]
            own = jnp.sum(jax.scipy.stats.norm.logpdf(gap) - jnp.log(jnp.diag(factor)))
            volume = jnp.sum(jnp.log(space.slopes(x))) if euler else 0.0
            return own + _normal(x[i] - middle - half @ gap, deviation) - volume

        return log_prob

    def noise(self, z: Array, time: Array) -> Array:
        sigma = self.space.fields(time, z)[1]
        return sigma @ sigma.T

    def _bridge(self, source: Array, time: Array, dt: Array) -> Any:
        space, i, d = self.space, self.i, len(source)
        others, middle = np.delete(np.arange(d), i), time + 0.5 * dt
        step = space.step(source, time, dt)
        mean, covariance, start = step.mean, step.covariance, source[i]
        variance = jnp.maximum(covariance[i, i], 1e-24)
        deviation = jnp.sqrt(variance)
        if d == 1:
            return lambda h, o, noise: _normal(h - mean[i], deviation)
        at = lambda h: self.noise(source.at[i].set(h), middle)
        here = at(start)
        bend = (at(start + deviation) + at(start - deviation) - 2 * here) / variance

        # Scalars instead of small matrices let XLA fuse the operations over all pairs of nodes.
        def given(h: Array, noise: Array) -> tuple[list[Array], list[list[Array]]]:
            """Slopes of the observed components with respect to the hidden one, and their covariance given
            the hidden one."""
            # The mean of a quadratic function over the Brownian bridge between both ends.
            rest = (variance - (h - start) ** 2) / 12
            whole = lambda a, b: (
                covariance[a, b] + dt * (0.5 * (noise[a, b] - here[a, b]) + bend[a, b] * rest)
            )
            own = jnp.maximum(whole(i, i), 0.1 * variance)
            ties = [whole(a, i) for a in others]
            least = lambda a, b: FLOOR * covariance[a, b] if a == b else -jnp.inf
            pairs = list(zip(others, ties, strict=True))
            cut = lambda a, tie, b, tie_b: jnp.maximum(whole(a, b) - tie * tie_b / own, least(a, b))
            left = [[cut(a, tie, b, tie_b) for b, tie_b in pairs] for a, tie in pairs]
            return [tie / own for tie in ties], left

        # E[slopes · (h − mean)] is subtracted, so that the observed components have the mean of the step.
        ends = [mean[i] + side * deviation for side in (-1, 1)]
        low, high = (jnp.stack(given(h, at(h))[0]) for h in ends)
        shift = mean[others] - 0.5 * deviation * (high - low)

        def log_prob(h: Array, o: Array, noise: Array) -> Array:
            slopes, spread = given(h, noise)
            gap = h - mean[i]
            rest = [o[k] - shift[k] - slope * gap for k, slope in enumerate(slopes)]
            if d == 2:
                own = _normal(rest[0], jnp.sqrt(spread[0][0]))
            else:
                factor = cholesky(jnp.stack([jnp.stack(row) for row in spread]))
                white = solve_lower(factor, jnp.stack(rest))
                own = jnp.sum(jax.scipy.stats.norm.logpdf(white) - jnp.log(jnp.diag(factor)))
            return own + _normal(gap, deviation)

        return log_prob


def grid_filter(space: StateSpace, mesh: Mesh) -> Filter:
    """The filter of all series."""
    return _scan(space, mesh, backward=False)[0]


def grid_smoother(space: StateSpace, mesh: Mesh) -> tuple[Filter, Array]:
    """The filter, and log-probabilities `(n, m)` of the nodes given all values."""
    return _scan(space, mesh, backward=True)


class Window(eqx.Module):
    """The nodes of one state. `at` `(d,)` contains the coordinates of the observed components. If the hidden
    component is `known`, as at the first time, all nodes have its value."""

    at: Array
    nodes: Array  # (m,)
    known: Array
    low: Array
    high: Array


class Steps(eqx.Module):
    """The nodes and kernels from one value to the next."""

    space: StateSpace
    mesh: Mesh

    @property
    def kernel(self) -> Kernel:
        return Kernel(self.space, self.mesh.component, self.mesh.scheme)

    def points(self, window: Window) -> Points:
        """The quadrature nodes of a state, with their weights."""
        m, i, d = self.mesh.size, self.mesh.component, len(window.at)
        z = jnp.broadcast_to(window.at, (m, d)).at[:, i].set(window.nodes)
        inside = jax.vmap(self.space.coordinates.is_inside)(z)
        z = jnp.where(inside[:, None], z, z[m // 2][None])
        only = jnp.where(jnp.arange(m) == 0, 0.0, -jnp.inf)
        weight = jnp.where(window.known, only, jnp.log((window.high - window.low) / m))
        return Points(z, jnp.where(inside, weight, -jnp.inf), jnp.zeros(()), True)

    def spread(self, z: Array, time: Array, dt: Array) -> Array:
        """Standard deviations of all components after a step."""
        return jnp.sqrt(jnp.diag(self.space.step(z, time, dt).covariance))

    def between(self, part: float, start: Window, end: Window, time: Array, dt: Array) -> Points:
        """Nodes inside a step: the product of nodes of the hidden component and nodes of the observed
        components, which are placed around the line between their values."""
        i, root = self.mesh.component, float(np.sqrt(part * (1 - part)))
        line = (1 - part) * start.at + part * end.at
        mid = jnp.where(start.known, start.at, start.at.at[i].set(0.5 * (start.low + start.high)))
        room = REACH * root * self.spread(mid, time, dt)[i]
        low, high = (jnp.where(start.known, start.at[i], one) for one in (start.low, start.high))
        low = (1 - part) * low + part * end.low - room
        high = (1 - part) * high + part * end.high + room
        no = jnp.zeros((), bool)
        inner = self.points(Window(line, self.mesh.nodes(low, high), no, low, high))
        others = np.delete(np.arange(len(line)), i)
        if not len(others):
            return inner
        unit = REACH * (2 * (jnp.arange(self.mesh.across) + 0.5) / self.mesh.across - 1)
        moves = jnp.meshgrid(*[unit] * len(others), indexing="ij")
        moves = jnp.stack(moves, axis=-1).reshape(-1, len(others))
        wide = root * jax.vmap(lambda z: self.spread(z, time, dt)[others])(inner.z)
        z = jnp.repeat(inner.z[:, None], len(moves), axis=1)
        z = z.at[:, :, others].add(wide[:, None] * moves[None])
        cell = jnp.sum(jnp.log(wide * (unit[1] - unit[0])), axis=1)
        weight = jnp.repeat((inner.log_weight + cell)[:, None], len(moves), axis=1)
        return Points(z.reshape(-1, len(line)), weight.reshape(-1), jnp.zeros(()), False)

    def stages(self, start: Window, end: Window, time: Array, dt: Array) -> tuple[list[Points], list[Array]]:
        """All nodes from one value to the next, and the logarithms of the kernels between them."""
        i, k = self.mesh.component, self.mesh.steps
        inner = [self.between(s / k, start, end, time, dt) for s in range(1, k)]
        every = [self.points(start), *inner, self.points(end)]
        if self.mesh.scheme == BRIDGE:
            noise = lambda z: self.kernel.noise(start.at.at[i].set(z[i]), time + 0.5 * dt)
            every = [dataclasses.replace(one, noise=jax.vmap(noise)(one.z)) for one in every]
        h, wide = dt / k, (start.high - start.low) / self.mesh.size

        def logs(s: int) -> Array:
            found = jax.vmap(lambda z: self.kernel(z, every[s + 1], time + s * h, h, wide))(every[s].z)
            return jnp.where(jnp.isnan(found), -jnp.inf, found)

        return every, [logs(s) for s in range(k)]

    def own(self, target: Points, row: tuple, at: Array) -> Array:
        """Log-densities of a value at the nodes of its state. For exactly observed components, densities of
        coordinates are converted to densities of the state."""
        slopes = jnp.log(self.space.slopes(self.space.coordinates.to_state(at)))
        others = np.arange(len(at)) != self.mesh.component
        volume = jnp.where(row[5], 0, jnp.sum(jnp.where(row[3] & others, slopes, 0)))
        value = jax.vmap(lambda z: self.space.observation(z, *row))(target.z) + volume
        return jnp.where(jnp.isnan(value), -jnp.inf, value)

    def ahead(self, log_now: Array, item: tuple) -> tuple[Array, tuple]:
        """Predict the next state, then update with its value."""
        start, end, row, time, dt = item
        every, kernels = self.stages(start, end, time, dt)
        log_ahead = log_now
        for target, logs in zip(every[1:], kernels, strict=True):
            log_ahead = _log_sum(log_ahead[:, None] + logs) + target.log_weight
        log_ahead = jnp.where(row[5], every[-1].log_weight, log_ahead)
        joint = log_ahead + self.own(every[-1], row, end.at)
        total = _log_sum(joint[:, None])[0]
        return joint - total, (log_ahead, joint - total, total)

    def back(self, later: Array, item: tuple) -> tuple[Array, Array]:
        """Take one step backwards in time: compute the log-density of later values given each node of the
        previous state, up to a constant."""
        start, end, row, time, dt = item
        every, kernels = self.stages(start, end, time, dt)
        left = later + self.own(every[-1], row, end.at)
        for target, logs in zip(every[:0:-1], kernels[::-1], strict=True):
            left = _log_sum((left + target.log_weight)[:, None] + logs.T)
        return jnp.where(row[5], 0.0, left - jnp.max(left)), later


def _scan(space: StateSpace, mesh: Mesh, backward: bool) -> tuple[Filter, Any]:
    rows, i = space.rows, mesh.component
    path = space.pinned(jnp.zeros(rows.fixed.shape))
    known = rows.fixed[:, i]
    nodes = jnp.where(known[:, None], path[:, i, None], mesh.nodes(mesh.low, mesh.high))
    here = Window(path, nodes, known, mesh.low, mesh.high)
    before = jax.tree.map(lambda a: jnp.concatenate([a[:1], a[:-1]]), here)
    items = (before, here, observations(space), *incoming(space))
    steps, zero = Steps(space, mesh), jnp.zeros(mesh.size)
    _, (ahead, now, total) = jax.lax.scan(lambda *now: steps.ahead(*now), zero, items)
    found = Filter(nodes, ahead, now, total)
    if not backward:
        return found, None
    _, later = jax.lax.scan(lambda *now: steps.back(*now), zero, items, reverse=True)
    joint = now + later
    return found, joint - jax.nn.logsumexp(joint, axis=1, keepdims=True)


def _log_sum(logs: Array) -> Array:
    """log Σ exp over the first axis, with zero derivatives if all terms are zero."""
    top = jax.lax.stop_gradient(jnp.max(logs, axis=0))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(logs - top[None]), axis=0)
    return jnp.log(jnp.maximum(total, jnp.finfo(total.dtype).tiny)) + top


def hidden_component(rows: Rows) -> int | None:
    """The index of the only component of the state that may be hidden, or None if there are several."""
    free = np.asarray(~rows.fixed).any(axis=0)
    return int(np.argmax(free)) if free.sum() == 1 else None


@functools.partial(jit, level=1)
def grid_uniform(space: StateSpace, mesh: Mesh, column: int) -> Array:
    """For one column, the probability `(n,)` of a value below the observed one given earlier values; 0 where
    a series begins."""
    found = grid_filter(space, mesh)
    rows, i = space.rows, mesh.component
    path = space.pinned(jnp.zeros(rows.fixed.shape))
    back = lambda a: jnp.concatenate([a[:1], a[:-1]])

    def exact(at: Array, end: Array, nodes: Array, chance: Array, time: Array, dt: Array) -> Array:
        def below(h: Array) -> Array:
            z = at.at[i].set(h)
            if mesh.scheme == EULER:
                step, value = space.euler_step(z, time, dt), space.coordinates.to_state(end)[column]
            else:
                step, value = space.step(z, time, dt), end[column]
            deviation = jnp.sqrt(step.covariance[column, column])
            return jax.scipy.stats.norm.cdf(value, step.mean[column], deviation)

        return _mean(chance, jax.vmap(below)(nodes))

    def noisy(at: Array, nodes: Array, chance: Array, row: tuple) -> Array:
        time, value, seen, _, error, _ = row

        def below(h: Array) -> Array:
            x = space.coordinates.to_state(at.at[i].set(h))
            if space.observe is None:
                return jax.scipy.stats.norm.cdf(value[column], x[column], error[column])
            drawn = space.observe(time, x)
            if not hasattr(drawn, "cdf"):
                return jnp.full((), jnp.nan)
            return jnp.ravel(drawn.cdf(jnp.where(seen, value, 1.0)))[column]

        return _mean(chance, jax.vmap(below)(nodes))

    if space.observe is None and space.deviations() is None:
        given = (back(path), path, back(found.nodes), back(found.now))
        uniform = jax.vmap(exact)(*given, *incoming(space))
    else:
        uniform = jax.vmap(noisy)(path, found.nodes, found.ahead, observations(space))
    return jnp.where(rows.first, 0.0, uniform)


def _mean(chance: Array, values: Array) -> Array:
    share = jax.nn.softmax(chance)
    return jnp.sum(jnp.where(share > 0, share * values, 0))


@functools.partial(jit, level=1)
def _pilot(space: StateSpace, mesh: Mesh) -> tuple[Array, Array, Array]:
    """Lower and upper ends of the ranges of the states given all values, `(n,)` each, and whether the ranges
    reach the ends of the windows, `(n, 2)`."""
    found, logs = grid_smoother(space, mesh)
    share = jnp.cumsum(jnp.exp(logs), axis=1)
    spacing = (mesh.high - mesh.low) / mesh.size
    first, last = jnp.argmax(share > TAIL, axis=1), jnp.argmax(share > 1 - TAIL, axis=1)
    at = lambda place: jnp.take_along_axis(found.nodes, place[:, None], axis=1)[:, 0]
    reached = jnp.stack([first == 0, last >= mesh.size - 1], axis=1)
    return at(first) - spacing, at(last) + spacing, reached & ~space.rows.fixed[:, mesh.component, None]


@functools.partial(jit, level=1)
def _deviations(space: StateSpace, mesh: Mesh, scheme: str) -> Array:
    """Standard deviations `(n, 3)` of the hidden component, given the observed ones, after a step from the
    middle of the window and from the points halfway between the middle and both ends."""
    i, path, (time, dt) = mesh.component, space.pinned(jnp.zeros(space.rows.fixed.shape)), incoming(space)

    def one(at: Array, low: Array, high: Array, time: Array, dt: Array, part: float) -> Array:
        z = at.at[i].set(low + part * (high - low))
        if scheme == EULER:
            step, slope = space.euler_step(z, time, dt), space.slopes(space.coordinates.to_state(z))[i]
        else:
            step, slope = space.step(z, time, dt), 1.0
        return slope * _conditional(step.mean, step.covariance, i)[2]

    given = path, mesh.low, mesh.high, time, dt / mesh.steps
    every = lambda part: jax.vmap(functools.partial(one, part=part))(*given)
    return jnp.stack([every(part) for part in (0.25, 0.5, 0.75)], axis=1)


def fitted_mesh(space: StateSpace, component: int, scheme: str, steps: int, guess: np.ndarray) -> Mesh:
    """A mesh that covers the states given all values; the search for it starts from wide windows around
    `guess` `(n,)`."""
    low, high, size = _windows(space, component, scheme, steps, guess)
    return Mesh(jnp.asarray(low, float), jnp.asarray(high, float), component, size, steps, scheme)


@in_double_precision
def _windows(
    space: StateSpace, component: int, scheme: str, steps: int, guess: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Lower and upper ends of the windows, `(n,)` each, and the number of nodes."""
    double = lambda leaf: jnp.asarray(np.asarray(leaf), float) if eqx.is_inexact_array(leaf) else leaf
    space, guess = jax.tree.map(double, space), np.asarray(guess, float)
    ends = space.coordinates.ends
    least, most = ends[component if len(ends) > 1 else 0]
    clip = lambda low, high: (jnp.asarray(np.maximum(low, least)), jnp.asarray(np.minimum(high, most)))
    of = lambda low, high: Mesh(*clip(low, high), component, PILOT_SIZE, 1, PILOT)
    n = len(guess)
    spread = np.asarray(_deviations(space, of(guess, guess), PILOT))[:, 1]
    spread = np.nanmedian(spread) * np.sqrt(n)
    low, high = guess - 4 * spread, guess + 4 * spread
    known = np.asarray(space.rows.fixed[:, component])
    for _ in range(ROUNDS):
        mesh = of(low, high)
        new_low, new_high, reached = (np.asarray(part) for part in _pilot(space, mesh))
        low, high = np.asarray(mesh.low), np.asarray(mesh.high)
        width = high - low
        wide = 0.5 * (MARGIN - 1) * (new_high - new_low)
        new_low = np.where(reached[:, 0] & (low > least), low - 0.5 * width, new_low - wide)
        new_high = np.where(reached[:, 1] & (high < most), high + 0.5 * width, new_high + wide)
        new_low, new_high = np.where(known, low, new_low), np.where(known, high, new_high)
        change = np.max(np.abs(np.log(new_high - new_low) - np.log(width)))
        low, high = new_low, new_high
        if change < 0.2:
            break
    mesh = dataclasses.replace(of(low, high), steps=steps, scheme=scheme)
    deviation = np.nanmin(np.asarray(_deviations(space, mesh, scheme)), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (high - low) / deviation / SPACING
    wanted = np.nanquantile(np.where(np.isfinite(ratio), ratio, np.nan), 0.999)
    low, high = np.asarray(mesh.low), np.asarray(mesh.high)
    return low, high, next((size for size in SIZES if size >= wanted), SIZES[-1])
