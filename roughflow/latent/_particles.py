"""The likelihood of a latent SDE by particles that are guided by the observations, and draws of the hidden
states.

Time is discretised by Heun's method, which is of weak order 2 if the noise does not depend on the state.
(With Euler's method, an oscillator would gain energy.) Between two
observations most particles follow the SDE conditioned on an approximation of the next observation, and the
others follow the SDE itself. The weight of a path is the ratio of its density under the SDE to that under the
mixture of both. The ratio is at most 5, so a poor approximation does not make a few weights huge. The mean
weight is an unbiased estimate of the likelihood of the discretised SDE.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._linear import cholesky, solve_lower, solve_upper
from ..density import effective_paths, log_mean, systematic
from ..sde import apply_noise, noise_matrix
from ._posterior import AbstractLatentSDE, Series

GUIDED = 0.8  # fraction of particles that are guided by the next observation


class Cloud(eqx.Module):
    """Particles `z`, their log-weights, the log-likelihood so far, and the past states of each particle at
    observations, `(K, N, d)`."""

    z: Array
    log_weight: Array
    log_likelihood: Array
    fewest: Array  # smallest effective number of particles so far
    history: Array


class Target(eqx.Module):
    """The next observation: its time, values, and which of them are observed."""

    time: Array
    values: Array
    seen: Array


def stepped(model: AbstractLatentSDE, t: Array, dt: Array, z: Array, normal: Array) -> Array:
    """One step of the SDE by Heun's method, with the noise √dt σ(z) times a normal vector. Time is that of
    the middle of the step, so jumps of inputs between steps do no harm."""
    middle = t + 0.5 * dt
    noise = jnp.sqrt(dt) * apply_noise(model.sde.noise(middle, z), normal)
    slope = model.drift(middle, z)
    return z + 0.5 * dt * (slope + model.drift(middle, z + dt * slope + noise)) + noise


def move(
    model: AbstractLatentSDE, target: Target, t: Array, dt: Array, z: Array, guided: Array, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Take one step of the SDE, conditioned on the next observation if `guided` is true. Return z at time
    t + dt, and the log-ratio of the density of the guided step to that of the SDE.

    The step depends on a normal ε. The state at the observation is about e + σ (√dt ε + √T ε′), where e
    extrapolates the drift, T is the time left after the step, and ε′ is normal too. With the
    second-order expansion h w − ½ wᵀJ w of the log-density of the observation at e + σ w, ε given the
    observation is normal with mean √dt M⁻¹h and covariance (T I + dt M⁻¹)/(T + dt), M = I + (T + dt) J. If M
    is not positive definite, the step is that of the SDE.
    """
    middle, rest = t + 0.5 * dt, jnp.maximum(target.time - t - dt, 0)
    sigma, identity = noise_matrix(model.sde.noise(middle, z)), jnp.eye(z.size, dtype=z.dtype)
    end = z + (rest + dt) * model.drift(middle, z)
    log_prob = lambda w: model.observed(end + sigma @ w, target.values, target.seen)
    slope, curvature = jax.grad(log_prob)(0 * z), jax.hessian(log_prob)(0 * z)
    factor = cholesky(identity - (rest + dt) * curvature)
    inverse = solve_upper(factor, solve_lower(factor, identity))
    centre = jnp.sqrt(dt) * inverse @ slope
    root = cholesky((rest * identity + dt * inverse) / (rest + dt))
    usable = jnp.isfinite(jnp.sum(root))
    centre, root = jnp.where(usable, centre, 0), jnp.where(usable, root, identity)
    normal = jax.random.normal(key, z.shape, z.dtype)
    increment = jnp.where(guided, centre + root @ normal, normal)
    own = solve_lower(root, increment - centre)
    ratio = 0.5 * jnp.sum(increment**2 - own**2) - jnp.sum(jnp.log(jnp.diagonal(root)))
    return stepped(model, t, dt, z, increment), ratio


def particle_filter(
    model: AbstractLatentSDE,
    series: Series,
    num_particles: int,
    num_steps: int,
    *,
    key: PRNGKeyArray,
    keep: bool = True,
) -> Cloud:
    """Run a particle filter with `num_steps` steps between consecutive observations, and return the particles
    at the last time.

    Particles are resampled after an observation if fewer than half of them are effective. `keep` specifies
    whether to store their states at observations.
    """
    keys, model = jax.random.split(key, 4), model.driven(series.inputs)
    times = series.times

    def observe(cloud: Cloud, i: Array, weights: Array) -> Cloud:
        observed = jax.vmap(lambda z: model.observed(z, series.values[i], series.seen[i]))(cloud.z)
        log_weight = cloud.log_weight + weights + observed
        fewest = jnp.minimum(cloud.fewest, effective(log_weight))
        history = cloud.history.at[:, i].set(cloud.z) if keep else cloud.history
        return Cloud(cloud.z, log_weight, cloud.log_likelihood, fewest, history)

    # First states are drawn from a mixture of their distribution and the posterior.
    first, _ = model.posterior.at(model.posterior.read(series), times[0])
    u = jax.random.normal(keys[0], (num_particles, model.dimension), times.dtype)
    prior = jnp.asarray(model.initial.sample(key=keys[1], shape=(num_particles,)), times.dtype)
    chosen = jax.random.bernoulli(keys[2], GUIDED, (num_particles, 1))
    z = jnp.where(chosen, first.mean[None] + u @ first.root.T, prior)
    ratios = jax.vmap(lambda z: first.log_prob(z) - model.initial.log_prob(z))(z)
    blank = jnp.zeros((num_particles, len(times) if keep else 0, model.dimension), times.dtype)
    zero = jnp.zeros((), times.dtype)
    cloud = Cloud(z, jnp.zeros(num_particles, times.dtype), zero, zero + num_particles, blank)
    cloud = observe(cloud, jnp.asarray(0), of_mixture(ratios))

    def between(cloud: Cloud, inputs: tuple[Array, PRNGKeyArray]) -> tuple[Cloud, None]:
        i, key = inputs
        key_pick, key_guided, key_steps = jax.random.split(key, 3)
        cloud = resampled(cloud, key_pick)
        guided = jax.random.bernoulli(key_guided, GUIDED, (num_particles,))
        target = Target(times[i + 1], series.values[i + 1], series.seen[i + 1])
        dt = (times[i + 1] - times[i]) / num_steps

        def step(carry: tuple[Array, Array], inputs: tuple[Array, PRNGKeyArray]):
            z, ratios = carry
            t, keys = times[i] + inputs[0] * dt, jax.random.split(inputs[1], num_particles)
            one = lambda z, guided, key: move(model, target, t, dt, z, guided, key)
            z, change = jax.vmap(one)(z, guided, keys)
            return (z, ratios + change), None

        steps = jnp.arange(num_steps), jax.random.split(key_steps, num_steps)
        (z, ratios), _ = jax.lax.scan(step, (cloud.z, jnp.zeros_like(cloud.log_weight)), steps)
        moved = observe(eqx.tree_at(lambda c: c.z, cloud, z), i + 1, of_mixture(ratios))
        # If dt is zero, a shorter series has ended, and its last time is repeated.
        return jax.tree.map(lambda new, old: jnp.where(dt > 0, new, old), moved, cloud), None

    places = jnp.arange(len(times) - 1)
    cloud, _ = jax.lax.scan(between, cloud, (places, jax.random.split(keys[3], len(places))))
    total = cloud.log_likelihood + log_mean(cloud.log_weight)
    return eqx.tree_at(lambda c: c.log_likelihood, cloud, total)


def of_mixture(ratios: Array) -> Array:
    """The log-ratios of p to the mixture of p and q, from the log-ratios of q to p."""
    return -jnp.logaddexp(jnp.log(1 - GUIDED), jnp.log(GUIDED) + ratios)


def resampled(cloud: Cloud, key: PRNGKeyArray, share: float = 0.5) -> Cloud:
    """Resample the particles to equal weights if the fraction of effective particles is below `share`."""
    count = len(cloud.log_weight)
    picked = systematic(jax.nn.softmax(cloud.log_weight), jax.random.uniform(key))
    poor = effective(cloud.log_weight) < share * count
    picked = jnp.where(poor, picked, jnp.arange(count))
    gained = cloud.log_likelihood + log_mean(cloud.log_weight)
    return Cloud(
        cloud.z[picked],
        jnp.where(poor, 0, cloud.log_weight),
        jnp.where(poor, gained, cloud.log_likelihood),
        cloud.fewest,
        cloud.history[picked],
    )


def effective(log_weight: Array) -> Array:
    """The effective number of particles."""
    return effective_paths(jax.nn.softmax(log_weight))


def simulated(
    model: AbstractLatentSDE, z: Array, times: Array, num_steps: int, *, key: PRNGKeyArray
) -> Array:
    """Simulate one path `(N, d)` of the SDE at `times`, starting from z at the first time."""

    def between(z: Array, inputs: tuple[Array, Array, PRNGKeyArray]) -> tuple[Array, Array]:
        start, end, key = inputs
        dt = (end - start) / num_steps

        def step(z: Array, inputs: tuple[Array, PRNGKeyArray]) -> tuple[Array, None]:
            normal = jax.random.normal(inputs[1], z.shape, z.dtype)
            return stepped(model, start + inputs[0] * dt, dt, z, normal), None

        z, _ = jax.lax.scan(step, z, (jnp.arange(num_steps), jax.random.split(key, num_steps)))
        return z, z

    keys = jax.random.split(key, len(times) - 1)
    _, rest = jax.lax.scan(between, z, (times[:-1], times[1:], keys))
    return jnp.concatenate([z[None], rest])
