"""Rings within rings."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import LOG_2PI, noisy
from ._polar import polar, radius_of


class Rings(AbstractSmoothDistribution):
    """Four circles of radius R = ¾, 1½, 2¼, 3, equally likely, with noise N(0, 0.08² I).

    Each gives N(z; 0, σ² I) averaged over a circle: exp(−(|z|² + R²)/2σ²) I₀(|z| R/σ²) / 2πσ².
    """

    noise: ClassVar[float] = 0.08

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_radius, key_angle, key_noise = jax.random.split(key, 3)
        radius = 0.75 * jax.random.randint(key_radius, shape, 1, 5)
        angle = jax.random.uniform(key_angle, shape, maxval=2 * math.pi)
        return noisy(polar(radius, angle), self.noise, key_noise)

    def _log_prob(self, z: Array) -> Array:
        radius = radius_of(z)
        # i0e(x) = e⁻ˣ I₀(x), so that what is left in the exponent is a square: no overflow.
        rings = [
            -0.5 * ((radius - ring) / self.noise) ** 2
            + jnp.log(jax.scipy.special.i0e(radius * (ring / self.noise**2)))
            for ring in (0.75, 1.5, 2.25, 3.0)
        ]
        return jax.nn.logsumexp(jnp.stack(rings), axis=0) - math.log(4) - LOG_2PI - 2 * math.log(self.noise)
