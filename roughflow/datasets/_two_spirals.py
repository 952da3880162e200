"""Two spirals."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import log_mixture, mirror_at_random, noisy, quadrature, with_mirror_image
from ._polar import polar


class TwoSpirals(AbstractSmoothDistribution):
    """Two spirals of one and a half turns, r = t/3 for t = 3π√u and u ~ U(0, 1), with noise N(0, 0.1² I)."""

    noise: ClassVar[float] = 0.1

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_curve, key_side, key_noise = jax.random.split(key, 3)
        arm = self._arm(jnp.sqrt(jax.random.uniform(key_curve, shape)))
        return mirror_at_random(noisy(arm, self.noise, key_noise), key_side)

    def _log_prob(self, z: Array) -> Array:
        # In s = √u, which has density 2s: the spiral is smooth in s, and not in u.
        s, weights = quadrature(512)
        return log_mixture(z, *with_mirror_image(self._arm(s), 2 * s * weights), self.noise)

    def _arm(self, s: Array) -> Array:
        return polar(math.pi * s, math.pi * (1 - 3 * s))
