"""Regression: the distribution of one column given others, estimated by an ensemble of conditional flows."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
import scipy
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import check_count, check_key, check_number, warn
from ..faq import see
from ..train import Links, TrainingOptions, mean_and_error, rng_of
from ._arrays import frame_names, is_frame, joined, real_numbers
from ._columns import Relations
from ._families import Family
from ._fit_density import fit_density
from ._fitted_density import FittedDensity
from ._stages import FlowOptions, Sizes
from ._standardised import Standardised

LARGE_TABLE = 5000  # minimum number of rows for which one member is enough
MEMBERS = 4  # members of the ensemble for smaller tables
WIDTH, BATCH_ROWS = 64, 128  # width of the network, and rows per step
MIN_STEPS, MAX_STEPS = 4000, 10_000
VALIDATION_PARTS = 10  # number of parts into which rows are split; each member validates on a different one
PRIOR_ROWS = 10.0  # weight of the prior (a base of variance one), in rows
MIN_VARIANCE = 0.1  # minimum variance of the base
# Distances between two medians are capped at this value, in units of the base, so that a few rows do not
# dominate.
MAX_APART = 4.0
BASE_POINTS = np.linspace(-5.0, 5.0, 51)  # points at which the maps are tabulated
MIN_LEVEL = 1e-5  # lowest quantile level
MIN_NOISE = 0.002  # noise added to y if it is a linear function of x, in standard deviations of y


class Regression(eqx.Module):
    """The density p(y | x) of one column y, an average of conditional flows, from `rf.tables.fit_regression`.

    Each member is a flow without noise, so y is an increasing function T(z; x) of z ~ N(0, s²). Its
    distribution function Φ(T⁻¹(y; x)/s) and its quantiles T(s Φ⁻¹(α); x) need no samples. s² is the mean of
    z² over the validation rows of all members, minus the variance between the members' predictions, because
    averaging adds the latter. If the flows are overconfident on unseen rows, s > 1.

    **Arguments:** `members`, conditional densities `rf.tables.Standardised`; `scale`, s.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    x = np.random.default_rng(0).uniform(-1, 1, size=(60, 1))
    y = x[:, 0] + 0.1 * np.random.default_rng(1).normal(size=60)
    regression = rf.tables.fit_regression(y, x, key=jax.random.key(0))
    prediction = regression.conditional(x[:3])
    prediction.mean.shape, prediction.std.shape  # (3,), (3,)
    prediction.quantile([0.05, 0.95]).shape  # (2, 3)
    prediction.log_prob(y[:3]).shape, prediction.cdf(y[:3]).shape  # (3,), (3,)
    ```
    """

    members: tuple[Standardised, ...]
    scale: np.ndarray

    def __check_init__(self):
        for member in self.members:
            noisy = isinstance(member, Standardised) and member.flow.noise_dimension > 0
            if not isinstance(member, Standardised) or not member.num_given or noisy or _own(member) != 1:
                raise ValueError(
                    "a regression needs flows without noise, for one column given others: "
                    "fit_density(y, given=x)"
                )

    def conditional(self, given: Any) -> "Prediction":
        """The distribution of y given each row x in `given`."""
        return Prediction(self, np.asarray(self.members[0].given_rows(given), float))


def _own(member: Standardised) -> int:
    return member.num_columns - member.num_given


@dataclass(frozen=True, eq=False)
class Prediction:
    """The distribution of y given rows x, `(n, k)`, from `Regression.conditional`."""

    regression: Regression
    given: np.ndarray

    @functools.cached_property
    def _maps(self) -> np.ndarray:
        """y = T(s z; x) of each member at `BASE_POINTS`, `(members, points, n)`."""
        return np.stack([self._mapped(member, BASE_POINTS) for member in self.regression.members])

    def _mapped(self, member: Standardised, points: np.ndarray) -> np.ndarray:
        z = self.regression.scale * np.broadcast_to(points[:, None, None], (len(points), len(self.given), 1))
        rows = member.push_forward(z, given=self.given, key=jax.random.key(0))[..., 0]
        # The running maximum keeps the map monotone in spite of solver errors.
        return np.maximum.accumulate(np.asarray(rows, float), axis=0)

    @functools.cached_property
    def mean(self) -> np.ndarray:
        """E[y | x], `(n,)`."""
        return np.mean(_moment(self._maps), axis=0)

    @functools.cached_property
    def std(self) -> np.ndarray:
        """The standard deviation of y given x, `(n,)`."""
        centred = self._maps - self.mean
        return np.sqrt(np.mean(_moment(centred**2), axis=0))

    def quantile(self, levels: ArrayLike) -> np.ndarray:
        """Quantiles of y given x at levels between 1e-5 and 1 − 1e-5: `(levels, n)`, or `(n,)` for a single
        level."""
        wanted = np.asarray(levels, float)
        if wanted.ndim > 1 or not np.all((wanted >= MIN_LEVEL) & (wanted <= 1 - MIN_LEVEL)):
            raise ValueError(f"levels must lie between {MIN_LEVEL:g} and {1 - MIN_LEVEL:g}, got {levels!r}")
        flat, members = np.atleast_1d(wanted), self.regression.members
        if len(members) == 1:
            found = self._mapped(members[0], scipy.special.ndtri(flat))
        else:
            found = np.stack([_quantiles(maps, flat) for maps in np.moveaxis(self._maps, 2, 0)], axis=1)
        return found if wanted.ndim else found[0]

    def interval(self, coverage: float = 0.9) -> np.ndarray:
        """The lower and upper ends of central intervals, `(2, n)`."""
        check_number("coverage", coverage, least=0, below=1)
        return self.quantile([0.5 - coverage / 2, 0.5 + coverage / 2])

    def log_prob(self, y: ArrayLike) -> np.ndarray:
        """log p(y | x) for one value y per row, `(n,)`."""
        parts = [log_prob for _, log_prob in self._inverses(y)]
        return scipy.special.logsumexp(parts, axis=0) - np.log(len(parts))

    def cdf(self, y: ArrayLike) -> np.ndarray:
        """P(Y ≤ y | x) for one value y per row, `(n,)`; uniform on [0, 1] if rows follow the modelled
        distribution."""
        return np.mean([scipy.special.ndtr(u) for u, _ in self._inverses(y)], axis=0)

    def sample(self, count: int, *, key: PRNGKeyArray) -> np.ndarray:
        """Draw `count` values of y given each row, `(count, n)`."""
        rng = rng_of(check_key(key), 0)
        shape = (check_count("count", count), len(self.given))
        z = self.regression.scale * rng.normal(size=(*shape, 1))
        members = self.regression.members
        draws = [member.push_forward(z, given=self.given, key=key)[..., 0] for member in members]
        return np.choose(rng.integers(len(members), size=shape), np.asarray(draws, float))

    def _inverses(self, y: ArrayLike) -> list[tuple[np.ndarray, np.ndarray]]:
        """z/s and log p(y | x) under each member."""
        y, scale = np.asarray(real_numbers("y", y), float), self.regression.scale
        if y.shape != (len(self.given),):
            raise ValueError(f"y must have one value for each of {len(self.given)} rows, got shape {y.shape}")
        parts = []
        for member in self.regression.members:
            z, log_slope = member.pull_back(y[:, None], given=self.given, key=jax.random.key(0))
            u = np.asarray(z[:, 0], float) / scale
            parts.append((u, _log_normal(u) + np.asarray(log_slope, float) - np.log(scale)))
        return parts


def _log_normal(u: np.ndarray) -> np.ndarray:
    return -0.5 * (u**2 + np.log(2 * np.pi))


def _moment(values: np.ndarray) -> np.ndarray:
    """The mean over z ~ N(0, 1) of values at `BASE_POINTS`, `(members, points, n)`."""
    weights = np.exp(_log_normal(BASE_POINTS))
    return np.einsum("p,mpn->mn", weights / weights.sum(), values)


def _quantiles(maps: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Quantiles, at one x, of the average of the members' distributions, from their maps `(members,
    points)`."""
    y = np.sort(maps, axis=None)
    cdf = np.mean([scipy.special.ndtr(np.interp(y, own, BASE_POINTS)) for own in maps], axis=0)
    return np.interp(levels, cdf, y)


def fit_regression(
    y: ArrayLike,
    given: ArrayLike,
    *,
    key: PRNGKeyArray,
    members: int | None = None,
    family: Family | None = None,
    steps: int | None = None,
    progress: bool = True,
    flow: FlowOptions | None = None,
    training: TrainingOptions | None = None,
) -> Regression:
    """Fit the distribution of y given the columns x of each row: an `rf.tables.Regression`.

    Each member of an ensemble is a conditional flow (`rf.fit_density(y, given=x)`) with its own tenth of the
    rows for validation. A Gaussian whose mean is linear in x is returned instead if it is at least as good on
    the validation rows, or if there are too few rows for a flow.

    **Arguments:**

    - `y`: one value for each row; `given`: the rows x, an array or a DataFrame of numbers.
    - `members`: size of the ensemble; by default 4, or 1 for 5,000 or more rows.
    - `family`, `steps`, `progress`, `flow`, `training`: as in `rf.fit_density`, but the default is a network
      of width 64, batches of 128 rows, 4,000 to 10,000 steps and no likelihood stage.

    ```python
    import jax
    import numpy as np
    import roughflow as rf

    x = np.random.default_rng(0).uniform(-1, 1, size=(60, 2))
    y = x @ np.array([1.0, 2.0]) + 0.1 * np.random.default_rng(1).normal(size=60)
    regression = rf.tables.fit_regression(y, x, key=jax.random.key(0))
    regression.conditional(x[:3]).interval(0.9)
    ```
    """
    target = np.asarray(real_numbers("y", y), float)
    if target.ndim != 1:
        raise ValueError(f"y must have one value for each row, got shape {target.shape}{see('shapes')}")
    if family not in (None, "gaussian", "marginals", "flow"):
        raise ValueError(f"family must be 'gaussian', 'marginals', 'flow' or None, got {family!r}")
    rows, num_given = joined("y", target[:, None], given)
    rows[:, 0] = _with_spread(rows)
    links = Links.of(rows)
    if members is None:
        members = 1 if links.distinct >= LARGE_TABLE else MEMBERS
    check_count("members", members)
    sizes = Sizes(links.distinct, 1, num_given, links.distinct)
    # With the names of a DataFrame, `Regression.conditional` finds columns by name.
    names = (_unused_name("y", given), *frame_names("given", given)) if is_frame(given) else ()
    options: dict[str, Any] = dict(columns=names, steps=steps, progress=progress)
    if family in ("gaussian", "marginals") or (sizes.tiny and family is None and steps is None):
        fitted = fit_density(rows[:, :1], given=rows[:, 1:], key=key, family=family, **options)
        return Regression((fitted.model,), np.array(1.0))
    options |= _flow_settings(flow or FlowOptions(), training or TrainingOptions(), links.distinct, steps)
    order = rng_of(check_key(key), 0).permutation(links.distinct)
    parts = np.array_split(order, max(VALIDATION_PARTS, members))
    fits = []
    for i, part in enumerate(parts[:members]):
        out = np.isin(links.copies, part)
        (train, x), (held_out, x_out) = (np.split(rows[where], [1], axis=1) for where in (~out, out))
        own = {"key": jax.random.fold_in(key, i), "validation": (held_out, x_out) if len(x_out) else 0.0}
        fits.append(fit_density(train, given=x, family="flow", **own, **options))
        if fits[-1].interrupted:
            raise KeyboardInterrupt
    if family is None and not _is_better(fits):
        own = {"columns": names, "family": "gaussian", "progress": False}
        fitted = fit_density(rows[:, :1], given=rows[:, 1:], key=key, **own)
        return Regression((fitted.model,), np.array(1.0))
    return _ensemble(fits)


def _unused_name(name: str, frame: Any) -> str:
    """The name, with underscores before it if a column of the DataFrame has the same name."""
    return name if name not in frame_names("given", frame) else _unused_name(f"_{name}", frame)


def _flow_settings(
    flow: FlowOptions, training: TrainingOptions, rows: int, steps: int | None
) -> dict[str, Any]:
    """Options with the defaults for regression: a smaller network and smaller batches than for a density of
    many columns."""
    likelihood_steps = 0 if flow.likelihood_steps is None else flow.likelihood_steps
    return {
        "flow": replace(flow, width=flow.width or WIDTH, likelihood_steps=likelihood_steps),
        "training": training.with_defaults({"batch_size": BATCH_ROWS}),
        "steps": min(MAX_STEPS, max(MIN_STEPS, 4 * rows)) if steps is None else steps,
    }


def _with_spread(rows: np.ndarray) -> np.ndarray:
    """y, with noise added if y is a linear function of the given columns, because y then has no density."""
    y = rows[:, 0]
    if np.ptp(y) == 0:
        raise ValueError(f"y is {y[0]:g} in all rows: there is nothing to predict{see('no-density')}")
    if Relations.of(rows, 1) is None:
        return y
    message = f"noise of {MIN_NOISE:.1%} of its standard deviation is added"
    warn(f"y is a linear function of the given columns: {message}")
    return y + MIN_NOISE * y.std() * np.random.default_rng(0).normal(size=len(y))


def _ensemble(fits: Sequence[FittedDensity]) -> Regression:
    """Combine the members, and compute the scale of their base from their validation rows.

    If z has variance v on these rows and two members differ by d, the average of m members has an error of
    variance v − (m − 1)/m d²/2, of which (m − 1)/m d²/2 is already in the spread of the members."""
    size = len(fits)
    z = np.concatenate([_inverse(fitted)[0] for fitted in fits])
    apart = np.concatenate([_apart(fits, i) for i in range(size)])
    variance = _variance(z**2 - (size - 1) / size * apart)
    return Regression(tuple(fitted.model for fitted in fits), np.sqrt(max(variance, MIN_VARIANCE)))


def _variance(squares: np.ndarray) -> float:
    return (PRIOR_ROWS + squares.sum()) / (PRIOR_ROWS + len(squares))


def _validation(fitted: FittedDensity) -> list[np.ndarray]:
    """y and the given columns of the validation rows."""
    assert fitted.held_out is not None
    return np.split(fitted.held_out.rows, [1], axis=1)


def _inverse(fitted: FittedDensity) -> tuple[np.ndarray, np.ndarray]:
    """z for the validation rows of a member, and log |∂z/∂y|."""
    y, given = _validation(fitted)
    z, log_slope = fitted.model.pull_back(y, given=given, key=jax.random.key(0))
    return np.asarray(z[:, 0], float), np.asarray(log_slope, float)


def _apart(fits: Sequence[FittedDensity], i: int) -> np.ndarray:
    """For each validation row of member i, the mean square of its z at the medians of the other members."""
    _, given = _validation(fits[i])
    squares = [np.zeros(len(given))]
    for other in (*fits[:i], *fits[i + 1 :]):
        median = other.model.push_forward(np.zeros((len(given), 1)), given=given, key=jax.random.key(0))
        z, _ = fits[i].model.pull_back(median, given=given, key=jax.random.key(0))
        squares.append(np.minimum(np.asarray(z[:, 0], float) ** 2, MAX_APART**2))
    return np.sum(squares, axis=0) / max(1, len(fits) - 1)


def _is_better(fits: Sequence[FittedDensity]) -> bool:
    """Whether the members predict their validation rows better than the Gaussian."""
    parts = [_inverse(fitted) for fitted in fits]
    scale = np.sqrt(_variance(np.concatenate([z for z, _ in parts]) ** 2))
    gains = []
    for fitted, (z, log_slope) in zip(fits, parts, strict=True):
        assert fitted.held_out is not None
        own = _log_normal(z / scale) + log_slope - np.log(scale)
        gains.append(own - fitted.held_out.gaussian.log_prob(fitted.held_out.rows))
    values = np.concatenate(gains)
    return len(values) == 0 or mean_and_error(values, np.arange(len(values)))[0] > 0
