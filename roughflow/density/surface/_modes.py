"""The likeliest ways to reach x: points of least energy on the surface Φ(ξ) = x.

    min ½|ξ|²  subject to  Φ(ξ) = x,        ξ ← Jᵀ(JJᵀ)⁻¹ (x − Φ(ξ) + Jξ),  J = DΦ(ξ)  (d × D),

a Gauss–Newton iteration with a line search on energy plus constraint violation, from several starts. J
costs d vector–Jacobian products of one forward solve, for the whole batch at once; no Hessian is formed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._linear import orthonormal, solve
from ._latent import Latent, Target

ITERATIONS = 12
LENGTHS = (1.0, 0.4, 0.1)  # of the step, tried at each iteration
SETTLED = 1e-2  # a step this short, in standard deviations, ends the search
NEAR = 0.1  # a point this close to the surface, in standard deviations, was found
SAME = 0.3  # two points this close, in standard deviations, are one


class Modes(eqx.Module):
    """The points ξ* found for each x, and the surface's normal space there; S of them, from S starts.

    `directions` are orthonormal and span the rows of J, if it has full rank: `reached`. `score` is minus the
    logarithm of the mass of the tangent Gaussian, ½|ξ*|² + log √det JJᵀ: infinite where the search did not
    come to the surface, or came to a point found before.
    """

    xi: Array  # (B, S, D)
    directions: Array  # (B, S, d, D)
    reached: Array  # (B, S)
    score: Array  # (B, S)

    @property
    def found(self) -> Array:
        """Whether any way to x was found, `(B,)`."""
        return jnp.any(jnp.isfinite(self.score), axis=1)

    def best(self, count: int) -> "Modes":
        """The `count` of most mass, in this order."""
        places = jnp.argsort(self.score, axis=1)[:, :count]
        take = lambda a: jnp.take_along_axis(a, jnp.expand_dims(places, range(2, a.ndim)), axis=1)
        return jax.tree.map(take, self)


def find_modes(latent: Latent, target: Target, begin: Array) -> Modes:
    """Search from every point of `begin` `(B, S, D)`."""
    starts = begin.shape[1]
    modes = _search(latent, target.repeat(starts), jnp.reshape(begin, (-1, latent.size)))
    return _merged(jax.tree.map(lambda a: jnp.reshape(a, (-1, starts, *a.shape[1:])), modes))


def _merged(modes: Modes) -> Modes:
    """Each point once: of those that are close the one with the most mass, of equals the first."""
    gap = jnp.linalg.norm(modes.xi[:, :, None] - modes.xi[:, None], axis=-1)
    place = jnp.arange(modes.score.shape[1])
    ahead = (modes.score[:, :, None] < modes.score[:, None]) | (
        (modes.score[:, :, None] == modes.score[:, None]) & (place[:, None] < place[None])[None]
    )
    again = jnp.any(ahead & (gap < SAME), axis=1)
    return eqx.tree_at(lambda m: m.score, modes, jnp.where(again, jnp.inf, modes.score))


def _search(latent: Latent, target: Target, xi: Array) -> Modes:
    """Descend from each point of `xi`."""
    many = target.repeat(len(LENGTHS))

    def merit(xi: Array, gap: Array, penalty: Array) -> Array:
        return 0.5 * jnp.sum(xi**2, axis=-1) + penalty * jnp.sum(jnp.abs(gap), axis=-1)

    def step(state):
        xi, end, jacobian, penalty, settled, count = state
        gap = target.x - end
        multiplier = solve_gram(jacobian, gap + jnp.einsum("bij,bj->bi", jacobian, xi))
        # An exact penalty must exceed the multipliers.
        penalty = jnp.maximum(penalty, 2 * jnp.max(jnp.abs(multiplier), axis=-1))
        direction = jnp.einsum("bij,bi->bj", jacobian, multiplier) - xi
        # The first time round nothing is known yet: it finds the end and its derivative where it is.
        direction = jnp.where(jnp.isfinite(direction) & (count > 0), direction, 0)
        # All lengths in one solve: one program to compile instead of three.
        lengths = jnp.asarray(LENGTHS, xi.dtype)
        tried = xi[:, None] + lengths[None, :, None] * direction[:, None]
        flat = jnp.reshape(tried, (-1, xi.shape[1]))
        ends, has_escaped = latent.end(flat, many.start)
        values = merit(flat, many.x - ends, jnp.repeat(penalty, len(LENGTHS)))
        values = jnp.where(has_escaped | ~jnp.isfinite(values), jnp.inf, values)
        values = jnp.reshape(values, tried.shape[:2])
        best = jnp.argmin(values, axis=1)
        better = jnp.min(values, axis=1) < merit(xi, gap, penalty)
        length = jnp.where(better & ~settled, lengths[best], 0)
        moved = length * jnp.linalg.norm(direction, axis=-1)
        xi = xi + length[:, None] * direction
        settled = settled | ((moved < SETTLED) & (count > 0))
        return xi, *end_and_jacobian(latent, xi, target.start), penalty, settled, count + 1

    going = lambda state: (state[-1] <= ITERATIONS) & ~jnp.all(state[-2])
    blank = jnp.zeros((len(xi), target.x.shape[1], xi.shape[1]), xi.dtype)
    start = (xi, target.x, blank, jnp.ones(len(xi), xi.dtype), jnp.zeros(len(xi), bool), 0)
    xi, end, jacobian, *_ = jax.lax.while_loop(going, step, start)
    directions, volume, reached = normal_space(jacobian)
    off = jnp.sqrt(jnp.sum((target.x - end) * solve_gram(jacobian, target.x - end), axis=-1))
    score = 0.5 * jnp.sum(xi**2, axis=-1) + volume
    fine = (off < NEAR) & reached & jnp.isfinite(score)
    return Modes(xi, directions, reached, jnp.where(fine, score, jnp.inf))


def end_and_jacobian(latent: Latent, xi: Array, start: Array | None) -> tuple[Array, Array]:
    """Φ(ξ) `(B, d)` and DΦ(ξ) `(B, d, D)`; samples do not touch one another, so a row of it costs one vjp."""
    end, pull = jax.vjp(lambda y: latent.end(y, start)[0], xi)
    basis = jnp.eye(end.shape[1], dtype=end.dtype)
    gradients = jax.lax.map(lambda e: pull(jnp.broadcast_to(e, end.shape))[0], basis)
    return end, jnp.swapaxes(gradients, 0, 1)


def normal_space(jacobian: Array) -> tuple[Array, Array, Array]:
    """Orthonormal directions that span the rows of J `(B, d, D)`, log √det JJᵀ, and whether there are d."""
    directions, sizes = orthonormal(jacobian)
    reached = jnp.min(sizes, axis=-1) > 100 * jnp.finfo(sizes.dtype).eps * jnp.max(sizes, axis=-1)
    return directions, jnp.sum(jnp.log(sizes), axis=-1), reached


def solve_gram(jacobian: Array, right: Array) -> Array:
    """(JJᵀ)⁻¹ r, with a trace of ridge, so that a degenerate J gives a poor step and not a NaN."""
    gram = jnp.einsum("bij,bkj->bik", jacobian, jacobian)
    size = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    ridge = jnp.finfo(gram.dtype).eps * (size + 1e-30) * jnp.eye(gram.shape[1], dtype=gram.dtype)[None]
    return solve(gram + ridge, right[..., None])[..., 0]
