"""log p(x) without the bias that the logarithm of a mean has."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count, check_key, check_number, is_traced
from ...faq import see
from ...flow import AbstractEstimator, Accuracy, Estimate, StochasticFlow
from .._estimate import from_log_weights, log_mean, standard_error
from ..proposals import Laplace
from ._importance import AbstractImportanceEstimator, in_shape
from ._pull_back import PullBack
from ._weights import EstimatorRun


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
    - `num_replicates`: how many independent Y are averaged; their spread is the standard error.
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

    estimator: AbstractImportanceEstimator = PullBack(num_paths=16, proposal=Laplace())
    num_replicates: int = eqx.field(static=True, default=8)
    decay: float = eqx.field(static=True, default=1.5)

    def __check_init__(self):
        check_count("num_replicates", self.num_replicates)
        check_number("decay", self.decay)
        if not 1 < self.decay < 2:
            raise ValueError(f"decay must lie between 1 and 2 for finite cost and variance, got {self.decay}")

    def estimate(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        if accuracy.tolerance is not None or accuracy.truncation:
            raise ValueError("Unbiased takes neither tolerance nor truncation: set num_replicates instead")
        if is_traced(key):
            raise ValueError(
                "Unbiased draws how many paths to use, so its key must be known: call it outside jit"
                + see("inside-jit")
            )
        key_paths, key_levels = jax.random.split(check_key(key))
        run = EstimatorRun(self.estimator, flow, x, key_paths)
        count = run.size
        levels = self._levels(key_levels, count * self.num_replicates)
        # Blocks of K paths, in the order of points and replicates; each a stretch of its point's paths.
        points = np.repeat(np.repeat(np.arange(count), self.num_replicates), 2**levels)
        stretch = np.arange(len(points)) - np.searchsorted(points, points)
        weights = run.weighed(points, stretch * self.estimator.num_paths).log_weights
        values = self._combine(log_mean(weights.T), levels)
        values = jnp.reshape(values, (count, self.num_replicates)).T
        total = lambda a: jax.ops.segment_sum(a.astype(float), jnp.asarray(points), count).astype(a.dtype)
        missed, searches = run.missed, self.estimator.searches
        blocks = from_log_weights(weights.T, run.group, missed[points], searched=searches)
        estimate = dataclasses.replace(
            jax.tree.map(total, blocks),
            log_prob=jnp.mean(values, axis=0),
            standard_error=standard_error(jax.lax.stop_gradient(values)),
            divergence_error=jnp.zeros(count, weights.dtype),
            pareto_k=jnp.full(count, jnp.nan, weights.dtype),
            fell_back=missed,
            tempered=jnp.zeros(count, bool),
            unmet=jnp.zeros(count, bool),
        )
        return in_shape(estimate, run.batch)

    def _probability(self, level: np.ndarray) -> np.ndarray:
        """p_j for j = 1, 2, …"""
        return (2.0**self.decay - 1) * 2.0 ** (-self.decay * level)

    def _levels(self, key: PRNGKeyArray, count: int) -> np.ndarray:
        """The j of each replicate: P(level > j) = 2^(−j·decay)."""
        uniform = 1 - np.asarray(jax.random.uniform(key, (count,), "float32"), float)  # in (0, 1]
        return 1 + np.floor(-np.log2(uniform) / self.decay).astype(int)

    def _combine(self, blocks: Array, levels: np.ndarray) -> Array:
        """Y of each replicate from the values L_K of its 2ʲ blocks, which lie one after another."""
        ends = np.cumsum(2**levels)
        values = jnp.zeros(len(levels), blocks.dtype)
        for level in np.unique(levels):
            which = np.flatnonzero(levels == level)
            size = 2**level
            mine = blocks[(ends[which] - size)[None] + np.arange(size)[:, None]]
            halves = log_mean(mine[: size // 2]) + log_mean(mine[size // 2 :])
            change = log_mean(mine) - 0.5 * halves
            values = values.at[which].set(jnp.mean(mine, axis=0) + change / self._probability(level))
        return values
