"""p(x) as a mean of weights over random paths, until it is known well enough."""

import copy
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_key, is_traced
from ..._programs import jit
from ...faq import see
from ...flow import FEW_PATHS, HEAVY, Accuracy, Estimate, StochasticFlow
from .._estimate import DOUBT, effective_paths, from_log_weights, log_mean, weights_error
from .._pareto import pareto_k
from ._chart import AbstractChart, AbstractImprovingChart
from ._chunks import cut
from ._weights import EstimatorRun, Weighed

GROWTH = 4  # how many times more paths a round may bring
# A standard error from K paths is itself known to about 2/√K of its size where weights are skewed, and
# rounds stop on low ones: what must be below the tolerance is two such errors up.
MARGIN = 4
TRIAL = 2**30  # where in a point's sequence of paths those lie that a second chart is tried on
GOOD = 0.5  # effective fraction of them above which it is the one to go on with


class AbstractImportanceEstimator(AbstractChart):
    """Importance sampling in the coordinates of a chart."""

    def estimate(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        run = EstimatorRun(self, flow, x, check_key(key))
        points = np.arange(run.size)
        weighed = run.weighed(points, np.zeros(len(points), int), checked=accuracy.solver, again=True)
        if accuracy.tolerance is None:
            estimate = summary(run, weighed, points)
        elif is_traced(weighed.log_weights):
            told = "tolerance needs values to look at: inside jit or grad set num_paths instead"
            raise ValueError(told + see("inside-jit"))
        else:
            estimate = _until(run, weighed, accuracy.tolerance, accuracy.max_paths)
        if flow.noise_dimension == 0 and weighed.divergence_error is None:
            # Without noise every path is the same.
            estimate = dataclasses.replace(estimate, standard_error=jnp.zeros_like(estimate.log_prob))
        if accuracy.truncation:
            fine = finer_log_weights(self, flow, x, key)
            error = 2 * jnp.abs(log_mean(fine.T) - log_mean(weighed.plain.T))
            estimate = dataclasses.replace(estimate, truncation_error=error)
        return in_shape(estimate, run.batch)


def finer_log_weights(
    estimator: AbstractImportanceEstimator, flow: StochasticFlow, x: Array, key: PRNGKeyArray
) -> Array:
    """The log-weights with twice the driver's functions, along paths that share their coefficients with
    those that a run draws from the same key."""
    refined = flow.with_driver(flow.driver.refined())
    return EstimatorRun(estimator, refined, x, key, coarse=flow.driver).all_log_weights()


def in_shape(estimate: Estimate, batch: tuple[int, ...]) -> Estimate:
    shaped = lambda a: jnp.reshape(a, batch) if is_traced(a) else jax.device_put(np.reshape(a, batch))
    return jax.tree.map(shaped, estimate)


def summary(run: EstimatorRun, weighed: Weighed, points: np.ndarray) -> Estimate:
    """The estimate that the weights of some points make."""
    weighed, places = run.padded((weighed, points))
    return cut(_summary(run.estimator, run.distribution, weighed, run.group, places), len(points))


@partial(jit, level=0)
def _summary(
    estimator: AbstractChart, distribution: Any, weighed: Weighed, group: int, places: Any
) -> Estimate:
    # Particles that start from the prior find their way; their weights say if they did not.
    fell_back, searched = distribution.missed[places] & ~weighed.poor, estimator.searches
    estimate = from_log_weights(weighed.log_weights.T, group, fell_back, weighed.poor, searched)
    if isinstance(estimator, AbstractImprovingChart):
        estimate = dataclasses.replace(estimate, steep=weighed.doubt)
    if weighed.solver_error is None:
        return estimate
    rounding = 8 * jnp.finfo(estimate.log_prob.dtype).eps * (1 + jnp.abs(estimate.log_prob))
    solver = jnp.where(jnp.isfinite(estimate.log_prob), weighed.solver_error + rounding, jnp.inf)
    estimate = dataclasses.replace(estimate, solver_error=solver)
    if weighed.divergence_error is None:
        return estimate
    return dataclasses.replace(estimate, divergence_error=weighed.divergence_error)


def _until(run: EstimatorRun, weighed: Weighed, tolerance: float, max_paths: int) -> Estimate:
    """Rounds of more paths for the points whose standard error is above the tolerance."""
    size = run.estimator.num_paths
    have = list(np.asarray(weighed.log_weights))
    second, better = _second_chart(run, weighed, tolerance)
    weighed = weighed._replace(remedy=np.where(better, -1, weighed.remedy))
    doubt = np.where(weighed.poor, DOUBT, 1.0)

    def draw(points: np.ndarray, first: np.ndarray) -> None:
        for chart, mine in ((run, ~better[points]), (second, better[points])):
            if mine.any():
                fresh = np.asarray(chart.weighed(points[mine], first[mine]).log_weights)
                for point, weights in zip(points[mine], fresh, strict=True):
                    have[point] = np.concatenate([have[point], weights])

    for point in (again := np.flatnonzero(better)):
        have[point] = have[point][:0]
    draw(again, np.zeros(len(again), int))
    while True:
        counts = np.array([len(weights) for weights in have])
        quality = np.array([_quality(weights, run.group) for weights in have])
        bar = quality[:, 0] * doubt * (1 + MARGIN / counts**0.5)
        unmet = (bar > tolerance) | (quality[:, 1] < min(FEW_PATHS, 0.99 * size))
        open_points = np.flatnonzero(unmet & (counts + size <= max_paths))
        if not open_points.size:
            break
        # Where nothing is known yet, as many as a round may bring.
        ratio = np.nan_to_num(1.2 * (np.minimum(bar, 1e6) / tolerance) ** 2, nan=GROWTH)
        wanted = counts * np.clip(ratio, 2, GROWTH)
        rounds = ((np.minimum(wanted, max_paths) - counts) // size).astype(int).clip(1)[open_points]
        points = np.repeat(open_points, rounds)
        step = np.concatenate([np.arange(r) for r in rounds])
        draw(points, counts[points] + size * step)
    return _gather(have, weighed, run, unmet)


def _second_chart(run: EstimatorRun, weighed: Weighed, tolerance: float) -> tuple[EstimatorRun, np.ndarray]:
    """A run of the second chart, and the points where it is to go on: those with poor weights that are good
    there, seen on paths that do not count."""
    better = np.zeros(len(weighed.poor), bool)
    estimator = run.estimator
    if not isinstance(estimator, AbstractImprovingChart) or not np.any(weighed.poor):
        return run, better
    now, chart = summary(run, weighed, np.arange(run.size)), estimator.second(run.flow)
    met = np.asarray(now.standard_error) <= tolerance
    own = (np.asarray(weighed.remedy) == 0) & ~np.asarray(weighed.doubt)
    points = np.flatnonzero(own & ~met & ~np.asarray(run.missed))
    if chart is None or not points.size:
        return run, better
    second = copy.copy(run)
    second.estimator = chart
    trial = second.weighed(points, np.full(len(points), TRIAL)).log_weights
    better[points] = cut(_good(run.padded(trial)), len(points))
    return second, better


@partial(jit, level=0)
def _good(log_weights: Array) -> Array:
    count = log_weights.shape[1]
    return (effective_paths(log_weights.T) > GOOD * count) & ~(pareto_k(log_weights.T) > HEAVY)


def _quality(log_weights: np.ndarray, group: int) -> tuple[float, float]:
    """Standard error of log p and effective paths, for a look between rounds: NumPy compiles nothing."""
    log_weights = log_weights.astype(float)  # for −1e300
    weights = np.exp(log_weights - max(log_weights.max(), -1e300))
    mean = weights.mean()
    if mean == 0 or len(weights) == group:
        return np.inf, 0.0
    terms = (weights / mean).reshape(-1, group).mean(axis=1)
    effective = len(weights) / np.mean((weights / mean) ** 2)
    return float(weights_error(terms, np)), float(effective)


def _gather(have: list[np.ndarray], weighed: Weighed, run: EstimatorRun, unmet: np.ndarray) -> Estimate:
    """One estimate from weights that differ in number between points."""
    counts = np.array([len(weights) for weights in have])
    parts, order = [], []
    for count in np.unique(counts):
        points = np.flatnonzero(counts == count)
        weights = jnp.asarray(np.stack([have[i] for i in points]))
        rest = jax.tree.map(lambda a, points=points: a[points], weighed[2:])
        parts.append(summary(run, Weighed(weights, weights, *rest), points))
        order.append(points)
    back = np.argsort(np.concatenate(order))
    estimate = jax.tree.map(lambda *a: jnp.concatenate(a)[back], *parts)
    return dataclasses.replace(estimate, unmet=jnp.asarray(unmet))
