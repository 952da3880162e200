"""Rough paths over given ones: what their iterated integrals are."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_shape, check_count, check_instance, check_key, check_positive
from .._programs import jit
from ..driver import Path
from ._rough_path import RoughPath

NODES = 8  # of Gauss's rule in an interval: exact for a path of degree 8


def lift(path: Path, steps: int) -> RoughPath:
    """The canonical lift of a smooth or piecewise linear path on `steps` equal intervals: its own integrals.

    Exact for linear pieces, wherever they end; for smooth paths by Gauss's rule of 8 points in each interval
    and in at least as many as the driver has functions, which is exact for polynomials of degree up to 8.

    ```python
    import jax
    import roughflow as rf

    path = rf.KarhunenLoeve(16).sample(key=jax.random.key(0), noise_dimension=2)
    rough = rf.lift(path, 64)
    ```
    """
    check_instance("path", path, Path, "a path of a driver: driver.project turns any diffrax path into one")
    if path.t1.ndim:
        raise ValueError("lift takes paths of one end time")
    return _lifted(path, check_count("steps", steps))


@jit
def _lifted(path: Path, steps: int) -> RoughPath:
    grid = np.linspace(0.0, 1.0, steps + 1)
    knots = _knots(path, grid)
    places, weights = np.polynomial.legendre.leggauss(NODES)
    width = np.diff(knots)
    inside = knots[:-1, None] + width[:, None] * (places + 1) / 2
    at = lambda function, s: jnp.moveaxis(jax.vmap(function)(jnp.asarray(s.ravel())), 0, -2)
    values = at(lambda s: path.evaluate(s * path.t1), knots)
    shape = (*values.shape[:-2], *inside.shape, values.shape[-1])
    between = jnp.reshape(at(lambda s: path.evaluate(s * path.t1), inside), shape) - values[..., :-1, None, :]
    slopes = jnp.reshape(at(path.unit_slope, inside), shape)
    rule = jnp.asarray(width[:, None] * weights / 2, values.dtype)
    areas = jnp.einsum("nq,...nqi,...nqj->...nij", rule, between, slopes)
    rough = RoughPath(path.t1 * jnp.asarray(knots, values.dtype), jnp.diff(values, axis=-2), areas)
    return rough if len(knots) == len(grid) else rough.restricted(np.searchsorted(knots, grid))


def _knots(path: Path, grid: np.ndarray) -> np.ndarray:
    """The grid and, between, the ends of linear pieces, or enough times for waves."""
    jumps = path.driver.jumps
    if not jumps.size:
        parts = -(-path.driver.num_functions // (len(grid) - 1))
        inner = np.arange(len(grid) * parts - parts + 1) / parts
        return np.interp(inner, np.arange(len(grid)), grid)
    # Knots that differ by rounding are one.
    apart = np.min(np.abs(jumps[:, None] - grid), axis=1) > 1e-12
    return np.union1d(grid, jumps[apart])


def brownian_lift(
    steps: int,
    *,
    key: PRNGKeyArray,
    noise_dimension: int = 1,
    shape: tuple[int, ...] = (),
    t1: float = 1.0,
    num_functions: int = 8,
) -> RoughPath:
    """The Stratonovich lift of Brownian motion with its Lévy areas, on `steps` equal intervals of [0, t1].

    In each interval of length h the path is expanded in n = `num_functions` Legendre polynomials, whose areas
    have a closed form (Kuznetsov 1997; Foster & Habermann 2023). What is left of each area, of
    variance h²/(4(2n − 1)), is replaced by an independent normal number of this variance
    (Wiktorsson 2001): so areas have variance h²/4 whatever n, and increments are exact.
    `.ito()` is the Itô lift.

    ```python
    import jax
    import roughflow as rf

    rough = rf.brownian_lift(64, key=jax.random.key(0), noise_dimension=2, shape=(100,))
    ito = rough.ito()
    ```
    """
    check_positive("t1", t1)
    n, m = check_count("num_functions", num_functions), check_count("noise_dimension", noise_dimension)
    key_path, key_rest = jax.random.split(check_key(key))
    batch = (*as_shape(shape, check_count("steps", steps) * n * m), steps)
    omega = jax.random.normal(key_path, (*batch, n, m))
    areas = _polynomial_areas(omega) + _rest(key_rest, batch, n, m)
    increments = omega[..., 0, :]
    square = 0.5 * increments[..., :, None] * increments[..., None, :]
    h = t1 / steps
    times = jnp.linspace(0.0, t1, steps + 1)
    return RoughPath(times, jnp.sqrt(h) * increments, h * (square + areas))


def _polynomial_areas(omega: Array) -> Array:
    """½ ∫(X ⊗ dX − dX ⊗ X) over [0, 1] for coefficients `(..., n, m)`: neighbours alone have areas."""
    n = omega.shape[-2]
    weights = jnp.asarray(0.5 / np.sqrt(4.0 * np.arange(1, n) ** 2 - 1), omega.dtype)
    products = jnp.einsum("k,...ki,...kj->...ij", weights, omega[..., :-1, :], omega[..., 1:, :])
    return products - jnp.swapaxes(products, -1, -2)


def _rest(key: PRNGKeyArray, batch: tuple[int, ...], n: int, m: int) -> Array:
    upper = jnp.triu(jax.random.normal(key, (*batch, m, m)), 1) / (4 * (2 * n - 1)) ** 0.5
    return upper - jnp.swapaxes(upper, -1, -2)
