"""The likeliest way to reach x: the point of least energy on the surface Φ(ξ) = x.

    min ½|ξ|²  subject to  Φ(ξ) = x,        ξ ← Jᵀ(JJᵀ)⁻¹ (x − Φ(ξ) + Jξ),  J = DΦ(ξ)  (d × D),

a Gauss–Newton iteration with a line search on energy plus constraint violation. J costs d vector–Jacobian
products of one forward solve, for the whole batch at once; no Hessian is formed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._latent import Latent

ITERATIONS = 12
LENGTHS = (1.0, 0.5, 0.2, 0.05, 0.0)  # of the step, tried at each iteration


class Mode(eqx.Module):
    """A point ξ* near the surface for each row of x, and the Jacobian there."""

    xi: Array  # (B, D)
    jacobian: Array  # (B, d, D)


def find_mode(latent: Latent, x: Array) -> Mode:
    """Search from ξ = 0. Whatever is found is a valid anchor: a poor one costs accuracy, not truth."""

    def merit(xi: Array, penalty: Array) -> Array:
        end, escaped = latent.end(xi)
        gap = jnp.sum(jnp.abs(end - jnp.tile(x, (len(LENGTHS), 1))), axis=-1)
        value = 0.5 * jnp.sum(xi**2, axis=-1) + jnp.tile(penalty, len(LENGTHS)) * gap
        return jnp.where(escaped | ~jnp.isfinite(value), jnp.inf, value)

    def step(_, state: tuple[Array, Array]) -> tuple[Array, Array]:
        xi, penalty = state
        end, jacobian = end_and_jacobian(latent, xi)
        gap = x - end + jnp.einsum("bij,bj->bi", jacobian, xi)
        multiplier = solve_gram(jacobian, gap)
        # An exact penalty must exceed the multipliers.
        penalty = jnp.maximum(penalty, 2 * jnp.max(jnp.abs(multiplier), axis=-1))
        direction = jnp.einsum("bij,bi->bj", jacobian, multiplier) - xi
        direction = jnp.where(jnp.isfinite(direction), direction, 0)
        # All lengths in one solve: one program to compile instead of five.
        tried = jnp.concatenate([xi + a * direction for a in LENGTHS])
        values = jnp.reshape(merit(tried, penalty), (len(LENGTHS), -1))
        best = jnp.asarray(LENGTHS, xi.dtype)[jnp.argmin(values, axis=0)]
        return xi + best[:, None] * direction, penalty

    start = jnp.zeros((x.shape[0], latent.size), x.dtype)
    xi, _ = jax.lax.fori_loop(0, ITERATIONS, step, (start, jnp.ones(x.shape[0], x.dtype)))
    return Mode(xi, end_and_jacobian(latent, xi)[1])


def end_and_jacobian(latent: Latent, xi: Array) -> tuple[Array, Array]:
    """Φ(ξ) `(B, d)` and DΦ(ξ) `(B, d, D)`; samples do not touch one another, so a row costs one vjp."""
    end, pull = jax.vjp(lambda y: latent.end(y)[0], xi)
    rows = [pull(jnp.zeros_like(end).at[:, i].set(1))[0] for i in range(end.shape[1])]
    return end, jnp.stack(rows, axis=1)


def solve_gram(jacobian: Array, right: Array) -> Array:
    """(JJᵀ)⁻¹ r, with a trace of ridge, so that a degenerate J gives a poor step and not a NaN."""
    gram = jnp.einsum("bij,bkj->bik", jacobian, jacobian)
    size = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.finfo(gram.dtype).eps * (size + 1e-30) * jnp.eye(gram.shape[1], dtype=gram.dtype)[None]
    return jnp.linalg.solve(gram + ridge, right[..., None])[..., 0]
