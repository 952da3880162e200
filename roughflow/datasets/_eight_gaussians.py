"""Eight Gaussians on a circle."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import log_mixture, noisy
from ._polar import polar


class EightGaussians(AbstractSmoothDistribution):
    """Eight normal distributions of scale 1/√8, equally likely, around a circle of radius √8."""

    noise: ClassVar[float] = 8**-0.5

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_which, key_noise = jax.random.split(key)
        centres = self._centre(jax.random.randint(key_which, shape, 0, 8))
        return noisy(centres, self.noise, key_noise)

    def _log_prob(self, z: Array) -> Array:
        return log_mixture(z, self._centre(jnp.arange(8)), jnp.full(8, 1 / 8), self.noise)

    def _centre(self, which: Array) -> Array:
        return polar(jnp.asarray(8**0.5), which * (math.pi / 4))
