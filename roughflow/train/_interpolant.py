"""Fit a velocity to data by regression, without solving an ODE."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_positive
from .._devices import by_rows
from ..density import StochasticFlow
from ..faq import see
from ..flow import Normal
from ..sde import GivenTransport, ItoSDE, NormalTransport, StratonovichSDE, TransportSDE
from ._objective import AbstractObjective


class Interpolant(AbstractObjective):
    """Flow matching: the velocity of straight lines from the base to the data (Lipman et al. 2023; Liu et al.
    2023; Albergo & Vanden-Eijnden 2023). With z ~ base, x ~ data, s = t/T and y = (1 − s) z + s x, the loss
    is

        E |T v(t, y) − (x − z)|²/d,

    and each sample needs one evaluation of the drift v. The minimiser is the velocity E[x − z | y]/T, whose
    ODE transports the base to the distribution of the data. The minimum of the loss is not zero, and the loss
    is not a likelihood.

    The model is a flow without noise, or one with an `rf.sde.TransportSDE`. Only its velocity is trained.
    From an `rf.Normal` base the trained model has an `rf.sde.TransportSDE`, which includes the score, so
    `rf.with_noise` can add noise.

    **Arguments:**

    - `late`: exponent a of the times s = 1 − uᵃ, with uniform u; a > 1 puts more times near the end, where
      the velocity is hardest to learn; a = 1 is uniform.
    - `num_given`: for a conditional density, the number of given coordinates, which come last. They are
      constant in time, and the model must not move them.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    velocity = rf.sde.VelocityNetwork(2, width=32, depth=2, key=key)
    flow = rf.StochasticFlow(rf.ItoSDE(velocity, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    training = rf.train.TrainingOptions(average=0.99)
    settings = {"objective": rf.Interpolant(), "steps": 50, "progress": False, "training": training}
    fitted = rf.fit(flow, rf.datasets.Banana(), key=key, **settings)
    noisy = rf.with_noise(fitted.model, 0.5)
    ```
    """

    late: float
    num_given: int = eqx.field(static=True)
    uses_data: ClassVar[bool] = True

    def __init__(self, late: float = 2.0, *, num_given: int = 0):
        check_positive("late", late)
        self.num_given = check_count("num_given", num_given, least=0)
        self.late = float(late)

    def prepare(self, model: StochasticFlow, *, key: PRNGKeyArray) -> "Interpolant":
        """The objective itself; raises an error for a model without a velocity to train."""
        del key
        if not isinstance(model, StochasticFlow):
            raise TypeError(f"Interpolant trains an rf.StochasticFlow, got {type(model).__name__}")
        if isinstance(model.sde, TransportSDE):
            self._check_transport(model)
        elif not isinstance(model.sde, ItoSDE | StratonovichSDE) or model.noise_dimension:
            raise TypeError(
                "Interpolant trains the velocity of an ODE: use a flow with the SDE rf.ItoSDE(velocity, "
                "rf.sde.NoDiffusion()), and add noise afterwards with rf.with_noise; got "
                f"{type(model.sde).__name__} with {model.noise_dimension} noise components{see('velocities')}"
            )
        return self

    def _check_transport(self, model: StochasticFlow) -> None:
        transport = _transport(model)
        if isinstance(transport, GivenTransport):
            raise TypeError("Interpolant cannot train an rf.sde.GivenTransport, whose score is fixed")
        if transport.t1 != model.t1:
            raise ValueError(f"the flow ends at t1 = {model.t1}, but its transport at {transport.t1}")

    def learns(self, model: StochasticFlow) -> Any:
        """The part that is trained: the velocity, or the transport that contains it."""
        return model.sde.transport if isinstance(model.sde, TransportSDE) else model.sde.drift

    def leave(self, model: StochasticFlow) -> StochasticFlow:
        """The model with the score that belongs to its velocity."""
        if not isinstance(model.base, Normal):
            return model
        sde, base = model.sde, model.base
        if not isinstance(sde, TransportSDE):
            moved = TransportSDE(NormalTransport(sde.drift, base.loc, base.scale, model.t1, self.num_given))
        elif isinstance(sde.transport, NormalTransport):
            velocity = sde.transport.velocity
            transport = NormalTransport(velocity, base.loc, base.scale, model.t1, self.num_given)
            moved = TransportSDE(transport, sde.diffusion)
        else:
            return model
        return eqx.tree_at(lambda flow: flow.sde, model, moved)

    def __call__(
        self, model: StochasticFlow, x: Array | None, *, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array]]:
        assert x is not None
        key_base, key_time = jax.random.split(key)
        count = x.shape[0]
        z = jax.lax.stop_gradient(model.base.sample(key=key_base, shape=(count,))).astype(x.dtype)
        own = x.shape[1] - self.num_given
        z = jnp.concatenate([z[:, :own], x[:, own:]], axis=1)
        # Stratified times: evenly spaced over the batch, with one random shift, so each time is uniform.
        shift = jax.random.uniform(key_time, (), x.dtype)
        u = jnp.mod(jnp.arange(count, dtype=x.dtype) / count + shift, 1)
        s = 1 - u**self.late
        y = (1 - s)[:, None] * z + s[:, None] * x
        velocity = _transport(model).velocity if isinstance(model.sde, TransportSDE) else model.sde.drift
        moved = by_rows(lambda velocity, t, y: jax.vmap(velocity)(t, y), velocity, s * model.t1, y)
        return jnp.mean((model.t1 * moved - (x - z)) ** 2), {}


def _transport(model: StochasticFlow) -> Any:
    assert isinstance(model.sde, TransportSDE)
    return model.sde.transport
