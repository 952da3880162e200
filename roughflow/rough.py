"""Rough paths on a grid: iterated integrals by Chen's relation, lifts and distances."""

from functools import partial
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from ._checks import as_shape, check_count, check_instance, check_key, check_positive, is_traced
from ._programs import jit
from .driver import Path

MAX_CHECKED_TIMES = 33  # maximum number of times for which all triples are checked


class RoughPath(eqx.Module):
    """A rough path on a grid: increments X_{s,t} = X(t) − X(s), and areas 𝕏_{s,t}, which take the place of
    ∫ₛᵗ X_{s,u} ⊗ dX(u).

    Both levels are stored for each interval; the levels between any two times of the grid follow by Chen's
    relation 𝕏_{s,t} = 𝕏_{s,u} + 𝕏_{u,t} + X_{s,u} ⊗ X_{u,t}, which therefore holds by construction. Create
    one with `rf.rough.lift` or `rf.rough.brownian_lift`.

    **Arguments:**

    - `times`: increasing times, `(N + 1,)`.
    - `increments`: the first level on each interval, `(..., N, m)`.
    - `areas`: the second level on each interval, `(..., N, m, m)`.
    - `geometric`: whether the ordinary chain rule holds, 2 Sym 𝕏 = X ⊗ X, as for smooth paths and in the
      Stratonovich sense, but not in the Itô sense.

    ```python
    import jax
    import roughflow as rf

    rough = rf.rough.brownian_lift(64, key=jax.random.key(0), noise_dimension=2)
    first, second = rough.levels(0, 64)
    rough.chen_defect(), rough.geometric_defect(), rough.holder_norm(0.4)
    ```
    """

    times: Array
    increments: Array
    areas: Array
    geometric: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        steps = jnp.size(self.times) - 1
        first, second = jnp.shape(self.increments), jnp.shape(self.areas)
        if len(first) < 2 or first[-2] != steps or second != (*first, first[-1]):
            raise ValueError(
                f"a rough path at {steps + 1} times has increments of shape (..., {steps}, m) and areas of "
                f"shape (..., {steps}, m, m), got {first} and {second}"
            )
        if not is_traced(self.times) and not np.all(np.diff(np.asarray(self.times)) > 0):
            raise ValueError("times of a rough path must increase")

    @property
    def steps(self) -> int:
        return self.increments.shape[-2]

    @property
    def noise_dimension(self) -> int:
        return self.increments.shape[-1]

    def levels(self, start: ArrayLike, end: ArrayLike) -> tuple[Array, Array]:
        """Both levels between two times of the grid, given by their indices: `(..., m)` and `(..., m, m)`, or
        `(..., k, m)` and `(..., k, m, m)` for arrays of k indices. If `end` is before `start`, they are the
        levels of the reversed path."""
        return _levels(self.increments, self.areas, jnp.asarray(start), jnp.asarray(end))

    def bracket(self, start: ArrayLike, end: ArrayLike) -> Array:
        """X ⊗ X − 2 Sym 𝕏 between two times: zero for a geometric path, (t − s)I for the Itô lift."""
        return _bracket(*self.levels(start, end))

    def restricted(self, places: ArrayLike) -> "RoughPath":
        """The same rough path on a subset of its times, given by their indices."""
        places = np.asarray(places)
        levels = self.levels(places[:-1], places[1:])
        return RoughPath(self.times[places], *levels, self.geometric)

    def coarser(self, factor: int) -> "RoughPath":
        """The rough path on every `factor`-th time of its grid."""
        if self.steps % check_count("factor", factor):
            raise ValueError(f"factor must divide the number of steps, {self.steps}, got {factor}")
        return self.restricted(np.arange(0, self.steps + 1, factor))

    def reversed(self) -> "RoughPath":
        """The reversed path t ↦ X(T − t); a geometric path stays geometric."""
        first, second = self.levels(np.arange(self.steps, 0, -1), np.arange(self.steps - 1, -1, -1))
        return RoughPath(self.times[-1] + self.times[0] - self.times[::-1], first, second, self.geometric)

    def ito(self) -> "RoughPath":
        """The Itô lift from the Stratonovich lift of Brownian motion: 𝕏 − ½(t − s)I."""
        if not self.geometric:
            raise ValueError("ito needs a Stratonovich lift, but this is an Itô lift")
        return self._shifted(-0.5, False)

    def stratonovich(self) -> "RoughPath":
        """The Stratonovich lift from the Itô lift of Brownian motion: 𝕏 + ½(t − s)I."""
        if self.geometric:
            raise ValueError("stratonovich needs an Itô lift, but this path is already geometric")
        return self._shifted(0.5, True)

    def _shifted(self, share: float, geometric: bool) -> "RoughPath":
        unit = jnp.eye(self.noise_dimension, dtype=self.areas.dtype)
        moved = share * jnp.diff(self.times)[:, None, None] * unit[None]
        areas = self.areas + jnp.broadcast_to(moved, self.areas.shape)
        return RoughPath(self.times, self.increments, areas, geometric)

    def chen_defect(self) -> Array:
        """The largest entry of 𝕏_{s,t} − 𝕏_{s,u} − 𝕏_{u,t} − X_{s,u} ⊗ X_{u,t} over s < u < t. It differs
        from zero only by rounding errors."""
        checked = np.unique(np.linspace(0, self.steps, min(MAX_CHECKED_TIMES, self.steps + 1)).astype(int))
        s, u, t = np.array([(a, b, c) for a in checked for b in checked for c in checked if a < b < c]).T
        return _chen_defect(self.increments, self.areas, *map(jnp.asarray, (s, u, t)))

    def geometric_defect(self) -> Array:
        """The largest entry of Sym 𝕏_{s,t} − ½ X_{s,t} ⊗ X_{s,t} over s < t. It is zero up to rounding for a
        geometric path, and half the length of the time interval for the Itô lift."""
        return 0.5 * jnp.max(jnp.abs(self.bracket(*np.triu_indices(self.steps + 1, 1))))

    def holder_norm(self, alpha: float) -> Array:
        """sup |X_{s,t}|/|t − s|^α + sup √|𝕏_{s,t}|/|t − s|^α over the grid, shape `(...)`."""
        gaps, first, second = self._pairs()
        largest = lambda a, power: jnp.max(a / gaps**power, axis=-1)
        return largest(_size(first, 1), alpha) + jnp.sqrt(largest(_size(second, 2), 2 * alpha))

    def distance(self, other: Self, alpha: float) -> Array:
        """sup |X − Y|/|t − s|^α + sup |𝕏 − 𝕐|/|t − s|^2α over the grid: the rough-path distance ρ_α.
        Solutions are continuous with respect to it if α > ⅓."""
        if other.increments.shape[-2:] != self.increments.shape[-2:]:
            raise ValueError(
                "distance needs two rough paths on the same grid: call restricted on the finer one"
            )
        gaps, first, second = self._pairs()
        _, first2, second2 = other._pairs()
        apart = lambda a, b, axes, power: jnp.max(_size(a - b, axes) / gaps**power, axis=-1)
        return apart(first, first2, 1, alpha) + apart(second, second2, 2, 2 * alpha)

    def _pairs(self) -> tuple[Array, Array, Array]:
        """t − s and both levels for all pairs s < t, along one axis."""
        start, end = np.triu_indices(self.steps + 1, 1)
        gaps = self.times[end] - self.times[start]
        first, second = self.levels(start, end)
        return jnp.broadcast_to(gaps, first.shape[:-1]), first, second


def _outer(a: Array, b: Array) -> Array:
    return a[..., :, None] * b[..., None, :]


@partial(jit, level=0)
def _levels(increments: Array, areas: Array, start: Array, end: Array) -> tuple[Array, Array]:
    """Both levels between two times of the grid, computed from the levels between the first time and each
    time, `(..., N + 1, m)` and `(..., N + 1, m, m)`."""
    first = _summed(increments, -2)
    second = _summed(areas + _outer(first[..., :-1, :], increments), -3)
    before = jnp.take(first, start, axis=-2)
    step = jnp.take(first, end, axis=-2) - before
    at = lambda i: jnp.take(second, i, axis=-3)
    return step, at(end) - at(start) - _outer(before, step)


@partial(jit, level=0)
def _bracket(first: Array, second: Array) -> Array:
    return _outer(first, first) - second - jnp.swapaxes(second, -1, -2)


@partial(jit, level=0)
def _chen_defect(increments: Array, areas: Array, s: Array, u: Array, t: Array) -> Array:
    pairs = (s, u), (u, t), (s, t)
    (before, early), (after, late), (_, whole) = (_levels(increments, areas, *pair) for pair in pairs)
    return jnp.max(jnp.abs(whole - early - late - _outer(before, after)))


def _summed(a: Array, axis: int) -> Array:
    """Cumulative sums, starting from zero."""
    zero = jnp.zeros_like(jax.lax.slice_in_dim(a, 0, 1, axis=axis % a.ndim))
    return jnp.concatenate([zero, jnp.cumsum(a, axis=axis)], axis=axis)


def _size(a: Array, axes: int) -> Array:
    """Euclidean norm over the last axes."""
    return jnp.sqrt(jnp.sum(a**2, axis=tuple(range(-axes, 0))))


NUM_NODES = 8  # nodes of Gauss quadrature per interval; exact for a path of degree 8


def lift(path: Path, steps: int) -> RoughPath:
    """The canonical lift of a smooth or piecewise linear path on `steps` equal intervals.

    The lift is exact for piecewise linear paths, wherever their pieces end. For smooth paths, it uses Gauss
    quadrature with 8 points in each interval, and at least as many intervals as the driver has functions.
    This is exact for polynomials of degree up to 8.

    ```python
    import jax
    import roughflow as rf

    path = rf.KarhunenLoeve(16).sample(key=jax.random.key(0), noise_dimension=2)
    rough = rf.rough.lift(path, 64)
    ```
    """
    check_instance("path", path, Path, "a path of a driver; driver.project converts a diffrax path")
    if path.t1.ndim:
        raise ValueError("lift requires paths with the same end time")
    return _lifted(path, check_count("steps", steps))


@jit
def _lifted(path: Path, steps: int) -> RoughPath:
    grid = np.linspace(0.0, 1.0, steps + 1)
    knots = _knots(path, grid)
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    width = np.diff(knots)
    inside = knots[:-1, None] + width[:, None] * (nodes + 1) / 2
    at = lambda function, s: jnp.moveaxis(jax.vmap(function)(jnp.asarray(s.ravel())), 0, -2)
    values = at(lambda s: path.evaluate(s * path.t1), knots)
    shape = (*values.shape[:-2], *inside.shape, values.shape[-1])
    between = jnp.reshape(at(lambda s: path.evaluate(s * path.t1), inside), shape) - values[..., :-1, None, :]
    slopes = jnp.reshape(at(path.unit_slope, inside), shape)
    scaled = jnp.asarray(width[:, None] * weights / 2, values.dtype)
    areas = jnp.einsum("nq,...nqi,...nqj->...nij", scaled, between, slopes)
    rough = RoughPath(path.t1 * jnp.asarray(knots, values.dtype), jnp.diff(values, axis=-2), areas)
    return rough if len(knots) == len(grid) else rough.restricted(np.searchsorted(knots, grid))


def _knots(path: Path, grid: np.ndarray) -> np.ndarray:
    """The times of the grid and, between them, the ends of linear pieces or, for a smooth path, enough times
    to resolve its oscillations."""
    jumps = path.driver.jumps
    if not jumps.size:
        parts = -(-path.driver.num_functions // (len(grid) - 1))
        inner = np.arange(len(grid) * parts - parts + 1) / parts
        return np.interp(inner, np.arange(len(grid)), grid)
    # Knots that differ by rounding error are merged.
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
    have a closed form (Kuznetsov 1997; Foster & Habermann 2023). The remainder of each area, of variance
    h²/(4(2n − 1)), is replaced by an independent normal variable (Wiktorsson 2001). Areas then have variance
    h²/4 for every n, and increments are exact. `.ito()` converts the result to the Itô lift.

    ```python
    import jax
    import roughflow as rf

    rough = rf.rough.brownian_lift(64, key=jax.random.key(0), noise_dimension=2, shape=(100,))
    ito = rough.ito()
    ```
    """
    check_positive("t1", t1)
    n, m = check_count("num_functions", num_functions), check_count("noise_dimension", noise_dimension)
    key_path, key_rest = jax.random.split(check_key(key))
    batch = (*as_shape(shape, check_count("steps", steps) * n * m), steps)
    return RoughPath(jnp.linspace(0.0, t1, steps + 1), *_drawn(key_path, key_rest, batch, n, m, t1 / steps))


@partial(jit, level=0)
def _drawn(
    key_path: PRNGKeyArray, key_rest: PRNGKeyArray, batch: tuple[int, ...], n: int, m: int, h: float
) -> tuple[Array, Array]:
    """Draw increments and areas on intervals of length h."""
    omega = jax.random.normal(key_path, (*batch, n, m))
    areas = _polynomial_areas(omega) + _rest(key_rest, batch, n, m)
    increments = omega[..., 0, :]
    return jnp.sqrt(h) * increments, h * (0.5 * _outer(increments, increments) + areas)


def _polynomial_areas(omega: Array) -> Array:
    """½ ∫(X ⊗ dX − dX ⊗ X) over [0, 1] for coefficients `(..., n, m)`; only neighbouring functions contribute
    to the areas."""
    n = omega.shape[-2]
    weights = jnp.asarray(0.5 / np.sqrt(4.0 * np.arange(1, n) ** 2 - 1), omega.dtype)
    products = jnp.einsum("k,...ki,...kj->...ij", weights, omega[..., :-1, :], omega[..., 1:, :])
    return products - jnp.swapaxes(products, -1, -2)


def _rest(key: PRNGKeyArray, batch: tuple[int, ...], n: int, m: int) -> Array:
    upper = jnp.triu(jax.random.normal(key, (*batch, m, m)), 1) / (4 * (2 * n - 1)) ** 0.5
    return upper - jnp.swapaxes(upper, -1, -2)
