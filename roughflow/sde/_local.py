"""Noise that suits the place, for samplers that learn."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, finite_array
from ._networks import MLP, Activation, tanh
from ._untrained import GIVEN

FULL = 16  # dimensions up to which shears are learned
LARGEST = 15.0  # logarithm of a scale


class LocalDiffusion(eqx.Module):
    """σ(z) = S E(u) (I + N(u)) at u = S⁻¹(z − c): a matrix S for the whole, scales and shears for the place.

    E = diag(exp g), where g is a network plus a linear function of asinh u and ½ log(1 + u²), so that scales
    can follow a power of the distance out to where there were no data. N, strictly lower triangular, is a
    network plus Aᵢⱼrᵢ + Bᵢⱼrⱼ with r = E⁻¹u, the place in units of its own scales: A stretches a coordinate
    as one before it moves, as a funnel needs it, B bends, as a banana does. (Any σσᵀ has one triangular root;
    among all its roots, learning drifts.) It starts at N = 0, E = I, so σ = S. S and c are not trained.

    **Arguments:** `dimension`; `width`, `depth`, `activation` of the network; `centre`, c; `scale`, S;
    `full`, whether there is an N, by default up to 16 dimensions.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.LocalDiffusion(2, scale=3 * jnp.eye(2), key=jax.random.key(0))
    diffusion(0.0, jnp.ones(2))  # 3 I, before it has learned
    ```
    """

    network: MLP
    slopes: Array  # (d, 2d), of g
    shears: Array | None  # (2, d, d), of N
    centre: Array = eqx.field(metadata=GIVEN)
    scale: Array = eqx.field(metadata=GIVEN)
    inverse: Array = eqx.field(metadata=GIVEN)

    def __init__(
        self,
        dimension: int,
        width: int = 32,
        depth: int = 1,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        centre: Array | None = None,
        scale: Array | None = None,
        full: bool | None = None,
        key: PRNGKeyArray,
    ):
        d = check_count("dimension", dimension)
        full = 1 < d <= FULL if full is None else full
        sizes = 2 * d, d * d if full else d
        self.network = MLP(
            *sizes, width, depth, activation, time_dependent=time_dependent, scale=0.0, key=key
        )
        self.slopes = jnp.zeros((d, 2 * d))
        self.shears = jnp.zeros((2, d, d)) if full else None
        self.centre = jnp.zeros(d) if centre is None else finite_array("centre", centre)
        self.scale = jnp.eye(d) if scale is None else finite_array("scale", scale)
        if self.scale.shape != (d, d) or self.centre.shape != (d,):
            raise ValueError(
                f"centre and scale must have shapes ({d},) and ({d}, {d}), got {self.centre.shape} and "
                f"{self.scale.shape}"
            )
        self.inverse = jnp.asarray(np.linalg.inv(np.asarray(self.scale, np.float64)), self.scale.dtype)

    def __call__(self, t: Array, z: Array) -> Array:
        centre, scale, inverse = jax.lax.stop_gradient((self.centre, self.scale, self.inverse))
        d = z.shape[0]
        u = inverse @ (z - centre)
        features = jnp.concatenate([jnp.arcsinh(u), 0.5 * jnp.log1p(u**2)])
        out = self.network(t, features)
        linear = self.slopes @ features
        if self.shears is None:
            return scale * jnp.exp(_bounded(out + linear))[None]
        # On the diagonal the network's matrix is for g, below it for N.
        matrix = jnp.reshape(out, (d, d))
        g = _bounded(jnp.diagonal(matrix) + linear)
        eye = jnp.eye(d, dtype=z.dtype)
        r = u * jnp.exp(-g)
        stretch, bend = self.shears
        shear = jnp.tril(matrix + stretch * r[:, None] + bend * r[None], -1)
        return (scale * jnp.exp(g)[None]) @ (eye + shear)


def _bounded(g: Array) -> Array:
    return LARGEST * jnp.tanh(g / LARGEST)
