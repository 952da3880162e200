"""What noise asks of a drift, so that a distribution does not feel it.

A distribution p does not move, or moves as it did, when the noise σ dB comes together with the drift

    (D + Q) ∇log p + Γ,     D = ½ σσᵀ,     Γᵢ = Σⱼ ∂ⱼ(D + Q)ᵢⱼ,

Q any skew-symmetric matrix: by the Fokker–Planck equation their fluxes cancel (Ma, Chen & Fox 2015). Without
Q it is

    ½ σ (σᵀ ∇log p + div σ) + c,     (div σ)ⱼ = Σᵢ ∂ᵢσᵢⱼ,

c the correction between the two calculi: products with σ and σᵀ, and no product of matrices.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from ._dependence import depends_on
from ._noise import Noise, apply_noise, apply_transposed, has_diagonal, noise_matrix, plain_noise
from ._slopes import Index, axis, diagonal_slopes, sum_over


class Spread(eqx.Module):
    """σ at one place, `div σ` and c; None for both where σ is the same everywhere."""

    sigma: Noise
    divergence: Array | None
    correction: Array | None

    def pull(self, slope: Array, weight: float | Array = 1.0) -> Array:
        """½ (σᵀ ∇log p + div σ): the drift, less c, in units of the noise. The `weight` is of what comes
        from the slopes of σ."""
        pull = 0.5 * apply_transposed(self.sigma, slope)
        return pull if self.divergence is None else pull + 0.5 * weight * self.divergence

    def drift(self, slope: Array, weight: float | Array = 1.0) -> Array:
        """D ∇log p + Γ, without Q."""
        drift = apply_noise(self.sigma, self.pull(slope, weight))
        return drift if self.correction is None else drift + weight * self.correction


def spread_at(noise: Callable[[Array], Noise], z: Array) -> Spread:
    """σ at z with what its slopes there add to a drift: nothing is computed where σ does not depend on z, and
    vectors only where it is diagonal."""
    if not depends_on(noise, z):
        return Spread(plain_noise(noise(z)), None, None)
    if has_diagonal(eqx.filter_eval_shape(noise, z)):
        entries, slopes = diagonal_slopes(noise, z)
        return Spread(lx.DiagonalLinearOperator(entries), slopes, 0.5 * entries * slopes)
    sigma, tangent = jax.linearize(lambda y: noise_matrix(noise(y)), z)

    def along(k: Index) -> tuple[Array, Array]:
        change = tangent(axis(z, k))
        return change[k], 0.5 * apply_noise(change, sigma[k])

    divergence, correction = sum_over(z.size, along, (jnp.zeros_like(sigma[0]), jnp.zeros_like(z)))
    return Spread(sigma, divergence, correction)


def turn_at(skew: Callable[[Array], Array], z: Array, slope: Array) -> Array:
    """Q ∇log p + div Q, what a skew Q adds to the drift at z."""
    turn = skew(z) @ slope
    if not depends_on(skew, z):
        return turn
    # (div Q)ᵢ = Σⱼ ∂ⱼQᵢⱼ: the j-th column along the j-th axis.
    column = lambda j: jax.jvp(lambda y: skew(y)[:, j], (z,), (axis(z, j),))[1]
    return turn + jnp.sum(jax.vmap(column)(jnp.arange(z.size)), axis=0)
