"""The modified Bessel function of any real order, which JAX lacks."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.polynomial import Polynomial

TERMS = 128  # of the series
LARGE = 64.0  # beyond, the asymptotic expansion has an error below 1e-14
ORDER = 8  # of that expansion


def log_bessel_i(order: Array, z: Array) -> Array:
    """log I_q(z) for q > −1 and z > 0, with derivatives in both.

    By its series Σ (z/2)^{2k+q} / (k! Γ(k + q + 1)); for large q or z by Debye's expansion (Abramowitz &
    Stegun 1972, 9.7.7).
    """
    large = jnp.hypot(order, z) > LARGE
    # Each is asked only where it holds, so that derivatives stay finite.
    inner = _series(jnp.where(large, 1.0, order), jnp.where(large, 1.0, z))
    outer = _debye(jnp.where(large, order, LARGE), jnp.where(large, z, LARGE))
    return jnp.where(large, outer, inner)


def _series(order: Array, z: Array) -> Array:
    k = jnp.arange(TERMS, dtype=jnp.result_type(float))
    gamma = jax.scipy.special.gammaln
    return jax.nn.logsumexp((2 * k + order) * jnp.log(0.5 * z) - gamma(k + 1) - gamma(k + order + 1))


def _debye(order: Array, z: Array) -> Array:
    root = jnp.hypot(order, z)
    p = order / root
    # uₖ(p)/qᵏ in terms that stay finite as q → 0.
    parts = (jnp.polyval(jnp.asarray(c, root.dtype), p**2) / root**k for k, c in enumerate(_POLYNOMIALS, 1))
    exponent = root - order * jnp.arcsinh(order / z)
    return exponent - 0.5 * jnp.log(2 * jnp.pi * root) + jnp.log1p(sum(parts))


def _polynomials() -> list[np.ndarray]:
    """uₖ(p)/pᵏ for k = 1, 2, …, as polynomials in p², highest power first (9.3.10)."""
    u, found = Polynomial([1.0]), []
    for k in range(1, ORDER + 1):
        u = Polynomial([0, 0, 0.5, 0, -0.5]) * u.deriv() + (Polynomial([1, 0, -5]) * u).integ() / 8
        found.append(u.coef[k::2][::-1])
    return found


_POLYNOMIALS = _polynomials()
