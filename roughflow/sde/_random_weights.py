"""Weights that networks begin with, each kind from one small program."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit


@partial(jit, level=0)
def random_weights(
    key: PRNGKeyArray, sizes: tuple[int, ...], scale: float
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Random weights, those of the last layer with the factor `scale`, and biases of zero; one program for
    all of them."""
    keys = jax.random.split(key, len(sizes) - 1)
    weights = [
        jax.random.normal(k, (i, o)) / np.sqrt(i)
        for k, (i, o) in zip(keys, itertools.pairwise(sizes), strict=True)
    ]
    return (*weights[:-1], scale * weights[-1]), tuple(jnp.zeros(o) for o in sizes[1:])


@partial(jit, level=0)
def normal_matrix(key: PRNGKeyArray, rows: int, columns: int, scale: float) -> Array:
    """Independent normal entries with standard deviation `scale`."""
    return scale * jax.random.normal(key, (rows, columns))
