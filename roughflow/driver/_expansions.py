"""Expansions of Brownian motion and other Gaussian processes: Karhunen–Loève, Legendre, piecewise linear."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import as_real, check_callable, check_count, check_positive, is_whole
from ._driver import AbstractDriver

SQRT2 = 2.0**0.5


class KarhunenLoeve(AbstractDriver):
    """The smooth Karhunen–Loève expansion B(t) = ω₀ t/√T + Σ_{k=1}^{n−1} ωₖ √(2T) sin(kπt/T)/(kπ).

    The distribution of the end point B(T) = √T ω₀ is exact for every n, so the density of an SDE with
    constant coefficients is exact. Hodgkinson et al. (2020) use n from 4 to 10 in training.

    ```python
    import jax
    import roughflow as rf

    path = rf.KarhunenLoeve(6).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
    ```
    """

    num_functions: int = eqx.field(static=True)

    def __init__(self, num_functions: int):
        self.num_functions = check_count("num_functions", num_functions)

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)
        angle = jnp.asarray(np.pi * np.arange(1, self.num_functions), s.dtype)
        waves = jnp.sin(jnp.tensordot(s, angle, 0)) / jnp.expand_dims(angle, range(s.ndim))
        return jnp.concatenate([s[..., None], SQRT2 * waves], axis=-1)

    def slope(self, s: Array, coefficients: Array) -> Array:
        s = jnp.asarray(s, coefficients.dtype)
        angle = jnp.asarray(np.pi * np.arange(1, self.num_functions), s.dtype)
        waves = jnp.cos(jnp.tensordot(s, angle, 0))
        basis = jnp.concatenate([jnp.ones_like(s)[..., None], SQRT2 * waves], axis=-1)
        return jnp.einsum("...n,...nm->...m", basis, coefficients)

    def refined(self) -> "KarhunenLoeve":
        return KarhunenLoeve(2 * self.num_functions)

    @property
    def jumps(self) -> np.ndarray:
        return np.array([])


class Legendre(AbstractDriver):
    """The Legendre expansion Ḃ(t) = T^{-1/2} Σ_{k<n} ωₖ √(2k+1) Pₖ(2t/T − 1), a polynomial of degree n − 1.

    The joint distribution of the first n of the integrals B(T), ∫B dt, ∫t B dt, … is exact, so the truncation
    error of smooth linear functionals of the path decreases faster than any power of n. With additive noise
    and a nearly linear drift, a few of these functions are as accurate as dozens of functions of
    `rf.KarhunenLoeve`. The functions are largest at both ends, where |eₖ| = √(2k+1).

    ```python
    import jax
    import roughflow as rf

    path = rf.Legendre(6).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
    ```
    """

    num_functions: int = eqx.field(static=True)

    def __init__(self, num_functions: int):
        self.num_functions = check_count("num_functions", num_functions)

    def integrals(self, s: Array) -> Array:
        return integrated_polynomials(jnp.asarray(s), self.num_functions)

    def slope(self, s: Array, coefficients: Array) -> Array:
        basis = orthonormal_polynomials(jnp.asarray(s, coefficients.dtype), self.num_functions)
        return jnp.einsum("...n,...nm->...m", basis, coefficients)

    def refined(self) -> "Legendre":
        return Legendre(2 * self.num_functions)

    @property
    def jumps(self) -> np.ndarray:
        return np.array([])


def orthonormal_polynomials(s: Array, count: int) -> Array:
    """√(2k+1) Pₖ(2s − 1) for k < count, along a new last axis."""
    p = _polynomials(2 * s - 1, count)
    return jnp.stack([(2 * k + 1) ** 0.5 * p[k] for k in range(count)], axis=-1)


def integrated_polynomials(s: Array, count: int) -> Array:
    """Integrals of the orthonormal polynomials from 0 to s, by (2k + 1) Pₖ = P′ₖ₊₁ − P′ₖ₋₁."""
    p = _polynomials(2 * s - 1, count + 1)
    rest = [(p[k + 1] - p[k - 1]) / (2 * (2 * k + 1) ** 0.5) for k in range(1, count)]
    return jnp.stack([s, *rest], axis=-1)


def _polynomials(y: Array, count: int) -> list[Array]:
    """P₀(y), …, P_{count−1}(y) by (k+1) Pₖ₊₁ = (2k+1) y Pₖ − k Pₖ₋₁."""
    p = [jnp.ones_like(y), y]
    for k in range(1, count - 1):
        p.append(((2 * k + 1) * y * p[k] - k * p[k - 1]) / (k + 1))
    return p[:count]


class PiecewiseLinear(AbstractDriver):
    """A piecewise linear path, Ḃ = ωₖ/√Δₖ on the k-th interval, which is exact at the grid points.

    **Arguments:**

    - `grid`: the number n of equal intervals, or increasing times that start at 0. The times are rescaled to
      the horizon of the path.

    ```python
    import jax
    import roughflow as rf

    path = rf.PiecewiseLinear(64).sample(key=jax.random.key(0), noise_dimension=2)
    path = rf.PiecewiseLinear([0.0, 0.1, 0.3, 1.0]).sample(key=jax.random.key(0))
    ```
    """

    num_functions: int = eqx.field(static=True)
    knots: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, grid: int | Sequence[float] | np.ndarray):
        self.knots = as_knots(grid)
        self.num_functions = len(self.knots) - 1

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)[..., None]
        start, width = (jnp.expand_dims(a, range(s.ndim - 1)) for a in self._pieces(s.dtype))
        return jnp.clip((s - start) / width, 0, 1) * jnp.sqrt(width)

    def slope(self, s: Array, coefficients: Array) -> Array:
        start, width = self._pieces(coefficients.dtype)
        piece = piece_of(start, s)
        if piece.ndim == 0 or coefficients.ndim == 2:
            chosen = jnp.take(coefficients, piece, axis=-2)
        else:
            chosen = jnp.take_along_axis(coefficients, piece[..., None, None], axis=-2)[..., 0, :]
        root = jnp.sqrt(width[piece])
        return chosen / (root[..., None] if root.ndim else root)

    def refined(self) -> "PiecewiseLinear":
        return PiecewiseLinear(halved(self.knots))

    def refine(self, coefficients: Array, more: Array) -> Array:
        # Halve each interval: the mean of the two slopes is the old slope, and their difference is a new
        # coefficient.
        halves = jnp.stack([coefficients + more, coefficients - more], axis=-2) / 2**0.5
        return jnp.reshape(halves, (*more.shape[:-2], 2 * self.num_functions, more.shape[-1]))

    @property
    def jumps(self) -> np.ndarray:
        return np.asarray(self.knots[1:-1])

    def _pieces(self, dtype: np.dtype) -> tuple[Array, Array]:
        knots = np.asarray(self.knots)
        return jnp.asarray(knots[:-1], dtype), jnp.asarray(np.diff(knots), dtype)


def as_knots(grid: int | Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """0 = s₀ < … < sₙ = 1, from a number of equal intervals or from times that start at 0."""
    if is_whole(grid):
        return tuple(np.linspace(0.0, 1.0, check_count("grid", grid) + 1).tolist())
    times = np.asarray(as_real("grid", grid), float)
    rising = times.ndim == 1 and times.size > 1 and np.all(np.diff(times) > 0)
    if not rising or times[0] != 0 or not np.isfinite(times[-1]):
        raise ValueError(f"grid must be a positive number or increasing times that start at 0, got {grid}")
    return tuple((times / times[-1]).tolist())


def halved(knots: tuple[float, ...]) -> np.ndarray:
    """The knots and the midpoints between them."""
    old = np.asarray(knots)
    return np.sort(np.concatenate([old, (old[:-1] + old[1:]) / 2]))


def piece_of(start: Array, s: Array) -> Array:
    """The index of the interval that contains s, given the starts of the intervals."""
    return jnp.clip(jnp.searchsorted(start, s, side="right") - 1, 0, start.size - 1)


NUM_CELLS = 1024  # intervals of [0, 1] on which the process is discretised
NEGLIGIBLE_VARIANCE = 1e-10  # relative to the largest variance: smaller variances are treated as zero


class AbstractPolynomials(AbstractDriver):
    """A driver with Ḃ = Σⱼ aⱼ eⱼ for orthonormal polynomials eⱼ, where a = `root` ω and the coefficients ω
    are standard normal."""

    @property
    @abc.abstractmethod
    def root(self) -> np.ndarray:
        """A lower triangular matrix `(n, n)`; increasing n appends rows and columns."""

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)
        return integrated_polynomials(s, self.num_functions) @ jnp.asarray(self.root, s.dtype)

    def slope(self, s: Array, coefficients: Array) -> Array:
        s = jnp.asarray(s, coefficients.dtype)
        basis = orthonormal_polynomials(s, self.num_functions) @ jnp.asarray(self.root, s.dtype)
        return jnp.einsum("...n,...nm->...m", basis, coefficients)

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        """The coefficients ω of a path, computed from the coefficients a of the polynomials."""
        times = jnp.asarray(knots)
        means = jnp.diff(integrated_polynomials(times, self.num_functions), axis=0)
        weights = jnp.asarray(np.linalg.pinv(self.root)) @ (means / jnp.diff(times)[:, None]).T
        return jnp.einsum("nk,k...m->...nm", weights, increments)

    @property
    def jumps(self) -> np.ndarray:
        return np.array([])


class GaussianDriver(AbstractPolynomials):
    """A Gaussian process with a given covariance function on [0, 1], approximated by polynomials.

    Like `rf.Legendre` for Brownian motion, it preserves the joint distribution of the first n of B(1) − B(0),
    ∫B ds, ∫s B ds, …, whereas a truncated Karhunen–Loève expansion loses variance at the end. This joint
    distribution is computed from the process on 1024 intervals, with a relative error of about n²/1024². The
    SDE must be a Stratonovich SDE.

    **Arguments:**

    - `covariance`: the function K(s, t), which takes arrays `s` and `t` in [0, 1] that broadcast; an
      `eqx.Module` if the flow is to be saved.
    - `num_functions`: number of polynomials.
    - `hurst`: H in the scaling B(t) = Tᴴ B₁(t/T) of a path on [0, T].

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    smooth = rf.driver.GaussianDriver(lambda s, t: jnp.exp(-8 * (s - t) ** 2), 8)
    path = smooth.sample(key=jax.random.key(0), noise_dimension=2)
    ```
    """

    covariance: Callable[[Array, Array], Array] = eqx.field(static=True)
    num_functions: int = eqx.field(static=True)
    hurst: float = eqx.field(static=True)
    brownian: ClassVar[bool] = False

    def __init__(self, covariance: Callable[[Array, Array], Array], num_functions: int, hurst: float = 0.5):
        check_callable("covariance", covariance, "(s, t) -> E X(s)X(t)")
        check_positive("hurst", hurst)
        self.covariance = covariance
        self.num_functions = check_count("num_functions", num_functions)
        self.hurst = float(hurst)
        _covariance_root(covariance, self.num_functions)

    @property
    def root(self) -> np.ndarray:
        return _covariance_root(self.covariance, self.num_functions)

    def refined(self) -> "GaussianDriver":
        return GaussianDriver(self.covariance, 2 * self.num_functions, self.hurst)


@functools.lru_cache(maxsize=16)
def _covariance_root(covariance: Callable, count: int) -> np.ndarray:
    """Cholesky factor of the covariance of the coefficients, from the covariance of the increments of the
    process and the mean of each polynomial on each interval."""
    # The knots are denser at the ends, like the zeros of the polynomials.
    knots = 0.5 - 0.5 * np.cos(np.pi * np.arange(NUM_CELLS + 1) / NUM_CELLS)
    with jax.ensure_compile_time_eval():
        kernel = np.asarray(covariance(jnp.asarray(knots[:, None]), jnp.asarray(knots[None])), float)
    if kernel.shape != (NUM_CELLS + 1, NUM_CELLS + 1) or not np.allclose(kernel, kernel.T):
        raise ValueError("covariance must be a symmetric function of arrays s and t that broadcast")
    steps = np.diff(np.diff(kernel, axis=0), axis=1)
    primitives = np.polynomial.legendre.Legendre.basis
    ends = [primitives(k, [0, 1]).integ(lbnd=0)(knots) * (2 * k + 1) ** 0.5 for k in range(count)]
    means = np.diff(ends, axis=1) / np.diff(knots)
    return psd_root(means @ steps @ means.T)


def values(s: np.ndarray, count: int) -> np.ndarray:
    """√(2k+1) Pₖ(2s − 1), shape `(count, ...)`."""
    basis = np.moveaxis(np.polynomial.legendre.legvander(2 * s - 1, count - 1), -1, 0)
    return np.sqrt(2 * np.arange(count) + 1)[:, None] * basis


def derivatives(s: np.ndarray, count: int) -> np.ndarray:
    """Derivatives of `values`, by P′ₖ₊₁ = P′ₖ₋₁ + (2k + 1) Pₖ."""
    p = np.moveaxis(np.polynomial.legendre.legvander(2 * s - 1, count - 1), -1, 0)
    slopes = np.zeros_like(p)
    for k in range(1, count):
        slopes[k] = (slopes[k - 2] if k > 1 else 0) + (2 * k - 1) * p[k - 1]
    return 2 * np.sqrt(2 * np.arange(count) + 1)[:, None] * slopes


def psd_root(matrix: np.ndarray) -> np.ndarray:
    """Cholesky factor of a matrix that may be singular: columns with negligible pivots are set to zero."""
    root, threshold = np.zeros_like(matrix), NEGLIGIBLE_VARIANCE * np.max(np.abs(np.diag(matrix)))
    for k in range(len(matrix)):
        column = matrix[k:, k] - root[k:, :k] @ root[k, :k]
        if column[0] < -1e3 * threshold:
            raise ValueError("covariance must be positive semi-definite")
        if column[0] > threshold:
            root[k:, k] = column / np.sqrt(column[0])
    return root
