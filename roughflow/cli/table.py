"""A table of numbers from a file, with every row that is not one named by its line."""

import array
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .refused import Refused

SHOWN = 5  # lines that a message names


@dataclass(frozen=True)
class Table:
    """Finite numbers, `(rows, columns)`. `named` is False where the names only count the columns."""

    columns: tuple[str, ...]
    rows: np.ndarray
    named: bool = True


def read_table(path: Path, columns: Sequence[str] | None = None) -> Table:
    """The named columns of a file in that order, or all of them."""
    readers: dict[str, Callable] = {".csv": _read_csv, ".npy": _read_npy, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise Refused(f"{path}: the name of a table ends in .csv, .npy or .parquet")
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a table")
    if not path.exists():
        raise Refused(f"there is no file {path}")
    if not path.stat().st_size:
        raise Refused(f"{path} is empty")
    try:
        table = reader(path, columns)
    except UnicodeDecodeError:
        raise Refused(f"{path} is not text in UTF-8: save it as CSV UTF-8") from None
    if not len(table.rows):
        raise Refused(f"{path} has column names but no rows")
    return table


def counted(dimension: int) -> tuple[str, ...]:
    """Names for columns that have none."""
    return tuple(f"x{i + 1}" for i in range(dimension))


class _Faults:
    """Lines that cannot be used: how many, and the first few."""

    def __init__(self, path: Path, unit: str):
        self.path, self.unit = path, unit
        self.count, self.places, self.first = 0, [], ""

    def add(self, place: int, what: str) -> None:
        self.count += 1
        self.first = self.first or what
        if len(self.places) < SHOWN:
            self.places.append(str(place))

    def refuse(self) -> None:
        if not self.count:
            return
        more = f" and {self.count - len(self.places)} more" if self.count > len(self.places) else ""
        which = f"{self.unit}{'s' * (self.count > 1)} {', '.join(self.places)}{more}"
        remedy = "mend or remove them, or choose other columns"
        raise Refused(f"{self.path}: {which} cannot be used, the first because {self.first}: {remedy}")


def _places(path: Path, there: Sequence[str], wanted: Sequence[str] | None) -> list[int]:
    """Where the wanted columns are among those there are."""
    if len(set(there)) < len(there):
        twice = next(name for i, name in enumerate(there) if name in there[:i])
        raise Refused(f"{path} has two columns named {twice!r}: rename one")
    missing = [name for name in wanted or () if name not in there]
    if missing:
        raise Refused(f"{path} has no column {', '.join(map(repr, missing))}; it has {', '.join(there)}")
    return [there.index(name) for name in (there if wanted is None else wanted)]


def _read_csv(path: Path, columns: Sequence[str] | None) -> Table:
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            header = [name.strip() for name in next((line for line in lines if line), [])]
            places = _places(path, _header(path, header), columns)
            rows = array.array("d", _csv_numbers(path, lines, header, places))
        except csv.Error as error:
            raise Refused(f"{path}, line {lines.line_num}: {error}") from None
    return Table(tuple(header[i] for i in places), np.asarray(rows).reshape(-1, len(places)))


def _header(path: Path, header: list[str]) -> list[str]:
    if not header:
        raise Refused(f"{path} is empty")
    if any(_number(name) is not None for name in header):
        raise Refused(
            f"{path}: the first line has a number, not the names of the columns: put their names there"
        )
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise Refused(f"{path}: the columns are not separated by commas: save it as CSV with commas")
    return header


def _csv_numbers(path: Path, lines, header: list[str], places: list[int]) -> Iterator[float]:
    """The numbers in the rows after the header, and in the end a complaint about rows without."""
    faults = _Faults(path, "line")
    for line in lines:
        if not line:
            continue
        if len(line) != len(header):
            faults.add(lines.line_num, f"it has {len(line)} cells under {len(header)} names")
            continue
        numbers = [_number(line[i]) for i in places]
        bad = next((i for i, number in zip(places, numbers, strict=True) if not _finite(number)), None)
        if bad is None:
            yield from (number for number in numbers if number is not None)
        else:
            faults.add(lines.line_num, f"{header[bad]!r} is {line[bad].strip() or 'empty'!r}")
    faults.refuse()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def _read_npy(path: Path, columns: Sequence[str] | None) -> Table:
    try:
        rows = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise Refused(f"{path} is not an array that numpy.save wrote, or is damaged ({error})") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or not rows.shape[1]:
        shape = getattr(rows, "shape", type(rows).__name__)
        raise Refused(f"{path}: an array of shape (rows, columns) is wanted, got {shape}")
    if rows.dtype.kind not in "fiub":
        raise Refused(f"{path} holds {rows.dtype}: save real numbers")
    names = counted(rows.shape[1])
    places = _places(path, names, columns)
    chosen = tuple(names[i] for i in places)
    return Table(chosen, _finite_rows(path, chosen, rows[:, places].astype(float)), named=False)


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise Refused("reading a .parquet file needs pyarrow: pip install pyarrow") from None
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise Refused(f"{path} is not a parquet file, or is damaged ({str(error).splitlines()[0]})") from None
    names = [table.column_names[i] for i in _places(path, table.column_names, columns)]
    for name in names:
        kind = table.column(name).type
        fine = [pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean]
        if not any(test(kind) for test in fine):
            raise Refused(f"{path}: column {name!r} holds {kind}, not numbers: choose others with --columns")
    numbers = [table.column(name).cast(pa.float64(), safe=False).to_numpy() for name in names]
    return Table(tuple(names), _finite_rows(path, names, np.stack(numbers, axis=1)))


def _finite_rows(path: Path, columns: Sequence[str], rows: np.ndarray) -> np.ndarray:
    faults = _Faults(path, "row")
    finite = np.isfinite(rows)
    for row in np.flatnonzero(~finite.all(axis=1)):
        column = int(np.argmin(finite[row]))
        faults.add(int(row) + 1, f"{columns[column]!r} is {rows[row, column]}")
    faults.refuse()
    return rows
