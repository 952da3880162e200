"""Random numbers of paths: independent, or evenly spread by a scrambled Sobol' sequence."""

import abc
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count
from ..faq import see


def random_bits(key: PRNGKeyArray, indices: Array, size: int) -> Array:
    """32-bit words `(k, size)`, a row for each of the `indices` `(k,)`. A row depends only on the key and the
    index.

    The bits are the data of keys that are folded with a counter. This takes one round of hashing and compiles
    in a fraction of the time of `jax.random.bits`.
    """
    words = jax.random.key_data(key).shape[-1]
    blocks = -(-size // words)
    hashed = lambda i: jax.random.key_data(jax.random.fold_in(key, i))
    counters = indices[:, None].astype("uint32") * blocks + jnp.arange(blocks, dtype="uint32")[None]
    bits = jax.vmap(jax.vmap(hashed))(counters)
    return jnp.reshape(bits, (len(indices), -1))[:, :size]


def normal_draws(key: PRNGKeyArray, indices: Array, size: int, dtype: np.dtype) -> Array:
    """Standard normal draws `(k, size)`, a row for each of the `indices` `(k,)`. A row depends only on the
    key and the index."""
    return normal_quantile(random_bits(key, indices, size), dtype)


def normal_quantile(bits: Array, dtype: np.dtype) -> Array:
    return jax.scipy.special.ndtri(uniform_draws(bits, dtype))


def uniform_draws(bits: Array, dtype: np.dtype) -> Array:
    """Numbers in (0, 1) with as many bits as the type holds, shifted by half a unit so that they are never 0
    or 1."""
    kept = min(32, jnp.finfo(dtype).nmant)
    return ((bits >> (32 - kept)).astype(dtype) + 0.5) / 2.0**kept


def uniform_of(normal: Array) -> Array:
    """The standard normal distribution function with an absolute error comparable to rounding errors. This
    suffices for comparisons and compiles much faster than a version with accurate tails."""
    return 0.5 * (1 + jax.lax.erf(normal / 2**0.5))


class AbstractDraws(eqx.Module):
    """How the random numbers of paths are drawn.

    The random numbers of a path depend only on a key and on the index of the path in a sequence, so that
    paths can be drawn in chunks of any size, and more can be added later.
    """

    @abc.abstractmethod
    def check(self, num_paths: int) -> None:
        """Raise an error if the number of paths cannot be divided into the required groups."""

    @abc.abstractmethod
    def normal(self, key: PRNGKeyArray, indices: Array, max_paths: int, size: int, dtype: np.dtype) -> Array:
        """Standard normal draws `(k, size)` for the paths with the given `indices` `(k,)`, all of which are
        below `max_paths`."""

    @abc.abstractmethod
    def terms(self, weights: Any) -> Any:
        """Independent terms `(R, ...)` whose mean is that of the weights `(K, ...)` of the first K paths."""


class Independent(AbstractDraws):
    """Independent random numbers: plain Monte Carlo.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1000, proposal=rf.Prior(rf.density.Independent()))
    ```
    """

    def check(self, num_paths: int) -> None:
        del num_paths

    def normal(self, key: PRNGKeyArray, indices: Array, max_paths: int, size: int, dtype: np.dtype) -> Array:
        del max_paths
        return normal_draws(key, indices, size, dtype)

    def terms(self, weights: Any) -> Any:
        return weights


class Sobol(AbstractDraws):
    """Randomised quasi-Monte Carlo: a scrambled Sobol' sequence with random digital shifts.

    The paths are divided into `num_replicates` groups, which are independent random shifts of one sequence;
    the standard error is estimated from the spread of the group means. `num_paths` is `num_replicates` times
    a power of two.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1024, proposal=rf.Prior(rf.density.Sobol()))
    ```
    """

    num_replicates: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        if check_count("num_replicates", self.num_replicates) < 2:
            raise ValueError(
                "num_replicates must be at least 2, because the standard error is estimated from the spread "
                "of the replicates"
            )

    def check(self, num_paths: int) -> None:
        each, rest = divmod(num_paths, self.num_replicates)
        if rest or each & (each - 1) or not each:
            told = f"num_paths must be {self.num_replicates} times a power of two, got {num_paths}"
            raise ValueError(told + see("numbers-of-paths"))

    def normal(self, key: PRNGKeyArray, indices: Array, max_paths: int, size: int, dtype: np.dtype) -> Array:
        bits = jnp.asarray(_sobol_bits(-(-max_paths // self.num_replicates), size))
        shift = random_bits(key, indices % self.num_replicates, size)
        return normal_quantile(bits[indices // self.num_replicates] ^ shift, dtype)

    def terms(self, weights: Any) -> Any:
        return weights.reshape(-1, self.num_replicates, *weights.shape[1:]).mean(axis=0)


@functools.lru_cache(maxsize=8)
def _sobol_bits(count: int, size: int) -> np.ndarray:
    """The first `count` points of a scrambled Sobol' sequence, as 32 bits per coordinate."""
    power = max(count - 1, 0).bit_length()
    points = scipy.stats.qmc.Sobol(size, scramble=True, rng=np.random.default_rng(0)).random_base2(power)
    return (points * 2.0**32).astype(np.uint32)
