"""Read time series: a column of times, and columns of values."""

import datetime
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from roughflow.faq import see

from .startup import Refused
from .tables import (
    MAX_VALUE,
    MISSING,
    STANDARD,
    Faults,
    as_number,
    check_readable,
    fault,
    is_text,
    open_lines,
    read_cells,
    table_name,
)

DATE = re.compile(r"\d{4}-\d\d(-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?(?P<zone>Z|[+-]\d\d:?\d\d)?)?)?")
OTHER_DATE = re.compile(r"\d{1,4}[/.]\d{1,2}[/.]\d{1,4}|\d{1,2}-\d{1,2}-\d{4}")
MIN_VALUES = 3  # minimum number of values, for two transitions


@dataclass(frozen=True)
class Series:
    """A time series: `times`, `(N,)`, are numbers or dates (in UTC if they have a time zone); `values`,
    `(N, c)`, are NaN if missing."""

    times: np.ndarray
    values: np.ndarray
    zoned: bool = False

    @property
    def dated(self) -> bool:
        return self.times.dtype.kind == "M"

    @property
    def missing(self) -> int:
        return int(np.isnan(self.values).sum())

    def observed(self) -> tuple[np.ndarray, np.ndarray]:
        """The times and values of the rows with at least one observation."""
        there = ~np.isnan(self.values).all(axis=1)
        return self.times[there], self.values[there]

    def shown(self, time: np.datetime64 | float) -> str:
        """A time as text."""
        text = str(time).removesuffix(".000000") if self.dated else str(time)
        return text + "Z" if self.zoned else text.removesuffix("T00:00:00")

    def times_ahead(self, text: str) -> np.ndarray:
        """Parse comma-separated forecast times: dates, or numbers counted from the last time."""
        last, cells = self.observed()[0][-1], [cell.strip() for cell in text.split(",")]
        numbers = [number for cell in cells if (number := as_number(cell)) is not None]
        if len(numbers) == len(cells):
            times = np.array([0.0, *numbers])
        elif self.dated and all(_zoned(cell) == self.zoned for cell in cells):
            times = np.array([last, *map(_date, cells)])
        else:
            dates = f"dates such as {self.shown(last)}, or " if self.dated else ""
            raise Refused(f"--forecast takes {dates}numbers, separated by commas; got {text!r}")
        if not (times[1:] > times[:-1]).all() or (len(numbers) and not times[-1] <= MAX_VALUE):
            after = "the last value, from which they are counted" if len(numbers) else self.shown(last)
            raise Refused(f"--forecast times must increase and be later than {after}; got {text!r}")
        return times[1:]


def read_series(path: Path, time: str, columns: Sequence[str], scale: float) -> Series:
    """Read a series from a file; `-` is standard input, as CSV."""
    if time in columns:
        raise Refused(f"--time and --value are both {time!r}: choose two columns")
    found = _read_columns(path, time, columns)
    for name, column in zip(columns, found.values.T, strict=True):
        _check_values(path, name, column[~np.isnan(column)])
    return replace(found, values=found.values * scale)


def read_inputs(path: Path, time: str) -> tuple[tuple[str, ...], Series]:
    """Read a table of inputs: the names and the values of all columns except the time."""
    with open_lines(path) as source:
        names = tuple(name.strip() for name in next(iter(source), []) if name.strip() != time)
    found = _read_columns(path, time, names)
    if found.missing or not names:
        raise Refused(f"{table_name(path)}: inputs must be columns of numbers without missing values")
    return names, found


def _read_columns(path: Path, time: str, columns: Sequence[str]) -> Series:
    if path != STANDARD:
        if not is_text(path):
            raise Refused(f"{path}: a series must end in .csv, .tsv, .csv.gz or .tsv.gz")
        check_readable(path)
    cells = list(read_cells(path, [time, *columns]))
    if not cells:
        raise Refused(f"{table_name(path)} has no rows")
    lines = [line for line, _ in cells]
    faults = Faults(path, "line")
    times = _times(path, time, lines, [row[0] for _, row in cells], faults)
    faults.refuse()
    values = np.array(
        [[_value(name, line, row[i], faults) for i, name in enumerate(columns, 1)] for line, row in cells]
    )
    faults.refuse()
    _check_order(path, time, lines, times)
    return Series(times, values, bool(_zoned(cells[0][1][0])))


def _times(path: Path, name: str, lines: list[int], cells: list[str], faults: Faults) -> np.ndarray:
    """Parse the times: dates if the first cell is a date, else numbers. Invalid cells are added to
    `faults`."""
    zoned = _zoned(cells[0])
    if zoned is not None:
        dates = [_date(cell) for cell in cells]
        for line, cell, date in zip(lines, cells, dates, strict=True):
            if np.isnat(date):
                faults.add(line, f"{fault(name, cell, None)}, not a date such as 2024-01-31")
            elif _zoned(cell) != zoned:
                faults.add(line, f"{name!r} is {cell!r}, {'without' if zoned else 'with'} a time zone")
        return np.array(dates)
    numbers = [as_number(cell) for cell in cells]
    for line, cell, number in zip(lines, cells, numbers, strict=True):
        if number is None or not abs(number) <= MAX_VALUE:
            other = " (year-month-day)" if OTHER_DATE.fullmatch(cell) else ""
            why = f"{fault(name, cell, number)}, not a date such as 2024-01-31{other}"
            faults.add(line, why)
    # 20240131 and 202401 are valid numbers, but almost certainly dates.
    if all(re.fullmatch(r"(1[789]|20)\d\d[01]\d[0-3]\d", cell) for cell in cells):
        raise Refused(f"{table_name(path)}: {name!r} is {cells[0]}, a date without dashes: write 2024-01-31")
    month = r"(1[89]\d\d|2[01]\d\d|2200)(0[1-9]|1[0-2])"
    if len(cells) >= MIN_VALUES and all(re.fullmatch(month, cell) for cell in cells):
        dashed = f"{cells[0][:4]}-{cells[0][4:]}"
        raise Refused(f"{table_name(path)}: {name!r} is {cells[0]}, a date without dashes: write {dashed}")
    return np.array([math.nan if number is None else number for number in numbers])


def _zoned(cell: str) -> bool | None:
    """Whether a date has a time zone; None if it is not a date."""
    match = DATE.fullmatch(cell)
    return None if match is None else match["zone"] is not None


def _date(cell: str) -> np.datetime64:
    """Parse a date, in UTC if it has a time zone; NaT if it is invalid."""
    try:
        if _zoned(cell):
            moment = datetime.datetime.fromisoformat(cell).astimezone(datetime.UTC)
            return np.datetime64(moment.replace(tzinfo=None), "us")
        return np.datetime64(cell if _zoned(cell) is not None else "NaT", "us")
    except (ValueError, OverflowError):  # a month with too many days
        return np.datetime64("NaT", "us")


def _value(name: str, line: int, cell: str, faults: Faults) -> float:
    if cell.lower() in MISSING:
        return math.nan
    number = as_number(cell)
    if number is None or not abs(number) <= MAX_VALUE:
        faults.add(line, fault(name, cell, number))
        return math.nan
    return number


def _check_order(path: Path, name: str, lines: list[int], times: np.ndarray) -> None:
    late = times[1:] > times[:-1]
    if late.all():
        return
    row = int(np.argmin(late)) + 1
    what = "equal to" if times[row] == times[row - 1] else "before"
    raise Refused(
        f"{table_name(path)}, line {lines[row]}: {name!r} is {what} that of the previous line: sort the "
        f"series, with one row per time{see('series')}"
    )


def _check_values(path: Path, name: str, values: np.ndarray) -> None:
    if len(values) < MIN_VALUES:
        count = f"{len(values)} value{'s' * (len(values) != 1)}"
        least = f"use at least {MIN_VALUES}, preferably hundreds{see('series')}"
        raise Refused(f"{table_name(path)} has {count} in column {name!r}: {least}")
    if np.ptp(values) == 0:
        message = f"an SDE cannot be fitted to a constant series{see('series')}"
        raise Refused(f"{table_name(path)}: {name!r} is always {values[0]:g}: {message}")
