"""A process with memory: its series has no transitions, but a joint normal distribution."""

from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from ..._checks import check_count, check_positive
from ...driver import stationary_noise
from ...sde import StratonovichSDE
from .._parameters import ANY, POSITIVE, UNIT
from ._moments import Increments, mean_reversion, root_mean_square
from ._named import parameter

NODES = 48  # of Gauss's rule


class FractionalOrnsteinUhlenbeck(eqx.Module):
    """dX = κ(μ − X) dt + σ dBᴴ with fractional Brownian motion of Hurst exponent H, any in (0, 1).

    H below ½ is rough, above it smooth and of long memory. It is no Markov process, so it is none of the SDEs
    that have transition densities: `rf.fit_sde` takes the joint density of the whole series, given its
    first value, from which on the noise acts. `sde` is the equation for a flow, with a fractional driver.

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
        """The equation, for a driver such as `rf.FractionalLegendre(hurst, n)`."""
        drift = lambda t, z: self.kappa * (self.mu - z)
        return StratonovichSDE(drift, lambda t, z: jnp.broadcast_to(self.sigma, (1, 1)))

    def sample(
        self, start: ArrayLike, dt: float, steps: int, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> Array:
        """Draw series `(*shape, steps + 1)` that begin at `start`, exactly, at times dt apart."""
        check_positive("dt", dt)
        gamma = np.asarray(self.autocovariance(jnp.asarray(dt), check_count("steps", steps)), float)
        noise = jnp.moveaxis(stationary_noise(gamma, key=key, shape=shape), -1, 0)
        decay = jnp.exp(-self.kappa * dt)
        move = lambda x, xi: (self.mu + decay * (x - self.mu) + xi,) * 2
        first = jnp.broadcast_to(jnp.asarray(start, noise.dtype), noise.shape[1:])
        later = jax.lax.scan(move, first, noise)[1]
        return jnp.moveaxis(jnp.concatenate([first[None], later]), 0, -1)

    def innovations(self, values: Array, dt: ArrayLike) -> Array:
        """ξᵢ = Xᵢ₊₁ − μ − e^{−κdt}(Xᵢ − μ) of values `(n + 1,)`: a stationary normal sequence `(n,)`."""
        return values[1:] - self.mu - jnp.exp(-self.kappa * dt) * (values[:-1] - self.mu)

    def autocovariance(self, dt: Array, count: int) -> Array:
        """γ₀, …, γ_count of the ξᵢ = σ∫ e^{−κ(tᵢ₊₁ − u)} dBᴴ(u).

        With c(v) = e^{−κdt} cosh κ(dt − v) it is γₖ = Hσ² ∫₀^dt c(v) [(k dt + v)²ᴴ⁻¹ − (k dt − v)²ᴴ⁻¹] dv,
        for k = 0 with + in place of −. Where the power is singular v is proportional to x^{1/H}; Gauss's rule
        does the rest.
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
        """Starting values for `rf.fit_sde`: H from how second differences grow with their span (Istas & Lang
        1997)."""
        x, dx, dt = Increments(times, values).column()
        kappa, mu = mean_reversion(x, dx, dt)
        near, far = (np.mean((x[2 * k :] - 2 * x[k:-k] + x[: -2 * k]) ** 2) for k in (1, 2))
        hurst = np.clip(0.5 * np.log2(far / near), 0.02, 0.98)
        return cls(kappa, mu, root_mean_square(dx) / np.median(dt) ** hurst, hurst)
