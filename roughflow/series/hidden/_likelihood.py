"""The likelihood of a partially observed series, by the Kalman filter, on a grid or by particles."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from ..._checks import check_callable, is_traced
from ..._programs import jit
from ...density import systematic
from ...faq import see
from ...sde import AbstractItoSDE, AbstractSDE, noise_dimension
from ...transition import AbstractCoordinates, Effort, Transition, forwards, linear
from .._likelihood import NOISE as NAME, AbstractLikelihood, information_by_differences
from .._observed import FEWEST, Observed, check_inside
from .._parameters import POSITIVE, UNIT, Domain, Parameters
from ..models import AbstractNamedSDE, Normal, exact_transition
from ._grid_filter import (
    BRIDGE,
    EULER,
    EXACT,
    Mesh,
    fitted_mesh,
    grid_filter,
    grid_smoother,
    grid_uniform,
    hidden_component,
)
from ._kalman import Filtered, is_affine, is_linear, kalman_filter, linear_model, smoothed_states
from ._particles import (
    PARTICLES as FILTER_PARTICLES,
    REPLICATES,
    Cloud,
    Guide,
    Guided,
    Search,
    expansion_at_mode,
    guided_log_likelihood,
    laplace_log_likelihood,
    smoothed_by_particles,
    smoothed_guess,
    without_derivatives,
)
from ._state_space import STATIONARY, Estimated, Inputs, Rows, StateSpace, driven_by, rows_of, typical_state

KALMAN, GRID, PARTICLES, LAPLACE = "kalman", "grid", "particles", "laplace"
BY_PATHS = (PARTICLES, LAPLACE)  # methods that use the most likely states
MAX_REFINEMENTS = 3  # maximum number of doublings of the steps between values
# Error due to the steps between values, divided by the change when their number is doubled: 2 is exact for
# schemes of order one. The order is about one half where a hidden variance comes close to zero: Heston's
# log-likelihood of 3,523 daily values is 11904.1, 11900.7 and 11899.0 with 1, 2 and 3 steps.
LEFT_BY_STEPS = 2.0
OUTSIDE = 1e-3  # a grid is replaced if its outermost nodes have a larger probability
ZERO = 1e-3  # a parameter below this fraction of its starting value is reported as zero
PROBES = 3  # number of values at which an observation density is checked
PARTICLES_PER_PATH = 4  # relative to `Effort.num_paths`


class Observation(NamedTuple):
    """The arguments of `rf.fit_sde` that describe how values are observed."""

    measurement_noise: Any = None
    observe: Callable | None = None
    initial: Any = None
    inputs: Any = None
    steps: int | None = None

    @property
    def given(self) -> bool:
        return any(part is not None for part in self)

    @property
    def besides_noise(self) -> list[str]:
        """Names of all given arguments except `measurement_noise`."""
        return [name for name, part in self._asdict().items() if part is not None and name != NAME]


class HiddenSeries(eqx.Module):
    """The log-likelihood of a partially observed series as a function of the SDE; see `rf.series_likelihood`.

    `method` is "kalman" (exact), "grid" (one hidden component) or "particles" (guided by the most likely
    states).

    ```python
    import jax, numpy as np
    import roughflow as rf

    sde, x = rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), 1 + 0.3 * np.sin(np.arange(60) ** 2)
    x[10:20] = np.nan
    times, noise = np.arange(60) / 12, 0.1
    likelihood = rf.series_likelihood(sde, times, x, key=jax.random.key(0), measurement_noise=noise)
    likelihood(rf.OrnsteinUhlenbeck(2.0, 1.0, 1.0)), likelihood.method
    ```
    """

    rows: Rows
    path: Array  # (n, d), starting point of the search for the most likely states
    key: PRNGKeyArray
    coordinates: AbstractCoordinates
    noise: Array | None
    observe: Callable | None
    initial: Any
    inputs: Callable | None
    effort: Effort = eqx.field(static=True)
    unknown: tuple[int, ...] = eqx.field(static=True)
    exact: bool = eqx.field(static=True)
    method: str = eqx.field(static=True)
    steps: int | None = eqx.field(static=True, default=None)
    mesh: Mesh | None = None
    setup: "Setup | None" = eqx.field(static=True, default=None)

    def space(self, sde: Any, extras: Mapping[str, Any] | None = None) -> StateSpace:
        """The state-space model of an SDE, with the given values of the extra parameters."""
        parts: dict[str, Any] = {NAME: self.noise, "observe": self.observe, "initial": self.initial}
        parts |= extras or {}
        driven = sde if self.inputs is None else driven_by(sde, self.inputs)
        observe = parts["observe"]
        if observe is not None and self.inputs is not None:
            observe = _WithInputs(observe, self.inputs)
        rest = (self.coordinates, observe, parts[NAME], parts["initial"], self.rows, self.unknown)
        return StateSpace(driven, *rest, self.exact, self.steps is not None)

    def __call__(self, sde: Any) -> Array:
        """The log-likelihood of an SDE, or of an SDE and extra parameters; −inf, with zero derivatives, if
        the series is impossible. Outside compiled programs, a grid that does not cover the hidden states is
        replaced."""
        return _total(self.covering(sde), sde)

    def covering(self, sde: Any) -> "HiddenSeries":
        """The likelihood with a grid that covers the hidden states of this SDE."""
        traced = any(is_traced(leaf) for leaf in jax.tree.leaves((self, sde)))
        if self.mesh is None or traced or (self.setup and bool(eqx.tree_equal(sde, self.setup.sde))):
            return self
        if _mass_at_ends(self, sde) < OUTSIDE:
            return self
        return self.with_mesh(_space(self, sde))

    def with_error(self, sde: Any) -> tuple[float, float]:
        """The log-likelihood and its error, in nats. The error combines that due to particles or grid nodes
        and that due to the steps between values."""
        one = self.covering(sde)
        value, error = _with_error(one, sde)
        return float(value), float(np.hypot(error, one.moved(sde, value)))

    def moved(self, sde: Any, value: Array) -> float:
        """The error of the log-likelihood `value` due to the steps between values; with particles, that of
        Laplace's approximation."""
        if not self.refines:
            return 0.0
        smooth = self.smooth
        value = value if smooth is self else _total(smooth, sde)
        return LEFT_BY_STEPS * float(jnp.abs(_total(smooth.with_effort(self.effort.finer()), sde) - value))

    @property
    def smooth(self) -> "HiddenSeries":
        """The likelihood with Laplace's approximation in place of particles."""
        few = Effort(self.effort.num_functions, 2, self.effort.num_steps)  # so that programs are shared
        return dataclasses.replace(self, method=LAPLACE, effort=few) if self.method == PARTICLES else self

    def parts(self, space: StateSpace) -> tuple[Array, Array]:
        """The log-densities of all values given earlier values, and their standard errors. With particles or
        Laplace's approximation, they are those of whole series."""
        if self.method == KALMAN:
            value = kalman_filter(linear_model(space), self.rows.fixed).log_prob
            return value, jnp.zeros_like(value)
        if self.mesh is not None:
            value = grid_filter(space, self.mesh).log_prob
            return value, jnp.zeros_like(value)
        mode, found = expansion_at_mode(space, self.path)
        value = laplace_log_likelihood(space, mode)
        error = jnp.zeros_like(value)
        if self.method == PARTICLES:
            held, at = without_derivatives(space), jax.lax.stop_gradient(mode)
            drawn, error = guided_log_likelihood(held, at, self.key, self.num_particles)
            # The derivative is that of Laplace's approximation, which is smooth.
            value = drawn + (value - jax.lax.stop_gradient(value))
        return value, jnp.where(found & jnp.isfinite(error), error, jnp.inf)

    @property
    def num_particles(self) -> int:
        return PARTICLES_PER_PATH * self.effort.num_paths

    def with_effort(self, effort: Effort) -> "HiddenSeries":
        """The likelihood with other numbers of steps between values and of particles."""
        if self.mesh is not None:
            return dataclasses.replace(self, effort=effort, mesh=self.mesh.with_steps(effort.num_steps))
        assert self.setup is not None
        blank = self.setup.blank(effort, self.method)
        path = np.zeros(blank.path.shape)
        for k in range(self.rows.count):
            mine, other = (np.asarray(rows.series) == k for rows in (self.rows, blank.rows))
            known, times = np.asarray(self.rows.times)[mine], np.asarray(blank.rows.times)[other]
            columns = [np.interp(times, known, column) for column in np.asarray(self.path)[mine].T]
            path[other] = np.stack(columns, axis=1)
        parts = {"noise": self.noise, "observe": self.observe, "initial": self.initial}
        return dataclasses.replace(blank, path=jnp.asarray(path), **parts)

    def with_mesh(self, space: StateSpace) -> "HiddenSeries":
        """The likelihood with a grid that is fitted to the states of this model."""
        scheme, steps = EXACT if self.exact else BRIDGE, self.effort.num_steps
        if self.steps is not None:
            scheme, steps = EULER, self.steps
        component = hidden_component(self.rows)
        assert component is not None
        guess = np.asarray(self.path[:, component])
        mesh = fitted_mesh(space, component, scheme, 1 if scheme == EXACT else steps, guess)
        return dataclasses.replace(self, mesh=mesh)

    def described(self) -> str:
        """A description of the method for the summary of a fit."""
        how = f"{REPLICATES} runs of {self.num_particles} guided particles"
        if self.method == KALMAN:
            how = "Kalman filter"
        if self.method in BY_PATHS and self.steps is not None:
            return f"{how}, {self.steps} Euler step{'s' * (self.steps > 1)} per value"
        if self.mesh is not None:
            how = f"grid of {self.mesh.size} nodes"
            if self.mesh.scheme == EULER:
                return f"{how}, {self.mesh.steps} Euler step{'s' * (self.mesh.steps > 1)} per value"
        return (
            f"{how}, {self.effort.num_steps} step{'s' * (self.effort.num_steps > 1)} per value"
            if self.refines
            else f"{how}, exact transitions"
        )

    @property
    def refines(self) -> bool:
        """Whether the likelihood depends on the number of time steps between values."""
        return self.method != KALMAN and not self.exact and self.steps is None


class _WithInputs(eqx.Module):
    """An observation density with inputs, g(t, x, u(t))."""

    observe: Callable
    inputs: Callable

    def __call__(self, t: Array, x: Array) -> Any:
        return self.observe(t, x, self.inputs(t))


def _space(likelihood: HiddenSeries, sde: Any) -> StateSpace:
    """The state-space model of an SDE, or of an SDE and extra parameters."""
    return likelihood.space(*(sde if isinstance(sde, tuple) else (sde,)))


@functools.partial(jit, level=1)
def _mass_at_ends(likelihood: HiddenSeries, sde: Any) -> Array:
    """The probability of the outermost nodes given all values, summed over all states."""
    space, mesh = _space(likelihood, sde), likelihood.mesh
    assert mesh is not None
    chance = jnp.exp(grid_smoother(space, mesh)[1][:, jnp.array([0, -1])])
    all_ends = space.coordinates.ends
    least, most = all_ends[mesh.component if len(all_ends) > 1 else 0]
    beyond = jnp.stack([mesh.low > least, mesh.high < most], axis=1)
    return jnp.sum(jnp.where(beyond & ~space.rows.fixed[:, mesh.component, None], chance, 0))


@functools.partial(jit, level=1)
def _total(likelihood: HiddenSeries, sde: Any) -> Array:
    return forwards(sde, function=_Total(likelihood))


@functools.partial(jit, level=1)
def _with_error(likelihood: HiddenSeries, sde: Any) -> tuple[Array, Array]:
    space = _space(likelihood, sde)
    value, error = likelihood.parts(space)
    value, error = jnp.sum(value), jnp.sqrt(jnp.sum(error**2))
    if likelihood.mesh is not None:
        error = jnp.abs(jnp.sum(grid_filter(space, likelihood.mesh.finer()).log_prob) - value)
    return value, error


class _Total(eqx.Module):
    likelihood: HiddenSeries

    def __call__(self, sde: Any) -> Array:
        space = _space(self.likelihood, sde)
        total = jnp.sum(self.likelihood.parts(space)[0])
        return jnp.where(jnp.isfinite(total), total, -jnp.inf)


MAX_RECENT = 8  # maximum number of cached results


class Recent(dict):
    """A cache of recent results, such as scores. All instances compare equal, because compiled programs do
    not depend on them."""

    def add(self, place: Any, result: Any) -> None:
        if len(self) == MAX_RECENT:
            del self[next(iter(self))]
        self[place] = result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recent)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(Recent)


class HiddenLikelihood(AbstractLikelihood):
    """The likelihood of a partially observed series. The free parameters are those of the SDE and, where
    present, those of the measurement noise, the observation density and the first state."""

    parameters: Parameters
    of_sde: HiddenSeries
    steps: Transition
    penalty: np.ndarray
    tilt: np.ndarray | None = None  # (p,), see `tilted`
    recent: "Recent" = eqx.field(static=True, default_factory=lambda: Recent())

    @property
    def effort(self) -> Effort | None:
        return None if self.of_sde.method == KALMAN else self.of_sde.effort

    @property
    def coordinates(self) -> AbstractCoordinates:
        return self.of_sde.coordinates

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-densities `(n,)` of all values, their gradients `(n, p)` with respect to the free parameters,
        and their errors. With particles or Laplace's approximation, they are those of whole series."""
        if self.of_sde.method == PARTICLES:
            value, error = _value(dataclasses.replace(self, tilt=None), jnp.asarray(free, float))
            slopes = self.smooth.scores(free)[1]
            slopes = slopes if self.tilt is None else slopes + self.tilt / len(slopes)
            return np.asarray(value), slopes, np.asarray(error)
        scale = self.parameters.scale
        unscaled = dataclasses.replace(self.parameters, scale=np.ones(len(scale)))
        at, place = free * scale, (id(self.of_sde), (free * scale).tobytes())
        if place not in self.recent:
            found = _scores(dataclasses.replace(self, parameters=unscaled), jnp.asarray(at, float))
            self.recent.add(place, (self.of_sde, *map(np.asarray, found)))
        _, value, slopes, error = self.recent[place]
        return value, slopes * scale, error

    def tilted(self, free: np.ndarray, root: np.ndarray) -> "HiddenLikelihood":
        """Correct the gradient of Laplace's approximation by that of its error, computed by finite
        differences.

        The error is computed by particles at points one standard error from `free`. In the coordinates given
        by the columns of `root` `(p, q)`, the information is the identity, and the points form a Hadamard
        design, in which every point contributes to all components of the gradient (Plackett & Burman 1946).
        """
        p, smooth = root.shape[1], self.smooth
        design = scipy.linalg.hadamard(2 ** int(np.ceil(np.log2(p + 1))))[:, 1 : p + 1] / np.sqrt(p)
        points = free + design @ root.T
        falls = [self.log_likelihood(point) - smooth.scores(point)[0].sum() for point in points]
        slope = p * design.T @ falls / len(design)
        tilt = slope @ np.linalg.pinv(root) if np.isfinite(slope).all() else None
        return dataclasses.replace(self, tilt=tilt)

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(_value(dataclasses.replace(self, tilt=None), jnp.asarray(free, float))[0].sum())

    def information(self, free: np.ndarray) -> np.ndarray:
        """The information, by finite differences of the gradient; for particles, whose likelihood is not
        smooth, that of Laplace's approximation."""
        return information_by_differences(self.smooth, free)

    def quick_information(self, free: np.ndarray) -> np.ndarray:
        """The outer product of the scores of all values or, with particles, the information by one-sided
        differences of the gradient."""
        if self.of_sde.method not in BY_PATHS:
            return super().quick_information(free)
        size, base = 1e-4, self.smooth.total(free)[1]
        rows = [(base - self.smooth.total(free + move)[1]) / size for move in size * np.eye(len(free))]
        return 0.5 * (np.array(rows) + np.array(rows).T)

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """Two errors of the log-likelihood: one due to particles or grid nodes, and one due to the time step,
        which for particles is that of Laplace's approximation."""
        values, _, errors = self.scores(free)
        drawn, moved, smooth = float(np.linalg.norm(errors)), 0.0, self.smooth
        here = float((values if smooth is self else smooth.scores(free)[0]).sum())
        if self.of_sde.refines:
            finer = smooth.with_effort(self.of_sde.effort.finer()).log_likelihood(free)
            moved = LEFT_BY_STEPS * abs(finer - here)
        if self.of_sde.mesh is not None:
            drawn = max(drawn, abs(self.moved_to(free).with_nodes().log_likelihood(free) - here))
        return drawn if np.isfinite(drawn) else np.inf, moved if np.isfinite(moved) else np.inf

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))[0]

    def space(self, free: Array) -> StateSpace:
        """The state-space model with these parameters."""
        sde, extras = self.parameters.sde(self.parameters.from_free(free))
        return self.of_sde.space(sde, extras)

    def driven(self, free: Array) -> AbstractSDE:
        """The SDE with these parameters and the inputs."""
        inputs = self.of_sde.inputs
        return self.sde(free) if inputs is None else driven_by(self.sde(free), inputs)

    def at_estimates(self, free: np.ndarray) -> HiddenSeries:
        """The likelihood as a function of the SDE, with all other parameters at their estimates."""
        _, extras = self.parameters.sde(self.parameters.from_free(jnp.asarray(free, float)))
        given = {"noise": extras[NAME]} | {name: part for name, part in extras.items() if name != NAME}
        return dataclasses.replace(self.of_sde, **given)

    def smoothed(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the states given all values, at the times of the series."""
        if self.of_sde.mesh is not None:
            smoothed, _ = _on_grid(self, jnp.asarray(free, float), True)
            return self._given(*smoothed)
        mean, deviation = (np.asarray(part) for part in _smoothed(self, jnp.asarray(free, float)))
        if np.isnan(mean).any() or np.isnan(deviation).any():
            raise ValueError(
                f"smoothed states do not exist, because the estimate of {self._vanishing(free)} is zero: fix "
                "it at another value with fixed=, or fit a simpler SDE"
            )
        return self._given(mean, deviation)

    def _vanishing(self, free: np.ndarray) -> str:
        """The name of the positive parameter that is smallest relative to its starting value."""
        found, start = self.parameters.from_free(jnp.asarray(free, float)), self.parameters.template
        ratio = np.asarray(found) / self.parameters.values(start)
        positive = np.array([domain == POSITIVE for domain in self.parameters.domains])
        ratio = np.where(positive, ratio, np.inf)
        return self.parameters.names[int(np.argmin(ratio))] if ratio.min() < ZERO else "a noise parameter"

    def filtered(self, free: np.ndarray, key: PRNGKeyArray) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the states given the values so far, at the times of the series."""
        if self.of_sde.method == KALMAN:
            _, mean, deviation = _kalman_filtered(self, jnp.asarray(free, float))
            return self._given(mean, deviation)
        if self.of_sde.mesh is not None:
            return self._given(*_on_grid(self, jnp.asarray(free, float), False)[0])
        return self._given(*self._particles(free, key)[1])

    def _given(self, mean: ArrayLike, deviation: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Select the means and standard deviations at the times of the series; NaN at times without values,
        for which the filter has no state."""
        given = np.asarray(self.of_sde.rows.given)
        shown = lambda one: np.where(given[:, None] < 0, np.nan, np.asarray(one)[given])
        return shown(mean), shown(deviation)

    def _particles(self, free: np.ndarray, key: PRNGKeyArray) -> tuple[Cloud, tuple[Array, Array]]:
        return _filter(self, jnp.asarray(free, float), key, _column(self.of_sde.rows))

    def residuals(self, free: np.ndarray, key: PRNGKeyArray) -> np.ndarray:
        """For each value but the first of a series, the probability of a smaller value given earlier
        values."""
        rows, column = self.of_sde.rows, _column(self.of_sde.rows)
        if not self.of_sde.observe and np.asarray(rows.seen).any(axis=0).sum() > 1:
            raise ValueError(
                f"residuals require one observed component; this series has {rows.seen.shape[1]}"
            )
        shown = np.asarray(rows.seen[:, column] & ~rows.first)
        if self.of_sde.method == KALMAN:
            found = _kalman_filtered(self, jnp.asarray(free, float))[0]
            error = self.space(jnp.asarray(free, float)).deviations()
            wide = found.spread[:, column, column] + (0 if error is None else error[:, column] ** 2)
            gap = rows.values[:, column] - found.ahead[:, column]
            uniform = scipy.stats.norm.cdf(np.asarray(gap)[shown] / np.sqrt(np.asarray(wide)[shown]))
        elif self.of_sde.mesh is not None:
            space = self.space(jnp.asarray(free, float))
            uniform = np.asarray(grid_uniform(space, self.of_sde.mesh, column))[shown]
        else:
            uniform = np.asarray(self._particles(free, key)[0].uniform)[shown]
        if np.isnan(uniform).all():
            raise ValueError("residuals require that observe returns a distribution with cdf")
        least = 0.5 / (FILTER_PARTICLES + 1) if self.of_sde.method in BY_PATHS else 1e-15
        return np.clip(uniform[np.isfinite(uniform)], least, 1 - least)

    def last_states(self, free: np.ndarray, key: PRNGKeyArray, count: int, place: int) -> Array:
        """Draws `(count, d)` of the last state of one series given its values."""
        last = int(np.flatnonzero(np.asarray(self.of_sde.rows.series) == place)[-1])
        if self.of_sde.method == KALMAN:
            found = _kalman_filtered(self, jnp.asarray(free, float))[0]
            mean, covariance = np.asarray(found.mean[last]), np.asarray(found.covariance[last])
            if not np.isfinite(covariance).all():
                raise ValueError(
                    "the values do not determine the last state: set the argument initial of rf.fit_sde, "
                    'such as initial="stationary"'
                )
            coordinates = self.space(jnp.asarray(free, float)).coordinates
            values, vectors = np.linalg.eigh(covariance)
            normal = np.asarray(jax.random.normal(key, (count, len(mean))))
            drawn = mean + (normal * np.sqrt(np.maximum(values, 0))) @ vectors.T
            return jax.vmap(coordinates.to_state)(jnp.asarray(drawn))
        if self.of_sde.mesh is not None:
            where, chance = _on_grid(self, jnp.asarray(free, float), False)[1]
            cell, shift = jax.random.split(key)
            node = jax.random.choice(cell, where.shape[1], (count,), p=jnp.exp(chance[last]))
            z = where[last, node]
            i, width = self.of_sde.mesh.component, jnp.ptp(where[last, :, self.of_sde.mesh.component])
            z = z.at[:, i].add(
                width / where.shape[1] * jax.random.uniform(shift, (count,), minval=-0.5, maxval=0.5)
            )
            return jax.vmap(self.of_sde.coordinates.to_state)(z)
        key, key_choice, key_order = jax.random.split(key, 3)
        cloud = self._particles(free, key)[0]
        share = jax.nn.softmax(cloud.log_weight[last])
        chosen = systematic(share, jax.random.uniform(key_choice), count)
        chosen = jax.random.permutation(key_order, chosen)
        return jax.vmap(self.of_sde.coordinates.to_state)(cloud.z[last][chosen])

    @property
    def smooth(self) -> "HiddenLikelihood":
        """The likelihood with Laplace's approximation in place of a particle filter, whose log-likelihood is
        not smooth in the parameters."""
        of_sde = self.of_sde.smooth
        return self if of_sde is self.of_sde else dataclasses.replace(self, of_sde=of_sde, tilt=None)

    def with_effort(self, effort: Effort) -> "HiddenLikelihood":
        return dataclasses.replace(self, of_sde=self.of_sde.with_effort(effort))

    def with_nodes(self) -> "HiddenLikelihood":
        """The likelihood with a finer grid."""
        assert self.of_sde.mesh is not None
        of_sde = dataclasses.replace(self.of_sde, mesh=self.of_sde.mesh.finer())
        return dataclasses.replace(self, of_sde=of_sde)

    def moved_to(self, free: np.ndarray) -> "HiddenLikelihood":
        """The likelihood with a grid that is fitted to the states at these parameters."""
        if self.of_sde.method != GRID:
            return self
        of_sde = self.of_sde.with_mesh(self.space(jnp.asarray(free, float)))
        return dataclasses.replace(self, of_sde=of_sde)

    def described(self) -> str:
        return self.of_sde.described()


@functools.partial(jit, level=1)
def _value(likelihood: HiddenLikelihood, free: Array) -> tuple[Array, Array]:
    return likelihood.of_sde.parts(likelihood.space(free))


@functools.partial(jit, level=1)
def _scores(likelihood: HiddenLikelihood, free: Array) -> tuple[Array, Array, Array]:
    def parts(free: Array) -> tuple[Array, Array]:
        return likelihood.of_sde.parts(likelihood.space(free))

    (value, error), (slopes, _) = linear(parts, free)
    return value, slopes, error


@functools.partial(jit, level=1)
def _on_grid(
    likelihood: HiddenLikelihood, free: Array, smoothed: bool
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Means and standard deviations `(n, d)` of all states given the values so far or, if `smoothed` is true,
    given all values; and the coordinates of the nodes `(n, m, d)` with their log-probabilities `(n, m)`."""
    space, mesh = likelihood.space(free), likelihood.of_sde.mesh
    assert mesh is not None
    found, logs = grid_smoother(space, mesh) if smoothed else (grid_filter(space, mesh), None)
    logs = found.now if logs is None else logs
    path = space.pinned(jnp.zeros(space.rows.fixed.shape))
    z = jnp.broadcast_to(path[:, None], (*found.nodes.shape, path.shape[1]))
    z = z.at[:, :, mesh.component].set(found.nodes)
    x = jax.vmap(jax.vmap(space.coordinates.to_state))(z)
    x = jnp.where(logs[..., None] > -jnp.inf, x, 0)
    share = jnp.exp(logs)[..., None]
    mean = jnp.sum(share * x, axis=1)
    return (mean, jnp.sqrt(jnp.sum(share * (x - mean[:, None]) ** 2, axis=1))), (z, logs)


@functools.partial(jit, level=1)
def _smoothed(likelihood: HiddenLikelihood, free: Array) -> tuple[Array, Array]:
    """Means and standard deviations `(n, d)` of all states given all values."""
    of_sde, space = likelihood.of_sde, likelihood.space(free)
    if of_sde.method == KALMAN:
        path, variances = smoothed_states(linear_model(space), space.rows.fixed)
        return _in_states(space, path, variances)
    mode = Search.mode(space, of_sde.path).best
    return smoothed_by_particles(space, mode, of_sde.key, of_sde.num_particles)


def _in_states(space: StateSpace, path: Array, variances: Array) -> tuple[Array, Array]:
    """Convert coordinates and their covariances to states and their standard deviations."""
    x = jax.vmap(space.coordinates.to_state)(path)
    slopes = jax.vmap(space.slopes)(x)
    deviations = jnp.sqrt(jnp.diagonal(variances, axis1=1, axis2=2)) / slopes
    return x, deviations


@functools.partial(jit, level=1)
def _kalman_filtered(likelihood: HiddenLikelihood, free: Array) -> tuple[Filtered, Array, Array]:
    """The Kalman filter of a linear model, and the means and standard deviations of all states."""
    space = likelihood.space(free)
    found = kalman_filter(linear_model(space), space.rows.fixed)
    return found, *_in_states(space, found.mean, found.covariance)


@functools.partial(jit, level=1)
def _filter(
    likelihood: HiddenLikelihood, free: Array, key: PRNGKeyArray, column: int
) -> tuple[Cloud, tuple[Array, Array]]:
    """Particles given the values so far, and the means and standard deviations `(n, d)` of the states."""
    space = likelihood.space(free)
    mode = Search.mode(space, likelihood.of_sde.path).best
    cloud = Guided(space, mode, Guide.of(space, mode, far=False), FILTER_PARTICLES, column).run(key)
    x = jax.vmap(jax.vmap(space.coordinates.to_state))(cloud.z)
    share = jax.nn.softmax(cloud.log_weight, axis=1)
    mean = jnp.einsum("nk,nkd->nd", share, x)
    square = jnp.einsum("nk,nkd->nd", share, (x - mean[:, None]) ** 2)
    return cloud, (mean, jnp.sqrt(square))


def _column(rows: Rows) -> int:
    """The first observed column."""
    return int(np.argmax(np.asarray(rows.seen).any(axis=0)))


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A partially observed series and an SDE at starting values, from which likelihoods are constructed.

    All instances compare equal, because compiled programs do not depend on them. The fits of many series
    therefore share programs.
    """

    sde: Any
    series: Sequence[Observed]
    observation: Observation
    coordinates: AbstractCoordinates
    key: PRNGKeyArray
    exact: bool
    effort: Effort | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup)

    def __hash__(self) -> int:
        return hash(Setup)

    def likelihood(
        self, parameters: Parameters, penalty: np.ndarray, domains: Mapping[str, Domain]
    ) -> HiddenLikelihood:
        """The likelihood as a function of the free parameters."""
        of_sde = self.of_sde()
        joined, added = _joined(parameters, self._extras(of_sde), domains, self.coordinates, of_sde)
        rows, i = of_sde.rows, of_sde.rows.before
        steps = Transition(of_sde.path[i], of_sde.path[i + 1], rows.times[i], rows.dt)
        wide = np.append(penalty, np.zeros(added))
        return HiddenLikelihood(joined, of_sde, steps, wide)  # pyright: ignore[reportCallIssue]

    def of_sde(self) -> HiddenSeries:
        """The likelihood as a function of the SDE, by a suitable method: the Kalman filter for linear models,
        a grid for one hidden component, otherwise particles."""
        first = self.effort or Effort(num_functions=1, num_paths=32, num_steps=2)
        whole = self.blank(first, KALMAN)  # a linear SDE needs no intermediate states
        observation, space = self.observation, whole.space(self.sde)
        if observation.observe is None and space.deviations() is None:
            check_inside(self.coordinates, self.series, self._typical)
        _check_values(space, self._typical)
        _check_coordinates(self.coordinates, jnp.asarray(self._typical, float))
        _check_start(space, observation, self.sde)
        _check_stationary(space)
        if observation.observe is not None:
            _check_observe(space, self._typical)
        if observation.steps is None and is_linear(space):
            return whole
        if hidden_component(self.blank(first, GRID).rows) is None:
            _check_euler(space, self._typical)
            return self.made(first, PARTICLES)
        few = Effort(num_functions=1, num_paths=32, num_steps=1 if len(self._typical) > 1 else 2)
        return self.made(self.effort or few, GRID)

    def settled(self, tolerance: float) -> HiddenSeries:
        """The likelihood as a function of the SDE, with as many steps and particles as the tolerance requires
        at the given SDE."""
        found = self.of_sde()
        if found.method != PARTICLES or self.effort is not None:
            return found
        for _ in range(MAX_REFINEMENTS):
            value, error = _with_error(found, self.sde)
            moved = found.moved(self.sde, value)
            if not tolerance < np.hypot(error, moved) < np.inf:
                break
            found = found.with_effort(found.effort.raised(float(error), moved, tolerance))
        return found

    def made(self, effort: Effort, method: str) -> HiddenSeries:
        """The likelihood computed by the given method."""
        blank = self.blank(effort, method)
        if method == KALMAN:
            return blank
        space = blank.space(self.sde)
        start = typical_state(space, self._typical)
        component = hidden_component(blank.rows) if method == GRID else None
        # For a component that is never observed, the grid filter starts its search at the equilibrium of the
        # component.
        known = component is None or _is_observed(space, component)
        path = smoothed_guess(space, start) if known else jnp.broadcast_to(start, blank.path.shape)
        made = dataclasses.replace(blank, path=path)
        return made.with_mesh(space) if method == GRID else made

    @functools.cached_property
    def _inputs(self) -> Callable | None:
        inputs = _inputs(self.observation.inputs, self.series)
        if inputs is not None and not isinstance(self.sde, AbstractItoSDE):
            raise ValueError("inputs require an SDE in the Itô sense: use rf.to_ito")
        return inputs

    @functools.cached_property
    def _dimension(self) -> int:
        driven = self.sde if self._inputs is None else driven_by(self.sde, self._inputs)
        return _dimension(self.sde, driven, self.series, self.observation)

    @functools.cached_property
    def _typical(self) -> np.ndarray:
        return _typical(self.coordinates, self._dimension, self.series, self.observation.observe is not None)

    def _extras(self, of_sde: HiddenSeries) -> dict[str, Any]:
        """The parameters that are estimated in addition to those of the SDE."""
        parts = {"observe": self.observation.observe, "initial": self.observation.initial}
        own = {
            name: part
            for name, part in parts.items()
            if isinstance(part, eqx.Module) and not hasattr(part, "log_prob")
        }
        return {NAME: of_sde.noise} | own

    def blank(self, effort: Effort, method: str) -> HiddenSeries:
        """The likelihood for the given method, with a path of zeros and without a mesh."""
        series, observation, d, inputs = self.series, self.observation, self._dimension, self._inputs
        observe, columns = observation.observe, series[0].values.shape[1]
        noise, errors = check_noise(observation.measurement_noise, series)
        if observe is not None:
            check_callable("observe", observe, "(t, x) -> a distribution with log_prob")
            if observation.measurement_noise is not None:
                raise ValueError("observe already describes the errors of the values: omit measurement_noise")
        noisy = noise is not None or errors is not None
        known = _is_known(self.sde, observation.initial)
        plain = observe is None and not noisy
        at = jnp.asarray(self._typical)
        exact = self.exact and inputs is None and exact_transition(self.sde, at, jnp.ones(())) is not None
        drawn = method in BY_PATHS
        knots = np.asarray(inputs.times) if isinstance(inputs, Inputs) else np.zeros(0)
        if (method == GRID and d > 1) or (drawn and observation.steps is not None):
            knots = np.zeros(0)
        flat, empty = observation.initial is None, method == GRID and plain and d > 1
        kept = [_kept(one, flat, empty) for one in series]
        series = [
            dataclasses.replace(one, times=one.times[keep], values=one.values[keep])
            for one, keep in zip(series, kept, strict=True)
        ]
        observed = np.isfinite(series[0].values[0]) if plain else np.zeros(columns, bool)
        rows = rows_of(
            series,
            dimension=d,
            observe=observe is not None,
            noisy=noisy,
            errors=errors and [error[keep] for error, keep in zip(errors, kept, strict=True)],
            known_start=known,
            knots=knots,
            num_steps=effort.num_steps if drawn and not exact and observation.steps is None else 0,
            euler_steps=observation.steps if drawn else None,
        )
        every = np.concatenate(kept)
        given = np.full(len(every), -1)
        given[every] = rows.given
        rows = dataclasses.replace(rows, given=given)
        return HiddenSeries(
            rows=rows,
            path=jnp.zeros((len(rows.times), d)),
            key=self.key,
            coordinates=self.coordinates,
            noise=noise,
            observe=observe,
            initial=observation.initial,
            inputs=inputs,
            effort=effort,
            unknown=tuple(i for i in range(d) if not (i < columns and observed[i])),
            exact=exact and observation.steps is None,
            method=method,
            steps=observation.steps,
            setup=self,
        )


def _dimension(sde: Any, driven: Any, series: Sequence[Observed], observation: Observation) -> int:
    """The dimension of the state, checked against the columns of the values."""
    columns = series[0].values.shape[1]
    d = sde.dimension if isinstance(sde.dimension, int) else columns
    if observation.observe is None and columns != d:
        raise ValueError(
            f"values have {columns} columns, but {type(sde).__name__} has dimension {d}: "
            "include a column of NaN for each hidden component"
        )
    noise_dimension(driven, d, f"values have {columns} column{'s' * (columns > 1)}")
    return d


def _kept(series: Observed, flat: bool, empty: bool) -> np.ndarray:
    """A mask `(N,)` of the times that have a state. A flat prior belongs to the first value, so earlier times
    are dropped. If `empty` is true, so are all other times at which all values are missing."""
    seen = np.asarray(np.isfinite(series.values).any(axis=1))
    seen[0] |= not flat  # any other prior belongs to the first time
    kept = seen if empty else np.logical_or.accumulate(seen)
    if kept.sum() < FEWEST and not empty:
        raise ValueError(
            f"a series needs at least {FEWEST} times, counted from its first value; got {kept.sum()}"
        )
    return kept


def _check_observe(space: StateSpace, at: np.ndarray) -> None:
    """Raise an error if `observe` does not return a valid log-density at a typical state."""
    assert space.observe is not None
    seen = np.asarray(space.rows.seen).any(axis=1)
    for row in np.unique(np.linspace(0, seen.sum() - 1, PROBES).astype(int)):
        place = np.flatnonzero(seen)[row]
        value, time = np.asarray(space.rows.values[place]), space.rows.times[place]
        drawn = space.observe(time, jnp.asarray(at))
        if not hasattr(drawn, "log_prob"):
            raise TypeError(f"observe must return an object with log_prob, got {type(drawn).__name__}")
        there = np.asarray(space.rows.seen)
        found = np.asarray(drawn.log_prob(jnp.asarray(np.where(there[place], value, 1.0))))
        if found.shape != value.shape and (there.any(axis=1) & ~there.all(axis=1)).any():
            raise ValueError(
                f"values with missing cells require that observe returns one log-density for each of the "
                f"{value.size} columns; its log_prob has shape {found.shape}"
            )
        if found.shape not in ((), (1,), value.shape):
            raise ValueError(
                f"observe must return one distribution for each of the {value.size} columns, or a joint one; "
                f"its log_prob has shape {found.shape}"
            )
        if getattr(drawn, "is_discrete", False):
            _check_counts(space, drawn)
        if np.isnan(found).any():
            raise ValueError(
                f"observe has a log-density of NaN for the values {value} at time {time:g} and state {at}"
            )


def _check_counts(space: StateSpace, drawn: Any) -> None:
    """Raise an error if values are impossible under a discrete distribution."""
    values, seen = np.asarray(space.rows.values), np.asarray(space.rows.seen)
    possible = np.asarray(drawn.support(values))
    bad = ~possible & (seen if possible.ndim == seen.ndim else seen.all(axis=1))
    if bad.any():
        place = int(np.argmax(bad.any(axis=1) if bad.ndim > 1 else bad))
        raise ValueError(
            f"observe returns a discrete distribution, which excludes the values {values[place]} at time "
            f"{space.rows.times[place]:g}: pass counts"
        )


def _check_coordinates(coordinates: AbstractCoordinates, at: Array) -> None:
    """Raise an error if a coordinate depends on several components of the state."""
    slopes = np.asarray(jax.jacfwd(coordinates.from_state)(at))
    if (slopes != np.diag(np.diag(slopes))).any():
        raise ValueError(
            f"hidden states require coordinates that each depend on one component of the state, "
            f"not {type(coordinates).__name__}"
        )


def _is_observed(space: StateSpace, component: int) -> bool:
    """Whether a component of the state is observed at least once."""
    seen = np.atleast_1d(np.asarray(space.rows.seen).any(axis=0))
    return space.observe is None and component < len(seen) and bool(seen[component])


def _check_euler(space: StateSpace, at: np.ndarray) -> None:
    """Raise an error if Euler steps have no density."""
    if not space.euler:
        return
    z = space.coordinates.from_state(jnp.asarray(at, float))
    spread = np.asarray(space.euler_step(z, space.rows.times[0], space.rows.dt[0]).covariance)
    scale = np.sqrt(np.maximum(np.diag(spread), 1e-300))
    if not np.linalg.eigvalsh(spread / scale[:, None] / scale)[0] > 1e-12:
        raise ValueError(
            "steps requires noise in all components, because otherwise an Euler step has no density: omit "
            "steps to fit the SDE in continuous time"
        )


def _check_values(space: StateSpace, at: np.ndarray) -> None:
    """Raise an error if the values of the first state do not fit the hidden components."""
    start, count = None if isinstance(space.initial, str) else space.start(), len(space.unknown)
    if start is None or hasattr(start, "log_prob"):
        return
    if start.size != count:
        raise ValueError(
            f"initial needs {count} value{'s' * (count != 1)}, one for each hidden component, "
            f"got {start.size}"
        )
    if not jnp.isfinite(start).all():
        raise ValueError(f"initial must be finite, got {start}")
    if not space.coordinates.contains(jnp.asarray(at).at[np.array(space.unknown, int)].set(start)):
        raise ValueError(f"initial lies outside the state space: {start}")


def _check_start(space: StateSpace, observation: Observation, sde: Any) -> None:
    """Raise an error if the first state is stationary but the stationary distribution is unknown."""
    own = isinstance(sde, AbstractNamedSDE) and sde.stationary(space.unknown)
    if isinstance(observation.initial, str) and not (own or is_affine(space)):
        raise ValueError(
            f"initial='stationary' requires a linear SDE or one whose stationary distribution is known, not "
            f"{type(sde).__name__}: pass a distribution"
        )


def _check_stationary(space: StateSpace) -> None:
    """Raise an error if there is no stationary distribution, or if it differs between series."""
    if not isinstance(space.initial, str):
        return
    start = space.start()
    if isinstance(start, Normal) and not jnp.isfinite(start.covariance).all():
        raise ValueError(
            "initial='stationary' requires starting values for which the SDE has a stationary distribution: "
            "pass others, or a distribution"
        )
    times = space.rows.times[space.rows.first]
    if len(times) > 1:
        drift = jax.vmap(
            lambda t: space.fields(t, space.coordinates.from_state(jnp.ones(space.rows.fixed.shape[1])))[0]
        )(times)
        if not jnp.allclose(drift, drift[:1]):
            raise ValueError(
                "initial='stationary' requires the same inputs at the first time of all series: pass a "
                "distribution"
            )


def _typical(
    coordinates: AbstractCoordinates, d: int, series: Sequence[Observed], observe: bool
) -> np.ndarray:
    """A typical state: medians of the observed components, and 0 for the others (½ or 1 if 0 is outside the
    state space)."""
    values = np.concatenate([one.values for one in series])
    x = _safe(coordinates, d)
    if not observe:
        for i in range(min(values.shape[1], d)):
            column = values[np.isfinite(values[:, i]), i]
            for one in [np.median(column), *column] if len(column) else []:
                trial = x.copy()
                trial[i] = one
                if bool(coordinates.contains(jnp.asarray(trial))):
                    x = trial
                    break
            else:
                if len(column):
                    raise ValueError(f"no value is inside the state space{see('series')}")
    return x


def _safe(coordinates: AbstractCoordinates, d: int) -> np.ndarray:
    """A state inside the state space whose components are 0, 1 or ½."""
    for guess in (0.0, 1.0, 0.5):
        if bool(coordinates.contains(jnp.full(d, guess))):
            return np.full(d, guess)
    grid = np.stack(np.meshgrid(*[[0.0, 1.0, 0.5]] * d, indexing="ij"), axis=-1).reshape(-1, d)
    inside = np.asarray(coordinates.contains(jnp.asarray(grid)))
    return grid[int(np.argmax(inside))]


def _is_known(sde: Any, initial: Any) -> bool:
    """Whether the first state is known: values, or a function that returns values."""
    if initial is None or hasattr(initial, "log_prob"):
        return False
    if isinstance(initial, str):
        if initial != STATIONARY:
            raise ValueError(
                f"initial must be values, a distribution, a function or 'stationary'; got {initial!r}"
            )
        return False
    return not hasattr(initial(sde), "log_prob") if callable(initial) else True


def _inputs(inputs: Any, series: Sequence[Observed]) -> Callable | None:
    if inputs is None:
        return None
    inputs = Inputs.of(inputs)
    return inputs.since(series) if isinstance(inputs, Inputs) else inputs


def check_noise(noise: Any, series: Sequence[Observed]) -> tuple[Array | None, list[np.ndarray] | None]:
    """Return starting values `()` or `(c,)` of the measurement noise, and known standard deviations of all
    values; at most one of them is not None."""
    if noise is None:
        return None, None
    dimension = series[0].values.shape[1]
    parts = list(noise) if isinstance(noise, list | tuple) and np.ndim(noise[0]) else [noise]
    shapes = [one.values.shape for one in series]
    whole = len(parts) == len(series) and all(
        np.shape(part) == shape or (np.shape(part) == shape[:1] != (1,) and shape[1] == 1)
        for part, shape in zip(parts, shapes, strict=True)
    )
    given = (
        np.concatenate(
            [np.asarray(part, float).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        )
        if whole
        else np.asarray(noise, float)
    )
    if not whole and given.shape not in ((), (dimension,)):
        raise ValueError(
            f"{NAME} must be a number, one for each of the {dimension} columns, or one for each value; "
            f"got shape {given.shape}"
        )
    seen = np.concatenate([np.isfinite(one.values) for one in series]) if whole else True
    bad = ~(np.isfinite(given) & (given > 0)) & np.asarray(seen)
    if bad.any():
        raise ValueError(f"{NAME} must be a positive standard deviation; got {given[bad][0]}")
    if not whole:
        return jnp.asarray(given), None
    given = np.where(seen, given, 1.0)
    return None, np.split(given, np.cumsum([shape[0] for shape in shapes])[:-1])


def _joined(
    parameters: Parameters,
    extras: dict[str, Any],
    domains: Mapping[str, Domain],
    coordinates: AbstractCoordinates,
    of_sde: HiddenSeries,
) -> tuple[Parameters, int]:
    """The parameters of an SDE, followed by those of the observations and the first state, and the number of
    the latter."""
    joined, added = (parameters.template, extras), 0
    names, kinds, entries = parameters.names, parameters.domains, parameters.entries
    leaf = len(jax.tree.leaves(parameters.template))
    for name in sorted(extras):  # in the order of the leaves of a dictionary
        part = extras[name]
        own = {} if part is None else domains
        if name == NAME and part is not None:
            places = list(np.ndindex(part.shape))
            new = tuple(NAME + (f"[{place[0]}]" if place else "") for place in places)
            names, kinds = names + new, kinds + len(new) * (POSITIVE,)
            entries += tuple((leaf, place) for place in places)
        elif part is not None:
            own = {**getattr(part, "domains", {}), **own}
            more = Parameters.of(part, {k: v for k, v in own.items() if getattr(part, k, None) is not None})
            field = (
                (lambda old: old) if name == "observe" else (lambda old: old.replace("value", "initial", 1))
            )
            kind = more.domains
            if isinstance(part, Estimated):
                kind = tuple(domains.get("initial", _range(coordinates, of_sde, i)) for i in of_sde.unknown)
            names, kinds = names + tuple(map(field, more.names)), kinds + kind
            entries += tuple((leaf + i, place) for i, place in more.entries)
        leaf += len(jax.tree.leaves(part))
    added = len(names) - len(parameters.names)
    return Parameters(names, kinds, entries, joined, np.append(parameters.scale, np.ones(added))), added


def _range(coordinates: AbstractCoordinates, of_sde: HiddenSeries, i: int) -> Domain:
    """The domain of component i of the state."""
    d = of_sde.path.shape[1]
    inside = lambda value: bool(
        coordinates.contains(jnp.asarray(np.where(np.arange(d) == i, value, _safe(coordinates, d))))
    )
    if inside(-1.0):
        return Domain()
    return POSITIVE if inside(2.0) else UNIT
