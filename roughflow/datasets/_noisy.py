"""Points and curves with normal noise."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray
from scipy import special

LOG_2PI = math.log(2 * math.pi)


def log_normal(residual: Array, scale: float) -> Array:
    return -0.5 * (residual / scale) ** 2 - 0.5 * LOG_2PI - math.log(scale)


def noisy(centres: Array, noise: float, key: PRNGKeyArray) -> Array:
    return centres + noise * jax.random.normal(key, centres.shape)


def quadrature(num_nodes: int) -> tuple[Array, Array]:
    """Nodes and weights of Gauss–Legendre on [0, 1]."""
    nodes, weights = special.roots_legendre(num_nodes)
    return jnp.asarray(0.5 * (nodes + 1)), jnp.asarray(0.5 * weights)


def log_mixture(z: Array, centres: Array, weights: Array, noise: float) -> Array:
    """log Σₖ wₖ N(z; cₖ, noise² I): a mixture; or, with nodes and weights of a quadrature, a noisy curve.

    The centres come in blocks, and their terms are computed anew for the gradient: memory does not grow
    with their number, under `vmap` neither.
    """
    points = jnp.reshape(z, (-1, 2)) / noise
    block = math.gcd(weights.size, 32)
    centres = jnp.reshape(centres.astype(z.dtype) / noise, (-1, block, 2))
    log_weights = jnp.reshape(jnp.log(weights.astype(z.dtype)), (-1, block))

    @jax.checkpoint
    def add(total, part):
        centre, log_weight = part
        square = jnp.sum((points[:, None] - centre[None]) ** 2, axis=-1)
        return jnp.logaddexp(total, jax.nn.logsumexp(log_weight[None] - 0.5 * square, axis=-1)), None

    nothing = jnp.full(points.shape[:1], -jnp.inf, z.dtype)
    total, _ = jax.lax.scan(add, nothing, (centres, log_weights))
    return jnp.reshape(total, z.shape[:-1]) - LOG_2PI - 2 * math.log(noise)


def with_mirror_image(centres: Array, weights: Array) -> tuple[Array, Array]:
    """A curve and its reflection in the origin, half the mass on each."""
    return jnp.concatenate([centres, -centres]), 0.5 * jnp.concatenate([weights, weights])


def mirror_at_random(z: Array, key: PRNGKeyArray) -> Array:
    return z * jax.random.rademacher(key, (*z.shape[:-1], 1), z.dtype)
