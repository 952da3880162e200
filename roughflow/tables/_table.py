"""The rows of a table: modelled and given columns, and validation rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_positive, is_whole, warn
from .._programs import fold_in
from ..faq import see
from ..train import Links, hold_out
from ._arrays import joined
from ._columns import Relations, check_some_free, coarse_step
from ._marginals import Gaussian, Marginals, constant

SPIKE_SHARE = 0.05  # values shared by more than this fraction of the rows are reported
FAR_TAIL = 100.0  # distance from the median, in interquartile ranges, beyond which a column is reported
# Single precision has seven digits. In a column whose mean exceeds this multiple of its spread, fewer than
# three digits of the spread remain.
MAX_MEAN_TO_SPREAD = 1e4
MAX_COLUMNS_PER_ROW = 10  # tables with more columns per row are rejected
Bound = tuple[float | None, float | None]
Rounding = Mapping[Any, float] | Literal["auto"]


@dataclass(frozen=True)
class Table:
    """Training rows, with the `num_given` given columns last, and validation rows; `links` and
    `held_out_labels` mark rows that belong together. Columns that `relations` removes are excluded, but
    `all_names` includes their names."""

    train: np.ndarray
    links: Links
    held_out: np.ndarray
    held_out_labels: np.ndarray
    names: tuple[str, ...]
    num_given: int
    bounds: tuple[np.ndarray, np.ndarray] | None  # bounds of the modelled columns
    rounding: np.ndarray  # rounding steps of all columns, 0 for none
    relations: Relations | None = None
    all_names: tuple[str, ...] = ()

    @staticmethod
    def of(
        data: Any,
        given: Any,
        groups: Any,
        names: tuple[str, ...],
        bounds: Mapping[Any, Bound],
        rounding: Rounding,
    ) -> "Table":
        rows, num_given = joined("data", data, given, names)
        own = rows.shape[1] - num_given
        if own > MAX_COLUMNS_PER_ROW * len(rows):
            limit = MAX_COLUMNS_PER_ROW * len(rows)
            message = f"data has {len(rows):,} rows for {own:,} columns: choose at most {limit:,} columns"
            raise ValueError(f"{message}, or take principal components{see('no-density')}")
        _check_enough(len(rows), len(rows), "data")
        lower, upper = np.full(own, -np.inf), np.full(own, np.inf)
        for name, (low, high) in bounds.items():
            i = _column(name, names, own)
            lower[i], upper[i] = -np.inf if low is None else low, np.inf if high is None else high
            if not lower[i] < upper[i]:
                label = repr(names[i]) if names else i
                message = f"bounds of column {label} must be (lower, upper) with lower below upper"
                raise ValueError(f"{message}, got ({low}, {high}){see('no-density')}")
        width = _rounding(rows, own, names, rounding)
        auto = isinstance(rounding, str)
        treated = set() if auto else {_column(name, names, own) for name in rounding}
        relations = Relations.of(rows, own, treated)
        check_some_free(relations, own, rows, names)
        kept = list(range(rows.shape[1])) if relations is None else relations.kept
        free = [i for i in kept if i < own]
        labels = [repr(names[i]) if names else str(i) for i in kept]
        _warn_of_few_digits(rows[:, :own], names)
        bounded = {_place(name, names) for name in bounds}
        rows, width = rows[:, kept], width[kept]
        links = Links.of(rows, groups)
        at = lambda some: {j for j, i in enumerate(free) if i in some}
        _warn(rows[:, : len(free)], links, labels, at(treated), at(bounded), auto)
        none = (rows[:0], np.zeros(0, int))
        limits = (lower[free], upper[free]) if bounds else None
        own_names = tuple(names[i] for i in kept) if names else ()
        table = Table(rows, links, *none, own_names, num_given, limits, width, relations, names)
        table.check_bounds(rows)
        return table

    def check_bounds(self, rows: np.ndarray) -> None:
        """Reject rows outside the bounds."""
        if self.bounds is None:
            return
        own, half = rows[:, : self.dimension], self.rounding[: self.dimension] / 2
        out = ~np.all((own - half > self.bounds[0]) & (own + half < self.bounds[1]), axis=0)
        if out.any():
            i = int(np.argmax(out))
            limits = " and ".join(f"{bound[i]:g}" for bound in self.bounds)
            name = repr(self.names[i]) if self.names else str(i)
            message = f"column {name} has values that are not strictly between its bounds {limits}"
            raise ValueError(message + see("no-density"))

    @property
    def dimension(self) -> int:
        """Number of modelled columns."""
        return self.train.shape[1] - self.num_given

    def split(
        self, validation: float | ArrayLike | tuple[ArrayLike, ArrayLike], key: PRNGKeyArray
    ) -> "Table":
        """Split off a fraction of the rows for validation, or use the given validation rows."""
        if isinstance(validation, float | int):
            train, aside = hold_out(self.links.labels, validation, key)
            _check_enough(len(train), len(self.train), "data", validation)
            part = replace(self, train=self.train[train], links=self.links.at(train))
            return replace(part, held_out=self.train[aside], held_out_labels=self.links.at(aside).labels)
        held_out, given = validation if isinstance(validation, tuple) else (validation, None)
        rows, num_given = joined("validation", held_out, given, self.all_names, self.num_given)
        total = self.train.shape[1] + (0 if self.relations is None else len(self.relations.removed))
        if (rows.shape[1], num_given) != (total, self.num_given):
            raise ValueError(
                f"validation has {rows.shape[1]} columns, {num_given} of them given, but data has {total} "
                f"and {self.num_given}; if given is set, validation must be a pair (rows, given)"
            )
        if self.relations is not None:
            rows = self._kept(self.relations, rows)
        self.check_bounds(rows)
        return replace(self, held_out=self._spread(rows, key, 1), held_out_labels=Links.of(rows).labels)

    def _kept(self, relations: Relations, rows: np.ndarray) -> np.ndarray:
        """Validation rows without the columns that the relations remove; rows that violate a relation raise
        an error."""
        broken = relations.log_factor(rows, "zero") < 0
        if broken.any():
            text = "; ".join(relations.described(self.all_names))
            message = f"row {int(np.argmax(broken))} of validation violates a relation of the data ({text})"
            raise ValueError(message + see("no-density"))
        return rows[:, relations.kept]

    def dequantised(self, key: PRNGKeyArray) -> "Table":
        """The table with uniform noise on rounded columns, as wide as the rounding step."""
        return replace(self, train=self._spread(self.train, key, 2))

    def _spread(self, rows: np.ndarray, key: PRNGKeyArray, number: int) -> np.ndarray:
        if not np.any(self.rounding):
            return rows
        rng = np.random.default_rng(np.asarray(jax.random.key_data(fold_in(key, number))).ravel())
        return rows + self.rounding * rng.uniform(-0.5, 0.5, rows.shape)

    def units(self, marginals: Marginals | None) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the lower triangular matrix that standardise the rows. Given columns are standardised
        one by one, so that their units do not mix with those of other columns."""
        target, given = np.split(self.train, [self.dimension], axis=1)
        target = target if marginals is None else marginals.forward(target)[0]
        gaussian = Gaussian.of(target)
        loc, matrix = gaussian.loc, gaussian.matrix
        if not self.num_given:
            return loc, matrix
        spread = given.std(axis=0)
        whole = np.zeros((self.train.shape[1],) * 2)
        whole[: self.dimension, : self.dimension] = matrix
        whole[self.dimension :, self.dimension :] = np.diag(np.where(spread > 0, spread, 1))
        return np.concatenate([loc, given.mean(axis=0)]), whole


def _check_enough(count: int, total: int, name: str, validation: float = 0.0) -> None:
    """Reject tables with fewer than two rows."""
    if count >= 2:
        return
    if total < 2:
        raise ValueError(f"{name} has 1 row: use at least two, preferably hundreds{see('no-density')}")
    message = f"validation={validation:g} leaves {count} of {total} rows to train on"
    raise ValueError(f"{message}: lower validation{see('budgets-and-validation')}")


def _rounding(rows: np.ndarray, own: int, names: Sequence[str], rounding: Rounding) -> np.ndarray:
    """The rounding step of each column; "auto" detects the step of columns on a coarse grid."""
    width = np.zeros(rows.shape[1])
    if isinstance(rounding, str):
        if rounding != "auto":
            raise ValueError(f'rounding must be "auto" or {{column: width}}, got {rounding!r}')
        width[:own] = [coarse_step(column) for column in rows[:, :own].T]
        return width
    for name, step in rounding.items():
        check_positive("rounding", step)
        width[_column(name, names, own)] = step
    return width


def _column(name: str | int, names: Sequence[str], own: int) -> int:
    """The index of a modelled column, from its name or index."""
    index = _place(name, names)
    if not isinstance(index, int) or not 0 <= index < own:
        columns = ", ".join(names) or f"0 to {own - 1}"
        raise ValueError(f"there is no column {index!r} to model; the columns are {columns}")
    return index


def _place(name: str | int, names: Sequence[str]) -> str | int:
    if is_whole(name):
        return int(name)
    return list(names).index(name) if name in names else name  # pyright: ignore[reportArgumentType]


def _warn_of_few_digits(rows: np.ndarray, names: Sequence[str]) -> None:
    if jax.config.jax_enable_x64:  # pyright: ignore
        return
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    few = (np.abs(mean) > MAX_MEAN_TO_SPREAD * spread) & ~constant(rows, mean, spread)
    for i in np.flatnonzero(few).tolist():
        warn(
            f"column {repr(names[i]) if names else i} is {mean[i]:g} ± {spread[i]:g}: samples lose digits in "
            "single precision; subtract a constant from it, or set JAX_ENABLE_X64=1" + see("few-digits")
        )


def _warn(
    rows: np.ndarray,
    links: Links,
    labels: Sequence[str],
    treated: set[int],
    bounded: set[int],
    auto: bool,
) -> None:
    """Warn about joined tables, rounded columns (unless `auto` adds noise to them), spikes and heavy tails,
    with one line for each."""
    label = lambda i: str(labels[i])
    shown = lambda some: ("column " if len(some) == 1 else "columns ") + ", ".join(map(label, some))
    if links.joined:
        message = (
            f"{shown(links.joined)} repeat together, as after a join: rows that share them are validated "
        )
        warn(f"{message}together (set groups= for other groups){see('copies-and-groups')}")
    # Only distinct rows are counted, because copies of a row are not ties.
    _, first = np.unique(links.copies, return_index=True)
    rows = rows[first]
    free = [i for i in range(rows.shape[1]) if i not in treated | bounded | set(links.joined)]
    rounded = [i for i in range(rows.shape[1]) if i not in treated and coarse_step(rows[:, i])]
    if rounded and not auto:
        steps = ", ".join(f"{coarse_step(rows[:, i]):g}" for i in rounded)
        warn(
            f"{shown(rounded)} hold{'s' * (len(rounded) == 1)} rounded values (in steps of {steps}), where a "
            'density may grow without bound: pass rounding="auto", or condition on them (given=)'
            + see("rounded-values")
        )
    spikes = [i for i in free if i not in rounded and _spike(rows[:, i])]
    for i in spikes:
        warn(
            f"column {labels[i]} has {_spike(rows[:, i])}, where a density may grow without bound: drop "
            "these rows, or group rows that belong together (groups=)" + see("rounded-values")
        )
    for i in free:
        reach = _reach(rows[:, i]) if i not in rounded + spikes else 0.0
        if reach > FAR_TAIL:
            warn(
                f"column {labels[i]} reaches {reach:.0f} interquartile ranges from its median: take "
                "logarithms, set its bounds (bounds=), or map it (marginals=True of rf.tables.FlowOptions)"
                + see("far-reaching-tails")
            )


def _spike(column: np.ndarray) -> str:
    """A description of values that many rows share; "" if there are none."""
    values, counts = np.unique(column, return_counts=True)
    if len(values) == 1:
        return ""  # rejected elsewhere
    if counts.max() > max(SPIKE_SHARE * len(column), 2):
        return f"{counts.max() / len(column):.0%} of its rows at {values[np.argmax(counts)]:g}"
    return "most of its values more than once" if np.sum(counts - 1) > 0.5 * len(column) else ""


def _reach(column: np.ndarray) -> float:
    """The largest distance of a value from the median, in interquartile ranges."""
    quarters = np.quantile(column, [0.25, 0.5, 0.75])
    return float(np.max(np.abs(column - quarters[1])) / (quarters[2] - quarters[0] or np.inf))
