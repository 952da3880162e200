"""Lower and upper bounds on log p(x), for training, and an unbiased estimate of it."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, check_count, check_fields, check_key, is_traced
from .._programs import jit
from ..faq import see
from ..flow import AbstractStochasticFlow, one_line_errors
from ._estimate import AbstractEstimator, Accuracy, Estimate, log_mean
from ._modes import Laplace
from ._paths import Level, PullBack, checked_points, explain_failure, mixture_of, point_keys, solve_keys
from ._proposals import AbstractProposal, log_standard


class LowerBound(eqx.Module):
    """The K-path lower bound: E log (1/K) Σₖ wₖ ≤ log p(x), which tightens as K grows (Burda et al. 2016).

    With `rf.PullBack(1)` this is the bound of Hodgkinson et al. (2020), E log p(x | path).

    **Arguments:** `estimator`, whose `num_paths` is K and from whose proposal the paths are drawn. If the
    proposal is an `rf.Amortised`, the gradient of the bound trains it too.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    bound = rf.density.LowerBound(rf.PullBack(num_paths=8))
    bound(flow, jnp.zeros((5, 1)), key=jax.random.key(0)).shape  # (5,)
    ```
    """

    estimator: PullBack = PullBack(num_paths=8)

    def __check_init__(self):
        check_fields(self)

    def __call__(self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """An unbiased estimate of the bound at each x of shape `(..., d)`."""
        weights = self.log_weights(flow, x, key=key)
        return log_mean(jnp.moveaxis(weights, -1, 0))

    def log_weights(self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """log w₁, …, log w_K at each x, shape `(..., K)`; the bound is the logarithm of their mean."""
        x = checked_points(flow, x)
        flat, count = jnp.reshape(x, (-1, x.shape[-1])), self.estimator.num_paths
        self.estimator.proposal.draws.check(count)
        # In a fit on several devices, `key` already contains one key per point.
        keys = key if key.ndim else point_keys(check_key(key), jnp.arange(len(flat)))
        indices = jnp.broadcast_to(jnp.arange(count), (len(flat), count))
        try:
            with one_line_errors():
                weights = _log_weights(self.estimator, flow, flat, keys, indices, count)
        except NonFiniteError:
            explain_failure(flow, flat)
            raise
        return jnp.reshape(weights, (*x.shape[:-1], count))


@jit
def _log_weights(
    estimator: PullBack, flow, x: Array, keys: PRNGKeyArray, indices: Array, max_paths: int
) -> Array:
    return estimator.log_weights(flow, x, keys, indices, max_paths)


class UpperBound(eqx.Module):
    """An upper bound on the mean of log p over samples Z of the flow:

        E log p(Z) ≤ E log 1/(K+1) (w₀ + w₁ + … + w_K),      wₖ = p(Z | ωₖ) φ(ωₖ)/q(ωₖ | Z),

    where ω₀ is the path that generated Z, and ω₁, …, ω_K are drawn from the proposal q (Sobolev & Vetrov
    2019; for the prior as q, Yin & Zhou 2018). The bound tightens as K grows. It holds for every q, because
    ω₀ is a draw from the distribution of the path given Z, and is tighter if q is closer to that
    distribution: for K = 0 it exceeds E log p(Z) by the mean of KL(p(ω | Z) ‖ q(ω | Z)). Every path has at
    most one start from which it reaches Z; a path without such a start has weight zero.

    **Arguments:** `num_paths`, the number K of paths from the proposal, which may be 0; `proposal`:
    `rf.Laplace()` (default), an `rf.Amortised(...)`, which is trained if the bound is minimised, or
    `rf.Prior()`, which gives the loosest bound.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    z, bound = rf.density.UpperBound(num_paths=16)(flow, key=jax.random.key(0), shape=(100,))
    jnp.mean(bound)  # at least E log p(Z), up to sampling error
    ```
    """

    num_paths: int = eqx.field(static=True, default=16)
    proposal: AbstractProposal = Laplace()

    def __check_init__(self):
        check_count("num_paths", self.num_paths, least=0)
        check_fields(self)

    def __call__(
        self, flow: AbstractStochasticFlow, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """Samples Z `(*shape, d)`, and the value of the bound at each of them `(*shape)`. Both are
        differentiable.

        A sample that escapes is set to infinity, and its value to −inf.
        """
        with one_line_errors():
            z, value = _upper(flow, self.proposal, check_key(key), math.prod(shape), self.num_paths)
        return jnp.reshape(z, (*shape, flow.dimension)), jnp.reshape(value, shape)


@jit
def _upper(
    flow: AbstractStochasticFlow, proposal: AbstractProposal, key: PRNGKeyArray, count: int, fresh: int
) -> tuple[Array, Array]:
    key_own, key_path, key_solve, key_cloud = jax.random.split(key, 4)
    z, given, path = flow.sample_and_log_prob_given_path(key=key_own, shape=(count,))
    has_escaped = ~jnp.all(jnp.isfinite(z), axis=-1)
    # For a sample that escaped, there is no finite point at which to evaluate the bound.
    place = jnp.where(has_escaped[:, None], 0, z)
    mixture = mixture_of(proposal, flow, place, key_cloud)
    density = log_standard if mixture is None else mixture.log_prob
    own = jnp.reshape(path.coefficients, (count, 1, -1))
    weights = given[:, None] + log_standard(own) - density(own)
    if fresh:
        size = own.shape[-1] if mixture is None else mixture.num_normals
        noise = jax.random.normal(key_path, (count, fresh, size), z.dtype)
        omega = noise if mixture is None else mixture.sample(noise)
        indices = jnp.broadcast_to(jnp.arange(fresh), (count, fresh))
        solves = solve_keys(flow, jax.random.split(key_solve, count), indices)
        rest = Level(flow).solved(place, omega, None, solves) + log_standard(omega)
        # Far from the centre, the vector field may overflow to NaN before the sample counts as escaped; such
        # a path has no start either.
        rest = jnp.where(jnp.isnan(rest), -jnp.inf, rest) - density(omega)
        weights = jnp.concatenate([weights, rest], axis=1)
    return z, jnp.where(has_escaped, -jnp.inf, log_mean(weights.T))


DECAY = 1.5  # of the probabilities of the terms: between 1 and 2, the variance and the mean cost are finite


class Unbiased(AbstractEstimator):
    """An unbiased estimate of log p(x), and of its gradient if it is differentiated.

    The lower bound L_K = log (1/K) Σₖ wₖ is too low on average. The sum L_K + (L_2K − L_K) + (L_4K − L_2K)
    + … is unbiased. One of its terms is drawn, the j-th with probability p_j ∝ 2^(−3j/2), and divided by
    this probability (Rhee & Glynn 2015; Luo et al. 2020):

        Y = mean L_K + Δ_j / p_j,      Δ_j = L(all 2ʲ K paths) − ½ (L(first half) + L(second half)).

    Var Δ_j decreases as 4⁻ʲ if the weights have four moments, so the variance and the expected number of
    paths are finite.

    **Arguments:** `estimator`, whose `num_paths` is K; `num_replicates`, the number of independent Y, whose
    mean is returned and whose spread gives the standard error.

    The number of paths is random, so it cannot be used inside `jit`; `jax.grad` and `jax.jvp` work. If all
    weights of a group of K paths are zero, the value is −inf.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimator = rf.Unbiased(rf.PullBack(num_paths=8), num_replicates=100)
    flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=estimator).log_prob
    ```
    """

    estimator: PullBack = PullBack(num_paths=16, proposal=Laplace())
    num_replicates: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        check_count("num_replicates", self.num_replicates, least=2)

    def estimate(
        self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy
    ) -> Estimate:
        if accuracy.tolerance is not None:
            raise ValueError("Unbiased takes no tolerance: set num_replicates instead")
        if is_traced(key):
            raise ValueError(
                "Unbiased draws a random number of paths: call it outside of jit" + see("inside-jit")
            )
        x = checked_points(flow, x)
        flat, replicates = jnp.reshape(x, (-1, x.shape[-1])), self.num_replicates
        key_paths, key_levels = jax.random.split(check_key(key))
        # P(level > j) = 2^(−DECAY j), j = 1, 2, …
        uniform = 1 - np.asarray(jax.random.uniform(key_levels, (len(flat) * replicates,), "float32"), float)
        levels = 1 + np.floor(-np.log2(uniform) / DECAY).astype(int)
        # Blocks of K paths, in the order of points and replicates.
        points = np.repeat(np.repeat(np.arange(len(flat)), replicates), 2**levels)
        keys = point_keys(key_paths, jnp.arange(len(points)))
        weights = LowerBound(self.estimator).log_weights(flow, flat[points], key=keys)
        values = _telescoped(log_mean(weights.T), levels).reshape(-1, replicates)
        of_points = lambda a: jnp.asarray(np.bincount(points, a, minlength=len(flat)).astype(int))
        parts = {
            "standard_error": jnp.std(jax.lax.stop_gradient(values), axis=1, ddof=1) / replicates**0.5,
            "num_paths": of_points(np.full(len(points), weights.shape[1])),
            "escaped": of_points(np.sum(np.isneginf(jax.lax.stop_gradient(weights)), axis=1)),
        }
        estimate = Estimate.of(jnp.mean(values, axis=1), "paths", **parts)
        return jax.tree.map(lambda a: jnp.reshape(a, x.shape[:-1]), estimate)


def _telescoped(blocks: Array, levels: np.ndarray) -> Array:
    """Y of each replicate, from L_K of its 2ʲ blocks, which lie one after another."""
    starts = np.cumsum(2**levels) - 2**levels
    values = jnp.zeros(len(levels), blocks.dtype)
    for level in np.unique(levels):
        which = np.flatnonzero(levels == level)
        mine = blocks[starts[which] + np.arange(2**level)[:, None]]
        first, second = jnp.split(mine, 2)
        change = log_mean(mine) - 0.5 * (log_mean(first) + log_mean(second))
        probability = (2.0**DECAY - 1) * 2.0 ** (-DECAY * level)
        values = values.at[which].set(jnp.mean(mine, axis=0) + change / probability)
    return values
