"""p(x) as a mean of weights over random paths, until it is known well enough."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_positive, is_traced
from ..flow import StochasticFlow
from ._chart import AbstractChart
from ._estimate import FEW_PATHS, Estimate, from_log_weights, log_mean
from ._pareto import HEAVY, pareto_k
from ._sampler import Sampler

GROWTH = 4  # how many times more paths a round may bring
# A standard error from K paths is itself known to about 2/√K of its size where weights are skewed, and
# rounds stop on low ones: what must be below the tolerance is two such errors up.
DOUBT = 4


class AbstractImportanceEstimator(AbstractChart):
    """Importance sampling in the coordinates of a chart."""

    def estimate(
        self,
        flow: StochasticFlow,
        x: Array,
        *,
        key: PRNGKeyArray,
        tolerance: float | None = None,
        max_paths: int = 2**16,
        truncation: bool = False,
    ) -> Estimate:
        sampler = Sampler(self, flow, x, key)
        log_weights = sampler.all_log_weights()
        first = np.zeros(len(sampler.keys), int)  # the place of each point's first path
        known = not is_traced(log_weights)
        # Second thoughts need values, so inside a jit or a gradient there are none.
        if self.proposal.widens and known:
            heavy = np.asarray(_jit_pareto(log_weights.T)) > HEAVY
            if heavy.any():
                sampler.widen(jnp.asarray(heavy))
                first[heavy] = self.num_paths
                again = np.flatnonzero(heavy)
                log_weights = log_weights.at[again].set(sampler.log_weights(again, first[again]))
        if tolerance is None:
            estimate = _jit_estimate(log_weights.T, sampler.group, sampler.law.fell_back)
        elif known:
            check_positive("tolerance", tolerance)
            estimate = _until(sampler, log_weights, first, tolerance, max_paths)
        else:
            raise ValueError("tolerance needs values to look at: inside jit or grad set num_paths instead")
        if flow.noise_dim == 0 and flow.divergence.draw(key, (1,), flow.dimension) is None:
            # Without noise every path is the same.
            estimate = eqx.tree_at(lambda e: e.standard_error, estimate, jnp.zeros_like(estimate.log_prob))
        if truncation:
            fine = finer_log_weights(self, flow, x, key, sampler, first)
            error = 2 * jnp.abs(log_mean(fine.T) - log_mean(log_weights.T))
            estimate = eqx.tree_at(
                lambda e: e.truncation_error, estimate, error, is_leaf=lambda leaf: leaf is None
            )
        return jax.tree.map(lambda a: jnp.reshape(a, sampler.batch), estimate)


def finer_log_weights(
    estimator: AbstractImportanceEstimator,
    flow: StochasticFlow,
    x: Array,
    key: PRNGKeyArray,
    sampler: Sampler,
    first: np.ndarray,
) -> Array:
    """The log-weights with twice the driver's functions, along paths that share their coefficients with
    those `sampler` drew from the places `first`."""
    refined = flow.with_driver(flow.driver.refined())
    fine = Sampler(estimator, refined, x, key, coarse=flow.driver)
    fine.widen(jnp.asarray(first > 0))
    return fine.log_weights(np.arange(len(first)), first)


def _until(
    sampler: Sampler, log_weights: Array, first: np.ndarray, tolerance: float, max_paths: int
) -> Estimate:
    """Rounds of more paths for the points whose standard error is above the tolerance."""
    size = sampler.estimator.num_paths
    have = list(np.asarray(log_weights))
    while True:
        counts = np.array([len(weights) for weights in have])
        quality = np.array([_quality(weights, sampler.group) for weights in have])
        bar = quality[:, 0] * (1 + DOUBT / counts**0.5)
        unmet = (bar > tolerance) | (quality[:, 1] < min(FEW_PATHS, size))
        open_points = np.flatnonzero(unmet & (counts + size <= max_paths))
        if not open_points.size:
            break
        wanted = counts * np.clip(1.2 * (bar / tolerance) ** 2, 2, GROWTH)
        rounds = ((np.minimum(wanted, max_paths) - counts) // size).astype(int).clip(1)[open_points]
        points = np.repeat(open_points, rounds)
        step = np.concatenate([np.arange(r) for r in rounds])
        fresh = sampler.log_weights(points, first[points] + counts[points] + size * step)
        for point, weights in zip(points, np.asarray(fresh), strict=True):
            have[point] = np.concatenate([have[point], weights])
    return _gather(have, sampler, unmet)


def _quality(log_weights: np.ndarray, group: int) -> tuple[float, float]:
    """Standard error of log p and effective paths, as `Estimate` defines them."""
    weights = np.exp(log_weights - max(log_weights.max(), -1e300))
    mean = weights.mean()
    if mean == 0 or len(weights) == group:
        return np.inf, 0.0
    terms = (weights / mean).reshape(-1, group).mean(axis=1)
    effective = len(weights) / np.mean((weights / mean) ** 2)
    return float(terms.std(ddof=1) / len(terms) ** 0.5), float(effective)


def _gather(have: list[np.ndarray], sampler: Sampler, unmet: np.ndarray) -> Estimate:
    """One estimate from weights that differ in number between points."""
    counts = np.array([len(weights) for weights in have])
    parts, order = [], []
    for count in np.unique(counts):
        points = np.flatnonzero(counts == count)
        weights = jnp.asarray(np.stack([have[i] for i in points], axis=1))
        parts.append(_jit_estimate(weights, sampler.group, sampler.law.fell_back[points]))
        order.append(points)
    back = np.argsort(np.concatenate(order))
    estimate = jax.tree.map(lambda *a: jnp.concatenate(a)[back], *parts)
    return eqx.tree_at(lambda e: e.unmet, estimate, jnp.asarray(unmet))


_jit_estimate = eqx.filter_jit(from_log_weights)
_jit_pareto = eqx.filter_jit(pareto_k)
