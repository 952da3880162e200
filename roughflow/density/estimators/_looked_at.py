"""Of many paths the few that stand for all: on them errors are looked at."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._chart import Weights

FEW = 16  # paths on which a solver's error is seen: of four the mean of exp(Δ) is mostly chance


def few_of(weights: Weights) -> Weights:
    """Of the paths of each point those few that stand for all."""
    places = _by_weight(weights.log_weights, min(FEW, weights.log_weights.shape[1]))
    take = lambda a: jnp.take_along_axis(a, jnp.expand_dims(places, range(2, a.ndim)), axis=1)
    return jax.tree.map(take, weights)


def mean_and_spread(change: Array) -> Array:
    """|log mean exp| over the second axis, and the mean's standard error; infinite where it is not a
    number."""
    spread = jnp.std(change, axis=1) / max(1, change.shape[1] - 1) ** 0.5
    size = jnp.abs(jax.nn.logsumexp(change, axis=1) - jnp.log(change.shape[1])) + spread
    return jnp.where(jnp.isfinite(size), size, jnp.inf)


def _by_weight(log_weights: Array, count: int) -> Array:
    """Places `(B, count)` of paths at even steps of the summed weight: those that matter, each about as often
    as it does."""
    share = jax.nn.softmax(jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights), axis=1)
    level = (jnp.arange(count) + 0.5) / count
    below = jnp.cumsum(share, axis=1)[:, None] < level[None, :, None].astype(share.dtype)
    return jnp.minimum(jnp.sum(below, axis=2), log_weights.shape[1] - 1)
