"""A checkerboard."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._distribution import AbstractDistribution, Window


class Checkerboard(AbstractDistribution):
    """Uniform on every other one of the sixteen squares of side 2 in [−4, 4]². Its entropy is ln 32."""

    extent: ClassVar[Window] = (-4.5, 4.5, -4.5, 4.5)

    @property
    def entropy(self) -> float:
        return math.log(32)

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_column, key_row, key_inside = jax.random.split(key, 3)
        column = jax.random.randint(key_column, shape, -2, 2)
        row = 2 * jax.random.randint(key_row, shape, -1, 1) + column % 2
        return 2 * (jnp.stack([column, row], axis=-1) + jax.random.uniform(key_inside, (*shape, 2)))

    def _log_prob(self, z: Array) -> Array:
        square = jnp.floor(z / 2)
        on = jnp.all((square >= -2) & (square < 2), axis=-1) & (jnp.sum(square, axis=-1) % 2 == 0)
        return jnp.where(on, -math.log(32), -jnp.inf).astype(z.dtype)
