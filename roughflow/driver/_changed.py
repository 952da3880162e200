"""Drivers made of others: with another clock, or with correlated components."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array

from .._checks import as_real, check_callable, check_instance
from ._driver import AbstractDriver


class TimeChanged(AbstractDriver):
    """B(τ(s)) for a driver B and a clock τ: [0, 1] → [0, 1], smooth and increasing.

    An SDE it drives must be a Stratonovich one. For Brownian motion √τ′ in the diffusion says the same.

    **Arguments:**

    - `driver`: any.
    - `clock`: τ for arrays, with τ(0) = 0 and τ(1) = 1; an `eqx.Module` if the flow is to be saved.

    ```python
    import jax
    import roughflow as rf

    late = rf.TimeChanged(rf.FractionalBrownian(0.4, 16), lambda s: s**2)
    path = late.sample(key=jax.random.key(0))
    ```
    """

    driver: AbstractDriver
    clock: Callable[[Array], Array] = eqx.field(static=True)
    brownian: ClassVar[bool] = False

    def __init__(self, driver: AbstractDriver, clock: Callable[[Array], Array]):
        check_instance("driver", driver, AbstractDriver, "a driver such as rf.KarhunenLoeve(6)")
        check_callable("clock", clock, "from times to times")
        with jax.ensure_compile_time_eval():
            times = np.asarray(clock(jnp.linspace(0.0, 1.0, 65)), float)
        if not (np.all(np.diff(times) > 0) and np.allclose(times[[0, -1]], [0, 1], atol=1e-6)):
            raise ValueError("clock must increase from 0 at 0 to 1 at 1, for arrays of times")
        self.driver = driver
        self.clock = clock

    @property
    def num_functions(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.driver.num_functions

    @property
    def num_components(self) -> int | None:
        return self.driver.num_components

    @property
    def hurst(self) -> float:
        return self.driver.hurst

    def integrals(self, s: Array) -> Array:
        return self.driver.integrals(self.clock(jnp.asarray(s)))

    def value(self, s: Array, coefficients: Array) -> Array:
        return self.driver.value(self.clock(jnp.asarray(s)), coefficients)

    def slope(self, s: Array, coefficients: Array) -> Array:
        s = jnp.asarray(s, coefficients.dtype)
        time, speed = jax.jvp(self.clock, (s,), (jnp.ones_like(s),))
        return self.driver.slope(time, coefficients) * (speed[..., None] if speed.ndim else speed)

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        with jax.ensure_compile_time_eval():
            times = np.asarray(self.clock(jnp.asarray(knots)), float)
        return self.driver.coefficients_of(times, increments)

    def refined(self) -> "TimeChanged":
        return TimeChanged(self.driver.refined(), self.clock)

    def refine(self, coefficients: Array, more: Array) -> Array:
        return self.driver.refine(coefficients, more)

    @property
    def jumps(self) -> np.ndarray:
        gap = lambda s, jump: float(self.clock(jnp.asarray(s))) - jump
        with jax.ensure_compile_time_eval():
            found = [
                scipy.optimize.brentq(gap, 0.0, 1.0, args=(jump,), xtol=1e-15) for jump in self.driver.jumps
            ]
        return np.array(found, float)


class Correlated(AbstractDriver):
    """A driver whose components are correlated: B = R W, with R Rᵀ the correlation and W independent.

    An SDE it drives must be a Stratonovich one; σ R as the diffusion says the same, in either calculus.

    **Arguments:**

    - `driver`: any.
    - `correlation`: a positive definite matrix `(m, m)`, not necessarily with ones on its diagonal.

    ```python
    import jax
    import roughflow as rf

    driver = rf.Correlated(rf.FractionalLegendre(0.4, 8), [[1.0, -0.7], [-0.7, 1.0]])
    path = driver.sample(key=jax.random.key(0), noise_dimension=2)
    ```
    """

    driver: AbstractDriver
    correlation: tuple[tuple[float, ...], ...] = eqx.field(static=True)
    brownian: ClassVar[bool] = False

    def __init__(self, driver: AbstractDriver, correlation):
        check_instance("driver", driver, AbstractDriver, "a driver such as rf.KarhunenLoeve(6)")
        matrix = np.asarray(as_real("correlation", correlation), float)
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
        if not square or not np.allclose(matrix, matrix.T) or np.linalg.eigvalsh(matrix)[0] <= 0:
            raise ValueError(f"correlation must be a positive definite matrix, got {correlation}")
        self.driver = driver
        self.correlation = tuple(map(tuple, matrix.tolist()))

    @property
    def num_functions(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.driver.num_functions

    @property
    def num_components(self) -> int:
        return len(self.correlation)

    @property
    def hurst(self) -> float:
        return self.driver.hurst

    def integrals(self, s: Array) -> Array:
        """Of each independent component."""
        return self.driver.integrals(s)

    def value(self, s: Array, coefficients: Array) -> Array:
        return self.driver.value(s, coefficients) @ self._root(coefficients.dtype).T

    def slope(self, s: Array, coefficients: Array) -> Array:
        return self.driver.slope(s, coefficients) @ self._root(coefficients.dtype).T

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        inverse = jnp.asarray(np.linalg.inv(np.linalg.cholesky(self.correlation)), increments.dtype)
        return self.driver.coefficients_of(knots, increments @ inverse.T)

    def refined(self) -> "Correlated":
        return Correlated(self.driver.refined(), self.correlation)

    def refine(self, coefficients: Array, more: Array) -> Array:
        return self.driver.refine(coefficients, more)

    @property
    def jumps(self) -> np.ndarray:
        return self.driver.jumps

    def _root(self, dtype: np.dtype) -> Array:
        return jnp.asarray(np.linalg.cholesky(self.correlation), dtype)
