"""The log-likelihood of a series as a function of parameters without bounds, with scores."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Transition
from ._parameters import Parameters
from ._transition import CHUNK, coordinates_of, in_chunks, keys_of, transition_value
from .models import AbstractNamedSDE

STEP = 1e-4  # of differences of gradients, for the information
MANY = 16  # parameters, from which on scores go backwards, and the information is theirs


class Likelihood(eqx.Module):
    """Σ log p(xᵢ₊₁ | xᵢ) − ½ Σ λⱼ θⱼ² for an SDE with free parameters θ, most often with penalties λ of 0.
    `effort` is None for exact transitions."""

    parameters: Parameters
    steps: Transition
    key: PRNGKeyArray
    effort: Effort | None
    coordinates: AbstractCoordinates | None
    penalty: np.ndarray  # (p,)

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

    def log_prob(self, free: Array, step: Transition, key: PRNGKeyArray) -> tuple[Array, Array]:
        """log p of one transition, and its error."""
        sde = self.sde(free)
        if self.effort is None:
            assert isinstance(sde, AbstractNamedSDE)
            value = sde.exact_log_prob(step.start, step.end, step.dt)
            assert value is not None
            return value, jnp.zeros_like(value)
        coordinates = coordinates_of(sde, self.coordinates)
        return transition_value(sde, coordinates, step, key, self.effort)[:2]

    def of_each(self, function: Callable[[Transition, PRNGKeyArray], Any]) -> Any:
        """A function of a transition and its key for all of them."""
        items = (self.steps, keys_of(self.key, self.steps))
        return in_chunks(lambda item: function(*item), items, len(self.steps.dt), CHUNK)

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))

    def with_effort(self, effort: Effort | None) -> "Likelihood":
        return dataclasses.replace(self, effort=effort)


@functools.partial(jit, level=1)
def _value(likelihood: Likelihood, free: Array) -> Array:
    return jnp.sum(likelihood.of_each(lambda step, key: likelihood.log_prob(free, step, key)[0]))


@functools.partial(jit, level=1)
def _scores(likelihood: Likelihood, free: Array) -> tuple[Array, Array, Array]:
    """log p of all transitions, their scores, and their errors."""

    def forwards(step: Transition, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        pushed = lambda along: jax.jvp(lambda f: likelihood.log_prob(f, step, key), (free,), (along,))
        (value, error), (slopes, _) = jax.vmap(pushed, out_axes=(None, 0))(
            jnp.eye(free.size, dtype=free.dtype)
        )
        return value, slopes, error

    def backwards(step: Transition, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        graded = jax.value_and_grad(lambda f: likelihood.log_prob(f, step, key), has_aux=True)
        (value, error), slopes = graded(free)
        return value, slopes, error

    # In either direction one by one, as all of their scores are wanted; forwards compiles in less time.
    return likelihood.of_each(forwards if free.size < MANY else backwards)
