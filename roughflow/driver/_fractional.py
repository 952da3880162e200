"""Fractional Brownian motion: on a grid, and as polynomials."""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array

from .._checks import check_count, check_number
from ._driver import AbstractDriver
from ._piecewise_linear import as_knots, halved, piece_of
from ._polynomials import AbstractPolynomials, derivatives, psd_root, values


class FractionalBrownian(AbstractDriver):
    """Fractional Brownian motion of Hurst exponent H on a grid: exact there, linear between.

    E B(s)B(t) = ½(s²ᴴ + t²ᴴ − |t − s|²ᴴ), and B(t) = Tᴴ B₁(t/T). The coefficients are independent standard
    normals; the increments are the Cholesky factor of their covariance times these. A flow takes O(n) for
    each slope of a path of n intervals and O(n²) memory: for paths of thousands of steps, without densities,
    there is `rf.fractional_noise`.

    H may be anything in (0, 1). The SDE must be a Stratonovich one unless H = ½, and for several noises that
    depend on the state H must be above ⅓: below, a path and its areas do not determine the solution.

    **Arguments:**

    - `hurst`: H; ½ is `rf.PiecewiseLinear`.
    - `grid`: the number n of equal intervals, or increasing times that start at 0.

    ```python
    import jax
    import roughflow as rf

    path = rf.FractionalBrownian(0.4, 64).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
    ```
    """

    hurst: float = eqx.field(static=True)
    num_functions: int = eqx.field(static=True)
    knots: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, hurst: float, grid: int | Sequence[float] | np.ndarray):
        self.hurst = check_hurst(hurst)
        self.knots = as_knots(grid)
        self.num_functions = len(self.knots) - 1

    @property
    def brownian(self) -> bool:
        return self.hurst == 0.5

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)[..., None]
        start, width = (jnp.expand_dims(a, range(s.ndim - 1)) for a in self._pieces(s.dtype))
        return jnp.clip((s - start) / width, 0, 1) @ self._root(s.dtype)

    def slope(self, s: Array, coefficients: Array) -> Array:
        start, width = self._pieces(coefficients.dtype)
        piece = piece_of(start, s)
        rows = self._root(coefficients.dtype)[piece] / width[piece][..., None]
        return jnp.einsum("...n,...nm->...m", rows, coefficients)

    def refined(self) -> "FractionalBrownian":
        return FractionalBrownian(self.hurst, halved(self.knots))

    def refine(self, coefficients: Array, more: Array) -> Array:
        # What the halves add up to is the old path; what is orthogonal to that is new.
        old, new = (jnp.asarray(a, more.dtype) for a in _refinement(self.hurst, self.knots))
        both = (jnp.einsum("kn,...nm->...km", a, b) for a, b in ((old, coefficients), (new, more)))
        return sum(both, jnp.zeros((), more.dtype))

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        """From the values on the driver's own grid."""
        own = np.asarray(self.knots)
        share = np.clip((own[1:, None] - knots[:-1]) / np.diff(knots), 0, 1)
        weights = np.linalg.solve(_root(self.hurst, self.knots), np.diff(share, axis=0, prepend=0.0))
        return jnp.einsum("nk,k...m->...nm", jnp.asarray(weights), increments)

    @property
    def jumps(self) -> np.ndarray:
        return np.asarray(self.knots[1:-1])

    def _root(self, dtype: np.dtype) -> Array:
        return jnp.asarray(_root(self.hurst, self.knots), dtype)

    def _pieces(self, dtype: np.dtype) -> tuple[Array, Array]:
        knots = np.asarray(self.knots)
        return jnp.asarray(knots[:-1], dtype), jnp.asarray(np.diff(knots), dtype)


class FractionalLegendre(AbstractPolynomials):
    """Fractional Brownian motion of Hurst exponent H in Legendre polynomials: smooth.

    Ḃ = Tᴴ⁻¹ Σ_{k<n} aₖ √(2k+1) Pₖ(2t/T − 1), with coefficients a that have the covariance of those of
    fractional Brownian motion itself; independent standard normals are mapped to them by a triangular matrix.
    So it keeps the exact joint distribution of B(T), ∫B dt, ∫t B dt, … up to n of them, and for H = ½ it is
    `rf.Legendre`. With additive noise a few functions suffice. What SDEs it is for: see
    `rf.FractionalBrownian`.

    ```python
    import jax
    import roughflow as rf

    path = rf.FractionalLegendre(0.7, 8).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
    ```
    """

    hurst: float = eqx.field(static=True)
    num_functions: int = eqx.field(static=True)

    def __init__(self, hurst: float, num_functions: int):
        self.hurst = check_hurst(hurst)
        self.num_functions = check_count("num_functions", num_functions)

    @property
    def brownian(self) -> bool:
        return self.hurst == 0.5

    @property
    def root(self) -> np.ndarray:
        return _moments_root(self.hurst, self.num_functions)

    def refined(self) -> "FractionalLegendre":
        return FractionalLegendre(self.hurst, 2 * self.num_functions)


def check_hurst(hurst: float) -> float:
    check_number("hurst", hurst, above=0, below=1)
    return float(hurst)


def increment_covariance(hurst: float, knots: np.ndarray) -> np.ndarray:
    """Of fractional Brownian motion between the knots, `(n, n)`."""
    gap = np.abs(knots[:, None] - knots) ** (2 * hurst)
    return 0.5 * (gap[1:, :-1] + gap[:-1, 1:] - gap[1:, 1:] - gap[:-1, :-1])


@functools.lru_cache(maxsize=16)
def _root(hurst: float, knots: tuple[float, ...]) -> np.ndarray:
    return np.linalg.cholesky(increment_covariance(hurst, np.asarray(knots)))


@functools.lru_cache(maxsize=4)
def _refinement(hurst: float, knots: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients on halved intervals as an orthogonal map `(2n, n)` of the old, and of new ones."""
    fine = _root(hurst, tuple(halved(knots).tolist()))
    old = np.linalg.solve(_root(hurst, knots), fine[::2] + fine[1::2]).T
    return old, np.linalg.qr(old, mode="complete")[0][:, len(knots) - 1 :]


@functools.lru_cache(maxsize=16)
def _moments_root(hurst: float, count: int) -> np.ndarray:
    """Of the covariance of ∫eⱼ dB, the eⱼ orthonormal polynomials: with S the sum of both cross-correlations
    of eⱼ and eₖ it is −H ∫₀¹ u²ᴴ⁻¹ S′(u) du, by quadrature exact but for rounding."""
    jacobi, jacobi_weights = scipy.special.roots_jacobi(count + 1, 0.0, 2 * hurst - 1)
    lags, lag_weights = (jacobi + 1) / 2, jacobi_weights / 2 ** (2 * hurst)
    nodes, weights = np.polynomial.legendre.leggauss(count + 1)
    gram = np.zeros((count, count))
    for u, weight in zip(lags, lag_weights, strict=True):
        s = u + (1 - u) * (nodes + 1) / 2
        inner = (values(s, count) * (weights * (1 - u) / 2)) @ derivatives(s - u, count).T
        slope = -np.outer(values(np.array([u]), count), values(np.zeros(1), count)) - inner
        gram -= hurst * weight * (slope + slope.T)
    return psd_root(gram)
