"""Forecasts: simulated paths after the end of a series."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..sde import AbstractSDE
from ..transition import AbstractCoordinates
from ._simulation import draw, is_known, refined, warn_of_exits

PILOT_PATHS = 8192  # minimum number of paths to decide whether to halve the steps
SIGNIFICANCE = 0.001  # significance level of that decision
MAX_FORECAST_SIZE = 2e8  # maximum size of a forecast, 1.6 GB


def forecast(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    start: Array,
    times: Array,
    key: PRNGKeyArray,
    each: bool = False,
) -> np.ndarray:
    """Simulated paths `(K, T, d)` from states `(K, d)` at times[0] to the other times.

    Transitions are exact, or use steps short enough that halving them does not change the distribution. With
    `each`, every path has its own SDE: all arrays in `sde` have a leading axis K.
    """
    rows = lambda places: jax.tree.map(lambda a: a[places] if each and eqx.is_array(a) else a, sde)
    if is_known(rows(0), start[0]):
        paths = _paths(sde, coordinates, start, times, jnp.asarray(1), key, each)
    else:
        # A Kolmogorov–Smirnov test for each time and component.
        tests = (len(times) - 1) * start.shape[1]
        count = max(len(start), min(PILOT_PATHS, int(MAX_FORECAST_SIZE / tests)))
        places = jnp.arange(count) % len(start)
        many = (rows(places), coordinates, start[places], times)
        run = lambda num_steps: np.asarray(_paths(*many, num_steps, key, each))
        limit = np.sqrt(-np.log(0.5 * SIGNIFICANCE / tests) / count)
        paths = refined(run, _distance, limit)[: len(start)]
    warn_of_exits(int(np.isnan(paths[:, -1]).any(axis=-1).sum()), len(paths))
    return np.asarray(paths)


def check_memory(count: float) -> None:
    """Refuse forecasts that would not fit in memory."""
    if count > MAX_FORECAST_SIZE:
        raise ValueError(
            f"the forecast would have {count:.2g} numbers, more than {MAX_FORECAST_SIZE:.2g}: "
            "reduce num_paths or the number of times"
        )


@functools.partial(jit, level=1)
def _paths(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    start: Array,
    times: Array,
    num_steps: Array,
    key: PRNGKeyArray,
    each: bool,
) -> Array:
    def path(sde: AbstractSDE, start: Array, key: PRNGKeyArray) -> Array:
        def step(x: Array, now: tuple[Array, Array, PRNGKeyArray]) -> tuple[Array, Array]:
            new = draw(sde, coordinates, x, *now[:2], num_steps, now[2])
            return new, new

        keys = jax.random.split(key, len(times) - 1)
        return jax.lax.scan(step, start, (times[:-1], jnp.diff(times), keys))[1]

    axes = (eqx.if_array(0) if each else None, 0, 0)
    return eqx.filter_vmap(path, in_axes=axes)(sde, start, jax.random.split(key, len(start)))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest Kolmogorov distance between the marginals of two sets of paths `(K, T, d)`."""
    columns = zip(a.reshape(len(a), -1).T, b.reshape(len(b), -1).T, strict=True)
    # All paths that left the state space are tied at one extra value.
    return max(float(scipy.stats.ks_2samp(_filled(x), _filled(y)).statistic) for x, y in columns)


def _filled(column: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(column), -np.inf, column)
