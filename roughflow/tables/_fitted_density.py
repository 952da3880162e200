"""The density fitted to a table, and its score on held-out rows."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key
from ..density import AbstractEstimator, Estimate
from ..train import Fitted, mean_and_error
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


@dataclass(frozen=True)
class FittedDensity(Fitted):
    """What `rf.fit_density` returns: an `rf.train.Fitted` whose `model` is an `rf.tables.Standardised`.

    `family` is "gaussian", "marginals" or "flow": which kind of density it is. `held_out` has the validation
    `rows`, with what is given last, and the `gaussian` with the mean and covariance of the others.

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
        """An `rf.tables.Score`: the log-density of rows that the model was not fitted to. None without any.

        It is computed when it is first asked for, on up to 1,000 rows, or 64 for a model with noise.
        """
        if self.known_score is not None or self.held_out is None:
            return self.known_score
        return self.held_out.score(self.model)

    def log_prob(
        self, rows: ArrayLike, *, given: ArrayLike | None = None, key: PRNGKeyArray | None = None
    ) -> Array:
        """log p of each row, in units of the table. Columns of a DataFrame are matched by name.

        A `key` matters for a model with noise alone, whose log-densities are Monte Carlo estimates.
        """
        return self.model.log_prob(rows, key=_or_default(key), given=given)

    def estimate(
        self,
        rows: ArrayLike,
        *,
        given: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
    ) -> Estimate:
        """log p of each row with its errors: `rf.StochasticFlow.estimate`, in units of the table."""
        key = _or_default(key)
        return self.model.estimate(rows, key=key, given=given, estimator=estimator, tolerance=tolerance)

    def sample(self, count: int, *, key: PRNGKeyArray, given: ArrayLike | None = None) -> Array:
        """New rows, `(count, d)`; with `given` of shape `(..., k)`, `(count, ..., d)`."""
        return self.model.sample(key=check_key(key), shape=(check_count("count", count),), given=given)

    def with_noise(self, diffusion: Any, *, fading: float | None = 0.5) -> "FittedDensity":
        """The same distribution as that of an SDE with noise, in units of the standardised data:
        `rf.with_noise`."""
        model = self.model.with_noise(diffusion, fading=fading)
        again = self.held_out is not None and len(self.held_out.rows)
        return replace(self, model=model, known_score=None if again else self.known_score)

    def __repr__(self) -> str:
        score = self.known_score or self.__dict__.get("score")
        return self._listed([("family", self.family)], [("score", repr(score))] if score else [])


def _or_default(key: PRNGKeyArray | None) -> PRNGKeyArray:
    return jax.random.key(0) if key is None else check_key(key)
