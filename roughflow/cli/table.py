"""A table of numbers from a file, or from standard input."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from roughflow.faq import see

from .refused import Refused
from .rows import LARGEST, Faults, Table, counted, fault, places_of, table_name
from .text import STANDARD, is_text, read_text


def read_table(path: Path, columns: Sequence[str] | None = None) -> Table:
    """The named columns of a file in that order, or all of them; `-` is standard input, as CSV."""
    if path == STANDARD:
        table = read_text(path, columns)
    else:
        reader = _reader(path)
        check_readable(path)
        table = reader(path, columns)
    if not len(table.rows):
        raise Refused(f"{table_name(path)} has no rows")
    return table


def check_readable(path: Path) -> None:
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a table")
    if not path.exists():
        raise Refused(f"there is no file {path}")
    if path.is_file() and not path.stat().st_size:
        raise Refused(f"{path} is empty")


def _reader(path: Path) -> Callable[[Path, Sequence[str] | None], Table]:
    if is_text(path):
        return read_text
    readers = {".npy": _read_npy, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise Refused(
            f"{path}: the name of a table ends in .csv, .tsv (or either with .gz), .npy or .parquet"
        )
    return readers[path.suffix.lower()]


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
    places = places_of(path, names, columns)
    chosen = tuple(names[i] for i in places)
    return Table(chosen, _finite_rows(path, chosen, rows[:, places].astype(float)), named=False)


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        told = "reading a .parquet file needs pyarrow: pip install 'roughflow[parquet]'"
        raise Refused(told + see("not-installed")) from None
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise Refused(f"{path} is not a parquet file, or is damaged ({str(error).splitlines()[0]})") from None
    names = [table.column_names[i] for i in places_of(path, table.column_names, columns)]
    for name in names:
        kind = table.column(name).type
        fine = [pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean]
        if not any(test(kind) for test in fine):
            raise Refused(f"{path}: column {name!r} holds {kind}, not numbers: choose others with --columns")
    numbers = [table.column(name).cast(pa.float64(), safe=False).to_numpy() for name in names]
    return Table(tuple(names), _finite_rows(path, names, np.stack(numbers, axis=1)))


def _finite_rows(path: Path, columns: Sequence[str], rows: np.ndarray) -> np.ndarray:
    faults = Faults(path, "row")
    usable = np.abs(rows) <= LARGEST  # which NaN is not
    for row in np.flatnonzero(~usable.all(axis=1)):
        column = int(np.argmin(usable[row]))
        faults.add(int(row) + 1, fault(columns[column], rows[row, column], rows[row, column]))
    faults.refuse()
    return rows
