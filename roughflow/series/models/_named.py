"""What a named SDE says beside its drift and noise."""

import abc
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from ...sde import AbstractItoSDE
from .._coordinates import AbstractCoordinates
from .._parameters import Domain


def parameter(value: float | Array) -> Array:
    """A field of a model as an array of floats."""
    return jnp.asarray(value, float)


class AbstractNamedSDE(AbstractItoSDE):
    """An Itô SDE whose fields are its parameters.

    `domains` says where they may lie, by their names; `coordinates` in which variables it is solved;
    `exact_log_prob` what its transitions are, where that is known.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    class Logistic(rf.AbstractNamedSDE):
        rate: float
        capacity: float
        sigma: float
        domains = {name: rf.Domain(low=0.0) for name in ("rate", "capacity", "sigma")}

        @property
        def coordinates(self):
            return rf.Logarithm()

        def drift(self, t, z):
            return self.rate * z * (1 - z / self.capacity)

        def diffusion(self, t, z):
            return self.sigma * z[:, None]

        def exact_log_prob(self, x0, x1, dt):
            return None

    rf.transition_log_prob(Logistic(1.0, 2.0, 0.3), jnp.ones(1), jnp.ones(1), 0.1, key=jax.random.key(0))
    ```
    """

    domains: ClassVar[Mapping[str, Domain]]

    @property
    @abc.abstractmethod
    def coordinates(self) -> AbstractCoordinates:
        """The variables in which the SDE is solved."""

    @abc.abstractmethod
    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> Array | None:
        """log p(x₁ | x₀) a span dt later, one transition, points `(d,)`; None if it is not known."""
