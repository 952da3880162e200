"""Mixtures for tables with numeric and categorical columns and missing cells."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import PRNGKeyArray

from .._checks import check_count, check_key, warn
from .._show import count as count_of, listed
from ..density import AbstractEstimator, Estimate
from ..faq import see
from ..train import Links, folds, hold_out, mean_and_error, rng_of
from ._arrays import is_frame
from ._columns import MISSING, UNKNOWN, Encoding, Relations, Violation, cells_of, check_violation

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # candidate numbers of components
MIN_ROWS_PER_COMPONENT = 12
# Maximum number of EM steps, and gain of a step, in nats per row, below which EM stops.
MAX_STEPS, TOLERANCE = 200, 2e-5
SEARCH_TOLERANCE = 3e-4  # tolerance while the number of components is chosen
FEW_PATTERNS = 16  # maximum number of patterns of missing cells for which products are computed by pattern
PSEUDO_ROWS_PER_COLUMN = 0.5  # weight of the prior on each covariance, in rows per column
PSEUDO_CATEGORIES = 0.5  # weight of the prior on each category, in rows
CELL_POINTS = 64  # number of points for the integral over the rounding intervals of several integer columns
SMALL = 5000  # number of sets of linked rows below which cross-validation chooses the number of components
BLOCK = 2048  # number of rows whose matrices are in memory at a time


class MixtureComponents(eqx.Module):
    """The mixture p(x, c) = Σₖ wₖ N(x; mₖ, Sₖ) Πⱼ pₖⱼ(cⱼ) of numeric values x and categories c.

    Missing numeric values are NaN, and missing categories are −1. They are integrated out, and the density of
    the observed cells is a mixture of the same form. An integer stands for a rounding interval of width
    `widths` around it; `widths` is 0 for continuous columns.

    **Arguments:** `weights`, `(K,)`; `means`, `(K, p)`; `covariances`, `(K, p, p)`; `tables`, one array
    `(K, levels)` for each categorical column; `widths`, `(p,)`.

    ```python
    import numpy as np
    import roughflow as rf

    tables = (np.array([[0.9, 0.1], [0.2, 0.8]]),)
    weights, means, covariances = np.ones(2) / 2, np.array([[0.0], [3.0]]), np.ones((2, 1, 1))
    mixture = rf.tables.MixtureComponents(weights, means, covariances, tables, np.zeros(1))
    mixture.log_prob(np.array([[0.5], [np.nan]]), np.array([[0], [1]]))  # the second is log 0.45
    ```
    """

    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    tables: tuple[np.ndarray, ...]
    widths: np.ndarray

    def log_components(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """log wₖ + log p(observed cells | k) for each row, `(n, K)`; integer columns contribute the
        probabilities of their rounding intervals."""
        values = np.log(self.weights) + _log_categories(self.tables, codes)
        patterns, indices = _patterns(numbers)
        if not np.any(self.widths):
            parts = zip(self.means, self.covariances, strict=True)
            each = [_log_normal(numbers, patterns, indices, *part) for part in parts]
            return values + np.stack(each, axis=1)
        for u, observed in enumerate(patterns):
            rows = np.flatnonzero(indices == u)
            cells = observed & (self.widths > 0)
            for k in range(len(self.weights)):
                values[rows, k] += self._log_cells(numbers[rows], observed & ~cells, cells, k)
        return values

    def _log_cells(self, numbers: np.ndarray, exact: np.ndarray, cells: np.ndarray, k: int) -> np.ndarray:
        """In component k, the log-density of the `exact` columns plus the log-probability of the rounding
        intervals of the integer columns `cells` given the exact ones."""
        mean, covariance = np.broadcast_to(self.means[k], numbers.shape), self.covariances[k]
        value = np.zeros(len(numbers))
        if exact.any():
            value = _log_normal(numbers, exact[None], np.zeros(len(numbers), int), self.means[k], covariance)
            mean, covariance = condition(mean, covariance, numbers, exact)
        if not cells.any():
            return value
        half = self.widths[cells] / 2
        offset = numbers[:, cells] - mean[:, cells]
        return value + _log_boxes(offset - half, offset + half, covariance[np.ix_(cells, cells)])

    def log_prob(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """The log-density of the observed cells of each row."""
        return scipy.special.logsumexp(self.log_components(numbers, codes), axis=1)

    def complete(
        self, numbers: np.ndarray, codes: np.ndarray, rng: np.random.Generator, count: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the missing cells of each row given the observed ones, in each of `count` copies of the
        rows."""
        values = self.log_components(numbers, codes)
        share = np.exp(values - scipy.special.logsumexp(values, axis=1, keepdims=True))
        share, numbers, codes = (np.tile(part, (count, 1)) for part in (share, numbers, codes))
        below = np.cumsum(share, axis=1) < rng.random((len(share), 1))
        chosen = np.minimum(below.sum(axis=1), share.shape[1] - 1)
        # A uniform draw is accurate enough, because the density is nearly constant in a rounding interval.
        numbers = numbers + self.widths * rng.uniform(-0.5, 0.5, numbers.shape)
        patterns, indices = _patterns(numbers)
        for k in range(len(self.weights)):
            for u, observed in enumerate(patterns):
                rows = np.flatnonzero((chosen == k) & (indices == u))
                if len(rows) and not observed.all():
                    numbers[rows] = _draw(numbers[rows], observed, self.means[k], self.covariances[k], rng)
            rows = np.flatnonzero(chosen == k)
            for j, table in enumerate(self.tables):
                missing = rows[codes[rows, j] == -1]
                codes[missing, j] = rng.choice(table.shape[1], size=len(missing), p=table[k] / table[k].sum())
        return numbers, codes

    def sample(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw complete rows."""
        numbers = np.full((count, len(self.widths)), np.nan)
        return self.complete(numbers, np.full((count, len(self.tables)), -1), rng)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Encoded rows: numeric values (NaN if missing; uniform noise is added to rounded ones), category codes
    (−1 if missing), the number of levels of each categorical column, and the weights of the rows."""

    numbers: np.ndarray
    codes: np.ndarray
    levels: tuple[int, ...]
    weights: np.ndarray

    def at(self, indices: np.ndarray) -> "Rows":
        return Rows(self.numbers[indices], self.codes[indices], self.levels, self.weights[indices])


def fit_mixture(
    rows: Rows, widths: np.ndarray, count: int, tolerance: float = TOLERANCE
) -> MixtureComponents:
    """Fit a mixture of `count` components by expectation–maximisation, initialised by k-means."""
    share = _initial_shares(rows, count)
    patterns, indices = _patterns(rows.numbers)
    filled = np.where(np.isnan(rows.numbers), 0.0, rows.numbers)
    mean, spread = _observed_moments(rows)
    prior = np.diag(spread**2) / count ** (2 / max(1, len(mean)))
    means = np.tile(mean, (count, 1))
    covariances = np.tile(np.diag(spread**2), (count, 1, 1))
    last, mass, tables = -np.inf, np.ones(count), ()
    for step in range(MAX_STEPS):
        total = rows.weights[:, None] * share
        mass = total.sum(axis=0) + 1e-9
        for k in range(count):
            means[k], covariances[k] = _moments(
                filled, patterns, indices, total[:, k], means[k], covariances[k], prior
            )
        tables = tuple(_category_table(rows.codes[:, j], total, size) for j, size in enumerate(rows.levels))
        values = np.log(mass / mass.sum()) + _log_categories(tables, rows.codes)
        for k in range(count):
            values[:, k] += _log_normal(rows.numbers, patterns, indices, means[k], covariances[k])
        each = scipy.special.logsumexp(values, axis=1)
        share = np.exp(values - each[:, None])
        reached = float(np.average(each, weights=rows.weights))
        if reached - last < tolerance and step > 3:
            break
        last = reached
    return MixtureComponents(mass / mass.sum(), means, covariances, tables, widths)


def best_count(
    rows: Rows, widths: np.ndarray, scored: tuple[np.ndarray, np.ndarray], links: Links, held_out: Rows | None
) -> tuple[int, np.ndarray, np.ndarray]:
    """Choose the number of components with the highest log-likelihood of unseen rows. Also return the
    log-densities of these rows under that mixture and under a single component.

    The unseen rows are `held_out` or, if it is None, the folds of cross-validation. `scored` contains their
    rounded values and their codes."""
    best, found, worse, single = 0, np.array([-np.inf]), 0, np.array([])
    for count in COUNTS:
        if count > 1 and count * MIN_ROWS_PER_COMPONENT > links.distinct:
            break
        if held_out is not None:
            values = fit_mixture(rows, widths, count, SEARCH_TOLERANCE).log_prob(*scored)
        else:
            values = np.empty(len(rows.numbers))
            for rest, part in folds(links.labels):
                fit = fit_mixture(rows.at(rest), widths, count, SEARCH_TOLERANCE)
                values[part] = fit.log_prob(scored[0][part], scored[1][part])
        labels = links.labels if held_out is None else np.arange(len(values))
        weights = rows.weights if held_out is None else held_out.weights
        single = values if count == 1 else single
        if best == 0 or _gain(values, found, weights, labels) > 0:
            best, found, worse = count, values, 0
        else:
            worse += 1
        if worse == 2:
            break
    return best, found, single


def _gain(values: np.ndarray, others: np.ndarray, weights: np.ndarray, labels: np.ndarray) -> float:
    return mean_and_error(weights / weights.mean() * (values - others), labels)[0]


def _observed_moments(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    weights = np.where(np.isnan(rows.numbers), 0.0, rows.weights[:, None])
    total = np.maximum(weights.sum(axis=0), 1e-12)
    filled = np.where(np.isnan(rows.numbers), 0.0, rows.numbers)
    mean = (weights * filled).sum(axis=0) / total
    spread = np.sqrt((weights * (filled - mean) ** 2).sum(axis=0) / total)
    return mean, np.where(spread > 0, spread, 1.0)


def _initial_shares(rows: Rows, count: int) -> np.ndarray:
    """Initial probabilities of the components for each row, from a few steps of k-means (initialised by
    k-means++), with missing cells replaced by the mean."""
    rng = np.random.default_rng(0)
    mean, spread = _observed_moments(rows)
    unit = np.nan_to_num((rows.numbers - mean) / spread)
    coded = [
        np.eye(size)[codes] * (codes >= 0)[:, None]
        for codes, size in zip(rows.codes.T, rows.levels, strict=False)
    ]
    unit = np.concatenate([np.clip(unit, -6, 6), *coded], axis=1)
    centres = unit[rng.integers(len(unit), size=1)]
    while len(centres) < count:
        nearest = scipy.spatial.distance.cdist(unit, centres, "sqeuclidean").min(axis=1) + 1e-9
        centres = np.concatenate([centres, unit[rng.choice(len(unit), size=1, p=nearest / nearest.sum())]])
    label = np.zeros(len(unit), int)
    for _ in range(20):
        label = scipy.spatial.distance.cdist(unit, centres, "sqeuclidean").argmin(axis=1)
        for k in np.unique(label):
            centres[k] = unit[label == k].mean(axis=0)
    return 0.9 * np.eye(count)[label] + 0.1 / count


def _category_table(codes: np.ndarray, total: np.ndarray, size: int) -> np.ndarray:
    """The probabilities of the levels of a column in each component, shrunk towards their frequencies in the
    whole table."""
    counts = np.stack([total[codes == level].sum(axis=0) for level in range(size)], axis=1)
    overall = (counts.sum(axis=0) + PSEUDO_CATEGORIES) / (counts.sum() + PSEUDO_CATEGORIES * size)
    return (counts + PSEUDO_CATEGORIES * size * overall) / (
        counts.sum(axis=1, keepdims=True) + PSEUDO_CATEGORIES * size
    )


def _log_categories(tables: Sequence[np.ndarray], codes: np.ndarray) -> np.ndarray:
    """Σⱼ log pₖⱼ(cⱼ) over observed categories, `(n, K)`; −∞ if a category is unknown (code −2), and 0 if
    there are no categorical columns."""
    value = np.zeros((len(codes), 1))
    for table, column in zip(tables, codes.T, strict=True):
        known = np.where((column >= 0)[:, None], np.log(table).T[np.maximum(column, 0)], 0.0)
        value = value + np.where((column == -2)[:, None], -np.inf, known)
    return value


def _patterns(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct patterns of observed columns, as masks, and the index of each row's pattern."""
    patterns, indices = np.unique(~np.isnan(numbers), axis=0, return_inverse=True)
    return patterns, indices.ravel()


def _precisions(patterns: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each pattern, the inverse (with zeros for missing columns) and the log-determinant of the
    covariance of the observed columns."""
    both = patterns[:, :, None] & patterns[:, None, :]
    filled = np.where(both, covariance, 0.0) + np.eye(len(covariance)) * ~patterns[:, :, None]
    inverse = np.where(both, np.linalg.inv(filled), 0.0)
    return inverse, np.linalg.slogdet(filled)[1]


def _times(matrices: np.ndarray, indices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """For each row, the product of its vector with the matrix of its pattern."""
    if len(matrices) <= FEW_PATTERNS:
        product = np.empty_like(vectors)
        for u, matrix in enumerate(matrices):
            rows = indices == u
            product[rows] = vectors[rows] @ matrix.T
        return product
    starts = range(0, len(vectors), BLOCK)
    parts = [
        np.einsum("nij,nj->ni", matrices[indices[i : i + BLOCK]], vectors[i : i + BLOCK]) for i in starts
    ]
    return np.concatenate(parts) if parts else vectors


def _log_normal(
    numbers: np.ndarray, patterns: np.ndarray, indices: np.ndarray, mean: np.ndarray, covariance: np.ndarray
) -> np.ndarray:
    """The log-density of the observed numeric values of each row under one Gaussian."""
    precision, log_det = _precisions(patterns, covariance)
    offset = np.where(patterns[indices], np.nan_to_num(numbers) - mean, 0.0)
    squares = np.sum(offset * _times(precision, indices, offset), axis=1)
    return -0.5 * (squares + log_det[indices] + np.log(2 * np.pi) * patterns.sum(axis=1)[indices])


def _moments(
    filled: np.ndarray,
    patterns: np.ndarray,
    indices: np.ndarray,
    weights: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    prior: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The M step for one Gaussian: the moments of rows whose missing cells are replaced by their conditional
    means, plus the conditional covariances and the prior."""
    precision, _ = _precisions(patterns, covariance)
    gain = covariance @ precision  # Σ Σₒₒ⁻¹ for each pattern, where o are the observed columns
    offset = np.where(patterns[indices], filled - mean, 0.0)
    expected = mean + _times(gain, indices, offset)
    mass = weights.sum() + 1e-9
    centre = weights @ expected / mass
    centred = expected - centre
    rest = covariance - gain @ covariance
    share = np.bincount(indices, weights, minlength=len(patterns))
    scatter = (weights[:, None] * centred).T @ centred + np.einsum("u,uij->ij", share, rest)
    pseudo, small = PSEUDO_ROWS_PER_COLUMN * len(mean), 1e-9 * prior
    new = (scatter + pseudo * prior) / (mass + pseudo) + small
    return centre, (new + new.T) / 2


def condition(
    mean: np.ndarray, covariance: np.ndarray, numbers: np.ndarray, observed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The means `(n, p)`, one per row, and the covariance of a Gaussian conditional on the observed
    columns."""
    own = covariance[np.ix_(observed, observed)]
    gain = np.linalg.solve(own, covariance[observed]).T
    shifted = mean + (numbers[:, observed] - mean[:, observed]) @ gain.T
    return shifted, covariance - gain @ covariance[observed]


def _draw(
    numbers: np.ndarray,
    observed: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Replace the missing values of each row by draws from the Gaussian given the observed values."""
    means = np.broadcast_to(mean, numbers.shape)
    if observed.any():
        means, covariance = condition(means, covariance, numbers, observed)
    missing = np.flatnonzero(~observed)
    root = np.linalg.cholesky(covariance[np.ix_(missing, missing)])
    drawn = numbers.copy()
    drawn[:, missing] = means[:, missing] + rng.normal(size=(len(numbers), len(missing))) @ root.T
    return drawn


def _log_boxes(low: np.ndarray, high: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """log P(low < z < high) for z ~ N(0, covariance), by sequential conditioning (Geweke 1991, Hajivassiliou
    & Keane): exact in one dimension, otherwise an average over quasi-random points."""
    root, size = np.linalg.cholesky(covariance), len(covariance)
    points = np.zeros((1, 1))
    if size > 1:
        points = scipy.stats.qmc.Sobol(size - 1, seed=0).random(CELL_POINTS)
    z = np.zeros((len(low), len(points), size))
    total = np.zeros((len(low), len(points)))
    for j in range(size):
        shift = z[..., :j] @ root[j, :j]
        a, b = ((edge[:, j, None] - shift) / root[j, j] for edge in (low, high))
        # Intervals on the positive side are reflected, because the difference of two probabilities near one
        # loses digits.
        flip = a + b > 0
        a, b = np.where(flip, -b, a), np.where(flip, -a, b)
        log_a, log_b = scipy.special.log_ndtr(a), scipy.special.log_ndtr(b)
        total += log_b + np.log1p(-np.exp(np.minimum(log_a - log_b, -1e-300)))
        if j + 1 < size:
            level = scipy.special.ndtr(a) + points[:, j] * (scipy.special.ndtr(b) - scipy.special.ndtr(a))
            drawn = np.clip(scipy.special.ndtri(level), a, b)
            z[..., j] = np.where(flip, -drawn, drawn)
    return scipy.special.logsumexp(total, axis=1) - np.log(len(points))


# ------------------------------------------------------------------------------------------------- the model


class MixedDensity(eqx.Module):
    """A density for tables with numeric and categorical columns and missing cells: a `MixtureComponents` of
    encoded rows.

    `log_prob` is the log-density of the observed cells of a row in the original units of the columns. Cells
    of categorical and integer columns contribute probabilities; a cell of a zero-inflated column contributes
    the probability of the point mass or a density. `rf.fit_density` returns this model for such tables.

    **Arguments:** `encoding`, an `rf.tables.Encoding`; `mixture`, an `rf.tables.MixtureComponents`.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    rng = np.random.default_rng(0)
    colour = rng.choice(["red", "blue"], 300)
    height = np.where(colour == "red", 3.0, 0.0) + rng.normal(size=300)
    table = np.column_stack([colour.astype(object), height])
    table[:30, 1] = None
    fitted = rf.fit_density(table, key=jax.random.key(0), columns=["colour", "height"])
    fitted.model.encoding.described()  # 'colour: category (2 levels), height: continuous'
    fitted.log_prob(table[:3])  # log-probabilities of the colours alone
    fitted.impute(table[:3], 2, key=jax.random.key(1)).shape  # (2, 3, 2)
    fitted.conditional(table[:3], given=["colour"]).quantile([0.05, 0.95], "height")
    ```
    """

    encoding: Encoding
    mixture: MixtureComponents
    num_given: int = eqx.field(static=True, default=0)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self.encoding.columns

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return len(self.columns)

    def __repr__(self) -> str:
        title = (
            f"MixedDensity: {len(self.mixture.weights)} components, {count_of(self.num_columns, 'column')}"
        )
        return listed(title, [("columns", self.encoding.described())])

    def log_prob(
        self,
        rows: Any,
        *,
        key: PRNGKeyArray | None = None,
        given: Any = None,
        violation: Violation = "zero",
    ) -> np.ndarray:
        """The log-density of the observed cells of each row. It is −∞ if a category does not occur in the
        training table; with `violation="penalty"`, such a category counts as missing and costs 10 nats."""
        del key
        check_violation(violation)
        _check_no_given(given)
        numbers, codes = self.encode(rows)
        unknown = (codes == UNKNOWN).sum(axis=1)
        if violation == "penalty":
            codes = np.where(codes == UNKNOWN, MISSING, codes)
        values = self.mixture.log_prob(numbers, codes) - self.encoding.log_scale(numbers)
        return values + (unknown * UNKNOWN_PENALTY if violation == "penalty" else 0.0)

    def encode(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Encode rows as numeric values, in the units of the model, and codes."""
        return self.encoding.encode(cells_of(rows, self.columns, "rows")[0])

    def estimate(
        self,
        rows: Any,
        *,
        key: PRNGKeyArray,
        given: Any = None,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
        max_paths: int = 2**16,
    ) -> Estimate:
        """`log_prob` with zero errors. The density is in closed form, so the options have no effect."""
        del estimator, tolerance, max_paths
        return Estimate.of(jnp.asarray(self.log_prob(rows, key=key, given=given)), "exact")

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), given: Any = None) -> np.ndarray:
        """Draw complete rows `(*shape, d)`: an array of floats, or of objects if there is text."""
        _check_no_given(given)
        rows = self.encoding.decode(*self.mixture.sample(int(np.prod(shape)), rng_of(check_key(key), 0)))
        return rows.reshape(*shape, self.num_columns)

    def impute(self, rows: Any, count: int, *, key: PRNGKeyArray) -> np.ndarray:
        """Draw the missing cells of each row `count` times: `(count, n, d)`."""
        cells = cells_of(rows, self.columns, "rows")[0]
        numbers, codes = self.encoding.encode(cells)
        _check_known("rows", codes)
        count = check_count("count", count)
        drawn = self.encoding.decode(*self.mixture.complete(numbers, codes, rng_of(check_key(key), 0), count))
        drawn = drawn.reshape(count, len(numbers), self.num_columns)
        absent = self.encoding.absent(numbers, codes)
        for i, column in enumerate(cells):
            seen = ~absent[:, i]
            drawn[:, seen, i] = column[seen]
        return drawn

    def conditional(self, rows: Any, given: Sequence[str]) -> "Conditional":
        """The distribution of the other columns given the columns `given` of each row."""
        unknown = [name for name in given if name not in self.columns]
        if isinstance(given, str) or unknown or len(given) == len(self.columns):
            text = f"given must name some of the columns {', '.join(self.columns)}, got {given!r}"
            raise ValueError(text)
        if is_frame(rows):
            rows = rows.reindex(columns=list(self.columns))
        cells = cells_of(rows, self.columns, "rows")[0]
        empty = np.full(len(cells[0]), np.nan)
        kept = [cell if name in given else empty for name, cell in zip(self.columns, cells, strict=True)]
        numbers, codes = self.encoding.encode(kept)
        _check_known("rows", codes)
        return Conditional(self, numbers, codes, tuple(given))

    def missing(self, rows: Any) -> np.ndarray:
        """A mask of the missing cells of rows, `(n, d)`."""
        return self.encoding.absent(*self.encode(rows))

    def with_noise(self, diffusion: Any, *, fading: float | None = 0.5) -> "MixedDensity":
        """Raise an error, because there is no flow."""
        raise ValueError("a mixture has no flow to add noise to: fit a flow with family='flow'")


UNKNOWN_PENALTY = -10.0  # nats, for each category that does not occur in the table
# Bisection for quantiles: initial range in standard deviations, and number of steps.
TAIL_STDS, BISECTIONS = 12.0, 60


@dataclasses.dataclass(frozen=True)
class Conditional:
    """For each row, the distribution of the other columns given the columns `given`; the result of
    `fitted.conditional`.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    rows = np.random.default_rng(0).multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], size=200)
    fitted = rf.fit_density(rows, key=jax.random.key(0), family="mixture")
    conditional = fitted.conditional(rows[:3], given=["x1"])
    conditional.mean("x2").shape, conditional.quantile([0.05, 0.95], "x2").shape  # (3,), (2, 3)
    ```
    """

    model: MixedDensity
    numbers: np.ndarray
    codes: np.ndarray
    given: tuple[str, ...]

    def log_prob(self, rows: Any) -> np.ndarray:
        """log p(other columns | given columns) of each row, in closed form. `rows` must have all columns,
        with the same values in the given ones."""
        own, (numbers, codes) = self.model.encoding, self.model.encode(rows)
        same = np.isnan(self.numbers) | np.isclose(numbers, self.numbers, rtol=1e-6, atol=0)
        if not (same.all() and np.all((self.codes == MISSING) | (codes == self.codes))):
            raise ValueError(f"rows differ from the given cells in the columns {', '.join(self.given)}")
        known = self.model.mixture.log_prob(self.numbers, self.codes) - own.log_scale(self.numbers)
        return self.model.log_prob(rows) - known

    def sample(self, count: int, *, key: PRNGKeyArray) -> np.ndarray:
        """Draw complete rows with the given columns fixed, `(count, n, d)`."""
        rng = rng_of(check_key(key), 0)
        drawn = self.model.mixture.complete(self.numbers, self.codes, rng, check_count("count", count))
        return self.model.encoding.decode(*drawn).reshape(count, len(self.numbers), -1)

    def quantile(self, levels: Sequence[float], column: str) -> np.ndarray:
        """Quantiles of a numeric column for each row, `(levels, n)`, by bisection of its distribution
        function."""
        wanted = np.asarray(levels, float)
        if wanted.ndim != 1 or not np.all((wanted > 0) & (wanted < 1)):
            raise ValueError(f"levels must be a list of numbers between 0 and 1, got {levels!r}")
        share, mean, std, spike = self._parts(column)
        far = TAIL_STDS * std
        low, high = np.min(mean - far, axis=1), np.max(mean + far, axis=1)
        if spike is not None:
            low, high = np.minimum(low, spike[1] - 1), np.maximum(high, spike[1] + 1)
        low, high = (np.tile(end, (len(wanted), 1)) for end in (low, high))
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = scipy.special.ndtr((middle[..., None] - mean) / std)
            if spike is not None:
                below = (1 - spike[0]) * below + spike[0] * (middle >= spike[1])[..., None]
            less = np.sum(share * below, axis=-1) < wanted[:, None]
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        i, encoding = self._place(column), self.model.encoding
        value, width = encoding.loc[i] + encoding.scale[i] * high, encoding.widths[i]
        # The quantile of a rounded variable is the rounded quantile.
        return np.round(value / width) * width if width else value

    def mean(self, column: str) -> np.ndarray:
        """The mean of a numeric column for each row."""
        return self._moments(column)[0]

    def std(self, column: str) -> np.ndarray:
        """The standard deviation of a numeric column for each row."""
        return self._moments(column)[1]

    def _moments(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        share, mean, std, spike = self._parts(column)
        first, second = mean, std**2 + mean**2
        if spike is not None:
            first, second = (
                (1 - spike[0]) * m + spike[0] * spike[1] ** k for k, m in ((1, first), (2, second))
            )
        i, encoding = self._place(column), self.model.encoding
        average = np.sum(share * first, axis=1)
        variance = np.maximum(np.sum(share * second, axis=1) - average**2, 0.0) * encoding.scale[i] ** 2
        return encoding.loc[i] + encoding.scale[i] * average, np.sqrt(variance + encoding.widths[i] ** 2 / 12)

    def _place(self, column: str) -> int:
        names, encoding = self.model.columns, self.model.encoding
        if column not in names or encoding.types[names.index(column)] == "category":
            raise ValueError(f"{column!r} is not a numeric column; the columns are {encoding.described()}")
        if column in self.given:
            raise ValueError(f"{column!r} is given: its value is known")
        return names.index(column)

    def _parts(
        self, column: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, float] | None]:
        """The weights, means and standard deviations `(n, K)` of the components of a column given the known
        cells, in units of its scale; for a zero-inflated column also the probability of the point mass in
        each component, and its value."""
        i, encoding, mixture = self._place(column), self.model.encoding, self.model.mixture
        values = mixture.log_components(self.numbers, self.codes)
        share = np.exp(values - scipy.special.logsumexp(values, axis=1, keepdims=True))
        mean, std = np.empty_like(share), np.empty_like(share)
        j, (patterns, indices) = encoding.numeric.index(i), _patterns(self.numbers)
        for u, observed in enumerate(patterns):
            rows = np.flatnonzero(indices == u)
            for k in range(share.shape[1]):
                centre = np.broadcast_to(mixture.means[k], self.numbers[rows].shape)
                covariance = mixture.covariances[k]
                if observed.any():
                    centre, covariance = condition(centre, covariance, self.numbers[rows], observed)
                mean[rows, k], std[rows, k] = centre[:, j], np.sqrt(covariance[j, j])
        if encoding.types[i] != "zero-inflated":
            return share, mean, std, None
        table = mixture.tables[encoding.coded.index(i)]
        at = (float(encoding.levels[i][0]) - encoding.loc[i]) / encoding.scale[i]
        return share, mean, std, (table[:, 1] / table.sum(axis=1), at)


def _check_known(argument: str, codes: np.ndarray) -> None:
    if np.any(codes == UNKNOWN):
        raise ValueError(
            f"{argument} has a category that does not occur in the training table: replace it by a missing "
            "value"
        )


def _check_no_given(given: Any) -> None:
    if given is not None:
        raise ValueError("a mixture models all columns: use fitted.conditional(rows, given=[...])")


@dataclasses.dataclass(frozen=True)
class MixedFit:
    """A fitted mixture, and log-densities of unseen rows under the mixture and under a single component,
    times the weights of the rows."""

    model: MixedDensity
    values: np.ndarray
    gaussian: np.ndarray
    labels: np.ndarray
    cross: bool


def fit_mixed(
    data: Any,
    names: tuple[str, ...],
    types: Mapping[Any, str],
    weights: Any,
    groups: Any,
    validation: Any,
    key: PRNGKeyArray,
) -> MixedFit:
    """Fit a mixture to a table with numeric and categorical columns and missing cells.

    The number of components is chosen by cross-validation or, for 5,000 or more rows, on validation rows;
    the mixture is then fitted to all rows."""
    cells, names = cells_of(data, names)
    types = {
        names[name] if isinstance(name, int) and name < len(names) else name: kind
        for name, kind in types.items()
    }
    encoding = Encoding.of(cells, names, types)
    numbers, codes = encoding.encode(cells)
    _warn_of_relations(encoding, numbers)
    if len(numbers) < 2:
        raise ValueError(f"data has 1 row: use at least two, preferably hundreds{see('no-density')}")
    weights = _checked_weights(weights, len(numbers))
    rng = rng_of(key, 3)
    widths = encoding.unit_widths
    spread = numbers + widths * rng.uniform(-0.5, 0.5, numbers.shape)
    rows = Rows(spread, codes, encoding.sizes, weights)
    links = Links.of(np.concatenate([np.nan_to_num(numbers, nan=-1e6), codes], axis=1), groups)
    cross, held_out = False, None
    if not isinstance(validation, float | int):
        aside = encoding.encode(cells_of(validation, names, "validation")[0])
        _check_known("validation", aside[1])
        train, held_out = np.arange(len(numbers)), Rows(*aside, encoding.sizes, np.ones(len(aside[0])))
    elif links.count < SMALL or not validation:
        train, cross = np.arange(len(numbers)), True
    else:
        train, out = hold_out(links.labels, validation, key)
        held_out = Rows(numbers[out], codes[out], encoding.sizes, weights[out])
    scored = (numbers, codes) if held_out is None else (held_out.numbers, held_out.codes)
    count, values, single = best_count(rows.at(train), widths, scored, links.at(train), held_out)
    scale = encoding.log_scale(scored[0])
    model = MixedDensity(encoding, fit_mixture(rows, widths, count))
    labels, share = (links.labels, weights) if held_out is None else (np.arange(len(scale)), held_out.weights)
    # A weighted mean is the mean of values times weights. Rows of weight zero may have density zero.
    share = share / share.mean()
    weighted = lambda part: np.where(share > 0, share * (part - scale), 0.0)
    return MixedFit(model, weighted(values), weighted(single), labels, cross)


def _warn_of_relations(encoding: Encoding, numbers: np.ndarray) -> None:
    """Warn if a continuous column is a linear function of others, because a mixture then has no density."""
    which = [j for j, i in enumerate(encoding.numeric) if encoding.types[i] == "continuous"]
    rows = numbers[:, which]
    rows = rows[~np.isnan(rows).any(axis=1)]
    if len(rows) <= 2 * len(which) or (relations := Relations.of(rows, len(which))) is None:
        return
    names = [encoding.columns[encoding.numeric[j]] for j in which]
    dependent = ", ".join(repr(names[i]) for i in relations.removed)
    warn(
        f"columns that are linear functions of others have no density: {dependent}. A mixture does not "
        "remove them, so the score is too high and samples satisfy the relation only roughly: drop them"
        + see("no-density")
    )


def _checked_weights(weights: Any, count: int) -> np.ndarray:
    if weights is None:
        return np.ones(count)
    values = np.asarray(weights, float)
    if values.shape != (count,) or not np.all(np.isfinite(values)) or values.min() < 0 or not values.sum():
        raise ValueError(f"weights must be {count} non-negative numbers, one per row, not all zero")
    return values / values.mean()
