"""Drivers: distributions over smooth random paths that approximate Brownian motion, and single paths.

A Brownian driver is an orthonormal family e₀, …, e_{n−1} of L²[0, 1] with independent standard normal
coefficients ω. It approximates white noise on the horizon [0, T] by

    Ḃ(t) = T^{-1/2} Σₖ ωₖ eₖ(t/T),      B(t) = T^{1/2} Σₖ ωₖ ∫₀^{t/T} eₖ.

The coefficients of a given Brownian path are its projections ωₖ = T^{-1/2} ∫ eₖ(t/T) dB(t).

Drivers of other Gaussian processes have functions eₖ that are not orthonormal, and their paths may scale with
another power of T.
"""

import abc
from typing import ClassVar, Self

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._checks import (
    as_real,
    as_shape,
    check_count,
    check_fields,
    check_instance,
    check_key,
    check_positive,
)


class AbstractDriver(eqx.Module):
    """The distribution of a random path. Inside a driver, time runs over [0, 1]; a path has its own horizon
    [0, T].

    A new driver defines the number of its functions, their integrals, the slope of a path, and where the
    slope jumps. A driver that does not approximate Brownian motion also sets `brownian` to False and defines
    `hurst`, the scaling of its paths with the horizon, and `coefficients_of`, the coefficients of a given
    path:

    ```python
    import equinox as eqx, jax.numpy as jnp, numpy as np
    import roughflow as rf

    class Straight(rf.driver.AbstractDriver):
        num_functions: int = eqx.field(static=True, default=1)

        def integrals(self, s):
            return jnp.asarray(s)[..., None]

        def slope(self, s, coefficients):
            return coefficients[..., 0, :]

        @property
        def jumps(self):
            return np.array([])
    ```
    """

    num_functions: eqx.AbstractVar[int]
    # H in B(t) = Tᴴ B₁(t/T), the scaling of a path on [0, T]; ½ for Brownian motion.
    hurst: ClassVar[float] = 0.5
    # Whether the driver approximates Brownian motion with independent components, as Itô SDEs require.
    brownian: ClassVar[bool] = True

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def integrals(self, s: Array) -> Array:
        """∫₀ˢ eₖ for every k, shape `(..., n)` for `s` of shape `(...)`."""

    @abc.abstractmethod
    def slope(self, s: Array, coefficients: Array) -> Array:
        """Σₖ ωₖ eₖ(s), shape `(..., m)`; `s` is a scalar or has the batch shape of the coefficients."""

    @property
    @abc.abstractmethod
    def jumps(self) -> np.ndarray:
        """The increasing times strictly inside (0, 1) where the slope jumps."""

    def value(self, s: Array, coefficients: Array) -> Array:
        """Σₖ ωₖ ∫₀ˢ eₖ, shape `(..., m)`; `s` is a scalar or has the batch shape of the coefficients."""
        return jnp.einsum("...n,...nm->...m", self.integrals(s), coefficients)

    def path(self, coefficients: Array, t1: float | Array = 1.0) -> "Path":
        """The path with given coefficients, shape `(..., n, m)`, on [0, t1]."""
        return Path(self, coefficients, t1)

    def sample(
        self,
        *,
        key: PRNGKeyArray,
        noise_dimension: int = 1,
        shape: tuple[int, ...] = (),
        t1: float | Array = 1.0,
    ) -> "Path":
        """Draw independent paths of batch shape `shape`, each with `noise_dimension` components."""
        check_count("noise_dimension", noise_dimension, least=0)
        size = (*as_shape(shape, self.num_functions * noise_dimension), self.num_functions, noise_dimension)
        return Path(self, jax.random.normal(check_key(key), size), t1)

    def refined(self) -> "AbstractDriver":
        """This driver with twice as many functions, to measure the truncation error."""
        raise NotImplementedError(f"{type(self).__name__} does not define refined()")

    def refine(self, coefficients: Array, more: Array) -> Array:
        """Coefficients `(..., 2n, m)` of a path of the driver `refined()` whose projection on this
        driver has the given coefficients.

        `more` has the shape `(..., n, m)` of `coefficients` and contains new standard normal coefficients.
        This default is for drivers whose refinement only adds functions.
        """
        return jnp.concatenate([coefficients, more], axis=-2)

    def log_prob(self, coefficients: Array) -> Array:
        """Log-density of coefficients of shape `(..., n, m)`: independent standard normals."""
        return jnp.sum(jax.scipy.stats.norm.logpdf(coefficients), axis=(-2, -1))

    def project(self, path: diffrax.AbstractPath, *, resolution: int = 4096) -> "Path":
        """The projection of a given path onto the functions of this driver.

        For Brownian motion, the coefficients are ωₖ = T^{-1/2} ∫ eₖ(t/T) dB(t), where the given path is
        interpolated linearly on `resolution` intervals. This is exact for a `PiecewiseLinear` path and has
        error O(1/resolution²) for a smooth one. Projecting the same fine path onto more functions couples
        drivers of different sizes.
        """
        check_instance("path", path, diffrax.AbstractPath, "a diffrax path, or a path of a driver")
        check_count("resolution", resolution)
        knots = np.union1d(np.linspace(0.0, 1.0, resolution + 1), self.jumps)
        if isinstance(path, Path):
            knots = np.union1d(knots, path.driver.jumps)
        start = jnp.asarray(path.t0, float)
        horizon = jnp.asarray(path.t1, float) - start
        values = jax.vmap(lambda s: path.evaluate(start + s * horizon))(jnp.asarray(knots))
        scale = power(horizon, self.hurst)
        increments = jnp.diff(values, axis=0) / (scale[None, ..., None] if scale.ndim else scale)
        return Path(self, self.coefficients_of(knots, increments), horizon)

    def coefficients_of(self, knots: np.ndarray, increments: Array) -> Array:
        """The coefficients `(..., n, m)` of a path on [0, 1] with increments `(N, ..., m)` between the knots
        `(N + 1,)`, which include the jumps of the driver."""
        weights = jnp.diff(self.integrals(jnp.asarray(knots)), axis=0) / jnp.asarray(np.diff(knots))[:, None]
        return jnp.einsum("kn,k...m->...nm", weights, increments)


def power(horizon: Array, exponent: float) -> Array:
    """Tᴴ."""
    return jnp.sqrt(horizon) if exponent == 0.5 else horizon**exponent


class Path(diffrax.AbstractPath):
    """A path of a driver, or a batch of paths: coefficients `(..., n, m)` on the horizon [0, t1].

    `t1` is a number, or an array of the batch shape if horizons differ. A path is a `diffrax.AbstractPath`,
    so diffrax solvers accept it as a control.

    ```python
    import jax
    import roughflow as rf

    path = rf.KarhunenLoeve(6).sample(key=jax.random.key(0), noise_dimension=2)
    path.evaluate(0.5), path.derivative(0.5)  # both of shape (2,)
    ```
    """

    driver: AbstractDriver
    coefficients: Array
    t1: Array
    t0: Array

    def __init__(self, driver: AbstractDriver, coefficients: Array, t1: float | Array = 1.0):
        check_instance("driver", driver, AbstractDriver, "a driver such as rf.KarhunenLoeve(6)")
        check_positive("t1", t1)
        coefficients = as_real("path coefficients", coefficients)
        shape = jnp.shape(coefficients)
        if len(shape) < 2 or shape[-2] != driver.num_functions:
            raise ValueError(
                f"path coefficients must have shape (..., {driver.num_functions}, m) "
                f"to match the driver, got {shape}"
            )
        self.driver = driver
        self.coefficients = jnp.asarray(coefficients)
        self.t1 = jnp.asarray(t1, self.coefficients.dtype)
        if self.t1.ndim and self.t1.shape != shape[:-2]:
            raise ValueError(f"t1 must be a number or have shape {shape[:-2]}, got {self.t1.shape}")
        self.t0 = jnp.zeros_like(self.t1)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.coefficients.shape[:-2]

    @property
    def noise_dimension(self) -> int:
        return self.coefficients.shape[-1]

    def evaluate(self, t0: ArrayLike, t1: ArrayLike | None = None, left: bool = True) -> Array:
        """B(t0), shape `(..., m)`; if `t1` is given, the increment B(t1) − B(t0)."""
        if t1 is not None:
            return self.evaluate(t1, left=left) - self.evaluate(t0, left=left)
        value = self.driver.value(jnp.asarray(t0) / self.t1, self.coefficients)
        return self._column(power(self.t1, self.driver.hurst)) * value

    def derivative(self, t: ArrayLike, left: bool = True) -> Array:
        """Ḃ(t), shape `(..., m)`; at a jump the limit from the left or the right."""
        s = jnp.asarray(t, self.t1.dtype) / self.t1
        if self.driver.jumps.size:
            # The offset is larger than the rounding error of t / T.
            s = s + (-8 if left else 8) * jnp.finfo(s.dtype).eps
        return self.unit_slope(s) / self._column(self.t1)

    def unit_slope(self, s: Array) -> Array:
        """dB/ds for s = t/T: √T Σₖ ωₖ eₖ(s); for other processes Tᴴ replaces √T."""
        return self._column(power(self.t1, self.driver.hurst)) * self.driver.slope(s, self.coefficients)

    def _column(self, scale: Array) -> Array:
        return scale[..., None] if scale.ndim else scale

    def reshape(self, batch: tuple[int, ...], flat: int) -> Self:
        """Broadcast the batch shape to `batch` and flatten it to one axis; a single path stays unbatched."""
        if self.batch_shape == ():
            return self
        tail = self.coefficients.shape[-2:]
        coefficients = jnp.broadcast_to(self.coefficients, (*batch, *tail))
        t1 = self.t1
        if t1.ndim:
            t1 = jnp.reshape(jnp.broadcast_to(t1, batch), (flat,))
        return type(self)(self.driver, jnp.reshape(coefficients, (flat, *tail)), t1)
