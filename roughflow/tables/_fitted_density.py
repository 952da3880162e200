"""The density fitted to a table, and its score on unseen rows."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key
from ..density import AbstractEstimator, Estimate
from ..train import Fitted, mean_and_error
from ._anomaly import less_likely
from ._columns import Violation, WithRelations, check_violation
from ._mixture import Conditional, MixedDensity
from ._standardised import Standardised

ANOMALY_SAMPLES = 2000  # number of samples with which rows are compared in `anomaly`
SCORED_ROWS, NOISY_ROWS = 1000, 64  # maximum number of rows to score, without and with noise


@dataclass(frozen=True)
class Score:
    """The score of a density: the mean log-density, in nats per row, of rows to which it was not fitted.

    - `mean`, `standard_error`: mean log-density of these rows, in the original units of the columns, and its
      standard error. Copies of a row and rows of one group are not treated as independent.
    - `gaussian`: the mean log-density under a Gaussian with the mean and covariance of the training rows.
    - `gain`, `gain_error`: the mean log-density minus that of the Gaussian, and the standard error of the
      difference.
    - `num_rows`: number of scored rows; `method`: "validation rows", or "cross-validation", in which each row
      is scored by a density fitted to the other folds.

    The result of `rf.fit_density` has a score, `fitted.score`.
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
        """The score for log-densities of rows under the model and under the Gaussian; rows with the same
        label are treated as dependent."""
        with np.errstate(invalid="ignore"):
            gain = mean_and_error(values - gaussian, labels)
        return Score(
            *mean_and_error(values, labels), float(np.mean(gaussian)), *gain, len(values), method=method
        )

    def __repr__(self) -> str:
        text = f"{self.mean:.4f} ± {self.standard_error:.2g} nats per row; Gaussian {self.gaussian:.4f}"
        gain = f"gain {self.gain:.4f} ± {self.gain_error:.2g}"
        return f"{text}, {gain} ({self.method}, {self.num_rows:,} rows)"


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows on which a density is scored, labels that mark dependent rows, and the Gaussian for comparison."""

    rows: np.ndarray
    labels: np.ndarray
    gaussian: Any

    def values(self, model: Standardised) -> np.ndarray:
        """The log-densities of the rows, in double precision."""
        key, own = jax.random.key(0), self.rows.shape[1] - model.num_given
        given = self.rows[:, own:] if model.num_given else None
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


@dataclass(frozen=True)
class FittedDensity(Fitted):
    """The result of `rf.fit_density`: an `rf.train.Fitted` whose `model` is an `rf.tables.Standardised`,
    or an `rf.tables.WithRelations` if columns are constant or linearly dependent.

    `family` is "gaussian", "marginals", "flow" or "mixture" (with an `rf.tables.MixedDensity`). `held_out`
    contains the validation `rows`, with given columns last, and the `gaussian` fitted to the training rows.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    rows = np.random.default_rng(0).normal(size=(40, 2))
    fitted = rf.fit_density(rows, key=jax.random.key(0))
    fitted.family  # 'gaussian'
    fitted.score.mean, fitted.score.standard_error, fitted.score.gaussian
    fitted.log_prob(rows[:3]).shape  # (3,)
    fitted.sample(5, key=jax.random.key(1)).shape  # (5, 2)
    ```
    """

    family: str = "flow"
    held_out: HeldOut | None = None
    known_score: Score | None = None

    @functools.cached_property
    def score(self) -> Score | None:
        """The held-out score, an `rf.tables.Score`; None without validation rows.

        The score is computed on first access, from up to 1,000 rows, or 64 for a model with noise.
        """
        if self.known_score is not None or self.held_out is None:
            return self.known_score
        return self.held_out.score(self.model)

    def log_prob(
        self,
        rows: ArrayLike,
        *,
        given: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
        violation: Violation = "zero",
    ) -> Array | np.ndarray:
        """log p of each row, in the original units of the columns. Columns of a DataFrame are matched by
        name.

        `key` is needed only for a model with noise, whose log-densities are Monte Carlo estimates. A row that
        violates a relation of the columns, such as a constant column, has density zero, or with
        `violation="penalty"` a small density that ranks such rows (`rf.tables.WithRelations`).
        """
        check_violation(violation)
        options: dict[str, Any] = (
            {"violation": violation} if isinstance(self.model, WithRelations | MixedDensity) else {}
        )
        return self.model.log_prob(rows, key=_or_default(key), given=given, **options)

    def estimate(
        self,
        rows: ArrayLike,
        *,
        given: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
    ) -> Estimate:
        """log p of each row with its errors, in the original units of the columns; see
        `rf.StochasticFlow.estimate`."""
        key = _or_default(key)
        return self.model.estimate(rows, key=key, given=given, estimator=estimator, tolerance=tolerance)

    def anomaly(self, rows: ArrayLike, *, key: PRNGKeyArray | None = None) -> np.ndarray:
        """The fraction of the model's own samples that are less likely than each row, in [0, 1].

        It is near 0 for anomalies and uniform for rows of the modelled distribution, so `anomaly(rows) <
        0.01` flags one ordinary row in a hundred. The fraction is computed from 2,000 samples; for a row with
        missing cells, the same cells of the samples are ignored. For rows less likely than all samples the
        fraction still decreases, so that extreme rows remain ranked. Rows that violate a relation of the
        columns get the penalty described in `log_prob`. An `rf.tables.KernelDensity` of the same table often
        ranks anomalies better; `roughflow.interop.sklearn.StochasticFlowOutlier` uses it.
        """
        if self.model.num_given:
            raise ValueError("anomaly does not support conditional densities: fit all columns together")
        values = self.log_prob(rows, key=key, violation="penalty")
        if not isinstance(self.model, MixedDensity):
            return less_likely(values, self._sampled_log_prob)
        # A row with missing cells is compared with samples in which the same cells are missing.
        patterns, which = np.unique(self.model.missing(rows), axis=0, return_inverse=True)
        drawn, found = self.sample(ANOMALY_SAMPLES, key=jax.random.key(1)), np.empty(len(values))
        for i, missing in enumerate(patterns):
            samples = np.array(drawn, object)
            samples[:, missing] = None
            some = which.ravel() == i
            found[some] = less_likely(values[some], self.log_prob(samples))
        return found

    @functools.cached_property
    def _sampled_log_prob(self) -> np.ndarray:
        key_sample, key_score = jax.random.split(jax.random.key(1))
        return np.asarray(self.log_prob(self.sample(ANOMALY_SAMPLES, key=key_sample), key=key_score))

    def sample(self, count: int, *, key: PRNGKeyArray, given: ArrayLike | None = None) -> Array | np.ndarray:
        """Draw new rows, `(count, d)`; with `given` of shape `(..., k)`, `(count, ..., d)`."""
        return self.model.sample(key=check_key(key), shape=(check_count("count", count),), given=given)

    def impute(self, rows: Any, count: int, *, key: PRNGKeyArray) -> np.ndarray:
        """Draw the missing cells (NaN or None) of each row `count` times given its other cells, `(count, n,
        d)`. This requires the family "mixture"."""
        return self._mixed("impute").impute(rows, count, key=key)

    def conditional(self, rows: Any, given: Sequence[str]) -> Conditional:
        """The distribution of the other columns given the columns `given` of each row: an
        `rf.tables.Conditional` with `log_prob`, `sample`, `quantile`, `mean` and `std`. This requires the
        family "mixture"."""
        return self._mixed("conditional").conditional(rows, given)

    def _mixed(self, method: str) -> MixedDensity:
        if not isinstance(self.model, MixedDensity):
            raise ValueError(
                f"{method} needs the family 'mixture', not {self.family!r}: fit_density(family='mixture')"
            )
        return self.model

    def with_noise(self, diffusion: Any, *, fading: float | None = 0.5) -> "FittedDensity":
        """The same distribution as an SDE with noise, in units of the standardised data; see
        `rf.with_noise`."""
        model = self.model.with_noise(diffusion, fading=fading)
        again = self.held_out is not None and len(self.held_out.rows)
        return replace(self, model=model, known_score=None if again else self.known_score)

    def __repr__(self) -> str:
        score = self.known_score or self.__dict__.get("score")
        return self._listed([("family", self.family)], [("score", repr(score))] if score else [])


def _or_default(key: PRNGKeyArray | None) -> PRNGKeyArray:
    return jax.random.key(0) if key is None else check_key(key)
