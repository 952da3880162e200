"""Likelihoods of series: with transition densities or memory; and posteriors."""

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
    choose_effort,
    forwards,
    in_chunks,
    keys_of,
    linear,
    transition_value,
)
from ._observed import Observed, transitions
from ._parameters import Parameters
from ._residuals import TINY
from ._search import conditional_errors
from ._simulation import check_memory
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
        """With exact transitions, the given effort, or an effort chosen for this SDE."""
        check_effort(effort)
        if exact and exact_log_probs(sde, steps) is not None:
            return SeriesLikelihood(steps, key, None, coordinates)
        effort = effort or choose_effort(sde, coordinates_of(sde, coordinates), steps)
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
        """Map a function of a transition and its key over all transitions."""
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


UNIT = 10.0  # unit of an unbounded free parameter, in standard errors given all others
STEP = 1e-3  # step of finite differences for the information, in standard errors
MANY = 16  # parameters, from which scores use reverse mode and the information is their outer product


class AbstractLikelihood(eqx.Module):
    """A log-likelihood of free parameters θ, less penalties ½ Σ λⱼ θⱼ², in double precision."""

    parameters: eqx.AbstractVar[Parameters]
    penalty: eqx.AbstractVar[np.ndarray]  # (p,), usually zero
    steps: eqx.AbstractVar[Transition]
    effort: eqx.AbstractVar[Effort | None]
    coordinates: eqx.AbstractVar[AbstractCoordinates | None]

    @abc.abstractmethod
    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-density of each term, `(N,)`, its gradient in the free parameters, `(N, p)`, and its error."""

    @abc.abstractmethod
    def log_likelihood(self, free: np.ndarray) -> float:
        """The log-likelihood without penalties."""

    @abc.abstractmethod
    def information(self, free: np.ndarray) -> np.ndarray:
        """The negative Hessian of the penalised log-likelihood, `(p, p)`."""

    @abc.abstractmethod
    def quick_information(self, free: np.ndarray) -> np.ndarray:
        """A fast approximation of the information, to start a search with."""

    @abc.abstractmethod
    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """Errors of the log-likelihood, in nats: Monte Carlo, and the change when functions and steps are
        doubled."""

    def errors(self, free: np.ndarray) -> np.ndarray:
        """Errors of the log-densities of all terms."""
        return self.scores(free)[2]

    @abc.abstractmethod
    def with_effort(self, effort: Effort) -> Self:
        """The same likelihood with another effort."""

    @abc.abstractmethod
    def described(self) -> str:
        """The effort, in words."""

    @abc.abstractmethod
    def sde(self, free: Array) -> Any:
        """The SDE with these parameters."""

    def value(self, free: np.ndarray) -> float:
        """The penalised log-likelihood."""
        return self.log_likelihood(free) - 0.5 * float(self.penalty @ free**2)

    def rescaled(self, free: np.ndarray) -> tuple[Self, np.ndarray]:
        """The likelihood with free parameters in units of their standard errors at `free`, and that point.

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
        """Terms of the likelihood, one per transition."""
        value, slopes, error = _scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.asarray(error)

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(_value(self, jnp.asarray(free, float)))

    def information(self, free: np.ndarray) -> np.ndarray:
        """The information by central differences of the gradient; by the scores if there are many
        parameters."""
        if len(free) >= MANY:
            return self.quick_information(free)
        return information_by_differences(self, free)

    def quick_information(self, free: np.ndarray) -> np.ndarray:
        """The outer product of the scores (Berndt, Hall, Hall & Hausman 1974)."""
        slopes = self.scores(free)[1]
        return slopes.T @ slopes + np.diag(self.penalty)

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """Errors of the log-likelihood. Errors of suspect transitions are added, as they may be
        correlated."""
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


@functools.partial(jit, level=1)
def _scores(likelihood: Likelihood, free: Array) -> tuple[Array, Array, Array]:
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


EVEN = 1e-3  # tolerance of evenly spaced times, relative to the step


class WholeLikelihood(AbstractLikelihood):
    """The exact likelihood of a process with memory, in terms log p(xᵢ | x₀, …, xᵢ₋₁)."""

    parameters: Parameters
    penalty: np.ndarray
    steps: Transition
    values: tuple[np.ndarray, ...]
    gaps: tuple[float, ...]
    effort: None = None
    coordinates: None = None

    @staticmethod
    def of(parameters: Parameters, penalty: np.ndarray, series: Sequence[Observed]) -> "WholeLikelihood":
        values = tuple(one.values[:, 0] for one in series)
        gaps = tuple(_even(one.times) for one in series)
        return WholeLikelihood(
            parameters=parameters, penalty=penalty, steps=transitions(series), values=values, gaps=gaps
        )

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        value, slopes = _whole_scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.zeros(len(value))

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(self.scores(free)[0].sum())

    def information(self, free: np.ndarray) -> np.ndarray:
        return information_by_differences(self, free)

    def quick_information(self, free: np.ndarray) -> np.ndarray:
        slopes = self.scores(free)[1]
        return slopes.T @ slopes + np.diag(self.penalty)

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        return 0.0, 0.0

    def with_effort(self, effort: Effort) -> "WholeLikelihood":
        return self

    def described(self) -> str:
        return "exact, jointly normal within a series"

    def sde(self, free: Array) -> FractionalOrnsteinUhlenbeck:
        return self.parameters.sde(self.parameters.from_free(free))

    def residuals(self, free: np.ndarray) -> np.ndarray:
        """Uniform residuals: the predictive distribution function at each value."""
        normal = np.concatenate([np.asarray(e) for _, e in self.parts(self.sde(jnp.asarray(free, float)))])
        return np.clip(scipy.stats.norm.cdf(normal), TINY, 1 - TINY)

    def parts(self, sde: FractionalOrnsteinUhlenbeck) -> list[tuple[Array, Array]]:
        """Log-density and standardised prediction error of each value, for each series."""
        pairs = zip(self.values, self.gaps, strict=True)
        return [
            toeplitz_log_probs(
                sde.autocovariance(jnp.asarray(dt), len(x) - 2), sde.innovations(jnp.asarray(x), dt)
            )
            for x, dt in pairs
        ]

    def forecast(
        self, free: np.ndarray, ahead: np.ndarray, key: PRNGKeyArray, count: int, place: int
    ) -> np.ndarray:
        """Paths `(count, T, 1)` that continue one series, given all of its values, at times counted from its
        end. Free parameters have shape `(p,)`, or `(count, p)` with one vector per path."""
        values, dt = self.values[place], self.gaps[place]
        places = np.rint(ahead / dt).astype(int)
        if np.abs(places * dt - ahead).max() > EVEN * dt:
            raise ValueError(f"forecast times must be multiples of the time step of the series, {dt:g}")
        n, m = len(values) - 1, int(places[-1])
        check_memory(m * (count + n + m))
        sdes = jax.vmap(self.sde)(jnp.atleast_2d(jnp.asarray(free, float)))
        gammas, pasts = map(np.asarray, _moments(sdes, jnp.asarray(values), jnp.asarray(dt), n + m - 1))
        normal = np.split(np.asarray(jax.random.normal(key, (count, m))), len(gammas))
        noise = np.concatenate([_continued(*part) for part in zip(gammas, pasts, normal, strict=True)])
        mu, decay = np.asarray(sdes.mu), np.exp(-np.asarray(sdes.kappa) * dt)
        paths, now = [], np.full(count, values[-1]) - mu
        for xi in noise.T:
            now = decay * now + xi
            paths.append(mu + now)
        return np.stack(paths, axis=1)[:, places - 1, None]


@functools.partial(jit, level=1)
def _moments(sdes: FractionalOrnsteinUhlenbeck, values: Array, dt: Array, count: int) -> tuple[Array, Array]:
    """The autocovariances and the innovations of a series, for each of several SDEs."""
    return jax.vmap(lambda sde: (sde.autocovariance(dt, count), sde.innovations(values, dt)))(sdes)


def _continued(gamma: np.ndarray, past: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Draws `(K, m)` that continue a stationary normal sequence after its first n values, from standard
    normal numbers."""
    n, m = len(past), normal.shape[1]
    cross = gamma[np.abs(np.arange(n)[:, None] - (n + np.arange(m)))]
    weights = scipy.linalg.solve_toeplitz(gamma[:n], cross)
    spread = scipy.linalg.cholesky(scipy.linalg.toeplitz(gamma[:m]) - cross.T @ weights, lower=True)
    return past @ weights + normal @ spread.T


@functools.partial(jit, level=1)
def _whole_scores(likelihood: WholeLikelihood, free: Array) -> tuple[Array, Array]:
    def log_probs(free: Array) -> tuple[Array, Array]:
        value = jnp.concatenate([part for part, _ in likelihood.parts(likelihood.sde(free))])
        return value, value

    slopes, value = jax.jacfwd(log_probs, has_aux=True)(free)
    return value, slopes


def toeplitz_log_probs(gamma: Array, x: Array) -> tuple[Array, Array]:
    """log p(xᵢ | x₀, …, xᵢ₋₁) `(n,)` of a stationary normal sequence with autocovariance γ `(n,)`, and its
    standardised prediction errors, by Schur's algorithm in O(n²) operations without storing a matrix."""
    ahead = gamma / jnp.sqrt(gamma[0])
    shift = lambda a: jnp.concatenate([a[1:], jnp.zeros_like(a[:1])])

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple:
        # `ahead` is the current column of the Cholesky factor, from the diagonal down.
        ahead, back, rest = carry
        error = rest[0] / ahead[0]
        value = -0.5 * error**2 - jnp.log(ahead[0]) - 0.5 * jnp.log(2 * jnp.pi)
        back, rest = shift(back), shift(rest - error * ahead)
        rho = back[0] / ahead[0]
        root = jnp.sqrt(1 - rho**2)
        return ((ahead - rho * back) / root, (back - rho * ahead) / root, rest), (value, error)

    start = (ahead, ahead.at[0].set(0.0), x)
    return jax.lax.scan(step, start, None, length=x.size)[1]


def _even(times: np.ndarray) -> float:
    """The time step of evenly spaced times."""
    steps = np.diff(times)
    dt = float((times[-1] - times[0]) / len(steps))
    if np.abs(steps - dt).max() > EVEN * dt:
        raise ValueError(
            "a process with memory requires evenly spaced times without gaps: for example, count trading days"
            + see("series")
        )
    return dt


class SeriesPosterior(eqx.Module):
    """The posterior of the parameters of an SDE as a log-density on Rᵖ; see `FittedSDE.posterior`.

    Called with z of shape `(p,)`, it returns the log-likelihood plus the log prior plus the log-Jacobian of
    the map from z to the parameters. `constrain` is that map; `names` and `dimension` describe z. `start` is
    z at the estimates and `scale` a square root of its covariance. With `scale` as the diffusion of
    `rf.overdamped_langevin` a sampler needs no warm-up.

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
        # A partially observed series has an SDE and further parameters.
        return value + self.log_prior(sde[0] if isinstance(sde, tuple) else sde)

    def starts(self, num_chains: int, *, key: PRNGKeyArray) -> Array:
        """Starting points `(num_chains, p)` of chains, dispersed around the estimates by their standard
        errors."""
        noise = jax.random.normal(check_key(key), (check_count("num_chains", num_chains), self.dimension))
        return self.start[None] + noise @ self.scale.T

    def constrain(self, z: Array) -> dict[str, Array]:
        """The parameters by name, for z of shape `(..., p)`."""
        values = self.parameters.from_free(jnp.asarray(z))
        return {name: values[..., i] for i, name in enumerate(self.names)}
