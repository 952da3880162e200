"""Closed-form densities: Gaussians, with or without monotone maps that make the columns nearly normal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array

from .._checks import is_traced
from ..faq import see
from ..train import LEAVE_ONE_OUT, Links, folds, mean_and_error

# Added to the diagonal of correlation matrices, so that they are invertible if columns are nearly dependent.
RIDGE = 1e-6
SHRINKAGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
ROWS_WITHOUT_SHRINKAGE = 30  # rows per column above which correlations are not shrunk


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian x = m + M u with u ~ N(0, I), conditional on the last `num_given` coordinates. M is block
    upper triangular, so the modelled coordinates are regressed linearly on the given ones."""

    loc: np.ndarray
    matrix: np.ndarray
    num_given: int = 0

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """log p(modelled | given) of each row."""
        own = len(self.loc) - self.num_given
        unit = np.linalg.solve(self.matrix, (rows - self.loc).T)[:own]
        log_scale = np.sum(np.log(np.diagonal(self.matrix)[:own]))
        return -0.5 * np.sum(unit**2 + np.log(2 * np.pi), axis=0) - log_scale

    @staticmethod
    def of(
        rows: np.ndarray, num_given: int = 0, shrinkage: float = 0.0, count: int | None = None
    ) -> "Gaussian":
        """The Gaussian with the mean and covariance of the rows.

        With `shrinkage` λ, the correlation matrix R is replaced by (1 − λ) R + λ I. If the number n of
        distinct rows is passed as `count`, the covariance is multiplied by (n + 1)/(n − k − 2), where
        k = 1 + (1 − λ)(D − 1). For normal rows and λ = 0, this factor maximises the expected log-density of a
        new row.
        """
        loc, scale, correlation = moments(rows)
        size, own = len(loc), len(loc) - num_given
        correlation = (1 - shrinkage) * correlation + (shrinkage + RIDGE) * np.eye(size)
        free = 1 + (1 - shrinkage) * (size - 1)
        wider = 1.0 if count is None else (count + 1) / max(count - free - 2, 1)
        slope = np.zeros((own, 0))
        residual = correlation[:own, :own]
        if num_given:
            slope = np.linalg.solve(correlation[own:, own:], correlation[own:, :own]).T
            residual = residual - slope @ correlation[own:, :own]
        matrix = np.eye(size)
        matrix[:own, :own] = np.sqrt(wider) * np.linalg.cholesky(residual)
        matrix[:own, own:] = slope
        return Gaussian(loc, scale[:, None] * matrix, num_given)

    @staticmethod
    def shrunk(rows: np.ndarray, links: Links, num_given: int = 0) -> "Gaussian":
        """A Gaussian that predicts new rows: widened, and with shrinkage chosen by cross-validation."""
        size, best = rows.shape[1], 0.0
        if size > 1 and links.distinct < ROWS_WITHOUT_SHRINKAGE * size:
            score = np.zeros(len(SHRINKAGES))
            for rest, part in folds(links.labels, LEAVE_ONE_OUT):
                count = links.at(rest).distinct
                fits = (Gaussian.of(rows[rest], num_given, s, count) for s in SHRINKAGES)
                score += [np.sum(fit.log_prob(rows[part])) for fit in fits]
            best = SHRINKAGES[int(np.argmax(score))]
        return Gaussian.of(rows, num_given, best, links.distinct)


def moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The means, standard deviations (1 for constant columns) and correlation matrix of the columns."""
    loc, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(constant(rows, loc, scale), 1.0, scale)
    unit = (rows - loc) / scale
    return loc, scale, unit.T @ unit / len(rows)


def constant(rows: np.ndarray, loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """For each column, whether it is constant up to rounding errors."""
    return (scale <= 1e-10 * np.maximum(np.abs(loc), 1e-300)) | (rows.max(axis=0) == rows.min(axis=0))


def check_full_rank(rows: np.ndarray, names: Sequence[str] = ()) -> None:
    """Reject constant or linearly dependent columns. With fewer rows than columns, linear dependence cannot
    be tested."""
    label = lambda i: repr(names[i]) if names else str(i)
    still = np.flatnonzero(constant(rows, rows.mean(axis=0), rows.std(axis=0)))
    if still.size:
        message = f"column {label(still[0])} is constant, so it has no density: drop it"
        raise ValueError(message + see("no-density"))
    size = rows.shape[1]
    if len(rows) <= size:
        return
    values, vectors = np.linalg.eigh(moments(rows)[2])
    if values[0] < RIDGE:
        weights = np.abs(vectors[:, 0])
        involved = [label(i) for i in np.flatnonzero(weights > 0.05 * weights.max())]
        raise ValueError(
            f"columns {', '.join(involved)} are linearly dependent, so they have no joint density: "
            "drop one of them" + see("no-density")
        )


NEWTON_STEPS = 6  # Newton steps for the normal quantile of a small probability
# Minimum number of rows beyond the last knot, and minimum gain in their log-likelihood, for a Pareto tail.
TAIL_ROWS, TAIL_GAIN = 20, 3.0
HEAVY_SHAPE = 0.25  # ξ above which a column is always mapped, because its fourth moment is infinite
# Range of the shape ξ of a Pareto tail; a Student-t distribution with ν degrees of freedom has ξ = 1/ν.
MIN_SHAPE, MAX_SHAPE = 0.15, 3.0
# A column is given Pareto tails if its most extreme value would occur in a normal sample with at most this
# probability and no Pareto tail was fitted to its rows. These tails begin at FAR_LEVEL standard deviations
# and have the shape FAR_SHAPE of a Cauchy distribution. They cost 0.0005 nats if the column is normal.
FAR_PROBABILITY, FAR_LEVEL, FAR_SHAPE = 0.05, 3.0, 1.0
# Number of rounds of winsorisation for the mean and standard deviation of a column with extreme values.
WINSORISATIONS = 10
FAR_ROW = 6.0  # in standard deviations; if a row lies further out, mixtures of Gaussians are not considered
KNOT_COUNTS = (4, 8, 16, 32, 64, 128)  # candidate numbers of knots, in this order
MIN_ROWS_PER_KNOT = 8  # minimum number of rows per knot
MIN_STANDARD_ERRORS = 2.0  # minimum improvement, in standard errors, that justifies more knots
MIN_STANDARD_ERRORS_FAR = 1.0  # as above, for columns with extreme values, which are not normal
# The gain of a row is clipped to this number of nats, so that an extreme row does not mask the others.
MAX_GAIN = 10.0
MIN_KNOT_DISTANCE = 1e-7  # minimum distance between two knots, in standard deviations
MAX_CHOICE_ROWS = 20_000  # maximum number of rows used to choose the numbers of knots


class Marginals(eqx.Module):
    """Monotone maps u = g(x), one per column: rational-quadratic splines between knots (Gregory & Delbourgo
    1982; Durkan et al. 2019). Beyond the knots they are linear, so tails are normal. A tail with ξ > 0 in
    `tails` is a Pareto tail instead: the probability P(X > x) beyond the last knot x_K decreases like
    (1 + ξ (x − x_K)/β)^(−1/ξ), where β follows from the slope at x_K. A column with bounds a or b is first
    mapped to the real line by log(x − a), −log(b − x), or log (x − a)/(b − x).

    **Arguments:** the knots `x` and `u`, both increasing, and the `slope` of g at the knots, `(d, K)` each;
    the bounds `lower` and `upper`, `(d,)` each, infinite or None if there are none; `tails`, `(d, 2)`, the
    shapes ξ of the lower and the upper tail, 0 for a normal tail, or None if all tails are normal.
    `rf.fit_density` chooses all of these: with x at quantiles of a column and u at the same quantiles of a
    normal distribution, g(x) is nearly normal.

    ```python
    import numpy as np
    import roughflow as rf

    knots = np.array([[0.0, 1.0, 3.0]])
    marginals = rf.tables.Marginals(knots, np.array([[-1.0, 0.0, 1.0]]), np.array([[1.0, 0.8, 0.4]]))
    u, log_slope = marginals.forward(np.array([[0.5], [7.0]]))
    marginals.inverse(u)  # 0.5 and 7 again
    ```
    """

    x: np.ndarray  # double precision, like the standardisation
    u: np.ndarray
    slope: np.ndarray
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None
    tails: np.ndarray | None = None

    def __check_init__(self):
        knots = (self.x, self.u, self.slope)
        if any(is_traced(part) for part in knots):
            return
        if np.ndim(self.x) != 2 or np.shape(self.x)[1] < 2 or len({np.shape(part) for part in knots}) != 1:
            shapes = ", ".join(str(np.shape(part)) for part in knots)
            raise ValueError(f"x, u and slope must have the same shape (d, K) with K ≥ 2, got {shapes}")
        if not (np.all(np.diff(self.x) > 0) and np.all(np.diff(self.u) > 0) and np.all(self.slope > 0)):
            raise ValueError("x and u must increase, and slope must be positive")

    def forward(self, x: Array | np.ndarray) -> tuple[Any, Any]:
        """u = g(x) and log g′(x) for rows `(..., d)`, computed by NumPy in double precision if x is concrete.
        log g′ is −∞ outside the bounds."""
        xp = jnp if is_traced(x) or is_traced(self.x) else np
        x = xp.asarray(x) if xp is jnp else np.asarray(x, np.float64)
        if self.lower is None or self.upper is None:
            return _spline(self, xp, x)
        x, log_stretch = unbounded(xp, x, self.lower, self.upper)
        u, log_slope = _spline(self, xp, x)
        return u, log_slope + log_stretch

    def inverse(self, u: Array) -> Array:
        """x = g⁻¹(u), by solving a quadratic equation between two knots."""
        low, high, inside = _pieces(self, jnp, u, self.u)
        mean = (high.u - low.u) / (high.x - low.x)
        y = jnp.where(inside, u - low.u, 0.5 * (high.u - low.u))
        bend = low.slope + high.slope - 2 * mean
        a = (high.u - low.u) * (mean - low.slope) + y * bend
        b = (high.u - low.u) * low.slope - y * bend
        # This form of the root avoids cancellation if the quadratic is nearly linear.
        s = 2 * mean * y / (b + jnp.sqrt(jnp.maximum(b**2 + 4 * a * mean * y, 0)))
        end = _Knot(*(jnp.where(u < low.u, *pair) for pair in low.beside(high)))
        x = jnp.where(inside, low.x + s * (high.x - low.x), end.x + (u - end.u) / end.slope)
        if self.tails is not None:
            shape, sign, heavy = _pareto(self, jnp, u < low.u, inside)
            level = sign * end.u
            beyond = _from_normal(jnp.where(heavy, sign * u, level), level, end.slope, shape)
            x = jnp.where(heavy, end.x + sign * beyond, x)
        return x if self.lower is None or self.upper is None else _bounded(x, self.lower, self.upper)


# These are functions, because methods of equinox modules are slow to call.


def _spline(maps: Marginals, xp: Any, x: Any) -> tuple[Any, Any]:
    low, high, inside = _pieces(maps, xp, x, maps.x)
    mean = (high.u - low.u) / (high.x - low.x)
    s = xp.where(inside, (x - low.x) / (high.x - low.x), 0.5)
    below = mean + (low.slope + high.slope - 2 * mean) * s * (1 - s)
    between = low.u + (high.u - low.u) * (mean * s**2 + low.slope * s * (1 - s)) / below
    rise = high.slope * s**2 + 2 * mean * s * (1 - s) + low.slope * (1 - s) ** 2
    end = _Knot(*(xp.where(x < low.x, *pair) for pair in low.beside(high)))
    u = xp.where(inside, between, end.u + end.slope * (x - end.x))
    log_slope = xp.log(xp.where(inside, (mean / below) ** 2 * rise, end.slope))
    if maps.tails is None:
        return u, log_slope
    shape, sign, heavy = _pareto(maps, xp, x < low.x, inside)
    tail, log_tail = _to_normal(xp, xp.where(heavy, sign * (x - end.x), 0), sign * end.u, end.slope, shape)
    return xp.where(heavy, sign * tail, u), xp.where(heavy, log_tail, log_slope)


def _pareto(maps: Marginals, xp: Any, below: Any, inside: Any) -> tuple[Any, Any, Any]:
    """For each entry: the shape ξ of the tail on its side (1 if it is not a Pareto tail), the sign of the
    side, and whether the entry lies in a Pareto tail."""
    lower, upper = (xp.broadcast_to(xp.asarray(part), below.shape) for part in np.asarray(maps.tails).T)
    shape = xp.where(below, lower, upper)
    return xp.where(shape > 0, shape, 1), xp.where(below, -1, 1), ~inside & (shape > 0)


def _pieces(maps: Marginals, xp: Any, at: Any, knots: Any) -> tuple["_Knot", "_Knot", Any]:
    """The knots on either side of each entry, and whether the entry lies between two knots."""
    if xp is np:
        columns = [np.searchsorted(own, at[..., j], "right") for j, own in enumerate(knots)]
        place = np.stack(columns, axis=-1)
    else:
        find = lambda own, column: jnp.searchsorted(own, column, side="right")
        place = jax.vmap(find, (0, -1), -1)(jnp.asarray(knots, at.dtype), at)
    low = xp.clip(place - 1, 0, knots.shape[1] - 2)
    column = xp.arange(knots.shape[0])
    cast = lambda part: xp.asarray(part, at.dtype)
    of = lambda where: _Knot(*(cast(part)[column, where] for part in (maps.x, maps.u, maps.slope)))
    inside = (place > 0) & (place < knots.shape[1])
    return of(low), of(low + 1), inside


def _to_normal(xp: Any, beyond: Any, level: Any, slope: Any, shape: Any) -> tuple[Any, Any]:
    """u and log g′(x) at the distance `beyond` past the last knot, where u is `level` and g′ is `slope`.
    u solves log P(X > x) = log Φ(−level) − log(1 + ξ beyond/β)/ξ = log Φ(−u)."""
    log_ndtr, log_normal = _log_ndtr(xp), lambda v: -0.5 * (v**2 + np.log(2 * np.pi))
    start = log_ndtr(-level)
    scale = xp.exp(start - log_normal(level)) / slope
    log_survival = start - xp.log1p(shape * beyond / scale) / shape
    # Newton's method for the inverse of the concave function log Φ(−u), started from its asymptote.
    u = xp.sqrt(xp.maximum(-2 * log_survival - np.log(2 * np.pi), level**2))
    for _ in range(NEWTON_STEPS):
        tail = log_ndtr(-u)
        u = u + (tail - log_survival) * xp.exp(tail - log_normal(u))
    return u, log_ndtr(-u) - log_normal(u) - xp.log(scale + shape * beyond)


def _from_normal(u: Any, level: Any, slope: Any, shape: Any) -> Any:
    """The distance past the last knot at which the map equals u; the inverse of `_to_normal`."""
    log_ndtr = _log_ndtr(jnp)
    start = log_ndtr(-level)
    scale = jnp.exp(start + 0.5 * (level**2 + np.log(2 * np.pi))) / slope
    return scale / shape * jnp.expm1(shape * (start - log_ndtr(-u)))


def _log_ndtr(xp: Any) -> Any:
    return scipy.special.log_ndtr if xp is np else jax.scipy.special.log_ndtr


def unbounded(xp: Any, x: Any, lower: np.ndarray, upper: np.ndarray) -> tuple[Any, Any]:
    """Map x from the interval between its bounds to the real line; return the value and the log of the slope.
    Outside the bounds, the slope is zero and the value is a placeholder."""
    lower, upper = np.broadcast_to(lower, x.shape), np.broadcast_to(upper, x.shape)
    above, below = np.isfinite(lower), np.isfinite(upper)
    out = (x <= lower) | (x >= upper)
    # The branch that is not selected must also have finite derivatives.
    left = xp.where(above & ~out, x - np.where(above, lower, 0), 1)
    right = xp.where(below & ~out, np.where(below, upper, 0) - x, 1)
    moved = xp.where(above | below, xp.log(left) - xp.log(right), x)
    log_slope = np.log(np.where(above & below, upper - lower, 1)) - xp.log(left) - xp.log(right)
    return moved, xp.where(out, -np.inf, xp.where(above | below, log_slope, 0))


def _bounded(x: Array, lower: np.ndarray, upper: np.ndarray) -> Array:
    """Map x from the real line to the interval between the bounds; the inverse of `unbounded`."""
    lower, upper = np.broadcast_to(lower, x.shape), np.broadcast_to(upper, x.shape)
    above, below = np.isfinite(lower), np.isfinite(upper)
    low, high = (jnp.asarray(np.where(np.isfinite(b), b, 0), x.dtype) for b in (lower, upper))
    one_sided = jnp.where(above, low + jnp.exp(x), high - jnp.exp(-x))
    between = low + (high - low) * jax.nn.sigmoid(x)
    return jnp.where(above & below, between, jnp.where(above | below, one_sided, x))


class _Knot(NamedTuple):
    x: Any
    u: Any
    slope: Any
    tails: Any = None  # ξ of the lower and the upper tail

    def beside(self, other: "_Knot") -> list[tuple[Any, Any]]:
        return [(self.x, other.x), (self.u, other.u), (self.slope, other.slope)]


def fit_marginals(
    rows: np.ndarray,
    own: int,
    min_gain: float,
    bounds: tuple[np.ndarray, np.ndarray] | None = None,
    links: Links | None = None,
    far: bool = True,
) -> Marginals | None:
    """Fit maps to the first `own` columns, with numbers of knots chosen by cross-validation; return None if
    no column needs a map.

    Maps are linear if splines gain less than `min_gain` nats per column over a Gaussian in the median row;
    the median prevents a few outliers from deciding. Columns with heavy tails (ξ > 1/4) keep their splines.
    With `far` and infinite `min_gain`, linear maps of columns with extreme values have Pareto tails.
    """
    links = Links.of(rows) if links is None else links
    if bounds is not None:
        moved = unbounded(np, rows[:, :own], *bounds)[0]
        rows = np.concatenate([moved, rows[:, own:]], axis=1)
    counts = [0] * own
    if min_gain < np.inf:
        some = np.random.default_rng(0).permutation(len(rows))[:MAX_CHOICE_ROWS]
        some = slice(None) if len(rows) <= MAX_CHOICE_ROWS else some
        counts = _counts(rows[some], own, min_gain, links if isinstance(some, slice) else links.at(some))
    # In a flow, Pareto tails would make relations between columns nonlinear in the tails.
    maps = _together(rows, counts, far=far and bool(np.isinf(min_gain)))
    if bounds is not None:
        return Marginals(maps.x, maps.u, maps.slope, *bounds, maps.tails)
    return maps if any(counts) or maps.tails is not None else None


def _counts(rows: np.ndarray, own: int, min_gain: float, links: Links) -> list[int]:
    """The number of knots of each column, 0 for a linear map."""
    counts = [_count(column, links) for column in rows[:, :own].T]
    if not any(counts) or min_gain == -np.inf:
        return counts
    parts = folds(links.labels)
    gains = np.concatenate([_gain(rows[rest], rows[part], counts) for rest, part in parts])
    if np.median(gains) >= min_gain * own:
        return counts
    chosen = zip(rows.T, counts, strict=False)
    return [count if count and _is_heavy(column, count) else 0 for column, count in chosen]


def _together(rows: np.ndarray, counts: list[int], far: bool = True) -> Marginals:
    """The maps of all columns, padded to one number of knots; without `far`, linear maps have no Pareto
    tails."""
    columns = [
        _knots(column, count) if count or far else _line(column.mean(), column.std() or 1.0)
        for column, count in zip(rows.T, counts, strict=False)
    ]
    total = max(len(column.x) for column in columns)
    padded = [_padded(column, total) for column in columns]
    knots = (np.stack([getattr(c, name) for c in padded]) for name in ("x", "u", "slope"))
    tails = np.stack([column.tails for column in columns])
    return Marginals(*knots, tails=tails if tails.any() else None)


def _knots(column: np.ndarray, count: int) -> _Knot:
    """The map of a column: a spline with `count` knots at quantiles, or a linear map if `count` is 0."""
    if count == 0:
        return _linear(column)
    knots = _at_quantiles(column, count)
    return _with_far_tails(knots) if _is_far(column) else knots


def _at_quantiles(column: np.ndarray, count: int) -> _Knot:
    """Knots at quantiles, with tails fitted to the rows beyond the last knots."""
    scale = column.std() or 1.0
    levels = np.arange(1, count + 1) / (count + 1)
    x = np.quantile(column, levels, method="hazen")
    # Repeated values give equal quantiles, which share one knot.
    apart = np.flatnonzero(np.diff(x, prepend=-np.inf) > MIN_KNOT_DISTANCE * scale)
    if len(apart) < 2:
        return _line(column.mean(), scale)
    x, u = x[apart], scipy.special.ndtri(levels[apart])
    width, mean = np.diff(x), np.diff(u) / np.diff(x)
    slope = np.empty(len(x))
    # Weighted geometric mean of the slopes on both sides: monotone and smooth.
    slope[1:-1] = np.exp(
        (width[1:] * np.log(mean[:-1]) + width[:-1] * np.log(mean[1:])) / (width[1:] + width[:-1])
    )
    slope[0], low = _tail(-u[0], x[0] - column, mean[0])
    slope[-1], high = _tail(u[-1], column - x[-1], mean[-1])
    return _Knot(x, u, slope, np.array([low, high]))


def _is_far(column: np.ndarray) -> bool:
    """Whether the column has values that are very unlikely in a normal sample."""
    extreme = np.max(np.abs(column - column.mean())) / (column.std() or 1.0)
    return bool(2 * len(column) * scipy.special.ndtr(-extreme) < FAR_PROBABILITY)


def has_far_rows(rows: np.ndarray) -> bool:
    """Whether a row is so extreme in a column that Gaussians without Pareto tails cannot describe it."""
    bulks = [(column, *_bulk(column)) for column in rows.T]
    return any(np.max(np.abs(column - loc)) > FAR_ROW * scale for column, loc, scale in bulks)


def _is_heavy(column: np.ndarray, count: int) -> bool:
    return bool(_at_quantiles(column, count).tails.max() > HEAVY_SHAPE)


def _linear(column: np.ndarray) -> _Knot:
    """The linear map that standardises a column. If the column has extreme values, the mean and standard
    deviation are those of its bulk, and the map has Pareto tails."""
    far = _is_far(column)
    line = _line(*_bulk(column)) if far else _line(column.mean(), column.std() or 1.0)
    return _with_far_tails(line) if far else line


def _bulk(column: np.ndarray) -> tuple[float, float]:
    """The winsorised mean and standard deviation of a column: values more than FAR_LEVEL standard deviations
    from the mean are clipped to that distance."""
    loc, scale = column.mean(), column.std() or 1.0
    for _ in range(WINSORISATIONS):
        bulk = np.clip(column, loc - FAR_LEVEL * scale, loc + FAR_LEVEL * scale)
        loc, scale = bulk.mean(), bulk.std() or scale
    return float(loc), float(scale)


def _line(loc: float, scale: float) -> _Knot:
    u = np.array([-1.0, 1.0])
    return _Knot(loc + scale * u, u, np.full(2, 1 / scale), np.zeros(2))


def _with_far_tails(knots: _Knot) -> _Knot:
    """The knots with normal tails replaced by Pareto tails beyond FAR_LEVEL."""
    x, u, slope = knots.x, knots.u, knots.slope
    low, high = (int(tail == 0) for tail in knots.tails)
    ends = [(x[0] - (u[0] + FAR_LEVEL) / slope[0], -FAR_LEVEL, slope[0])] * low
    other = [(x[-1] + (FAR_LEVEL - u[-1]) / slope[-1], FAR_LEVEL, slope[-1])] * high
    x, u, slope = np.array([*ends, *zip(x, u, slope, strict=True), *other]).T
    return _Knot(x, u, slope, np.where(knots.tails == 0, FAR_SHAPE, knots.tails))


def _tail(level: float, beyond: np.ndarray, otherwise: float) -> tuple[float, float]:
    """The slope at the last knot and the shape ξ of the tail. For a normal tail ξ is 0, and the slope matches
    the mean excess over the knot to that of a normal distribution over `level`."""
    beyond = beyond[beyond > 0]
    if not beyond.size:
        return otherwise, 0.0
    log_share = scipy.special.log_ndtr(-level)
    slope = float((np.exp(_log_density(level) - log_share) - level) / beyond.mean())
    if len(beyond) < TAIL_ROWS:
        return slope, 0.0
    normal = np.sum(_log_density(level + slope * beyond) - log_share + np.log(slope))
    shape, scale, pareto = _pareto_fit(beyond)
    if shape < MIN_SHAPE or pareto < normal + TAIL_GAIN:
        return slope, 0.0
    return float(np.exp(log_share - _log_density(level)) / scale), min(shape, MAX_SHAPE)


def _pareto_fit(beyond: np.ndarray) -> tuple[float, float, float]:
    """Fit a generalised Pareto distribution to positive values, by maximum likelihood over θ = ξ/β (Grimshaw
    1993); return its shape, its scale and the log-likelihood."""
    theta = np.logspace(-3, 4, 141) / np.median(beyond)
    shape = np.mean(np.log1p(theta[:, None] * beyond), axis=1)
    likelihood = -len(beyond) * (np.log(shape / theta) + shape + 1)
    best = int(np.argmax(likelihood))
    return float(shape[best]), float(shape[best] / theta[best]), float(likelihood[best])


def _padded(knots: _Knot, total: int) -> _Knot:
    """The same map with `total` knots: the additional ones lie on the spline, within its widest piece."""
    missing = total - len(knots.x)
    if not missing:
        return knots
    place = int(np.argmax(np.diff(knots.u)))
    x = np.linspace(knots.x[place], knots.x[place + 1], missing + 2)[1:-1]
    u, log_slope = Marginals(knots.x[None], knots.u[None], knots.slope[None]).forward(x[:, None])
    into = lambda own, new: np.insert(own, place + 1, new)
    slope = into(knots.slope, np.exp(log_slope[:, 0]))
    return _Knot(into(knots.x, x), into(knots.u, u[:, 0]), slope, knots.tails)


# ------------------------------------------------------------------------------------------------- choice


def _count(column: np.ndarray, links: Links) -> int:
    """The number of knots of a column, 0 for a linear map. More knots are used only if they improve the
    cross-validated log-likelihood significantly."""
    parts = folds(links.labels)

    def score(count: int) -> np.ndarray:
        values = np.empty(len(column))
        for rest, part in parts:
            values[part] = _log_normal(column[rest], column[part], count)
        return values

    chosen, best = 0, score(0)
    min_errors = MIN_STANDARD_ERRORS_FAR if _is_far(column) else MIN_STANDARD_ERRORS
    for count in KNOT_COUNTS:
        if count * MIN_ROWS_PER_KNOT > links.distinct:
            break
        found = score(count)
        gain, error = mean_and_error(np.clip(found - best, -MAX_GAIN, MAX_GAIN), links.labels)
        if gain > min_errors * error:
            chosen, best = count, found
    return chosen


def _log_normal(train: np.ndarray, test: np.ndarray, count: int) -> np.ndarray:
    u, log_slope = _together(train[:, None], [count]).forward(test[:, None])
    return (_log_density(u) + log_slope)[:, 0]


def _log_density(u: Any) -> Any:
    return -0.5 * (u**2 + np.log(2 * np.pi))


def _gain(train: np.ndarray, test: np.ndarray, counts: list[int]) -> np.ndarray:
    """For each row of `test`, the gain in log-density from the maps over a Gaussian of the raw columns."""
    marginals, own = _together(train, counts), len(counts)

    def mapped(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, log_slope = marginals.forward(rows[:, :own])
        return np.concatenate([u, rows[:, own:]], axis=1), log_slope.sum(axis=1)

    (u, _), (v, log_slope) = mapped(train), mapped(test)
    return Gaussian.of(u).log_prob(v) + log_slope - Gaussian.of(train).log_prob(test)
