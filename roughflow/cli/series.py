"""A series from a table: dates or numbers in one column, values in another."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roughflow.faq import see

from .refused import Refused
from .rows import LARGEST, Faults, fault, table_name
from .table import check_readable
from .text import STANDARD, as_number, is_text, read_cells

DATE = re.compile(r"\d{4}-\d\d(-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?)?")
DAY, DAYS_A_YEAR = np.timedelta64(1, "D"), 365.25
FEWEST = 3  # values, for two transitions
MISSING = {"", "na", "nan", "n/a", "null", "."}  # as pandas, R and FRED write it


@dataclass(frozen=True)
class Series:
    """`times` `(N,)`, dates or numbers as they are in the file, and `values` `(N,)`, NaN where missing."""

    times: np.ndarray
    values: np.ndarray

    @property
    def dated(self) -> bool:
        return self.times.dtype.kind == "M"

    @property
    def missing(self) -> int:
        return int(np.isnan(self.values).sum())

    def observed(self) -> tuple[np.ndarray, np.ndarray]:
        """What is not missing, with numbers as times: dates in years from the first of them."""
        there = ~np.isnan(self.values)
        times = self.times[there]
        if self.dated and times.size:
            times = (times - times[0]) / DAY / DAYS_A_YEAR
        return times, self.values[there]

    @property
    def origin(self) -> float:
        """The year of the calendar from which dates are counted; 0 for numbers."""
        if not self.dated:
            return 0.0
        first = self.times[~np.isnan(self.values)][0]
        year = first.astype("datetime64[Y]")
        return 1970.0 + float(year.astype(int)) + float((first - year) / DAY) / DAYS_A_YEAR


def read_series(path: Path, time: str, value: str, scale: float) -> Series:
    """The series in a file; `-` is standard input, as CSV."""
    if time == value:
        raise Refused(f"--time and --value both name the column {time!r}: name two")
    if path != STANDARD:
        if not is_text(path):
            raise Refused(f"{path}: the name of a series ends in .csv, .tsv (or either with .gz)")
        check_readable(path)
    cells = list(read_cells(path, [time, value]))
    if not cells:
        raise Refused(f"{table_name(path)} has no rows")
    lines = [line for line, _ in cells]
    faults = Faults(path, "line")
    times = _times(path, time, lines, [row[0] for _, row in cells], faults)
    faults.refuse()
    values = np.array([_value(value, line, row[1], faults) for line, row in cells])
    faults.refuse()
    _check_order(path, time, lines, times)
    series = Series(times, values * scale)
    _check_values(path, value, series.observed()[1])
    return series


def _times(path: Path, name: str, lines: list[int], cells: list[str], faults: Faults) -> np.ndarray:
    """Dates if the first cell is one, else numbers."""
    if DATE.fullmatch(cells[0]):
        return np.array([_date(name, *pair, faults) for pair in zip(lines, cells, strict=True)])
    numbers = [as_number(cell) for cell in cells]
    for line, cell, number in zip(lines, cells, numbers, strict=True):
        if number is None or not abs(number) <= LARGEST:
            faults.add(line, f"{fault(name, repr(cell or 'empty'), number)}, not a date such as 2024-01-31")
    # 20240131 is a number too, but not one to count with.
    if all(re.fullmatch(r"(1[789]|20)\d\d[01]\d[0-3]\d", cell) for cell in cells):
        raise Refused(f"{table_name(path)}: {name!r} is {cells[0]}, a date without dashes: write 2024-01-31")
    return np.array([math.nan if number is None else number for number in numbers])


def _date(name: str, line: int, cell: str, faults: Faults) -> np.datetime64:
    try:
        if DATE.fullmatch(cell):
            return np.datetime64(cell, "us")
    except ValueError:  # a month with too many days
        pass
    faults.add(line, f"{name!r} is {cell or 'empty'!r}, not a date such as 2024-01-31")
    return np.datetime64("NaT", "us")


def _value(name: str, line: int, cell: str, faults: Faults) -> float:
    if cell.lower() in MISSING:
        return math.nan
    number = as_number(cell)
    if number is None or not abs(number) <= LARGEST:
        faults.add(line, fault(name, repr(cell), number))
        return math.nan
    return number


def _check_order(path: Path, name: str, lines: list[int], times: np.ndarray) -> None:
    late = times[1:] > times[:-1]
    if late.all():
        return
    row = int(np.argmin(late)) + 1
    what = "the same as" if times[row] == times[row - 1] else "before"
    raise Refused(
        f"{table_name(path)}, line {lines[row]}: {name!r} is {what} that of the line above: sort the series, "
        f"and keep one row for each time{see('series')}"
    )


def _check_values(path: Path, name: str, values: np.ndarray) -> None:
    if len(values) < FEWEST:
        count = f"{len(values)} value{'s' * (len(values) != 1)}"
        least = f"{FEWEST} are the least, hundreds are better{see('series')}"
        raise Refused(f"{table_name(path)} has {count} of {name!r}: {least}")
    if np.ptp(values) == 0:
        told = f"a constant series says nothing of an SDE{see('series')}"
        raise Refused(f"{table_name(path)}: {name!r} is always {values[0]:g}: {told}")
