"""Convert arrays, nested lists and DataFrames to numeric arrays with column names."""

import numbers
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import jax
import numpy as np

from .._checks import is_traced
from ..faq import see

# Maximum absolute value and minimum spread of a column that single precision supports.
MAX_VALUE, MIN_SPREAD = 1e30, 1e-30


def is_frame(data: Any) -> bool:
    """Whether the data have named columns, as a DataFrame does."""
    return hasattr(data, "columns") and hasattr(data, "__getitem__")


def parts_of(data: Any, given: Any, groups: Any, columns: Any) -> tuple[Any, Any, Any, tuple[str, ...]]:
    """The modelled columns, the given columns, the groups of rows, and the names of all columns with given
    ones last (() if there are none). `given` and `groups` may name columns of the data; `columns` selects
    columns of a DataFrame."""
    columns, given_names = _checked_names(columns), _names_in("given", given)
    if not is_frame(data) and not given_names and not isinstance(groups, str):
        return data, given, groups, _all_names(data, given, columns)
    data = data if is_frame(data) else _Named(np.asarray(data), columns)
    left_out = {*given_names, groups} if isinstance(groups, str) else {*given_names}
    own = tuple(name for name in columns or frame_names("data", data) if name not in left_out)
    if not own:
        raise ValueError("given and groups include all columns of data: no column is left to model")
    if isinstance(groups, str):
        groups = np.asarray(take("data", data, [groups]))[:, 0]
    if given_names:
        given = take("data", data, given_names)
    elif given is not None:
        given_names = _all_names(np.zeros((1, len(own))), given, ())[len(own) :]
        given_names = given_names or tuple(f"x{len(own) + i + 1}" for i in range(np.shape(given)[-1]))
    names = _checked_names((*own, *given_names))
    return np.asarray(take("data", data, own)), None if given is None else np.asarray(given), groups, names


class _Named:
    """An array with named columns, with the interface of a DataFrame."""

    def __init__(self, rows: np.ndarray, columns: tuple[str, ...]):
        if rows.ndim != 2 or len(columns) != rows.shape[1]:
            message = "given and groups can be names only for a DataFrame, or with columns= for an array"
            raise ValueError(f"{message}; data has shape {rows.shape} and {len(columns)} column names")
        self.rows, self.columns = rows, columns

    def __getitem__(self, names: Sequence[str]) -> np.ndarray:
        return self.rows[:, [self.columns.index(name) for name in names]]


def _all_names(data: Any, given: Any, columns: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the modelled and of the given columns, from the argument `columns` or from DataFrames."""
    parts = [data] if given is None else [data, given]
    widths = [np.shape(part)[1] if len(np.shape(part)) == 2 else 0 for part in parts]
    if not columns and is_frame(given):
        return (*(f"x{i + 1}" for i in range(widths[0])), *frame_names("given", given))
    if columns and len(columns) != sum(widths):
        there = f"{widths[0]} columns" + (f" and {widths[1]} given" if given is not None else "")
        raise ValueError(f"columns has {len(columns)} names for {there}: pass one name per column")
    return columns


def _names_in(argument: str, value: Any) -> tuple[str, ...]:
    """The column names in a value: () unless it is a name or a list of names."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return _checked_names(value, argument)
    return ()


def _checked_names(columns: Any, argument: str = "columns") -> tuple[str, ...]:
    if isinstance(columns, str):
        raise ValueError(f"{argument} must be a list of names, got {columns!r}: write [{columns!r}]")
    columns = tuple(columns)
    odd = [name for name in columns if not isinstance(name, str)]
    if odd:
        raise ValueError(f"{argument} must be a list of names, but contains {odd[0]!r}")
    if len(set(columns)) < len(columns):
        twice = next(name for i, name in enumerate(columns) if name in columns[:i])
        raise ValueError(f"{argument} has the name {twice!r} twice: names must be unique")
    return columns


def frame_names(argument: str, frame: Any) -> tuple[str, ...]:
    return _checked_names([str(name) for name in frame.columns], f"{argument}.columns")


def take(argument: str, frame: Any, names: Sequence[str]) -> Any:
    """The given columns of a DataFrame, in this order."""
    labels = dict(zip(frame_names(argument, frame), frame.columns, strict=True))
    missing = [name for name in names if name not in labels]
    if missing:
        wanted, there = ", ".join(map(repr, missing)), ", ".join(labels)
        raise ValueError(f"{argument} has no column {wanted}; it has {there}{see('shapes')}")
    return frame[[labels[name] for name in names]]


def joined(
    name: str, data: Any, given: Any | None, names: Sequence[str] = (), num_given: int = 0
) -> tuple[np.ndarray, int]:
    """The rows with the given columns last, and the number of given columns. Columns of a DataFrame are
    selected by `names`, of which the last `num_given` are given."""
    own = names[: len(names) - num_given]
    if num_given and given is None and is_frame(data):
        given = take(name, data, names[len(own) :])
    if names and is_frame(data):
        data = take(name, data, own)
    if names and num_given and is_frame(given):
        given = take("given", given, names[len(own) :])
    rows = _numbers(name, data, names)
    if given is None:
        return rows, 0
    given_rows = _numbers("given", given, names[rows.shape[1] :])
    if len(given_rows) != len(rows):
        raise ValueError(f"{name} has {len(rows)} rows, but given has {len(given_rows)}")
    return np.concatenate([rows, given_rows], axis=1), given_rows.shape[1]


def real_numbers(argument: str, value: Any) -> Any:
    """Convert a value to an array of real numbers; JAX arrays are returned unchanged. Strings and complex
    numbers are rejected."""
    array = value if is_traced(value) or isinstance(value, jax.Array) else np.asarray(value)
    if array.dtype.kind == "c":
        message = f"{argument} is complex: use real and imaginary parts as separate columns"
        raise ValueError(message + see("no-density"))
    if array.dtype.kind in "fiub" or is_traced(value) or isinstance(value, jax.Array):
        return array
    odd = next((cell for cell in array.ravel() if not _is_number(cell)), None)
    if odd is not None:
        raise ValueError(f"{argument} holds {str(odd)!r}, not numbers: convert it to numbers")
    return array.astype(np.float64)


def _numbers(name: str, data: Any, names: Sequence[str]) -> np.ndarray:
    if np.ma.is_masked(data):
        raise ValueError(f"{name} has masked values: fill them, or drop these rows{see('no-density')}")
    label = lambda i: repr(names[i]) if names else str(i)
    array = np.asarray(data)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {array.shape}")
    if array.dtype.kind == "c":
        real_numbers(name, array)
    if array.dtype.kind in "fiub":
        rows = array.astype(np.float64)
    else:
        rows = np.stack([_column(name, label(i), array[:, i]) for i in range(array.shape[1])], axis=1)
    finite = np.isfinite(rows)
    if not finite.all():
        row = int(np.argmin(finite.all(axis=1)))
        column = label(int(np.argmin(finite[row])))
        message = f"{name} has a value that is not finite, first in row {row}, column {column}"
        raise ValueError(message + see("no-density"))
    if np.max(np.abs(rows)) > MAX_VALUE:
        column = label(int(np.argmax(np.max(np.abs(rows), axis=0))))
        raise ValueError(
            f"column {column} of {name} has values beyond {MAX_VALUE:g}: rescale them, or take logarithms"
            + see("no-density")
        )
    spread = rows.max(axis=0) - rows.min(axis=0)
    small = (spread > 0) & (spread < MIN_SPREAD)
    if small.any():
        column = int(np.argmax(small))
        message = f"column {label(column)} of {name} varies only by {spread[column]:g}: rescale it"
        raise ValueError(message + see("no-density"))
    return rows


def _column(name: str, label: str, values: np.ndarray) -> np.ndarray:
    """Convert a column to floats. Dates are rejected, and so are strings, even if they look like numbers."""
    odd = next((value for value in values if not _is_number(value)), None)
    if odd is not None:
        message = f"column {label} of {name} holds {str(odd)!r}, not numbers"
        raise ValueError(f"{message}: drop it, or convert it to numbers{see('no-density')}")
    return values.astype(np.float64)


def _is_number(value: Any) -> bool:
    """Whether a cell is a real number. None is accepted as a missing value, like NaN."""
    if isinstance(value, complex):
        return False
    return value is None or isinstance(value, numbers.Number | Decimal | np.bool_)
