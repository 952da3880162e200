"""Solve for the part of ξ that makes a path end at x."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._linear import solve
from ...flow import FixedGrid
from ._latent import Latent, Target, constant
from ._modes import end_and_jacobian
from ._part_of_a_batch import for_some

STEPS = 12  # from one matrix
STAGES = 4  # of the way from a path that is known, for those that were not found at once
BLOCK = 256  # of them followed together
SHORTEST = 0.05  # a step cut below this part of itself has failed
LONGEST = 10.0  # standard deviations a step may go at once
# Where a root on a line is looked for, in standard deviations. Far out a path has no weight to speak of, but
# may show that weights are equal.
NODES = (-32.0, -16.0, -8.0, -4.0, 0.0, 4.0, 8.0, 16.0, 32.0)
MOST = 40  # steps within a bracket


def solve_end(
    latent: Latent, target: Target, directions: Array, delta: Array, centre: Array, on_line: bool = False
) -> tuple[Array, Array, Array]:
    """The ξ = δ + Rᵀr with Φ(ξ) = x, one per point; DΦ(ξ) Rᵀ there; and whether it was found.

    The search starts from the part of `centre` `(B, D)` along R. Where that fails the solution is
    followed from the centre, whose end is known, as δ and x move from there to where they should be. With
    `on_line`, for d = 1, it does not start anywhere: the root nearest to r = 0 is found if Φ crosses x.
    Derivatives are those of the solution (implicit function theorem), not of the search for it; they are
    zero where none was found, and ξ is then the centre.
    """
    middle = constant(centre)
    r, solved = (find_on_line if on_line else find_end)(latent, target, directions, delta, middle)
    r = jnp.where(solved[:, None], r, jnp.einsum("bij,bj->bi", directions, middle))
    safe = jnp.where(solved[:, None], delta, middle - _along(directions, middle))
    eye = jnp.eye(directions.shape[1], dtype=r.dtype)[None]
    here = Surface(latent, target, safe, directions)
    found = constant(Surface(latent.quiet(), target, safe, directions))
    slope = jnp.where(solved[:, None, None], found.matrix(r), eye)
    gap = jnp.where(solved[:, None], here.gap(r)[0], 0)
    r = _implicit(r, slope, gap)
    return here.xi(r), jnp.where(solved[:, None, None], here.matrix(r), eye), solved


def find_end(
    latent: Latent, target: Target, directions: Array, delta: Array, centre: Array
) -> tuple[Array, Array]:
    """The r `(B, d)` of `solve_end`, and whether it was found; nothing else of it."""
    # The search is a constant to derivatives: only then can its loop stop early.
    return _search(constant(Surface(latent.quiet(), target, delta, directions)), constant(centre))


def solve_near(
    latent: Latent, target: Target, directions: Array, delta: Array, r: Array
) -> tuple[Array, Array, Array]:
    """As `solve_end`, without derivatives, from r `(B, d)` to the root that is near, if one is found."""
    surface = constant(Surface(latent.quiet(), target, delta, directions))
    r, solved = _quasi_newton(surface, r)
    return surface.xi(r), surface.matrix(r), solved


def find_on_line(
    latent: Latent, target: Target, directions: Array, delta: Array, centre: Array
) -> tuple[Array, Array]:
    """As `find_end`, for d = 1: between the two neighbours of a few nodes, nearest to 0, where Φ − x changes
    sign, by Chandrupatla's method (1997), which is as fast as interpolation and as safe as bisection."""
    del centre
    surface = constant(Surface(latent.quiet(), target, delta, directions))
    size, dtype = len(delta), delta.dtype

    def gap(r: Array) -> Array:
        value, has_escaped = surface.gap(r[:, None])
        return jnp.where(has_escaped, jnp.nan, value[:, 0])

    nodes = jnp.asarray(NODES, dtype)
    ends = jax.lax.map(lambda node: gap(jnp.full(size, node, dtype)), nodes)  # (nodes, B)
    crosses = ends[:-1] * ends[1:] <= 0  # a NaN crosses nothing
    far = jnp.abs(nodes[:-1] + nodes[1:])[:, None]
    place = jnp.argmin(jnp.where(crosses, far, jnp.inf), axis=0)
    found = jnp.any(crosses, axis=0)
    at = lambda a, i: jnp.take_along_axis(a, i[None], axis=0)[0]
    root = _between(gap, (nodes[place], nodes[place + 1]), (at(ends, place), at(ends, place + 1)), found)
    return root[:, None], found


def _between(gap, ends: tuple[Array, Array], values: tuple[Array, Array], chosen: Array) -> Array:
    """Where a function of each entry is zero, between two ends where its signs differ; of those `chosen`."""
    tolerance = 4 * jnp.finfo(ends[0].dtype).eps

    def part(a, b, c, fa, fb, fc):
        """How far from a to b to look next: by inverse quadratic interpolation where that is safe."""
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        safe = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        t = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        return jnp.where(safe & jnp.isfinite(t), t, 0.5)

    def step(state):
        a, b, fa, fb, t, _, count = state
        new = a + t * (b - a)
        value = gap(new)
        same = jnp.sign(value) == jnp.sign(fa)
        # The latest is a, b is across from it, and c the one that was left.
        c, fc = jnp.where(same, a, b), jnp.where(same, fa, fb)
        b, fb = jnp.where(same, b, a), jnp.where(same, fb, fa)
        least = tolerance * (1 + jnp.abs(new)) / jnp.abs(b - new)
        t = jnp.clip(part(new, b, c, value, fb, fc), least, 1 - least)
        done = (least > 0.5) | (value == 0) | ~jnp.isfinite(value)
        return new, b, value, fb, jnp.where(done, 0, t), done, count + 1

    going = lambda state: (state[-1] < MOST) & ~jnp.all(state[-2] | ~chosen)
    half = jnp.full_like(ends[0], 0.5)
    return jax.lax.while_loop(going, step, (*ends, *values, half, jnp.zeros_like(chosen), 0))[0]


class Surface(eqx.Module):
    """r ↦ Φ(δ + Rᵀr) − x for each point of a batch."""

    latent: Latent
    target: Target
    delta: Array  # (B, D)
    directions: Array  # (B, d, D)

    def xi(self, r: Array) -> Array:
        return _at(self.delta, self.directions, r)

    def gap(self, r: Array) -> tuple[Array, Array]:
        """x − Φ, `(B, d)`, and who escaped."""
        end, has_escaped = self.latent.end(self.xi(r), self.target.start)
        return self.target.x - end, has_escaped

    def matrix(self, r: Array) -> Array:
        """DΦ(ξ) Rᵀ, `(B, d, d)`."""
        return end_along(self.latent, self.target, self.directions, self.xi(r))


def end_along(latent: Latent, target: Target, directions: Array, xi: Array) -> Array:
    """How the end moves along k directions `(B, k, D)`, DΦ(ξ) Rᵀ, `(B, d, k)`: k Jacobian–vector products of
    one solve, or d gradients where that has no forward mode."""
    if not latent.flow.integrator.forward_mode:
        jacobian = end_and_jacobian(latent, xi, target.start)[1]
        fixed = isinstance(latent.flow.integrator, FixedGrid)
        return jnp.einsum("bdj,bkj->bdk", jacobian if fixed else _once(jacobian), directions)
    tangent = jax.linearize(lambda xi: latent.end(xi, target.start)[0], xi)[1]
    return jnp.moveaxis(jax.lax.map(tangent, jnp.swapaxes(directions, 0, 1)), 0, -1)


@jax.custom_jvp
def _once(jacobian: Array) -> Array:
    """Of a solve that XLA would not finish compiling the second derivative of: loops within loops."""
    return jacobian


@_once.defjvp
def _once_jvp(primals, tangents):
    raise TypeError(
        "where paths are bent to x (rf.Endpoint, or the default), the derivative of a density takes second "
        "derivatives of a solve, which rf.Adaptive does not have: give the flow an rf.FixedGrid"
    )


@jax.custom_jvp
def _implicit(r: Array, matrix: Array, gap: Array) -> Array:
    """The root r of gap(r) = 0, that moves by M⁻¹ d(gap) when what the gap depends on moves."""
    del matrix, gap
    return r


@_implicit.defjvp
def _implicit_jvp(primals, tangents):
    r, matrix, _ = primals
    return r, _solve(matrix, tangents[2])


def _search(surface: Surface, centre: Array) -> tuple[Array, Array]:
    """Everyone at once from the centre; then those who are not there, step by step."""
    begin = jnp.einsum("bij,bj->bi", surface.directions, centre)
    r, done = _quasi_newton(surface, begin)

    def follow(some: tuple) -> tuple[Array, Array]:
        target, delta, directions, centre, r = some
        known = surface.latent.end(centre, target.start)[0]
        home = centre - _along(directions, centre)

        def stage(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            part = (i + 1) / STAGES
            aim = eqx.tree_at(lambda t: t.x, target, known + part * (target.x - known))
            return _quasi_newton(
                Surface(surface.latent, aim, home + part * (delta - home), directions), state[0]
            )

        return jax.lax.fori_loop(0, STAGES, stage, (r, jnp.zeros(len(r), bool)))

    batch = (surface.target, surface.delta, surface.directions, centre, begin)
    return for_some(~done, follow, batch, (r, done), BLOCK)


def _quasi_newton(surface: Surface, r: Array) -> tuple[Array, Array]:
    """The root r, and whether it was found.

    One matrix, at the start, then Broyden's rank-one updates (1965), because a matrix costs as much as
    several ends. The natural level test (Deuflhard 2011, section 3.1) guards a step: it is cut until the
    next one, by the same matrix, would be shorter.
    """
    tolerance = 100 * jnp.finfo(r.dtype).eps ** 0.75
    size = lambda step: jnp.linalg.norm(step, axis=-1)
    has_failed = lambda change, length: length < SHORTEST * _whole(change)

    def step(state):
        r, gap, change, length, matrix, done, count = state
        move = length[:, None] * change
        new, has_escaped = surface.gap(r + move)
        simplified = size(_solve(matrix, new))
        # What has failed stays so, however long others take: a root does not depend on who is beside it.
        accepted = ~has_escaped & (simplified < size(change)) & ~done & ~has_failed(change, length)
        # M s = gap − new: what the ends say of the last step.
        missed = (gap - new) - jnp.einsum("bij,bj->bi", matrix, move)
        square = jnp.sum(move**2, axis=-1)[:, None, None]
        update = matrix + missed[:, :, None] * move[:, None, :] / jnp.where(square > 0, square, 1)
        keep = lambda new, old: jnp.where(jnp.expand_dims(accepted, range(1, new.ndim)), new, old)
        r, gap, matrix = keep(r + move, r), keep(new, gap), keep(update, matrix)
        done = done | (accepted & (simplified < tolerance * (1 + size(r))))
        change = keep(_solve(matrix, gap), change)
        length = jnp.where(accepted, _whole(change), 0.4 * length)
        return r, gap, change, length, matrix, done, count + 1

    def going(state):
        _, _, change, length, _, done, count = state
        return (count < STEPS) & ~jnp.all(done | has_failed(change, length))

    gap, has_escaped = surface.gap(r)
    matrix = surface.matrix(r)
    change = _solve(matrix, gap)
    done = ~has_escaped & (size(change) < tolerance * (1 + size(r)))
    length = jnp.where(has_escaped, 0, _whole(change))
    state = (r, gap, change, length, matrix, done, 0)
    r, _, change, _, _, done, _ = jax.lax.while_loop(going, step, state)
    return jnp.where(done[:, None], r + change, r), done  # the last step is short, and already known


def _whole(change: Array) -> Array:
    """The part of a step to try first: all of it, unless it is wild."""
    return LONGEST / jnp.maximum(jnp.linalg.norm(change, axis=-1), LONGEST)


def _at(delta: Array, directions: Array, r: Array) -> Array:
    return delta + jnp.einsum("bij,bi->bj", directions, r)


def _along(directions: Array, xi: Array) -> Array:
    """RᵀRξ."""
    return jnp.einsum("bij,bi->bj", directions, jnp.einsum("bij,bj->bi", directions, xi))


def _solve(matrix: Array, right: Array) -> Array:
    return solve(matrix, right[..., None])[..., 0]
