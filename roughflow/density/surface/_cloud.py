"""Forward draws of the flow: where they end shows the ways that lead near x."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._latent import Latent

DRAWS = 4096
NUMBERS = 2**22  # that the draws may take up


class Cloud(eqx.Module):
    """Draws of ξ, `xi` `(N, D)`, and where they end, `end` `(N, d)`; one cloud serves every x."""

    xi: Array
    end: Array

    @staticmethod
    def size(latent: Latent) -> int:
        """How many draws to make."""
        return max(64, min(DRAWS, NUMBERS // latent.size))

    @staticmethod
    def of(latent: Latent, xi: Array) -> "Cloud":
        """The cloud of these draws of ξ `(N, D)`."""
        end, has_escaped = latent.end(xi, None)
        lost = has_escaped | ~jnp.all(jnp.isfinite(end), axis=-1)
        return Cloud(xi, jnp.where(lost[:, None], jnp.inf, end))

    def nearest(self, x: Array, count: int) -> Array:
        """The ξ `(B, count, D)` of the draws that end nearest to each x, in units of the ends' spread."""
        fine = jnp.all(jnp.isfinite(self.end), axis=-1)
        some = jnp.maximum(jnp.sum(fine), 1)
        end = jnp.where(fine[:, None], self.end, 0)
        mean = jnp.sum(end, axis=0) / some
        # Spread by the mean absolute deviation: a few draws far out do not make the rest look alike.
        offset = jnp.where(fine[:, None], jnp.abs(end - mean[None]), 0)
        spread = jnp.sum(offset, axis=0) / some
        unit = 1 / jnp.where(spread > 0, spread, 1)
        gap = jnp.where(fine[None], _distance(x * unit[None], end * unit[None]), jnp.inf)
        return self.xi[jax.lax.top_k(-gap, count)[1]]


def _distance(a: Array, b: Array) -> Array:
    """Squared distances `(B, N)` between points, one coordinate at a time: no array of all differences."""
    total = jnp.zeros((len(a), len(b)), a.dtype)
    return jax.lax.fori_loop(0, a.shape[1], lambda i, t: t + (a[:, i, None] - b[None, :, i]) ** 2, total)
