"""The log-likelihood of a series as a function of parameters without bounds, with scores."""

import abc
import dataclasses
import functools
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..transition import AbstractCoordinates, Effort, Transition, linear
from ._parameters import Parameters
from ._search import conditional_errors
from ._series_likelihood import SeriesLikelihood
from ._transition import DOUBTFUL, coordinates_of, full_errors

UNIT = 10.0  # standard errors, given all other parameters, that a free parameter without bounds is counted in
STEP = 1e-3  # standard errors, of differences of gradients for the information
MANY = 16  # parameters, from which on scores go backwards, and the information is theirs


class AbstractLikelihood(eqx.Module):
    """A log-likelihood of free parameters θ, less penalties ½ Σ λⱼ θⱼ²; all in double precision."""

    parameters: eqx.AbstractVar[Parameters]
    penalty: eqx.AbstractVar[np.ndarray]  # (p,), most often zero
    steps: eqx.AbstractVar[Transition]
    effort: eqx.AbstractVar[Effort | None]
    coordinates: eqx.AbstractVar[AbstractCoordinates | None]

    @abc.abstractmethod
    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log p `(N,)` of each part, its derivatives `(N, p)` in the free parameters, and its error."""

    @abc.abstractmethod
    def log_likelihood(self, free: np.ndarray) -> float:
        """Without penalties."""

    @abc.abstractmethod
    def information(self, free: np.ndarray) -> np.ndarray:
        """Minus the second derivatives of the penalised log-likelihood, `(p, p)`."""

    @abc.abstractmethod
    def quick_information(self, free: np.ndarray) -> np.ndarray:
        """About the same, to begin a search with."""

    @abc.abstractmethod
    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        """Of the log-likelihood, in nats: the Monte Carlo error, and how far twice the functions and steps
        move it."""

    def errors(self, free: np.ndarray) -> np.ndarray:
        """Of log p of each part."""
        return self.scores(free)[2]

    @abc.abstractmethod
    def with_effort(self, effort: Effort) -> Self:
        """With another effort."""

    @abc.abstractmethod
    def described(self) -> str:
        """The work that goes into it, in words."""

    @abc.abstractmethod
    def sde(self, free: Array) -> Any:
        """The SDE with these parameters."""

    def value(self, free: np.ndarray) -> float:
        """The penalised log-likelihood."""
        return self.log_likelihood(free) - 0.5 * float(self.penalty @ free**2)

    def rescaled(self, free: np.ndarray) -> tuple[Self, np.ndarray]:
        """With free parameters that are counted in standard errors at `free`, and that point in them.

        A search, and differences, then do not depend on the units of time and values. A parameter with a
        penalty has a scale already, 1/√λ.
        """
        curve = np.diag(self.quick_information(free))
        known = np.isfinite(curve) & (curve > 0) & (self.penalty == 0)
        parameters = self.parameters.rescaled(
            np.where(known, UNIT / np.sqrt(np.where(known, curve, 1.0)), 1.0)
        )
        factor = parameters.scale / self.parameters.scale
        return dataclasses.replace(self, parameters=parameters), free / factor

    def total(self, free: np.ndarray) -> tuple[float, np.ndarray]:
        """The penalised log-likelihood and its gradient; −inf where some part is out of reach."""
        value, slopes, _ = self.scores(free)
        if not np.isfinite(value).all() or not np.isfinite(slopes).all():
            return -np.inf, np.zeros(len(free))
        value = float(value.sum()) - 0.5 * float(self.penalty @ free**2)
        return value, slopes.sum(axis=0) - self.penalty * free


def information_by_differences(likelihood: AbstractLikelihood, free: np.ndarray) -> np.ndarray:
    """By central differences of the gradient."""
    rows = []
    sizes = STEP * conditional_errors(likelihood.quick_information(free))
    for i in range(len(free)):
        move = np.zeros(len(free))
        move[i] = sizes[i]
        ahead, behind = likelihood.total(free + move)[1], likelihood.total(free - move)[1]
        rows.append((behind - ahead) / (2 * move[i]))
    return 0.5 * (np.array(rows) + np.array(rows).T)


class Likelihood(AbstractLikelihood):
    """That of a series of states: a product of transition densities."""

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
        """As of its class, for each transition."""
        value, slopes, error = _scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.asarray(error)

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(_value(self, jnp.asarray(free, float)))

    def information(self, free: np.ndarray) -> np.ndarray:
        """By central differences of the gradient or, if parameters are many, from the scores."""
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
        """As of its class; errors of suspect transitions, which may not be independent, are added up."""
        if self.effort is None:
            return 0.0, 0.0
        values, _, errors = self.scores(free)
        finer = self.with_effort(self.effort.finer())
        moved = abs(finer.log_likelihood(free) - float(values.sum()))
        suspect = ~(errors < DOUBTFUL)
        drawn = float(np.hypot(np.linalg.norm(errors[~suspect]), errors[suspect].sum()))
        return drawn, moved if np.isfinite(moved) else np.inf

    def errors(self, free: np.ndarray) -> np.ndarray:
        """As by `rf.transition_estimate`."""
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
    """log p of all transitions, their scores, and their errors."""

    def one(step: Transition, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        log_prob = lambda free: likelihood.of_sde.log_prob(likelihood.sde(free), step, key)
        # Forwards takes less time to compile; backwards takes as long for many parameters as for few.
        if free.size < MANY:
            (value, error), (slopes, _) = linear(log_prob, free)
        else:
            (value, error), slopes = jax.value_and_grad(log_prob, has_aux=True)(free)
        return value, slopes, error

    return likelihood.of_sde.of_each(one)
