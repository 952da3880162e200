"""Numbers from whatever holds a table: an array, nested lists, a DataFrame."""

import numbers
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..faq import see

LARGEST, SMALLEST = 1e30, 1e-30  # values, and spreads of columns, that single precision can work with


def names_of(columns: Sequence[str], data: Any, given: Any) -> tuple[str, ...]:
    """The names of all columns, those given last: as told, or as DataFrames have them; () if there are none.
    Where only one of the two has names, the columns of the other are counted."""
    parts = [data] if given is None else [data, given]
    widths = [np.shape(part)[1] if len(np.shape(part)) == 2 else 0 for part in parts]
    if len(columns):
        if len(columns) != sum(widths):
            there = f"{widths[0]} columns" + (f" and {widths[1]} given" if given is not None else "")
            raise ValueError(f"columns has {len(columns)} names for {there}: name all of them, or none")
        return tuple(columns)
    own = [getattr(part, "columns", None) for part in parts]
    if all(names is None for names in own):
        return ()
    found: list[str] = []
    for names, width in zip(own, widths, strict=True):
        found += [f"x{len(found) + i + 1}" for i in range(width)] if names is None else map(str, names)
    return tuple(found)


def joined(
    name: str, data: ArrayLike, given: ArrayLike | None, names: Sequence[str] = ()
) -> tuple[np.ndarray, int]:
    """The rows, with what is given as their last columns, and how many those are."""
    rows = _numbers(name, data, names)
    if given is None:
        return rows, 0
    context = _numbers("given", given, names[rows.shape[1] :])
    if len(context) != len(rows):
        raise ValueError(f"{name} has {len(rows)} rows, given {len(context)}: they go together")
    return np.concatenate([rows, context], axis=1), context.shape[1]


def _numbers(name: str, data: Any, names: Sequence[str]) -> np.ndarray:
    if np.ma.is_masked(data):
        raise ValueError(f"{name} is masked in places: fill them, or leave those rows out{see('no-density')}")
    label = lambda i: repr(names[i]) if names else str(i)
    array = np.asarray(data)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {array.shape}")
    if array.dtype.kind == "c":
        told = f"{name} is complex: give real and imaginary parts as columns of their own"
        raise ValueError(told + see("no-density"))
    rows = np.stack([_column(name, label(i), array[:, i]) for i in range(array.shape[1])], axis=1)
    finite = np.isfinite(rows)
    if not finite.all():
        row = int(np.argmin(finite.all(axis=1)))
        column = label(int(np.argmin(finite[row])))
        told = f"{name} has a value that is not finite, first in row {row}, column {column}"
        raise ValueError(told + see("no-density"))
    if np.max(np.abs(rows)) > LARGEST:
        column = label(int(np.argmax(np.max(np.abs(rows), axis=0))))
        raise ValueError(
            f"column {column} of {name} has values beyond {LARGEST:g}: rescale them, or take logarithms"
            + see("no-density")
        )
    spread = rows.max(axis=0) - rows.min(axis=0)
    small = (spread > 0) & (spread < SMALLEST)
    if small.any():
        column = int(np.argmax(small))
        told = f"column {label(column)} of {name} varies by {spread[column]:g} only: rescale it"
        raise ValueError(told + see("no-density"))
    return rows


def _column(name: str, label: str, values: np.ndarray) -> np.ndarray:
    """One column of a table as numbers. Text is refused even where it reads like numbers, as are dates."""
    if values.dtype.kind not in "fiub":
        odd = next((value for value in values if not _is_number(value)), None)
        if odd is not None:
            told = f"column {label} of {name} holds {str(odd)!r}, not numbers"
            raise ValueError(f"{told}: leave it out, or turn it into numbers{see('no-density')}")
    return values.astype(np.float64)


def _is_number(value: Any) -> bool:
    """Whether a cell is a number; None is, like NaN, one that is missing."""
    return value is None or isinstance(value, numbers.Number | Decimal | np.bool_)
