"""What weights of paths say about log p(x)."""

from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..flow import FEW_PATHS, HEAVY, Estimate
from ._pareto import pareto_k

# Particles of one run share what their moves did not reach: between runs, estimates spread so much more than
# the weights of one run say (measured on SDEs whose paths to x lie on curved surfaces).
DOUBT = 1.5


def log_mean(log_weights: Array) -> Array:
    """The logarithm of the mean weight over the first axis; −inf is a weight of zero."""
    top = jax.lax.stop_gradient(jnp.max(log_weights, axis=0))
    shift = jnp.where(jnp.isfinite(top), top, 0)
    mean = jnp.mean(jnp.exp(log_weights - shift[None]), axis=0)
    some = mean != 0  # a NaN stays one
    return jnp.where(some, jnp.log(jnp.where(some, mean, 1)) + shift, -jnp.inf)


def relative_weights(log_weights: Array, group: int) -> Array:
    """Weights over their mean, those of a group averaged: independent, with mean 1; `(K / group, ...)`."""
    value = log_mean(log_weights)
    relative = jnp.exp(log_weights - jnp.where(jnp.isfinite(value), value, 0)[None])
    return jnp.mean(jnp.reshape(relative, (-1, group, *relative.shape[1:])), axis=1)


def effective_paths(log_weights: Array) -> Array:
    """(Σw)²/Σw² over the first axis; 0 where all weights are."""
    relative = relative_weights(jax.lax.stop_gradient(log_weights), 1)
    some = jnp.any(jnp.isfinite(log_weights), axis=0)
    return jnp.where(some, log_weights.shape[0] / jnp.maximum(jnp.mean(relative**2, axis=0), 1), 0)


def unreliable(log_weights: Array) -> Array:
    """Where an estimate from these log-weights, over the first axis, would be suspect."""
    few = effective_paths(log_weights) < min(FEW_PATHS, 0.99 * log_weights.shape[0])
    return few | (pareto_k(log_weights) > HEAVY)


def compared(log_weights: Array, others: Array) -> tuple[Array, tuple[Array, Array]]:
    """How far the estimates of two sets of particles, over the first axis, are apart, in their errors; and
    these errors."""
    both = (jax.lax.stop_gradient(log_weights), jax.lax.stop_gradient(others))
    first, second = (DOUBT * weights_error(relative_weights(weights, 1)) for weights in both)
    return jnp.abs(log_mean(both[0]) - log_mean(both[1])) / jnp.hypot(first, second), (first, second)


def standard_error(terms: Array) -> Array:
    """Of the mean of independent terms over the first axis; infinite for a single one."""
    if terms.shape[0] == 1:
        return jnp.full(terms.shape[1:], jnp.inf, terms.dtype)
    return jnp.std(terms, axis=0, ddof=1) / terms.shape[0] ** 0.5


def weights_error(weights: Any, xp: Any = jnp) -> Any:
    """The standard error of the logarithm of a mean of K independent weights, mean 1, over the first axis.

    By the delta method it is that of the mean. But few weights with a long tail to the right, as products
    of many factors have, seldom show it: their sample variance is too small more often than not. So the
    variance is that of the weights or that of the lognormal distribution with their upper quantiles,
    whichever is larger, unless there are many and the largest shows that there is no such tail. Half the
    square of the largest weight's share is added, for one like it that may be missing, and there is an
    allowance for K, as Student's t has. `xp` is the module whose arrays they are.
    """
    count = weights.shape[0]
    if count == 1:
        return xp.full(weights.shape[1:], xp.inf, weights.dtype)
    ranked = xp.sort(weights, axis=0)
    # Quantiles above the middle: up to three weights in ten are next to nothing, those of the prior's paths.
    upper, middle = (_quantile(ranked, level) for level in (0.9, 0.7))
    some = middle > 0
    spread = xp.where(some, xp.log(xp.where(some, upper / xp.where(some, middle, 1), 1)) / 0.7572, 0)
    if count >= 256:
        # So many would show it. Bounded weights, most of them small, have no such tail.
        beyond = NormalDist().inv_cdf(1 - 0.5 / count) - 1.2816
        reach = xp.log(xp.where(some, ranked[-1] / xp.where(some, upper, 1), 1)) / beyond
        spread = xp.minimum(spread, 1.3 * reach)
    lognormal = xp.expm1(xp.minimum(spread**2, 4.0))
    variance = xp.maximum(xp.var(weights, axis=0, ddof=1), lognormal) / count
    variance = variance + 0.5 * xp.where(variance > 0, (ranked[-1] - ranked[0]) / count, 0) ** 2
    return xp.sqrt(variance) * (1 + 1.2 / (count - 1))


def log_bias(weights: Array) -> Array:
    """What the logarithm of a mean of K independent weights, mean 1, is low by on average: half the variance
    of the mean, to leading order."""
    if weights.shape[0] == 1:
        return jnp.zeros(weights.shape[1:], weights.dtype)
    return 0.5 * jnp.var(weights, axis=0, ddof=1) / weights.shape[0]


def _quantile(ranked: Any, level: float) -> Any:
    """Between the two nearest of values ranked along the first axis."""
    place = level * (ranked.shape[0] - 1)
    low = int(place)
    high = min(low + 1, ranked.shape[0] - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def from_log_weights(
    log_weights: Array, group: int, fell_back: Array, tempered: Array | None = None, searched: bool = False
) -> Estimate:
    """The estimate that log-weights of shape `(K, ...)` make, in independent groups of `group` paths.

    `searched` says what a weight of zero means: a path that a search did not find, or one that escaped.
    """
    count = log_weights.shape[0]
    some = jnp.any(jnp.isfinite(log_weights), axis=0)
    lost = jnp.sum(jnp.isneginf(log_weights), axis=0)
    none = jnp.zeros_like(lost)
    held = jax.lax.stop_gradient(log_weights)  # error bars have no derivatives
    error, tail = weights_error(relative_weights(held, group)), pareto_k(held)
    if tempered is not None:
        error = jnp.where(tempered, DOUBT * error, error)
        # Shares of the descendants of K particles are no larger than K times their mean: they have no tail.
        tail = jnp.where(tempered, jnp.nan, tail)
    value = log_mean(log_weights) + log_bias(relative_weights(log_weights, group))
    return Estimate(
        log_prob=value,
        standard_error=jnp.where(some, error, jnp.inf),
        divergence_error=jnp.zeros_like(value),
        effective_paths=effective_paths(log_weights),
        num_paths=jnp.full(log_weights.shape[1:], count),
        escaped=none if searched else lost,
        unfound=lost if searched else none,
        pareto_k=tail,
        fell_back=fell_back,
        tempered=jnp.zeros_like(fell_back) if tempered is None else tempered,
        unmet=jnp.zeros(log_weights.shape[1:], bool),
    )
