"""A partially observed series as a state-space model: a Markov chain of states, and densities of the values.

The states x are those of the SDE at the times of the series, at the knots of the inputs, and at additional
times, so that each step is short. A component of the state is fixed where it is observed exactly.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._checks import check_callable
from ...sde import AbstractItoSDE, AbstractSDE, noise_matrix
from ...transition import AbstractCoordinates, Unchanged
from .._observed import DATES, ZONED, Observed, Times, as_columns
from ..models import AbstractDistribution, AbstractNamedSDE, Normal, Transformed, exact_transition

STATIONARY = "stationary"
LONGEST = 20  # maximum number of steps between two values, relative to `num_steps`
SUBSTEPS = 2  # substeps of the ODE for the moments of a step
CLAMPED = 400  # number of steps towards the equilibrium of the hidden components


class Inputs(eqx.Module):
    """Inputs u(t) `(m,)` from a table: constant from one time to the next or, with `held=False`, interpolated
    linearly. The last inputs are used for all later times, as in forecasts.

    ```python
    import numpy as np
    import roughflow as rf

    current = rf.series.Inputs(np.array([0.0, 1.0, 2.0]), np.array([0.0, 0.5, 0.0]), held=False)
    current(0.5)  # [0.25]
    ```
    """

    times: Array | np.ndarray  # (K,); the method `since` converts dates to years
    columns: Array | np.ndarray  # (K, m)
    held: bool = eqx.field(static=True, default=True)

    def __init__(self, times: Any, columns: Any, held: bool = True):
        self.times = np.asarray(times) if not isinstance(times, jax.Array) else times
        self.columns = columns if isinstance(columns, jax.Array) else as_columns(columns)
        self.held = held
        if len(self.times) != len(self.columns):
            raise ValueError(
                f"inputs must have shapes (K,) and (K, m), got {self.times.shape} and {self.columns.shape}"
            )

    def __call__(self, t: Array) -> Array:
        columns = jnp.asarray(self.columns, float)
        if self.held:
            place = jnp.searchsorted(self.times, t, side="right") - 1
            return columns[jnp.clip(place, 0, len(self.times) - 1)]
        return jax.vmap(lambda column: jnp.interp(t, self.times, column), in_axes=1)(columns)

    def since(self, series: Sequence[Observed]) -> "Inputs":
        """The inputs with their times converted to floats, on the time scale of the series."""
        return Inputs(jnp.asarray(self.numbers(series), float), self.columns, self.held)

    def numbers(self, series: Sequence[Observed]) -> np.ndarray:
        """The times as floats, on the time scale of the series. Raise an error if they do not cover the
        series."""
        given, kind = Times.of(self.times), series[0].kind
        if (given.kind in (DATES, ZONED)) != (kind in (DATES, ZONED)):
            raise ValueError(f"times of the inputs are {given.kind}, but those of the series are {kind}")
        times = given.since(series[0].origin)
        if not np.isfinite(np.asarray(self.columns)).all() or not (np.diff(times) > 0).all():
            raise ValueError("inputs must be finite, and their times must increase")
        first, last = min(one.times[0] for one in series), max(one.times[-1] for one in series)
        if times[0] > first or times[-1] < last:
            raise ValueError(
                f"inputs must cover the series: they are given from time {times[0]:g} to {times[-1]:g}, "
                f"but must be given from {first:g} to {last:g}"
            )
        return times

    @staticmethod
    def of(inputs: Any) -> Any:
        """Convert times and columns to `Inputs`; return `Inputs` or a function of time unchanged."""
        if isinstance(inputs, tuple | list) and len(inputs) == 2:
            return Inputs(*inputs)
        if not isinstance(inputs, Inputs):
            check_callable("inputs", inputs, "of time, or times and columns")
        return inputs


class Driven(AbstractItoSDE):
    """An SDE with inputs, dX = μ(t, X, u(t)) dt + σ(t, X, u(t)) dB."""

    sde: Any
    inputs: Callable[[Array], Array]

    def drift(self, t: Array, z: Array) -> Array:
        return self.sde.drift(t, z, self.inputs(t))

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sde.diffusion(t, z, self.inputs(t))


def driven_by(sde: Any, inputs: Callable[[Array], Array]) -> Driven:
    """The SDE driven by the inputs u(t)."""
    return Driven(sde=sde, inputs=inputs)  # pyright: ignore[reportCallIssue]


class Estimated(eqx.Module):
    """Treat the hidden components at the first time as parameters, with the given starting values.

    ```python
    import roughflow as rf

    initial = rf.series.Estimated([0.04])
    ```
    """

    value: Array

    def __init__(self, value: Any):
        self.value = jnp.atleast_1d(jnp.asarray(value, float))

    def __call__(self, sde: Any) -> Array:
        return self.value


class Rows(eqx.Module):
    """The states of all series, concatenated, and their observations."""

    values: Array  # (n, c), 0 where missing
    seen: Array  # (n, c)
    fixed: Array  # (n, d), components of the state that are known exactly
    errors: Array | None  # (n, c), known standard deviations of the measurement errors
    first: Array  # (n,), whether a series begins here
    series: Array  # (n,), index of the series
    times: Array  # (n,)
    before: Array  # (N,), index of the state that each transition starts from
    dt: Array  # (N,)
    given: np.ndarray  # (k,), indices of the states at the times of the series
    count: int = eqx.field(static=True)  # number of series


class StateSpace(eqx.Module):
    """The joint density of values and states, in the coordinates of the SDE.

    `observe` maps a time and a state to the distribution of a value. Without `observe`, values are components
    of the state; if `noise` is not None, they have normal errors with that standard deviation. `initial`
    describes the unobserved components of the first state, whose indices are `unknown`: None (a flat prior),
    values, a distribution, or a function of the SDE.
    """

    sde: AbstractSDE
    coordinates: AbstractCoordinates
    observe: Callable | None
    noise: Array | None  # (c,)
    initial: Any
    rows: Rows
    unknown: tuple[int, ...] = eqx.field(static=True)
    exact: bool = eqx.field(static=True)
    euler: bool = eqx.field(static=True)

    def start(self) -> Any:
        """The unobserved components of the first state: None (a flat prior), values `(u,)`, or a
        distribution."""
        found = self.initial
        if isinstance(found, str):
            inner = self.sde.sde if isinstance(self.sde, Driven) else self.sde
            return stationary(inner, self.fields, self.rows.times[0], self.rows.fixed.shape[1], self.unknown)
        if callable(found) and not hasattr(found, "log_prob"):
            found = found(self.sde.sde if isinstance(self.sde, Driven) else self.sde)
        return found if found is None or hasattr(found, "log_prob") else jnp.ravel(jnp.asarray(found))

    def deviations(self) -> Array | None:
        """Standard deviations `(n, c)` of the measurement errors; None if values are exact."""
        if self.rows.errors is not None or self.noise is None:
            return self.rows.errors
        return jnp.broadcast_to(self.noise, self.rows.values.shape)

    def pinned(self, path: Array) -> Array:
        """The sequence of coordinates `path` `(n, d)` with known components set to their known values."""
        (n, d), rows = path.shape, self.rows
        x = jax.vmap(self.coordinates.to_state)(path)
        known = rows.values if self.observe is None else jnp.zeros((n, 0))
        known = jnp.concatenate([known, x[:, known.shape[1] :]], axis=1)[:, :d]
        start = self.start()
        if start is not None and not hasattr(start, "log_prob"):
            placed = jnp.zeros(d).at[np.array(self.unknown, int)].set(start)
            hidden = np.isin(np.arange(d), self.unknown)
            known = jnp.where(rows.first[:, None] & hidden[None], placed[None], known)
        return jnp.where(
            rows.fixed, jax.vmap(self.coordinates.from_state)(jnp.where(rows.fixed, known, x)), path
        )

    def observation(
        self, z: Array, time: Array, value: Array, seen: Array, fixed: Array, error: Array, first: Array
    ) -> Array:
        """Log-density of one value given the coordinates of its state. If the state is the first of a series,
        its log prior is added."""
        x = self.coordinates.to_state(z)
        if self.observe is not None:
            drawn = self.observe(time, x)
            found = drawn.log_prob(jnp.where(seen, value, 1.0))
            # `log_prob` may also return the joint log-density of all values at a time.
            there = seen if found.shape == seen.shape else jnp.all(seen)
            terms = jnp.sum(jnp.where(there, found, 0.0))
        else:
            at = x[: value.size]
            loose = seen & ~fixed[: value.size]
            terms = jnp.sum(jnp.where(loose, jax.scipy.stats.norm.logpdf(value, at, error), 0.0))
        return terms + jnp.where(first, self._prior(x, fixed), 0.0)

    def _prior(self, x: Array, fixed: Array) -> Array:
        start = self.start()
        # Convert a density of x to a density of the coordinates.
        own = -jnp.sum(jnp.where(fixed, 0, jnp.log(self.slopes(x))))
        if start is not None and hasattr(start, "log_prob"):
            own = own + jnp.sum(start.log_prob(x[np.array(self.unknown, int)]))
        return own

    def slopes(self, x: Array) -> Array:
        """|dz/dx| of each component; each coordinate depends on one component only."""
        return jnp.abs(jax.jvp(self.coordinates.from_state, (x,), (jnp.ones_like(x),))[1])

    def fields(self, t: Array, z: Array) -> tuple[Array, Array]:
        """The Itô drift `(d,)` and the noise `(d, m)` of the coordinates, by Itô's formula."""
        x = self.coordinates.to_state(z)
        noise = lambda x: noise_matrix(self.sde.noise(t, x))
        drift, sigma = self.sde.drift(t, x), noise(x)
        if not isinstance(self.sde, AbstractItoSDE):
            along = lambda j: jax.jvp(lambda x: noise(x)[:, j], (x,), (sigma[:, j],))[1]
            drift = drift + 0.5 * sum(along(j) for j in range(sigma.shape[1]))

        # Each coordinate depends on one component only.
        unit = jnp.ones_like(x)
        slopes = lambda x: jax.jvp(self.coordinates.from_state, (x,), (unit,))[1]
        slope, bend = jax.jvp(slopes, (x,), (unit,))
        return slope * drift + 0.5 * bend * jnp.sum(sigma**2, axis=1), slope[:, None] * sigma

    def step(self, z: Array, time: Array, dt: Array) -> Normal:
        """A normal approximation, in coordinates, of the distribution of the state a short time dt after `z`.
        The noise is evaluated at `z`.

        The state is m + Σ cⱼ fⱼ, where the standard normal variables cⱼ are the coefficients of the noise in
        the Legendre polynomials of degrees 0 and 1. The drift is replaced by its best linear approximation,
        on average over each cⱼ, which is computed by Gauss–Hermite quadrature with three nodes. The resulting
        ODE for m and fⱼ is solved by a Runge–Kutta method. For a linear SDE the mean and the covariance are
        exact up to O(dt⁵).
        """
        sigma = self.fields(time + 0.5 * dt, z)[1].T
        h, unit = dt / SUBSTEPS, sigma / jnp.sqrt(dt)
        # Inputs may jump at the end of a step, so they are evaluated just before it.
        last = time + dt - 8 * jnp.finfo(dt.dtype).eps * (jnp.abs(time) + dt)

        def slope(part: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            mean, parts = state
            move = self._inwards(mean, np.sqrt(3) * parts)
            at = jnp.concatenate([mean[None], mean[None] + move, mean[None] - move])
            drifts = jax.vmap(lambda y: self.fields(jnp.minimum(time + part * dt, last), y)[0])(at)
            here, (after, before) = drifts[0], jnp.split(drifts[1:], 2)
            noise = jnp.concatenate([unit, np.sqrt(3) * (2 * part - 1) * unit])
            rise = here + jnp.sum(after + before - 2 * here[None], axis=0) / 6
            return rise, (after - before) / (2 * np.sqrt(3)) + noise

        def substep(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            along = lambda slope, size: jax.tree.map(lambda a, b: a + size * b, state, slope)
            one = slope(k / SUBSTEPS, state)
            two = slope((k + 0.5) / SUBSTEPS, along(one, 0.5 * h))
            three = slope((k + 0.5) / SUBSTEPS, along(two, 0.5 * h))
            four = slope((k + 1) / SUBSTEPS, along(three, h))
            whole = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, one, two, three, four)
            return along(whole, h)

        start = z, jnp.zeros((2 * len(sigma), len(z)), z.dtype)
        mean, parts = jax.lax.fori_loop(0, SUBSTEPS, substep, start)
        return Normal(mean, parts.T @ parts)

    def _inwards(self, z: Array, moves: Array) -> Array:
        """Shorten moves `(k, d)` from z so that none covers more than half the distance to an end of the
        coordinates, where the drift may be infinite."""
        low, high = np.broadcast_to(np.array(self.coordinates.ends), (len(z), 2)).T
        if not np.isfinite([low, high]).any():
            return moves
        room = 0.5 * jnp.maximum(jnp.minimum(z - low, high - z), 0)
        return jnp.clip(moves, -room[None], room[None])

    def euler_step(self, z: Array, time: Array, dt: Array) -> Normal:
        """The distribution of the state (not of its coordinates) after an Euler step."""
        plain = dataclasses.replace(self, coordinates=Unchanged())
        x = self.coordinates.to_state(z)
        drift, sigma = plain.fields(time, x)
        return Normal(x + dt * drift, dt * sigma @ sigma.T)

    def kernel(self, z: Array, time: Array, dt: Array) -> AbstractDistribution | None:
        """The distribution of the next state by an Euler step, in closed form, or by the short-time
        approximation of a named SDE; None if there is none of these."""
        x = self.coordinates.to_state(z)
        if self.euler:
            return self.euler_step(z, time, dt)
        if self.exact:
            return exact_transition(self.sde, x, dt)
        return self.sde.short_transition(x, dt) if isinstance(self.sde, AbstractNamedSDE) else None

    def normal(self, z: Array, time: Array, dt: Array) -> Normal:
        """A normal approximation of the distribution of the next state, in coordinates."""
        known = self.kernel(z, time, dt)
        if isinstance(known, Normal) and isinstance(self.coordinates, Unchanged):
            return known
        return known.normal if isinstance(known, Transformed) else self.step(z, time, dt)

    def transition_from(self, z: Array, time: Array, dt: Array) -> Callable[[Array, Array], Array]:
        """The log-density of the next state, as a function of its coordinates and of the mask `fixed`. It is
        a density of the coordinates for hidden components, and of the state for fixed components."""
        known = self.kernel(z, time, dt)
        if known is None or isinstance(known, Transformed):
            normal = self.step(z, time, dt) if known is None else known.normal
            return lambda end, fixed: normal.log_prob(end) + self._volume(end, fixed)
        return lambda end, fixed: known.log_prob(self.coordinates.to_state(end)) - self._volume(end, ~fixed)

    def _volume(self, z: Array, some: Array) -> Array:
        """Σ log |dz/dx| over the components in the mask `some`."""
        return jnp.sum(jnp.where(some, jnp.log(self.slopes(self.coordinates.to_state(z))), 0))

    def transition(self, start: Array, end: Array, time: Array, dt: Array, fixed: Array) -> Array:
        """Log-density of the transition from `start` to `end`."""
        return self.transition_from(start, time, dt)(end, fixed)

    def widths(self, z: Array, time: Array, dt: Array) -> Array:
        """Standard deviations `(d,)` of a transition in coordinates, which determine the steps of finite
        differences."""
        spread = jnp.sqrt(jnp.diag(self.normal(z, time, dt).covariance))
        return jax.lax.stop_gradient(jnp.where(spread > 0, spread, 1e-6))

    def sample(self, z: Array, time: Array, dt: Array, key: Any) -> Array:
        """Draw the next state, in coordinates."""
        known = self.kernel(z, time, dt)
        if known is not None:
            return self.coordinates.from_state(known.sample(key))
        return self.step(z, time, dt).sample(key)


def stationary(sde: Any, fields: Callable, t: Array, d: int, unknown: tuple[int, ...]) -> Any:
    """The stationary distribution of the components of an SDE whose indices are `unknown`, with the inputs of
    time t; NaN if there is none."""
    own = sde.stationary(unknown) if isinstance(sde, AbstractNamedSDE) else None
    if own is not None:
        return own
    if len(unknown) != d:
        raise ValueError(
            "initial='stationary' requires that no component is observed exactly at the first time"
        )
    zero = jnp.zeros(d)
    constant, sigma = fields(t, zero)
    rate = jax.jacfwd(lambda z: fields(t, z)[0])(zero)
    # A P + P Aᵀ + σσᵀ = 0, as one linear system for the entries of P.
    unit = jnp.eye(d)
    system = jnp.kron(rate, unit) + jnp.kron(unit, rate)
    covariance = jnp.linalg.solve(system, -(sigma @ sigma.T).ravel()).reshape(d, d)
    # If the SDE is unstable, the solution is not a covariance.
    values = jnp.linalg.eigvalsh(jax.lax.stop_gradient(covariance))
    covariance = jnp.where(values[0] >= -1e-6 * values[-1], covariance, jnp.nan)
    return Normal(-jnp.linalg.solve(rate, constant), covariance)


def rows_of(
    series: Sequence[Observed],
    *,
    dimension: int,
    observe: bool,
    noisy: bool,
    errors: Sequence[np.ndarray] | None,
    known_start: bool,
    knots: np.ndarray,
    num_steps: int,
    euler_steps: int | None = None,
) -> Rows:
    """Place the states of all series at their times, at the knots, and at additional times, so that there are
    `num_steps` steps per median time step, or `euler_steps` steps from each value to the next."""
    parts = [_inserted(one.times, knots, num_steps, euler_steps) for one in series]
    sizes = [len(times) for times, _ in parts]
    offsets = np.cumsum([0, *sizes[:-1]])
    n, c = sum(sizes), series[0].values.shape[1]
    given = np.concatenate([offset + places for offset, (_, places) in zip(offsets, parts, strict=True)])
    values = np.full((n, c), np.nan)
    values[given] = np.concatenate([one.values for one in series])
    seen, times = np.isfinite(values), np.concatenate([times for times, _ in parts])
    first = np.zeros(n, bool)
    first[offsets] = True
    fixed = np.zeros((n, dimension), bool)
    if not (observe or noisy):
        fixed[:, :c] = seen
    if known_start:
        fixed[first] = True
    deviations = None
    if errors is not None:
        deviations = np.ones((n, c))
        deviations[given] = np.concatenate(errors)
    before = np.flatnonzero(~np.append(first[1:], True))
    number = lambda array: jnp.asarray(array, float)
    return Rows(
        number(np.where(seen, values, 0.0)),
        jnp.asarray(seen),
        jnp.asarray(fixed),
        None if deviations is None else number(deviations),
        jnp.asarray(first),
        jnp.asarray(np.repeat(np.arange(len(sizes)), sizes)),
        number(times),
        jnp.asarray(before),
        number(times[before + 1] - times[before]),
        given,
        len(sizes),
    )


def _inserted(
    times: np.ndarray, knots: np.ndarray, num_steps: int, euler_steps: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Insert additional times between the given times. Return all times, and the indices of the given
    times."""
    base = np.union1d(times, knots[(knots > times[0]) & (knots < times[-1])])
    gaps = np.diff(base)
    counts = np.ones(len(gaps), int) if euler_steps is None else np.full(len(gaps), euler_steps)
    if num_steps:
        unit = np.median(np.diff(times)) / num_steps
        counts = np.clip(np.ceil(gaps / unit - 1e-6), 1, LONGEST * num_steps).astype(int)
    pieces = [
        np.linspace(a, b, k + 1)[:-1] for (a, b), k in zip(itertools.pairwise(base), counts, strict=True)
    ]
    base = np.concatenate([*pieces, base[-1:]])
    return base, np.searchsorted(base, times)


def typical_state(space: StateSpace, guess: np.ndarray) -> Array:
    """Coordinates `(d,)` of a typical state: observed components from `guess` `(d,)`, hidden components at
    their equilibrium."""
    z, seen = space.coordinates.from_state(jnp.asarray(guess, float)), np.zeros(len(guess), bool)
    if space.observe is None:
        columns = np.flatnonzero(np.asarray(space.rows.seen).any(axis=0))
        seen[columns[columns < len(guess)]] = True
    return z if seen.all() else _equilibrium(space, z, jnp.asarray(~seen))


@eqx.filter_jit
def _equilibrium(space: StateSpace, z: Array, hidden: Array) -> Array:
    """The state at which the drift of the hidden components vanishes while the others stay fixed; `z` if
    there is none."""
    dt, time = jnp.median(space.rows.dt), space.rows.times[0]

    def step(now: Array, _: Any) -> tuple[Array, Any]:
        drift, _ = space.fields(time, now)
        slope = jax.jacfwd(lambda y: space.fields(time, y)[0])(now)
        # An implicit Euler step of the hidden components, which is stable for any dt.
        held = jnp.where(hidden[:, None] & hidden[None, :], slope, 0)
        move = jnp.linalg.solve(jnp.eye(len(now)) - dt * held, jnp.where(hidden, dt * drift, 0))
        return jnp.where(jnp.all(jnp.isfinite(move)), now + move, now), None

    found = jax.lax.scan(step, z, None, length=CLAMPED)[0]
    good = jnp.all(jnp.isfinite(found)) & space.coordinates.is_inside(found)
    return jnp.where(good, found, z)
