"""SDEs whose transitions are normal, or lognormal."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...transition import Logarithm, Unchanged
from .._linear_sde import decayed, linear_moments
from .._parameters import ANY, POSITIVE, TRIANGULAR
from ._distributions import Normal, Transformed
from ._moments import Increments, mean_reversion, regression, root_mean_square
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

    def exact_transition(self, x0: Array, dt: Array) -> Normal:
        return Normal(x0 + self.mu * dt, (self.sigma**2 * dt)[None, None])

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        _, dx, dt = some.column()
        mu = dx.sum() / dt.sum()
        return {"mu": mu, "sigma": root_mean_square(some.residual_sizes(dx, mu))}


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

    def exact_transition(self, x0: Array, dt: Array) -> Transformed:
        mean = jnp.log(x0) + (self.mu - 0.5 * self.sigma**2) * dt
        return Transformed(Logarithm(), Normal(mean, (self.sigma**2 * dt)[None, None]))

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        x, dx, dt = some.positive()
        rise = np.log1p(np.maximum(dx / x, -0.99))
        rate = rise.sum() / dt.sum()
        sigma = root_mean_square(some.residual_sizes(rise, rate))
        return {"mu": rate + 0.5 * sigma**2, "sigma": sigma}


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
        d = jnp.shape(self.mu)
        if len(d) > 1 or not jnp.shape(self.kappa) == jnp.shape(self.sigma) == (*d, *d):
            raise ValueError(
                "kappa, mu and sigma must be three numbers, or have shapes (d, d), (d,) and (d, d); got "
                f"{jnp.shape(self.kappa)}, {d} and {jnp.shape(self.sigma)}"
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

    def exact_transition(self, x0: Array, dt: Array) -> Normal:
        kappa, mu, sigma = self._matrices()
        if mu.size == 1:
            mean = mu + (x0 - mu) * jnp.exp(-kappa[0, 0] * dt)
            return Normal(mean, sigma**2 * dt * decayed(2 * kappa * dt))
        change, _, covariance = linear_moments(-kappa, sigma @ sigma.T, dt)
        return Normal(x0 + change @ (x0 - mu), covariance)

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        if some.x.shape[1] == 1:
            x, dx, dt = some.column()
            kappa, mu = mean_reversion(x, dx, dt)
            return {
                "kappa": kappa,
                "mu": mu,
                "sigma": root_mean_square(some.residual_sizes(dx, kappa * (mu - x))),
            }
        ones = np.ones((len(some.x), 1))
        slopes = regression(some.dx, some.dt, *np.concatenate([ones, some.x], axis=1).T)
        noise = (some.dx - (slopes[0] + some.x @ slopes[1:]) * some.dt[:, None]) / np.sqrt(some.dt)[:, None]
        kappa = -slopes[1:].T
        mu = some.x.mean(axis=0)
        return {"kappa": kappa, "mu": mu, "sigma": np.linalg.cholesky(noise.T @ noise / len(noise))}
