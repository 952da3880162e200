"""Fractional Brownian motion on a grid and as a polynomial, and its increments."""

import functools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_shape, check_count, check_key, check_memory, check_number, check_positive
from .._programs import jit
from ._driver import AbstractDriver
from ._expansions import AbstractPolynomials, as_knots, derivatives, halved, piece_of, psd_root, values


class FractionalBrownian(AbstractDriver):
    """Fractional Brownian motion with Hurst exponent H: exact at the points of a grid, linear between them.

    E B(s)B(t) = ½(s²ᴴ + t²ᴴ − |t − s|²ᴴ), and B(t) = Tᴴ B₁(t/T). The coefficients are independent standard
    normals; the Cholesky factor of the covariance of the increments maps them to increments. For a path of n
    intervals, one evaluation of the slope takes O(n) operations, and the driver takes O(n²) memory. To
    simulate thousands of steps without densities, use `rf.driver.fractional_noise`.

    H lies in (0, 1). The SDE must be a Stratonovich SDE unless H = ½. State-dependent multidimensional noise
    requires H > ⅓: for smaller H, a path and its Lévy areas do not determine the solution.

    **Arguments:**

    - `hurst`: H; for H = ½ the driver is equivalent to `rf.PiecewiseLinear`.
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
        # The increments of the two halves add up to the old increment; the component orthogonal to this sum
        # is new.
        old, new = (jnp.asarray(a, more.dtype) for a in _refinement(self.hurst, self.knots))
        both = (jnp.einsum("kn,...nm->...km", a, b) for a, b in ((old, coefficients), (new, more)))
        return sum(both, jnp.zeros((), more.dtype))

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        """The coefficients of a path, computed from its values on the driver's grid."""
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
    """A smooth approximation of fractional Brownian motion with Hurst exponent H by Legendre polynomials.

    Ḃ = Tᴴ⁻¹ Σ_{k<n} aₖ √(2k+1) Pₖ(2t/T − 1). The coefficients a have the covariance of the Legendre
    coefficients of fractional Brownian motion; a triangular matrix maps independent standard normals to a.
    The joint distribution of the first n of the integrals B(T), ∫B dt, ∫t B dt, … is exact. For H = ½ this
    driver is `rf.Legendre`. With additive noise a few functions suffice. The same restrictions on SDEs apply
    as for `rf.FractionalBrownian`.

    ```python
    import jax
    import roughflow as rf

    path = rf.driver.FractionalLegendre(0.7, 8).sample(key=jax.random.key(0), noise_dimension=2, t1=2.0)
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
    """Covariance of the increments of fractional Brownian motion between the knots, `(n, n)`."""
    gap = np.abs(knots[:, None] - knots) ** (2 * hurst)
    return 0.5 * (gap[1:, :-1] + gap[:-1, 1:] - gap[1:, 1:] - gap[:-1, :-1])


@functools.lru_cache(maxsize=16)
def _root(hurst: float, knots: tuple[float, ...]) -> np.ndarray:
    return np.linalg.cholesky(increment_covariance(hurst, np.asarray(knots)))


@functools.lru_cache(maxsize=4)
def _refinement(hurst: float, knots: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Two orthogonal maps `(2n, n)`, from the old and from the new coefficients to the coefficients on halved
    intervals."""
    fine = _root(hurst, tuple(halved(knots).tolist()))
    old = np.linalg.solve(_root(hurst, knots), fine[::2] + fine[1::2]).T
    return old, np.linalg.qr(old, mode="complete")[0][:, len(knots) - 1 :]


@functools.lru_cache(maxsize=16)
def _moments_root(hurst: float, count: int) -> np.ndarray:
    """Cholesky factor of the covariance of ∫eⱼ dB for orthonormal polynomials eⱼ. The covariance is −H ∫₀¹
    u²ᴴ⁻¹ S′(u) du, where S is the sum of both cross-correlations of eⱼ and eₖ. The quadrature is exact up to
    rounding."""
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


CHUNK = 2**21  # number of complex numbers per batch of Fourier transforms, which fits in the cache


def fractional_noise(
    hurst: float, steps: int, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), t1: float = 1.0
) -> Array:
    """Increments of fractional Brownian motion over `steps` equal steps of [0, t1], `(*shape, steps)`.

    The increments are exact and take O(n log n) operations, by circulant embedding (Davies & Harte 1987; Wood
    & Chan 1994). A path of n steps depends on 2n normal variables, so its log-density is not available; for
    densities, use `rf.FractionalBrownian`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    noise = rf.driver.fractional_noise(0.4, 1024, key=jax.random.key(0), shape=(100,))
    paths = jnp.cumsum(noise, axis=-1)
    ```
    """
    check_positive("t1", t1)
    count, hurst = check_count("steps", steps), check_hurst(hurst)
    check_memory(f"steps={steps}", count)
    as_shape(shape, count)
    k = np.arange(count + 1.0)
    power = lambda lag: np.abs(lag) ** (2 * hurst)
    autocovariance = 0.5 * (power(k + 1) + power(k - 1)) - power(k)
    return (t1 / steps) ** hurst * stationary_noise(autocovariance, key=key, shape=shape)


def stationary_noise(autocovariance: np.ndarray, *, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Draw sequences `(*shape, n)` with the autocovariance γ₀, …, γₙ, shape `(n + 1,)`."""
    spectrum = np.fft.rfft(np.concatenate([autocovariance, autocovariance[-2:0:-1]])).real
    if spectrum.min() < -1e-8 * spectrum.max():
        raise ValueError("the circulant embedding of this autocovariance is not positive semi-definite")
    full = np.concatenate([spectrum, spectrum[-2:0:-1]])
    weights = jnp.asarray(np.sqrt(np.maximum(full, 0) / full.size), float)
    count, length = math.prod(as_shape(shape)), full.size
    size = max(1, min(-(-count // 2), CHUNK // length))
    chunks = -(-count // (2 * size))
    pairs = _drawn(weights, jax.random.split(check_key(key), max(chunks, 1)), size)
    return jnp.reshape(pairs, (-1, length // 2))[:count].reshape(*as_shape(shape), length // 2)


@jit
def _drawn(weights: Array, keys: Array, size: int) -> Array:
    """Draw sequences, two per Fourier transform: its real and its imaginary part."""

    def chunk(key: PRNGKeyArray) -> Array:
        parts = jax.random.normal(key, (2, size, weights.size), weights.dtype) * weights[None, None]
        whole = jnp.fft.fft(jax.lax.complex(parts[0], parts[1]))[:, : weights.size // 2]
        return jnp.stack([whole.real, whole.imag])

    return jax.lax.map(chunk, keys)
