"""A scheme for targets that are steep in some directions and flat in others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._linear import solve
from ..flow import AbstractScheme
from ..sde import AbstractSDE, apply_noise, to_ito


class LinearlyImplicitEuler(AbstractScheme):
    """z + (I − ½ dt J)⁻¹ (μ dt + σ ΔB), J the derivative of the Itô drift μ (Rosenbrock).

    On a Gaussian target it keeps the covariance exactly, whatever dt, as the trapezoidal rule does; a
    step costs d derivatives of the drift and a linear solve.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.overdamped_langevin(lambda z: -0.5 * (z[0] ** 2 + 1e4 * z[1] ** 2), 2)
    sampler = rf.UnadjustedSampler(sde, 0.5, rf.LinearlyImplicitEuler())
    chain = rf.sample_chain(sampler, jnp.zeros(2), key=jax.random.key(0), num_steps=100)
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        sde = to_ito(sde)
        drift, slope = sde.drift(t, z), jax.jacfwd(lambda y: sde.drift(t, y))(z)
        move = drift * dt + apply_noise(sde.noise(t, z), increment)
        matrix = jnp.eye(z.shape[0], dtype=z.dtype) - 0.5 * dt * slope
        return z + solve(matrix[None], move[None, :, None])[0, :, 0]
