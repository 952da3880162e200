"""The log-likelihood of a series as a function of parameters without bounds, with scores."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Transition
from ._forward import linear
from ._parameters import Parameters
from ._series_likelihood import SeriesLikelihood

STEP = 1e-4  # of differences of gradients, for the information
MANY = 16  # parameters, from which on scores go backwards, and the information is theirs


class Likelihood(eqx.Module):
    """The log-likelihood of a series for an SDE with free parameters θ, less penalties ½ Σ λⱼ θⱼ²."""

    parameters: Parameters
    of_sde: SeriesLikelihood
    penalty: np.ndarray  # (p,), most often zero

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
        """log p `(N,)` of each transition, its derivatives `(N, p)` in the free parameters, and its error."""
        value, slopes, error = _scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.asarray(error)

    def total(self, free: np.ndarray) -> tuple[float, np.ndarray]:
        """The penalised log-likelihood and its gradient; −inf where some transition is out of reach."""
        value, slopes, _ = self.scores(free)
        if not np.isfinite(value).all() or not np.isfinite(slopes).all():
            return -np.inf, np.zeros(len(free))
        value = float(value.sum()) - 0.5 * float(self.penalty @ free**2)
        return value, slopes.sum(axis=0) - self.penalty * free

    def value(self, free: np.ndarray) -> float:
        """The penalised log-likelihood alone."""
        return float(_value(self, jnp.asarray(free, float))) - 0.5 * float(self.penalty @ free**2)

    def information(self, free: np.ndarray) -> np.ndarray:
        """Of the penalised log-likelihood, `(p, p)`: by central differences of its gradient or, if parameters
        are many, from the outer product of the scores (Berndt, Hall, Hall & Hausman 1974)."""
        if len(free) >= MANY:
            return self.score_information(free)
        rows = []
        for i in range(len(free)):
            move = np.zeros(len(free))
            move[i] = STEP * max(1.0, abs(free[i]))
            ahead, behind = self.total(free + move)[1], self.total(free - move)[1]
            rows.append((behind - ahead) / (2 * move[i]))
        return 0.5 * (np.array(rows) + np.array(rows).T)

    def score_information(self, free: np.ndarray) -> np.ndarray:
        slopes = self.scores(free)[1]
        return slopes.T @ slopes + np.diag(self.penalty)

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))

    def with_effort(self, effort: Effort | None) -> "Likelihood":
        return dataclasses.replace(self, of_sde=dataclasses.replace(self.of_sde, effort=effort))


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
