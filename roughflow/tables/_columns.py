"""What the columns of a table are: constant, functions of other columns, or free."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import is_traced
from .._show import count, listed, shortened
from ..density import AbstractEstimator, Estimate
from ..faq import see
from ._closed_form import RIDGE, constant
from ._standardised import Standardised

PAIR_TOLERANCE = 1e-12  # 1 − |correlation| of two columns that are copies, if there are few rows
MAX_COMPARED = 2000  # columns that are compared in pairs
MARGIN, SINGLE_PRECISION = 4.0, 1e-6  # of the residuals of the training rows, and relative to the terms
Violation = Literal["zero", "penalty"]


class Relations(eqx.Module):
    """Columns of a table that are constant or linear in the others: x_removed = a + B x.

    **Arguments:** `removed`, the indices of these columns; `intercept` a, `(r,)`, and `slope` B, `(r, d)`,
    over all columns, given ones last, and zero for removed ones; `tolerance` and `scale`, `(r,)`: the largest
    rounding error of a row that satisfies the relation, and the standard deviation of the column (1 if it is
    constant); `num_rows`, the number of distinct rows in which the relations held.
    """

    removed: tuple[int, ...] = eqx.field(static=True)
    intercept: np.ndarray
    slope: np.ndarray
    tolerance: np.ndarray
    scale: np.ndarray
    num_rows: int = eqx.field(static=True)

    @staticmethod
    def of(rows: np.ndarray, own: int) -> "Relations | None":
        """The relations among the first `own` columns, and of these to the others; None if there are none.

        A column is removed if its variance given the other columns is below 1e-6 of its variance."""
        loc, scale = rows.mean(axis=0), rows.std(axis=0)
        still = constant(rows, loc, scale)
        scale = np.where(still, 1.0, scale)
        constants = [int(i) for i in np.flatnonzero(still[:own])]
        removed = sorted([*constants, *_dependent((rows - loc) / scale, own, still)])
        if not removed:
            return None
        others = np.setdiff1d(np.flatnonzero(~still), removed)
        unit = (rows - loc) / scale
        found, *_ = np.linalg.lstsq(unit[:, others], unit[:, removed], rcond=RIDGE)
        slope = np.zeros((len(removed), rows.shape[1]))
        slope[:, others] = found.T * scale[removed][:, None] / scale[others]
        slope[still[removed]] = 0.0
        intercept = loc[removed] - slope @ loc
        residual = np.abs(rows[:, removed] - intercept - rows @ slope.T).max(axis=0)
        terms = np.abs(intercept) + np.abs(slope) @ np.abs(rows).max(axis=0) + np.abs(rows[:, removed]).max(0)
        tolerance = MARGIN * residual + SINGLE_PRECISION * terms
        distinct = len(np.unique(rows, axis=0))
        return Relations(tuple(removed), intercept, slope, tolerance, scale[removed], distinct)

    @property
    def kept(self) -> list[int]:
        """The indices of all other columns."""
        return [i for i in range(self.slope.shape[1]) if i not in self.removed]

    def log_factor(self, rows: Any, violation: Violation) -> Any:
        """What the relations contribute to log p of each row: 0 if it satisfies them, otherwise −∞ or the
        penalty."""
        xp = jnp if is_traced(rows) else np
        rest = xp.abs(rows[..., list(self.removed)] - self._predicted(xp, rows, self.slope))
        wide = lambda part: xp.broadcast_to(xp.asarray(part, rest.dtype), rest.shape)
        rare = -np.log(self.num_rows + 1.0) - 2 * xp.log1p(rest / wide(self.scale))
        broken = rare if violation == "penalty" else -np.inf
        return xp.sum(xp.where(rest > wide(self.tolerance), broken, 0.0), axis=-1)

    def restore(self, rows: Any) -> Any:
        """All columns from those that are kept."""
        xp = np if isinstance(rows, np.ndarray) else jnp
        places = np.argsort([*self.kept, *self.removed])
        removed = self._predicted(xp, rows, self.slope[:, self.kept])
        return xp.concatenate([rows, removed], axis=-1)[..., places]

    def _predicted(self, xp: Any, rows: Any, slope: np.ndarray) -> Any:
        removed = rows @ xp.asarray(slope.T, rows.dtype)
        return removed + xp.broadcast_to(xp.asarray(self.intercept, rows.dtype), removed.shape)

    def described(self, names: Sequence[str]) -> list[str]:
        """One text per relation, such as "total = 2 + price + 1.5 tax"."""
        label = lambda i: names[i] if names else f"x{i + 1}"
        texts = []
        for j, i in enumerate(self.removed):
            terms = [f"{b:.4g} {label(k)}" for k, b in enumerate(self.slope[j]) if abs(b) > 1e-9]
            shown = [f"{self.intercept[j]:.6g}"] if not terms or abs(self.intercept[j]) > 1e-9 else []
            texts.append(f"{label(i)} = {' + '.join([*shown, *terms])}".replace("+ -", "- "))
        return texts


def _dependent(unit: np.ndarray, own: int, still: np.ndarray) -> list[int]:
    """Columns to remove so that the others are linearly independent, given the columns beyond `own`."""
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
    """Columns that repeat an earlier one. With fewer rows than columns, other relations hold by chance."""
    if len(unit) < 4 or len(free) > MAX_COMPARED:
        return []
    twins = np.abs(unit[:, free].T @ unit[:, free]) / len(unit) > 1 - PAIR_TOLERANCE
    return [free[j] for j in range(len(free)) if twins[j, :j].any()]


class WithRelations(eqx.Module):
    """A density on the rows that satisfy linear relations: that of the free columns, by `core`, an
    `rf.tables.Standardised`, and zero elsewhere.

    `log_prob` is the log-density of the free columns. Samples have all columns. `columns` are the names of
    all columns, given ones last. It has the methods of `rf.tables.Standardised`. In `log_prob` and
    `estimate`, `violation="penalty"` gives a row that violates a relation a finite value instead of −∞: it
    loses log(n + 1) nats, as for the first exception after n rows, and 2 log(1 + r/s) for a distance r from
    the relation and a standard deviation s of the column.

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
        """Number of columns, given ones included."""
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
    """A density of the columns that relations keep, evaluated at rows of all columns."""

    density: Any
    relations: Relations

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """log p of the kept columns of each row."""
        return self.density.log_prob(rows[:, self.relations.kept])


def check_violation(violation: Any) -> None:
    if violation not in ("zero", "penalty"):
        raise ValueError(f'violation must be "zero" or "penalty", got {violation!r}')


def check_some_free(relations: Relations | None, own: int, rows: np.ndarray, names: Sequence[str]) -> None:
    """Refuse a table without a free column."""
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
