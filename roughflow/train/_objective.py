"""The interface of objectives, which `fit` minimises."""

import abc
from typing import Any, ClassVar, Self

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_fields

# Loss, in nats, of a point that no path reaches and of a sample that escapes. It has no gradient; it prevents
# a model from improving by losing points.
LOST_POINT_LOSS = 1000.0


class AbstractStatefulObjective(eqx.Module):
    """A loss with a state that is carried from step to step, such as running chains.

    `start` creates the state, a pytree of arrays, and `step` updates it. The state is not trained;
    checkpoints include it. `rf.train.AbstractObjective` is the common case without a state.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    class Walk(rf.train.AbstractStatefulObjective):
        uses_data = False

        def start(self, model, *, key):
            return jnp.zeros(1)

        def step(self, model, x, state, *, key):
            moved = 0.9 * state + 0.1 * jax.random.normal(key, (1,))
            return jnp.mean((model - state) ** 2), (moved, {"place": moved[0]})

    fitted = rf.fit(jnp.ones(1), key=jax.random.key(0), objective=Walk(), steps=20, progress=False)
    fitted.state  # the final position of the walk
    ```
    """

    uses_data: eqx.AbstractClassVar[bool]
    # Whether the loss depends on log-densities of the model, at the data or at its own samples. If so, long
    # fits choose the number of solver steps.
    solves: ClassVar[bool] = False

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def start(self, model: Any, *, key: PRNGKeyArray) -> Any:
        """The state before the first step."""

    @abc.abstractmethod
    def step(
        self, model: Any, x: Array | None, state: Any, *, key: PRNGKeyArray
    ) -> tuple[Array, tuple[Any, dict[str, Array]]]:
        """The loss of a batch, to be differentiated; the next state, and metrics to report."""

    def prepare(self, model: Any, *, key: PRNGKeyArray) -> Self:
        """The objective adapted to this model; raises an error for an unsuitable model."""
        del model, key
        return self

    def learns(self, model: Any) -> Any:
        """The part of the model that is trained, or a tuple of parts."""
        return model

    def leave(self, model: Any) -> Any:
        """The fitted model, including the learned parts of the objective that belong to it."""
        return model


class AbstractObjective(AbstractStatefulObjective):
    """A loss of a model. Parameters of the objective, such as the network of a proposal, are trained too;
    functions that the user provides, such as a target, are not.

    ```python
    import equinox as eqx, jax, jax.numpy as jnp
    import roughflow as rf

    class SquaredError(rf.train.AbstractObjective):
        uses_data = True

        def __call__(self, model, x, *, key):
            return jnp.mean((model[None] - x) ** 2), {}

    data = jnp.arange(8.0)[:, None]
    fitted = rf.fit(jnp.zeros(1), data, key=jax.random.key(0), objective=SquaredError(), steps=500)
    fitted.model  # near 3.5
    ```
    """

    @abc.abstractmethod
    def __call__(self, model: Any, x: Array | None, *, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        """The loss of a batch, to be differentiated, and metrics to report."""

    def start(self, model: Any, *, key: PRNGKeyArray) -> tuple[()]:
        """The empty state."""
        del model, key
        return ()

    def step(
        self, model: Any, x: Array | None, state: tuple[()], *, key: PRNGKeyArray
    ) -> tuple[Array, tuple[tuple[()], dict[str, Array]]]:
        """The loss, the empty state, and the metrics."""
        loss, metrics = self(model, x, key=key)
        return loss, (state, metrics)
