"""The modified Bessel function of any real order, which JAX lacks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

TERMS = 768  # of the series, around the largest
LARGE = 2000.0  # beyond, the asymptotic expansion has an error below 1e-13


def log_bessel_i(order: Array, z: Array) -> Array:
    """log I_q(z) for q > −1 and z > 0, with derivatives in both.

    By its series Σ (z/2)^{2k+q} / (k! Γ(k + q + 1)), of which the largest terms count; for large q or z by
    Debye's expansion (Abramowitz & Stegun 1972, 9.7.7).
    """
    large = jnp.hypot(order, z) > LARGE
    # Each is asked only where it holds, so that derivatives stay finite.
    inner = _series(jnp.where(large, 1.0, order), jnp.where(large, 1.0, z))
    outer = _debye(jnp.where(large, order, LARGE), jnp.where(large, z, LARGE))
    return jnp.where(large, outer, inner)


def _series(order: Array, z: Array) -> Array:
    # The largest term has k (k + q) = z²/4.
    peak = jax.lax.stop_gradient(0.5 * (jnp.hypot(order, z) - order))
    k = jnp.maximum(jnp.floor(peak) - TERMS // 2, 0) + jnp.arange(TERMS)
    gamma = jax.scipy.special.gammaln
    return jax.nn.logsumexp((2 * k + order) * jnp.log(0.5 * z) - gamma(k + 1) - gamma(k + order + 1))


def _debye(order: Array, z: Array) -> Array:
    root = jnp.hypot(order, z)
    p = order / root
    # u₁/q and u₂/q² in terms that stay finite as q → 0.
    first = (3 - 5 * p**2) / (24 * root)
    second = (81 - 462 * p**2 + 385 * p**4) / (1152 * root**2)
    third = (30375 - 369603 * p**2 + 765765 * p**4 - 425425 * p**6) / (414720 * root**3)
    exponent = root - order * jnp.arcsinh(order / z)
    return exponent - 0.5 * jnp.log(2 * jnp.pi * root) + jnp.log1p(first + second + third)
