"""What a named SDE says beside its drift and noise."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._checks import as_real, finite_array
from ...sde import AbstractItoSDE, AbstractSDE
from ...transition import AbstractCoordinates
from .._parameters import Domain
from ._distributions import AbstractDistribution
from ._moments import Increments


def parameter(value: float | Array) -> Array:
    """A field of a model as an array of floats; what is none is left for the model to refuse by its name."""
    try:
        return jnp.asarray(as_real("parameter", value), float)
    except (TypeError, ValueError):
        return value  # pyright: ignore[reportReturnType]


class AbstractNamedSDE(AbstractItoSDE):
    """An Itô SDE whose fields are its parameters.

    `domains` says where they may lie, by their names; `coordinates` in which variables it is solved;
    `exact_transition` how X(t + dt) is distributed, where that is known; `expansion` log p(x₁ | x₀) where it
    is known for long spans.

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

    rf.transition_log_prob(Logistic(1.0, 2.0, 0.3), jnp.ones(1), jnp.ones(1), 0.1, key=jax.random.key(0))
    ```
    """

    domains: ClassVar[Mapping[str, Domain]]

    def __check_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("converter") is parameter or isinstance(
                value, float | jax.Array | np.ndarray
            ):
                finite_array(field.name, value)

    @property
    @abc.abstractmethod
    def coordinates(self) -> AbstractCoordinates:
        """The variables in which the SDE is solved."""

    def exact_transition(self, x0: Array, dt: Array) -> AbstractDistribution | None:
        """The distribution of X(t + dt) given X(t) = x₀ `(d,)`; None, the default, if it is not known.

        Any module with `log_prob(x1)`, for x₁ of shape `(d,)`, `sample(key)` and, if d = 1, `cdf(x1)`.
        """
        return None

    def short_transition(self, x0: Array, dt: Array) -> AbstractDistribution | None:
        """The same for short spans alone, right to the first order in dt, to simulate with; None, the
        default, for that of the SDE made linear at x₀ in its coordinates."""
        return None

    def expansion(self, x0: Array, x1: Array, dt: Array) -> tuple[Array, Array] | None:
        """log p(x₁ | x₀) by a series that converges quickly for long spans, and the error of the part that is
        summed, large for short ones; None, the default, if there is none."""
        return None

    @classmethod
    def from_series(cls, times: Any, values: Any) -> Self:
        """The SDE with parameters from the moments of a series: starting values for `rf.fit_sde`, which takes
        the class in place of an SDE too.

        ```python
        import numpy as np
        import roughflow as rf

        x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
        rf.CoxIngersollRoss.from_series(np.arange(60) / 12, x)
        ```
        """
        some = Increments(times, values)
        count, dimension = some.x.shape[1], cls.dimension
        if isinstance(dimension, int) and count != dimension:
            raise ValueError(f"values have {count} columns, but {cls.__name__} has dimension {dimension}")
        return cls(**cls.starting_values(some))

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        """Parameters by name, from the increments of a series."""
        raise TypeError(
            f"{cls.__name__} has no starting_values: give an SDE with parameters to start from, such as "
            f"{cls.__name__}(...)"
        )


def exact_transition(sde: AbstractSDE, x0: Array, dt: Array) -> AbstractDistribution | None:
    """Of any SDE, None if it is not known."""
    known = sde.exact_transition(x0, dt) if isinstance(sde, AbstractNamedSDE) else None
    if known is None and hasattr(sde, "exact_log_prob"):
        raise TypeError(
            f"{type(sde).__name__} has exact_log_prob, which is not used any more: define "
            "exact_transition(x0, dt), which returns a distribution with log_prob, sample and cdf"
        )
    return known


def expansion(sde: AbstractSDE, x0: Array, x1: Array, dt: Array) -> tuple[Array, Array] | None:
    """Of any SDE, None if there is none."""
    return sde.expansion(x0, x1, dt) if isinstance(sde, AbstractNamedSDE) else None
