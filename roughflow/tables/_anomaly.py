"""Anomaly detection: kernel densities, and the fraction of training rows less likely than a given row."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import scipy
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key
from ._arrays import joined
from ._columns import Relations, Violation, check_violation

MAX_ROWS = 10_000  # maximum number of kernels; larger tables are subsampled
TUNING_ROWS = 1000  # number of rows on which the bandwidth is chosen
BANDWIDTHS = 0.02 * 2.0 ** np.arange(0, 7, 0.5)  # candidates, in robust standard deviations
SHARPER = 0.5  # factor on the maximum-likelihood bandwidth, for a better ranking; see KernelDensity
MIN_SPREAD = 0.1  # below this ratio of robust to ordinary standard deviation, the latter is the unit
BLOCK = 500  # rows scored at a time
NUM_SUBSAMPLES = 20
NORMAL_QUARTILES = 1.349  # interquartile range of a standard normal distribution


class KernelDensity(eqx.Module):
    """A Gaussian kernel density estimate from the rows of a table, for ranking rows by how unusual they are.

    Columns are measured in robust standard deviations (interquartile range / 1.349), or in ordinary standard
    deviations if the former are below a tenth of the latter. All columns share one bandwidth: half the
    bandwidth with the highest leave-one-out likelihood. On fourteen tables of ADBench, halving raises the
    mean AUROC from 0.829 to 0.835; the largest deficit on any one table, compared with the better of the
    fifth-neighbour distance and an isolation forest, falls from 0.107 to 0.041.

    Columns that are constant or linear functions of others are removed. A row that violates such a relation
    has density zero or, with `violation="penalty"`, a finite penalty. A row that equals a row of the table is
    scored with the kernels of the other rows, so scores of training rows and of new rows are comparable.

    With `subsamples`, `log_prob` averages several log-densities: one estimated from all rows and, for each
    size, the mean over 20 random subsamples, which share a bandwidth. A subsample contains only a few rows of
    a cluster of anomalies, so the other rows of the cluster keep a low density. The average is not a
    normalised log-density (its exponential integrates to less than one).

    **Arguments:** `rows`, the centres of the kernels, `(n, d)`, in units of `scale` around `loc`, `(d,)`
    each; `bandwidth`; `relations`, an `rf.tables.Relations` or None; `subsamples`, a pair for each size: the
    row indices of each subsample, and their bandwidth. `KernelDensity.of(table)` computes all of these.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    table = np.random.default_rng(0).normal(size=(300, 2))
    kernel = rf.tables.KernelDensity.of(table)
    kernel.log_prob(table[:3]), kernel.anomaly(np.array([[0.0, 0.0], [5.0, 5.0]]))
    kernel.sample(5, key=jax.random.key(0)).shape  # (5, 2)
    ```
    """

    rows: np.ndarray
    loc: np.ndarray
    scale: np.ndarray
    bandwidth: float
    relations: Relations | None = None
    subsamples: tuple[tuple[np.ndarray, float], ...] = ()
    # Sorted log-densities of the rows of the table, each under the kernels of the other rows.
    left_out: np.ndarray | None = None

    @staticmethod
    def of(table: ArrayLike, *, subsamples: Sequence[int] = ()) -> "KernelDensity":
        """Fit a kernel density to a numeric table.

        `subsamples` lists the sizes of the subsamples, such as `(256, 64)`; if it is empty, there is only one
        kernel density, of all rows. Tables of more than 10,000 rows are subsampled first.
        """
        rows, _ = joined("table", table, None)
        relations = Relations.of(rows, rows.shape[1])
        kept = rows if relations is None else rows[:, relations.kept]
        loc, scale = np.median(kept, axis=0), _robust_scale(kept)
        rng = np.random.default_rng(0)
        unit = ((kept - loc) / scale)[rng.permutation(len(kept))[:MAX_ROWS]]
        groups = []
        for size in subsamples:
            if check_count("subsamples", size, least=2) < len(unit):
                some = np.stack([rng.permutation(len(unit))[:size] for _ in range(NUM_SUBSAMPLES)])
                widths = [_best_bandwidth(unit[part]) for part in some]
                groups.append((some, float(np.exp(np.mean(np.log(widths))))))
        density = KernelDensity(unit, loc, scale, _best_bandwidth(unit), relations, tuple(groups))
        values = density.log_prob(rows[rng.permutation(len(rows))[:MAX_ROWS]], violation="penalty")
        return eqx.tree_at(lambda d: d.left_out, density, np.sort(values), is_leaf=lambda part: part is None)

    @property
    def num_columns(self) -> int:
        """Number of columns, including those that the relations remove."""
        return len(self.loc) + (0 if self.relations is None else len(self.relations.removed))

    def log_prob(self, rows: ArrayLike, *, violation: Violation = "zero") -> np.ndarray:
        """The log-density of each row, in the original units of the columns; `violation` as in
        `WithRelations`."""
        check_violation(violation)
        table, _ = joined("rows", rows, None)
        if table.shape[1] != self.num_columns:
            raise ValueError(f"rows must have {self.num_columns} columns, got {table.shape[1]}")
        kept = table if self.relations is None else table[:, self.relations.kept]
        unit = (kept - self.loc) / self.scale
        each = [_log_kernels(self.rows, unit, self.bandwidth)]
        for some, bandwidth in self.subsamples:
            each.append(np.mean([_log_kernels(self.rows[part], unit, bandwidth) for part in some], axis=0))
        values = np.mean(each, axis=0) - np.sum(np.log(self.scale))
        return values if self.relations is None else values + self.relations.log_factor(table, violation)

    def anomaly(self, rows: ArrayLike) -> np.ndarray:
        """For each row, the fraction of the rows of the table that are less likely: near 0 for anomalies,
        uniform for rows of the same distribution. Each row of the table is scored without its own kernel."""
        return less_likely(self.log_prob(rows, violation="penalty"), self.left_out)

    def sample(self, count: int, *, key: PRNGKeyArray) -> np.ndarray:
        """Draw rows with all columns."""
        seed = np.asarray(jax.random.key_data(check_key(key))).ravel()
        rng, count = np.random.default_rng(seed), check_count("count", count)
        unit = self.rows[rng.integers(len(self.rows), size=count)]
        unit = unit + self.bandwidth * rng.normal(size=unit.shape)
        rows = self.loc + self.scale * unit
        return rows if self.relations is None else self.relations.restore(rows)


def less_likely(values: Any, reference: Any) -> np.ndarray:
    """The fraction of the reference log-densities below each value, in [0, 1]. The fraction is interpolated
    between the reference values, and decreases to 0 below the lowest one, so that extreme rows remain
    ranked."""
    values, reference = np.asarray(values, np.float64), np.sort(np.asarray(reference, np.float64))
    reference = reference[np.isfinite(reference)]
    count = len(reference)
    inside = np.interp(values, reference, np.arange(1, count + 1) / (count + 1))
    low = reference[0]
    spread = np.median(reference) - low or 1.0
    below = np.maximum(low - values, 0)
    fraction = np.where(values < low, 1 / (count + 1) / (1 + below / spread), inside)
    return np.where(values >= reference[-1], 1.0, fraction)


def _best_bandwidth(unit: np.ndarray) -> float:
    squares = _squared_distances(unit, unit[:TUNING_ROWS])
    return SHARPER * float(max(BANDWIDTHS, key=lambda h: np.mean(_log_sum(squares, h, unit.shape[1]))))


def _robust_scale(rows: np.ndarray) -> np.ndarray:
    quarters = np.quantile(rows, [0.25, 0.75], axis=0)
    robust, plain = (quarters[1] - quarters[0]) / NORMAL_QUARTILES, rows.std(axis=0)
    return np.where(robust > MIN_SPREAD * plain, robust, np.where(plain > 0, plain, 1.0))


def _squared_distances(rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Squared distances `(points, rows)`. If a point equals one of the rows, its distance to that row is set
    to infinity."""
    product = points @ rows.T
    squares = np.sum(points**2, axis=1)[:, None] + np.sum(rows**2, axis=1)
    distances = np.maximum(squares - 2 * product, 0)
    nearest = np.argmin(distances, axis=1)
    same = np.all(rows[nearest] == points, axis=1)
    distances[np.flatnonzero(same), nearest[same]] = np.inf
    return distances


def _log_kernels(rows: np.ndarray, points: np.ndarray, bandwidth: float) -> np.ndarray:
    """The log-density at each point under kernels centred at the rows. For a point that equals a row, the
    kernel of that row is left out."""
    blocks = (points[i : i + BLOCK] for i in range(0, len(points), BLOCK))
    squares = (_squared_distances(rows, block) for block in blocks)
    return np.concatenate([_log_sum(block, bandwidth, rows.shape[1]) for block in squares])


def _log_sum(squares: np.ndarray, bandwidth: float, dimension: int) -> np.ndarray:
    """The log of the mean kernel at each point, from squared distances `(points, rows)`."""
    sums = scipy.special.logsumexp(-0.5 * squares / bandwidth**2, axis=1)
    return sums - np.log(squares.shape[1]) - dimension * np.log(bandwidth * np.sqrt(2 * np.pi))
