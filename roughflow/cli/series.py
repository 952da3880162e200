"""A series from a table: dates or numbers in one column, values in another."""

import datetime
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

DATE = re.compile(r"\d{4}-\d\d(-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?(?P<zone>Z|[+-]\d\d:?\d\d)?)?)?")
OTHER_DATE = re.compile(r"\d{1,4}[/.]\d{1,2}[/.]\d{1,4}|\d{1,2}-\d{1,2}-\d{4}")
FEWEST = 3  # values, for two transitions
MISSING = {"", "na", "nan", "n/a", "null", "."}  # as pandas, R and FRED write it


@dataclass(frozen=True)
class Series:
    """`times` `(N,)`, numbers or dates, in UTC where they have a time zone, and `values` `(N,)`, NaN where
    missing."""

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
        """What is not missing."""
        there = ~np.isnan(self.values)
        return self.times[there], self.values[there]

    def shown(self, time: np.datetime64 | float) -> str:
        """A time as text."""
        text = str(time).removesuffix(".000000") if self.dated else str(time)
        return text + "Z" if self.zoned else text.removesuffix("T00:00:00")

    def times_ahead(self, text: str) -> np.ndarray:
        """Times of a forecast: dates, or numbers counted from the last value; with commas between them."""
        last, cells = self.observed()[0][-1], [cell.strip() for cell in text.split(",")]
        numbers = [number for cell in cells if (number := as_number(cell)) is not None]
        if len(numbers) == len(cells):
            times = np.array([0.0, *numbers])
        elif self.dated and all(_zoned(cell) == self.zoned for cell in cells):
            times = np.array([last, *map(_date, cells)])
        else:
            dates = f"dates such as {self.shown(last)}, or " if self.dated else ""
            raise Refused(f"--forecast takes {dates}numbers, with commas between them; got {text!r}")
        if not (times[1:] > times[:-1]).all() or (len(numbers) and not times[-1] <= LARGEST):
            after = "the last value, counted from it" if len(numbers) else self.shown(last)
            raise Refused(f"--forecast takes increasing times after {after}; got {text!r}")
        return times[1:]


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
    series = Series(times, values * scale, bool(_zoned(cells[0][1][0])))
    _check_values(path, value, series.observed()[1])
    return series


def _times(path: Path, name: str, lines: list[int], cells: list[str], faults: Faults) -> np.ndarray:
    """Dates if the first cell is one, else numbers."""
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
        if number is None or not abs(number) <= LARGEST:
            other = " (year-month-day)" if OTHER_DATE.fullmatch(cell) else ""
            why = f"{fault(name, cell, number)}, not a date such as 2024-01-31{other}"
            faults.add(line, why)
    # 20240131 is a number too, but not one to count with.
    if all(re.fullmatch(r"(1[789]|20)\d\d[01]\d[0-3]\d", cell) for cell in cells):
        raise Refused(f"{table_name(path)}: {name!r} is {cells[0]}, a date without dashes: write 2024-01-31")
    return np.array([math.nan if number is None else number for number in numbers])


def _zoned(cell: str) -> bool | None:
    """Whether a date has a time zone; None if it is not a date."""
    match = DATE.fullmatch(cell)
    return None if match is None else match["zone"] is not None


def _date(cell: str) -> np.datetime64:
    """A date, in UTC if it has a time zone; NaT if it is none."""
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
    if number is None or not abs(number) <= LARGEST:
        faults.add(line, fault(name, cell, number))
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
