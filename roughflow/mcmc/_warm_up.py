"""A constant noise and a step that suit a target, found by trying."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key
from ..sde import LogDensity, as_target, overdamped_langevin
from ._sampler import Adjusted, SamplerState

ACCEPTANCE = 0.574  # of Langevin proposals at their best, in many dimensions (Roberts & Rosenthal 1998)
ROUNDS = 4
CLIMB = 50  # steps of Newton's method


def warm_up(
    log_density: LogDensity, z0: Array, *, key: PRNGKeyArray, num_steps: int = 2000, climb: bool = True
) -> tuple[Adjusted, Array]:
    """MALA for a target: an `rf.Adjusted` sampler with constant noise, and where its chains have got to.

    First each chain climbs to a mode near it (Newton's method), whose curvature gives a first σ; leave that
    out with `climb=False` where the mode is far from the mass, as in a funnel. Then, in four rounds, the
    chains move, the step dt follows their acceptance towards 0.574 (Robbins & Monro), and after each round
    but the last σσᵀ becomes the covariance of their places. Nothing is adapted after that, so the sampler's
    law is exact.

    **Arguments:** `log_density`; `z0`, `(chains, d)`, a few chains at least; `num_steps` in all, each a
    gradient a chain.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    target = lambda z: -0.5 * (z[0] ** 2 + (z[1] / 100) ** 2)
    sampler, z = rf.warm_up(target, jnp.zeros((8, 2)), key=jax.random.key(0), num_steps=400)
    chain = rf.sample_chain(sampler, z, key=jax.random.key(1), num_steps=1000)
    ```
    """
    z = jnp.asarray(z0, float)
    if z.ndim != 2:
        raise ValueError(f"z0 must have shape (chains, d), got {z.shape}")
    length = max(1, check_count("num_steps", num_steps) // ROUNDS)
    scale, dt = jnp.eye(z.shape[1]), jnp.asarray(0.1)
    Adjusted(overdamped_langevin(log_density, z.shape[1]), dt).check(z)
    key, key_climb = jax.random.split(check_key(key))
    if climb:
        scale, z = _climb(log_density, z, key_climb)
        dt = jnp.asarray(z.shape[1] ** (-1 / 3))
    sampler = Adjusted(overdamped_langevin(log_density, z.shape[1], scale=scale), dt)
    for i, key_round in enumerate(jax.random.split(key, ROUNDS)):
        states, dt = _round(sampler, z, key_round, length)
        z = states[-1]
        if i < ROUNDS - 1:
            scale = _spread(states[length // 2 :])
            # Steps are now in units of the target's own size.
            dt = jnp.asarray(z.shape[1] ** (-1 / 3))
        sampler = Adjusted(overdamped_langevin(log_density, z.shape[1], scale=scale), dt)
    return sampler, z


@eqx.filter_jit
def _climb(log_density: LogDensity, z: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
    """A root of the inverse curvature where the chains have climbed to, and places around there."""
    target = as_target(log_density)
    lengths = 0.5 ** jnp.arange(10.0)

    def uphill(y: Array) -> Array:
        """Newton's step, with the curvature's absolute value, as long as it pays best."""
        step = _inverse_curvature(target, y) @ jax.grad(target)(y)
        tries = jnp.concatenate([y[None] + lengths[:, None] * step[None], y[None]])
        values = jax.vmap(target)(tries)
        return tries[jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values))]

    # One chain after another: the matrices are small, and LAPACK takes no batches well.
    tops = jax.lax.map(lambda y: jax.lax.fori_loop(0, CLIMB, lambda _, x: uphill(x), y), z)
    highest = tops[jnp.argmax(jax.vmap(target)(tops))]
    scale = _root(_inverse_curvature(target, highest))
    around = tops + jax.random.normal(key, z.shape, z.dtype) @ scale.T
    finite = jnp.isfinite(jax.vmap(target)(around))
    return scale, jnp.where(finite[:, None], around, z)


def _inverse_curvature(target: LogDensity, y: Array) -> Array:
    values, vectors = jnp.linalg.eigh(jax.hessian(target)(y))
    size = jnp.maximum(jnp.abs(values), 1e-12 * jnp.max(jnp.abs(values)))
    return (vectors / size[None]) @ vectors.T


@eqx.filter_jit
def _round(sampler: Adjusted, z: Array, key: PRNGKeyArray, length: int) -> tuple[Array, Array]:
    """The places of all chains after each step, and the step size of the later half, on average."""

    def step(
        carry: tuple[SamplerState, Array], inputs: tuple[Array, PRNGKeyArray]
    ) -> tuple[tuple[SamplerState, Array], tuple[Array, Array]]:
        state, log_dt = carry
        i, key = inputs
        now = eqx.tree_at(lambda s: s.dt, sampler, jnp.exp(log_dt))
        state, info = jax.vmap(now.step)(jax.random.split(key, z.shape[0]), state)
        log_dt = log_dt + (1 + i) ** -0.6 * (jnp.mean(info.acceptance) - ACCEPTANCE)
        return (state, log_dt), (state.z, log_dt)

    start = jax.vmap(sampler.init)(z), jnp.log(jnp.asarray(sampler.dt, z.dtype))
    inputs = jnp.arange(length, dtype=z.dtype), jax.random.split(key, length)
    _, (places, log_dt) = jax.lax.scan(step, start, inputs)
    return places, jnp.exp(jnp.mean(log_dt[length // 2 :]))


def _spread(places: Array) -> Array:
    """A root of the covariance of the places, a little towards its diagonal."""
    rows = jnp.reshape(places, (-1, places.shape[-1]))
    covariance = jnp.atleast_2d(jnp.cov(rows.T))
    weight = places.shape[-1] / (places.shape[-1] + rows.shape[0])
    return _root((1 - weight) * covariance + weight * jnp.diag(jnp.diag(covariance)))


def _root(covariance: Array) -> Array:
    """A root of a matrix that ought to be positive, and is made so."""
    values, vectors = jnp.linalg.eigh(0.5 * (covariance + covariance.T))
    return vectors * jnp.sqrt(jnp.maximum(values, 1e-12 * jnp.max(values)))[None]
