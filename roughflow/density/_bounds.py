"""Bounds on log p(x) that training can push on, from below and from above, and log p(x) without bias."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, check_count, check_fields, check_key, check_number, is_traced
from .._programs import jit
from ..faq import see
from ..flow import AbstractStochasticFlow, one_line_errors
from ._estimate import AbstractEstimator, Accuracy, Estimate, log_mean
from ._modes import Laplace
from ._paths import PullBack, checked_points, explain_failure, log_joint, mixture_of, point_keys, solve_keys
from ._proposals import AbstractProposal, log_standard


class LowerBound(eqx.Module):
    """The K-path bound: E log (1/K) Σₖ wₖ ≤ log p(x), tighter as K grows (Burda et al. 2016).

    With `rf.PullBack(1)` it is the bound of Hodgkinson et al. (2020), E log p(x | path).

    **Arguments:** `estimator`, whose `num_paths` is K and whose proposal draws the paths; an
    `rf.Amortised` proposal in it is trained by the same gradient.

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
        """One draw of the bound at each x of shape `(..., d)`."""
        weights = self.log_weights(flow, x, key=key)
        return log_mean(jnp.moveaxis(weights, -1, 0))

    def log_weights(self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """log w₁, …, log w_K at each x, shape `(..., K)`; the bound is the logarithm of their mean."""
        x = checked_points(flow, x)
        flat, count = jnp.reshape(x, (-1, x.shape[-1])), self.estimator.num_paths
        self.estimator.proposal.draws.check(count)
        # Points that are part of a batch, in a fit on several devices, come with keys of their own.
        keys = key if key.ndim else point_keys(check_key(key), jnp.arange(len(flat)))
        places = jnp.broadcast_to(jnp.arange(count), (len(flat), count))
        try:
            with one_line_errors():
                weights = _log_weights(self.estimator, flow, flat, keys, places, count)
        except NonFiniteError:
            explain_failure(flow, flat)
            raise
        return jnp.reshape(weights, (*x.shape[:-1], count))


@jit
def _log_weights(estimator: PullBack, flow, x: Array, keys: PRNGKeyArray, places: Array, most: int) -> Array:
    return estimator.log_weights(flow, x, keys, places, most)


class UpperBound(eqx.Module):
    """A bound from above on the mean of log p over the flow's own samples Z:

        E log p(Z) ≤ E log 1/(K+1) (w₀ + w₁ + … + w_K),      wₖ = p(Z | ωₖ) φ(ωₖ)/q(ωₖ | Z),

    ω₀ the path that made Z and ω₁, …, ω_K drawn from the proposal q, tighter as K grows (Sobolev & Vetrov
    2019; for q the prior, Yin & Zhou 2018). It holds for every q, because ω₀ is a draw from the
    distribution of the path given Z, and is tighter if q is closer to that distribution: with K = 0 it
    exceeds E log p(Z) by the mean of KL(p(ω | Z) ‖ q(ω | Z)). Each path has one start, so no
    path to Z is missed, and a path without a start counts as zero.

    **Arguments:** `num_paths`, the number K of fresh ones; it may be 0. `proposal`: `rf.Laplace()`, the
    default; an `rf.Amortised(...)`, which the bound trains when it is made small; `rf.Prior()`, the loosest.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    z, bound = rf.density.UpperBound(num_paths=16)(flow, key=jax.random.key(0), shape=(100,))
    jnp.mean(bound)  # not below E log p(Z), but for chance
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
        """Samples Z `(*shape, d)` and the bound's value at each, `shape`; gradients pass through both.

        A sample that escaped is at infinity, with the value −inf.
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
    # A sample that escaped has no finite place to ask about.
    place = jnp.where(has_escaped[:, None], 0, z)
    mixture = mixture_of(proposal, flow, place, key_cloud)
    density = log_standard if mixture is None else mixture.log_prob
    own = jnp.reshape(path.coefficients, (count, 1, -1))
    weights = given[:, None] + log_standard(own) - density(own)
    if fresh:
        size = own.shape[-1] if mixture is None else mixture.num_normals
        noise = jax.random.normal(key_path, (count, fresh, size), z.dtype)
        omega = noise if mixture is None else mixture.sample(noise)
        places = jnp.broadcast_to(jnp.arange(fresh), (count, fresh))
        solves = solve_keys(flow, jax.random.split(key_solve, count), places)
        rest = log_joint(flow, place, omega, solves)
        # Far out a field may overflow to NaN before its solve counts as escaped: it leads nowhere either.
        rest = jnp.where(jnp.isnan(rest), -jnp.inf, rest) - density(omega)
        weights = jnp.concatenate([weights, rest], axis=1)
    return z, jnp.where(has_escaped, -jnp.inf, log_mean(weights.T))


class Unbiased(AbstractEstimator):
    """An unbiased estimate of log p(x) and, differentiated, of its gradient.

    With K paths, L_K = log (1/K) Σ w is too low on average, by about the weights' relative variance over 2K.
    The sum L_K + (L_2K − L_K) + (L_4K − L_2K) + … has no bias. One term of it is computed, the j-th with
    probability p_j ∝ 2^(−j·decay), and divided by that:

        Y = mean L_K + Δ_j / p_j,      Δ_j = L(all K2ʲ paths) − ½ (L(first half) + L(second half)).

    Var Δ_j falls as 4⁻ʲ where weights have four moments, so a decay between 1 and 2 leaves both the
    variance and the expected number of paths finite (Rhee & Glynn 2015; Luo et al. 2020).

    **Arguments:**

    - `estimator`: whose weights; its `num_paths` is K.
    - `num_replicates`: number of independent Y in the mean; their spread is the standard error.
    - `decay`: of the probabilities, between 1 and 2.

    The number of paths is itself random, so the key must be known: outside `jit`, though gradients
    and `jvp` are fine. Every group of K paths must have some with weight, or the value is −inf.

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
    decay: float = eqx.field(static=True, default=1.5)

    def __check_init__(self):
        check_count("num_replicates", self.num_replicates)
        check_number("decay", self.decay)
        if not 1 < self.decay < 2:
            raise ValueError(f"decay must lie between 1 and 2 for finite cost and variance, got {self.decay}")

    def estimate(
        self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy
    ) -> Estimate:
        if accuracy.tolerance is not None:
            raise ValueError("Unbiased takes no tolerance: set num_replicates instead")
        if is_traced(key):
            raise ValueError(
                "Unbiased draws how many paths to use, so its key must be known: call it outside jit"
                + see("inside-jit")
            )
        x, size = checked_points(flow, x), self.estimator.num_paths
        flat, count = jnp.reshape(x, (-1, x.shape[-1])), math.prod(x.shape[:-1])
        key_paths, key_levels = jax.random.split(check_key(key))
        levels = self._levels(key_levels, count * self.num_replicates)
        # Blocks of K paths, in the order of points and replicates; each has a key of its own.
        points = np.repeat(np.repeat(np.arange(count), self.num_replicates), 2**levels)
        keys = point_keys(key_paths, jnp.arange(len(points)))
        places = jnp.broadcast_to(jnp.arange(size), (len(points), size))
        with one_line_errors():
            weights = _log_weights(self.estimator, flow, flat[points], keys, places, size)
        values = self._combine(log_mean(weights.T), levels).reshape(count, self.num_replicates).T
        if self.num_replicates > 1:
            spread = jnp.std(jax.lax.stop_gradient(values), axis=0, ddof=1) / self.num_replicates**0.5
        else:
            spread = jnp.full(count, jnp.inf, values.dtype)
        escaped = jax.ops.segment_sum(jnp.sum(jnp.isneginf(weights), axis=1), jnp.asarray(points), count)
        number = jnp.asarray(size * np.bincount(points, minlength=count))
        parts = {"standard_error": spread, "num_paths": number, "escaped": escaped}
        estimate = Estimate.of(jnp.mean(values, axis=0), "paths", **parts)
        return jax.tree.map(lambda a: jnp.reshape(a, x.shape[:-1]), estimate)

    def _probability(self, level: np.ndarray) -> np.ndarray:
        """p_j for j = 1, 2, …"""
        return (2.0**self.decay - 1) * 2.0 ** (-self.decay * level)

    def _levels(self, key: PRNGKeyArray, count: int) -> np.ndarray:
        """The j of each replicate: P(level > j) = 2^(−j·decay)."""
        uniform = 1 - np.asarray(jax.random.uniform(key, (count,), "float32"), float)  # in (0, 1]
        return 1 + np.floor(-np.log2(uniform) / self.decay).astype(int)

    def _combine(self, blocks: Array, levels: np.ndarray) -> Array:
        """Y of each replicate from the values L_K of its 2ʲ blocks, which lie one after another."""
        starts = np.cumsum(2**levels) - 2**levels
        values = jnp.zeros(len(levels), blocks.dtype)
        for level in np.unique(levels):
            which = np.flatnonzero(levels == level)
            mine = blocks[starts[which] + np.arange(2**level)[:, None]]
            first, second = jnp.split(mine, 2)
            change = log_mean(mine) - 0.5 * (log_mean(first) + log_mean(second))
            values = values.at[which].set(jnp.mean(mine, axis=0) + change / self._probability(level))
        return values
