"""The Karhunen–Loève expansion of the Brownian bridge, plus the straight line to the endpoint."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_count
from ._driver import AbstractDriver

SQRT2 = 2.0**0.5


class KarhunenLoeve(AbstractDriver):
    """B(t) = ω₀ t/√T + Σ_{k=1}^{n−1} ωₖ √(2T) sin(kπt/T)/(kπ), smooth.

    The endpoint B(T) = √T ω₀ has its exact distribution for every n, so an SDE with constant coefficients
    keeps its exact density. The paper trains with n from 4 to 10.

    ```python
    import jax
    import roughflow as rf

    path = rf.KarhunenLoeve(6).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
    ```
    """

    num_functions: int = eqx.field(static=True)

    def __init__(self, num_functions: int):
        self.num_functions = check_count("num_functions", num_functions)

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)
        angle = jnp.asarray(np.pi * np.arange(1, self.num_functions), s.dtype)
        waves = jnp.sin(jnp.tensordot(s, angle, 0)) / jnp.expand_dims(angle, range(s.ndim))
        return jnp.concatenate([s[..., None], SQRT2 * waves], axis=-1)

    def slope(self, s: Array, coefficients: Array) -> Array:
        s = jnp.asarray(s, coefficients.dtype)
        angle = jnp.asarray(np.pi * np.arange(1, self.num_functions), s.dtype)
        waves = jnp.cos(jnp.tensordot(s, angle, 0))
        basis = jnp.concatenate([jnp.ones_like(s)[..., None], SQRT2 * waves], axis=-1)
        return jnp.einsum("...n,...nm->...m", basis, coefficients)

    def refined(self) -> "KarhunenLoeve":
        return KarhunenLoeve(2 * self.num_functions)

    @property
    def jumps(self) -> np.ndarray:
        return np.array([])
