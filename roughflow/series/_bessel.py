"""The modified Bessel function of any real order, which JAX lacks."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

TERMS = 112  # of the series
DEBYE = 8  # of the asymptotic expansion
LARGE = 80.0  # beyond, the asymptotic expansion has an error below 1e-13


def log_bessel_ie(order: Array, z: Array) -> Array:
    """log I_q(z) − z for q > −1 and z > 0, with derivatives in both.

    By its series Σ (z/2)^{2k+q} / (k! Γ(k + q + 1)); for large q or z by
    Debye's expansion (Abramowitz & Stegun 1972, 9.7.7).
    """
    large = jnp.hypot(order, z) > LARGE
    # Each is asked only where it holds, so that derivatives stay finite.
    inner = _series(jnp.where(large, 1.0, order), jnp.where(large, 1.0, z))
    outer = _debye(jnp.where(large, order, LARGE), jnp.where(large, z, LARGE))
    return jnp.where(large, outer, inner)


def _series(order: Array, z: Array) -> Array:
    # Horner's way, by the ratio z²/(4 k (k + q)) of a term to the one before. All are positive.
    quarter = 0.25 * z**2
    term = lambda i, rest: 1 + rest * quarter / ((TERMS - i) * (TERMS - i + order))
    total = jax.lax.fori_loop(0, TERMS, term, jnp.ones_like(quarter))
    return order * jnp.log(0.5 * z) - jax.scipy.special.gammaln(order + 1) + jnp.log(total) - z


def _debye(order: Array, z: Array) -> Array:
    root = jnp.hypot(order, z)
    square = (order / root) ** 2
    # Σ uₖ/qᵏ in terms that stay finite as q → 0: with p = q/root, uₖ has powers of p from k to 3k.
    terms = [jnp.polyval(jnp.asarray(row), square) for row in _coefficients()]
    rest = jnp.polyval(jnp.stack([*terms[::-1], jnp.zeros_like(root)]), 1 / root)
    exponent = order**2 / (root + z) - order * jnp.arcsinh(order / z)  # less z
    return exponent - 0.5 * jnp.log(2 * jnp.pi * root) + jnp.log1p(rest)


def _coefficients() -> list[np.ndarray]:
    """Of uₖ(p)/pᵏ in p², the highest first, by their recursion (Abramowitz & Stegun 1972, 9.3.10)."""
    u, rows = np.polynomial.Polynomial([1.0]), []
    for k in range(1, DEBYE + 1):
        grown = np.polynomial.Polynomial([0, 0, 0.5, 0, -0.5]) * u.deriv()
        u = grown + (np.polynomial.Polynomial([0.125, 0, -0.625]) * u).integ()
        rows.append(u.coef[k : 3 * k + 1 : 2][::-1])
    return rows
