"""The log-likelihood of a series as a function of parameters without bounds, with scores."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..sde import AbstractSDE
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Transition
from ._parameters import Parameters
from ._transition import coordinates_of, transition_values
from .models import AbstractNamedSDE

STEP = 1e-4  # of differences of gradients, for the information


class Likelihood(eqx.Module):
    """Σ log p(xᵢ₊₁ | xᵢ) for an SDE with free parameters. `effort` is None for exact transitions."""

    parameters: Parameters
    steps: Transition
    key: PRNGKeyArray
    effort: Effort | None
    coordinates: AbstractCoordinates | None

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log p `(N,)` of each transition, its derivatives `(N, p)` in the free parameters, and its error."""
        value, slopes, error = _scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.asarray(error)

    def total(self, free: np.ndarray) -> tuple[float, np.ndarray]:
        """The log-likelihood and its gradient; −inf where some transition is out of reach."""
        value, slopes, _ = self.scores(free)
        if not np.isfinite(value).all() or not np.isfinite(slopes).all():
            return -np.inf, np.zeros(len(free))
        return float(value.sum()), slopes.sum(axis=0)

    def value(self, free: np.ndarray) -> float:
        """The log-likelihood alone."""
        return float(_value(self, jnp.asarray(free, float)))

    def information(self, free: np.ndarray) -> np.ndarray:
        """−∂² log-likelihood, `(p, p)`, by central differences of its gradient."""
        rows = []
        for i in range(len(free)):
            move = np.zeros(len(free))
            move[i] = STEP * max(1.0, abs(free[i]))
            ahead, behind = self.total(free + move)[1], self.total(free - move)[1]
            rows.append((behind - ahead) / (2 * move[i]))
        return 0.5 * (np.array(rows) + np.array(rows).T)

    def log_probs(self, sde: AbstractSDE) -> tuple[Array, Array]:
        if self.effort is None:
            assert isinstance(sde, AbstractNamedSDE)
            values = jax.vmap(lambda step: sde.exact_log_prob(step.start, step.end, step.dt))(self.steps)
            assert values is not None
            return values, jnp.zeros_like(values)
        coordinates = coordinates_of(sde, self.coordinates)
        value, error, _ = transition_values(sde, coordinates, self.steps, self.key, self.effort)
        return value, error

    def sde(self, free: Array) -> Any:
        return self.parameters.sde(self.parameters.from_free(free))

    def error(self, free: np.ndarray) -> float:
        """How far the log-likelihood moves with twice the effort."""
        return 0.0 if self.effort is None else abs(self.more().value(free) - self.total(free)[0])

    def more(self) -> "Likelihood":
        """With twice the effort."""
        effort = self.effort and self.effort.more()
        return Likelihood(self.parameters, self.steps, self.key, effort, self.coordinates)

    def described(self) -> str:
        """The work that goes into it, in words."""
        return "exact" if self.effort is None else self.effort.described()


@functools.partial(jit, level=1)
def _value(likelihood: Likelihood, free: Array) -> Array:
    return jnp.sum(likelihood.log_probs(likelihood.sde(free))[0])


@functools.partial(jit, level=1)
def _scores(likelihood: Likelihood, free: Array) -> tuple[Array, Array, Array]:
    """Parameters are few, so derivatives go forwards: all transitions' scores come with their sum."""

    def values(free: Array) -> Any:
        return likelihood.log_probs(likelihood.sde(free))

    pushed = lambda direction: jax.jvp(values, (free,), (direction,))
    (value, error), (slopes, _) = jax.vmap(pushed, out_axes=(None, 0))(jnp.eye(free.size, dtype=free.dtype))
    return value, slopes.T, error
