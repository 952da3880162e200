"""The rows of a table: what is modelled, what is given, what is set aside."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_finite
from ._standardised import standardising

FEW = 20  # distinct values of a column that make it look discrete
LARGEST = 1e100  # of which the square is still a number


@dataclass(frozen=True)
class Table:
    """Rows to train on, with the `context` columns of what is given last, and rows held out."""

    train: np.ndarray
    held_out: np.ndarray
    context: int

    @staticmethod
    def of(data: ArrayLike, given: ArrayLike | None, names: Sequence[str]) -> "Table":
        rows, context = _joined("data", data, given)
        _warn_of_few_values(rows[:, : rows.shape[1] - context], names)
        return Table(rows, rows[:0], context)

    @property
    def dimension(self) -> int:
        """How many columns are modelled."""
        return self.train.shape[1] - self.context

    def split(
        self, validation: float | ArrayLike | tuple[ArrayLike, ArrayLike], key: PRNGKeyArray
    ) -> "Table":
        """With a share of the rows held out, or with others that are."""
        if not isinstance(validation, float | int):
            held_out, given = validation if isinstance(validation, tuple) else (validation, None)
            rows, context = _joined("validation", held_out, given)
            if (rows.shape[1], context) != (self.train.shape[1], self.context):
                raise ValueError(
                    f"validation has {rows.shape[1]} columns, {context} of them given; the data "
                    f"{self.train.shape[1]} and {self.context}: with given it is a pair (rows, given)"
                )
            return replace(self, held_out=rows)
        if not 0 <= validation < 1:
            raise ValueError(f"validation must be a share of the data between 0 and 1, got {validation}")
        aside = round(validation * len(self.train))
        order = np.asarray(jax.random.permutation(key, len(self.train)))
        return replace(self, train=self.train[order[aside:]], held_out=self.train[order[:aside]])

    def units(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and lower triangular matrix that standardise the rows: what is given column by column, so that
        its units do not mix with those of the rest."""
        target, given = np.split(self.train, [self.dimension], axis=1)
        loc, matrix = standardising(target)
        if not self.context:
            return loc, matrix
        spread = given.std(axis=0)
        whole = np.zeros((self.train.shape[1],) * 2)
        whole[: self.dimension, : self.dimension] = matrix
        whole[self.dimension :, self.dimension :] = np.diag(np.where(spread > 0, spread, 1))
        return np.concatenate([loc, given.mean(axis=0)]), whole


def _joined(name: str, data: ArrayLike, given: ArrayLike | None) -> tuple[np.ndarray, int]:
    rows = _rows(name, data)
    if given is None:
        return rows, 0
    context = _rows("given", given)
    if len(context) != len(rows):
        raise ValueError(f"{name} has {len(rows)} rows, given {len(context)}: they go together")
    return np.concatenate([rows, context], axis=1), context.shape[1]


def _rows(name: str, data: ArrayLike) -> np.ndarray:
    rows = np.asarray(data, np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {rows.shape}")
    check_finite(name, rows)
    if np.max(np.abs(rows)) > LARGEST:
        raise ValueError(f"{name} has values beyond {LARGEST:g}: rescale them, or take logarithms")
    return rows


def _warn_of_few_values(rows: np.ndarray, names: Sequence[str]) -> None:
    """A density of a discrete column grows without bound."""
    for i, column in enumerate(rows.T):
        values = len(np.unique(column))
        if 1 < values <= min(FEW, len(rows) // 2):
            name = repr(names[i]) if names else i
            warnings.warn(
                f"column {name} has only {values} different values, so its density may grow without bound: "
                "leave it out, give it as a condition (given=), or add noise of the size of its steps",
                stacklevel=4,
            )
