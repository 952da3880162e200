"""Interest rates, prices and shares: noise that grows with a power of the state."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from .._bessel import log_bessel_i
from .._coordinates import Arc, Logarithm, Root
from .._parameters import ANY, POSITIVE, UNIT
from ._named import AbstractNamedSDE, parameter


class CoxIngersollRoss(AbstractNamedSDE):
    """dX = κ(μ − X) dt + σ√X dB, X > 0 (Cox, Ingersoll & Ross 1985).

    ```python
    import roughflow as rf

    sde = rf.CoxIngersollRoss(kappa=0.2, mu=0.07, sigma=0.07)
    ```
    """

    kappa: Array = eqx.field(converter=parameter)
    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"kappa": POSITIVE, "mu": POSITIVE, "sigma": POSITIVE}

    @property
    def coordinates(self) -> Root:
        return Root()

    def drift(self, t: Array, z: Array) -> Array:
        return self.kappa * (self.mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * jnp.sqrt(z)[:, None]

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> Array:
        """A noncentral χ² distribution, with a Bessel function of order q."""
        decay = jnp.exp(-self.kappa * dt)
        c = 2 * self.kappa / (self.sigma**2 * (1 - decay))
        q = 2 * self.kappa * self.mu / self.sigma**2 - 1
        u, v = c * x0[0] * decay, c * x1[0]
        return jnp.log(c) - u - v + 0.5 * q * jnp.log(v / u) + log_bessel_i(q, 2 * jnp.sqrt(u * v))


class CKLS(AbstractNamedSDE):
    """dX = κ(μ − X) dt + σX^γ dB, X > 0 (Chan, Karolyi, Longstaff & Sanders 1992).

    ```python
    import roughflow as rf

    sde = rf.CKLS(kappa=0.2, mu=0.07, sigma=0.8, gamma=1.4)
    ```
    """

    kappa: Array = eqx.field(converter=parameter)
    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    gamma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"kappa": ANY, "mu": ANY, "sigma": POSITIVE, "gamma": ANY}

    @property
    def coordinates(self) -> Logarithm:
        return Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return self.kappa * (self.mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * _power(z, self.gamma)[:, None]

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> None:
        return None


class ConstantElasticity(AbstractNamedSDE):
    """dX = μX dt + σX^γ dB, X > 0 (Cox 1975).

    ```python
    import roughflow as rf

    sde = rf.ConstantElasticity(mu=0.05, sigma=0.3, gamma=0.7)
    ```
    """

    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    gamma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"mu": ANY, "sigma": POSITIVE, "gamma": ANY}

    @property
    def coordinates(self) -> Logarithm:
        return Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return self.mu * z

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * _power(z, self.gamma)[:, None]

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> None:
        return None


class Jacobi(AbstractNamedSDE):
    """dX = κ(μ − X) dt + σ√(X(1 − X)) dB, 0 < X < 1 (Wright 1931; Karlin & Taylor 1981).

    ```python
    import roughflow as rf

    sde = rf.Jacobi(kappa=1.0, mu=0.4, sigma=0.3)
    ```
    """

    kappa: Array = eqx.field(converter=parameter)
    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"kappa": POSITIVE, "mu": UNIT, "sigma": POSITIVE}

    @property
    def coordinates(self) -> Arc:
        return Arc()

    def drift(self, t: Array, z: Array) -> Array:
        return self.kappa * (self.mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * jnp.sqrt(z * (1 - z))[:, None]

    def exact_log_prob(self, x0: Array, x1: Array, dt: Array) -> None:
        return None


def _power(z: Array, exponent: Array) -> Array:
    """z to a power, z > 0: derivatives take a quarter less time than those of `z**exponent`."""
    return jnp.exp(exponent * jnp.log(z))
