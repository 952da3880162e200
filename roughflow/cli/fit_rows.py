"""The rows that `roughflow fit` trains and validates on: all of them in memory, or on disk."""

import argparse
from dataclasses import dataclass

import jax
import numpy as np

import roughflow as rf

from .refused import Refused
from .rows import Table
from .table import read_table, table_on_disk

SOME = 100_000  # rows of a table on disk to look at


@dataclass(frozen=True)
class FitRows:
    """Names of the columns, those given last; how many rows there are, and how many to train on; these, or
    some of them if they are `on_disk`; and those to validate on."""

    columns: tuple[str, ...]
    context: int
    total: int
    num_train: int
    train: np.ndarray
    held_out: np.ndarray
    on_disk: rf.ParquetTable | None = None

    def arguments(self) -> dict:
        """What `rf.fit_density` takes of them."""
        own = len(self.columns) - self.context
        parts = lambda rows: (rows[:, :own], rows[:, own:])
        held_out = parts(self.held_out) if self.context else self.held_out
        given = {"columns": self.columns, "validation": held_out if len(self.held_out) else 0.0}
        if self.on_disk is not None:
            return given | {"data": self.on_disk}
        data, context = parts(self.train)
        return given | {"data": data, "given": context if self.context else None}


def fit_rows(arguments: argparse.Namespace) -> FitRows:
    share, seed, given = arguments.validation, arguments.seed, arguments.given or ()
    large = table_on_disk(arguments.data, arguments.columns, given)
    if large is not None:
        rest, held_out = large.split(share, key=jax.random.key(seed))
        some = rest.some(SOME, np.random.default_rng(seed)).astype(float)
        return FitRows(large.columns, large.context, len(large), len(rest), some, held_out, rest)
    table = _read(arguments)
    rows = table.rows
    # At least one row to validate on, if any are asked for.
    aside = max(1, round(share * len(rows))) if share else 0
    order = np.random.default_rng(seed).permutation(len(rows))
    train, held_out = rows[order[aside:]], rows[order[:aside]]
    return FitRows(table.columns, len(given), len(rows), len(train), train, held_out)


def _read(arguments: argparse.Namespace) -> Table:
    """The table, with the columns that are given last."""
    if arguments.given is None:
        return read_table(arguments.data, arguments.columns)
    wanted = (
        None if arguments.columns is None else list(dict.fromkeys([*arguments.columns, *arguments.given]))
    )
    # Read once: standard input cannot be read again.
    table = read_table(arguments.data, wanted)
    own = [name for name in table.columns if name not in arguments.given]
    if not own:
        raise Refused("--given names all columns: there is none left to have a density")
    return table.chosen(arguments.data, [*own, *arguments.given])
