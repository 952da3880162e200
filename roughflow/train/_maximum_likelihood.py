"""Maximum-likelihood training of a flow."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_instance, is_traced
from .._devices import by_rows
from ..density import AbstractProposal, Amortised, LowerBound, Prior, PullBack, StochasticFlow, log_mean
from ..faq import see
from ..flow import ExactDivergence
from ._objective import LOST_POINT_LOSS, AbstractObjective


class MaximumLikelihood(AbstractObjective):
    """Negative log-likelihood −log p(x) of the data, bounded from above with K paths per point:

        −E log 1/K Σₖ wₖ ≥ −log p(x),      wₖ = p(x | ωₖ) φ(ωₖ)/q(ωₖ | x).

    With one path from the prior, the bound is the loss of Hodgkinson et al. (2020). That loss penalises all
    information that the noise carries about x, so training either removes the noise or fits poorly. More
    paths tighten the bound (Burda et al. 2016), and a proposal trained with the model tightens it further. On
    the banana data with the paper's architecture, the final loss is 0.4 nats above the entropy with one path
    from the prior, 0.045 with eight, and 0.006 with eight from a learned proposal, which takes as long as
    eight paths from the prior.

    A point that none of its paths reaches counts as 1000 nats, so that a model does not improve by losing
    points. `lost` in the history is the fraction of such points.

    **Arguments:**

    - `num_paths`: K.
    - `proposal`: by default an `rf.Amortised` proposal, created and trained by `rf.fit`; `rf.Prior()` for
      paths from the prior.

    The likelihood constrains the SDE only up to the end time of the flow; `rf.tables.stationary_sde` gives an
    SDE that stays near the data afterwards.

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
    uses_data: ClassVar[bool] = True
    solves: ClassVar[bool] = True

    def __init__(self, num_paths: int = 8, proposal: AbstractProposal | None = None):
        self.bound = LowerBound(PullBack(num_paths, Prior() if proposal is None else proposal))
        self.learns_proposal = proposal is None

    def prepare(self, model: StochasticFlow, *, key: PRNGKeyArray) -> "MaximumLikelihood":
        """The objective with a proposal for this model, or with one path if the model has no noise."""
        check_instance("model", model, StochasticFlow, "an rf.StochasticFlow for rf.MaximumLikelihood")
        if model.noise_dimension == 0:
            return MaximumLikelihood(1, Prior())
        if not self.learns_proposal:
            return self
        # A model that has been fitted before keeps its learned proposal.
        learned = model.proposal
        proposal = learned if isinstance(learned, Amortised) else Amortised(model, width=64, key=key)
        return eqx.tree_at(lambda o: o.bound.estimator.proposal, self, proposal)

    def leave(self, model: StochasticFlow) -> StochasticFlow:
        """The model with the learned proposal."""
        proposal = self.bound.estimator.proposal
        return model.with_proposal(proposal) if isinstance(proposal, Amortised) else model

    def __call__(
        self, model: StochasticFlow, x: Array | None, *, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array]]:
        assert x is not None
        if self.bound.estimator.num_paths > 1 and model.noise_dimension and not _exact(model):
            # In 30 dimensions the estimated likelihood rose by 700 nats while the true density decreased.
            raise ValueError(
                "num_paths must be 1 with an estimated divergence: set num_paths=1 or "
                "divergence=rf.ExactDivergence(). The mean of exp(log p + error) over several paths grows "
                "with the error, which training would exploit" + see("numbers-of-paths")
            )
        # In training a failed solve gives NaN, and the loop skips the step; with concrete values it raises an
        # error.
        flow = model.without_errors() if is_traced(x) else model
        log_weights = self._log_weights(flow, x, key)
        value = log_mean(log_weights.T)
        # A point that no path reaches has no gradient, but it counts in the loss.
        lost = jnp.isneginf(value)
        loss = jnp.mean(jnp.where(lost, LOST_POINT_LOSS, -value))
        relative = jax.lax.stop_gradient(jax.nn.softmax(jnp.where(lost[:, None], 0, log_weights), axis=-1))
        effective = jnp.mean(1 / jnp.sum(relative**2, axis=-1))
        return loss, {"effective_paths": effective, "lost": jnp.mean(lost)}

    def _log_weights(self, flow: StochasticFlow, x: Array, key: PRNGKeyArray) -> Array:
        # Proposals that search near forward draws use the same draws for every x.
        if not is_traced(x) or self.bound.estimator.proposal.wants_cloud:
            return self.bound.log_weights(flow, x, key=key)
        weigh = lambda given, x, keys: given[0].log_weights(given[1], x, key=keys)
        return by_rows(weigh, (self.bound, flow), x, jax.random.split(key, len(x)))


def _exact(model: StochasticFlow) -> bool:
    return isinstance(model.divergence, ExactDivergence)
