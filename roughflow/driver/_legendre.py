"""The expansion of white noise in Legendre polynomials."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_count
from ._driver import AbstractDriver


class Legendre(AbstractDriver):
    """Ḃ(t) = T^{-1/2} Σ_{k<n} ωₖ √(2k+1) Pₖ(2t/T − 1), a polynomial of degree n − 1.

    It keeps the exact joint distribution of B(T), ∫B dt, ∫t B dt, … up to n of them, so what a smooth linear
    functional of the path loses falls faster than any power of n: with additive noise and a nearly linear
    drift, a few functions do what takes `rf.KarhunenLoeve` dozens. Its slope is steepest at both ends,
    √(2k+1).

    ```python
    import jax
    import roughflow as rf

    path = rf.Legendre(6).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
    ```
    """

    num_functions: int = eqx.field(static=True)

    def __init__(self, num_functions: int):
        self.num_functions = check_count("num_functions", num_functions)

    def integrals(self, s: Array) -> Array:
        return integrated_polynomials(jnp.asarray(s), self.num_functions)

    def slope(self, s: Array, coefficients: Array) -> Array:
        basis = orthonormal_polynomials(jnp.asarray(s, coefficients.dtype), self.num_functions)
        return jnp.einsum("...n,...nm->...m", basis, coefficients)

    def refined(self) -> "Legendre":
        return Legendre(2 * self.num_functions)

    @property
    def jumps(self) -> np.ndarray:
        return np.array([])


def orthonormal_polynomials(s: Array, count: int) -> Array:
    """√(2k+1) Pₖ(2s − 1) for k < count, along a last axis."""
    p = _polynomials(2 * s - 1, count)
    return jnp.stack([(2 * k + 1) ** 0.5 * p[k] for k in range(count)], axis=-1)


def integrated_polynomials(s: Array, count: int) -> Array:
    """What they integrate to from 0 to s, by (2k + 1) Pₖ = P′ₖ₊₁ − P′ₖ₋₁."""
    p = _polynomials(2 * s - 1, count + 1)
    rest = [(p[k + 1] - p[k - 1]) / (2 * (2 * k + 1) ** 0.5) for k in range(1, count)]
    return jnp.stack([s, *rest], axis=-1)


def _polynomials(y: Array, count: int) -> list[Array]:
    """P₀(y), …, P_{count−1}(y) by (k+1) Pₖ₊₁ = (2k+1) y Pₖ − k Pₖ₋₁."""
    p = [jnp.ones_like(y), y]
    for k in range(1, count - 1):
        p.append(((2 * k + 1) * y * p[k] - k * p[k - 1]) / (k + 1))
    return p[:count]
