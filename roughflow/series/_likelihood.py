"""Likelihoods of series, for Markov SDEs and for processes with memory; and posteriors."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key
from .._programs import jit
from ..faq import see
from ..sde import AbstractSDE
from ..transition import (
    CHUNK,
    AbstractCoordinates,
    Effort,
    Transition,
    forwards,
    in_chunks,
    keys_of,
    largest_rate,
    linear,
    transition_value,
)
from ._observed import Observed, transitions
from ._parameters import Parameters
from ._search import conditional_errors
from ._simulation import TINY, check_memory
from ._transition import (
    CONVERGED,
    DOUBTFUL,
    check_effort,
    coordinates_of,
    exact_log_probs,
    full_errors,
)
from .models import FractionalOrnsteinUhlenbeck, exact_transition, expansion


class SeriesLikelihood(eqx.Module):
    """The log-likelihood Σ log p(xᵢ₊₁ | xᵢ) as a function of the SDE; see `rf.series_likelihood`.

    `effort` is the effort per transition, None if transitions are exact. `key` seeds the random numbers,
    which are the same in every call.

    ```python
    import jax, numpy as np
    import roughflow as rf

    sde, x = rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), 1 + 0.3 * np.sin(np.arange(60) ** 2)
    likelihood = rf.series_likelihood(sde, np.arange(60) / 12, x, key=jax.random.key(0))
    likelihood(rf.OrnsteinUhlenbeck(2.0, 1.0, 1.0)), likelihood.effort
    ```
    """

    steps: Transition
    key: PRNGKeyArray
    effort: Effort | None
    coordinates: AbstractCoordinates | None

    @staticmethod
    def of(
        sde: AbstractSDE,
        steps: Transition,
        *,
        key: PRNGKeyArray,
        exact: bool,
        effort: Effort | None,
        coordinates: AbstractCoordinates | None,
    ) -> "SeriesLikelihood":
        """The likelihood with exact transitions, with the given effort, or with an effort chosen for this
        SDE."""
        check_effort(effort)
        if exact and exact_log_probs(sde, steps) is not None:
            return SeriesLikelihood(steps, key, None, coordinates)
        effort = effort or Effort.for_stiffness(largest_rate(sde, coordinates_of(sde, coordinates), steps))
        return SeriesLikelihood(steps, key, effort, coordinates)

    def __call__(self, sde: AbstractSDE) -> Array:
        """The log-likelihood; −inf, with zero derivatives, if a transition has zero density."""
        return _total(self, sde)

    def log_probs(self, sde: AbstractSDE) -> tuple[Array, Array]:
        """Log-density of each transition, `(N,)`, and its error."""
        return self.of_each(lambda step, key: self.log_prob(sde, step, key))

    def log_prob(self, sde: AbstractSDE, step: Transition, key: PRNGKeyArray) -> tuple[Array, Array]:
        """Log-density of one transition, and its error."""
        if self.effort is None:
            known = exact_transition(sde, step.start, step.dt)
            if known is None:
                raise ValueError(
                    f"the transitions of {type(sde).__name__} have no closed form, but this likelihood uses "
                    "exact transitions: call rf.series_likelihood again for this type of SDE"
                )
            value = known.log_prob(step.end)
            return value, jnp.zeros_like(value)
        coordinates = coordinates_of(sde, self.coordinates)
        drawn = transition_value(sde, coordinates, step, key, self.effort)
        far = expansion(sde, step.start, step.end, step.dt)
        if far is None:
            return drawn.log_prob, drawn.error
        converged = far[1] < CONVERGED
        return jnp.where(converged, far[0], drawn.log_prob), jnp.where(converged, far[1], drawn.error)

    def of_each(self, function: Callable[[Transition, PRNGKeyArray], Any]) -> Any:
        """Apply a function of a transition and its key to all transitions."""
        items = (self.steps, keys_of(self.key, self.steps))
        return in_chunks(lambda item: function(*item), items, len(self.steps.dt), CHUNK)


@functools.partial(jit, level=1)
def _total(likelihood: SeriesLikelihood, sde: AbstractSDE) -> Array:
    return forwards(sde, function=_Total(likelihood))


class _Total(eqx.Module):
    likelihood: SeriesLikelihood

    def __call__(self, sde: AbstractSDE) -> Array:
        total = jnp.sum(self.likelihood.log_probs(sde)[0])
        return jnp.where(jnp.isfinite(total), total, -jnp.inf)


UNIT = 10.0  # unit of an unbounded free parameter, in standard errors with all others fixed
STEP = 1e-3  # step of finite differences for the information, in standard errors
MANY = 16  # with at least this many parameters, scores use reverse mode and the information uses scores


class AbstractLikelihood(eqx.Module):
    """The log-likelihood as a function of free parameters θ, with penalties ½ Σ λⱼ θⱼ², in double
    precision."""

    parameters: eqx.AbstractVar[Parameters]
    penalty: eqx.AbstractVar[np.ndarray]  # (p,), usually zero
    steps: eqx.AbstractVar[Transition]
    effort: eqx.AbstractVar[Effort | None]
    coordinates: eqx.AbstractVar[AbstractCoordinates | None]

    @abc.abstractmethod
    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-density of each term, `(N,)`, its gradient with respect to the free parameters, `(N, p)`, and
        its error."""

    def log_likelihood(self, free: np.ndarray) -> float:
        """The log-likelihood without penalties."""
        return float(self.scores(free)[0].sum())

    def information(self, free: np.ndarray) -> np.ndarray:
        """The negative Hessian of the penalised log-likelihood, `(p, p)`, by central differences of the
        gradient."""
        return information_by_differences(self, free)

    def quick_information(self, free: np.ndarray) -> np.ndarray:
        """A fast approximation of the information for the start of a search: the outer product of the scores
        (Berndt, Hall, Hall & Hausman 1974)."""
        slopes = self.scores(free)[1]
        return slopes.T @ slopes + np.diag(self.penalty)

    @abc.abstractmethod
    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """Two errors of the log-likelihood, in nats: the Monte Carlo error, and the change when the numbers
        of functions and steps are doubled."""

    def errors(self, free: np.ndarray) -> np.ndarray:
        """Errors of the log-densities of all terms."""
        return self.scores(free)[2]

    @abc.abstractmethod
    def with_effort(self, effort: Effort) -> Self:
        """The same likelihood with another effort."""

    @abc.abstractmethod
    def described(self) -> str:
        """A description of the method or the effort, for the summary of a fit."""

    @abc.abstractmethod
    def sde(self, free: Array) -> Any:
        """The SDE with these parameters."""

    @property
    def smooth(self) -> "AbstractLikelihood":
        """A likelihood that is smooth in the parameters and has almost the same maximum."""
        return self

    def value(self, free: np.ndarray) -> float:
        """The penalised log-likelihood."""
        return self.log_likelihood(free) - 0.5 * float(self.penalty @ free**2)

    def rescaled(self, free: np.ndarray) -> tuple[Self, np.ndarray]:
        """The likelihood with free parameters in units of their standard errors at `free`, and the point
        `free` in these units.

        Searches and finite differences then do not depend on the units of time and values. A penalised
        parameter already has the scale 1/√λ.
        """
        curve = np.diag(self.quick_information(free))
        known = np.isfinite(curve) & (curve > 0) & (self.penalty == 0)
        parameters = self.parameters.rescaled(
            np.where(known, UNIT / np.sqrt(np.where(known, curve, 1.0)), 1.0)
        )
        factor = parameters.scale / self.parameters.scale
        return dataclasses.replace(self, parameters=parameters), free / factor

    def total(self, free: np.ndarray) -> tuple[float, np.ndarray]:
        """The penalised log-likelihood and its gradient; −inf if a term has zero density."""
        value, slopes, _ = self.scores(free)
        if not np.isfinite(value).all() or not np.isfinite(slopes).all():
            return -np.inf, np.zeros(len(free))
        value = float(value.sum()) - 0.5 * float(self.penalty @ free**2)
        return value, slopes.sum(axis=0) - self.penalty * free


def information_by_differences(likelihood: AbstractLikelihood, free: np.ndarray) -> np.ndarray:
    """The information by central differences of the gradient."""
    rows = []
    sizes = STEP * conditional_errors(likelihood.quick_information(free))
    for i in range(len(free)):
        move = np.zeros(len(free))
        move[i] = sizes[i]
        ahead, behind = likelihood.total(free + move)[1], likelihood.total(free - move)[1]
        rows.append((behind - ahead) / (2 * move[i]))
    return 0.5 * (np.array(rows) + np.array(rows).T)


class Likelihood(AbstractLikelihood):
    """The likelihood of a series of states: a product of transition densities."""

    parameters: Parameters
    of_sde: SeriesLikelihood
    penalty: np.ndarray

    @property
    def steps(self) -> Transition:
        return self.of_sde.steps

    @property
    def effort(self) -> Effort | None:
        return self.of_sde.effort

    @property
    def coordinates(self) -> AbstractCoordinates | None:
        return self.of_sde.coordinates

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-densities of all transitions, their scores and their errors."""
        value, slopes, error = _scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.asarray(error)

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(_value(self, jnp.asarray(free, float)))

    def information(self, free: np.ndarray) -> np.ndarray:
        """The information by central differences of the gradient or, if there are many parameters, as the
        outer product of the scores."""
        return self.quick_information(free) if len(free) >= MANY else super().information(free)

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """The Monte Carlo error of the log-likelihood, and its change when the numbers of functions and steps
        are doubled. Errors of suspect transitions are added up linearly, because they may be correlated."""
        if self.effort is None:
            return 0.0, 0.0
        values, _, errors = self.scores(free)
        finer = self.with_effort(self.effort.finer())
        moved = abs(finer.log_likelihood(free) - float(values.sum()))
        suspect = ~(errors < DOUBTFUL)
        drawn = float(np.hypot(np.linalg.norm(errors[~suspect]), errors[suspect].sum()))
        return drawn, moved if np.isfinite(moved) else np.inf

    def errors(self, free: np.ndarray) -> np.ndarray:
        """Errors of all transitions, as computed by `rf.transition_estimate`."""
        value, _, error = (jnp.asarray(part) for part in self.scores(free))
        if self.effort is None:
            return np.asarray(error)
        sde = self.sde(jnp.asarray(free, float))
        where = (sde, coordinates_of(sde, self.coordinates), self.steps, self.of_sde.key, self.effort)
        return np.asarray(full_errors(*where, value, error))

    def with_effort(self, effort: Effort) -> "Likelihood":
        return dataclasses.replace(self, of_sde=dataclasses.replace(self.of_sde, effort=effort))

    def described(self) -> str:
        return "exact" if self.effort is None else self.effort.described()


@functools.partial(jit, level=1)
def _value(likelihood: Likelihood, free: Array) -> Array:
    return jnp.sum(likelihood.of_sde.log_probs(likelihood.sde(free))[0])


def term_scores(likelihood: Likelihood, free: Array) -> tuple[Array, Array, Array]:
    """Log-densities of all transitions, their scores, and their errors."""

    def one(step: Transition, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        log_prob = lambda free: likelihood.of_sde.log_prob(likelihood.sde(free), step, key)
        # Forward mode compiles faster; the cost of reverse mode does not grow with the number of parameters.
        if free.size < MANY:
            (value, error), (slopes, _) = linear(log_prob, free)
        else:
            (value, error), slopes = jax.value_and_grad(log_prob, has_aux=True)(free)
        return value, slopes, error

    return likelihood.of_sde.of_each(one)


_scores = jit(term_scores, level=1)
EVEN = 1e-3  # tolerance for evenly spaced times, relative to the time step
NOISE = "measurement_noise"
FEW = 100  # number of right-hand sides up to which Levinson's algorithm is faster than a factorisation


class WholeLikelihood(AbstractLikelihood):
    """The exact likelihood of a process with memory, as a sum of terms log p(yᵢ | y₀, …, yᵢ₋₁).

    With a = e^{−κdt} and errors e of standard deviation τ, zᵢ = yᵢ₊₁ − μ − a(yᵢ − μ) = ξᵢ + eᵢ₊₁ − aeᵢ is a
    stationary normal sequence that does not depend on the first state, whose prior is flat. Missing values
    are parameters of z, with a flat prior, and are integrated out.
    """

    parameters: Parameters
    penalty: np.ndarray
    steps: Transition
    values: tuple[np.ndarray, ...]  # at evenly spaced times, NaN where missing
    gaps: tuple[float, ...]
    missing: tuple[tuple[int, ...], ...] = eqx.field(static=True)  # indices
    effort: None = None
    coordinates: None = None

    @staticmethod
    def of(parameters: Parameters, penalty: np.ndarray, series: Sequence[Observed]) -> "WholeLikelihood":
        values, gaps = zip(*(_lattice(one) for one in series), strict=True)
        missing = tuple(tuple(np.flatnonzero(np.isnan(x)).tolist()) for x in values)
        data = {"steps": transitions(series), "values": values, "gaps": gaps, "missing": missing}
        return WholeLikelihood(parameters=parameters, penalty=penalty, **data)

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        value, slopes = _whole_scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.zeros(len(value))

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        return 0.0, 0.0

    def with_effort(self, effort: Effort) -> "WholeLikelihood":
        return self

    def described(self) -> str:
        return "exact, jointly normal within a series"

    @property
    def noisy(self) -> bool:
        return isinstance(self.parameters.template, tuple)

    def model(self, free: Array) -> tuple[FractionalOrnsteinUhlenbeck, Array]:
        """The process and the standard deviation of the measurement errors, for free parameters."""
        found = self.parameters.sde(self.parameters.from_free(free))
        return (found[0], found[1][NOISE]) if self.noisy else (found, jnp.zeros(()))

    def sde(self, free: Array) -> FractionalOrnsteinUhlenbeck:
        return self.model(free)[0]

    def residuals(self, free: np.ndarray) -> np.ndarray:
        """Uniform residuals: the predictive distribution function at each value."""
        parts = self.parts(jnp.asarray(free, float))
        return np.clip(scipy.stats.norm.cdf(np.concatenate([e for _, e in parts])), TINY, 1 - TINY)

    def parts(self, free: Array) -> list[tuple[Array, Array]]:
        """Log-density and standardised prediction error of each value, for each series."""
        found = []
        for x, dt, missing in zip(self.values, self.gaps, self.missing, strict=True):
            gamma, columns = _sequence(*self.model(free), jnp.asarray(x), jnp.asarray(dt), missing)
            lost = np.isin(np.arange(1, len(x)), missing)
            values, errors = _sequential(*toeplitz_errors(gamma, columns), lost)
            found.append((values[~lost], errors[~lost]))
        return found

    def forecast(
        self, free: np.ndarray, ahead: np.ndarray, key: PRNGKeyArray, count: int, place: int
    ) -> np.ndarray:
        """Paths `(count, T, 1)` that continue one series given all of its values, at times counted from the
        end of the series. Free parameters have shape `(p,)`, or `(count, p)` with one vector per path."""
        values, dt = self.values[place], self.gaps[place]
        places = np.rint(ahead / dt).astype(int)
        if np.abs(places * dt - ahead).max() > EVEN * dt:
            raise ValueError(f"forecast times must be multiples of the time step of the series, {dt:g}")
        n, m = len(values) - 1, int(places[-1])
        check_memory(m * (count + n + m))
        each = np.atleast_2d(free)
        normal = np.split(np.asarray(jax.random.normal(key, (count, m + 1))), len(each))
        noise, mu, decay = [], [], []
        for one, draws in zip(each, normal, strict=True):
            gamma, past, tau, sde = self._moments(one, place, n + m - 1)
            # The measurement error of the last value, and the noise after it.
            cross = np.concatenate(
                [np.zeros((n, 1)), gamma[np.arange(m) + n - np.arange(n)[:, None]]], axis=1
            )
            cross[-1, 0] = tau**2
            prior = scipy.linalg.block_diag(tau**2, scipy.linalg.toeplitz(gamma[:m]))
            mean, spread = _conditional(*past, cross, prior)
            root = np.zeros_like(spread)
            first = 0 if tau else 1
            root[first:, first:] = scipy.linalg.cholesky(spread[first:, first:], lower=True)
            noise.append(mean + draws @ root.T)
            mu += len(draws) * [float(sde.mu)]
            decay += len(draws) * [float(np.exp(-sde.kappa * dt))]
        drawn, mu, decay = np.concatenate(noise), np.array(mu), np.array(decay)
        paths, now = [], values[-1] - drawn[:, 0] - mu
        for xi in drawn[:, 1:].T:
            now = decay * now + xi
            paths.append(mu + now)
        return np.stack(paths, axis=1)[:, places - 1, None]

    def smoothed(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """States given all values, at the times of the series, and their standard deviations `(n, 1)`."""
        means, deviations = [], []
        for place, values in enumerate(self.values):
            n, seen = len(values) - 1, np.flatnonzero(~np.isnan(values))
            _, past, tau, sde = self._moments(free, place, n - 1)
            # The covariance of z with the errors e.
            decay = float(np.exp(-sde.kappa * self.gaps[place]))
            cross = tau**2 * (np.eye(n, n + 1, 1) - decay * np.eye(n, n + 1))[:, seen]
            mean, spread = _conditional(*past, cross, tau**2 * np.eye(len(seen)))
            means.append(values[seen] - mean)
            deviations.append(np.sqrt(np.maximum(np.diag(spread), 0)))
        return np.concatenate(means)[:, None], np.concatenate(deviations)[:, None]

    def _moments(
        self, free: np.ndarray, place: int, count: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], float, Any]:
        """Return the autocovariances of ξ; those of z, and z with its derivatives with respect to the missing
        values; τ; and the SDE."""
        sde, tau = self.model(jnp.asarray(free, float))
        dt = jnp.asarray(self.gaps[place])
        gamma, columns = _sequence(sde, tau, jnp.asarray(self.values[place]), dt, self.missing[place])
        past = (np.asarray(gamma), np.asarray(columns))
        return np.asarray(sde.autocovariance(dt, count)), past, float(tau), sde


@functools.partial(jit, level=1)
def _sequence(
    sde: FractionalOrnsteinUhlenbeck, tau: Array, values: Array, dt: Array, missing: tuple[int, ...]
) -> tuple[Array, Array]:
    """The autocovariances of z `(n,)`, and z with its derivatives with respect to the missing values `(n, 1 +
    k)`."""
    n, decay = len(values) - 1, jnp.exp(-sde.kappa * dt)
    gamma = sde.autocovariance(dt, n - 1)
    gamma = gamma.at[0].add((1 + decay**2) * tau**2)
    gamma = gamma.at[1].add(-decay * tau**2)
    known = jnp.nan_to_num(values, nan=0.0)
    slopes = jnp.eye(n, n + 1, 1) - decay * jnp.eye(n, n + 1)
    return gamma, jnp.concatenate(
        [sde.innovations(known, dt)[:, None], slopes[:, np.array(missing, int)]], axis=1
    )


def _conditional(
    gamma: np.ndarray, columns: np.ndarray, cross: np.ndarray, prior: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean `(q,)` and covariance `(q, q)` of normal variables given z, whose covariances with z are `cross`
    `(n, q)`; missing values of z are integrated out."""
    given = np.concatenate([columns, cross], axis=1)
    if given.shape[1] < FEW:
        solved = scipy.linalg.solve_toeplitz(gamma, given)
    else:
        solved = scipy.linalg.cho_solve(scipy.linalg.cho_factor(scipy.linalg.toeplitz(gamma)), given)
    k = columns.shape[1] - 1
    solved, of_cross = solved[:, : k + 1], solved[:, k + 1 :]
    mean, spread = cross.T @ solved[:, 0], prior - cross.T @ of_cross
    if k:
        slopes, information = cross.T @ solved[:, 1:], columns[:, 1:].T @ solved[:, 1:]
        mean = mean - slopes @ np.linalg.solve(information, columns[:, 1:].T @ solved[:, 0])
        spread = spread + slopes @ np.linalg.solve(information, slopes.T)
    return mean, spread


@functools.partial(jit, level=1)
def _whole_scores(likelihood: WholeLikelihood, free: Array) -> tuple[Array, Array]:
    def log_probs(free: Array) -> tuple[Array, Array]:
        value = jnp.concatenate([part for part, _ in likelihood.parts(free)])
        return value, value

    slopes, value = jax.jacfwd(log_probs, has_aux=True)(free)
    return value, slopes


def toeplitz_errors(gamma: Array, x: Array) -> tuple[Array, Array]:
    """Standardised prediction errors `(n, q)` of the columns of `x` `(n, q)`, which are stationary normal
    sequences with autocovariance γ `(n,)`, and the standard deviations of the errors `(n,)`. Schur's
    algorithm needs O(n²) operations and stores no matrix."""
    ahead = gamma / jnp.sqrt(gamma[0])
    shift = lambda a: jnp.concatenate([a[1:], jnp.zeros_like(a[:1])])

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple:
        # `ahead` is the current column of the Cholesky factor, from the diagonal down.
        ahead, back, rest = carry
        size, error = ahead[0], rest[0] / ahead[0]
        back, rest = shift(back), shift(rest - jnp.outer(ahead, error))
        rho = back[0] / size
        root = jnp.sqrt(1 - rho**2)
        return ((ahead - rho * back) / root, (back - rho * ahead) / root, rest), (error, size)

    start = (ahead, ahead.at[0].set(0.0), x)
    return jax.lax.scan(step, start, None, length=len(x))[1]


def _sequential(errors: Array, sizes: Array, missing: np.ndarray) -> tuple[Array, Array]:
    """log p(yᵢ | earlier values) `(n,)` and standardised errors, from the errors of z and their derivatives
    with respect to the missing values `(n, 1 + k)`. The mean and covariance of the missing values follow by
    recursion."""
    k = errors.shape[1] - 1
    column = jnp.asarray(np.where(missing, np.cumsum(missing) - 1, 0))

    def step(carry: tuple[Array, Array], row: tuple) -> tuple:
        mean, spread = carry
        error, size, lost, i = row
        slope = error[1:]
        lean = spread @ slope
        wide = 1 + slope @ lean
        gap = error[0] + slope @ mean
        # A missing value is distributed such that its error is standard normal; an observed value gives
        # information about the missing ones.
        own = jnp.where(lost, slope[i], 1.0)
        unit = jnp.zeros(k).at[i].set(1.0)
        new_mean = mean - unit * gap / own
        cross = jnp.outer(unit, -lean / own)
        new_spread = spread + cross + cross.T + jnp.outer(unit, unit) * wide / own**2
        mean = jnp.where(lost, new_mean, mean - lean * gap / wide)
        spread = jnp.where(lost, new_spread, spread - jnp.outer(lean, lean) / wide)
        value = -0.5 * gap**2 / wide - 0.5 * jnp.log(2 * jnp.pi * wide) - jnp.log(size)
        return (mean, spread), (value, gap / jnp.sqrt(wide))

    if not k:
        error = errors[:, 0]
        return -0.5 * error**2 - jnp.log(sizes) - 0.5 * jnp.log(2 * jnp.pi), error
    rows = (errors, sizes, jnp.asarray(missing), column)
    return jax.lax.scan(step, (jnp.zeros(k), jnp.zeros((k, k))), rows)[1]


def _lattice(one: Observed) -> tuple[np.ndarray, float]:
    """The values at evenly spaced times, NaN where a value is missing, and the time step."""
    steps = np.diff(one.times)
    places = np.rint(np.append(0.0, np.cumsum(steps)) / steps.min()).astype(int)
    dt = float((one.times[-1] - one.times[0]) / places[-1])
    if np.abs(steps - dt * np.diff(places)).max() > EVEN * dt or places[-1] > 2 * len(places):
        raise ValueError(
            "a process with memory requires evenly spaced times, of which up to half may be missing: for "
            f"example, measure time in trading days{see('series')}"
        )
    values = np.full(places[-1] + 1, np.nan)
    values[places] = one.values[:, 0]
    return values, dt


class SeriesPosterior(eqx.Module):
    """The posterior of the parameters of an SDE as a log-density on Rᵖ; see `FittedSDE.posterior`.

    Called with z of shape `(p,)`, it returns the log-likelihood plus the log prior plus the log-Jacobian of
    the map from z to the parameters. `constrain` is that map; `names` and `dimension` describe z. `start` is
    z at the estimates and `scale` a square root of its covariance. If `scale` is passed to
    `rf.overdamped_langevin`, the sampler needs no warm-up.

    ```python
    import jax, numpy as np
    import roughflow as rf

    times, x = np.arange(60) / 12, np.cumsum(np.sin(np.arange(60) ** 2))
    result = rf.fit_sde(rf.BrownianMotion(0.0, 1.0), times, x, key=jax.random.key(0))
    posterior = result.posterior(log_prior=lambda sde: -0.5 * sde.mu**2)
    sde = rf.overdamped_langevin(posterior, posterior.dimension, scale=posterior.scale)
    starts = posterior.starts(4, key=jax.random.key(1))
    chain = rf.sample_chain(rf.AdjustedSampler(sde, 0.8), starts, key=jax.random.key(2), num_steps=100)
    posterior.constrain(chain.samples)["sigma"].mean()
    ```
    """

    parameters: Parameters
    likelihood: Callable[[Any], Array]
    log_prior: Callable[[AbstractSDE], Array] | None
    penalty: Array  # (p,), precisions of normal priors
    start: Array  # (p,)
    scale: Array  # (p, p), lower triangular

    @property
    def names(self) -> tuple[str, ...]:
        return self.parameters.names

    @property
    def dimension(self) -> int:
        return len(self.names)

    def __call__(self, z: Array) -> Array:
        sde = self.parameters.sde(self.parameters.from_free(z))
        value = self.likelihood(sde) + self.parameters.log_slope(z) - 0.5 * jnp.sum(self.penalty * z**2)
        if self.log_prior is None:
            return value
        # For a partially observed series, `sde` is a tuple of the SDE and other parameters.
        return value + self.log_prior(sde[0] if isinstance(sde, tuple) else sde)

    def starts(self, num_chains: int, *, key: PRNGKeyArray) -> Array:
        """Starting points `(num_chains, p)` for Markov chains, drawn around the estimates with their
        covariance."""
        noise = jax.random.normal(check_key(key), (check_count("num_chains", num_chains), self.dimension))
        return self.start[None] + noise @ self.scale.T

    def constrain(self, z: Array) -> dict[str, Array]:
        """The parameters by name, for z of shape `(..., p)`."""
        values = self.parameters.from_free(jnp.asarray(z))
        return {name: values[..., i] for i, name in enumerate(self.names)}
