"""A Swiss roll."""

import math
from typing import ClassVar

import jax
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import log_mixture, noisy, quadrature
from ._polar import polar


class SwissRoll(AbstractSmoothDistribution):
    """A spiral of one and a half turns, r = t/5 for t ~ U(3π/2, 9π/2), with noise N(0, 0.2² I)."""

    noise: ClassVar[float] = 0.2

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_curve, key_noise = jax.random.split(key)
        return noisy(self._roll(jax.random.uniform(key_curve, shape)), self.noise, key_noise)

    def _log_prob(self, z: Array) -> Array:
        u, weights = quadrature(320)
        return log_mixture(z, self._roll(u), weights, self.noise)

    def _roll(self, u: Array) -> Array:
        angle = 1.5 * math.pi * (1 + 2 * u)
        return polar(angle / 5, angle)
