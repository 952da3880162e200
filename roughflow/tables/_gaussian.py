"""The Gaussian of a table: its moments, shrunk and widened where rows are few."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..faq import see
from ..train import LEAVE_ONE_OUT, Links, folds

RIDGE = 1e-6  # added to correlations: nearly dependent columns are still told apart
SHRINKAGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
ROWS_WITHOUT_SHRINKAGE = 30  # rows per column from which correlations are not shrunk


@dataclass(frozen=True)
class Gaussian:
    """x = m + M u with u ~ N(0, I), of which the last `context` coordinates are given: M is block upper
    triangular, so that the own coordinates follow the linear regression on those."""

    loc: np.ndarray
    matrix: np.ndarray
    context: int = 0

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """log p(own | given) of each row."""
        own = len(self.loc) - self.context
        unit = np.linalg.solve(self.matrix, (rows - self.loc).T)[:own]
        log_scale = np.sum(np.log(np.diagonal(self.matrix)[:own]))
        return -0.5 * np.sum(unit**2 + np.log(2 * np.pi), axis=0) - log_scale

    @staticmethod
    def of(
        rows: np.ndarray, context: int = 0, shrinkage: float = 0.0, count: int | None = None
    ) -> "Gaussian":
        """With the mean and the covariance of the rows.

        `shrinkage` λ moves the correlations R to (1 − λ) R + λ I. With a `count` n of distinct rows, the
        covariance is (n + 1)/(n − k − 2) times as large, k = 1 + (1 − λ)(D − 1): among the multiples of the
        sample covariance of normal rows, λ = 0, this one has the highest expected log-density of a new row.
        """
        loc, scale, correlation = moments(rows)
        size, own = len(loc), len(loc) - context
        correlation = (1 - shrinkage) * correlation + (shrinkage + RIDGE) * np.eye(size)
        free = 1 + (1 - shrinkage) * (size - 1)
        wider = 1.0 if count is None else (count + 1) / max(count - free - 2, 1)
        slope = np.zeros((own, 0))
        residual = correlation[:own, :own]
        if context:
            slope = np.linalg.solve(correlation[own:, own:], correlation[own:, :own]).T
            residual = residual - slope @ correlation[own:, :own]
        matrix = np.eye(size)
        matrix[:own, :own] = np.sqrt(wider) * np.linalg.cholesky(residual)
        matrix[:own, own:] = slope
        return Gaussian(loc, scale[:, None] * matrix, context)

    @staticmethod
    def shrunk(rows: np.ndarray, links: Links, context: int = 0) -> "Gaussian":
        """For the prediction of new rows: widened, with the shrinkage that cross-validation finds best."""
        size, best = rows.shape[1], 0.0
        if size > 1 and links.distinct < ROWS_WITHOUT_SHRINKAGE * size:
            score = np.zeros(len(SHRINKAGES))
            for rest, part in folds(links.labels, LEAVE_ONE_OUT):
                count = links.at(rest).distinct
                fits = (Gaussian.of(rows[rest], context, s, count) for s in SHRINKAGES)
                score += [np.sum(fit.log_prob(rows[part])) for fit in fits]
            best = SHRINKAGES[int(np.argmax(score))]
        return Gaussian.of(rows, context, best, links.distinct)


def moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The means and standard deviations of the columns, 1 where one is constant, and their correlations."""
    loc, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(_constant(rows, loc, scale), 1.0, scale)
    unit = (rows - loc) / scale
    return loc, scale, unit.T @ unit / len(rows)


def _constant(rows: np.ndarray, loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (scale <= 1e-10 * np.maximum(np.abs(loc), 1e-300)) | (rows.max(axis=0) == rows.min(axis=0))


def check_full_rank(rows: np.ndarray, names: Sequence[str] = ()) -> None:
    """Refuse columns that are constant, or that depend linearly on others. Fewer rows than columns do not
    tell which do."""
    label = lambda i: repr(names[i]) if names else str(i)
    still = np.flatnonzero(_constant(rows, rows.mean(axis=0), rows.std(axis=0)))
    if still.size:
        told = f"column {label(still[0])} is constant: its distribution has no density; leave it out"
        raise ValueError(told + see("no-density"))
    size = rows.shape[1]
    if len(rows) <= size:
        return
    values, vectors = np.linalg.eigh(moments(rows)[2])
    if values[0] < RIDGE:
        weights = np.abs(vectors[:, 0])
        involved = [label(i) for i in np.flatnonzero(weights > 0.05 * weights.max())]
        raise ValueError(
            f"columns {', '.join(involved)} are linearly dependent, so their distribution has no density: "
            "leave one of them out" + see("no-density")
        )
