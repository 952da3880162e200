"""The most likely paths to x, and a proposal that draws paths around them.

Write Z_T = Φ(ξ), ξ = (whitened start, path coefficients) in R^D, D = d + nm: all randomness of Z_T is in ξ,
and p(x) is an integral over the surface Φ(ξ) = x. The points of least energy on this surface are found by

    min ½|ξ|²  subject to  Φ(ξ) = x,        ξ ← Jᵀ(JJᵀ)⁻¹ (x − Φ(ξ) + Jξ),  J = DΦ(ξ)  (d × D),

a Gauss–Newton iteration with a line search on energy plus constraint violation, from several starts. J costs
d vector–Jacobian products of one forward solve of the whole batch; no Hessian is formed. All functions take a
batch with one ξ per point.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count
from .._linear import orthonormal, solve
from ..flow import AbstractStochasticFlow, FixedGrid, NoDivergence, Whitened
from ..sde import ExactCorrection, with_explicit_parameters
from ._draws import AbstractDraws, Sobol, normal_draws
from ._proposals import AbstractProposal, Mixture

CLOUD_DRAWS = 4096  # number of forward simulations, whose results are starting points of searches
MAX_CLOUD_NUMBERS = 2**22
LINEAR = 1e-3  # deviation from a linear map, relative to the spread, that is neglected
WIDE, WIDE_SHARE = 3.0, 4  # one start in four is drawn from a distribution three times as wide as the prior
MAX_ITERATIONS = 12
STEP_LENGTHS = (1.0, 0.4, 0.1)  # step lengths of the line search
SETTLED_STEP = 1e-2  # in standard deviations; a shorter step ends the search
MAX_VIOLATION = 0.1  # acceptable violation of the constraint Φ(ξ) = x, in standard deviations
MERGE_DISTANCE = 0.3  # in standard deviations; modes that are closer are merged
MAX_MODES = 8  # maximum number of modes per point
# Minimum share of a mode relative to the largest. Shares are masses of tangent Gaussians, which are rough
# estimates.
MIN_SHARE = 0.05
PRIOR_SHARE = 0.2  # share of the prior, which bounds the weights and reveals modes that the search missed


class Laplace(AbstractProposal):
    """Draw paths from tangent Gaussians at all most likely paths to x that a search finds.

    Near ξ*, a point of least energy with Φ(ξ*) = x, the surface Φ = x is nearly flat, so ξ given x is nearly
    normal: ξ* + (I − Jᵀ(JJᵀ)⁻¹J) ε. For a linear SDE this distribution is exact. For other SDEs, paths may
    come in several bundles. The search therefore starts from those of a few thousand forward
    draws that end nearest to x. Equal modes are merged, and the paths are divided among the
    modes. One path in five is drawn from the prior, so that a missed bundle is detected and weights stay
    bounded; if no path to x is found, all are drawn from the prior. `rf.PullBack` uses the ratio of the
    prior's density to that of the proposal as a control variate, because its mean is known (Owen & Zhou
    2000): for a linear SDE the estimate is exact even though some paths are drawn from the prior.

    **Arguments:**

    - `num_starts`: number of starting points of the search.
    - `draws`: `rf.density.Sobol()` or `rf.density.Independent()`.
    - `fine`: if given, paths have coefficients for twice as many functions as the driver has; 1 includes the
      added functions in Φ, 0 ignores them.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimator = rf.PullBack(num_paths=64, proposal=rf.Laplace())
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=estimator)
    estimate.standard_error  # 0, up to rounding
    ```
    """

    num_starts: int = eqx.field(static=True, default=12)
    draws: AbstractDraws = Sobol()
    fine: Any = None
    wants_cloud: ClassVar[bool] = True

    def __check_init__(self):
        check_count("num_starts", self.num_starts)

    def distribution(self, flow: AbstractStochasticFlow, x: Array, cloud: "Cloud") -> Mixture:
        # The proposal is treated as a constant: derivatives of the weights do not include those of the
        # proposal.
        latent, x, cloud = constant((Latent(flow, self.fine), x, cloud))
        begin = cloud.starts(x, self.num_starts)
        begin = jnp.pad(begin, ((0, 0), (0, 0), (0, latent.size - begin.shape[2])))
        return constant(find_modes(latent, x, begin).tangents(latent.flow.dimension))


class Latent(eqx.Module):
    """The map Φ of a flow. If the base has no `from_normal`, it is whitened by the mean and standard
    deviation of its samples.

    With `fine`, ξ has coefficients for twice as many functions as the driver has. If `fine` is 1, Φ depends
    on the added coefficients; if it is 0, it does not. Both cases share one compiled program.
    """

    flow: AbstractStochasticFlow
    affine: tuple[Array, Array] | None
    fine: Any

    def __init__(self, flow: AbstractStochasticFlow, fine: Any = None):
        draws = None
        if not isinstance(flow.base, Whitened):
            draws = jax.lax.stop_gradient(flow.base.sample(key=jax.random.key(0), shape=(CLOUD_DRAWS,)))
        self.affine = None if draws is None else (jnp.mean(draws, axis=0), jnp.std(draws, axis=0))
        self.fine = None if refined_driver(flow) is None else fine
        # Only the end of a solve is needed, and it must be a function of ξ alone. A search may try improbable
        # paths, so a solve that fails gives NaN instead of an error. Parameters in closures are made
        # explicit, so that `constant` finds them.
        point = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
        sde = with_explicit_parameters(flow.sde, jnp.zeros(point.shape, point.dtype))
        grid = flow.integrator
        if self.fine is not None and isinstance(grid, FixedGrid):
            # The number of steps is the same as without the added functions.
            grid = dataclasses.replace(grid, steps=grid.count(flow.driver, flow.noise_dimension))
        plain = (NoDivergence(), ExactCorrection(), sde, grid)
        parts = lambda f: (f.divergence, f.correction, f.sde, f.integrator)
        self.flow = eqx.tree_at(parts, flow.without_errors(), plain)

    @property
    def size(self) -> int:
        path = self.flow.driver.num_functions * self.flow.noise_dimension
        return self.flow.dimension + path * (1 if self.fine is None else 2)

    def end(self, xi: Array) -> tuple[Array, Array]:
        """Φ(ξ), shape `(B, d)`, and a mask of the samples that escaped."""
        size = self.flow.driver.num_functions * self.flow.noise_dimension
        start, own, more = jnp.split(xi, [self.flow.dimension, self.flow.dimension + size], axis=1)
        flow, coefficients = with_added(self.flow, own, more, self.fine)
        path = flow.driver.path(coefficients, flow.t1)
        if self.affine is None:
            start = jax.vmap(flow.base.from_normal)(start)
        else:
            start = self.affine[0][None] + self.affine[1][None] * start
        outcome = flow.solve(start, path, reverse=False)
        return outcome.z, outcome.has_escaped


def refined_driver(flow: AbstractStochasticFlow) -> Any:
    """The driver with twice as many functions; None if it cannot be refined."""
    try:
        return flow.driver.refined()
    except NotImplementedError:
        return None


def with_added(flow: Any, omega: Array, more: Array, fine: Any) -> tuple[Any, Array]:
    """The flow and the coefficients of the paths ω. If `fine` is not None and the driver can be refined, the
    driver has twice as many functions, and the added ones have `fine` times the coefficients `more`."""
    count, columns = flow.driver.num_functions, flow.noise_dimension
    own = jnp.reshape(omega, (*omega.shape[:-1], count, columns))
    if fine is None or (refined := refined_driver(flow)) is None:
        return flow, own
    added = jnp.reshape(more * fine, (*own.shape[:-2], refined.num_functions - count, columns))
    return flow.with_driver(refined), flow.driver.refine(own, added)


def constant(tree):
    """The pytree as a constant for differentiation; leaves may be functions."""
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_array(a) else a, tree)


class Cloud(eqx.Module):
    """Forward draws ξ `(N, D)` of the flow and their end points `(N, d)`, NaN for draws that escape. Draws
    that end near x show how x can be reached. One cloud serves every x."""

    xi: Array
    end: Array

    @staticmethod
    def of(flow: AbstractStochasticFlow, key: PRNGKeyArray, dtype) -> "Cloud":
        latent = constant(Latent(flow))
        indices = jnp.arange(max(64, min(CLOUD_DRAWS, MAX_CLOUD_NUMBERS // latent.size)))
        xi = normal_draws(key, indices, latent.size, dtype)
        end, has_escaped = latent.end(xi)
        lost = has_escaped | ~jnp.all(jnp.isfinite(end), axis=-1)
        return Cloud(xi, jnp.where(lost[:, None], jnp.nan, end))

    @property
    def is_linear(self) -> bool:
        """Whether the end points are affine in ξ, as they are for a linear SDE with additive noise."""
        xi, end = np.asarray(self.xi, float), np.asarray(self.end, float)
        known = np.isfinite(end).all(axis=1)
        design = np.column_stack([np.ones(known.sum()), xi[known]])
        rest = end[known] - design @ np.linalg.lstsq(design, end[known])[0]
        if not known.all() or len(xi) < 2 * design.shape[1]:  # with few draws, any map fits
            return False
        return bool(np.all(np.abs(rest).max(axis=0) <= LINEAR * end.std(axis=0)))

    def starts(self, x: Array, count: int) -> Array:
        """Starting points of searches for each x, `(B, count, D)`: zero, the draws that end nearest to x in
        units of the spread of the end points, and some draws from a wider distribution, because modes may lie
        where few paths go."""
        # The spread is the mean absolute deviation, which is not dominated by a few distant draws.
        spread = jnp.nanmean(jnp.abs(self.end - jnp.nanmean(self.end, axis=0)[None]), axis=0)
        away = (x[:, None] - self.end[None]) / jnp.where(spread > 0, spread, 1)[None, None]
        gap = jnp.sum(away**2, axis=-1)
        gap = jnp.where(jnp.isnan(gap), jnp.inf, gap)
        wide = count // WIDE_SHARE
        near = self.xi[jax.lax.top_k(-gap, count - 1 - wide)[1]]
        far = jnp.broadcast_to(WIDE * self.xi[:wide], (len(x), wide, self.xi.shape[1]))
        return jnp.concatenate([jnp.zeros_like(near[:, :1]), near, far], axis=1)


class Modes(eqx.Module):
    """For each x, the S points ξ* found from S starts, and the normal space of the surface at these points.

    `directions` are orthonormal and span the rows of J. `score` is minus the logarithm of the mass of the
    tangent Gaussian, ½|ξ*|² + log √det JJᵀ: infinite if the search did not reach the surface, if J is rank
    deficient, or if another search found the same point.
    """

    xi: Array  # (B, S, D)
    directions: Array  # (B, S, d, D)
    score: Array  # (B, S)

    def tangents(self, start: int) -> Mixture:
        """The mixture of the tangent Gaussians of at most `MAX_MODES` points, marginalised over the start,
        and a share of the prior. The coefficients of the path begin at index `start` of ξ."""
        indices = jnp.argsort(self.score, axis=1)[:, :MAX_MODES]
        take = lambda a: jnp.take_along_axis(a, jnp.expand_dims(indices, range(2, a.ndim)), axis=1)
        score, xi, directions = take(self.score), take(self.xi), take(self.directions)
        found = jnp.isfinite(score)
        missed = ~jnp.any(found, axis=1)
        log_share = jnp.where(found, -score, -jnp.inf)
        top = jnp.max(log_share, axis=1, keepdims=True)
        floored = jnp.maximum(log_share, jnp.where(jnp.isfinite(top), top, 0) + jnp.log(MIN_SHARE))
        log_share = jax.nn.log_softmax(jnp.where(found | missed[:, None], floored, -jnp.inf), axis=1)
        frame = jnp.eye(*directions.shape[2:], dtype=directions.dtype)
        return Mixture(
            jnp.where(found[..., None], xi[..., start:], 0),
            jnp.ones_like(xi[..., start:]),
            jnp.where(found[..., None, None], directions, frame[None, None]),
            log_share,
            jnp.where(missed, 1.0, PRIOR_SHARE).astype(xi.dtype),
        )


def find_modes(latent: Latent, x: Array, begin: Array) -> Modes:
    """Search from every point of `begin` `(B, S, D)`. Of modes that are close together, only the one with the
    largest mass is kept."""
    starts = begin.shape[1]
    modes = _search(latent, jnp.repeat(x, starts, axis=0), jnp.reshape(begin, (-1, latent.size)))
    modes = jax.tree.map(lambda a: jnp.reshape(a, (-1, starts, *a.shape[1:])), modes)
    gap = jnp.linalg.norm(modes.xi[:, :, None] - modes.xi[:, None], axis=-1)
    rank = jnp.argsort(jnp.argsort(modes.score, axis=1), axis=1)
    again = jnp.any((rank[:, :, None] < rank[:, None]) & (gap < MERGE_DISTANCE), axis=1)
    return eqx.tree_at(lambda m: m.score, modes, jnp.where(again, jnp.inf, modes.score))


def _search(latent: Latent, x: Array, xi: Array) -> Modes:
    """Run the Gauss–Newton iteration from each point of `xi`."""
    many = jnp.repeat(x, len(STEP_LENGTHS), axis=0)

    def merit(xi: Array, gap: Array, penalty: Array) -> Array:
        return 0.5 * jnp.sum(xi**2, axis=-1) + jnp.sum(penalty * jnp.abs(gap), axis=-1)

    def step(state):
        xi, end, jacobian, penalty, settled, count = state
        gap = x - end
        multiplier = _solve_gram(jacobian, gap + jnp.einsum("bij,bj->bi", jacobian, xi))
        # An exact penalty must exceed the Lagrange multipliers, each of which has the unit of its coordinate.
        penalty = jnp.maximum(penalty, 2 * jnp.abs(multiplier))
        direction = jnp.einsum("bij,bi->bj", jacobian, multiplier) - xi
        # The first iteration does not move: it only computes Φ and its derivative at the starting point.
        direction = jnp.where(jnp.isfinite(direction) & (count > 0), direction, 0)
        # All step lengths are tried in one solve, which needs one compiled program instead of three.
        lengths = jnp.asarray(STEP_LENGTHS, xi.dtype)
        tried = xi[:, None] + lengths[None, :, None] * direction[:, None]
        flat = jnp.reshape(tried, (-1, xi.shape[1]))
        ends, has_escaped = latent.end(flat)
        values = merit(flat, many - ends, jnp.repeat(penalty, len(STEP_LENGTHS), axis=0))
        values = jnp.where(has_escaped | ~jnp.isfinite(values), jnp.inf, values)
        values = jnp.reshape(values, tried.shape[:2])
        best = jnp.argmin(values, axis=1)
        better = jnp.min(values, axis=1) < merit(xi, gap, penalty)
        length = jnp.where(better & ~settled, lengths[best], 0)
        moved = length * jnp.linalg.norm(direction, axis=-1)
        xi = xi + length[:, None] * direction
        settled = settled | ((moved < SETTLED_STEP) & (count > 0))
        return xi, *_end_and_jacobian(latent, xi), penalty, settled, count + 1

    going = lambda state: (state[-1] <= MAX_ITERATIONS) & ~jnp.all(state[-2])
    blank = jnp.zeros((len(xi), x.shape[1], xi.shape[1]), xi.dtype)
    start = (xi, x, blank, jnp.zeros_like(x), jnp.zeros(len(xi), bool), 0)
    xi, end, jacobian, *_ = jax.lax.while_loop(going, step, start)
    directions, sizes = orthonormal(jacobian)
    # Each row must have a part that is orthogonal to the previous rows. The part is compared with the norm of
    # the row, because rows have different units.
    full = jnp.all(sizes > 100 * jnp.finfo(sizes.dtype).eps * jnp.linalg.norm(jacobian, axis=-1), axis=-1)
    off = jnp.sqrt(jnp.sum((x - end) * _solve_gram(jacobian, x - end), axis=-1))
    score = 0.5 * jnp.sum(xi**2, axis=-1) + jnp.sum(jnp.log(sizes), axis=-1)
    fine = (off < MAX_VIOLATION) & full & jnp.isfinite(score)
    return Modes(xi, directions, jnp.where(fine, score, jnp.inf))


def _end_and_jacobian(latent: Latent, xi: Array) -> tuple[Array, Array]:
    """Φ(ξ) `(B, d)` and DΦ(ξ) `(B, d, D)`. Samples are independent, so each row of DΦ costs one vjp for the
    whole batch. All rows at once are faster on a GPU, but take twice as long on a CPU in ten dimensions."""
    end, pull = jax.vjp(lambda y: latent.end(y)[0], xi)
    basis = jnp.eye(end.shape[1], dtype=end.dtype)
    at_once = None if jax.default_backend() == "cpu" else len(basis)
    gradients = jax.lax.map(lambda e: pull(jnp.broadcast_to(e, end.shape))[0], basis, batch_size=at_once)
    return end, jnp.swapaxes(gradients, 0, 1)


def _solve_gram(jacobian: Array, right: Array) -> Array:
    """(JJᵀ)⁻¹ r. The rows of J are normalised first, so that units do not matter. With a small ridge, a
    degenerate J gives a poor step instead of NaN."""
    size = jnp.linalg.norm(jacobian, axis=-1)
    unit = 1 / jnp.where(size > 0, size, 1)
    rows = jacobian * unit[..., None]
    gram = jnp.einsum("bij,bkj->bik", rows, rows)
    ridge = jnp.finfo(gram.dtype).eps * len(gram[0]) * jnp.eye(gram.shape[1], dtype=gram.dtype)[None]
    return unit * solve(gram + ridge, (unit * right)[..., None])[..., 0]
