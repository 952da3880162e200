"""What comes after a series: draws of one transition, and paths of many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..sde import AbstractSDE, noise_dimension
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Ends, Transition

LARGEST = 2e8  # numbers of a forecast, 1.6 GB


def draw(sde, coordinates, step: Transition, effort: Effort, key: PRNGKeyArray, count: int) -> Array:
    """Ends `(count, d)` of a transition, in coordinates."""
    size = effort.num_functions * noise_dimension(sde, step.start.shape[-1])
    omega = jax.random.normal(key, (count, size), step.start.dtype)
    return jax.vmap(Ends(sde, coordinates, step, effort, None))(omega)


def refined(ahead: np.ndarray, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """A grid from 0 through all times ahead without a step that is longer, and their places behind its 0."""
    ends = np.cumsum(np.ceil(np.diff(ahead, prepend=0.0) / longest))
    check_memory(ends[-1])
    ends = ends.astype(int)
    grid = np.interp(np.arange(ends[-1] + 1), np.append(0, ends), np.append(0.0, ahead))
    return grid, ends - 1


def check_memory(count: float) -> None:
    """Refuse a forecast of too many numbers."""
    if count > LARGEST:
        raise ValueError(
            f"the forecast would hold {count:.2g} numbers, more than {LARGEST:.2g}: "
            "give fewer or nearer times, or a smaller num_paths"
        )


@functools.partial(jit, level=1)
def forecast(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    start: Array,
    times: Array,
    effort: Effort,
    key: PRNGKeyArray,
) -> Array:
    """Paths `(K, T, d)` from states `(K, d)` at times[0] to the other times."""

    def path(start: Array, key: PRNGKeyArray) -> Array:
        def step(y: Array, now: tuple[Array, Array, PRNGKeyArray]) -> tuple[Array, Array]:
            time, dt, key = now
            new = draw(sde, coordinates, Transition(y, y, time, dt), effort, key, 1)[0]
            return new, coordinates.to_state(new)

        keys = jax.random.split(key, len(times) - 1)
        return jax.lax.scan(step, coordinates.from_state(start), (times[:-1], jnp.diff(times), keys))[1]

    return jax.vmap(path)(start, jax.random.split(key, len(start)))
