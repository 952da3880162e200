"""The columns of a table: constant columns, linear relations among columns, and column types."""

import datetime
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Number
from typing import Any, Literal, get_args

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import is_traced
from .._show import count, listed, shortened
from ..density import AbstractEstimator, Estimate
from ..faq import see
from ..train import grid_step
from ._arrays import MAX_VALUE, frame_names, is_frame, take
from ._marginals import RIDGE, constant
from ._standardised import Standardised

PAIR_TOLERANCE = 1e-12  # maximum 1 − |correlation| of two columns that count as copies, if there are few rows
COARSE_STEP = 0.02  # grid step, in standard deviations of the column, above which rounding is modelled
MAX_COMPARED = 2000  # maximum number of columns that are compared pairwise
# The tolerance of a relation is MARGIN times its largest residual in the training rows plus SINGLE_PRECISION
# times the size of its terms.
MARGIN, SINGLE_PRECISION = 4.0, 1e-6
Violation = Literal["zero", "penalty"]


class Relations(eqx.Module):
    """Columns of a table that are constant or linear in the others: x_removed = a + B x.

    **Arguments:** `removed`, the indices of these columns; `intercept` a, `(r,)`; `slope` B, `(r, d)`, with
    one entry per column (given columns last), zero for removed columns; `tolerance` and `scale`, `(r,)` each:
    the largest deviation that counts as rounding error, and the standard deviation of the column (1 if it is
    constant); `num_rows`, the number of distinct rows in which the relations were found.

    ```python
    import numpy as np
    import roughflow as rf

    a = np.random.default_rng(0).normal(size=50)
    relations = rf.tables.Relations.of(np.column_stack([a, 1 + 2 * a]), own=2)
    relations.described(["a", "b"])  # ['b = 1 + 2 a']
    ```
    """

    removed: tuple[int, ...] = eqx.field(static=True)
    intercept: np.ndarray
    slope: np.ndarray
    tolerance: np.ndarray
    scale: np.ndarray
    num_rows: int = eqx.field(static=True)

    @staticmethod
    def of(rows: np.ndarray, own: int, exempt: Iterable[int] = ()) -> "Relations | None":
        """Find the linear relations in a table; return None if there are none. Each determines one of the
        first `own` columns from other columns. The columns in `exempt` are never part of a relation.

        A column is removed if its variance given the other columns is below 1e-6 of its variance."""
        loc, scale = rows.mean(axis=0), rows.std(axis=0)
        still = constant(rows, loc, scale)
        scale = np.where(still, 1.0, scale)
        exempt = set(exempt)
        constants = [int(i) for i in np.flatnonzero(still[:own]) if i not in exempt]
        still[list(exempt)] = True  # like constant columns, they are excluded from relations among columns
        removed = sorted([*constants, *_dependent((rows - loc) / scale, own, still)])
        if not removed:
            return None
        others = np.setdiff1d(np.flatnonzero(~still), removed)
        unit = (rows - loc) / scale
        found, *_ = np.linalg.lstsq(unit[:, others], unit[:, removed], rcond=RIDGE)
        slope = np.zeros((len(removed), rows.shape[1]))
        slope[:, others] = found.T * scale[removed][:, None] / scale[others]
        slope[[i in constants for i in removed]] = 0.0
        intercept = loc[removed] - slope @ loc
        residual = np.abs(rows[:, removed] - intercept - rows @ slope.T).max(axis=0)
        terms = np.abs(intercept) + np.abs(slope) @ np.abs(rows).max(axis=0) + np.abs(rows[:, removed]).max(0)
        tolerance = MARGIN * residual + SINGLE_PRECISION * terms
        distinct = len(np.unique(rows, axis=0))
        return Relations(tuple(removed), intercept, slope, tolerance, scale[removed], distinct)

    @property
    def kept(self) -> list[int]:
        """The indices of the columns that are not removed."""
        return [i for i in range(self.slope.shape[1]) if i not in self.removed]

    def log_factor(self, rows: Any, violation: Violation) -> Any:
        """The term that the relations add to log p of each row: 0 if the row satisfies them, otherwise −∞ or
        the penalty."""
        xp = jnp if is_traced(rows) else np
        rest = xp.abs(rows[..., list(self.removed)] - self._predicted(xp, rows, self.slope))
        wide = lambda part: xp.broadcast_to(xp.asarray(part, rest.dtype), rest.shape)
        rare = -np.log(self.num_rows + 1.0) - 2 * xp.log1p(rest / wide(self.scale))
        broken = rare if violation == "penalty" else -np.inf
        return xp.sum(xp.where(rest > wide(self.tolerance), broken, 0.0), axis=-1)

    def restore(self, rows: Any) -> Any:
        """Restore the removed columns of rows that have only the kept columns."""
        xp = np if isinstance(rows, np.ndarray) else jnp
        order = np.argsort([*self.kept, *self.removed])
        removed = self._predicted(xp, rows, self.slope[:, self.kept])
        return xp.concatenate([rows, removed], axis=-1)[..., order]

    def _predicted(self, xp: Any, rows: Any, slope: np.ndarray) -> Any:
        removed = rows @ xp.asarray(slope.T, rows.dtype)
        return removed + xp.broadcast_to(xp.asarray(self.intercept, rows.dtype), removed.shape)

    def described(self, names: Sequence[str]) -> list[str]:
        """A description of each relation, such as "total = 2 + price + 1.5 tax"."""
        label = lambda i: names[i] if names else f"x{i + 1}"
        texts = []
        for j, i in enumerate(self.removed):
            terms = [f"{b:.4g} {label(k)}" for k, b in enumerate(self.slope[j]) if abs(b) > 1e-9]
            shown = [f"{self.intercept[j]:.6g}"] if not terms or abs(self.intercept[j]) > 1e-9 else []
            texts.append(f"{label(i)} = {' + '.join([*shown, *terms])}".replace("+ -", "- "))
        return texts


def _dependent(unit: np.ndarray, own: int, still: np.ndarray) -> list[int]:
    """Indices of columns whose removal leaves the others linearly independent, given the columns from index
    `own` on."""
    free = [i for i in range(own) if not still[i]]
    given = unit[:, own:][:, ~still[own:]]
    if len(unit) <= len(free) + given.shape[1]:
        return _copies(unit, free)
    unit = unit[:, :own] - given @ np.linalg.lstsq(given, unit[:, :own])[0] if given.size else unit[:, :own]
    product, removed = unit.T @ unit / len(unit), []
    while free:
        values, vectors = np.linalg.eigh(product[np.ix_(free, free)])
        if values[0] >= RIDGE:
            break
        weights = np.abs(vectors[:, 0])
        removed.append(free.pop(int(np.flatnonzero(weights > 0.05 * weights.max())[-1])))
    return removed


def _copies(unit: np.ndarray, free: list[int]) -> list[int]:
    """Indices of columns that repeat an earlier column, up to shift and scale. With fewer rows than columns,
    only these relations are considered, because others would hold by chance."""
    if len(unit) < 4 or len(free) > MAX_COMPARED:
        return []
    twins = np.abs(unit[:, free].T @ unit[:, free]) / len(unit) > 1 - PAIR_TOLERANCE
    return [free[j] for j in range(len(free)) if twins[j, :j].any()]


class WithRelations(eqx.Module):
    """A density of rows that satisfy linear relations: `core`, an `rf.tables.Standardised`, is the density of
    the free columns. Rows that violate a relation have density zero.

    `log_prob` is the log-density of the free columns. Samples have all columns. `columns` contains the names
    of all columns, given ones last. The methods work like those of `rf.tables.Standardised` with the same
    names. In `log_prob` and `estimate`, `violation="penalty"` gives a row that violates a relation a finite
    value instead of −∞. The penalty is log(n + 1) nats, because a first exception after n rows has
    probability 1/(n + 1), plus 2 log(1 + r/s), where r is the distance from the relation and s the standard
    deviation of the column.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    a, b = np.random.default_rng(0).normal(size=(2, 50))
    fitted = rf.fit_density(np.column_stack([a, b, a + b]), key=jax.random.key(0))
    fitted.model.relations.described(["a", "b", "total"])  # ['total = 1 a + 1 b']
    fitted.log_prob(np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]]))  # the second is -inf
    ```
    """

    core: Standardised
    relations: Relations
    columns: tuple[str, ...] = eqx.field(static=True, default=())

    def __repr__(self) -> str:
        texts = shortened(self.relations.described(self.columns))
        title = f"WithRelations: {count(self.num_columns - self.num_given, 'column')} with linear relations"
        return f"{listed(title, [('relations', '; '.join(texts))])}\n{textwrap.indent(repr(self.core), '  ')}"

    @property
    def flow(self) -> Any:
        """The flow of the free columns."""
        return self.core.flow

    @property
    def num_given(self) -> int:
        """Number of given columns."""
        return self.core.num_given

    @property
    def num_columns(self) -> int:
        """Number of columns, including given columns."""
        return self.relations.slope.shape[1]

    @property
    def marginals(self) -> Any:
        """The maps of the free columns, or None."""
        return self.core.marginals

    def estimate(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray,
        given: ArrayLike | None = None,
        violation: Violation = "zero",
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
        max_paths: int = 2**16,
    ) -> Estimate:
        """Estimate log p of each row, as `StochasticFlow.estimate` does, in the units of the data."""
        check_violation(violation)
        rows = self.core.checked(x, given, self.columns, self.num_columns)
        own = len(self.relations.kept) - self.num_given
        kept = rows[..., self.relations.kept]
        estimate = self.core.estimate(
            kept[..., :own],
            key=key,
            given=kept[..., own:] if self.num_given else None,
            estimator=estimator,
            tolerance=tolerance,
            max_paths=max_paths,
        )
        factor = jnp.asarray(self.relations.log_factor(rows, violation), estimate.log_prob.dtype)
        return eqx.tree_at(lambda e: e.log_prob, estimate, estimate.log_prob + factor)

    def log_prob(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray,
        given: ArrayLike | None = None,
        violation: Violation = "zero",
        estimator: AbstractEstimator | None = None,
    ) -> Array:
        """log p(x): the value of `estimate` without its errors."""
        return self.estimate(x, key=key, given=given, violation=violation, estimator=estimator).log_prob

    def sample(
        self, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), given: ArrayLike | None = None
    ) -> Array:
        """Draw rows with all modelled columns."""
        rows = self.core.sample(key=key, shape=shape, given=given)
        if self.num_given:
            some = jnp.asarray(self.core.given_rows(given), rows.dtype)
            wide = jnp.broadcast_to(some, (*rows.shape[:-1], self.num_given))
            rows = jnp.concatenate([rows, wide], axis=-1)
        return self.relations.restore(rows)[..., : self.num_columns - self.num_given]

    def with_noise(self, diffusion: Any, *, fading: float | None = 0.5) -> "WithRelations":
        """The same distribution as an SDE with noise; see `rf.with_noise`."""
        return eqx.tree_at(lambda m: m.core, self, self.core.with_noise(diffusion, fading=fading))


@dataclass(frozen=True)
class OfKept:
    """A density of the kept columns that takes rows with all columns."""

    density: Any
    relations: Relations

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """log p of the kept columns of each row."""
        return self.density.log_prob(rows[:, self.relations.kept])


def check_violation(violation: Any) -> None:
    if violation not in ("zero", "penalty"):
        raise ValueError(f'violation must be "zero" or "penalty", got {violation!r}')


def check_some_free(relations: Relations | None, own: int, rows: np.ndarray, names: Sequence[str]) -> None:
    """Reject a table in which no column is free."""
    if relations is None or len(relations.removed) < own:
        return
    label = repr(names[0]) if names else "0"
    if not np.any(relations.slope):
        message = (
            f"column {label} is constant, and so are all others" if own > 1 else f"column {label} is constant"
        )
        raise ValueError(f"{message}: there is no density to fit{see('no-density')}")
    message = f"column {label} is a linear function of the given columns, so it has no density"
    raise ValueError(message + see("no-density"))


# ------------------------------------------------------------------------------------------ types of columns

ColumnType = Literal["continuous", "integer", "category", "zero-inflated"]
COLUMN_TYPES = get_args(ColumnType)
MAX_INTEGER_LEVELS = 10  # integer columns with at most this number of values are treated as categorical
MIN_SPIKE = 0.1  # minimum fraction of the rows at the point mass of a zero-inflated column
# A text column with a larger fraction of distinct values is rejected as an identifier.
MAX_LEVEL_SHARE = 0.5
MISSING, UNKNOWN = -1, -2  # codes of missing categories, and of categories that do not occur in the table
Label = str | float | bool


class Encoding(eqx.Module):
    """The column types of a table, and the map from its cells to numeric values and category codes.

    A "continuous" column is encoded as numeric values. An "integer" column is, too, but each value stands for
    an interval of width `widths` around it. A "category" column is encoded as codes, indices into `levels`. A
    "zero-inflated" column is encoded as codes, which say whether a cell is at the point mass (its only
    level), and numeric values for the other cells. Numeric values are in units of `scale` around `loc`.

    ```python
    import numpy as np
    import roughflow as rf

    cells = [np.array(["a", "b", "a", None], object), np.array([1.5, 2.25, np.nan, 4.0])]
    encoding = rf.tables.Encoding.of(cells, ("kind", "size"), {})
    numbers, codes = encoding.encode(cells)  # NaN and -1 where missing
    encoding.described()  # 'kind: category (2 levels), size: continuous'
    ```
    """

    columns: tuple[str, ...] = eqx.field(static=True)
    types: tuple[str, ...] = eqx.field(static=True)
    levels: tuple[tuple[Label, ...], ...] = eqx.field(static=True)
    widths: np.ndarray
    loc: np.ndarray
    scale: np.ndarray

    @staticmethod
    def of(cells: Sequence[np.ndarray], names: tuple[str, ...], types: Mapping[str, str]) -> "Encoding":
        """Choose the encoding of a table whose columns are arrays of floats (NaN if missing) or of objects.
        Types that are not in `types` are detected."""
        for name, kind in types.items():
            if name not in names:
                raise ValueError(f"types has an unknown column {name!r}; the table has {', '.join(names)}")
            if kind not in COLUMN_TYPES:
                wanted = ", ".join(COLUMN_TYPES)
                raise ValueError(f"types must be among {wanted}; column {name!r} has {kind!r}")
        found = [_typed(name, column, types.get(name)) for name, column in zip(names, cells, strict=True)]
        moments = [
            _unit(column) if part[0] != "category" else (0.0, 1.0)
            for column, part in zip(cells, found, strict=True)
        ]
        kinds, levels, widths = zip(*found, strict=True)
        if all(kind == "category" and len(own) == 1 for kind, own, _ in found):
            raise ValueError(
                f"every column of data has only one value: there is no density to fit{see('no-density')}"
            )
        loc, scale = np.array(moments).T
        return Encoding(names, kinds, levels, np.array(widths), loc, scale)

    @property
    def numeric(self) -> list[int]:
        """Indices of the columns that are encoded as numeric values."""
        return [i for i, kind in enumerate(self.types) if kind != "category"]

    @property
    def coded(self) -> list[int]:
        """Indices of the columns that are encoded as codes."""
        return [i for i, kind in enumerate(self.types) if kind in ("category", "zero-inflated")]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels of each coded column; a zero-inflated column has two: at the point mass, and
        elsewhere."""
        return tuple(2 if self.types[i] == "zero-inflated" else len(self.levels[i]) for i in self.coded)

    @property
    def unit_widths(self) -> np.ndarray:
        """The widths of the rounding intervals of the numeric columns, in units of the scale of each column;
        0 for a column that is not rounded."""
        return (self.widths / self.scale)[self.numeric]

    def log_scale(self, numbers: np.ndarray) -> np.ndarray:
        """For each row, the sum of log `scale` over its observed cells in columns that are not rounded: the
        change in log-density due to the units."""
        free = (self.unit_widths == 0) & ~np.isnan(numbers)
        return np.sum(np.where(free, np.log(self.scale[self.numeric]), 0.0), axis=1)

    def encode(self, cells: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Encode cells as numeric values `(n, p)`, NaN if missing or at a point mass, and codes `(n, q)`,
        negative if missing or unknown."""
        count = len(cells[0])
        numbers, codes = np.empty((count, len(self.numeric))), np.empty((count, len(self.coded)), int)
        for j, i in enumerate(self.coded):
            codes[:, j] = self._codes(i, cells[i])
        for j, i in enumerate(self.numeric):
            column = self._floats(i, cells[i])
            if self.types[i] == "zero-inflated":
                column = np.where(column == self.levels[i][0], np.nan, column)
            numbers[:, j] = (column - self.loc[i]) / self.scale[i]
        return numbers, codes

    def decode(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Decode rows of the table: an array of floats if no column is text, otherwise of objects."""
        plain = all(not isinstance(label, str) for levels in self.levels for label in levels)
        rows = np.empty((len(numbers), len(self.types)), float if plain else object)
        for j, i in enumerate(self.numeric):
            value = self.loc[i] + self.scale[i] * numbers[:, j]
            rows[:, i] = np.round(value / self.widths[i]) * self.widths[i] if self.widths[i] else value
        for j, i in enumerate(self.coded):
            if self.types[i] == "zero-inflated":
                rows[codes[:, j] == 1, i] = self.levels[i][0]
            else:
                rows[:, i] = np.array(self.levels[i], rows.dtype)[codes[:, j]]
        return rows

    def absent(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """A mask of the missing cells of the table, `(n, d)`."""
        out = np.zeros((len(numbers), len(self.types)), bool)
        out[:, self.numeric] = np.isnan(numbers)
        out[:, self.coded] = codes == MISSING  # a zero-inflated cell is missing if its code is missing
        return out

    def described(self) -> str:
        """The type of each column, in one line."""
        parts = []
        for i, (name, kind) in enumerate(zip(self.columns, self.types, strict=True)):
            detail = ""
            if kind == "category":
                detail = f" ({len(self.levels[i])} levels)"
            elif kind == "integer":
                detail = f" (in steps of {self.widths[i]:g})"
            elif kind == "zero-inflated":
                detail = f" (point mass at {self.levels[i][0]:g})"
            parts.append(f"{name}: {kind}{detail}")
        return ", ".join(parts)

    def _floats(self, i: int, column: np.ndarray) -> np.ndarray:
        if column.dtype.kind == "O" and any(not missing(value) for value in column):
            raise ValueError(f"column {self.columns[i]!r} holds text, but is {self.types[i]} in the model")
        return column.astype(float)

    def _codes(self, i: int, column: np.ndarray) -> np.ndarray:
        absent = np.array([missing(value) for value in column], bool)
        if self.types[i] == "zero-inflated":
            return np.where(absent, MISSING, (self._floats(i, column) == self.levels[i][0]).astype(int))
        known = {label: code for code, label in enumerate(self.levels[i])}
        codes = [known.get(value, UNKNOWN) for value in column.tolist()]
        return np.where(absent, MISSING, np.array(codes, int))


def missing(value: Any) -> bool:
    """Whether a cell is missing: None, NaN, or pandas' NA and NaT."""
    return (
        value is None
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float | np.floating) and value != value)
    )


def cells_of(
    data: Any, names: Sequence[str] = (), argument: str = "data"
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The columns of a table, as arrays of floats (NaN if missing) or, for text, of objects, and the column
    names, by default x1, x2, ... for an array."""
    columns, names = _raw_columns(data, names, argument)
    return [_cells(name, column, argument) for name, column in zip(names, columns, strict=True)], names


def _raw_columns(
    data: Any, names: Sequence[str] = (), argument: str = "data"
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    if is_frame(data):
        wanted = tuple(names) or frame_names(argument, data)
        frame = take(argument, data, wanted)
        return [frame[label].to_numpy() for label in frame.columns], wanted
    array = np.asarray(data)
    if array.dtype.kind in "US":
        # Without dtype=object, NumPy would convert the numbers of a table with text to text.
        array = np.asarray(data, object)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{argument} must have shape (rows, columns), got {array.shape}")
    wanted = tuple(names) or tuple(f"x{i + 1}" for i in range(array.shape[1]))
    if len(wanted) != array.shape[1]:
        raise ValueError(f"{argument} must have {len(wanted)} columns, got {array.shape[1]}")
    return list(array.T), wanted


def is_mixed(data: Any) -> bool:
    """Whether a table has text, Booleans or missing cells."""
    try:
        columns, _ = _raw_columns(data)
    except (ValueError, TypeError):
        return False  # invalid data are rejected later, with a better message
    return any(map(_is_mixed_column, columns))


def _is_mixed_column(column: np.ndarray) -> bool:
    """Whether a column has text, Booleans or missing cells. Invalid columns of numbers have none, so that
    they are rejected by name, whatever the other columns are."""
    try:
        cells = _cells("", column, "data")
    except ValueError:
        return False
    return cells.dtype.kind == "O" or bool(np.isnan(cells).any())


def _cells(name: str, column: np.ndarray, argument: str) -> np.ndarray:
    if column.dtype.kind in "fiu":
        return _checked_numbers(name, column.astype(float), argument)
    # tolist() would convert dates in nanoseconds to integers.
    cells = list(column) if column.dtype.kind in "mM" else column.tolist()
    values = [None if missing(value) else value for value in cells]
    present = [value for value in values if value is not None]
    texts = [isinstance(value, str | bool) for value in present]
    real = lambda value: isinstance(value, Number | Decimal) and not isinstance(value, bool | complex)
    numbers = [real(value) for value in present]
    if present and all(texts):
        return np.array([*values, None], object)[:-1]
    if all(numbers):
        array = np.array([np.nan if value is None else float(value) for value in values])
        return _checked_numbers(name, array, argument)
    odd = next(value for value, number in zip(present, numbers, strict=True) if not number)
    message = f"column {name!r} of {argument} holds {str(odd)!r}"
    if isinstance(odd, datetime.date | np.datetime64):
        raise ValueError(f"{message}: dates are not supported, convert them to numbers or drop the column")
    raise ValueError(f"{message}: the values of a column must be all numbers or all text")


def _checked_numbers(name: str, column: np.ndarray, argument: str) -> np.ndarray:
    largest = np.nanmax(np.abs(column), initial=0.0)
    if largest > MAX_VALUE:
        message = f"column {name!r} of {argument} has values beyond {MAX_VALUE:g}: rescale them, or mark"
        raise ValueError(f"{message} infinite ones as missing (NaN){see('no-density')}")
    return column


def _typed(name: str, column: np.ndarray, wanted: str | None) -> tuple[str, tuple[Label, ...], float]:
    """The type of a column, its levels, and the width of its rounding intervals."""
    present = np.array([value for value in column if not missing(value)], column.dtype)
    if not len(present):
        raise ValueError(f"column {name!r} of data has no values: drop it")
    levels = tuple(sorted(set(present.tolist()), key=lambda label: (str(type(label)), label)))
    if column.dtype.kind == "O":
        if wanted not in (None, "category"):
            raise ValueError(f"column {name!r} holds text, so its type must be 'category', not {wanted!r}")
        if len(levels) > max(MAX_LEVEL_SHARE * len(present), 10):
            raise ValueError(
                f"column {name!r} has {len(levels)} different text values in {len(present)} rows: drop it"
            )
        return "category", levels, 0.0
    step, spike = coarse_step(present), _spike_value(present)
    few = len(levels) <= (MAX_INTEGER_LEVELS if step else 2)
    kind = wanted or (
        "category" if few else "integer" if step else "continuous" if spike is None else "zero-inflated"
    )
    if kind == "integer":
        step = step or grid_step(present)
        if not step and len(levels) > 1:
            example = max(levels, key=lambda level: abs(level - round(level)))
            message = f"column {name!r} cannot be 'integer': values such as {example!r} do not lie on a grid"
            raise ValueError(f"{message}; use types={{{name!r}: 'continuous'}}")
        return kind, (), step
    if kind == "zero-inflated":
        values, counts = np.unique(present, return_counts=True)
        return kind, (float(values[np.argmax(counts)] if spike is None else spike),), 0.0
    return kind, levels if kind == "category" else (), 0.0


def _spike_value(column: np.ndarray) -> float | None:
    """The value at which an otherwise continuous column has a point mass; None if there is none."""
    values, counts = np.unique(column, return_counts=True)
    top = int(np.argmax(counts))
    rest = len(column) - counts[top]
    alone = rest > 1 and len(values) - 1 > 0.9 * rest
    return float(values[top]) if counts[top] > max(MIN_SPIKE * len(column), 2) and alone else None


def coarse_step(column: np.ndarray) -> float:
    """The step of the grid on which a column's values lie, if it is coarse and values repeat; otherwise 0."""
    if len(np.unique(column)) > 0.9 * len(column):
        return 0.0
    step = grid_step(column)
    return step if step > COARSE_STEP * column.std() else 0.0


def _unit(column: np.ndarray) -> tuple[float, float]:
    present = column[~np.isnan(column)]
    return float(present.mean()), float(present.std()) or 1.0
