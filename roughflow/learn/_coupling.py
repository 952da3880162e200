"""Which point of the base goes with which row of the data."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

SWEEPS = 100


def coupled(z: Array, x: Array, weight: float | Array, key: PRNGKeyArray) -> Array:
    """For each row of x a row of z, drawn from the plan of entropic optimal transport between the two."""
    log_plan = sinkhorn(z, x, weight)
    return z[jax.random.categorical(key, log_plan.T, axis=-1)]


def sinkhorn(z: Array, x: Array, weight: float | Array) -> Array:
    """The logarithm of the plan P that minimises Σᵢⱼ Pᵢⱼ |zᵢ − xⱼ|² + ε Σᵢⱼ Pᵢⱼ log Pᵢⱼ with equal marginals.

    ε is `weight` times the mean squared distance of the two about their means, which do not matter to the
    plan (Cuturi 2013). Rows and columns are scaled in turn, in logarithms, the columns last.
    """
    z, x = z - jnp.mean(z, axis=0, keepdims=True), x - jnp.mean(x, axis=0, keepdims=True)
    squares = jnp.sum((z[:, None] - x[None]) ** 2, axis=-1)
    score = -squares / (weight * jnp.mean(squares))
    rows, columns = -jnp.log(z.shape[0]), -jnp.log(x.shape[0])

    def sweep(_, potentials: tuple[Array, Array]) -> tuple[Array, Array]:
        _, g = potentials
        f = rows - jax.nn.logsumexp(score + g[None], axis=1)
        return f, columns - jax.nn.logsumexp(score + f[:, None], axis=0)

    start = jnp.zeros_like(score[:, 0]), jnp.zeros_like(score[0])
    f, g = jax.lax.fori_loop(0, SWEEPS, sweep, start)
    return score + f[:, None] + g[None]
