"""Where chains start: climbs towards modes, and the replacement of starting points far below them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import finite_array, warn
from .._programs import jit
from ..faq import see
from ..sde import LogDensity, as_target

NUM_CLIMBERS = 4  # number of chains that climb to a mode
CLIMB_STEPS = 50  # Newton iterations of a climb
EQUILIBRATIONS = 10  # iterations to find the units of the coordinates
TRIAL_DRAWS = 16  # number of draws used to evaluate a normal approximation
MIXTURE_DRAWS = 512  # number of draws from the mixture of normal approximations


def starting_points(z0: Any) -> Array:
    """Check the starting points of several chains, `(chains, d)`."""
    z = finite_array("z0", z0)
    if z.ndim != 2 or not z.size:
        raise ValueError(f"z0 must have shape (chains, d), got {z.shape}")
    return z


def replace_far_points(log_density: LogDensity, z: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
    """Replace starting points whose log density is far below that of the bulk of the target, with a warning.
    Return a square root of the covariance of the best normal approximation, and the starting points."""
    scale, z, moved = _climb(log_density, z, key)
    if moved:
        warn(
            f"{int(moved)} of {len(z)} starting points z0 have a log density far below that of the bulk "
            "of the target and were replaced by draws from it: set climb=False to keep them"
            + see("moved-starts")
        )
    return scale, z


@jit
def _climb(log_density: LogDensity, z: Array, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
    """Climb towards modes. Return a square root of the covariance of the best normal approximation, the
    positions of all chains, and the number of chains that were moved."""
    target = as_target(log_density)
    key_trial, key_draw = jax.random.split(key)
    trials = jax.random.normal(key_trial, (TRIAL_DRAWS, z.shape[1]), z.dtype)
    # Climbers start at points spread over z0, so that different modes are found.
    climbers = z[np.unique(np.linspace(0, len(z) - 1, NUM_CLIMBERS).round().astype(int))]
    # Climbers run one after the other, because LAPACK is slow for batches of small matrices.
    centres, roots, bounds = jax.lax.map(lambda y: _best_normal(target, y, trials), climbers)
    best = jnp.argmax(bounds)
    draws, heights = _resample(target, centres, roots, bounds, key_draw, len(z))
    fine = jnp.isfinite(bounds[best]) & jnp.all(jnp.isfinite(heights))
    # The threshold is below the highest draw by twice the distance between highest and lowest draw.
    low = 2 * jnp.min(heights) - jnp.max(heights)
    moved = fine & (jax.vmap(target)(z) < low)
    scale = jnp.where(fine, roots[best], jnp.eye(z.shape[1], dtype=z.dtype))
    return scale, jnp.where(moved[:, None], draws, z), jnp.sum(moved)


def _best_normal(target: LogDensity, start: Array, trials: Array) -> tuple[Array, Array, Array]:
    """The normal approximation closest to the target among those at the points of a climb: its mean, a square
    root of its covariance, and E[log p − log q] up to a constant, −inf if there is none."""
    lengths = 0.5 ** jnp.arange(10.0)

    def uphill(y: Array, _) -> tuple[Array, tuple[Array, Array, Array]]:
        """A Newton step with the absolute value of the curvature and the best step length, and the normal
        approximation at y."""
        covariance = _inverse_curvature(target, y)
        root = root_of(covariance)
        step = covariance @ jax.grad(target)(y)
        values = jax.vmap(target)(y[None] + trials @ root.T)
        inside = jnp.isfinite(values)
        # If some draws lie outside the support, Jensen's bound includes the log of the fraction inside.
        share = jnp.mean(inside)
        bound = jnp.sum(jnp.where(inside, values, 0)) / jnp.maximum(jnp.sum(inside), 1)
        bound += jnp.log(share) + jnp.linalg.slogdet(root)[1]
        bound = jnp.where(jnp.all(jnp.isfinite(root)), bound, -jnp.inf)
        tries = jnp.concatenate([y[None] + lengths[:, None] * step[None], y[None]])
        heights = jax.vmap(target)(tries)
        best = jnp.argmax(jnp.where(jnp.isnan(heights), -jnp.inf, heights))
        return tries[best], (y, root, jnp.where(jnp.isnan(bound), -jnp.inf, bound))

    normals = jax.lax.scan(uphill, start, length=CLIMB_STEPS)[1]
    best = jnp.argmax(normals[2])
    return jax.tree.map(lambda leaf: leaf[best], normals)


def _resample(
    target: LogDensity, centres: Array, roots: Array, bounds: Array, key: PRNGKeyArray, count: int
) -> tuple[Array, Array]:
    """Draws from the mixture of the normal approximations, resampled with weights p/q so that modes are
    represented in proportion to their mass; and log p at the draws, −inf if there are no valid draws."""
    key_unit, key_choose = jax.random.split(key)
    usable = jnp.isfinite(bounds)
    roots = jnp.where(usable[:, None, None], roots, jnp.eye(roots.shape[-1], dtype=roots.dtype)[None])
    unit = jax.random.normal(
        key_unit, (len(roots), MIXTURE_DRAWS // len(roots), roots.shape[-1]), roots.dtype
    )
    draws = jnp.reshape(centres[:, None] + unit @ jnp.swapaxes(roots, 1, 2), (-1, roots.shape[-1]))
    own = jnp.repeat(usable, unit.shape[1])

    def log_normal(centre: Array, root: Array) -> Array:
        gaps = jax.scipy.linalg.solve_triangular(root, (draws - centre[None]).T, lower=True)
        return -0.5 * jnp.sum(gaps**2, axis=0) - jnp.sum(jnp.log(jnp.abs(jnp.diagonal(root))))

    log_parts = jnp.where(usable[:, None], jax.vmap(log_normal)(centres, roots), -jnp.inf)
    heights = jax.vmap(target)(draws)
    log_weight = heights - jax.nn.logsumexp(log_parts, axis=0)
    inside = own & jnp.isfinite(log_weight)
    weight = jax.nn.softmax(jnp.where(inside, log_weight, -jnp.inf))
    chosen = jax.random.choice(key_choose, len(draws), (count,), p=jnp.where(inside, weight, 0))
    return draws[chosen], jnp.where(jnp.any(inside), heights[chosen], -jnp.inf)


def climbing_gradients(dimension: int, chains: int) -> int:
    """The cost of `_climb` in gradients, where a Hessian counts as 2d gradients and a log density as one."""
    return (
        min(NUM_CLIMBERS, chains) * CLIMB_STEPS * (2 * dimension + 12 + TRIAL_DRAWS) + MIXTURE_DRAWS + chains
    )


def _inverse_curvature(target: LogDensity, y: Array) -> Array:
    """The inverse of the absolute value of the Hessian, in the units of `_units`; the identity if the Hessian
    is zero, as on a cone, or not finite."""
    hessian = jax.hessian(target)(y)
    flat = ~jnp.all(jnp.isfinite(hessian)) | jnp.all(hessian == 0)
    hessian = jnp.where(flat, jnp.eye(y.shape[0], dtype=y.dtype), hessian)
    unit = _units(hessian)
    values, vectors = jnp.linalg.eigh(unit[:, None] * hessian * unit[None])
    size = jnp.maximum(jnp.abs(values), 1e-12 * jnp.max(jnp.abs(values)))
    vectors = unit[:, None] * vectors
    return (vectors / size[None]) @ vectors.T


def _units(matrix: Array) -> Array:
    """Units of the coordinates in which the largest entry of each row of a symmetric matrix is near ±1 (Ruiz
    2001). Without them, eigenvalues far below the largest one are lost to rounding."""

    def better(_, unit: Array) -> Array:
        size = jnp.max(jnp.abs(unit[:, None] * matrix * unit[None]), axis=1)
        return unit / jnp.sqrt(jnp.where(size > 0, size, 1))

    return jax.lax.fori_loop(0, EQUILIBRATIONS, better, jnp.ones_like(matrix[0]))


def root_of(covariance: Array) -> Array:
    """The lower Cholesky factor of a covariance matrix, which is made positive definite if necessary."""
    width = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), jnp.finfo(covariance.dtype).tiny))
    values, vectors = jnp.linalg.eigh(0.5 * (covariance + covariance.T) / jnp.outer(width, width))
    size = jnp.sqrt(jnp.maximum(values, 1e-12 * jnp.max(values)))
    # A = M Mᵀ and Mᵀ = QR give A = RᵀR without squaring, which would lose digits.
    lower = jnp.linalg.qr((vectors * size[None]).T, mode="r").T
    return width[:, None] * lower * jnp.sign(jnp.diagonal(lower))[None]
