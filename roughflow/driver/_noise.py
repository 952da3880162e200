"""Stationary Gaussian sequences by circulant embedding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_shape, check_count, check_key, check_memory, check_positive
from .._programs import jit
from ._fractional import check_hurst

CHUNK = 2**21  # complex numbers at a time, so that a transform stays in the cache


def fractional_noise(
    hurst: float, steps: int, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), t1: float = 1.0
) -> Array:
    """The increments of fractional Brownian motion over `steps` equal steps of [0, t1], `(*shape, steps)`.

    Exact, in O(n log n), by circulant embedding (Davies & Harte 1987; Wood & Chan 1994). A random path is a
    function of twice as many normal numbers as it has steps, so there is no density of them: that is what
    `rf.FractionalBrownian` is for.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    noise = rf.fractional_noise(0.4, 1024, key=jax.random.key(0), shape=(100,))
    paths = jnp.cumsum(noise, axis=-1)
    ```
    """
    check_positive("t1", t1)
    count, hurst = check_count("steps", steps), check_hurst(hurst)
    check_memory(f"steps={steps}", count)
    as_shape(shape, count)
    k = np.arange(count + 1.0)
    power = lambda lag: np.abs(lag) ** (2 * hurst)
    autocovariance = 0.5 * (power(k + 1) + power(k - 1)) - power(k)
    return (t1 / steps) ** hurst * stationary_noise(autocovariance, key=key, shape=shape)


def stationary_noise(autocovariance: np.ndarray, *, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Draw sequences `(*shape, n)` with the autocovariance γ₀, …, γₙ, shape `(n + 1,)`."""
    spectrum = np.fft.rfft(np.concatenate([autocovariance, autocovariance[-2:0:-1]])).real
    if spectrum.min() < -1e-8 * spectrum.max():
        raise ValueError("this autocovariance has no circulant embedding of twice its length")
    full = np.concatenate([spectrum, spectrum[-2:0:-1]])
    weights = jnp.asarray(np.sqrt(np.maximum(full, 0) / full.size), float)
    count, length = math.prod(as_shape(shape)), full.size
    size = max(1, min(-(-count // 2), CHUNK // length))
    chunks = -(-count // (2 * size))
    pairs = _drawn(weights, jax.random.split(check_key(key), max(chunks, 1)), size)
    return jnp.reshape(pairs, (-1, length // 2))[:count].reshape(*as_shape(shape), length // 2)


@jit
def _drawn(weights: Array, keys: Array, size: int) -> Array:
    """Real and imaginary parts of one transform are two sequences."""

    def chunk(key: PRNGKeyArray) -> Array:
        parts = jax.random.normal(key, (2, size, weights.size), weights.dtype) * weights[None, None]
        whole = jnp.fft.fft(jax.lax.complex(parts[0], parts[1]))[:, : weights.size // 2]
        return jnp.stack([whole.real, whole.imag])

    return jax.lax.map(chunk, keys)
