"""A particle filter: what values with errors say of the states behind them, as they come."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ._hidden_states import Joint
from ._residuals import LIMIT, distance
from ._simulation import draw, is_known, refined, warn_of_exits

PARTICLES = 2048


class Filtered(eqx.Module):
    """Of each value but the first of a series: `uniform` `(N,)`, P(Y ≤ y | values before), of its first
    column, and `log_prob` `(N,)`. `last` `(K, d)` are draws of the last state given all values."""

    uniform: Array
    log_prob: Array
    last: Array


def particle_filter(joint: Joint, key: PRNGKeyArray, count: int) -> Filtered:
    """With exact transitions, or in steps so short that halving them does not change the result."""
    if is_known(joint.sde, joint.observed.values[0]):
        return _run(joint, key, count, jnp.asarray(1))
    change = lambda a, b: distance(np.asarray(a.uniform), np.asarray(b.uniform), count)
    found = refined(lambda num_steps: _run(joint, key, count, num_steps), change, LIMIT)
    warn_of_exits(int(jnp.isnan(found.last).any(axis=1).sum()), count)
    return found


@functools.partial(jit, level=1)
def _run(joint: Joint, key: PRNGKeyArray, count: int, num_steps: Array) -> Filtered:
    """By particles that move as the SDE says, and are chosen anew after each value (Gordon, Salmond & Smith
    1993), systematically (Carpenter, Clifford & Fearnhead 1999)."""
    observed, coordinates = joint.observed, joint.coordinates
    # Of each value, the transition that leads to it; where a series begins, any.
    lead = jnp.clip(jnp.cumsum(~observed.first) - 1, 0)
    many = (observed.values, observed.first, observed.times[lead], observed.dt[lead])

    def step(particles: Array, now: tuple) -> tuple[Array, tuple[Array, Array]]:
        (value, first, time, dt), key = now
        key_move, key_start, key_choice = jax.random.split(key, 3)
        one = lambda x, key: draw(joint.sde, coordinates, x, time, dt, num_steps, key)
        moved = jax.vmap(one)(particles, jax.random.split(key_move, count))
        # A flat prior: the first state is around the first value, if inside the state space.
        normal = jax.random.normal(key_start, particles.shape)
        fresh = jax.vmap(lambda normal: value + joint.noise * normal)(normal)
        inside = coordinates.contains(fresh)
        fresh = fresh[jnp.where(inside, jnp.arange(count), jnp.argmax(inside))]
        log_g = jax.vmap(lambda x: jnp.sum(jax.scipy.stats.norm.logpdf(value, x, joint.noise)))(moved)
        log_g = jnp.where(jnp.isnan(log_g), -jnp.inf, log_g)
        log_w = jnp.where(first, jnp.where(inside, 0.0, -jnp.inf), log_g)
        uniform = jnp.nanmean(jax.scipy.stats.norm.cdf(value[0], moved[:, 0], joint.noise[0]))
        log_prob = jax.nn.logsumexp(log_w) - jnp.log(count)
        chosen = _systematic(jax.nn.softmax(log_w), key_choice)
        return jnp.where(first, fresh, moved)[chosen], (uniform, log_prob)

    start = jnp.zeros((count, observed.values.shape[1]), observed.values.dtype)  # replaced at the first value
    last, (uniform, log_prob) = jax.lax.scan(step, start, (many, jax.random.split(key, len(observed.first))))
    later = observed.before + 1
    return Filtered(uniform[later], log_prob[later], last)


def _systematic(weights: Array, key: PRNGKeyArray) -> Array:
    """Places `(K,)`, each as often as its weight says, but for rounding; in random order."""
    key_shift, key_order = jax.random.split(key)
    count = len(weights)
    points = (jnp.arange(count) + jax.random.uniform(key_shift)) / count
    places = jnp.searchsorted(jnp.cumsum(weights), points)
    return jax.random.permutation(key_order, jnp.minimum(places, count - 1))


def filtered_residuals(filtered: Filtered) -> np.ndarray:
    """Of series of one component."""
    if filtered.last.shape[1] != 1:
        raise ValueError(f"residuals are for series of one component, this one has {filtered.last.shape[1]}")
    least = 0.5 / (len(filtered.last) + 1)
    return np.clip(np.asarray(filtered.uniform, float), least, 1 - least)
