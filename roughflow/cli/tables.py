"""Read and write tables: CSV or TSV text, `.npy` and Parquet files, standard input and output."""

import array
import contextlib
import csv
import datetime
import gzip
import io
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

import roughflow as rf
from roughflow.faq import see

from .startup import Refused

MAX_SHOWN_LINES = 5  # maximum number of lines named in a message
MAX_SHOWN_COLUMNS = 20  # maximum number of columns named in a message
MISSING = {"", "na", "nan", "n/a", "null", "."}  # how pandas, R and FRED write missing values
MAX_VALUE = 1e30  # single precision overflows at 3e38, and intermediate results exceed the values in the rows


@dataclass(frozen=True)
class Table:
    """A table `(rows, columns)` of finite numbers, or of objects from `read_mixed`. `named` is False if the
    column names are default names."""

    columns: tuple[str, ...]
    rows: np.ndarray
    named: bool = True

    def chosen(self, path: Path, columns: Sequence[str]) -> "Table":
        """The table with only these columns, in this order."""
        return Table(tuple(columns), self.rows[:, places_of(path, self.columns, columns)], self.named)


def table_name(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def counted(dimension: int) -> tuple[str, ...]:
    """Default column names for a table without names."""
    return tuple(f"x{i + 1}" for i in range(dimension))


class Faults:
    """Collects invalid lines: their number, the first few line numbers, and the first reason. With `at_once`,
    the first invalid line raises an error, for files that are processed while they are read."""

    def __init__(self, path: Path, unit: str, at_once: bool = False):
        self.path, self.unit, self.at_once = path, unit, at_once
        self.count, self.places, self.first = 0, [], ""

    def add(self, place: int, what: str) -> None:
        self.count += 1
        self.first = self.first or what
        if len(self.places) < MAX_SHOWN_LINES:
            self.places.append(str(place))
        if self.at_once:
            self.refuse()

    def refuse(self) -> None:
        if not self.count:
            return
        more = f" and {self.count - len(self.places)} more" if self.count > len(self.places) else ""
        which = f"{self.unit}{'s' * (self.count > 1)} {', '.join(self.places)}{more}"
        many = self.count > 1
        why = f"{'the first ' * many}because {self.first}"
        remedy = f"fix or remove {'them' if many else 'it'}, or choose other columns{see('tables')}"
        raise Refused(f"{table_name(self.path)}: {which} cannot be used, {why}: {remedy}")


def places_of(path: Path, there: Sequence[str], wanted: Sequence[str] | None) -> list[int]:
    """The indices of the wanted columns in the header."""
    places = {name: i for i, name in enumerate(there)}
    if len(places) < len(there):
        twice = next(name for i, name in enumerate(there) if places[name] > i)
        raise Refused(f"{table_name(path)} has two columns named {twice!r}: rename one")
    if wanted is None and not all(there):
        _refuse_nameless(path, there)
    missing = [name for name in wanted or () if name not in places]
    if missing:
        more = [f"… ({len(there)} in all)"] if len(there) > MAX_SHOWN_COLUMNS else []
        names = ", ".join([*there[:MAX_SHOWN_COLUMNS], *more])
        raise Refused(f"{table_name(path)} has no column {', '.join(map(repr, missing))}; it has {names}")
    return [places[name] for name in (there if wanted is None else wanted)]


def _refuse_nameless(path: Path, there: Sequence[str]) -> NoReturn:
    named = ",".join(name for name in there if name) or "..."
    place = list(there).index("")
    why = ""
    if place == 0 and len(there) > 1:
        why = ", which may be an index written by pandas (index=False omits it)"
    elif place == len(there) - 1:
        why = ": its first line ends with a separator"
    raise Refused(
        f"{table_name(path)}: column {place + 1} has no name{why}; select columns with --columns {named}"
    )


def fault(name: str, cell: str | float, number: float | None) -> str:
    """The reason why a cell is invalid."""
    large = number is not None and math.isfinite(number)
    shown = "empty" if cell == "" else repr(cell) if isinstance(cell, str) else cell
    return f"{name!r} is {shown}" + (f", too large (beyond {MAX_VALUE:g})" if large else "")


STANDARD = Path("-")
GZIP = b"\x1f\x8b"  # first bytes of a gzip file
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def is_text(path: Path) -> bool:
    """Whether a file is text, by its name."""
    return _kind(path) in (".csv", ".tsv")


def separator(path: Path) -> str:
    return "\t" if _kind(path) == ".tsv" else ","


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _kind(path: Path) -> str:
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def read_text(path: Path, columns: Sequence[str] | None) -> Table:
    """Read the named columns of a text file in that order, or all of them."""
    with open_lines(path) as source:
        return _read(path, source, columns)


def text_chunks(
    path: Path, columns: Sequence[str] | None, size: int
) -> tuple[tuple[str, ...], int, Iterator[np.ndarray]]:
    """`read_text` for a large file: the names, an upper bound on the number of rows, and an iterator over
    chunks of `size` rows."""
    with open_lines(path) as source:
        header = [name.strip() for name in next(iter(source), [])]
        places = places_of(path, _header(path, header), columns)
    unpacked = gzip.open if is_compressed(path) else open
    with unpacked(path, "rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))

    def chunks() -> Iterator[np.ndarray]:
        with open_lines(path) as source:
            lines = iter(source)
            next(lines)
            numbers = _numbers(path, source, lines, header, places, at_once=True)
            while len(rows := array.array("d", itertools.islice(numbers, size * len(places)))):
                yield np.asarray(rows).reshape(-1, len(places))

    return tuple(header[i] for i in places), lines, chunks()


def read_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """For each row, yield the line number and the text in the named columns, in that order."""
    faults = Faults(path, "line")
    with open_lines(path) as source:
        lines = iter(source)
        header = [name.strip() for name in next(lines, [])]
        places = places_of(path, _header(path, header), columns)
        for line in _whole(source, lines, header, faults):
            yield source.begun, [line[i].strip() for i in places]
    faults.refuse()


@contextlib.contextmanager
def open_lines(path: Path) -> Iterator["_Lines"]:
    """Open the rows of a text file in a context that reports reading errors in one line."""
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
        raise Refused(f"{name} is not a valid gzip file ({error})") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Open a file as text, without a byte-order mark."""
    if path == STANDARD:
        if sys.stdin is None or sys.stdin.isatty():
            raise Refused("standard input is empty: pass a table, as in `... < data.csv`")
        yield io.StringIO(sys.stdin.read().removeprefix("\ufeff"), newline="")
        return
    if is_compressed(path):
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
        return
    with open(path, "rb") as raw:
        if raw.peek(2)[:2] == GZIP:
            raise Refused(f"{path} is compressed: rename it to {path}.gz, or decompress it")
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


class _Lines:
    """Iterates over the rows of a text table, and records the line on which the last row began; a quoted cell
    may span several lines."""

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
        """A note for error messages if a row spans several lines, else an empty string."""
        last = self.reader.line_num
        return (
            f", and a quoted cell that begins there ends on line {last} or not at all"
            if last > self.begun
            else ""
        )


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
        raise Refused(f"{name}: the first line must contain the names of the columns, but contains a number")
    if len(header) == 1:
        for mark in OTHER_SEPARATORS:
            if mark in header[0]:
                _refuse_separator(path, OTHER_SEPARATORS[mark])
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
    """Yield the numbers in the rows after the header. After the last row, raise an error if any row was
    invalid."""
    faults = Faults(path, "line", at_once)
    for line in _whole(source, lines, header, faults):
        numbers = [as_number(line[i]) for i in places]
        bad = next(
            (i for i, n in zip(places, numbers, strict=True) if n is None or not abs(n) <= MAX_VALUE), None
        )
        if bad is None:
            yield from (number for number in numbers if number is not None)
            continue
        if len(header) == 1 and 1 < len(line[0].split()) == len(header[0].split()):
            _refuse_separator(path, "spaces")
        cell = line[bad].strip()
        why = fault(header[bad], cell, as_number(cell)) + _hint(cell)
        faults.add(source.begun, why + source.quote)
    faults.refuse()


def _hint(cell: str) -> str:
    """A hint for error messages if a cell is a date, text or missing, else an empty string."""
    with contextlib.suppress(ValueError):
        datetime.datetime.fromisoformat(cell)
        return ", a date (roughflow estimate fits SDEs to series)"
    if cell.lower() in MISSING or as_number(cell) is None:
        return " (roughflow fit --family mixture fits text and missing cells)"
    return ""


def _whole(
    source: _Lines, lines: Iterator[list[str]], header: list[str], faults: Faults
) -> Iterator[list[str]]:
    """Yield the rows with one cell per column name, and add other rows to `faults`."""
    for line in lines:
        if len(line) == len(header):
            yield line
            continue
        ends = ", and ends with a separator" if line[-1] == "" and len(line) == len(header) + 1 else ""
        problem = f"it has {len(line)} cell{'s' * (len(line) > 1)} under {len(header)} names{ends}"
        faults.add(source.begun, problem + source.quote)


def as_number(text: str) -> float | None:
    """The number in a cell, or None. Unlike in Python, underscores, as in 1_000, are not accepted."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


LARGE_FILE = 2**26  # bytes; larger files are read in chunks


def read_table(path: Path, columns: Sequence[str] | None = None) -> Table:
    """Read the named columns of a file in that order, or all of them; `-` is standard input, as CSV."""
    if path == STANDARD:
        table = read_text(path, columns)
    else:
        reader = _reader(path)
        check_readable(path)
        table = reader(path, columns)
    if not len(table.rows):
        raise Refused(f"{table_name(path)} has no rows")
    return table


def read_mixed(path: Path, columns: Sequence[str] | None) -> Table:
    """Read a table with text and missing cells: each column contains numbers or text, with None for missing
    cells."""
    if path == STANDARD or is_text(path):
        if path != STANDARD:
            check_readable(path)
        with open_lines(path) as source:
            lines = iter(source)
            header = [name.strip() for name in next(lines, [])]
            places, faults = places_of(path, _header(path, header), columns), Faults(path, "line")
            cells = [
                (source.begun, [line[i].strip() for i in places])
                for line in _whole(source, lines, header, faults)
            ]
        faults.refuse()
        names, numbers = tuple(header[i] for i in places), [line for line, _ in cells]
        parts = [_values(name, numbers, [row[j] for _, row in cells], faults) for j, name in enumerate(names)]
        faults.refuse()
    else:
        names, parts = _stored_columns(path, columns)
    if not parts or not len(parts[0]):
        raise Refused(f"{table_name(path)} has no rows")
    rows = np.empty((len(parts[0]), len(parts)), object)
    for i, part in enumerate(parts):
        rows[:, i] = part
    return Table(names, rows)


def _values(
    name: str, lines: Sequence[int], cells: Sequence[str], faults: Faults
) -> list[float | str | None]:
    """The values of a column: numbers, or text if none of its cells is a number."""
    present = [cell for cell in cells if cell.lower() not in MISSING]
    if present and all(as_number(cell) is None for cell in present):
        return [None if cell.lower() in MISSING else cell for cell in cells]
    values: list[float | str | None] = []
    for line, cell in zip(lines, cells, strict=True):
        number = None if cell.lower() in MISSING else as_number(cell)
        if cell.lower() not in MISSING and (number is None or not abs(number) <= MAX_VALUE):
            faults.add(line, f"{fault(name, cell, number)} in a column of numbers")
        values.append(number)
    return values


def _stored_columns(path: Path, columns: Sequence[str] | None) -> tuple[tuple[str, ...], list[list]]:
    """The columns of an .npy or Parquet file."""
    if path.suffix.lower() != ".parquet":
        _reader(path)
        check_readable(path)
        table = _read_npy(path, columns, missing=True)
        return table.columns, [
            [None if np.isnan(v) else v for v in column] for column in table.rows.T.tolist()
        ]
    from roughflow.tables import parquet_file

    check_readable(path)
    file = parquet_file(path)
    there = file.schema_arrow.names
    names = tuple(there[i] for i in places_of(path, there, columns))
    return names, [file.read([name]).column(0).to_pylist() for name in names]


def read_chunks(
    path: Path, columns: Sequence[str] | None, size: int
) -> tuple[tuple[str, ...], int, Iterator[np.ndarray]]:
    """The names, the number of rows, and an iterator over chunks of `size` rows; large files are read
    lazily."""
    if path == STANDARD or not path.is_file() or path.stat().st_size < LARGE_FILE:
        table = read_table(path, columns)
        return table.columns, len(table.rows), _parts([table.rows], size)
    if is_text(path):
        return text_chunks(path, columns, size)
    if path.suffix.lower() == ".parquet":
        from roughflow.tables import parquet_file, parquet_rows

        file = parquet_file(path)
        names = tuple(file.schema_arrow.names[i] for i in places_of(path, file.schema_arrow.names, columns))
        return names, file.metadata.num_rows, _parts(parquet_rows(file, path, names), size)
    table = _read_npy(path, columns, mapped=True)
    blocks = (table.rows[i : i + size] for i in range(0, len(table.rows), size))
    checked = (_finite_rows(path, table.columns, np.array(rows, float)) for rows in blocks)
    return table.columns, len(table.rows), checked


def table_on_disk(
    path: Path, columns: Sequence[str] | None, given: Sequence[str]
) -> "rf.tables.ParquetTable | None":
    """A `ParquetTable` if the file is a Parquet file too large to be read into memory, else None."""
    if path.suffix.lower() != ".parquet" or not path.is_file() or path.stat().st_size < LARGE_FILE:
        return None
    from roughflow.tables import parquet_file

    metadata = parquet_file(path).metadata
    if metadata.num_rows * (metadata.num_columns if columns is None else len(columns)) * 8 < 2 * LARGE_FILE:
        return None
    return rf.tables.ParquetTable(path, columns, given=given)


def _parts(blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the rows of the blocks, `size` at a time."""
    rest: list[np.ndarray] = []
    for block in blocks:
        rows = np.concatenate([*rest, block])
        whole = len(rows) // size * size
        yield from (rows[i : i + size] for i in range(0, whole, size))
        rest = [rows[whole:]]
    if rest and len(rest[0]):
        yield rest[0]


def check_readable(path: Path) -> None:
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a table")
    if not path.exists():
        raise Refused(f"there is no file {path}")
    if not path.is_file():
        raise Refused(f"{path} is a device or a pipe, not a file; - reads standard input")
    if not path.stat().st_size:
        raise Refused(f"{path} is empty")


def _reader(path: Path) -> Callable[[Path, Sequence[str] | None], Table]:
    if is_text(path):
        return read_text
    readers = {".npy": _read_npy, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise Refused(f"{path}: a table must end in .csv, .tsv, .csv.gz, .tsv.gz, .npy or .parquet")
    return readers[path.suffix.lower()]


def _read_npy(
    path: Path, columns: Sequence[str] | None, mapped: bool = False, missing: bool = False
) -> Table:
    try:
        # A memory map does not load the file into memory, and detects truncated files.
        rows = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise Refused(f"{path} is not a valid .npy file ({error})") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or not rows.shape[1]:
        shape = getattr(rows, "shape", type(rows).__name__)
        raise Refused(f"{path}: expected an array of shape (rows, columns), got {shape}")
    if rows.dtype.kind not in "fiub":
        raise Refused(f"{path} holds {rows.dtype}: save real numbers")
    names = counted(rows.shape[1])
    places = places_of(path, names, columns)
    chosen = tuple(names[i] for i in places)
    if mapped and chosen == names:
        return Table(chosen, rows, named=False)
    try:
        values = rows[:, places].astype(float)
        return Table(chosen, values if missing else _finite_rows(path, chosen, values), named=False)
    except MemoryError:
        raise Refused(f"{path}: {len(rows)} rows of {len(chosen)} columns do not fit in memory") from None


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Table:
    from roughflow.tables import check_parquet_columns, parquet_blocks, parquet_file

    file = parquet_file(path)
    there = file.schema_arrow.names
    names = [there[i] for i in places_of(path, there, columns)]
    check_parquet_columns(file, path, names)
    rows = np.concatenate([np.zeros((0, len(names))), *parquet_blocks(file, names)])
    return Table(tuple(names), _finite_rows(path, names, rows))


def _finite_rows(path: Path, columns: Sequence[str], rows: np.ndarray) -> np.ndarray:
    faults = Faults(path, "row")
    usable = np.abs(rows) <= MAX_VALUE  # false for NaN
    for row in np.flatnonzero(~usable.all(axis=1)):
        column = int(np.argmin(usable[row]))
        faults.add(int(row) + 1, fault(columns[column], rows[row, column], rows[row, column]))
    faults.refuse()
    return rows


def is_array(path: Path | None) -> bool:
    return path is not None and path.suffix.lower() == ".npy"


def write_table(path: Path | None, header: Sequence[str], blocks: Iterable[Sequence[np.ndarray]]) -> None:
    """Write blocks of columns of equal length as text, to a file or to standard output."""
    with _text(path) as file:
        _write_rows(file, path, [header])
        for columns in blocks:
            _write_rows(file, path, _cells(columns))


def table_bytes(path: Path, columns: Sequence[np.ndarray], header: Sequence[str] | None) -> bytes:
    """The bytes that represent the rows in the file `path`, with or without a header. Parts of a compressed
    file can simply be joined, because several gzip members form one valid file."""
    text = io.StringIO(newline="")
    _write_rows(text, path, [] if header is None else [header])
    _write_rows(text, path, _cells(columns))
    data = text.getvalue().encode()
    return gzip.compress(data, mtime=0) if is_compressed(path) else data


def _write_rows(file: IO[str], path: Path | None, rows: Iterable[Iterable[str]]) -> None:
    between = "," if path is None else separator(path)
    csv.writer(file, lineterminator="\n", delimiter=between).writerows(rows)


def _cells(columns: Sequence[np.ndarray]) -> Iterator[tuple[str, ...]]:
    # str() of a NumPy number is the shortest text that gives the same number in the same precision.
    return zip(*(map(str, column) for column in columns), strict=True)


@contextlib.contextmanager
def _text(path: Path | None) -> Iterator[IO[str]]:
    if path is None or path == STANDARD:
        yield sys.stdout
        return
    with rf.files.whole_file(path) as draft, open(draft, "wb") as raw:
        if is_compressed(path):
            # The time stamp is omitted, so that the same table gives the same file.
            with (
                gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
                io.TextIOWrapper(packed, "utf-8", newline="") as file,
            ):
                yield file
        else:
            with io.TextIOWrapper(raw, "utf-8", newline="") as file:
                yield file


def write_npy(path: Path, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> None:
    """Write blocks of rows as one array of shape `shape`."""
    with rf.files.whole_file(path) as draft, open(draft, "wb") as file:
        for i, block in enumerate(blocks):
            if i == 0:
                described = {"descr": block.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_2_0(file, described)
            file.write(np.ascontiguousarray(block).tobytes())
