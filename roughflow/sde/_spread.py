"""What noise asks of a drift, so that a distribution does not feel it.

A distribution p does not move, or moves as it did, when the noise σ dB comes together with the drift

    (D + Q) ∇log p + Γ,     D = ½ σσᵀ,     Γᵢ = Σⱼ ∂ⱼ(D + Q)ᵢⱼ,

Q any skew-symmetric matrix: by the Fokker–Planck equation their fluxes cancel (Ma, Chen & Fox 2015).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._correction import depends_on
from ._noise import Noise, noise_matrix


def spread_and_divergence(
    noise: Callable[[Array], Noise], z: Array, skew: Callable[[Array], Array] | None = None
) -> tuple[Array, Array]:
    """D + Q at z, and its divergence Γ: none is computed where neither depends on z."""

    def whole(y: Array) -> Array:
        sigma = noise_matrix(noise(y))
        spread = 0.5 * sigma @ sigma.T
        return spread if skew is None else spread + skew(y)

    if not depends_on(whole, z):
        return whole(z), jnp.zeros_like(z)

    def turned(y: Array, j: Array) -> Array:
        return whole(y)[:, j]

    # Γᵢ = Σⱼ ∂ⱼ(D + Q)ᵢⱼ: the j-th column along the j-th axis.
    along = lambda j, axis: jax.jvp(lambda y: turned(y, j), (z,), (axis,))[1]
    steps = jax.vmap(along)(jnp.arange(z.shape[0]), jnp.eye(z.shape[0], dtype=z.dtype))
    return whole(z), jnp.sum(steps, axis=0)
