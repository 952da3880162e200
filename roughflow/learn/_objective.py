"""What a fit makes small."""

import abc
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

# Nats that a point counts in a loss if no path reaches it, and a sample if it escapes. It has no gradient,
# but a model that loses it must not look better for that than one that has it.
LOST = 1000.0


class AbstractObjective(eqx.Module):
    """A loss of a model. Parameters the objective holds itself, a proposal's network say, are trained too;
    not what it is given, a target.

    ```python
    import equinox as eqx, jax, jax.numpy as jnp
    import roughflow as rf

    class SquaredError(rf.AbstractObjective):
        uses_data = True

        def __call__(self, model, x, *, key):
            return jnp.mean((model[None] - x) ** 2), {}

    data = jnp.arange(8.0)[:, None]
    fitted = rf.fit(jnp.zeros(1), data, key=jax.random.key(0), objective=SquaredError(), steps=500)
    fitted.model  # near 3.5
    ```
    """

    uses_data: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def __call__(self, model: Any, x: Array | None, *, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        """The loss of a batch, a number to differentiate, and figures to report beside it."""


@runtime_checkable
class Prepared(Protocol):
    """An objective that makes parts of itself to measure, when it first meets the model."""

    def prepare(self, model: Any, *, key: PRNGKeyArray) -> AbstractObjective: ...


@runtime_checkable
class Remembering(Protocol):
    """An objective with a state that a step moves on, such as chains: its own floating-point arrays, without
    a gradient. What a step leaves behind is the figure `memory`; `remember` takes it in for the next."""

    def remember(self, memory: Any) -> AbstractObjective: ...


@runtime_checkable
class Leaving(Protocol):
    """An objective that leaves with the model something that it learned, such as where to look for paths."""

    def leave(self, model: Any) -> Any: ...
