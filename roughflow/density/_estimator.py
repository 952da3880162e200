"""What every estimator of log p(x) has in common: points in chunks, a key of its own for each."""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_finite, check_key, check_vector
from ..flow import AbstractEstimator, StochasticFlow
from ._estimate import Estimate, from_log_weights

# Pairs of a point and a path that are solved together; bounds memory, and changes no number.
PAIRS = 2**17


class AbstractImportanceEstimator(AbstractEstimator):
    """p(x) as a mean of weights over random paths."""

    num_paths: eqx.AbstractVar[int]

    @abc.abstractmethod
    def log_weights(self, flow: StochasticFlow, x: Array, keys: PRNGKeyArray) -> Array:
        """Log-weights `(K, B)` whose mean weight is p(x), for `x` `(B, d)` with one key a row."""

    def estimate(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray) -> Estimate:
        x = jnp.asarray(x)
        check_vector("x", x, flow.dimension)
        check_finite("x", x)
        batch = x.shape[:-1]
        points = jnp.reshape(x, (-1, flow.dimension))
        # Random numbers belong to a point's place in x, so that chunks do not change them.
        keys = jax.random.split(check_key(key), math.prod(batch))
        size = max(1, PAIRS // self.num_paths)
        weights = [
            _weights(self, flow, points[i : i + size], keys[i : i + size])
            for i in range(0, len(points), size)
        ]
        log_weights = jnp.concatenate(weights, axis=1)
        return from_log_weights(jnp.reshape(log_weights, (self.num_paths, *batch)))


@eqx.filter_jit
def _weights(estimator: AbstractImportanceEstimator, flow: StochasticFlow, x: Array, keys: PRNGKeyArray):
    return estimator.log_weights(flow, x, keys)
