"""Derivatives along the axes, no more of them than need be."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._linear import UNROLL
from ._dependence import is_entrywise
from ._noise import Noise, noise_diagonal

Index = Array | np.integer
Total = TypeVar("Total")


def axis(z: Array, k: Index) -> Array:
    """eₖ, of the shape of z."""
    return jnp.zeros_like(z).at[k].set(1)


def sum_over(count: int, term: Callable[[Index], Total], zero: Total) -> Total:
    """Σₖ term(k)."""
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    if count <= UNROLL:
        for k in np.arange(count):
            zero = add(zero, term(k))
        return zero
    return jax.tree.map(lambda terms: jnp.sum(terms, axis=0), jax.vmap(term)(jnp.arange(count)))


def diagonal_slopes(noise: Callable[[Array], Noise], z: Array) -> tuple[Array, Array]:
    """sₖ and ∂ₖsₖ of a noise diag(s): by one product where sₖ depends on zₖ alone, for all k, else by d."""
    entries = lambda y: noise_diagonal(noise(y))
    if is_entrywise(entries, z):
        return jax.jvp(entries, (z,), (jnp.ones_like(z),))
    values, tangent = jax.linearize(entries, z)
    places = jnp.arange(z.size)
    own = lambda k: jnp.where(places == k, tangent(axis(z, k)), 0)
    return values, sum_over(z.size, own, jnp.zeros_like(z))
