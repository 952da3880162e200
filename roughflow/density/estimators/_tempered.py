"""The default: importance weights where they are good, moved particles where they are not."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count
from ...flow import FEW_PATHS, HEAVY, ExactDivergence, HutchinsonDivergence, StochasticFlow
from .._estimate import effective_paths
from .._pareto import pareto_k
from ..proposals import SPARE, AbstractProposal, Laplace, Mixture, normal_numbers
from ..surface import Cloud, Latent, Target, constant, for_some
from ._both_charts import BothCharts
from ._chart import AbstractImprovingChart, Weights
from ._importance import AbstractImportanceEstimator
from ._particles import Particles, temper
from ._pull_back import log_joint, random_solves, solve_keys, tried

TRIAL = 32  # paths looked at before it is decided how to go on
POOR = 0.35  # effective fraction of them below which weights are poor
PARTICLES = 256  # at least, where they are
RUNS = 4  # of particles, at most, where one leaves few effective paths
# Factor by which a backward solve spreads, in the base's units: beyond, paths to x fill slabs so thin that
# particles do not find from one to the next.
STEEP = 20.0
BLOCK = 2**13  # particles that are moved together
EXACT = 64  # dimensions up to which a density is worth its exact divergence


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

    def check(self, flow: StochasticFlow) -> None:
        del flow

    def start_points(self, x: Array) -> None:
        del x

    def prepare(
        self, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None
    ) -> Mixture:
        flow = _exact(flow)
        distribution = self.proposal.distribution(Latent(flow), target.x, keys, cloud)
        distribution, weights = tried(flow, target.x, distribution, keys, TRIAL)
        return eqx.tree_at(lambda d: d.poor, distribution, constant(_poor(weights)))

    def settled(self, distribution: Mixture) -> Mixture:
        return distribution

    def weigh(
        self, flow: StochasticFlow, target: Target, distribution: Mixture, noise: Array, keys: PRNGKeyArray
    ) -> Weights:
        flow, distribution = _exact(flow), constant(distribution)
        omega = distribution.sample(noise)
        solves = keys if random_solves(flow) else None
        joint = log_joint(flow, target.x, omega, solves)
        return Weights(joint - distribution.log_prob(omega), omega, joint, solves)

    def improve(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        keys: PRNGKeyArray,
        count: int,
    ) -> Weights:
        flow = _exact(flow)
        particles = _moved(flow, target.x, distribution, keys, count)
        solves = solve_keys(flow, keys, count)
        joint = _known((flow, target.x), particles.omega, solves, particles.joint)
        return Weights(particles.weights(joint), particles.omega, joint, solves)

    def second(self, flow: StochasticFlow) -> BothCharts | None:
        return BothCharts(self.num_paths, self.proposal) if BothCharts.suits(flow) else None

    def doubtful(self, distribution: Mixture) -> Array:
        return distribution.poor & (distribution.steepness > STEEP)

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del distribution
        return log_joint(_exact(flow), target.x, paths, keys)


@eqx.filter_custom_jvp
def _known(
    given: tuple[StochasticFlow, Array], omega: Array, keys: PRNGKeyArray | None, value: Array
) -> Array:
    """log p(x, ω), whose value is known already: a solve is needed only for its derivative."""
    del given, omega, keys
    return value


@_known.def_jvp
def _known_jvp(primals, tangents):
    (given, omega, keys, value), (moved, *_) = primals, tangents
    joint = lambda given: log_joint(given[0], given[1], omega, keys)
    return value, eqx.filter_jvp(joint, (given,), (moved,))[1]


def _exact(flow: StochasticFlow) -> StochasticFlow:
    if isinstance(flow.divergence, HutchinsonDivergence) and flow.dimension <= EXACT:
        return eqx.tree_at(lambda f: f.divergence, flow, ExactDivergence())
    return flow


def _poor(log_weights: Array) -> Array:
    """Where weights `(B, K)` are poor."""
    share = jax.nn.softmax(jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights), axis=1)
    effective = 1 / (log_weights.shape[1] * jnp.sum(share**2, axis=1))
    return ~(effective > POOR) | (pareto_k(log_weights.T) > HEAVY)


def _moved(flow: StochasticFlow, x: Array, mixture: Mixture, keys: PRNGKeyArray, count: int) -> Particles:
    """Particles for the points whose weights are poor; for the others nothing. Where a run leaves few
    effective paths it is averaged with others."""
    quiet = constant(flow.without_errors())
    total = count * -(-PARTICLES // count)

    def move(some: tuple) -> Particles:
        x, mixture, keys, run = some
        size = mixture.normal.shape[-1] + SPARE
        noise = jax.vmap(lambda key: normal_numbers(key, jnp.arange(total), size, x.dtype))(run)
        solves = solve_keys(quiet, keys, total)

        def joint(at: Array) -> Array:
            value = log_joint(quiet, x, at, solves)
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        return temper(joint, mixture, mixture.sample(noise), run, count)

    def another(i: Array, now: Particles) -> Particles:
        few = effective_paths(now.log_weights.T) < min(2 * FEW_PATHS, 0.99 * count)
        chosen = mixture.poor & (few | (i == 0))
        run = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
        batch = (*constant((x, mixture)), keys, run)
        new = now.pooled(for_some(chosen, move, batch, now, max(1, BLOCK // total)), i)
        pick = lambda a, b: jnp.where(jnp.expand_dims(chosen, range(1, a.ndim)), a, b)
        return jax.tree.map(pick, new, now)

    blank = Particles(
        jnp.zeros((len(x), count, mixture.centre.shape[-1]), x.dtype),
        *(jnp.zeros((len(x), count), x.dtype),) * 2,
    )
    return constant(jax.lax.fori_loop(0, RUNS, another, blank))
