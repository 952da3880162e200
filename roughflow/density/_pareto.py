"""How heavy the tail of importance weights is."""

import math

import jax.numpy as jnp
from jaxtyping import Array


def pareto_k(log_weights: Array) -> Array:
    """The shape k of a generalised Pareto distribution fitted to the largest weights, over the first axis.

    Weights with k < ½ have a finite variance; above 0.7 the estimate should not be trusted (Vehtari,
    Simpson, Gelman, Yao & Gabry 2024). The fit is that of Zhang & Stephens (2009), drawn towards ½ with the
    weight of ten observations as in the former. NaN with fewer than 25 weights; −inf where the largest
    ones are all but equal.
    """
    count = log_weights.shape[0]
    tail = min(count // 5, math.ceil(3 * count**0.5))
    if tail < 5:
        return jnp.full(log_weights.shape[1:], jnp.nan, log_weights.dtype)
    ranked = jnp.sort(log_weights, axis=0)
    top = jnp.where(jnp.isfinite(ranked[-1]), ranked[-1], 0)
    weights = jnp.exp(ranked - top[None])
    excess = weights[-tail:] - weights[-tail - 1][None]
    largest, quartile = excess[-1], excess[math.floor(tail / 4 + 0.5) - 1]
    # Equal to one part in a hundred: no tail to speak of.
    flat = ~(largest > 0.01)
    largest = jnp.where(flat, 1, largest)
    quartile = jnp.where(flat, 1, jnp.maximum(quartile, 1e-6 * largest))
    grid = 30 + math.floor(tail**0.5)
    j = jnp.arange(1, grid + 1, dtype=excess.dtype) - 0.5
    steps = jnp.expand_dims(1 - jnp.sqrt(grid / j), range(1, excess.ndim))
    b = 1 / largest[None] + steps / (3 * quartile[None])
    k = -jnp.mean(jnp.log1p(-b[None] * excess[:, None]), axis=0)
    profile = tail * (jnp.log(b / k) + k - 1)
    profile = jnp.where(jnp.isnan(profile), -jnp.inf, profile)
    share = jnp.exp(profile - jnp.max(profile, axis=0, keepdims=True))
    b = jnp.sum(b * share, axis=0) / jnp.sum(share, axis=0)
    k = jnp.mean(jnp.log1p(-b[None] * excess), axis=0)
    k = (k * tail + 0.5 * 10) / (tail + 10)
    return jnp.where(flat, -jnp.inf, k)
