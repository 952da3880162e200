"""The likelihood of a latent SDE by particles that are guided by the posterior, and draws of the hidden
states.

Time is discretised: in one step, the drift is integrated by the midpoint rule, and the noise is evaluated at
the start of the step. (With Euler's rule, an oscillator would gain energy.) Particles move in units of the
posterior, z = m(t) + L(t) u, by a scheme that leaves the marginals of the posterior invariant; their weights
are ratios of the density of a step of the SDE to the density of the move. The mean weight is an unbiased
estimate of the likelihood of the discretised SDE.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._linear import log_abs_det, solve, solve_lower
from ..density import effective_paths, log_mean
from ..sde import apply_noise, noise_matrix, solve_noise, spread_at
from ..series.hidden._particles import systematic
from ._posterior import AbstractLatentSDE, Reading, Series

Moving = tuple[Array, Array]  # particles between observations, and changes of their log-weights


class Cloud(eqx.Module):
    """Particles `u` in units of the posterior, their log-weights, the log-likelihood so far, and the past
    states of each particle at observations, `(K, N, d)`."""

    u: Array
    log_weight: Array
    log_likelihood: Array
    fewest: Array  # smallest effective number of particles so far
    history: Array


def moved_by_drift(model: AbstractLatentSDE, t: Array, dt: Array, z: Array) -> Array:
    """The mean of one step of the SDE, by the midpoint rule."""
    return z + dt * model.drift(t + 0.5 * dt, z + 0.5 * dt * model.drift(t, z))


def move(
    model: AbstractLatentSDE, reading: Reading, t: Array, dt: Array, u: Array, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """One step: u at time t + dt, and the logarithm of its weight.

    With noise G = L⁻¹σ, the posterior process is du = (A − ½ G Gᵀ) u dt + L⁻¹ ½ div D dt + G dB. The
    trapezoidal rule for G and Cayley's rotation for A leave N(0, I) invariant for any dt.
    """
    now, turn = model.posterior.at(reading, t)
    later, _ = model.posterior.at(reading, t + dt)
    z, identity = now.mean + now.root @ u, jnp.eye(u.size, dtype=u.dtype)
    spread = spread_at(lambda y: model.sde.noise(t, y), z)
    noise = solve_lower(now.root, noise_matrix(spread.sigma))
    pull = 0.25 * dt * noise @ noise.T
    normal = jax.random.normal(key, u.shape, u.dtype)
    drift = solve_lower(now.root, spread.drift(jnp.zeros_like(z)))
    solved = lambda matrix, right: solve(matrix[None], right[None, :, None])[0, :, 0]
    moved = solved(identity + pull, u - pull @ u + dt * drift + jnp.sqrt(dt) * noise @ normal)
    u_later = solved(identity - 0.5 * dt * turn, moved + 0.5 * dt * turn @ moved)
    # Two densities of the new point: that of a step of the SDE, and that of the move. Constants and |det σ|
    # cancel.
    z_later = later.mean + later.root @ u_later
    residual = solve_noise(spread.sigma, z_later - moved_by_drift(model, t, dt, z)) / jnp.sqrt(dt)
    size = lambda root: jnp.sum(jnp.log(jnp.diagonal(root)))
    stretch = size(later.root) - size(now.root) - log_abs_det((identity + pull)[None])[0]
    return u_later, 0.5 * jnp.sum(normal**2) - 0.5 * jnp.sum(residual**2) + stretch


def particle_filter(
    model: AbstractLatentSDE,
    series: Series,
    num_particles: int,
    num_steps: int,
    *,
    key: PRNGKeyArray,
    keep: bool = True,
) -> Cloud:
    """Particles at the last time, with `num_steps` steps between consecutive observations.

    Particles are resampled after an observation if fewer than half of them are effective. `keep` specifies
    whether to store their states at observations.
    """
    key_start, key_moves = jax.random.split(key)
    reading, times = model.posterior.read(series), series.times
    u = jax.random.normal(key_start, (num_particles, model.dimension), times.dtype)

    def observe(cloud: Cloud, i: Array, weights: Array) -> Cloud:
        marginal, _ = model.posterior.at(reading, times[i])
        z = marginal.mean[None] + cloud.u @ marginal.root.T
        observed = jax.vmap(lambda z: model.observed(z, series.values[i], series.seen[i]))(z)
        log_weight = cloud.log_weight + weights + observed
        fewest = jnp.minimum(cloud.fewest, effective(log_weight))
        history = cloud.history.at[:, i].set(z) if keep else cloud.history
        return Cloud(cloud.u, log_weight, cloud.log_likelihood, fewest, history)

    first, _ = model.posterior.at(reading, times[0])
    start = lambda u: model.initial.log_prob(first.mean + first.root @ u) - first.log_prob_at(u)
    blank = jnp.zeros((num_particles, len(times) if keep else 0, model.dimension), times.dtype)
    zero = jnp.zeros((), times.dtype)
    cloud = Cloud(u, jnp.zeros(num_particles, times.dtype), zero, zero + num_particles, blank)
    cloud = observe(cloud, jnp.asarray(0), jax.vmap(start)(u))

    def between(cloud: Cloud, inputs: tuple[Array, PRNGKeyArray]) -> tuple[Cloud, None]:
        i, key = inputs
        key_pick, key_steps = jax.random.split(key)
        cloud = resampled(cloud, key_pick)
        dt = (times[i + 1] - times[i]) / num_steps

        def step(carry: Moving, inputs: tuple[Array, PRNGKeyArray]) -> tuple[Moving, None]:
            u, weights = carry
            j, key = inputs
            one = lambda u, key: move(model, reading, times[i] + j * dt, dt, u, key)
            u, change = jax.vmap(one)(u, jax.random.split(key, num_particles))
            return (u, weights + change), None

        keys = jax.random.split(key_steps, num_steps)
        blank = jnp.zeros_like(cloud.log_weight)
        (u, weights), _ = jax.lax.scan(step, (cloud.u, blank), (jnp.arange(num_steps), keys))
        moved = observe(eqx.tree_at(lambda c: c.u, cloud, u), i + 1, weights)
        # A shorter series has ended, and its last time is repeated.
        return jax.tree.map(lambda new, old: jnp.where(dt > 0, new, old), moved, cloud), None

    places = jnp.arange(len(times) - 1)
    cloud, _ = jax.lax.scan(between, cloud, (places, jax.random.split(key_moves, len(places))))
    total = cloud.log_likelihood + log_mean(cloud.log_weight)
    return eqx.tree_at(lambda c: c.log_likelihood, cloud, total)


def resampled(cloud: Cloud, key: PRNGKeyArray, share: float = 0.5) -> Cloud:
    """Resample to particles of equal weight if their effective number is below the fraction `share`."""
    count = len(cloud.log_weight)
    picked = systematic(jax.nn.softmax(cloud.log_weight), key)
    poor = effective(cloud.log_weight) < share * count
    picked = jnp.where(poor, picked, jnp.arange(count))
    gained = cloud.log_likelihood + log_mean(cloud.log_weight)
    return Cloud(
        cloud.u[picked],
        jnp.where(poor, 0, cloud.log_weight),
        jnp.where(poor, gained, cloud.log_likelihood),
        cloud.fewest,
        cloud.history[picked],
    )


def effective(log_weight: Array) -> Array:
    """Effective number of particles."""
    return effective_paths(jax.nn.softmax(log_weight))


def simulated(
    model: AbstractLatentSDE, z: Array, times: Array, num_steps: int, *, key: PRNGKeyArray
) -> Array:
    """One path of the SDE from z at the first of `times`: `(N, d)`."""

    def between(z: Array, inputs: tuple[Array, Array, PRNGKeyArray]) -> tuple[Array, Array]:
        start, end, key = inputs
        dt = (end - start) / num_steps

        def step(z: Array, inputs: tuple[Array, PRNGKeyArray]) -> tuple[Array, None]:
            t = start + inputs[0] * dt
            normal = jax.random.normal(inputs[1], z.shape, z.dtype)
            noise = apply_noise(model.sde.noise(t, z), normal)
            return moved_by_drift(model, t, dt, z) + jnp.sqrt(dt) * noise, None

        z, _ = jax.lax.scan(step, z, (jnp.arange(num_steps), jax.random.split(key, num_steps)))
        return z, z

    keys = jax.random.split(key, len(times) - 1)
    _, rest = jax.lax.scan(between, z, (times[:-1], times[1:], keys))
    return jnp.concatenate([z[None], rest])
