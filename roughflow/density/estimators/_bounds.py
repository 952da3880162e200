"""Bounds on log p(x) that training can push on: one from below, one from above."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count, check_fields, check_key
from ..._programs import jit
from ...flow import StochasticFlow, one_line_errors
from .._estimate import log_mean
from ..proposals import SPARE, AbstractProposal, Laplace, normal_numbers
from ..surface import Cloud, Latent, constant
from ._importance import AbstractImportanceEstimator
from ._pull_back import PullBack, log_joint, solve_keys, tried
from ._weights import EstimatorRun


class LowerBound(eqx.Module):
    """The K-path bound: E log (1/K) Σₖ wₖ ≤ log p(x), tighter as K grows (Burda et al. 2016).

    With `rf.PullBack(1)` it is the bound of Hodgkinson et al. (2020), E log p(x | path).

    **Arguments:** `estimator`, whose `num_paths` is K and whose proposal draws the paths; an
    `rf.Amortised` proposal in it is trained by the same gradient.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    bound = rf.LowerBound(rf.PullBack(num_paths=8))
    bound(flow, jnp.zeros((5, 1)), key=jax.random.key(0)).shape  # (5,)
    ```
    """

    estimator: AbstractImportanceEstimator = PullBack(num_paths=8)

    def __check_init__(self):
        check_fields(self)

    def __call__(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """One draw of the bound at each x of shape `(..., d)`."""
        weights = self.log_weights(flow, x, key=key)
        return log_mean(jnp.moveaxis(weights, -1, 0))

    def log_weights(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """log w₁, …, log w_K at each x, shape `(..., K)`; the bound is the logarithm of their mean."""
        run = EstimatorRun(self.estimator, flow, x, key)
        weights = run.all_log_weights()
        return jnp.reshape(weights, (*run.batch, weights.shape[-1]))


class UpperBound(eqx.Module):
    """A bound from above on the mean of log p over the flow's own samples Z:

        E log p(Z) ≤ E log 1/(K+1) (w₀ + w₁ + … + w_K),      wₖ = p(Z | ωₖ) φ(ωₖ)/q(ωₖ | Z),

    ω₀ the path that made Z and ω₁, …, ω_K drawn from the proposal q, tighter as K grows (Sobolev & Vetrov
    2019; for q the prior, Yin & Zhou 2018). It holds for every q, for ω₀ is a draw from the distribution of
    the path given Z, and is the tighter the nearer q comes to that distribution: with K = 0 it exceeds E log
    p(Z) by the mean of KL(p(ω | Z) ‖ q(ω | Z)). To each path belongs one start, so no way to Z is left out,
    and a path from which there is none rightly counts as zero.

    **Arguments:** `num_paths`, the number K of fresh ones; it may be 0. `proposal`: `rf.Laplace()`, the
    default; an `rf.Amortised(...)`, which the bound trains when it is made small; `rf.Prior()`, the loosest.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    z, bound = rf.UpperBound(num_paths=16)(flow, key=jax.random.key(0), shape=(100,))
    jnp.mean(bound)  # not below E log p(Z), but for chance
    ```
    """

    num_paths: int = eqx.field(static=True, default=16)
    proposal: AbstractProposal = Laplace()

    def __check_init__(self):
        check_count("num_paths", self.num_paths, least=0)
        check_fields(self)

    def __call__(
        self, flow: StochasticFlow, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """Samples Z `(*shape, d)` and the bound's value at each, `shape`; gradients pass through both.

        A sample that escaped is at infinity, with the value −inf.
        """
        with one_line_errors():
            z, value = _upper(flow, self.proposal, check_key(key), math.prod(shape), self.num_paths)
        return jnp.reshape(z, (*shape, flow.dimension)), jnp.reshape(value, shape)


@jit
def _upper(
    flow: StochasticFlow, proposal: AbstractProposal, key: PRNGKeyArray, count: int, fresh: int
) -> tuple[Array, Array]:
    latent = Latent(flow)
    key_own, key_proposal, key_path, key_solve, key_cloud = jax.random.split(key, 5)
    z, given, path = flow.sample_and_log_prob_given_path(key=key_own, shape=(count,))
    has_escaped = ~jnp.all(jnp.isfinite(z), axis=-1)
    # A sample that escaped has no finite place to ask about.
    place = jnp.where(has_escaped[:, None], 0, z)
    cloud = None
    if proposal.wants_cloud:
        quiet = constant(latent).quiet()
        places = jnp.arange(Cloud.size(quiet))
        cloud = Cloud.of(quiet, normal_numbers(key_cloud, places, latent.size, z.dtype))
    distribution = proposal.distribution(latent, place, jax.random.split(key_proposal, count), cloud)
    if proposal.may_be_exact:
        distribution = tried(flow, place, distribution, jax.random.split(key_proposal, count))
    own = jnp.reshape(path.coefficients, (count, 1, -1))
    first = given[:, None] + flow.driver.log_prob(path.coefficients)[:, None] - distribution.log_prob(own)
    weights = first
    if fresh:
        noise = jax.random.normal(key_path, (count, fresh, latent.size + SPARE), z.dtype)
        omega = distribution.sample(noise)
        solves = solve_keys(flow, jax.random.split(key_solve, count), fresh)
        rest = log_joint(flow, place, omega, solves)
        # Far out a field may overflow to NaN before its solve counts as escaped: it leads nowhere either.
        rest = jnp.where(jnp.isnan(rest), -jnp.inf, rest) - distribution.log_prob(omega)
        weights = jnp.concatenate([first, rest], axis=1)
    return z, jnp.where(has_escaped, -jnp.inf, log_mean(weights.T))
