"""Whether an SDE leaves the distribution of a sample invariant, and whether it returns to the sample from
outside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, check_count, check_key, check_number
from ..sde import AbstractSDE, noise_matrix, to_ito

# Wavelengths from twenty times the width of the data, which test means and variances, to half the width.
MIN_FREQUENCY, MAX_FREQUENCY = 0.05, 2.0


def stationarity(sde: AbstractSDE, x: Array, *, key: PRNGKeyArray, num_waves: int = 128) -> Array:
    """How fast an SDE changes the distribution of the sample x; zero if the distribution is stationary.

    A distribution p is stationary if and only if E_p[Lφ] = 0 for every test function φ, with the generator Lφ
    = μ·∇φ + ½ tr(σσᵀ∇²φ) (Hansen & Scheinkman 1995). Here φ(z) = cos(w·z + b)/(|w| + |w|²), with random w and
    b in units of the standard deviations of the sample:

        Lφ = −(sin(w·z + b) w·μ + ½ cos(w·z + b) |σᵀw|²)/(|w| + |w|²),

    and the result is the mean over (w, b) of E[Lφ]². Each square is the product of the means over two random
    halves of the sample, so it is unbiased and may be negative. Do not minimise it on a fixed sample: its
    negative values are unbounded. No path is simulated. The SDE is evaluated at time 0 and should not depend
    on time.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: 2**0.5 * jnp.eye(1))  # keeps N(0, 1)
    x = jax.random.normal(key, (4096, 1))
    rf.train.stationarity(sde, x, key=key), rf.train.stationarity(sde, 1 + x, key=key)  # 0.0002 and 0.28
    ```
    """
    x = _sample(x)
    rates = _rates(sde, x, key, num_waves)
    rates = jax.random.permutation(jax.random.fold_in(key, 3), rates)
    half = x.shape[0] // 2
    return jnp.mean(jnp.mean(rates[:half], axis=0) * jnp.mean(rates[half:], axis=0))


def squared_rate(sde: AbstractSDE, x: Array, *, key: PRNGKeyArray, num_waves: int = 128) -> Array:
    """`stationarity` as a loss: squares of means over the whole sample, which are never negative.

    Its expectation exceeds E[Lφ]² by the variance of that mean, Var(Lφ)/N.
    """
    return jnp.mean(jnp.mean(_rates(sde, x, key, num_waves), axis=0) ** 2)


def _rates(sde: AbstractSDE, x: Array, key: PRNGKeyArray, num_waves: int) -> Array:
    """Lφ at each point of the sample for each random φ, `(N, num_waves)`."""
    x = _sample(x)
    check_count("num_waves", num_waves)
    sde = to_ito(sde)
    key_wave, key_length, key_phase = jax.random.split(check_key(key), 3)
    lengths = jax.random.uniform(
        key_length, (num_waves, 1), x.dtype, minval=np.log(MIN_FREQUENCY), maxval=np.log(MAX_FREQUENCY)
    )
    unit = jnp.exp(lengths) * jax.random.normal(key_wave, (num_waves, x.shape[1]), x.dtype)
    phase = jax.random.uniform(key_phase, (num_waves,), x.dtype, maxval=2 * np.pi)
    wave = unit / _spread(x)[None]

    def generator(z: Array) -> Array:
        angle = wave @ z + phase
        t = jnp.zeros((), z.dtype)
        square = jnp.sum((wave @ noise_matrix(sde.noise(t, z))) ** 2, axis=1)
        return -(jnp.sin(angle) * (wave @ sde.drift(t, z)) + 0.5 * jnp.cos(angle) * square)

    size = jnp.linalg.norm(unit, axis=1)
    return jax.vmap(generator)(x) / (size + size**2)[None]


def confinement(
    sde: AbstractSDE, x: Array, *, key: PRNGKeyArray, rate: float = 1.0, num_points: int = 128
) -> Array:
    """How much an SDE fails to return to the sample x at a given rate; zero if it returns at that rate.

    With V(z) = |(z − mean)/spread|², the SDE returns to the region V ≤ R² if LV ≤ −rate·V outside
    (Khasminskii 2012, chapter 3). R is the radius of the sample; beyond it there are no data to train a
    network. The result is the mean of max(0, LV/V + rate)² over points drawn between R and 3R, with

        LV = 2 v·(μ/spread) + Σ (σ/spread)²,     v = (z − mean)/spread.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    x = jax.random.normal(key, (256, 2))
    stays = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    walks = rf.ItoSDE(lambda t, z: 0 * z, lambda t, z: jnp.eye(2))
    rf.train.confinement(stays, x, key=key), rf.train.confinement(walks, x, key=key)  # 0 and 1.1
    ```
    """
    x = _sample(x)
    check_count("num_points", num_points)
    check_number("rate", rate, least=0)
    sde = to_ito(sde)
    centre, spread = jnp.mean(x, axis=0), _spread(x)
    radius = jnp.max(jnp.linalg.norm((x - centre[None]) / spread[None], axis=1))
    key_direction, key_radius = jax.random.split(check_key(key))
    direction = jax.random.normal(key_direction, (num_points, x.shape[1]), x.dtype)
    direction = direction / jnp.linalg.norm(direction, axis=1, keepdims=True)
    reach = jax.random.uniform(key_radius, (num_points, 1), x.dtype, minval=1.0, maxval=3.0)

    def relative_growth(v: Array) -> Array:
        t, z = jnp.zeros((), v.dtype), centre + spread * v
        sigma = noise_matrix(sde.noise(t, z)) / spread[:, None]
        return (2 * v @ (sde.drift(t, z) / spread) + jnp.sum(sigma**2)) / (v @ v)

    growth = jax.vmap(relative_growth)(jax.lax.stop_gradient(radius) * reach * direction)
    return jnp.mean(jax.nn.relu(growth + rate) ** 2)


def _sample(x: Any) -> Array:
    x = jnp.asarray(as_real("x", x))
    if x.ndim != 2 or x.shape[0] < 2:
        raise ValueError(f"x must be a sample of shape (N, d) with at least 2 rows, got {x.shape}")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)


def _spread(x: Array) -> Array:
    """Standard deviations, used as units: without gradient, and never zero."""
    spread = jax.lax.stop_gradient(jnp.std(x, axis=0))
    return jnp.where(spread > 0, spread, 1)
