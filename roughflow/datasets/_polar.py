"""The plane in polar coordinates."""

import jax.numpy as jnp
from jaxtyping import Array


def polar(radius: Array, angle: Array) -> Array:
    return jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)


def radius_of(z: Array) -> Array:
    """|z|, with gradient zero at the origin."""
    square = jnp.sum(z**2, axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def rotate(z: Array, angle: Array) -> Array:
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos * z[..., 0] - sin * z[..., 1], sin * z[..., 0] + cos * z[..., 1]], axis=-1)
