"""Standard normal numbers for paths: independent, in pairs of opposites, or evenly spread."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count
from ...faq import see


def random_bits(key: PRNGKeyArray, places: Array, size: int) -> Array:
    """32 random bits `(k, size)` for the places `(k,)`, that belong to the key and a place.

    A key folded with a counter is itself random bits: one round of hashing, that compiles in a fraction of
    the time of `jax.random.bits`.
    """
    words = jax.random.key_data(key).shape[-1]
    blocks = -(-size // words)
    hashed = lambda i: jax.random.key_data(jax.random.fold_in(key, i))
    counters = places[:, None].astype("uint32") * blocks + jnp.arange(blocks, dtype="uint32")[None]
    bits = jax.vmap(jax.vmap(hashed))(counters)
    return jnp.reshape(bits, (len(places), -1))[:, :size]


def normal_numbers(key: PRNGKeyArray, places: Array, size: int, dtype: np.dtype) -> Array:
    """Standard normal numbers `(k, size)` for the places `(k,)`, that belong to the key and a place."""
    return normal_quantile(random_bits(key, places, size), dtype)


def normal_quantile(bits: Array, dtype: np.dtype) -> Array:
    return jax.scipy.special.ndtri(uniform_numbers(bits, dtype))


def uniform_numbers(bits: Array, dtype: np.dtype) -> Array:
    """Numbers in (0, 1): as many bits as the type holds, and half a unit up, so never 0 or 1."""
    kept = min(32, jnp.finfo(dtype).nmant)
    return ((bits >> (32 - kept)).astype(dtype) + 0.5) / 2.0**kept


class AbstractDraws(eqx.Module):
    """How the random numbers of `num_paths` paths are drawn.

    Numbers belong to a key and to a path's place in the sequence, so that paths can be drawn in any
    chunks, and more of them later. Paths come in groups that are independent of one another.
    """

    @abc.abstractmethod
    def group(self, num_paths: int) -> int:
        """How many paths make an independent group; raises if `num_paths` is not whole groups."""

    @abc.abstractmethod
    def normal(self, key: PRNGKeyArray, places: Array, group: int, size: int, dtype: np.dtype) -> Array:
        """Numbers `(k, size)` for the paths at `places` `(k,)`."""


class Independent(AbstractDraws):
    """Plain Monte Carlo.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1000, proposal=rf.Prior(rf.Independent()))
    ```
    """

    def group(self, num_paths: int) -> int:
        del num_paths
        return 1

    def normal(self, key: PRNGKeyArray, places: Array, group: int, size: int, dtype: np.dtype) -> Array:
        del group
        return normal_numbers(key, places, size, dtype)


class Antithetic(AbstractDraws):
    """Paths in pairs, one the other's mirror image: what is odd in the noise cancels.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1000, proposal=rf.Prior(rf.Antithetic()))
    ```
    """

    def group(self, num_paths: int) -> int:
        if num_paths % 2:
            raise ValueError(
                f"num_paths must be even for antithetic paths, got {num_paths}{see('numbers-of-paths')}"
            )
        return 2

    def normal(self, key: PRNGKeyArray, places: Array, group: int, size: int, dtype: np.dtype) -> Array:
        half = Independent().normal(key, places // 2, 1, size, dtype)
        return jnp.where((places % 2 == 0)[:, None], half, -half)


class Sobol(AbstractDraws):
    """Randomised quasi-Monte Carlo: a scrambled Sobol' sequence with random digital shifts.

    The paths fall into `num_replicates` independent shifts of one point set, and the standard error comes
    from the spread between them. `num_paths` is `num_replicates` times a power of two.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1024, proposal=rf.Prior(rf.Sobol()))
    ```
    """

    num_replicates: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        if check_count("num_replicates", self.num_replicates) < 2:
            raise ValueError("num_replicates must be at least 2: their spread is the standard error")

    def group(self, num_paths: int) -> int:
        each, rest = divmod(num_paths, self.num_replicates)
        if rest or each & (each - 1) or not each:
            told = f"num_paths must be {self.num_replicates} times a power of two, got {num_paths}"
            raise ValueError(told + see("numbers-of-paths"))
        return each

    def normal(self, key: PRNGKeyArray, places: Array, group: int, size: int, dtype: np.dtype) -> Array:
        points = scipy.stats.qmc.Sobol(size, scramble=True, rng=np.random.default_rng(0)).random(group)
        bits = jnp.asarray((points * 2.0**32).astype(np.uint32))
        shift = random_bits(key, places // group, size)
        return normal_quantile(bits[places % group] ^ shift, dtype)
