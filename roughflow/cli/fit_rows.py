"""The rows that `roughflow fit` fits to: all of them in memory, or on disk."""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

import roughflow as rf

from .early import wanted_columns
from .refused import Refused
from .table import read_table, table_on_disk

SAMPLED_ROWS = 100_000  # of a table on disk, to check and to draw


@dataclass(frozen=True)
class FitRows:
    """Names of the columns, those given last; how many rows there are; these, or some of them if they are
    `on_disk`; and the group of each, if there are groups."""

    columns: tuple[str, ...]
    context: int
    total: int
    rows: np.ndarray
    groups: np.ndarray | None = None
    on_disk: rf.ParquetTable | None = None

    def arguments(self) -> dict[str, Any]:
        """What `rf.fit_density` takes of them."""
        if self.on_disk is not None:
            return {"data": self.on_disk, "columns": self.columns}
        own = len(self.columns) - self.context
        given = self.rows[:, own:] if self.context else None
        return {
            "data": self.rows[:, :own],
            "given": given,
            "columns": self.columns,
            "groups": self.groups,
        }


def fit_rows(arguments: argparse.Namespace) -> FitRows:
    given, group = arguments.given or [], arguments.groups
    large = table_on_disk(arguments.data, arguments.columns, given)
    if large is not None:
        if group is not None:
            raise Refused(
                f"--groups needs a table that fits in memory, and {arguments.data} is read from disk"
            )
        some = large.some(SAMPLED_ROWS, np.random.default_rng(arguments.seed)).astype(float)
        return FitRows(large.columns, large.context, len(large), some, on_disk=large)
    last = [*given, *([group] if group is not None else [])]
    table = arguments.table or read_table(arguments.data, wanted_columns(arguments))
    own = [name for name in table.columns if name not in last]
    if not own:
        raise Refused("--given and --groups name all columns: there is none left to have a density")
    columns = (*own, *given)
    rows = table.chosen(arguments.data, columns).rows
    groups = None if group is None else table.chosen(arguments.data, [group]).rows[:, 0]
    return FitRows(columns, len(given), len(rows), rows, groups)
