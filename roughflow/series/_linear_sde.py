"""Moments of a linear SDE, by matrix exponentials that do not overflow."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

TERMS = 13  # of a Taylor series whose terms fall at least by half
MAX_DOUBLINGS = 32


def linear_moments(
    rate: Array, noise: Array, dt: Array, *, reverse: bool = True
) -> tuple[Array, Array, Array]:
    """e^{A t} − I, ∫₀ᵗ e^{A s} ds and ∫₀ᵗ e^{A s} Q e^{Aᵀ s} ds for `rate` A and `noise` Q, `(d, d)` each.

    With these, dX = (A(X − μ) + b) dt + Q^½ dB has X(t) − μ = e^{At}(X(0) − μ) + ∫e^{As} ds b + a normal
    error. By a Taylor series over t/2ⁿ and n doublings, such as Σ(2h) = Σ(h) + e^{Ah} Σ(h) e^{Aᵀh}. Both
    terms are positive, so that it holds for any A. One exponential for all of it (Van Loan 1978) contains
    e^{−At}, which overflows or cancels if A is stiff. Without derivatives in reverse mode it is faster.
    """
    size = jax.lax.stop_gradient(dt * jnp.max(jnp.sum(jnp.abs(rate), axis=1)))
    doublings = jnp.clip(jnp.ceil(jnp.log2(jnp.maximum(size, 1e-30))) + 2, 0, MAX_DOUBLINGS)
    h = dt * jnp.exp2(-doublings)
    unit = jnp.eye(len(rate), dtype=rate.dtype)
    power, bend = h * unit, h * noise
    integral, covariance = power, bend
    for k in range(2, TERMS + 2):
        power = h / k * _product(rate, power)
        half = h / k * _product(rate, bend)
        bend = half + half.T
        integral, covariance = integral + power, covariance + bend

    def double(i: Array, moments: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        change, integral, covariance = moments
        grow = change + unit
        twice = (
            2 * change + _product(change, change),  # keeps the digits of slow rates next to fast ones
            integral + _product(grow, integral),
            covariance + _product(_product(grow, covariance), grow.T),
        )
        return jax.tree.map(lambda new, old: jnp.where(i < doublings, new, old), twice, moments)

    start = (_product(rate, integral), integral, covariance)
    return jax.lax.fori_loop(0, MAX_DOUBLINGS if reverse else doublings.astype(int), double, start)


def _product(a: Array, b: Array) -> Array:
    """Of small matrices: written out, it runs faster for many of them."""
    return sum((a[:, k, None] * b[None, k] for k in range(1, len(b))), a[:, 0, None] * b[None, 0])


def linear_step(rate: Array, drift: Array, later: Array, noise: Array, dt: Array) -> tuple[Array, Array]:
    """Mean `(d,)` and covariance of dX = (A X + b + c t) dt + Q^½ dB at time dt, from X(0) = 0: for `rate` A,
    `drift` b, `later` c and `noise` Q."""
    if drift.size == 1:
        x = rate[0] * dt
        return dt * (drift * decayed(-x) + later * dt * _ramped(x)), noise * dt * decayed(-2 * rate * dt)
    # Time is one more component.
    wide = lambda matrix, column: jnp.block([[matrix, column[:, None]], [jnp.zeros((1, drift.size + 1))]])
    moments = linear_moments(wide(rate, later), wide(noise, jnp.zeros_like(later)), dt, reverse=False)
    mean = moments[1] @ jnp.append(drift, 1.0)
    return mean[:-1], moments[2][:-1, :-1]


def _ramped(x: Array) -> Array:
    """(eˣ − 1 − x)/x²."""
    small = jnp.abs(x) < 0.1
    far = jnp.where(small, 1, x)
    near = jnp.polyval(jnp.array([1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2], x.dtype), x)
    return jnp.where(small, near, (jnp.expm1(far) - far) / far**2)


def decayed(x: Array) -> Array:
    """(1 − e⁻ˣ)/x, the mean of e⁻ˢ over 0 < s < x, with its derivatives at zero too."""
    small = jnp.abs(x) < 0.01
    far = jnp.where(small, 1, x)
    near = jnp.polyval(jnp.array([-1 / 720, 1 / 120, -1 / 24, 1 / 6, -1 / 2, 1], x.dtype), x)
    return jnp.where(small, near, -jnp.expm1(-far) / far)
