"""Batches that are drawn on the host, from a table that the devices do not hold."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ._parquet import ParquetTable
from ._smoothed import FAR
from ._standardised import Standardised


@runtime_checkable
class Batches(Protocol):
    """Rows by the batch: `rf.ParquetTable` is one."""

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class UnitBatches:
    """Rows of a table as a flow learns them: standardised by a `model`, with noise as `Smoothed` has it, and
    with that of `rounding`, in units of the table."""

    table: ParquetTable
    model: Standardised
    rounding: np.ndarray
    width: float
    outliers: float

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray:
        rows = self.table.batch(size, rng)
        if np.any(self.rounding):
            rows = rows + self.rounding * rng.uniform(-0.5, 0.5, rows.shape)
        unit = np.array(self.model.unit(rows))
        own = unit.shape[1] - self.table.context
        if self.width or self.outliers:
            far = rng.random((size, 1)) < self.outliers
            unit[:, :own] += np.where(far, FAR, self.width) * rng.normal(size=(size, own))
        return unit
