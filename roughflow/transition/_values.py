"""log p(x₁ | x₀) of many short transitions by weighted paths, and the required effort."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import is_traced
from .._programs import jit
from ..sde import AbstractSDE, noise_dimension
from ._bridges import bridges
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Transition, stiffness

CHUNK = 2048  # transitions at a time
LOOK = 256  # transitions used to measure the stiffness of an SDE


class Weighted(eqx.Module):
    """log p of a transition by weighted paths, its standard error, the effective number of paths, and the
    number of paths not found."""

    log_prob: Array
    error: Array
    effective: Array
    unfound: Array


def choose_effort(sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition) -> Effort:
    """The effort, from the relative change of the drift over the longest time."""
    rate = largest_rate(sde, coordinates, many)
    return Effort(4, 8, 8) if rate is None else Effort.for_stiffness(rate)


def largest_rate(sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition) -> float | None:
    """The longest time times the largest derivative of the drift at starts and ends; None if it is traced."""
    if is_traced(many.dt) or any(is_traced(leaf) for leaf in jax.tree.leaves(sde)):
        return None
    places = np.unique(np.linspace(0, len(many.dt) - 1, LOOK).astype(int))
    some = jax.tree.map(lambda a: a[places], many)
    span = jnp.full_like(some.dt, jnp.max(many.dt))
    both = [Transition(x, some.end, some.time, span) for x in (some.start, some.end)]
    return max(float(jnp.max(_stiffness(sde, coordinates, one))) for one in both)


@functools.partial(jit, level=0)
def _stiffness(sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition) -> Array:
    return jax.vmap(lambda step: stiffness(sde, coordinates, step))(many)


@functools.partial(jit, level=1)
def log_probs(
    sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition, key: PRNGKeyArray, effort: Effort
) -> Weighted:
    """log p of many transitions, its errors and path statistics, `(N,)` each."""
    return transition_values(sde, coordinates, many, key, effort)


def transition_values(
    sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition, key: PRNGKeyArray, effort: Effort
) -> Weighted:
    """`log_probs` for use inside another program."""
    one = lambda item: transition_value(sde, coordinates, item[0], item[1], effort)
    return in_chunks(one, (many, keys_of(key, many)), len(many.dt), CHUNK)


def keys_of(key: PRNGKeyArray, many: Transition) -> PRNGKeyArray:
    """One key per transition."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(many.dt)))


def transition_value(
    sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition, key: PRNGKeyArray, effort: Effort
) -> Weighted:
    """log p of one transition."""
    columns = noise_dimension(sde, step.start.shape[-1])
    # The first functions have the same numbers for any number of functions: finer paths refine the same
    # paths.
    shape = (effort.num_functions * columns, effort.num_paths // 2)
    noise = jax.random.normal(key, shape, step.start.dtype).T
    inner = Transition(
        coordinates.from_state(step.start), coordinates.from_state(step.end), step.time, step.dt
    )
    drawn = bridges(sde, coordinates, inner, jnp.concatenate([noise, -noise]), effort)
    value, error = drawn.log_mean()
    value = value + coordinates.log_volume(step.end)
    return Weighted(value, error, drawn.effective(), jnp.sum(~drawn.found))


def in_chunks(function: Callable, items: Any, count: int, most: int) -> Any:
    """Map a function over `count` items, at most `most` at a time, in chunks of equal size: a remainder would
    compile another program."""
    parts = -(-count // most)
    size = -(-count // parts)
    places = jnp.minimum(jnp.arange(parts * size), count - 1)
    chunks = jax.tree.map(lambda a: jnp.reshape(a[places], (parts, size, *a.shape[1:])), items)
    done = jax.lax.map(jax.vmap(function), chunks)
    return jax.tree.map(lambda a: jnp.reshape(a, (parts * size, *a.shape[2:]))[:count], done)
