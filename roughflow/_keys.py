"""Keys from keys, outside of programs: JAX's own functions take a fifth of a second each to compile."""

from functools import partial

import jax
from jaxtyping import Array, PRNGKeyArray

from ._programs import jit


@partial(jit, level=0)
def split(key: PRNGKeyArray, count: int = 2) -> tuple[PRNGKeyArray, ...]:
    """So many keys from one, those of `jax.random.split`."""
    return tuple(jax.random.split(key, count))


@partial(jit, level=0)
def fold_in(key: PRNGKeyArray, number: Array | int) -> PRNGKeyArray:
    """As `jax.random.fold_in`."""
    return jax.random.fold_in(key, number)
