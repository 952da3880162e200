"""Tables that do not fit in memory: Parquet files, and estimates in chunks."""

import copy
import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from .._checks import check_count, check_input_file, check_instance, check_key, check_path
from .._devices import Devices, DevicesLike
from ..density import AbstractEstimator, Estimate, StochasticFlow
from ..faq import see
from ..train import check_share, identified, rng_of, row_codes
from ._arrays import MAX_VALUE
from ._columns import WithRelations
from ._mixture import MixedDensity
from ._standardised import Standardised

ROWS_PER_READ = 2**16
MAX_VALIDATION_ROWS = 2**15


@dataclass(init=False, eq=False)
class ParquetTable:
    """A Parquet file as data for `rf.fit` and `rf.fit_density`; the file need not fit in memory.

    Its columns are copied once to a scratch file (4 or 8 bytes per value), from which batches are drawn at
    random with replacement. Only one batch is in memory. The same key always yields the same batches, so a
    resumed run gives the same result. The scratch file is removed when the program ends, even if it is
    killed.

    **Arguments:**

    - `path`: the file; reading it needs pyarrow.
    - `columns`: the columns to model, in this order; by default all but the given ones.
    - `given`: the columns to condition on.
    - `folder`: folder for the scratch file; by default the folder of the Parquet file, or the temporary
      folder if the former is read-only.

    ```python
    import jax
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import roughflow as rf

    x, y = np.random.default_rng(0).normal(size=(2, 1000))
    pq.write_table(pa.table({"x": x, "y": x + y**2}), "rows.parquet")
    table = rf.tables.ParquetTable("rows.parquet", columns=["x", "y"])
    flow = rf.tables.FlowOptions(width=8, depth=1, likelihood_steps=2)
    settings = {"flow": flow, "steps": 20, "progress": False}
    fitted = rf.fit_density(table, key=jax.random.key(1), **settings)
    ```
    """

    columns: tuple[str, ...]  # given ones last
    num_given: int  # number of given columns
    digest: str  # digest of all values, because the path of the file may have changed when a run is resumed
    aside: np.ndarray  # sorted indices of rows that are never drawn

    def __init__(
        self,
        path: str | os.PathLike,
        columns: Sequence[str] | None = None,
        *,
        given: Sequence[str] = (),
        folder: str | os.PathLike | None = None,
    ):
        file = parquet_file(path)
        wanted = (
            [name for name in file.schema_arrow.names if name not in given] if columns is None else columns
        )
        self.columns, self.num_given = (*wanted, *given), len(given)
        self.aside = np.zeros(0, int)
        check_parquet_columns(file, path, self.columns)
        dtype = np.dtype(np.float32 if _fits_single(file, self.columns) else np.float64)
        digest = hashlib.blake2b(digest_size=16)
        lower, upper = np.full(len(self.columns), np.inf), np.full(len(self.columns), -np.inf)
        with tempfile.TemporaryFile(dir=_folder(path, folder)) as scratch:
            for rows in parquet_rows(file, path, self.columns):
                lower, upper = np.minimum(lower, rows.min(axis=0)), np.maximum(upper, rows.max(axis=0))
                block = np.ascontiguousarray(rows, dtype)
                digest.update(block.data)
                scratch.write(block.data)
            scratch.flush()
            count = scratch.tell() // (dtype.itemsize * len(self.columns))
            if not count:
                raise ValueError(f"{path} has no rows")
            self._rows = np.memmap(scratch, dtype, "r", shape=(count, len(self.columns)))
        self.digest = digest.hexdigest()
        self.extremes = np.stack([lower, upper])

    def __len__(self) -> int:
        """Number of rows to draw from."""
        return len(self._rows) - len(self.aside)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.columns)

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw rows with replacement."""
        return self._at(rng.integers(0, len(self), size))

    def subsample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw `count` rows without replacement, or all rows if there are fewer."""
        if count >= len(self):
            return self._at(np.arange(len(self)))
        return self._at(rng.choice(len(self), count, replace=False))

    def split(self, share: float, *, key: PRNGKeyArray) -> tuple["ParquetTable", np.ndarray]:
        """Split off a random fraction of the rows, at most 32,768, for validation: return the rest of the
        table and the validation rows. Copies of validation rows are excluded from the rest."""
        check_share(share)
        count = min(round(share * len(self)), MAX_VALIDATION_ROWS)
        chosen = self._in_file(rng_of(key).choice(len(self), count, replace=False))
        held_out = np.asarray(self._rows[chosen], np.float64)
        copies = [self.aside, chosen, *self._copies(held_out)]
        rest = copy.copy(self)
        rest.aside = np.unique(np.concatenate(copies))
        if len(rest.aside) == len(self._rows):
            raise ValueError("all rows are copies of validation rows: pass other validation rows")
        return rest, held_out

    def _copies(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the indices in the file of all copies of these rows."""
        codes = np.sort(row_codes(rows[identified(rows, len(self))])) if len(rows) else np.zeros(0)
        for first in range(0, len(self._rows) if len(codes) else 0, ROWS_PER_READ):
            own = row_codes(self._rows[first : first + ROWS_PER_READ])
            nearest = np.minimum(np.searchsorted(codes, own), len(codes) - 1)
            yield first + np.flatnonzero(codes[nearest] == own)

    def _at(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self._rows[self._in_file(indices)])

    def _in_file(self, indices: np.ndarray) -> np.ndarray:
        """Convert indices among the rows that can be drawn to indices in the file."""
        return indices + np.searchsorted(self.aside - np.arange(len(self.aside)), indices, side="right")


def parquet_file(path: str | os.PathLike) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        message = "reading a .parquet file needs pyarrow: pip install 'roughflow[parquet]'"
        raise ValueError(message + see("not-installed")) from None
    check_input_file(check_path("path", path))
    try:
        # Nothing is prefetched, because a row group may be as large as the file.
        return pq.ParquetFile(path, pre_buffer=False)
    except pa.ArrowException as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a valid Parquet file ({first})") from None


def parquet_blocks(file: Any, columns: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield rows in double precision, `ROWS_PER_READ` at a time, in the order of the file."""
    import pyarrow as pa

    for batch in file.iter_batches(ROWS_PER_READ, columns=list(columns)):
        numbers = [batch.column(name).cast(pa.float64(), safe=False) for name in columns]
        yield np.stack([column.to_numpy(zero_copy_only=False) for column in numbers], axis=1)


def parquet_rows(file: Any, path: str | os.PathLike, columns: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the rows of `parquet_blocks`, and raise an error if a value is not finite or too large."""
    first = 0
    for rows in parquet_blocks(file, columns):
        fine = np.abs(rows) <= MAX_VALUE  # false for NaN
        if not fine.all():
            row = int(np.argmin(fine.all(axis=1)))
            column = int(np.argmin(fine[row]))
            message = f"{path}: row {first + row + 1} has {rows[row, column]} in column {columns[column]!r}"
            raise ValueError(f"{message}: fix or remove it, or choose other columns{see('tables')}")
        yield rows
        first += len(rows)


def check_parquet_columns(file: Any, path: str | os.PathLike, columns: Sequence[str]) -> None:
    """Reject columns that are missing from the file or not numeric."""
    import pyarrow as pa

    schema = file.schema_arrow
    if not columns or len(set(columns)) < len(columns):
        raise ValueError(f"columns must name different columns of {path}, got {', '.join(columns) or 'none'}")
    for name in columns:
        if name not in schema.names:
            raise ValueError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}")
        kind = schema.field(name).type
        tests = [pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean]
        if not any(test(kind) for test in tests):
            raise ValueError(f"{path}: column {name!r} holds {kind}, not numbers: choose other columns")


def _fits_single(file: Any, columns: Sequence[str]) -> bool:
    """Whether single precision represents the columns exactly."""
    import pyarrow as pa

    exact = (pa.float16(), pa.float32(), pa.int8(), pa.int16(), pa.uint8(), pa.uint16())
    return all(file.schema_arrow.field(name).type in exact for name in columns)


def _folder(path: str | os.PathLike, folder: str | os.PathLike | None) -> Path | None:
    if folder is not None:
        return Path(folder)
    beside = Path(path).resolve().parent
    return beside if os.access(beside, os.W_OK) else None


TableModel = Standardised | WithRelations | MixedDensity
QUEUED_CHUNKS = 2  # maximum number of chunks per device in progress or waiting


def estimate_chunks(
    model: StochasticFlow | Standardised | WithRelations | MixedDensity,
    chunks: Iterable[Any],
    *,
    key: PRNGKeyArray,
    first: int = 0,
    devices: DevicesLike = None,
    estimator: AbstractEstimator | None = None,
    tolerance: float | None = None,
    max_paths: int = 2**16,
) -> Iterator[Estimate]:
    """Estimate log p for chunks of points. The estimates are yielded one after the other, and only a few
    chunks are in memory.

    Random numbers depend on the key and the index of a chunk, not on the number of devices.

    **Arguments:**

    - `model`: a flow, or the model of a fitted density; for a conditional density, the last columns of each
      chunk are the given ones.
    - `chunks`: a list or an iterator of points `(rows, dimension)`. Chunks of a few thousand rows are
      efficient; chunks of different sizes cause recompilation.
    - `first`: index of the first chunk, to continue an interrupted run with the same random numbers.
    - `devices`: a number or a list of devices, to which chunks are assigned in turn.
    - other arguments: as for `StochasticFlow.estimate`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    chunks = (jnp.full((4, 1), x) for x in range(3))
    estimator = rf.PullBack(num_paths=16)
    for estimate in rf.tables.estimate_chunks(flow, chunks, key=jax.random.key(0), estimator=estimator):
        print(estimate.log_prob)
    ```
    """
    check_instance("model", model, StochasticFlow | TableModel, "a flow, or the model of a fitted density")
    check_instance("chunks", chunks, Iterable, "a list or an iterator of arrays (rows, dimension)")
    check_count("first", first, least=0)
    key = check_key(key)
    settings: dict[str, Any] = {"estimator": estimator, "tolerance": tolerance, "max_paths": max_paths}
    own = Devices.of(devices).own

    def estimate(i: int, x: Any) -> Estimate:
        given = {}
        if isinstance(model, TableModel) and model.num_given:
            x, given["given"] = x[:, : -model.num_given], x[:, -model.num_given :]
        return model.estimate(x, key=jax.random.fold_in(key, i), **given, **settings)

    def on(device: Any, i: int, x: Any) -> Estimate:
        with jax.default_device(device):
            return jax.tree.map(np.asarray, estimate(i, x))

    if len(own) < 2:
        yield from (estimate(i, x) for i, x in enumerate(chunks, first))
        return
    waiting: deque[Future[Estimate]] = deque()
    with ThreadPoolExecutor(len(own)) as pool:
        try:
            for i, x in enumerate(chunks, first):
                waiting.append(pool.submit(on, own[i % len(own)], i, x))
                if len(waiting) == QUEUED_CHUNKS * len(own):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
