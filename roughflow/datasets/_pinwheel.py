"""A pinwheel."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractSmoothDistribution
from ._noisy import log_normal
from ._polar import rotate


class Pinwheel(AbstractSmoothDistribution):
    """Five normal distributions, drawn out along rays from the origin, then twisted.

    A point w of the mixture, with means 2 (cos 2πk/5, sin 2πk/5) and scales 0.6 along the ray and 0.2 across
    it, is turned by the angle ½ ln(1 + |w|²). The angle depends on the radius only, so the twist keeps
    areas, and the density at z is that of the mixture at the untwisted z.
    """

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_which, key_noise = jax.random.split(key)
        along, across = jax.random.normal(key_noise, (2, *shape))
        blade = jnp.stack([2 + 0.6 * along, 0.2 * across], axis=-1)
        w = rotate(blade, jax.random.randint(key_which, shape, 0, 5) * (2 * math.pi / 5))
        return rotate(w, self._twist(w))

    def _log_prob(self, z: Array) -> Array:
        w = rotate(z, -self._twist(z))
        blades = [rotate(w, jnp.asarray(-2 * math.pi * k / 5, z.dtype)) for k in range(5)]
        terms = [log_normal(w[..., 0] - 2, 0.6) + log_normal(w[..., 1], 0.2) for w in blades]
        return jax.nn.logsumexp(jnp.stack(terms), axis=0) - math.log(5)

    def _twist(self, z: Array) -> Array:
        # ½ ln(1 + |z|²), without overflow.
        return jnp.log(jnp.hypot(jnp.hypot(1.0, z[..., 0]), z[..., 1]))
