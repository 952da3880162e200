"""Solve for the part of ξ that makes a path end at x."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._latent import Latent, Target, constant
from ._linear import solve

STEPS = 8
SHORTEST = 0.05  # a step cut below this has failed


def solve_end(
    latent: Latent, target: Target, rows: Array, delta: Array, guess: Array
) -> tuple[Array, Array, Array]:
    """The ξ = δ + Rᵀr with Φ(ξ) = x, one a row; DΦ(ξ) Rᵀ there; and whether it was found.

    Newton's method in r with the natural level test (Deuflhard 2011, section 3.1): a step is cut
    until the next one, by the same matrix, would be shorter. Derivatives are those of the solution
    (implicit function theorem), not of the search for it.
    """
    # The search is a constant to derivatives: only then can its loop stop early.
    frozen, aim, base, directions = constant((latent, target, delta, rows))
    r = jnp.einsum("bij,bj->bi", directions, constant(guess))
    r, matrix, solved = _search(frozen, aim, base, directions, r)
    end = latent.end(_at(delta, rows, r), target.start)[0]
    r = _implicit(r, matrix, target.x - end)
    xi = _at(delta, rows, r)
    return xi, _end_and_matrix(latent, target, rows, xi)[1], solved


@jax.custom_jvp
def _implicit(r: Array, matrix: Array, gap: Array) -> Array:
    """The root r of gap(r) = 0, that moves by M⁻¹ d(gap) when what the gap depends on moves."""
    del matrix, gap
    return r


@_implicit.defjvp
def _implicit_jvp(primals, tangents):
    r, matrix, _ = primals
    return r, _solve(matrix, tangents[2])


def _search(
    latent: Latent, target: Target, delta: Array, rows: Array, r: Array
) -> tuple[Array, Array, Array]:
    tolerance = 100 * jnp.finfo(r.dtype).eps ** 0.75
    size = lambda step: jnp.linalg.norm(step, axis=-1)

    def step(state):
        r, change, length, matrix, done, count = state
        tried = r + length[:, None] * change
        end, new, escaped = _end_and_matrix(latent, target, rows, _at(delta, rows, tried))
        gap = target.x - end
        shorter = size(_solve(matrix, gap)) < size(change)
        accepted = ~escaped & (shorter | (count == 0)) & ~done
        r = jnp.where(accepted[:, None], tried, r)
        matrix = jnp.where(accepted[:, None, None], new, matrix)
        change = jnp.where(accepted[:, None], _solve(new, gap), change)
        length = jnp.where(accepted, 1, 0.4 * length)
        done = done | (accepted & (size(change) < tolerance * (1 + size(r))))
        return r, change, length, matrix, done, count + 1

    def going(state):
        _, _, length, _, done, count = state
        return (count < STEPS) & ~jnp.all(done | (length < SHORTEST))

    batch, d = r.shape
    unit = jnp.broadcast_to(jnp.eye(d, dtype=r.dtype), (batch, d, d))
    start = (r, jnp.zeros_like(r), jnp.ones(batch, r.dtype), unit, jnp.zeros(batch, bool), 0)
    r, _, _, matrix, done, _ = jax.lax.while_loop(going, step, start)
    return r, matrix, done


def _at(delta: Array, rows: Array, r: Array) -> Array:
    return delta + jnp.einsum("bij,bi->bj", rows, r)


def _end_and_matrix(latent: Latent, target: Target, rows: Array, xi: Array) -> tuple[Array, Array, Array]:
    """Φ(ξ), DΦ(ξ) Rᵀ `(B, d, d)`, and who escaped."""
    end, tangent, escaped = jax.linearize(lambda y: latent.end(y, target.start), xi, has_aux=True)
    columns = jax.lax.map(tangent, jnp.swapaxes(rows, 0, 1))
    return end, jnp.moveaxis(columns, 0, -1), escaped


def _solve(matrix: Array, right: Array) -> Array:
    return solve(matrix, right[..., None])[..., 0]
