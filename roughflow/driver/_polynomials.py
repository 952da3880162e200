"""Gaussian processes in Legendre polynomials."""

import abc
import functools
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_callable, check_count, check_positive
from ._driver import AbstractDriver
from ._legendre import integrated_polynomials, orthonormal_polynomials

CELLS = 1024  # of [0, 1], on which a process is read
NOTHING = 1e-10  # of the largest variance: what is left below counts as none


class AbstractPolynomials(AbstractDriver):
    """Ḃ = Σⱼ aⱼ eⱼ in orthonormal polynomials eⱼ, with a = `root` ω for standard normal coefficients ω."""

    @property
    @abc.abstractmethod
    def root(self) -> np.ndarray:
        """A lower triangular matrix `(n, n)`: more polynomials add rows and columns to it."""

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)
        return integrated_polynomials(s, self.num_functions) @ jnp.asarray(self.root, s.dtype)

    def slope(self, s: Array, coefficients: Array) -> Array:
        s = jnp.asarray(s, coefficients.dtype)
        basis = orthonormal_polynomials(s, self.num_functions) @ jnp.asarray(self.root, s.dtype)
        return jnp.einsum("...n,...nm->...m", basis, coefficients)

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        """From those of the polynomials."""
        places = jnp.asarray(knots)
        means = jnp.diff(integrated_polynomials(places, self.num_functions), axis=0)
        weights = jnp.asarray(np.linalg.pinv(self.root)) @ (means / jnp.diff(places)[:, None]).T
        return jnp.einsum("nk,k...m->...nm", weights, increments)

    @property
    def jumps(self) -> np.ndarray:
        return np.array([])


class GaussianDriver(AbstractPolynomials):
    """Any Gaussian process with a given covariance function on [0, 1], in Legendre polynomials: smooth.

    Like `rf.Legendre` for Brownian motion it keeps the joint distribution of B(1) − B(0), ∫B ds, ∫s B ds, …
    up to n of them, in contrast to a truncated Karhunen–Loève expansion, which loses variance at the end.
    They are computed from the process on 1024 intervals, which is right to about n²/1024² of their variance.
    An SDE it drives must be a Stratonovich one: it has no Itô form.

    **Arguments:**

    - `covariance`: K(s, t) for arrays `s` and `t` in [0, 1] that broadcast; an `eqx.Module` if the flow is
      to be saved.
    - `num_functions`: how many polynomials.
    - `hurst`: a path on [0, T] is this power of T times one on [0, 1], at t/T.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    smooth = rf.GaussianDriver(lambda s, t: jnp.exp(-8 * (s - t) ** 2), 8)
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
    """Of the covariance of the process's increments against the polynomials' means between them."""
    knots = 0.5 - 0.5 * np.cos(np.pi * np.arange(CELLS + 1) / CELLS)  # closer at the ends, as their zeros are
    with jax.ensure_compile_time_eval():
        kernel = np.asarray(covariance(jnp.asarray(knots[:, None]), jnp.asarray(knots[None])), float)
    if kernel.shape != (CELLS + 1, CELLS + 1) or not np.allclose(kernel, kernel.T):
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
    """Those of `values`, by P′ₖ₊₁ = P′ₖ₋₁ + (2k + 1) Pₖ."""
    p = np.moveaxis(np.polynomial.legendre.legvander(2 * s - 1, count - 1), -1, 0)
    slopes = np.zeros_like(p)
    for k in range(1, count):
        slopes[k] = (slopes[k - 2] if k > 1 else 0) + (2 * k - 1) * p[k - 1]
    return 2 * np.sqrt(2 * np.arange(count) + 1)[:, None] * slopes


def psd_root(matrix: np.ndarray) -> np.ndarray:
    """Cholesky's factor of a matrix that may be singular: what has no variance left gets a zero."""
    root, least = np.zeros_like(matrix), NOTHING * np.max(np.abs(np.diag(matrix)))
    for k in range(len(matrix)):
        column = matrix[k:, k] - root[k:, :k] @ root[k, :k]
        if column[0] < -1e3 * least:
            raise ValueError("covariance must be positive semi-definite, and is not")
        if column[0] > least:
            root[k:, k] = column / np.sqrt(column[0])
    return root
