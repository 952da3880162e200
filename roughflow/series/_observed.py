"""Validation of observed series: times and values. Missing values become longer gaps."""

import dataclasses
import datetime
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..faq import see
from ..sde import AbstractSDE, noise_dimension
from ..transition import AbstractCoordinates, Transition

YEAR = 365.25 * 24 * 3600  # seconds
SECOND = np.timedelta64(1, "s")
FEWEST = 3  # minimum number of values in a series
NUMBERS, DATES, ZONED, SPANS = "numbers", "dates", "dates with a time zone", "timedeltas"


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of a series, all of the same kind. Numbers are stored as floats, timedeltas as floats in
    years, and dates as datetime64, in UTC if they have a time zone."""

    kind: str
    array: np.ndarray

    @staticmethod
    def of(times: Any) -> "Times":
        array = _as_array(times)
        if array.dtype.kind == "O":
            kind, array = _from_objects(array)
        else:
            kind = {"M": DATES, "m": SPANS, "f": NUMBERS, "i": NUMBERS, "u": NUMBERS}.get(
                array.dtype.kind, ""
            )
        if not kind:
            raise ValueError(f"times must be numbers, dates or timedeltas, got {array.dtype}{_hint(array)}")
        if array.ndim != 1 or not array.size:
            raise ValueError(f"times must have shape (N,), got {array.shape}")
        missing = np.isnat(array) if array.dtype.kind in "Mm" else ~np.isfinite(array)
        if missing.any():
            row = _first(~missing)
            raise ValueError(f"times must be finite, but times[{row}] is {array[row]}")
        return Times(kind, array if kind in (DATES, ZONED) else _in_years(array))

    def since(self, origin: np.datetime64 | None) -> np.ndarray:
        """The times as floats; dates are converted to years since `origin`."""
        if origin is None:
            return self.array
        whole = self.array.astype("datetime64[us]")  # a month or year becomes its first day
        seconds = (whole - origin) / SECOND + (self.array - whole) / SECOND
        return np.asarray(seconds, float) / YEAR


@dataclasses.dataclass(frozen=True)
class Observed:
    """One series: `times` `(N,)` and `values` `(N, d)`; NaN where values are missing.

    `kind` is the kind of the given times. Dates are converted to years since `origin`, the first date of the
    panel.
    """

    times: np.ndarray
    values: np.ndarray
    kind: str = NUMBERS
    origin: np.datetime64 | None = None

    @staticmethod
    def of(
        times: Times, values: np.ndarray, origin: np.datetime64 | None, partial: bool, fewest: int = FEWEST
    ) -> "Observed":
        if len(times.array) != len(values):
            raise ValueError(
                "times must have shape (N,) and values (N,) or (N, d), got "
                f"{times.array.shape} and {values.shape}"
            )
        if np.isnan(values).all():
            raise ValueError("values are all missing: at least one component must be observed")
        missing = np.isnan(values).all(axis=1) & (not partial)
        when, values, shown = times.since(origin)[~missing], values[~missing], times.array[~missing]
        good = np.isfinite(values) | (np.isnan(values) & partial)
        if not good.all():
            row = _first(np.asarray(np.all(good, axis=1)))
            raise ValueError(f"values must be finite or missing: at time {shown[row]} they are {values[row]}")
        if len(when) < fewest:
            raise ValueError(f"a series needs at least {fewest} values, got {len(when)}")
        if still := [i for i in range(values.shape[1]) if np.ptp(values[:, i]) == 0 and not partial]:
            raise ValueError(f"values are constant in column {still[0]}: an SDE cannot be fitted to them")
        found = Observed(when, values, times.kind, origin)
        if not (np.diff(when) > 0).all():
            row = _first(np.diff(when) > 0)
            raise ValueError(
                f"times must increase, but {found.shown(row + 1)} follows {found.shown(row)}: sort the "
                f"series and drop duplicates{see('series')}"
            )
        return found

    def known(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Times and values of one component, at the times at which it is observed."""
        seen = np.isfinite(self.values[:, i])
        return self.times[seen], self.values[seen, i]

    def transitions(self) -> Transition:
        values, times = jnp.asarray(self.values, float), jnp.asarray(self.times, float)
        return Transition(values[:-1], values[1:], times[:-1], jnp.asarray(np.diff(self.times), float))

    def shown(self, row: int) -> str:
        """The time of a row, in its original format, for a message."""
        if self.origin is None:
            return f"{self.times[row]:g}"
        microseconds = np.timedelta64(round(self.times[row] * YEAR * 1e6), "us")
        return str(self.origin + microseconds).removesuffix("T00:00:00.000000")

    def ahead(self, times: Any) -> np.ndarray:
        """Convert forecast times to floats that count from the last value, as numbers and timedeltas already
        do."""
        later = Times.of(np.atleast_1d(_as_array(times)))
        dated = later.kind in (DATES, ZONED)
        fits = later.kind in (NUMBERS, self.kind) or (later.kind == SPANS and self.origin is not None)
        if not fits:
            raise ValueError(f"forecast times are {later.kind}, but those of the series are {self.kind}")
        numbers = later.since(self.origin) - self.times[-1] if dated else later.array
        if not (np.diff(numbers, prepend=0.0) > 0).all():
            rule = f"be after the last value, {self.shown(-1)}," if dated else "be positive"
            raise ValueError(f"forecast times must {rule} and increase; got {_few(later.array)}")
        return numbers


def is_partial(values: Any) -> bool:
    """Whether components of some values are missing while others are observed."""
    parts = values if _is_nested(values) else [values]
    missing = [np.isnan(as_columns(part)) for part in parts]
    return any((one.any(axis=1) & ~one.all(axis=1)).any() for one in missing)


def panel(times: Any, values: Any, *, partial: bool = False, fewest: int = FEWEST) -> list[Observed]:
    """Validate a series or a list of series, and return a list of `Observed`. Dates are converted to years
    since the earliest date in the panel. If `partial` is true, values may be missing. `fewest` is the minimum
    length of a series."""
    if _is_nested(times) or _is_nested(values):
        if not _is_nested(times):
            raise ValueError(
                "values are a list of lists (a panel), so times must be a list of arrays too; for one series "
                "pass np.array(values)"
            )
        if len(times) != len(values):
            raise ValueError(
                f"times are a list of arrays (a panel), so values must be a list of the same length; got "
                f"{len(times)} and {len(values)}"
            )
        whens, whats = [Times.of(one) for one in times], [as_columns(one) for one in values]
    else:
        whens, whats = [Times.of(times)], [as_columns(values)]
    kinds = {when.kind for when in whens}
    if len(kinds) > 1:
        raise ValueError(f"times of all series must be of the same kind, got {' and '.join(sorted(kinds))}")
    counts = {what.shape[1] for what in whats}
    if len(counts) > 1:
        given = " and ".join(map(str, sorted(counts)))
        raise ValueError(f"all series must have the same number of columns, got {given}")
    origin = None
    if kinds <= {DATES, ZONED}:
        origin = min(when.array.min().astype("datetime64[us]") for when in whens)
    found = []
    for k, (when, what) in enumerate(zip(whens, whats, strict=True)):
        try:
            found.append(Observed.of(when, what, origin, partial, fewest))
        except ValueError as error:
            raise ValueError(f"series {k}: {error}" if len(whens) > 1 else str(error)) from None
    return found


def _is_nested(data: Any) -> bool:
    """Whether the argument is a list of arrays."""
    return isinstance(data, list | tuple) and len(data) > 0 and np.ndim(data[0]) > 0


def check_dimension(sde: Any, series: Sequence[Observed]) -> None:
    """Raise an error if the number of columns differs from the dimension of the SDE."""
    count = series[0].values.shape[1]
    subject = f"values have {count} column{'s' * (count > 1)}"
    if isinstance(sde, AbstractSDE):
        noise_dimension(sde, count, subject)
    elif count != 1:  # a process with memory
        raise ValueError(f"{subject}, but {type(sde).__name__} has dimension 1{see('shapes')}")


def check_inside(
    coordinates: AbstractCoordinates, series: Sequence[Observed], typical: np.ndarray | None = None
) -> None:
    """Raise an error if values lie outside the state space. Missing values are replaced by those of the
    state `typical`."""
    for one in series:
        x = one.values if typical is None else np.where(np.isnan(one.values), typical, one.values)
        inside = np.asarray(coordinates.contains(jnp.asarray(x)))
        if not inside.all():
            row = _first(inside)
            message = f"values lie outside the state space, first at time {one.shown(row)}: {one.values[row]}"
            raise ValueError(message + see("series"))


def transitions(series: Sequence[Observed]) -> Transition:
    """The transitions of all series in a panel, concatenated."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *(one.transitions() for one in series))


def same_data(one: Sequence[Observed], other: Sequence[Observed]) -> bool:
    """Whether two panels have the same times and values."""
    pairs = zip(one, other, strict=False)
    same = (
        np.array_equal(a.times, b.times) and np.array_equal(a.values, b.values, equal_nan=True)
        for a, b in pairs
    )
    return len(one) == len(other) and all(same)


def as_columns(values: Any) -> np.ndarray:
    """Values `(N,)` or `(N, d)` as floats `(N, d)`, with NaN for missing values."""
    array = _as_array(values)
    if array.dtype.kind == "O":
        rest = {type(x).__name__ for x in array.ravel() if not (_is_number(x) or _is_missing(x))}
        if rest:
            raise ValueError(f"values must be numbers, got {' and '.join(sorted(rest))}")
        array = np.array([np.nan if _is_missing(x) else float(x) for x in array.ravel()]).reshape(array.shape)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"values must be real numbers, got {array.dtype}")
    if array.ndim not in (1, 2) or not array.size:
        raise ValueError(f"values must have shape (N,) or (N, d), got {array.shape}")
    return np.asarray(array[:, None] if array.ndim == 1 else array, float)


def _as_array(values: Any) -> np.ndarray:
    """Convert to an array with NaN or NaT in place of masked elements."""
    if not isinstance(values, np.ma.MaskedArray):
        try:
            return np.asarray(values)
        except ValueError:  # rows of different lengths
            return np.asarray(values, object)
    kind = values.dtype.kind
    missing = values.dtype.type("NaT") if kind in "Mm" else np.nan
    return np.ma.filled(values.astype(float) if kind in "iub" else values, missing)


def _from_objects(array: np.ndarray) -> tuple[str, np.ndarray]:
    """The kind of times given as Python objects, and the times as an array."""
    kinds = {_kind(value) for value in array.ravel()}
    if len(kinds) != 1 or "" in kinds:
        given = sorted({type(value).__name__ for value in array.ravel()} if "" in kinds else kinds)
        given = " and ".join(given) + _hint(array)
        raise ValueError(f"times must be numbers, dates or timedeltas of one kind, got {given}")
    kind = kinds.pop()
    if kind == NUMBERS:
        return kind, array.astype(float)
    moments = np.array([_moment(value) for value in array.ravel()])
    return kind, moments.reshape(array.shape)


def _hint(array: np.ndarray) -> str:
    """A hint on how to convert strings to dates; empty if the array has no strings."""
    is_text = array.size and isinstance(array.ravel()[0], str | bytes)
    return "; use np.array(times, 'datetime64') to read dates" if is_text else ""


def _kind(value: Any) -> str:
    if isinstance(value, np.datetime64) or hasattr(value, "to_timestamp"):  # a pandas period
        return DATES
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return ZONED
    if isinstance(value, datetime.date):
        return DATES
    if isinstance(value, datetime.timedelta | np.timedelta64):
        return SPANS
    return NUMBERS if _is_number(value) else ""


def _moment(value: Any) -> np.datetime64 | np.timedelta64:
    """Convert a Python object to a date in UTC or a timedelta."""
    if isinstance(value, np.datetime64 | np.timedelta64):
        return value
    value = value.to_timestamp() if hasattr(value, "to_timestamp") else value
    for convert in ("to_datetime64", "to_timedelta64"):  # pandas objects, with nanosecond resolution
        if hasattr(value, convert):
            return getattr(value, convert)()
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    if isinstance(value, datetime.date):
        return np.datetime64(value, "us")
    return np.timedelta64(value)


def _in_years(array: np.ndarray) -> np.ndarray:
    """Convert timedeltas to years; numbers are returned unchanged."""
    if array.dtype.kind != "m":
        return np.asarray(array, float)
    unit = np.datetime_data(array.dtype)[0]
    if unit == "generic":
        raise ValueError("times are timedeltas without a unit: give them a unit, such as timedelta64[D]")
    if unit in "YM":
        return array.astype(f"timedelta64[{unit}]").astype(float) / (1 if unit == "Y" else 12)
    return array / SECOND / YEAR


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal) and not isinstance(value, bool | np.bool)


def _is_missing(value: Any) -> bool:
    return value is None or value is np.ma.masked or type(value).__name__ == "NAType"  # pandas.NA


def _few(array: np.ndarray) -> str:
    """The first elements of an array, as text."""
    return ", ".join(map(str, array[:3])) + (", …" if len(array) > 3 else "")


def _first(good: np.ndarray) -> int:
    return int(np.argmin(good))
