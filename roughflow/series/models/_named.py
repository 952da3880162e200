"""Named SDEs: linear processes, interest rates, prices, proportions, processes with memory, systems."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from ..._checks import as_real, check_count, check_positive
from ...driver import stationary_noise
from ...sde import StratonovichSDE
from ...transition import Arc, Columns, Logarithm, Root, Unchanged
from .._observed import Observed
from .._parameters import ANY, CORRELATION, POSITIVE, TRIANGULAR, UNIT, Domain
from ._distributions import (
    AbstractDistribution,
    Beta,
    Gamma,
    NoncentralChiSquare,
    Normal,
    Transformed,
    decayed,
    linear_moments,
)
from ._parametric import (
    SLOWEST,
    AbstractNamedSDE,
    Increments,
    elasticity,
    mean_reversion,
    parameter,
    regression,
    root_mean_square,
)


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
    coordinates: ClassVar = Unchanged()

    def drift(self, t: Array, z: Array) -> Array:
        return jnp.broadcast_to(self.mu, z.shape)

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.broadcast_to(self.sigma, (1, 1))

    def exact_transition(self, x0: Array, dt: Array) -> Normal:
        return Normal(x0 + self.mu * dt, (self.sigma**2 * dt)[None, None])

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        _, dx, dt = increments.column()
        mu = dx.sum() / dt.sum()
        return {"mu": mu, "sigma": root_mean_square(increments.residual_sizes(dx, mu))}


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
    coordinates: ClassVar = Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return self.mu * z

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * z[:, None]

    def exact_transition(self, x0: Array, dt: Array) -> Transformed:
        mean = jnp.log(x0) + (self.mu - 0.5 * self.sigma**2) * dt
        return Transformed(Logarithm(), Normal(mean, (self.sigma**2 * dt)[None, None]))

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        x, dx, dt = increments.positive()
        rise = np.log1p(np.maximum(dx / x, -0.99))
        rate = rise.sum() / dt.sum()
        sigma = root_mean_square(increments.residual_sizes(rise, rate))
        return {"mu": rate + 0.5 * sigma**2, "sigma": sigma}


class OrnsteinUhlenbeck(AbstractNamedSDE):
    """dX = κ(μ − X) dt + σ dB, known in finance as Vasicek's model (1977).

    In one dimension, all parameters are scalars. In d dimensions κ is a matrix, μ a vector and σ a lower
    triangular matrix with a positive diagonal; only σσᵀ is identified.

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
    coordinates: ClassVar = Unchanged()

    def __check_init__(self):
        d = jnp.shape(self.mu)
        if len(d) > 1 or not jnp.shape(self.kappa) == jnp.shape(self.sigma) == (*d, *d):
            raise ValueError(
                "kappa, mu and sigma must be scalars, or have shapes (d, d), (d,) and (d, d); got "
                f"{jnp.shape(self.kappa)}, {d} and {jnp.shape(self.sigma)}"
            )

    @property
    def dimension(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mu.size

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
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        if increments.x.shape[1] == 1:
            x, dx, dt = increments.column()
            kappa, mu = mean_reversion(x, dx, dt)
            return {
                "kappa": kappa,
                "mu": mu,
                "sigma": root_mean_square(increments.residual_sizes(dx, kappa * (mu - x))),
            }
        ones = np.ones((len(increments.x), 1))
        slopes = regression(increments.dx, increments.dt, *np.concatenate([ones, increments.x], axis=1).T)
        noise = (increments.dx - (slopes[0] + increments.x @ slopes[1:]) * increments.dt[:, None]) / np.sqrt(
            increments.dt
        )[:, None]
        kappa = -slopes[1:].T
        mu = increments.x.mean(axis=0)
        return {"kappa": kappa, "mu": mu, "sigma": np.linalg.cholesky(noise.T @ noise / len(noise))}


TERMS = 256  # number of terms of an expansion
LAST_TERMS = 8  # number of last terms from which the remainder is estimated


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
    coordinates: ClassVar = Root()

    def drift(self, t: Array, z: Array) -> Array:
        return self.kappa * (self.mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * jnp.sqrt(z)[:, None]

    def exact_transition(self, x0: Array, dt: Array) -> NoncentralChiSquare:
        return square_root_transition(self.kappa, self.mu, self.sigma, x0, dt)

    def stationary(self, unknown: tuple[int, ...]) -> Gamma | None:
        if unknown != (0,):
            return None
        return Gamma(2 * self.kappa * self.mu / self.sigma**2, self.sigma**2 / (2 * self.kappa))

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        x, dx, dt = increments.positive()
        kappa, mu = mean_reversion(x, dx, dt)
        size = increments.residual_sizes(dx, kappa * (mu - x))
        return {"kappa": kappa, "mu": mu, "sigma": root_mean_square(size / np.sqrt(x))}


def square_root_transition(
    kappa: Array, mu: Array, sigma: Array, x0: Array, dt: Array
) -> NoncentralChiSquare:
    """The transition distribution of dX = κ(μ − X) dt + σ√X dB."""
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
    coordinates: ClassVar = Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return self.kappa * (self.mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * _power(z, self.gamma)[:, None]

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        x, dx, dt = increments.positive()
        kappa, mu = mean_reversion(x, dx, dt)
        size = increments.residual_sizes(dx, kappa * (mu - x))
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
    coordinates: ClassVar = Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return self.mu * z

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * _power(z, self.gamma)[:, None]

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        x, dx, dt = increments.positive()
        mu = np.sum(dx / x) / dt.sum()
        size = increments.residual_sizes(dx, mu * x)
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
    coordinates: ClassVar = Arc()

    def drift(self, t: Array, z: Array) -> Array:
        return self.kappa * (self.mu - z)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.sigma * jnp.sqrt(z * (1 - z))[:, None]

    def short_transition(self, x0: Array, dt: Array) -> Beta:
        """The beta distribution with the exact mean and variance. It is exact in the limit dt → ∞."""
        # With m the mean, V' = σ²m(1 − m) − (2κ + σ²)V.
        gap, rate = x0[0] - self.mu, 2 * self.kappa + self.sigma**2
        decay = lambda a: jnp.exp(-a * dt) * dt * decayed((rate - a) * dt)
        mean = self.mu + gap * jnp.exp(-self.kappa * dt)
        inner = self.mu * (1 - self.mu) * decay(0.0) + gap * (1 - 2 * self.mu) * decay(self.kappa)
        return Beta(mean, self.sigma**2 * (inner - gap**2 * decay(2 * self.kappa)))

    def expansion(self, x0: Array, x1: Array, dt: Array) -> tuple[Array, Array]:
        """The spectral expansion w(x₁) Σₙ e^{−λₙ dt} pₙ(x₀) pₙ(x₁) with λₙ = ½σ²n(n − 1 + a + b). w is the
        stationary density, Beta(a, b) with a = 2κμ/σ² and b = 2κ(1 − μ)/σ², and pₙ are the orthonormal Jacobi
        polynomials (Karlin & Taylor 1981). Boundaries that can be reached are reflecting."""
        total = 2 * self.kappa / self.sigma**2
        a, b = total * self.mu, total * (1 - self.mu)
        x, y = 2 * x0[0] - 1, 2 * x1[0] - 1

        def term(state: tuple, n: Array) -> tuple[tuple, Array]:
            (before, now, after) = state  # pₙ₋₁ and pₙ at both points, and their weight
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
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        x, dx, dt = increments.column()
        x = np.clip(x, 1e-3, 1 - 1e-3)
        kappa, mu = mean_reversion(x, dx, dt)
        size = increments.residual_sizes(dx, kappa * (mu - x))
        return {"kappa": kappa, "mu": mu, "sigma": root_mean_square(size / np.sqrt(x * (1 - x)))}


def _recurrence(a: Array, b: Array, n: Array) -> tuple[Array, Array]:
    """Recurrence coefficients Bₙ and Aₙ₊₁ of z pₙ = Aₙ₊₁ pₙ₊₁ + Bₙ pₙ + Aₙ pₙ₋₁, for polynomials that are
    orthonormal on (−1, 1) with weight (1 + z)^{a − 1}(1 − z)^{b − 1}."""
    total, first = a + b, n == 0
    # For n = 0 these ratios are set to one, because they may be 0/0.
    ratio = lambda above, below: jnp.where(first, 1, above / jnp.where(first, 1, below))
    shift = (a - b) / (2 * n + total) * ratio(total - 2, 2 * n + total - 2)
    square = 4 * (n + 1) * (n + a) * (n + b) / ((2 * n + total) ** 2 * (2 * n + total + 1))
    return shift, jnp.sqrt(square * ratio(n + total - 1, 2 * n + total - 1))


def _power(z: Array, exponent: Array) -> Array:
    """z to the power `exponent`, for z > 0. Derivatives are 25 % faster than those of `z**exponent`."""
    return jnp.exp(exponent * jnp.log(z))


NODES = 48  # number of nodes of Gauss quadrature


class FractionalOrnsteinUhlenbeck(eqx.Module):
    """dX = κ(μ − X) dt + σ dBᴴ with fractional Brownian motion of Hurst exponent H in (0, 1).

    Paths are rough for H < ½, and smooth with long memory for H > ½. The process is not Markov and has no
    transition densities, so `rf.fit_sde` uses the joint density of the whole series given its first value.
    The noise starts at the time of that value. `sde` is the equation for a flow with a fractional driver.

    ```python
    import jax, numpy as np
    import roughflow as rf

    rough = rf.FractionalOrnsteinUhlenbeck(kappa=1.0, mu=0.0, sigma=0.5, hurst=0.2)
    x = rough.sample(0.0, 0.05, 200, key=jax.random.key(0))
    result = rf.fit_sde(rough, 0.05 * np.arange(201), x, key=jax.random.key(1))
    result.params["hurst"], result.standard_errors["hurst"]
    ```
    """

    kappa: Array = eqx.field(converter=parameter)
    mu: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    hurst: Array = eqx.field(converter=parameter)
    domains: ClassVar = {"kappa": POSITIVE, "mu": ANY, "sigma": POSITIVE, "hurst": UNIT}

    @property
    def sde(self) -> StratonovichSDE:
        """The equation, for a driver such as `rf.driver.FractionalLegendre(hurst, n)`."""
        drift = lambda t, z: self.kappa * (self.mu - z)
        return StratonovichSDE(drift, lambda t, z: jnp.broadcast_to(self.sigma, (1, 1)))

    def sample(
        self, x0: ArrayLike, dt: float, steps: int, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> Array:
        """Draw exact samples `(*shape, steps + 1)` of series that start at `x0`, with time step dt."""
        check_positive("dt", dt)
        gamma = np.asarray(self.autocovariance(jnp.asarray(dt), check_count("steps", steps)), float)
        noise = jnp.moveaxis(stationary_noise(gamma, key=key, shape=shape), -1, 0)
        decay = jnp.exp(-self.kappa * dt)
        move = lambda x, xi: (self.mu + decay * (x - self.mu) + xi,) * 2
        first = jnp.broadcast_to(jnp.asarray(x0, noise.dtype), noise.shape[1:])
        later = jax.lax.scan(move, first, noise)[1]
        return jnp.moveaxis(jnp.concatenate([first[None], later]), 0, -1)

    def innovations(self, values: Array, dt: ArrayLike) -> Array:
        """Innovations ξᵢ = Xᵢ₊₁ − μ − e^{−κdt}(Xᵢ − μ) of values `(n + 1,)`: a stationary normal sequence
        `(n,)`."""
        return values[1:] - self.mu - jnp.exp(-self.kappa * dt) * (values[:-1] - self.mu)

    def autocovariance(self, dt: Array, count: int) -> Array:
        """Autocovariances γ₀, …, γ_count of ξᵢ = σ∫ e^{−κ(tᵢ₊₁ − u)} dBᴴ(u).

        With c(v) = e^{−κdt} cosh κ(dt − v), γₖ = Hσ² ∫₀^dt c(v) [(k dt + v)²ᴴ⁻¹ − (k dt − v)²ᴴ⁻¹] dv, with +
        in place of − for k = 0. The substitution v ∝ x^{1/H} removes the singularity, and Gauss quadrature
        computes the integral.
        """
        places, weights = np.polynomial.legendre.leggauss(NODES)
        x, w = jnp.asarray((places + 1) / 2, float), jnp.asarray(weights / 2, float)
        kappa, hurst = self.kappa * dt, self.hurst
        c = lambda v: 0.5 * (jnp.exp(-kappa * v) + jnp.exp(-kappa * (2 - v)))
        bent = jnp.exp(jnp.log(x) / hurst)
        zero = 2 * jnp.sum(w * x * c(bent))
        lags = jnp.arange(1, count + 1, dtype=x.dtype)[:, None]
        power = lambda a: jnp.exp((2 * hurst - 1) * jnp.log(a))
        ahead = hurst * jnp.sum((w * c(x))[None] * power(lags + x[None]), axis=1)
        behind = hurst * jnp.sum((w * c(x))[None] * power(lags[1:] - x[None]), axis=1)
        next_to = jnp.sum(w * x * c(1 - bent))
        whole = jnp.concatenate([zero[None], ahead - jnp.concatenate([next_to[None], behind])])
        return self.sigma**2 * dt ** (2 * hurst) * whole

    @classmethod
    def from_series(cls, times: Any, values: Any) -> Self:
        """Starting values for `rf.fit_sde`. H is estimated from the growth of second differences with their
        lag (Istas & Lang 1997)."""
        x, dx, dt = Increments(times, values).column()
        kappa, mu = mean_reversion(x, dx, dt)
        near, far = (np.mean((x[2 * k :] - 2 * x[k:-k] + x[: -2 * k]) ** 2) for k in (1, 2))
        hurst = np.clip(0.5 * np.log2(far / near), 0.02, 0.98)
        return cls(kappa, mu, root_mean_square(dx) / np.median(dt) ** hurst, hurst)


class DoubleWell(AbstractNamedSDE):
    """dX = (aX − bX³) dt + σ dB, with two wells at ±√(a/b).

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
    coordinates: ClassVar = Unchanged()

    def drift(self, t: Array, z: Array) -> Array:
        return self.a * z - self.b * z**3

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.broadcast_to(self.sigma, (1, 1))

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        x, dx, dt = increments.column()
        a, b = regression(dx, dt, x, -(x**3))
        b = max(b, SLOWEST / (np.mean(x**2) * dt.sum()))
        return {"a": a, "b": b, "sigma": root_mean_square(increments.residual_sizes(dx, a * x - b * x**3))}


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
    components: ClassVar = ("prey", "predators")
    domains: ClassVar = dict.fromkeys(("alpha", "beta", "gamma", "delta", "sigma1", "sigma2"), POSITIVE)
    coordinates: ClassVar = Logarithm()

    def drift(self, t: Array, z: Array) -> Array:
        return z * jnp.stack([self.alpha - self.beta * z[1], self.delta * z[0] - self.gamma])

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.diag(jnp.stack([self.sigma1, self.sigma2]) * z)

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        (x, dx, dt), (y, dy, _) = increments.positive(0), increments.positive(1)
        prey, predators = (np.log1p(np.maximum(d / z, -0.99)) for d, z in ((dx, x), (dy, y)))
        ones = np.ones_like(x)
        growth, beta = regression(prey, dt, ones, -y)
        delta, decline = regression(predators, dt, x, -ones)
        sigma1 = root_mean_square(increments.residual_sizes(prey, growth - beta * y))
        sigma2 = root_mean_square(increments.residual_sizes(predators, delta * x - decline))
        least = SLOWEST / dt.sum()
        rates = (growth + 0.5 * sigma1**2, beta * y.mean(), decline - 0.5 * sigma2**2, delta * x.mean())
        alpha, eaten, gamma, fed = (max(rate, least) for rate in rates)
        rates = {"alpha": alpha, "beta": eaten / y.mean(), "gamma": gamma, "delta": fed / x.mean()}
        return {**rates, "sigma1": sigma1, "sigma2": sigma2}


WEIGHT = 0.06  # weight of the latest squared return in an exponentially weighted mean (RiskMetrics 1996)


class _Volatility(AbstractNamedSDE):
    """A price with a stochastic volatility that reverts to its mean and is correlated with the price."""

    mu: Array = eqx.field(converter=parameter)
    kappa: Array = eqx.field(converter=parameter)
    theta: Array = eqx.field(converter=parameter)
    sigma: Array = eqx.field(converter=parameter)
    rho: Array = eqx.field(converter=parameter)
    dimension: ClassVar = 2

    @abc.abstractmethod
    def sizes(self, level: Any) -> tuple[Any, Any]:
        """The volatility of the price, and the noise of the second component divided by σ, both given the
        second component."""

    def drift(self, t: Array, z: Array) -> Array:
        return jnp.stack([self.mu * z[0], self.kappa * (self.theta - z[1])])

    def diffusion(self, t: Array, z: Array) -> Array:
        volatility, noise = self.sizes(z[1])
        price = jnp.stack([volatility * z[0], jnp.zeros_like(volatility)])
        mixed = jnp.stack([self.rho, jnp.sqrt(1 - self.rho**2)])
        return jnp.stack([price, self.sigma * noise * mixed])

    @staticmethod
    def _variance(one: Observed) -> np.ndarray:
        """Estimate the variance of a price by exponentially weighted means of squared returns, forwards and
        backwards in time."""
        price = np.interp(one.times, *one.known(0))
        returns = np.diff(np.log(np.maximum(price, 1e-300))) / np.sqrt(np.diff(one.times))
        square = np.append(returns**2, returns[-1] ** 2)
        mean = lambda row: (
            scipy.signal.lfilter([WEIGHT], [1, WEIGHT - 1], row - square.mean()) + square.mean()
        )
        return np.maximum(0.5 * (mean(square) + mean(square[::-1])[::-1]), 1e-3 * square.mean())

    @classmethod
    def _regressed(cls, increments: Increments, v: np.ndarray, noise: Any) -> dict[str, Any]:
        """Starting values, given the variance `v` of the price and the noise of the second component divided
        by σ."""
        (s, ds, dt), (level, dv, _) = increments.positive(0), increments.column(1)
        rise = np.log1p(np.maximum(ds / s, -0.99)) + 0.5 * v * dt
        mu, (kappa, theta) = rise.sum() / dt.sum(), mean_reversion(level, dv, dt)
        price = (rise - mu * dt) / np.sqrt(v * dt)
        shocks = (dv - kappa * (theta - level) * dt) / (noise * np.sqrt(dt))
        rho = np.clip(np.corrcoef(price, shocks)[0, 1], -0.95, 0.95)
        return {"mu": mu, "kappa": kappa, "theta": theta, "sigma": root_mean_square(shocks), "rho": rho}


class Heston(_Volatility):
    """A price dS = μS dt + √V S dB₁ with stochastic variance dV = κ(θ − V) dt + σ√V (ρ dB₁ + √(1 − ρ²) dB₂)
    (Heston 1993). If V is not observed, pass a column of NaN.

    ```python
    import roughflow as rf

    sde = rf.Heston(mu=0.05, kappa=3.0, theta=0.1, sigma=0.25, rho=-0.7)
    ```
    """

    components: ClassVar = ("price", "variance")
    domains: ClassVar = {**dict.fromkeys(("kappa", "theta", "sigma"), POSITIVE), "rho": CORRELATION}
    coordinates: ClassVar = Columns(Logarithm(), Root())

    def sizes(self, level: Array) -> tuple[Array, Array]:
        return jnp.sqrt(level), jnp.sqrt(level)

    def short_transition(self, x0: Array, dt: Array) -> AbstractDistribution:
        variance = square_root_transition(self.kappa, self.theta, self.sigma, x0[1:], dt)
        return _HestonStep(self, x0, dt, variance)

    def stationary(self, unknown: tuple[int, ...]) -> Gamma | None:
        if unknown != (1,):
            return None
        return Gamma(2 * self.kappa * self.theta / self.sigma**2, self.sigma**2 / (2 * self.kappa))

    @classmethod
    def hidden_values(cls, one: Observed) -> dict[int, np.ndarray]:
        return {1: cls._variance(one)}

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        v = increments.positive(1)[0]
        return cls._regressed(increments, v, np.sqrt(v))


class StochasticVolatility(_Volatility):
    """A price dS = μS dt + e^{H/2} S dB₁ whose log-variance H reverts to its mean, dH = κ(θ − H) dt + σ(ρ dB₁
    + √(1 − ρ²) dB₂). If H is not observed, pass a column of NaN.

    ```python
    import roughflow as rf

    sde = rf.series.StochasticVolatility(mu=0.05, kappa=5.0, theta=-4.0, sigma=2.0, rho=-0.7)
    ```
    """

    components: ClassVar = ("price", "log-variance")
    domains: ClassVar = {**dict.fromkeys(("kappa", "sigma"), POSITIVE), "rho": CORRELATION}
    coordinates: ClassVar = Columns(Logarithm(), Unchanged())

    def sizes(self, level: Array) -> tuple[Array, Array]:
        return jnp.exp(0.5 * level), jnp.ones_like(level)

    def stationary(self, unknown: tuple[int, ...]) -> Normal | None:
        if unknown != (1,):
            return None
        return Normal(self.theta[None], (self.sigma**2 / (2 * self.kappa))[None, None])

    @classmethod
    def hidden_values(cls, one: Observed) -> dict[int, np.ndarray]:
        return {1: np.log(cls._variance(one))}

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        return cls._regressed(increments, np.exp(increments.column(1)[0]), 1.0)


class _HestonStep(AbstractDistribution):
    """Andersen's approximation (2008): V' is noncentral χ², and given V', log S' is normal with ∫V dt = ½(V +
    V')dt."""

    sde: Heston
    start: Array  # (2,)
    dt: Array
    variance: NoncentralChiSquare

    def _price(self, later: Array) -> Transformed:
        sde, (price, now) = self.sde, self.start
        total = 0.5 * self.dt * (now + later)
        shock = (
            later - now - sde.kappa * (sde.theta * self.dt - total)
        ) / sde.sigma  # ∫√V dB for the Brownian motion of the variance
        mean = jnp.log(price) + sde.mu * self.dt - 0.5 * total + sde.rho * shock
        return Transformed(Logarithm(), Normal(mean[None], ((1 - sde.rho**2) * total)[None, None]))

    def log_prob(self, x: Array) -> Array:
        return self.variance.log_prob(x[1:]) + self._price(x[1]).log_prob(x[:1])

    def sample(self, key: PRNGKeyArray) -> Array:
        key_variance, key_price = jax.random.split(key)
        later = jnp.maximum(self.variance.sample(key_variance), jnp.finfo(self.start.dtype).tiny)
        return jnp.append(self._price(later[0]).sample(key_price), later)

    def cdf(self, x: Array) -> np.ndarray:
        raise NotImplementedError("cdf requires a distribution of one component")


class FitzHughNagumo(AbstractNamedSDE):
    """The FitzHugh–Nagumo neuron: dX = (X − X³ − Y + s)/ε dt + σ₁ dB₁, dY = (γX − Y + β) dt + σ₂ dB₂.

    If the recovery Y is hidden (a column of NaN), adding a constant to Y, s and β does not change X: fix s
    with `rf.fit_sde(..., fixed=["s"])`.

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
    components: ClassVar = ("potential", "recovery")
    domains: ClassVar = dict.fromkeys(("epsilon", "sigma1", "sigma2"), POSITIVE)
    coordinates: ClassVar = Unchanged()

    def drift(self, t: Array, z: Array) -> Array:
        fast = (z[0] - z[0] ** 3 - z[1] + self.s) / self.epsilon
        return jnp.stack([fast, self.gamma * z[0] - z[1] + self.beta])

    def diffusion(self, t: Array, z: Array) -> Array:
        return jnp.diag(jnp.stack([self.sigma1, self.sigma2]))

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        (x, dx, dt), (y, dy, _) = increments.column(0), increments.column(1)
        ones = np.ones_like(x)
        rate, constant = regression(dx, dt, x - x**3 - y, ones)
        rate = max(rate, SLOWEST / dt.sum())
        gamma, beta = regression(dy + y * dt, dt, x, ones)
        sigma1 = root_mean_square(increments.residual_sizes(dx, rate * (x - x**3 - y) + constant))
        sigma2 = root_mean_square(increments.residual_sizes(dy, gamma * x - y + beta))
        noise = {"sigma1": sigma1, "sigma2": sigma2}
        return {"epsilon": 1 / rate, "s": constant / rate, "gamma": gamma, "beta": beta, **noise}


class SIR(AbstractNamedSDE):
    """An epidemic in a closed population of size N: susceptible dS = −F and infectious dI = F − R with
    infections F = βSI/N dt + √(βSI/N) dB₁ and recoveries R = γI dt + √(γI) dB₂, the diffusion limit of the
    Markov jump process (Kurtz 1978).

    To fit reported cases, pass them as values with an observation density, such as
    `rf.series.Counts(components=(1,))`.

    ```python
    import roughflow as rf

    sde = rf.series.SIR(beta=1.7, gamma=0.45, population=763.0)
    ```
    """

    beta: Array = eqx.field(converter=parameter)
    gamma: Array = eqx.field(converter=parameter)
    population: float = eqx.field(static=True)
    dimension: ClassVar = 2
    components: ClassVar = ("susceptible", "infectious")
    domains: ClassVar = dict.fromkeys(("beta", "gamma"), POSITIVE)
    coordinates: ClassVar = Root()

    def __check_init__(self):
        check_positive("population", self.population)

    def _rates(self, z: Array) -> tuple[Array, Array]:
        return self.beta * z[0] * z[1] / self.population, self.gamma * z[1]

    def drift(self, t: Array, z: Array) -> Array:
        infections, recoveries = self._rates(z)
        return jnp.stack([-infections, infections - recoveries])

    def diffusion(self, t: Array, z: Array) -> Array:
        infections, recoveries = map(jnp.sqrt, self._rates(z))
        zero = jnp.zeros_like(infections)
        return jnp.stack([jnp.stack([-infections, zero]), jnp.stack([infections, -recoveries])])


class Compartments(AbstractNamedSDE):
    """Linear compartments with inputs u(t): dXᵢ = [Σⱼ kᵢⱼ(Zⱼ − Xᵢ) + Σₗ gᵢₗ uₗ(t)] dt + σᵢ dBᵢ, where Zⱼ is a
    compartment or an input.

    `exchange` and `gain` are dictionaries of the rates kᵢⱼ and the coefficients gᵢₗ, whose keys are pairs of
    names, "i j". All other rates and coefficients are zero. `sigma` is the noise of each compartment, in the
    order of the components of the state. `inputs` are the names of the inputs in `rf.fit_sde(...,
    inputs=...)`. The example is a heated room whose walls have a hidden temperature (Bacher & Madsen 2011):

    ```python
    import numpy as np
    import roughflow as rf

    room = rf.series.Compartments(
        exchange={"room walls": 0.5, "walls room": 0.1, "walls outside": 0.05},
        gain={"room heating": 2.0},
        sigma={"room": 0.05, "walls": 0.02},
        inputs=("outside", "heating"),
    )
    room.drift(0.0, np.array([20.0, 15.0]), np.array([5.0, 1.0]))
    ```
    """

    exchange: dict[str, Array]
    gain: dict[str, Array]
    sigma: dict[str, Array]
    inputs: tuple[str, ...] = eqx.field(static=True)
    components: tuple[str, ...] = eqx.field(static=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    coordinates: ClassVar = Unchanged()

    def __init__(
        self,
        exchange: Mapping[str, float],
        gain: Mapping[str, float],
        sigma: Mapping[str, float],
        inputs: tuple[str, ...] = (),
    ):
        self.components, self.inputs = tuple(sigma), tuple(inputs)
        if both := set(self.components) & set(self.inputs):
            raise ValueError(f"{min(both)!r} is both a compartment and an input: rename one")
        table = lambda given: {name: jnp.asarray(as_real(name, x), float) for name, x in given.items()}
        self.exchange, self.gain, self.sigma = table(exchange), table(gain), table(sigma)
        names = {"exchange": self.components + self.inputs, "gain": self.inputs}
        for field, sources in names.items():
            for pair in getattr(self, field):
                target, _, source = pair.partition(" ")
                if target not in self.components or source not in sources:
                    raise ValueError(
                        f"{field} {pair!r} must be a compartment and a source, separated by a space; "
                        f"compartments: {', '.join(self.components)}; sources: {', '.join(sources) or 'none'}"
                    )

    @property
    def dimension(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.components)

    @property
    def domains(self) -> dict[str, Domain]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict.fromkeys(
            (f"{field}.{name}" for field in ("exchange", "sigma") for name in getattr(self, field)), POSITIVE
        )

    def drift(self, t: Array, z: Array, u: Array | None = None) -> Array:
        given = jnp.zeros(0) if u is None else u
        if len(given) != len(self.inputs):
            raise ValueError(f"{len(self.inputs)} inputs are required, {self.inputs}, got {len(given)}")
        known = dict(zip(self.components + self.inputs, (*z, *given), strict=True))
        total = dict.fromkeys(self.components, jnp.zeros_like(z[0]))
        for pair, rate in self.exchange.items():
            target, _, source = pair.partition(" ")
            total[target] += rate * (known[source] - known[target])
        for pair, gain in self.gain.items():
            target, _, source = pair.partition(" ")
            total[target] += gain * known[source]
        return jnp.stack(list(total.values()))

    def diffusion(self, t: Array, z: Array, u: Array | None = None) -> Array:
        return jnp.diag(jnp.stack([self.sigma[name] for name in self.components]))
