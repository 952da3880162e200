"""The paper's estimator: the mean of p(x | path) over paths."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count
from ...flow import ExactDivergence, StochasticFlow
from ...sde import ExactCorrection
from ..proposals import SPARE, AbstractProposal, Mixture, Prior, normal_numbers
from ..surface import Cloud, Latent, Target, constant
from ._chart import Weights
from ._importance import AbstractImportanceEstimator

TRIAL = 8  # paths looked at before the distribution is fixed
EQUAL = 0.01  # weights whose logarithms differ by no more than this are all equal


class PullBack(AbstractImportanceEstimator):
    """p(x) = E p(x | path) (Hodgkinson et al. 2020), over paths ω drawn from a proposal q:

        p(x) = E [ p(x | ω) φ(ω) / q(ω) ],

    each weight by one solve backwards from x: to a path belongs exactly one start, so no way to x is left
    out. Unbiased for p(x), for any noise, and cheap per path. From `rf.Prior()`, the default, its weights are
    very uneven where p(x | ω) is concentrated, and paths are lost whose backward solve escapes: look at
    `effective_paths`. `rf.Laplace()` cures most of that, `rf.Tempered()` more of it.

    With `rf.HutchinsonDivergence` each path has probes of its own and log p(x | ω) is unbiased, p(x | ω) is
    not: `Estimate.divergence_error` says how much that may be.

    **Arguments:** `num_paths`, how many paths per point; `proposal`, `rf.Prior()`, `rf.Laplace()` or an
    `rf.Amortised(...)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.PullBack(num_paths=1000))
    estimate.log_prob, estimate.standard_error
    ```
    """

    num_paths: int = eqx.field(
        static=True, converter=lambda count: check_count("num_paths", count), default=1000
    )
    proposal: AbstractProposal = Prior()
    searches: ClassVar[bool] = False
    shows_failures: ClassVar[bool] = True

    def check(self, flow: StochasticFlow) -> None:
        del flow

    def start_points(self, x: Array) -> None:
        del x

    def prepare(
        self, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None
    ) -> Mixture:
        distribution = self.proposal.distribution(Latent(flow), target.x, keys, cloud)
        return constant(distribution.defended()) if self.num_tried else distribution

    @property
    def num_tried(self) -> int:
        return TRIAL if self.proposal.may_be_exact else 0

    def decide(self, flow: StochasticFlow, distribution: Mixture, trial: Weights) -> Mixture:
        del flow
        return distribution.narrowed(are_even(distribution, trial))

    def settled(self, distribution: Mixture) -> Mixture:
        return distribution

    def weigh(
        self, flow: StochasticFlow, target: Target, distribution: Mixture, noise: Array, keys: PRNGKeyArray
    ) -> Weights:
        omega = distribution.sample(noise)
        solves = keys if random_solves(flow) else None
        joint = log_joint(flow, target.x, omega, solves)
        return Weights(joint - distribution.log_prob(omega), omega, joint, solves)

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del distribution
        return log_joint(flow, target.x, paths, keys)


def log_joint(flow: StochasticFlow, x: Array, omega: Array, keys: PRNGKeyArray | None) -> Array:
    """log p(x | ω) φ(ω) `(B, K)` for x `(B, d)` and ω `(B, K, W)`; −inf where the backward solve escapes."""
    coefficients = jnp.reshape(omega, (*omega.shape[:2], flow.driver.num_functions, flow.noise_dimension))
    path = flow.driver.path(coefficients, flow.t1)
    given = flow.log_prob_given_path(x[:, None], path, key=keys)
    return given + flow.driver.log_prob(coefficients)


def solve_keys(flow: StochasticFlow, keys: PRNGKeyArray, count: int) -> PRNGKeyArray | None:
    """Keys `(B, count)` for solves with a random divergence, from one key per point; none if it is exact."""
    return jax.vmap(lambda key: jax.random.split(key, count))(keys) if random_solves(flow) else None


def random_solves(flow: StochasticFlow) -> bool:
    return not (isinstance(flow.divergence, ExactDivergence) and isinstance(flow.correction, ExactCorrection))


def tried(flow: StochasticFlow, x: Array, mixture: Mixture, keys: PRNGKeyArray) -> Mixture:
    """The mixture, wider and with a share of the prior unless a few weights are all equal, as they are on a
    linear SDE. Decided on draws of their own, before those that count."""
    flow, x, mixture = constant((flow.without_errors(), x, mixture))
    wide = mixture.defended()
    size = flow.dimension + mixture.centre.shape[-1] + SPARE
    noise = jax.vmap(lambda key: normal_numbers(key, jnp.arange(TRIAL), size, x.dtype))(keys)
    omega = wide.sample(noise)
    joint = log_joint(flow, x, omega, solve_keys(flow, keys, TRIAL))
    return wide.narrowed(are_even(wide, Weights(joint, omega, joint, None)))


def are_even(distribution: Mixture, trial: Weights) -> Array:
    """Whether the weights of all paths that were tried would be equal, `(B,)`, if they were drawn from the
    distribution's components as they were found, neither wider nor with a share of the prior."""
    density = distribution.narrowed(jnp.ones_like(distribution.missed)).log_components(trial.paths)
    return are_equal(trial.joint, density) & ~distribution.missed


def are_equal(joint: Array, density: Array) -> Array:
    """Whether weights are all equal, `(B,)`: those of paths with these log-densities, `(B, K)`."""
    weights = joint - density
    # Far out, where the logarithms are large, a solver's error is too.
    far = jnp.max(density, axis=1, keepdims=True) - density
    near = jnp.take_along_axis(weights, jnp.argmin(far, axis=1)[:, None], axis=1)
    return jnp.all(jnp.abs(weights - near) < EQUAL * (1 + far), axis=1)
