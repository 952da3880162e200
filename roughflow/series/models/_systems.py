"""A double well, and three systems of two components."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ...transition import Columns, Logarithm, Root, Unchanged
from .._parameters import ANY, CORRELATION, POSITIVE
from ._distributions import AbstractDistribution, NoncentralChiSquare, Normal, Transformed
from ._moments import SLOWEST, Increments, mean_reversion, regression, root_mean_square
from ._named import AbstractNamedSDE, parameter
from ._rates import square_root_transition


class DoubleWell(AbstractNamedSDE):
    """dX = (aX − bX³) dt + σ dB: two wells at ±√(a/b).

    ```python
    import roughflow as rf

    sde = rf.DoubleWell(a=1.0, b=1.0, sigma=0.5)
    ```
    """

    a: Array = eqx.field(converter=parameter)
    b: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 1
    domains: ClassVar = {"a": ANY, "b": POSITIVE, "sigma": POSITIVE}

    @property
    def coordinates(self) -> Unchanged:
        return Unchanged()

    def drift(self, t: Array, z: Array) -> Array:
        return self.a * z - self.b * z**3

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.broadcast_to(self.sigma, (1, 1))

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        x, dx, dt = some.column()
        a, b = regression(dx, dt, x, -(x**3))
        b = max(b, SLOWEST / (np.mean(x**2) * dt.sum()))
        return {"a": a, "b": b, "sigma": root_mean_square(some.residual_sizes(dx, a * x - b * x**3))}


class LotkaVolterra(AbstractNamedSDE):
    """Prey dX = X(α − βY) dt + σ₁X dB₁ and predators dY = Y(δX − γ) dt + σ₂Y dB₂, both positive.

    ```python
    import roughflow as rf

    sde = rf.LotkaVolterra(alpha=0.5, beta=0.03, gamma=0.8, delta=0.03, sigma1=0.2, sigma2=0.2)
    ```
    """

    alpha: Array = eqx.field(converter=parameter)
    beta: Array = eqx.field(converter=parameter)
    gamma: Array = eqx.field(converter=parameter)
    delta: Array = eqx.field(converter=parameter)
    sigma1: Array = eqx.field(converter=parameter)
    sigma2: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 2
    domains: ClassVar = dict.fromkeys(("alpha", "beta", "gamma", "delta", "sigma1", "sigma2"), POSITIVE)

    @property
    def coordinates(self) -> Logarithm:
        return Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return z * jnp.stack([self.alpha - self.beta * z[1], self.delta * z[0] - self.gamma])

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.diag(jnp.stack([self.sigma1, self.sigma2]) * z)

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        (x, dx, dt), (y, dy, _) = some.positive(0), some.positive(1)
        prey, predators = (np.log1p(np.maximum(d / z, -0.99)) for d, z in ((dx, x), (dy, y)))
        ones = np.ones_like(x)
        growth, beta = regression(prey, dt, ones, -y)
        delta, decline = regression(predators, dt, x, -ones)
        sigma1 = root_mean_square(some.residual_sizes(prey, growth - beta * y))
        sigma2 = root_mean_square(some.residual_sizes(predators, delta * x - decline))
        least = SLOWEST / dt.sum()
        rates = (growth + 0.5 * sigma1**2, beta * y.mean(), decline - 0.5 * sigma2**2, delta * x.mean())
        alpha, eaten, gamma, fed = (max(rate, least) for rate in rates)
        return {
            "alpha": alpha,
            "beta": eaten / y.mean(),
            "gamma": gamma,
            "delta": fed / x.mean(),
            "sigma1": sigma1,
            "sigma2": sigma2,
        }


class Heston(AbstractNamedSDE):
    """A price dS = μS dt + √V S dB₁ with variance dV = κ(θ − V) dt + σ√V (ρ dB₁ + √(1 − ρ²) dB₂)
    (Heston 1993); both S and V are observed.

    ```python
    import roughflow as rf

    sde = rf.Heston(mu=0.05, kappa=3.0, theta=0.1, sigma=0.25, rho=-0.7)
    ```
    """

    mu: Array = eqx.field(converter=parameter)
    kappa: Array = eqx.field(converter=parameter)
    theta: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    rho: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 2
    domains: ClassVar = {
        "mu": ANY,
        "kappa": POSITIVE,
        "theta": POSITIVE,
        "sigma": POSITIVE,
        "rho": CORRELATION,
    }

    @property
    def coordinates(self) -> Columns:
        return Columns(Logarithm(), Root())

    def drift(self, t: Array, z: Array) -> Array:
        return jnp.stack([self.mu * z[0], self.kappa * (self.theta - z[1])])

    def diffusion(self, t: Array, z: Array) -> Array:
        root, other = jnp.sqrt(z[1]), jnp.sqrt(1 - self.rho**2)
        zero = jnp.zeros_like(root)
        return jnp.stack(
            [
                jnp.stack([root * z[0], zero]),
                jnp.stack([self.sigma * root * self.rho, self.sigma * root * other]),
            ]
        )

    def short_transition(self, x0: Array, dt: Array) -> AbstractDistribution:
        variance = square_root_transition(self.kappa, self.theta, self.sigma, x0[1:], dt)
        return _HestonStep(self, x0, dt, variance)

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        (s, ds, dt), (v, dv, _) = some.positive(0), some.positive(1)
        rise = np.log1p(np.maximum(ds / s, -0.99)) + 0.5 * v * dt
        mu, (kappa, theta) = rise.sum() / dt.sum(), mean_reversion(v, dv, dt)
        price = (rise - mu * dt) / np.sqrt(v * dt)
        variance = (dv - kappa * (theta - v) * dt) / np.sqrt(v * dt)
        rho = np.clip(np.corrcoef(price, variance)[0, 1], -0.95, 0.95)
        return {"mu": mu, "kappa": kappa, "theta": theta, "sigma": root_mean_square(variance), "rho": rho}


class _HestonStep(AbstractDistribution):
    """The variance V' is a noncentral χ². Given it, log S' is normal with ∫V dt = ½(V + V')dt (Andersen
    2008)."""

    sde: Heston
    start: Array  # (2,)
    dt: Array
    variance: NoncentralChiSquare

    def _price(self, later: Array) -> Transformed:
        sde, (price, now) = self.sde, self.start
        total = 0.5 * self.dt * (now + later)
        shock = (
            later - now - sde.kappa * (sde.theta * self.dt - total)
        ) / sde.sigma  # ∫√V dB of the variance
        mean = jnp.log(price) + sde.mu * self.dt - 0.5 * total + sde.rho * shock
        return Transformed(Logarithm(), Normal(mean[None], ((1 - sde.rho**2) * total)[None, None]))

    def log_prob(self, x: Array) -> Array:
        return self.variance.log_prob(x[1:]) + self._price(x[1]).log_prob(x[:1])

    def sample(self, key: PRNGKeyArray) -> Array:
        key_variance, key_price = jax.random.split(key)
        later = jnp.maximum(self.variance.sample(key_variance), jnp.finfo(self.start.dtype).tiny)
        return jnp.append(self._price(later[0]).sample(key_price), later)

    def cdf(self, x: Array) -> np.ndarray:
        raise NotImplementedError("of two components")


class FitzHughNagumo(AbstractNamedSDE):
    """A neuron: dX = (X − X³ − Y + s)/ε dt + σ₁ dB₁ and dY = (γX − Y + β) dt + σ₂ dB₂.

    ```python
    import roughflow as rf

    sde = rf.FitzHughNagumo(epsilon=0.1, s=0.0, gamma=1.5, beta=0.8, sigma1=0.3, sigma2=0.3)
    ```
    """

    epsilon: Array = eqx.field(converter=parameter)
    s: Array = eqx.field(converter=parameter)
    gamma: Array = eqx.field(converter=parameter)
    beta: Array = eqx.field(converter=parameter)
    sigma1: Array = eqx.field(converter=parameter)
    sigma2: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 2
    domains: ClassVar = {
        "epsilon": POSITIVE,
        "s": ANY,
        "gamma": ANY,
        "beta": ANY,
        "sigma1": POSITIVE,
        "sigma2": POSITIVE,
    }

    @property
    def coordinates(self) -> Unchanged:
        return Unchanged()

    def drift(self, t: Array, z: Array) -> Array:
        fast = (z[0] - z[0] ** 3 - z[1] + self.s) / self.epsilon
        return jnp.stack([fast, self.gamma * z[0] - z[1] + self.beta])

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.diag(jnp.stack([self.sigma1, self.sigma2]))

    @classmethod
    def starting_values(cls, some: Increments) -> dict[str, Any]:
        (x, dx, dt), (y, dy, _) = some.column(0), some.column(1)
        ones = np.ones_like(x)
        rate, constant = regression(dx, dt, x - x**3 - y, ones)
        rate = max(rate, SLOWEST / dt.sum())
        gamma, beta = regression(dy + y * dt, dt, x, ones)
        sigma1 = root_mean_square(some.residual_sizes(dx, rate * (x - x**3 - y) + constant))
        sigma2 = root_mean_square(some.residual_sizes(dy, gamma * x - y + beta))
        return {
            "epsilon": 1 / rate,
            "s": constant / rate,
            "gamma": gamma,
            "beta": beta,
            "sigma1": sigma1,
            "sigma2": sigma2,
        }
