"""A series as transitions: checked, and with missing values as longer gaps."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..faq import see
from ._coordinates import AbstractCoordinates
from ._ends import Transition

YEAR = 365.25 * 24 * 3600  # seconds; dates are counted in years
FEWEST = 3


class Observed(eqx.Module):
    """One series: `times` `(N,)` and `values` `(N, d)` without those that are missing."""

    times: np.ndarray
    values: np.ndarray

    @staticmethod
    def of(times: Any, values: Any, coordinates: AbstractCoordinates) -> "Observed":
        when, what = as_years(times), np.asarray(values, float)
        if what.ndim == 1:
            what = what[:, None]
        if when.ndim != 1 or what.ndim != 2 or len(when) != len(what):
            raise ValueError(
                f"times must have shape (N,) and values (N,) or (N, d), got {when.shape} and {what.shape}"
            )
        if not np.isfinite(when).all():
            raise ValueError(
                f"times must be finite, the first that is not is number {_first(np.isfinite(when))}"
            )
        missing = np.isnan(what).all(axis=1)
        when, what = when[~missing], what[~missing]
        if not np.isfinite(what).all():
            row = _first(np.asarray(np.isfinite(what).all(axis=1)))
            raise ValueError(
                f"values must be finite, or missing as a whole: at time {when[row]:g} they are {what[row]}"
            )
        if len(when) < FEWEST:
            raise ValueError(f"a series needs at least {FEWEST} values, got {len(when)}")
        _check_order(when)
        inside = np.asarray(coordinates.contains(jnp.asarray(what)))
        if not inside.all():
            row = _first(inside)
            told = f"values leave the state space of the SDE, first at time {when[row]:g}: {what[row]}"
            raise ValueError(told + see("series"))
        if still := [i for i in range(what.shape[1]) if np.ptp(what[:, i]) == 0]:
            raise ValueError(
                f"values do not change in column {still[0]}: a constant series says nothing of an SDE"
            )
        return Observed(when, what)

    def transitions(self) -> Transition:
        values, times = jnp.asarray(self.values, float), jnp.asarray(self.times, float)
        return Transition(values[:-1], values[1:], times[:-1], jnp.asarray(np.diff(self.times), float))


def panel(times: Any, values: Any, coordinates: AbstractCoordinates) -> list[Observed]:
    """One series, or each of a list of them."""
    if isinstance(values, list) and values and np.ndim(values[0]) > 0:
        if not isinstance(times, Sequence) or len(times) != len(values):
            raise ValueError("a panel needs a list of times for its list of values, one for each series")
        return [Observed.of(t, v, coordinates) for t, v in zip(times, values, strict=True)]
    return [Observed.of(times, values, coordinates)]


def transitions(series: Sequence[Observed]) -> Transition:
    """All transitions of a panel."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *(one.transitions() for one in series))


def as_years(times: Any) -> np.ndarray:
    """Times as numbers: dates in years from the first of them, numbers as they are."""
    array = np.asarray(times)
    if array.dtype.kind == "M":
        array = array.astype("datetime64[us]")  # months and years too have a first day
        seconds = (array - array[0]) / np.timedelta64(1, "s")
        return np.asarray(seconds, float) / YEAR
    try:
        return np.asarray(array, float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"times must be numbers or dates, got {array.dtype}") from error


def _check_order(times: np.ndarray) -> None:
    steps = np.diff(times)
    if (steps > 0).all():
        return
    row = _first(steps > 0) + 1
    what = "the same time twice" if steps[row - 1] == 0 else "a time before the one above it"
    raise ValueError(
        f"times must increase: number {row} is {what}; sort the series and drop duplicates{see('series')}"
    )


def _first(good: np.ndarray) -> int:
    return int(np.argmin(good))
