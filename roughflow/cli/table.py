"""A table of numbers from a file, or from standard input."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

import roughflow as rf
from roughflow.faq import see

from .refused import Refused
from .rows import LARGEST, Faults, Table, counted, fault, places_of, table_name
from .text import STANDARD, is_text, read_text, text_chunks

LARGE = 2**26  # bytes of a file that is not read at once


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


def read_chunks(
    path: Path, columns: Sequence[str] | None, size: int
) -> tuple[tuple[str, ...], int, Iterator[np.ndarray]]:
    """The names, the number of rows, and the rows, `size` at a time: those of a large file are read as they
    are asked for."""
    if path == STANDARD or not path.is_file() or path.stat().st_size < LARGE:
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
) -> "rf.ParquetTable | None":
    """A Parquet file whose numbers would not fit in memory with room to spare."""
    if path.suffix.lower() != ".parquet" or not path.is_file() or path.stat().st_size < LARGE:
        return None
    from roughflow.tables import parquet_file

    metadata = parquet_file(path).metadata
    if metadata.num_rows * (metadata.num_columns if columns is None else len(columns)) * 8 < 2 * LARGE:
        return None
    return rf.ParquetTable(path, columns, given=given)


def _parts(blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The rows of the blocks, `size` at a time."""
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
        raise Refused(
            f"{path}: the name of a table ends in .csv, .tsv (or either with .gz), .npy or .parquet"
        )
    return readers[path.suffix.lower()]


def _read_npy(path: Path, columns: Sequence[str] | None, mapped: bool = False) -> Table:
    try:
        # A map takes no memory, and finds a file that is shorter than its shape says.
        rows = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise Refused(f"{path} is not an array that numpy.save wrote, or is damaged ({error})") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or not rows.shape[1]:
        shape = getattr(rows, "shape", type(rows).__name__)
        raise Refused(f"{path}: an array of shape (rows, columns) is wanted, got {shape}")
    if rows.dtype.kind not in "fiub":
        raise Refused(f"{path} holds {rows.dtype}: save real numbers")
    names = counted(rows.shape[1])
    places = places_of(path, names, columns)
    chosen = tuple(names[i] for i in places)
    if mapped and chosen == names:
        return Table(chosen, rows, named=False)
    try:
        return Table(chosen, _finite_rows(path, chosen, rows[:, places].astype(float)), named=False)
    except MemoryError:
        raise Refused(f"{path}: {len(rows)} rows of {len(chosen)} columns do not fit in memory") from None


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
