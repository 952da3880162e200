"""A star."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import LOG_2PI, log_normal, noisy
from ._polar import polar, radius_of


class Star(AbstractSmoothDistribution):
    """θ ~ U(−π, π), r | θ ~ N(2/√(1 + ½ sin 10θ), 0.15²), z = r (cos θ, sin θ): ten thin petals.

    A point z has the polar coordinates (|z|, θ) and (−|z|, θ + π), so that
    p(z) = (p(|z| | θ) + p(−|z| | θ + π)) / (2π |z|).
    """

    noise: ClassVar[float] = 0.15

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_angle, key_noise = jax.random.split(key)
        angle = jax.random.uniform(key_angle, shape, minval=-math.pi, maxval=math.pi)
        return polar(noisy(self._petal(angle), self.noise, key_noise), angle)

    def _log_prob(self, z: Array) -> Array:
        radius = radius_of(z)
        # The angle of the origin does not matter, but its derivative must not be NaN.
        mean = self._petal(jnp.arctan2(z[..., 1], jnp.where(radius > 0, z[..., 0], 1)))
        # sin 10(θ + π) = sin 10θ: both coordinates have the same mean.
        along = jnp.logaddexp(log_normal(radius - mean, self.noise), log_normal(-radius - mean, self.noise))
        # 1/|z| is infinite at the origin, where the mass is below e⁻⁵⁰: keep a plot through it finite.
        return along - LOG_2PI - jnp.log(jnp.maximum(radius, 1e-4))

    def _petal(self, angle: Array) -> Array:
        return 2 / jnp.sqrt(1 + 0.5 * jnp.sin(10 * angle))
