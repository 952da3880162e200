"""ξ in coordinates whose first d are the endpoint B(T) of the noise: from there x is solved for, forwards.

B(T) = |g| r with r = gᵀω/|g|, g = (∫eₖ)ₖ, one number for each of the d noises. A reflection of the
coefficients, function by function, takes g to the first axis, so that

    ξ = (start, ω)  ↔  (r, u),    u = (start, the other n − 1 rows of the reflected ω),

is orthogonal, and u standard normal in as many coordinates as the path has. For square noise.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from ._latent import Latent


class Turned(eqx.Module):
    """The change of coordinates, of vectors in the last axis."""

    mirror: Array  # v, with g − 2v(vᵀg) along the first axis
    dimension: int = eqx.field(static=True)

    def __init__(self, latent: Latent, dtype):
        self.dimension = latent.flow.dimension
        g = latent.flow.driver.integrals(jnp.ones((), dtype))
        v = g / jnp.linalg.norm(g) - jnp.zeros_like(g).at[0].set(1)
        size = jnp.linalg.norm(v)
        self.mirror = jnp.where(size > 0, v / jnp.where(size > 0, size, 1), 0)

    def turn(self, xi: Array) -> Array:
        """(r, u) of ξ."""
        start, path = jnp.split(xi, [self.dimension], axis=-1)
        end, others = jnp.split(self._reflect(path), [self.dimension], axis=-1)
        return jnp.concatenate([end, start, others], axis=-1)

    def back(self, turned: Array) -> Array:
        """ξ of (r, u)."""
        end, start, others = jnp.split(turned, [self.dimension, 2 * self.dimension], axis=-1)
        return jnp.concatenate([start, self._reflect(jnp.concatenate([end, others], axis=-1))], axis=-1)

    @property
    def directions(self) -> Array:
        """How ξ moves with r, `(d, D)`."""
        size = (1 + len(self.mirror)) * self.dimension
        return self.back(jnp.eye(self.dimension, size, dtype=self.mirror.dtype))

    def _reflect(self, path: Array) -> Array:
        rows = jnp.reshape(path, (*path.shape[:-1], len(self.mirror), self.dimension))
        along = jnp.einsum("k,...ki->...i", self.mirror, rows)
        return jnp.reshape(rows - 2 * jnp.einsum("k,...i->...ki", self.mirror, along), path.shape)
