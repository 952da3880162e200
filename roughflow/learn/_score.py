"""How well a density predicts rows that it was not fitted to."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ._split import mean_and_error
from ._standardised import Standardised

SCORED_ROWS, NOISY_ROWS = 1000, 64  # rows for a score, without noise and with it, where each takes many paths


@dataclass(frozen=True)
class Score:
    """How well a density predicts rows that it was not fitted to, in nats per row and in units of the table.

    - `mean`, `standard_error`: of the log-density of these rows. Copies of a row, and rows of one group, are
      not counted as independent.
    - `gaussian`: the same mean for the Gaussian with the mean and covariance of the rows fitted to.
    - `gain`, `gain_error`: the mean difference of both, and its standard error.
    - `num_rows`: how many rows; `method`: "validation rows", or "cross-validation", where each row is
      predicted from those of other folds.

    `rf.fit_density` returns one as `fitted.score`.
    """

    mean: float
    standard_error: float
    gaussian: float
    gain: float
    gain_error: float
    num_rows: int
    method: str

    @staticmethod
    def of(values: np.ndarray, gaussian: np.ndarray, labels: np.ndarray, method: str) -> "Score":
        """Of the log-densities of rows, those of the Gaussian, and which rows belong together."""
        with np.errstate(invalid="ignore"):
            gain = mean_and_error(values - gaussian, labels)
        return Score(
            *mean_and_error(values, labels), float(np.mean(gaussian)), *gain, len(values), method=method
        )

    def __repr__(self) -> str:
        told = f"{self.mean:.4f} ± {self.standard_error:.2g} nats per row; Gaussian {self.gaussian:.4f}"
        gain = f"gain {self.gain:.4f} ± {self.gain_error:.2g}"
        return f"{told}, {gain} ({self.method}, {self.num_rows:,} rows)"


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows to score a density on, the sets that they belong to, and the Gaussian to compare with."""

    rows: np.ndarray
    labels: np.ndarray
    gaussian: Any

    def values(self, model: Standardised) -> np.ndarray:
        """The log-densities of the rows, in double precision."""
        key, own = jax.random.key(0), self.rows.shape[1] - model.context
        given = self.rows[:, own:] if model.context else None
        return np.asarray(model.log_prob(self.rows[:, :own], key=key, given=given), np.float64)

    def score(self, model: Standardised) -> Score | None:
        some = self.first(NOISY_ROWS if model.flow.noise_dimension else SCORED_ROWS)
        if not len(some.rows):
            return None
        return some.judged(some.values(model))

    def judged(self, values: np.ndarray) -> Score:
        return Score.of(values, self.gaussian.log_prob(self.rows), self.labels, "validation rows")

    def first(self, count: int) -> "HeldOut":
        return HeldOut(self.rows[:count], self.labels[:count], self.gaussian)
