"""SDEs whose transitions are normal, or lognormal."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._linear import log_abs_det, solve
from .._coordinates import Logarithm, Unchanged
from .._parameters import ANY, POSITIVE, TRIANGULAR
from ._named import AbstractNamedSDE, parameter


class BrownianMotion(AbstractNamedSDE):
    """dX = μ dt + σ dB.

    ```python
    import roughflow as rf

    sde = rf.BrownianMotion(mu=0.1, sigma=0.5)
    ```
    """

    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"mu": ANY, "sigma": POSITIVE}

    @property
    def coordinates(self) -> Unchanged:
        return Unchanged()

    def drift(self, t: Array, z: Array) -> Array:
        return jnp.broadcast_to(self.mu, z.shape)

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.broadcast_to(self.sigma, (1, 1))

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> Array:
        return jax.scipy.stats.norm.logpdf(x1 - x0, self.mu * dt, self.sigma * jnp.sqrt(dt))[0]


class GeometricBrownianMotion(AbstractNamedSDE):
    """dX = μX dt + σX dB, X > 0 (Black & Scholes 1973).

    ```python
    import roughflow as rf

    sde = rf.GeometricBrownianMotion(mu=0.05, sigma=0.2)
    ```
    """

    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"mu": ANY, "sigma": POSITIVE}

    @property
    def coordinates(self) -> Logarithm:
        return Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return self.mu * z

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * z[:, None]

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> Array:
        mean = jnp.log(x0) + (self.mu - 0.5 * self.sigma**2) * dt
        y = jnp.log(x1)
        return (jax.scipy.stats.norm.logpdf(y, mean, self.sigma * jnp.sqrt(dt)) - y)[0]


class OrnsteinUhlenbeck(AbstractNamedSDE):
    """dX = κ(μ − X) dt + σ dB; in finance Vasicek's model (1977).

    In one dimension three numbers. In d dimensions κ is a matrix, μ a vector and σ a lower triangular matrix
    with a positive diagonal, what is above it being ignored: of σ only σσᵀ can be known.

    ```python
    import roughflow as rf

    rate = rf.OrnsteinUhlenbeck(kappa=0.3, mu=0.07, sigma=0.02)
    plane = rf.OrnsteinUhlenbeck([[1.0, 0.2], [0.0, 0.5]], [0.0, 0.0], [[0.3, 0.0], [0.1, 0.2]])
    ```
    """

    kappa: Array = eqx.field(converter=parameter)
    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    domains: ClassVar = {"kappa": ANY, "mu": ANY, "sigma": TRIANGULAR}

    def __check_init__(self):
        d = self.mu.shape
        if len(d) > 1 or not self.kappa.shape == self.sigma.shape == (*d, *d):
            raise ValueError(
                "kappa, mu and sigma must be three numbers, or have shapes (d, d), (d,) and (d, d); got "
                f"{self.kappa.shape}, {self.mu.shape} and {self.sigma.shape}"
            )

    @property
    def dimension(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mu.size

    @property
    def coordinates(self) -> Unchanged:
        return Unchanged()

    def _matrices(self) -> tuple[Array, Array, Array]:
        if self.mu.ndim:
            return self.kappa, self.mu, jnp.tril(self.sigma)
        return self.kappa[None, None], self.mu[None], self.sigma[None, None]

    def drift(self, t: Array, z: Array) -> Array:
        kappa, mu, _ = self._matrices()
        return kappa @ (mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self._matrices()[2]

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> Array:
        if not self.mu.ndim:
            mean = self.mu + (x0[0] - self.mu) * jnp.exp(-self.kappa * dt)
            variance = self.sigma**2 * dt * _decayed(2 * self.kappa * dt)
            return jax.scipy.stats.norm.logpdf(x1[0], mean, jnp.sqrt(variance))
        kappa, mu, sigma = self._matrices()
        d = mu.size
        # Van Loan (1978): both e^{−κ dt} and the covariance from one exponential.
        block = jnp.block([[kappa, sigma @ sigma.T], [jnp.zeros((d, d)), -kappa.T]])
        power = jax.scipy.linalg.expm(block * dt)
        grow = power[d:, d:].T
        covariance = grow @ power[:d, d:]
        gap = x1 - mu - grow @ (x0 - mu)
        square = gap @ solve(covariance[None], gap[None, :, None])[0, :, 0]
        return -0.5 * (square + log_abs_det(covariance[None])[0] + d * jnp.log(2 * jnp.pi))


def _decayed(x: Array) -> Array:
    """(1 − e⁻ˣ)/x, the mean of e⁻ˢ over 0 < s < x, with its derivatives at zero too."""
    small = jnp.abs(x) < 0.01
    far = jnp.where(small, 1, x)
    near = jnp.polyval(jnp.array([-1 / 720, 1 / 120, -1 / 24, 1 / 6, -1 / 2, 1], x.dtype), x)
    return jnp.where(small, near, -jnp.expm1(-far) / far)
