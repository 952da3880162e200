"""Fit a flow to data."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_positive, is_traced
from ..density import AbstractProposal, Amortised, Endpoint, LowerBound, Prior, PullBack, log_mean
from ..flow import StochasticFlow
from ._objective import AbstractObjective


class MaximumLikelihood(AbstractObjective):
    """−log p(x) of the data, bounded from above with K paths a point:

        −E log 1/K Σₖ wₖ ≥ −log p(x),      wₖ = p(x | ωₖ) φ(ωₖ)/q(ωₖ | x).

    With one path from the prior it is the loss of Hodgkinson et al. (2020), which charges the model for
    all that its noise says about x, and so drives the noise out or the fit away. More paths close that
    gap (Burda et al. 2016), and a proposal that learns along with the model closes it far sooner: on
    the banana with the paper's architecture one path from the prior ends 0.4 nats above the entropy,
    eight end 0.045 above, and eight from a learned proposal 0.006, for the same time as eight.

    **Arguments:**

    - `num_paths`: K.
    - `proposal`: by default an `rf.Amortised` one that `rf.fit` makes and trains; `rf.Prior()` for the
      plain bound.
    - `horizons`: end times, in units of the flow's own; each step takes one of them. A time-homogeneous
      SDE that has the law of the data at times 1 and 2 keeps it for ever: `horizons=(1, 2)` teaches it
      to stay, to sample from by one long path.
    - `endpoint`: take `rf.Endpoint` for the weights, not `rf.PullBack`: no solve goes backwards, but each
      path costs several.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    sde = rf.ItoSDE(rf.MLP(1, 1, width=8, depth=1, key=key), rf.ConstantDiffusion(0.5 * jnp.eye(1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    data = 2 + jax.random.normal(key, (256, 1))
    objective = rf.MaximumLikelihood(num_paths=4)
    fitted = rf.fit(flow, data, key=key, objective=objective, steps=20, progress=False)
    ```
    """

    bound: LowerBound
    learns_proposal: bool = eqx.field(static=True)
    horizons: tuple[float, ...] = eqx.field(static=True)
    uses_data: ClassVar[bool] = True

    def __init__(
        self,
        num_paths: int = 8,
        proposal: AbstractProposal | None = None,
        horizons: Sequence[float] = (1.0,),
        endpoint: bool = False,
    ):
        if not horizons:
            raise ValueError("horizons must name at least one end time")
        for horizon in horizons:
            check_positive("horizons", horizon)
        kind = Endpoint if endpoint else PullBack
        self.bound = LowerBound(kind(num_paths, Prior() if proposal is None else proposal))
        self.learns_proposal = proposal is None
        self.horizons = tuple(float(horizon) for horizon in horizons)

    def prepare(self, model: StochasticFlow, *, key: PRNGKeyArray) -> "MaximumLikelihood":
        """With a proposal made for this model; without noise there is nothing to propose."""
        if not self.learns_proposal or model.noise_dim == 0:
            return self
        proposal = Amortised(model, width=64, key=key)
        return eqx.tree_at(lambda o: o.bound.estimator.proposal, self, proposal)

    def __call__(
        self, model: StochasticFlow, x: Array | None, *, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array]]:
        assert x is not None
        # In training a failed solve is a NaN, for the loop to skip; with values at hand it is an error.
        flow = model.without_errors() if is_traced(x) else model
        if self.horizons != (1.0,):
            key, key_horizon = jax.random.split(key)
            horizon = jax.random.choice(key_horizon, jnp.asarray(self.horizons, x.dtype))
            flow = eqx.tree_at(lambda f: f.t1, flow, flow.t1 * horizon)
        log_weights = self.bound.log_weights(flow, x, key=key)
        value = log_mean(log_weights.T)
        # A point that none of its paths reaches says nothing about where to go: it is counted.
        lost = jnp.isneginf(value)
        loss = -jnp.sum(jnp.where(lost, 0, value)) / jnp.maximum(jnp.sum(~lost), 1)
        relative = jax.lax.stop_gradient(jax.nn.softmax(jnp.where(lost[:, None], 0, log_weights), axis=-1))
        effective = jnp.mean(1 / jnp.sum(relative**2, axis=-1))
        return loss, {"effective_paths": effective, "lost": jnp.mean(lost)}
