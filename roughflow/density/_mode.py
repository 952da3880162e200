"""The likeliest way to reach x: the point of least energy on the surface Φ(ξ) = x.

    min ½|ξ|²  subject to  Φ(ξ) = x,        ξ ← Jᵀ(JJᵀ)⁻¹ (x − Φ(ξ) + Jξ),  J = DΦ(ξ)  (d × D),

a Gauss–Newton iteration with a line search on energy plus constraint violation, from several starts. J
costs d vector–Jacobian products of one forward solve, for the whole batch at once; no Hessian is formed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._latent import Latent, Target
from ._linear import orthonormal, solve

ITERATIONS = 20
LENGTHS = (1.0, 0.5, 0.2, 0.05)  # of the step, tried at each iteration
SETTLED = 1e-3  # a step this short, in standard deviations, ends the search
NEAR = 0.1  # a point this close to the surface, in standard deviations, was found


class Mode(eqx.Module):
    """The best point ξ* found for each x, and the surface's normal space there.

    `rows` are orthonormal and span the rows of J, if it has full rank: `reached`. `found` says whether
    the search came to the surface.
    """

    xi: Array  # (B, D)
    rows: Array  # (B, d, D)
    reached: Array  # (B,)
    found: Array  # (B,)


def find_mode(latent: Latent, target: Target, keys: PRNGKeyArray, starts: int) -> Mode:
    """Search from ξ = 0 and from `starts` − 1 draws of ξ, and keep the likeliest point reached."""
    x = target.x
    draw = lambda key: jax.random.normal(key, (starts - 1, latent.size), x.dtype)
    begin = jnp.concatenate([jnp.zeros((len(x), 1, latent.size), x.dtype), jax.vmap(draw)(keys)], axis=1)
    mode, score = _search(latent, target.repeat(starts), jnp.reshape(begin, (-1, latent.size)))
    # Among the points on the surface the one of least energy, at equal energy the flattest direction.
    best = jnp.argmin(jnp.reshape(score, (len(x), starts)), axis=1)
    chosen = jnp.arange(len(x)) * starts + best
    return jax.tree.map(lambda a: a[chosen], mode)


def _search(latent: Latent, target: Target, xi: Array) -> tuple[Mode, Array]:
    """Descend from each row of `xi`; the modes, and a score that is least for the best of them."""
    many = target.repeat(len(LENGTHS))

    def merit(xi: Array, gap: Array, penalty: Array) -> Array:
        return 0.5 * jnp.sum(xi**2, axis=-1) + penalty * jnp.sum(jnp.abs(gap), axis=-1)

    def step(state):
        xi, penalty, settled, count = state
        end, jacobian = end_and_jacobian(latent, xi, target.start)
        gap = target.x - end
        multiplier = solve_gram(jacobian, gap + jnp.einsum("bij,bj->bi", jacobian, xi))
        # An exact penalty must exceed the multipliers.
        penalty = jnp.maximum(penalty, 2 * jnp.max(jnp.abs(multiplier), axis=-1))
        direction = jnp.einsum("bij,bi->bj", jacobian, multiplier) - xi
        direction = jnp.where(jnp.isfinite(direction), direction, 0)
        # All lengths in one solve: one program to compile instead of four.
        lengths = jnp.asarray(LENGTHS, xi.dtype)
        tried = xi[:, None] + lengths[None, :, None] * direction[:, None]
        flat = jnp.reshape(tried, (-1, xi.shape[1]))
        end, escaped = latent.end(flat, many.start)
        values = merit(flat, many.x - end, jnp.repeat(penalty, len(LENGTHS)))
        values = jnp.where(escaped | ~jnp.isfinite(values), jnp.inf, values)
        values = jnp.reshape(values, tried.shape[:2])
        best = jnp.argmin(values, axis=1)
        better = jnp.min(values, axis=1) < merit(xi, gap, penalty)
        length = jnp.where(better & ~settled, lengths[best], 0)
        moved = length * jnp.linalg.norm(direction, axis=-1)
        xi = xi + length[:, None] * direction
        return xi, penalty, settled | (moved < SETTLED), count + 1

    going = lambda state: (state[3] < ITERATIONS) & ~jnp.all(state[2])
    start = (xi, jnp.ones(len(xi), xi.dtype), jnp.zeros(len(xi), bool), 0)
    xi = jax.lax.while_loop(going, step, start)[0]
    end, jacobian = end_and_jacobian(latent, xi, target.start)
    rows, volume, reached = normal_space(jacobian)
    off = jnp.sqrt(jnp.sum((target.x - end) * solve_gram(jacobian, target.x - end), axis=-1))
    found = off < NEAR
    energy = 0.5 * jnp.sum(xi**2, axis=-1)
    score = jnp.where(found, energy + volume, 1e12 + jnp.where(jnp.isfinite(off), off, 1e12))
    return Mode(xi, rows, reached, found), jnp.where(jnp.isnan(score), jnp.inf, score)


def end_and_jacobian(latent: Latent, xi: Array, start: Array | None) -> tuple[Array, Array]:
    """Φ(ξ) `(B, d)` and DΦ(ξ) `(B, d, D)`; samples do not touch one another, so a row costs one vjp."""
    end, pull = jax.vjp(lambda y: latent.end(y, start)[0], xi)
    basis = jnp.eye(end.shape[1], dtype=end.dtype)
    rows = jax.lax.map(lambda e: pull(jnp.broadcast_to(e, end.shape))[0], basis)
    return end, jnp.swapaxes(rows, 0, 1)


def normal_space(jacobian: Array) -> tuple[Array, Array, Array]:
    """Orthonormal rows with the span of J's `(B, d, D)`, log √det JJᵀ, and whether J has full rank."""
    rows, sizes = orthonormal(jacobian)
    reached = jnp.min(sizes, axis=-1) > 100 * jnp.finfo(sizes.dtype).eps * jnp.max(sizes, axis=-1)
    return rows, jnp.sum(jnp.log(sizes), axis=-1), reached


def solve_gram(jacobian: Array, right: Array) -> Array:
    """(JJᵀ)⁻¹ r, with a trace of ridge, so that a degenerate J gives a poor step and not a NaN."""
    gram = jnp.einsum("bij,bkj->bik", jacobian, jacobian)
    size = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.finfo(gram.dtype).eps * (size + 1e-30) * jnp.eye(gram.shape[1], dtype=gram.dtype)[None]
    return solve(gram + ridge, right[..., None])[..., 0]
