"""Tables as text: CSV, or with tabs, compressed or not, from a file or from standard input."""

import array
import contextlib
import csv
import datetime
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from .refused import Refused
from .rows import LARGEST, Faults, Table, fault, places_of, table_name

STANDARD = Path("-")
GZIP = b"\x1f\x8b"  # how such a file begins
OTHERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def is_text(path: Path) -> bool:
    """Whether a file is read and written as text, by its name."""
    return _kind(path) in (".csv", ".tsv")


def separator(path: Path) -> str:
    return "\t" if _kind(path) == ".tsv" else ","


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _kind(path: Path) -> str:
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def read_text(path: Path, columns: Sequence[str] | None) -> Table:
    """The named columns in that order, or all of them."""
    with _lines(path) as source:
        return _read(path, source, columns)


def text_chunks(
    path: Path, columns: Sequence[str] | None, size: int
) -> tuple[tuple[str, ...], int, Iterator[np.ndarray]]:
    """The same of a large file: the names, how many rows there are at most, and the rows as they are asked
    for, `size` at a time."""
    with _lines(path) as source:
        header = [name.strip() for name in next(iter(source), [])]
        places = places_of(path, _header(path, header), columns)
    unpacked = gzip.open if is_compressed(path) else open
    with unpacked(path, "rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))

    def chunks() -> Iterator[np.ndarray]:
        with _lines(path) as source:
            lines = iter(source)
            next(lines)
            numbers = _numbers(path, source, lines, header, places, at_once=True)
            while len(rows := array.array("d", itertools.islice(numbers, size * len(places)))):
                yield np.asarray(rows).reshape(-1, len(places))

    return tuple(header[i] for i in places), lines, chunks()


def read_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Each line's number, and the text in the named columns, in that order."""
    faults = Faults(path, "line")
    with _lines(path) as source:
        lines = iter(source)
        header = [name.strip() for name in next(lines, [])]
        places = places_of(path, _header(path, header), columns)
        for line in _whole(source, lines, header, faults):
            yield source.begun, [line[i].strip() for i in places]
    faults.refuse()


@contextlib.contextmanager
def _lines(path: Path) -> Iterator["_Lines"]:
    """The rows of a file, whatever is wrong with it told in one line."""
    name = table_name(path)
    try:
        with _opened(path) as file:
            source = _Lines(file, separator(path))
            try:
                yield source
            except csv.Error as error:
                raise Refused(f"{name}, line {source.begun}: {error}") from None
    except UnicodeDecodeError:
        raise Refused(f"{name} is not text in UTF-8: save it as CSV UTF-8") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise Refused(f"{name} is not compressed by gzip, or is damaged ({error})") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """The file as text; a mark that says UTF-8 is left out."""
    if path == STANDARD:
        if sys.stdin is None or sys.stdin.isatty():
            raise Refused("there is nothing on standard input: send a table there, as in `... < data.csv`")
        yield io.StringIO(sys.stdin.read().removeprefix("\ufeff"), newline="")
        return
    if is_compressed(path):
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
        return
    with open(path, "rb") as raw:
        if raw.peek(2)[:2] == GZIP:
            raise Refused(f"{path} is compressed: call it {path}.gz, or unpack it")
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


class _Lines:
    """Rows of cells, and the line on which the last one began: a quoted cell may go over several."""

    def __init__(self, file: IO[str], delimiter: str):
        self.reader = csv.reader(file, delimiter=delimiter)
        self.begun = 0

    def __iter__(self) -> Iterator[list[str]]:
        while True:
            self.begun = self.reader.line_num + 1
            line = next(self.reader, None)
            if line is None:
                return
            if line:
                yield line

    @property
    def quote(self) -> str:
        """What is to be said of a row over several lines."""
        last = self.reader.line_num
        return f", and a quote opened there ends on line {last} or never" if last > self.begun else ""


def _read(path: Path, source: _Lines, columns: Sequence[str] | None) -> Table:
    lines = iter(source)
    header = [name.strip() for name in next(lines, [])]
    places = places_of(path, _header(path, header), columns)
    rows = array.array("d", _numbers(path, source, lines, header, places))
    return Table(tuple(header[i] for i in places), np.asarray(rows).reshape(-1, len(places)))


def _header(path: Path, header: list[str]) -> list[str]:
    name = table_name(path)
    if not header:
        raise Refused(f"{name} is empty")
    if any(as_number(cell) is not None for cell in header):
        raise Refused(
            f"{name}: the first line has a number, not the names of the columns: put their names there"
        )
    if len(header) == 1:
        for mark in OTHERS:
            if mark in header[0]:
                _refuse_separator(path, OTHERS[mark])
    return header


def _refuse_separator(path: Path, found: str) -> None:
    wanted = "tabs" if separator(path) == "\t" else "commas"
    remedy = "name it .tsv" if found == "tabs" and path != STANDARD else f"save it with {wanted}"
    raise Refused(f"{table_name(path)}: the columns are separated by {found}, not {wanted}: {remedy}")


def _numbers(
    path: Path,
    source: _Lines,
    lines: Iterator[list[str]],
    header: list[str],
    places: list[int],
    at_once: bool = False,
) -> Iterator[float]:
    """The numbers in the rows after the header, and in the end a complaint about rows without."""
    faults = Faults(path, "line", at_once)
    for line in _whole(source, lines, header, faults):
        numbers = [as_number(line[i]) for i in places]
        bad = next(
            (i for i, n in zip(places, numbers, strict=True) if n is None or not abs(n) <= LARGEST), None
        )
        if bad is None:
            yield from (number for number in numbers if number is not None)
            continue
        if len(header) == 1 and 1 < len(line[0].split()) == len(header[0].split()):
            _refuse_separator(path, "spaces")
        cell = line[bad].strip()
        why = fault(header[bad], cell, as_number(cell)) + _series(cell)
        faults.add(source.begun, why + source.quote)
    faults.refuse()


def _series(cell: str) -> str:
    """Where a date belongs."""
    try:
        datetime.datetime.fromisoformat(cell)
    except ValueError:
        return ""
    return ", a date (roughflow estimate fits SDEs to series)"


def _whole(
    source: _Lines, lines: Iterator[list[str]], header: list[str], faults: Faults
) -> Iterator[list[str]]:
    """The rows with a cell for each name; others are faults."""
    for line in lines:
        if len(line) == len(header):
            yield line
            continue
        ends = ", and ends with a separator" if line[-1] == "" and len(line) == len(header) + 1 else ""
        told = f"it has {len(line)} cell{'s' * (len(line) > 1)} under {len(header)} names{ends}"
        faults.add(source.begun, told + source.quote)


def as_number(text: str) -> float | None:
    """The number in a cell; Python alone reads 1_000 as one."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None
