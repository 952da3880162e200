"""Fit a velocity to data by regression: no equation is solved."""

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
from ..sde import GivenTransport, ItoSDE, LearnedTransport, NormalTransport, StratonovichSDE, TransportSDE
from ._objective import AbstractObjective

SINKHORN_SWEEPS = 100


def coupled(z: Array, x: Array, weight: float | Array, key: PRNGKeyArray) -> Array:
    """For each row of x a row of z, drawn from the plan of entropic optimal transport between the two."""
    log_plan = sinkhorn(z, x, weight)
    return z[jax.random.categorical(key, log_plan.T, axis=-1)]


def sinkhorn(z: Array, x: Array, weight: float | Array) -> Array:
    """The logarithm of the plan P that minimises Σᵢⱼ Pᵢⱼ |zᵢ − xⱼ|² + ε Σᵢⱼ Pᵢⱼ log Pᵢⱼ with equal marginals.

    ε is `weight` times the mean squared distance of the two about their means, which do not matter to the
    plan (Cuturi 2013). Rows and columns are scaled in turn, in logarithms, the columns last.
    """
    z, x = z - jnp.mean(z, axis=0, keepdims=True), x - jnp.mean(x, axis=0, keepdims=True)
    squares = jnp.sum((z[:, None] - x[None]) ** 2, axis=-1)
    score = -squares / (weight * jnp.mean(squares))
    rows, columns = -jnp.log(z.shape[0]), -jnp.log(x.shape[0])

    def sweep(_, potentials: tuple[Array, Array]) -> tuple[Array, Array]:
        _, g = potentials
        f = rows - jax.nn.logsumexp(score + g[None], axis=1)
        return f, columns - jax.nn.logsumexp(score + f[:, None], axis=0)

    start = jnp.zeros_like(score[:, 0]), jnp.zeros_like(score[0])
    f, g = jax.lax.fori_loop(0, SINKHORN_SWEEPS, sweep, start)
    return score + f[:, None] + g[None]


class Interpolant(AbstractObjective):
    """The velocity of straight lines from the base to the data (Lipman et al. 2023; Liu et al. 2023; Albergo
    & Vanden-Eijnden 2023). With z ~ base, x ~ data, s = t/T and y = (1 − s) z + s x it minimises

        E |T v(t, y) − (x − z)|²/d,

    one evaluation of the drift v per sample. The minimum is the velocity E[x − z | y]/T, whose ODE carries
    the base to the distribution of the data. The loss does not come to zero, nor is it a likelihood.

    The model is a flow without noise, or one with an `rf.sde.TransportSDE`. Its velocity alone is trained,
    not its base or noise. From an `rf.Normal` base the model returned has an `rf.sde.TransportSDE`, which
    knows the score of its distribution too: `rf.with_noise` adds noise to it. From another base, an
    `rf.sde.LearnedTransport` learns its score along: ∇log p₀(z) is regressed on y as well.

    **Arguments:**

    - `late`: times are s = 1 − uᵃ with u uniform and a = `late`: for a > 1 more of them are near the end,
      where the velocity has most to tell. 1 is uniform.
    - `coupling`: pair the points of a batch by optimal transport (Tong et al. 2024), entropic with this
      weight as a share of the mean squared distance, 0.05 say: lines cross less, and the ODE needs fewer
      steps. The score is then not known, and noise cannot be added.
    - `context`: for a conditional density, how many of the last coordinates are given. They are the same at
      all times, and the model must leave them where they are.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    velocity = rf.sde.VelocityNetwork(2, width=32, depth=2, key=key)
    flow = rf.StochasticFlow(rf.ItoSDE(velocity, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    settings = {"objective": rf.Interpolant(), "average": 0.99, "steps": 50, "progress": False}
    fitted = rf.fit(flow, rf.datasets.Banana(), key=key, **settings)
    noisy = rf.with_noise(fitted.model, 0.5)
    ```
    """

    late: float
    coupling: float | None
    context: int = eqx.field(static=True)
    uses_data: ClassVar[bool] = True

    def __init__(self, late: float = 2.0, coupling: float | None = None, *, context: int = 0):
        check_positive("late", late)
        if context and coupling is not None:
            raise ValueError("a coupling would tie rows to what is given of others: leave one of them out")
        self.context = check_count("context", context, least=0)
        if coupling is not None:
            check_positive("coupling", coupling)
        self.late = float(late)
        self.coupling = None if coupling is None else float(coupling)

    def prepare(self, model: StochasticFlow, *, key: PRNGKeyArray) -> "Interpolant":
        """Refuse a model without a velocity to train."""
        del key
        if not isinstance(model, StochasticFlow):
            raise TypeError(f"Interpolant trains an rf.StochasticFlow, got {type(model).__name__}")
        if isinstance(model.sde, TransportSDE):
            self._check_transport(model)
        elif not isinstance(model.sde, ItoSDE | StratonovichSDE) or model.noise_dimension:
            raise TypeError(
                "Interpolant finds the velocity of an ODE: give it a flow of rf.ItoSDE(velocity, "
                "rf.sde.NoDiffusion()), and add noise after with rf.with_noise; got "
                f"{type(model.sde).__name__} with {model.noise_dimension} noises{see('velocities')}"
            )
        return self

    def _check_transport(self, model: StochasticFlow) -> None:
        transport = _transport(model)
        if isinstance(transport, GivenTransport):
            raise TypeError("Interpolant would part the velocity of an rf.sde.GivenTransport from its score")
        if self.context and isinstance(transport, LearnedTransport):
            raise TypeError("a score is learned for a density without a context: take an rf.Normal base")
        if self.coupling is not None:
            raise ValueError(
                "with a coupling the score of an rf.sde.TransportSDE would be wrong: give Interpolant a flow "
                "of rf.ItoSDE(velocity, rf.sde.NoDiffusion())"
            )
        if transport.t1 != model.t1:
            raise ValueError(f"the flow ends at t1 = {model.t1}, but its transport at {transport.t1}")

    def learns(self, model: StochasticFlow) -> Any:
        """The velocity; the score's part of the network with it."""
        return model.sde.transport if isinstance(model.sde, TransportSDE) else model.sde.drift

    def leave(self, model: StochasticFlow) -> StochasticFlow:
        """With the score that belongs to a velocity from this base."""
        if self.coupling is not None or not isinstance(model.base, Normal):
            return model
        sde, base = model.sde, model.base
        if not isinstance(sde, TransportSDE):
            moved = TransportSDE(NormalTransport(sde.drift, base.loc, base.scale, model.t1, self.context))
        elif isinstance(sde.transport, NormalTransport):
            velocity = sde.transport.velocity
            transport = NormalTransport(velocity, base.loc, base.scale, model.t1, self.context)
            moved = TransportSDE(transport, sde.diffusion)
        else:
            return model
        return eqx.tree_at(lambda flow: flow.sde, model, moved)

    def __call__(
        self, model: StochasticFlow, x: Array | None, *, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array]]:
        assert x is not None
        key_base, key_time, key_pair = jax.random.split(key, 3)
        count = x.shape[0]
        z = jax.lax.stop_gradient(model.base.sample(key=key_base, shape=(count,))).astype(x.dtype)
        if self.coupling is not None:
            z = coupled(z, x, self.coupling, key_pair)
        own = x.shape[1] - self.context
        z = jnp.concatenate([z[:, :own], x[:, own:]], axis=1)
        # Times spread evenly over the batch, with one shift for all: each is uniform by itself.
        shift = jax.random.uniform(key_time, (), x.dtype)
        u = jnp.mod(jnp.arange(count, dtype=x.dtype) / count + shift, 1)
        s = 1 - u**self.late
        y = (1 - s)[:, None] * z + s[:, None] * x
        if isinstance(model.sde, TransportSDE) and isinstance(model.sde.transport, LearnedTransport):
            pulls = jax.vmap(jax.grad(jax.lax.stop_gradient(model.base).log_prob))(z)
            of_rows = lambda transport, t, y: jax.vmap(transport.velocity_and_pull)(t, y)
            both = by_rows(of_rows, model.sde.transport, s * model.t1, y)
            missed = jnp.mean((both[1] - pulls) ** 2)
            return jnp.mean((model.t1 * both[0] - (x - z)) ** 2) + missed, {"score_error": missed}
        velocity = _transport(model).velocity if isinstance(model.sde, TransportSDE) else model.sde.drift
        moved = by_rows(lambda velocity, t, y: jax.vmap(velocity)(t, y), velocity, s * model.t1, y)
        return jnp.mean((model.t1 * moved - (x - z)) ** 2), {}


def _transport(model: StochasticFlow) -> Any:
    assert isinstance(model.sde, TransportSDE)
    return model.sde.transport
