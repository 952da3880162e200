"""A parabola with normal noise."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractDistribution, Window
from ._noisy import LOG_2PI, log_normal


class Banana(AbstractDistribution):
    """x ~ N(0, 1), y | x ~ N(−x², 2). Its entropy is 1 + ln 2π + ½ ln 2."""

    extent: ClassVar[Window] = (-3.5, 3.5, -11.0, 4.0)

    @property
    def entropy(self) -> float:
        return 1 + LOG_2PI + 0.5 * math.log(2)

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        x, noise = jax.random.normal(key, (2, *shape))
        return jnp.stack([x, math.sqrt(2) * noise - x**2], axis=-1)

    def _log_prob(self, z: Array) -> Array:
        x, y = z[..., 0], z[..., 1]
        return log_normal(x, 1.0) + log_normal(y + x**2, math.sqrt(2))
