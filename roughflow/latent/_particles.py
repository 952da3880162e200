"""The likelihood of a latent SDE by particles that are guided by the posterior, and draws of the hidden
states.

Time is discretised: in one step, the drift is integrated by the midpoint rule, and the noise is evaluated at
the start of the step. (With Euler's rule, an oscillator would gain energy.) Between two observations each
particle moves by the SDE or, in units of the posterior, z = m(t) + L(t) u, by a scheme that leaves the
marginals of the posterior invariant. The weight of a path is its density under the SDE over that under the
mixture of both, at most 2, so that a poor posterior does not make a few weights huge. The mean weight is an
unbiased estimate of the likelihood of the discretised SDE.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._linear import log_abs_det, solve, solve_lower
from ..density import effective_paths, log_mean, systematic
from ..sde import apply_noise, noise_matrix, solve_noise, spread_at
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
    model: AbstractLatentSDE, reading: Reading, t: Array, dt: Array, u: Array, prior: Array, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """One step of the SDE if `prior` is true, else of the posterior process: u at time t + dt, and the
    logarithm of the ratio of the two densities of the step.

    With noise G = L⁻¹σ, the posterior process is du = (A − ½ G Gᵀ) u dt + L⁻¹ ½ div D dt + G dB. The
    trapezoidal rule for G and Cayley's rotation for A leave N(0, I) invariant for any dt.
    """
    now, turn = model.posterior.at(reading, t)
    later, _ = model.posterior.at(reading, t + dt)
    z, identity = now.mean + now.root @ u, jnp.eye(u.size, dtype=u.dtype)
    spread = spread_at(lambda y: model.sde.noise(t, y), z)
    noise = solve_lower(now.root, noise_matrix(spread.sigma))
    pull, half = 0.25 * dt * noise @ noise.T, 0.5 * dt * turn
    normal = jax.random.normal(key, u.shape, u.dtype)
    solved = lambda matrix, right: solve(matrix[None], right[None, :, None])[0, :, 0]
    start = u - pull @ u + dt * solve_lower(now.root, spread.drift(jnp.zeros_like(z)))
    pulled = solved(identity + pull, start + jnp.sqrt(dt) * noise @ normal)
    u_posterior = solved(identity - half, pulled + half @ pulled)
    mean = moved_by_drift(model, t, dt, z)
    z_prior = mean + jnp.sqrt(dt) * apply_noise(spread.sigma, normal)
    u_later = jnp.where(prior, solve_lower(later.root, z_prior - later.mean), u_posterior)
    # The normal increments with which the SDE and the posterior process take this step. Constants and |det σ|
    # cancel.
    residual = solve_noise(spread.sigma, later.mean + later.root @ u_later - mean) / jnp.sqrt(dt)
    turned_back = solved(identity + half, u_later - half @ u_later)
    increment = now.root @ (turned_back + pull @ turned_back - start)
    own = solve_noise(spread.sigma, increment) / jnp.sqrt(dt)
    size = lambda root: jnp.sum(jnp.log(jnp.diagonal(root)))
    stretch = size(later.root) - size(now.root) - log_abs_det((identity + pull)[None])[0]
    return u_later, 0.5 * jnp.sum(own**2) - 0.5 * jnp.sum(residual**2) + stretch


def particle_filter(
    model: AbstractLatentSDE,
    series: Series,
    num_particles: int,
    num_steps: int,
    *,
    key: PRNGKeyArray,
    keep: bool = True,
    prior_share: float = 0.5,
) -> Cloud:
    """Particles at the last time, with `num_steps` steps between consecutive observations.

    Particles are resampled after an observation if fewer than half of them are effective. `keep` specifies
    whether to store their states at observations, and `prior_share` is the probability with which a particle
    moves by the SDE and not by the posterior.
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
        key_pick, key_prior, key_steps = jax.random.split(key, 3)
        cloud = resampled(cloud, key_pick)
        prior = jax.random.bernoulli(key_prior, prior_share, (num_particles,))
        dt = (times[i + 1] - times[i]) / num_steps

        def step(carry: Moving, inputs: tuple[Array, PRNGKeyArray]) -> tuple[Moving, None]:
            u, ratios = carry
            j, key = inputs
            one = lambda u, prior, key: move(model, reading, times[i] + j * dt, dt, u, prior, key)
            u, change = jax.vmap(one)(u, prior, jax.random.split(key, num_particles))
            return (u, ratios + change), None

        keys = jax.random.split(key_steps, num_steps)
        blank = jnp.zeros_like(cloud.log_weight)
        (u, ratios), _ = jax.lax.scan(step, (cloud.u, blank), (jnp.arange(num_steps), keys))
        # The density of the path under the SDE, over that under a mixture of both processes.
        weights = -jnp.logaddexp(jnp.log(prior_share), jnp.log1p(-prior_share) - ratios)
        moved = observe(eqx.tree_at(lambda c: c.u, cloud, u), i + 1, weights)
        # A shorter series has ended, and its last time is repeated.
        return jax.tree.map(lambda new, old: jnp.where(dt > 0, new, old), moved, cloud), None

    places = jnp.arange(len(times) - 1)
    cloud, _ = jax.lax.scan(between, cloud, (places, jax.random.split(key_moves, len(places))))
    total = cloud.log_likelihood + log_mean(cloud.log_weight)
    return eqx.tree_at(lambda c: c.log_likelihood, cloud, total)


def resampled(cloud: Cloud, key: PRNGKeyArray, share: float = 0.5) -> Cloud:
    """Resample the particles to equal weights if the effective ones are fewer than the fraction `share`."""
    count = len(cloud.log_weight)
    picked = systematic(jax.nn.softmax(cloud.log_weight), jax.random.uniform(key))
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
