"""Rows of numbers under names, with every row that is not one named by its place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from roughflow.faq import see

from .refused import Refused

SHOWN = 5  # lines that a message names
NAMED = 20  # columns that a message names
LARGEST = 1e30  # numbers in single precision end at 3e38, and what is computed from rows is larger than they


@dataclass(frozen=True)
class Table:
    """Finite numbers, `(rows, columns)`. `named` is False where the names only count the columns."""

    columns: tuple[str, ...]
    rows: np.ndarray
    named: bool = True

    def chosen(self, path: Path, columns: Sequence[str]) -> "Table":
        """These columns of it, in this order."""
        return Table(tuple(columns), self.rows[:, places_of(path, self.columns, columns)], self.named)


def table_name(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def counted(dimension: int) -> tuple[str, ...]:
    """Names for columns that have none."""
    return tuple(f"x{i + 1}" for i in range(dimension))


class Faults:
    """Lines that cannot be used: how many, and the first few. Of a file that is worked on as it is read, the
    first one ends it."""

    def __init__(self, path: Path, unit: str, at_once: bool = False):
        self.path, self.unit, self.at_once = path, unit, at_once
        self.count, self.places, self.first = 0, [], ""

    def add(self, place: int, what: str) -> None:
        self.count += 1
        self.first = self.first or what
        if len(self.places) < SHOWN:
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
        remedy = f"mend or remove {'them' if many else 'it'}, or choose other columns{see('tables')}"
        raise Refused(f"{table_name(self.path)}: {which} cannot be used, {why}: {remedy}")


def places_of(path: Path, there: Sequence[str], wanted: Sequence[str] | None) -> list[int]:
    """Where the wanted columns are among those there are."""
    places = {name: i for i, name in enumerate(there)}
    if len(places) < len(there):
        twice = next(name for i, name in enumerate(there) if places[name] > i)
        raise Refused(f"{table_name(path)} has two columns named {twice!r}: rename one")
    if wanted is None and not all(there):
        _refuse_nameless(path, there)
    missing = [name for name in wanted or () if name not in places]
    if missing:
        more = [f"… ({len(there)} in all)"] if len(there) > NAMED else []
        names = ", ".join([*there[:NAMED], *more])
        raise Refused(f"{table_name(path)} has no column {', '.join(map(repr, missing))}; it has {names}")
    return [places[name] for name in (there if wanted is None else wanted)]


def _refuse_nameless(path: Path, there: Sequence[str]) -> NoReturn:
    named = ",".join(name for name in there if name) or "..."
    place = list(there).index("")
    why = ""
    if place == 0 and len(there) > 1:
        why = ", as pandas writes its index (index=False leaves it out)"
    elif place == len(there) - 1:
        why = ": its first line ends with a separator"
    raise Refused(
        f"{table_name(path)}: column {place + 1} has no name{why}; choose others, with --columns {named}"
    )


def fault(name: str, cell: str | float, number: float | None) -> str:
    """Why a cell cannot be used."""
    large = number is not None and math.isfinite(number)
    shown = "empty" if cell == "" else repr(cell) if isinstance(cell, str) else cell
    return f"{name!r} is {shown}" + (f", too large (beyond {LARGEST:g})" if large else "")
