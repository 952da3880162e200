"""The default: importance weights where they are good, moved particles where they are not."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count
from ...flow import HEAVY, StochasticFlow
from .._pareto import pareto_k
from ..proposals import AbstractProposal, Laplace, Mixture
from ..surface import Cloud, Latent, Target, constant
from ._both_charts import BothCharts
from ._chart import AbstractImprovingChart, AbstractRemedy, Weights
from ._importance import AbstractImportanceEstimator
from ._pull_back import are_even, log_joint, random_solves
from ._remedies import BentParticles, PulledParticles, exact, uphill

TRIAL = 32  # paths looked at before it is decided how to go on
POOR = 0.35  # effective fraction of them below which weights are poor


class Tempered(AbstractImprovingChart, AbstractImportanceEstimator):
    """Paths drawn around all the likely ways to x, weighed; where weights are poor, moved. The default.

    In the pull-back form each path has exactly one start (`rf.PullBack`), so no way to x can be missed that
    paths are drawn near. Point by point:

    1. A few paths drawn from the proposal show whether all weights are equal, as they are on a linear SDE
       with `rf.Laplace`. If not, the distribution is made wider and the prior has a share in it.
    2. Where their weights are good, others are drawn and weighed. What chooses is not what counts: if it
       were, estimates would be low, for weights that miss something look good.
    3. Where they are poor (an effective fraction below 0.35, or a heavy tail), or where the others turn out
       such that their estimate would be suspect, particles are moved from the
       proposal q to the distribution of the path given x, through q^(1−β) (p(x | ω) φ(ω))^β with β from 0 to
       1, reweighted, resampled and moved at each β (Del Moral, Doucet & Jasra 2006). The estimate is unbiased
       for p(x) but for the choice of the β's. Each weight is that of all the descendants of a few of the
       first particles, so that the error bar is that of independent weights (Lee & Whiteley 2018). Where few
       of these are effective, up to four runs are averaged. `Estimate.tempered` says where.
    4. Where backward solves spread by more than ten, as those of an SDE that contracts strongly do, paths to
       x fill slabs too thin for that. With as many noises as dimensions, up to 16, particles are then
       moved in coordinates like those of `rf.Endpoint`: forwards, each bent so that it ends at x.
       `Estimate.steep` says where paths may be missed all the same.

    Where weights are poor and a `tolerance` is asked for, paths that a search bends to x are tried beside
    those pulled back, weighed as draws from one distribution (Veach & Guibas 1995); where these weights are
    good, as where most backward solves escape, rounds of them take the place of particles.

    With `rf.HutchinsonDivergence` in up to 64 dimensions the divergence is taken exactly here: probes are
    for training.

    **Arguments:** `num_paths`, how many paths per point; `proposal`, `rf.Laplace()` or the
    `rf.Amortised(...)` that a fitted model has learned.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: 2 * z**3, lambda t, z: 0.5 * jnp.eye(1))  # explodes: paths come in bundles
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2))
    estimate = flow.estimate(jnp.ones(1), key=jax.random.key(0), estimator=rf.Tempered(num_paths=128))
    estimate.log_prob, estimate.total_error
    ```
    """

    num_paths: int = eqx.field(
        static=True, converter=lambda count: check_count("num_paths", count), default=64
    )
    proposal: AbstractProposal = Laplace()
    searches: ClassVar[bool] = False
    shows_failures: ClassVar[bool] = True

    def check(self, flow: StochasticFlow) -> None:
        del flow

    def start_points(self, x: Array) -> None:
        del x

    def prepare(
        self, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None
    ) -> Mixture:
        distribution = self.proposal.distribution(Latent(exact(flow)), target.x, keys, cloud)
        return constant(distribution.defended())

    @property
    def num_tried(self) -> int:
        return TRIAL

    def decide(self, flow: StochasticFlow, distribution: Mixture, trial: Weights) -> Mixture:
        even = are_even(distribution, trial)
        distribution = distribution.narrowed(even)
        # Equal ones are equal: how they differ far out, where hardly any will be drawn, does not count.
        poor = _poor(jnp.where(even[:, None], 0, trial.log_weights))
        if BentParticles.suits(exact(flow)):
            # Slabs that no path of the trial has hit leave weights that look good.
            poor = poor | uphill(distribution)
        return eqx.tree_at(lambda d: d.poor, distribution, poor)

    def settled(self, distribution: Mixture) -> Mixture:
        return distribution

    def weigh(
        self, flow: StochasticFlow, target: Target, distribution: Mixture, noise: Array, keys: PRNGKeyArray
    ) -> Weights:
        flow, distribution = exact(flow), constant(distribution)
        omega = distribution.sample(noise)
        solves = keys if random_solves(flow) else None
        joint = log_joint(flow, target.x, omega, solves)
        return Weights(joint - distribution.log_prob(omega), omega, joint, solves)

    def remedies(self, flow: StochasticFlow) -> tuple[AbstractRemedy, ...]:
        return (PulledParticles(), BentParticles()) if BentParticles.suits(flow) else (PulledParticles(),)

    def second(self, flow: StochasticFlow) -> BothCharts | None:
        return BothCharts(self.num_paths, self.proposal) if BothCharts.suits(flow) else None

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del distribution
        return log_joint(exact(flow), target.x, paths, keys)


def _poor(log_weights: Array) -> Array:
    """Where weights `(B, K)` are poor."""
    share = jax.nn.softmax(jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights), axis=1)
    effective = 1 / (log_weights.shape[1] * jnp.sum(share**2, axis=1))
    return ~(effective > POOR) | (pareto_k(log_weights.T) > HEAVY)
