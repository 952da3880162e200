"""Interest rates, prices and shares: noise that grows with a power of the state."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...transition import Arc, Logarithm, Root
from .._linear_sde import decayed
from .._parameters import ANY, POSITIVE, UNIT
from ._distributions import Beta, NoncentralChiSquare
from ._moments import Increments, elasticity, mean_reversion, root_mean_square
from ._named import AbstractNamedSDE, parameter

TERMS = 256  # of an expansion
LAST_TERMS = 8  # of them that show what is left out


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

    def exact_transition(self, x0: Array, dt: Array) -> NoncentralChiSquare:
        return square_root_transition(self.kappa, self.mu, self.sigma, x0, dt)

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        x, dx, dt = some.positive()
        kappa, mu = mean_reversion(x, dx, dt)
        size = some.residual_sizes(dx, kappa * (mu - x))
        return {"kappa": kappa, "mu": mu, "sigma": root_mean_square(size / np.sqrt(x))}


def square_root_transition(
    kappa: Array, mu: Array, sigma: Array, x0: Array, dt: Array
) -> NoncentralChiSquare:
    """Of dX = κ(μ − X) dt + σ√X dB."""
    scale = 0.25 * sigma**2 * dt * decayed(kappa * dt)
    return NoncentralChiSquare(scale, 4 * kappa * mu / sigma**2, x0[0] * jnp.exp(-kappa * dt) / scale)


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

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        x, dx, dt = some.positive()
        kappa, mu = mean_reversion(x, dx, dt)
        size = some.residual_sizes(dx, kappa * (mu - x))
        gamma = elasticity(x, size)
        return {"kappa": kappa, "mu": mu, "sigma": root_mean_square(size / x**gamma), "gamma": gamma}


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

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        x, dx, dt = some.positive()
        mu = np.sum(dx / x) / dt.sum()
        size = some.residual_sizes(dx, mu * x)
        gamma = elasticity(x, size)
        return {"mu": mu, "sigma": root_mean_square(size / x**gamma), "gamma": gamma}


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

    def short_transition(self, x0: Array, dt: Array) -> Beta:
        """The beta distribution with the exact mean and variance, which is exact for long spans too."""
        # With m the mean, V' = σ²m(1 − m) − (2κ + σ²)V.
        gap, rate = x0[0] - self.mu, 2 * self.kappa + self.sigma**2
        decay = lambda a: jnp.exp(-a * dt) * dt * decayed((rate - a) * dt)
        mean = self.mu + gap * jnp.exp(-self.kappa * dt)
        inner = self.mu * (1 - self.mu) * decay(0.0) + gap * (1 - 2 * self.mu) * decay(self.kappa)
        return Beta(mean, self.sigma**2 * (inner - gap**2 * decay(2 * self.kappa)))

    def expansion(self, x0: Array, x1: Array, dt: Array) -> tuple[Array, Array]:
        """w(x₁) Σₙ e^{−λₙ dt} pₙ(x₀) pₙ(x₁), λₙ = ½σ²n(n − 1 + a + b): w is the stationary density, that of
        Beta(a, b) with a = 2κμ/σ² and b = 2κ(1 − μ)/σ², and pₙ are Jacobi's polynomials, orthonormal under it
        (Karlin & Taylor 1981). Boundaries that are reached reflect."""
        total = 2 * self.kappa / self.sigma**2
        a, b = total * self.mu, total * (1 - self.mu)
        x, y = 2 * x0[0] - 1, 2 * x1[0] - 1

        def term(state: tuple, n: Array) -> tuple[tuple, Array]:
            (before, now, after) = state  # pₙ₋₁ and pₙ at both places, and the weight between them
            shift, weight = _recurrence(a, b, n)
            step = lambda z, last, new: ((z - shift) * new - after * last) / weight
            next_ = step(x, before[0], now[0]), step(y, before[1], now[1])
            decay = jnp.exp(-0.5 * self.sigma**2 * n * (n - 1 + total) * dt)
            return (now, next_, weight), decay * now[0] * now[1]

        zero, one = jnp.zeros_like(x), jnp.ones_like(x)
        start = ((zero, zero), (one, one), zero)
        terms = jax.lax.scan(term, start, jnp.arange(TERMS, dtype=x.dtype))[1]
        terms = jnp.where(jnp.isfinite(terms), terms, jnp.inf)
        kernel = jnp.sum(terms)
        rounding = TERMS * jnp.finfo(x.dtype).eps * jnp.sum(jnp.abs(terms))
        left = TERMS * jnp.max(jnp.abs(terms[-LAST_TERMS:])) + rounding
        good = (kernel > left) & jnp.isfinite(kernel)
        value = jnp.log(jnp.where(good, kernel, 1)) + jax.scipy.stats.beta.logpdf(x1[0], a, b)
        error = jax.lax.stop_gradient(jnp.where(good, left / jnp.where(good, kernel, 1), jnp.inf))
        return value, error

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        x, dx, dt = some.column()
        x = np.clip(x, 1e-3, 1 - 1e-3)
        kappa, mu = mean_reversion(x, dx, dt)
        size = some.residual_sizes(dx, kappa * (mu - x))
        return {"kappa": kappa, "mu": mu, "sigma": root_mean_square(size / np.sqrt(x * (1 - x)))}


def _recurrence(a: Array, b: Array, n: Array) -> tuple[Array, Array]:
    """Bₙ and Aₙ₊₁ of z pₙ = Aₙ₊₁ pₙ₊₁ + Bₙ pₙ + Aₙ pₙ₋₁, of polynomials that are orthonormal on (−1, 1) with
    the weight (1 + z)^{a − 1}(1 − z)^{b − 1}."""
    total, first = a + b, n == 0
    # For n = 0 these ratios are one, also where they are 0/0.
    ratio = lambda above, below: jnp.where(first, 1, above / jnp.where(first, 1, below))
    shift = (a - b) / (2 * n + total) * ratio(total - 2, 2 * n + total - 2)
    square = 4 * (n + 1) * (n + a) * (n + b) / ((2 * n + total) ** 2 * (2 * n + total + 1))
    return shift, jnp.sqrt(square * ratio(n + total - 1, 2 * n + total - 1))


def _power(z: Array, exponent: Array) -> Array:
    """z to a power, z > 0: derivatives take a quarter less time than those of `z**exponent`."""
    return jnp.exp(exponent * jnp.log(z))
