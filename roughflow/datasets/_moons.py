"""Two moons."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import log_mixture, mirror_at_random, noisy, quadrature, with_mirror_image


class Moons(AbstractSmoothDistribution):
    """Two interleaved half circles of radius 2, the second the first turned by π, with noise N(0, 0.2² I)."""

    noise: ClassVar[float] = 0.2

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_curve, key_side, key_noise = jax.random.split(key, 3)
        moon = self._moon(jax.random.uniform(key_curve, shape))
        return mirror_at_random(noisy(moon, self.noise, key_noise), key_side)

    def _log_prob(self, z: Array) -> Array:
        u, weights = quadrature(128)
        return log_mixture(z, *with_mirror_image(self._moon(u), weights), self.noise)

    def _moon(self, u: Array) -> Array:
        x, y = 2 * jnp.cos(math.pi * u), 2 * jnp.sin(math.pi * u)
        return jnp.stack([x - 1, y - 0.5], axis=-1)
