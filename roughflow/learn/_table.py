"""The rows of a table: what is modelled, what is given, what is set aside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_positive, warn
from .._keys import fold_in
from .._programs import jit
from ..faq import see
from ._marginals import Marginals
from ._numbers import joined
from ._standardised import standardisation

FEW = 20  # distinct values of a column that make it look discrete
SPIKE = 0.05  # share of the rows at one value
FAR = 100.0  # widths of the middle half from the middle
Bound = tuple[float | None, float | None]


@dataclass(frozen=True)
class Table:
    """Rows to train on, with the `context` columns of what is given last, and rows held out."""

    train: np.ndarray
    held_out: np.ndarray
    context: int
    bounds: tuple[np.ndarray, np.ndarray] | None  # of the columns that are modelled
    rounding: np.ndarray  # of all columns, 0 where there is none

    @staticmethod
    def of(
        data: ArrayLike,
        given: ArrayLike | None,
        names: Sequence[str],
        bounds: Mapping[Any, Bound],
        rounding: Mapping[Any, float],
    ) -> "Table":
        rows, context = joined("data", data, given, names)
        own = rows.shape[1] - context
        treated = {_place(name, names) for name in (*rounding, *bounds)}
        for i in range(own):
            if i not in treated:
                _warn_of(rows[:, i], repr(names[i]) if names else str(i))
        lower, upper = np.full(own, -np.inf), np.full(own, np.inf)
        for name, (low, high) in bounds.items():
            i = _column(name, names, own)
            lower[i], upper[i] = -np.inf if low is None else low, np.inf if high is None else high
        width = np.zeros(rows.shape[1])
        for name, step in rounding.items():
            check_positive("rounding", step)
            width[_column(name, names, own)] = step
        table = Table(rows, rows[:0], context, (lower, upper) if bounds else None, width)
        table.check_bounds(rows)
        return table

    def check_bounds(self, rows: np.ndarray) -> None:
        """Refuse rows that do not lie between the bounds."""
        if self.bounds is None:
            return
        own, half = rows[:, : self.dimension], self.rounding[: self.dimension] / 2
        out = ~np.all((own - half > self.bounds[0]) & (own + half < self.bounds[1]), axis=0)
        if out.any():
            i = int(np.argmax(out))
            limits = " and ".join(f"{bound[i]:g}" for bound in self.bounds)
            told = f"column {i} has values that are not strictly between its bounds {limits}"
            raise ValueError(told + see("no-density"))

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
            rows, context = joined("validation", held_out, given)
            if (rows.shape[1], context) != (self.train.shape[1], self.context):
                raise ValueError(
                    f"validation has {rows.shape[1]} columns, {context} of them given; the data "
                    f"{self.train.shape[1]} and {self.context}: with given it is a pair (rows, given)"
                )
            self.check_bounds(rows)
            return replace(self, held_out=self._spread(rows, key, 1))
        if not 0 <= validation < 1:
            told = f"validation must be a share of the data between 0 and 1, got {validation}"
            raise ValueError(told + see("budgets-and-validation"))
        aside = round(validation * len(self.train))
        order = np.asarray(_permutation(key, len(self.train)))
        return replace(self, train=self.train[order[aside:]], held_out=self.train[order[:aside]])

    def dequantised(self, key: PRNGKeyArray) -> "Table":
        """With uniform noise, as wide as the rounding, on the columns that were rounded."""
        return replace(self, train=self._spread(self.train, key, 2))

    def _spread(self, rows: np.ndarray, key: PRNGKeyArray, number: int) -> np.ndarray:
        if not np.any(self.rounding):
            return rows
        rng = np.random.default_rng(np.asarray(jax.random.key_data(fold_in(key, number))).ravel())
        return rows + self.rounding * rng.uniform(-0.5, 0.5, rows.shape)

    def units(self, marginals: Marginals | None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and lower triangular matrix that standardise the rows: what is given column by column, so that
        its units do not mix with those of the rest."""
        target, given = np.split(self.train, [self.dimension], axis=1)
        target = target if marginals is None else marginals.forward(target)[0]
        loc, matrix = standardisation(target)
        if not self.context:
            return loc, matrix
        spread = given.std(axis=0)
        whole = np.zeros((self.train.shape[1],) * 2)
        whole[: self.dimension, : self.dimension] = matrix
        whole[self.dimension :, self.dimension :] = np.diag(np.where(spread > 0, spread, 1))
        return np.concatenate([loc, given.mean(axis=0)]), whole


@partial(jit, level=1)
def _permutation(key: PRNGKeyArray, count: int) -> Array:
    return jax.random.permutation(key, count)


def _column(name: str | int, names: Sequence[str], own: int) -> int:
    """The place of a column, by name or number."""
    place = _place(name, names)
    if not isinstance(place, int) or not 0 <= place < own:
        raise ValueError(f"there is no column {name!r} to model; there are {', '.join(names) or own}")
    return place


def _place(name: str | int, names: Sequence[str]) -> str | int:
    return list(names).index(name) if name in names else name  # pyright: ignore[reportArgumentType]


def _warn_of(column: np.ndarray, name: str) -> None:
    """Say what a density of this column would make of it."""
    values, counts = np.unique(column, return_counts=True)
    quarters = np.quantile(column, [0.25, 0.5, 0.75])
    reach, width = np.max(np.abs(column - quarters[1])), quarters[2] - quarters[0]
    if len(values) == 1:
        return  # refused elsewhere
    if len(values) <= min(FEW, len(column) // 2):
        told = (
            f"has only {len(values)} different values, so its density may grow without bound: leave it out, "
            "give it as a condition (given=), or say how wide its steps are (rounding=)"
            + see("few-different-values")
        )
    elif counts.max() > max(SPIKE * len(column), 2):
        share, where = counts.max() / len(column), values[np.argmax(counts)]
        told = (
            f"has {share:.0%} of its rows at {where:g}, where a density would grow without bound: leave them "
            "out, or say how it was rounded (rounding=)" + see("few-different-values")
        )
    elif reach > FAR * width:
        told = (
            f"reaches {reach / width:.0f} times the width of its middle half: take logarithms, give its "
            "bounds (bounds=), or have it mapped (marginals=True)" + see("far-reaching-tails")
        )
    else:
        return
    warn(f"column {name} {told}")
