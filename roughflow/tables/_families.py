"""Families of densities for a table, and their comparison on unseen rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from ..train import LEAVE_ONE_OUT, Interpolant, folds, mean_and_error, velocity_flow
from ._fitted_density import SCORED_ROWS, HeldOut, Score
from ._marginals import Gaussian, Marginals, fit_marginals
from ._standardised import Standardised
from ._table import Table

CLEAR_ERRORS = 4.0  # cross-validation stops once a difference exceeds this number of standard errors
Family = Literal["gaussian", "marginals", "flow", "mixture"]
FAMILIES: tuple[Family, ...] = ("gaussian", "marginals", "flow", "mixture")


@dataclass(frozen=True)
class ClosedForm:
    """A Gaussian distribution of the columns, or of columns transformed by monotone functions."""

    maps: Marginals | None
    gaussian: Gaussian

    @staticmethod
    def of(family: Family, table: Table, far: bool = True) -> "ClosedForm":
        """Fit the family to the training rows. With `far`, columns with extreme values have Pareto tails,
        even in the family "gaussian"."""
        min_gain = -np.inf if family == "marginals" else np.inf
        maps = fit_marginals(table.train, table.dimension, min_gain, table.bounds, table.links, far)
        mapped, _ = _mapped(maps, table.train)
        return ClosedForm(maps, Gaussian.shrunk(mapped, table.links, table.num_given))

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        mapped, log_slope = _mapped(self.maps, rows)
        return self.gaussian.log_prob(mapped) + log_slope

    def model(self, table: Table) -> Standardised:
        """The same density as a flow with zero velocity from N(0, I)."""
        flow = velocity_flow(
            table.dimension, 1, 1, num_features=0, num_given=table.num_given, key=jax.random.key(0)
        )
        flow = Interpolant(num_given=table.num_given).leave(flow)
        return Standardised(
            flow, self.gaussian.loc, self.gaussian.matrix, table.names, table.num_given, self.maps
        )


def _mapped(maps: Marginals | None, rows: np.ndarray) -> tuple[np.ndarray, Any]:
    if maps is None:
        return rows, 0.0
    own = maps.x.shape[0]
    u, log_slope = maps.forward(rows[:, :own])
    return np.concatenate([u, rows[:, own:]], axis=1), log_slope.sum(axis=1)


@dataclass(frozen=True)
class Comparison:
    """Compares families by their log-densities of unseen rows. With `cross`, families are cross-validated on
    `whole`; otherwise the unseen rows are the validation rows of `split`."""

    whole: Table
    split: Table
    cross: bool
    own: bool  # whether the validation rows were split off the table

    @property
    def table(self) -> Table:
        """The table to which the final density is fitted."""
        return self.whole if self.cross else self.split

    @property
    def held_out(self) -> HeldOut:
        """The validation rows."""
        return HeldOut(self.split.held_out, self.split.held_out_labels, sample_gaussian(self.split))

    def values(self, fit: Callable[[Table], Any], others: np.ndarray | None = None) -> np.ndarray:
        """Log-densities of unseen rows under the density that `fit` returns for a table of training rows.

        Cross-validation ends before the last fold if the difference from `others` is clear; rows of the
        remaining folds are NaN."""
        if not self.cross:
            return fit(self.split).log_prob(self.split.held_out[:SCORED_ROWS])
        values = np.full(len(self.whole.train), np.nan)
        for rest, part in folds(self.whole.links.labels, LEAVE_ONE_OUT):
            fold = replace(self.whole, train=self.whole.train[rest], links=self.whole.links.at(rest))
            found = fit(fold).log_prob(self.whole.train[part])
            values[part] = np.where(np.isnan(found), -np.inf, found)
            if others is not None:
                gain, error = self._gain(values, others)
                if abs(gain) > CLEAR_ERRORS * error:
                    break
        return values

    def is_better(self, values: np.ndarray, others: np.ndarray) -> bool:
        """Whether the mean of `values` exceeds that of `others` by more than one standard error of the
        difference."""
        gain, error = self._gain(values, others)
        return bool(gain > error)

    def _gain(self, values: np.ndarray, others: np.ndarray) -> tuple[float, float]:
        """The mean difference over the rows that have values, and its standard error."""
        seen = ~np.isnan(values)
        return mean_and_error((values - others)[seen], self._labels_of(seen))

    def score(self, values: np.ndarray) -> Score:
        method, seen = "cross-validation" if self.cross else "validation rows", ~np.isnan(values)
        return Score.of(values[seen], self.values(sample_gaussian)[seen], self._labels_of(seen), method)

    def _labels_of(self, seen: np.ndarray) -> np.ndarray:
        return np.unique(self._labels[seen], return_inverse=True)[1]

    @property
    def _labels(self) -> np.ndarray:
        return self.whole.links.labels if self.cross else self.split.held_out_labels[:SCORED_ROWS]


def sample_gaussian(table: Table) -> Any:
    """The Gaussian with the mean and covariance of the rows; a placeholder with density zero unless there are
    more rows than columns."""
    singular = table.links.distinct <= table.train.shape[1]
    return _NoDensity() if singular else Gaussian.of(table.train, table.num_given)


class _NoDensity:
    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        return np.full(len(rows), -np.inf)
