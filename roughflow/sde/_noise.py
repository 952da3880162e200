"""A diffusion's value σ: a dense (d, m) matrix, or a lineax operator where structure pays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array

from .._linear import UNROLL

Noise = Array | lx.AbstractLinearOperator


def noise_shape(sigma: Noise | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """(d, m) of σ; also of what `jax.eval_shape` makes of it."""
    if isinstance(sigma, lx.AbstractLinearOperator):
        return sigma.out_size(), sigma.in_size()
    return jnp.shape(sigma)


def apply_noise(sigma: Noise, increment: Array) -> Array:
    """σ v; O(d) for a diagonal operator."""
    if isinstance(sigma, lx.AbstractLinearOperator):
        return sigma.mv(increment)
    if 0 < sigma.shape[1] <= UNROLL:
        # Written out, it fuses; as a product of a small matrix per sample it does not.
        columns = [sigma[:, j] * increment[j] for j in range(sigma.shape[1])]
        return sum(columns[1:], columns[0])
    return sigma @ increment


def noise_row(sigma: Noise, k: Array | np.integer) -> Array:
    """Row k of σ: how each Brownian motion pushes the k-th coordinate."""
    if isinstance(sigma, lx.DiagonalLinearOperator):
        diagonal = lx.diagonal(sigma)
        return jnp.where(jnp.arange(diagonal.size) == k, diagonal, 0)
    return noise_matrix(sigma)[k]


def noise_column(sigma: Noise, j: Array | np.integer) -> Array:
    """σⱼ, the direction in which the j-th Brownian motion pushes."""
    return noise_matrix(sigma)[:, j]


def noise_matrix(sigma: Noise) -> Array:
    """σ as a dense (d, m) array."""
    return sigma.as_matrix() if isinstance(sigma, lx.AbstractLinearOperator) else sigma


class ProportionalDiffusion(eqx.Module):
    """σ = λ diag(μ): noise in proportion to the drift, as in the dropout analogy of Liu et al. (2019).

    It holds λ alone; the SDE supplies its own drift, so that the two stay tied in training.

    ```python
    import jax
    import roughflow as rf

    drift = rf.MLP(2, 2, key=jax.random.key(0))
    sde = rf.ItoSDE(drift, rf.ProportionalDiffusion(0.1))
    ```
    """

    scale: Array

    def __init__(self, scale: float | Array):
        self.scale = jnp.asarray(scale, float)

    def of_drift(self, drift: Array) -> lx.DiagonalLinearOperator:
        return lx.DiagonalLinearOperator(self.scale * drift)


def check_own_noise(diffusion: object) -> None:
    """Refuse noise that follows from the drift, for an SDE whose drift follows from the noise."""
    if isinstance(diffusion, ProportionalDiffusion):
        raise TypeError(
            "ProportionalDiffusion takes its size from the drift, which here follows from the diffusion: "
            "take one of its own, such as rf.ConstantDiffusion"
        )
