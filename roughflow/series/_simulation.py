"""Simulation of transitions (exact if the distribution has a closed form, otherwise in linearised steps) and
of forecasts (paths after the end of a series); residuals and their tests."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import warn
from .._programs import jit
from ..faq import see
from ..sde import AbstractSDE
from ..transition import AbstractCoordinates, Effort, Ends, Transition, in_chunks, keys_of
from .models import AbstractDistribution, AbstractNamedSDE, Normal, Transformed, exact_transition, linear_step

FIRST_STEPS, MAX_STEPS = 2, 1024  # steps per transition
PILOT_PATHS = 8192  # minimum number of paths to decide whether to halve the steps
SIGNIFICANCE = 0.001  # significance level of the test that decides whether to halve the steps
MAX_FORECAST_SIZE = 2e8  # maximum number of values in a forecast; they take 1.6 GB


def draw(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    x: Array,
    time: Array,
    dt: Array,
    num_steps: Array,
    key: PRNGKeyArray,
) -> Array:
    """Draw the state `(d,)` a time dt after x; NaN if the path leaves the state space."""
    known = exact_transition(sde, x, dt)
    if known is not None:
        return known.sample(key)
    h = dt / num_steps

    def step(i: Array, x: Array) -> Array:
        new = short_transition(sde, coordinates, x, time + i * h, h).sample(jax.random.fold_in(key, i))
        return jnp.where(coordinates.contains(new), new, jnp.nan)

    return jax.lax.fori_loop(0, num_steps, step, x)


def short_transition(
    sde: AbstractSDE, coordinates: AbstractCoordinates, x: Array, time: Array, dt: Array
) -> AbstractDistribution:
    """The distribution of the state a short time dt after x.

    Local linearisation (Ozaki 1992, Shoji & Ozaki 1998): in coordinates, the linear SDE with noise σ(y) and
    drift f(y) + Df(y)(Y − y) + (∂f/∂t + ½ Σⱼ D²f(y)[σⱼ, σⱼ]) t. A step is stable for stiff SDEs and exact for
    linear SDEs. Otherwise it is of first order in dt, or second if the noise is additive.
    """
    own = sde.short_transition(x, dt) if isinstance(sde, AbstractNamedSDE) else None
    if own is not None:
        return own
    y = coordinates.from_state(x)
    fields = Ends(sde, coordinates, Transition(y, y, time, dt), Effort(), None).fields
    noise = fields(time, y)[1]

    def drift(t: Array, y: Array) -> Array:
        """The Itô drift, including ½ Σⱼ Dσⱼ σⱼ."""
        value, noise = fields(t, y)
        along = lambda j: jax.jvp(lambda y: fields(t, y)[1][:, j], (y,), (noise[:, j],))[1]
        return value + 0.5 * sum(along(j) for j in range(noise.shape[1]))

    def second(v: Array) -> Array:
        first = lambda y: jax.jvp(lambda y: drift(time, y), (y,), (v,))[1]
        return jax.jvp(first, (y,), (v,))[1]

    value, later = jax.jvp(lambda t: drift(t, y), (time,), (jnp.ones_like(time),))
    later = later + 0.5 * jnp.sum(jax.vmap(second, in_axes=1)(noise), axis=0)
    rate = jax.jacfwd(lambda y: drift(time, y))(y)
    # If paths diverge within one step, linearisation is invalid; the slope is therefore clipped.
    growth = jnp.max(jnp.diag(rate) + jnp.sum(jnp.abs(rate), axis=1) - jnp.abs(jnp.diag(rate)))
    rate = rate - jnp.maximum(growth - 1 / dt, 0) * jnp.eye(y.size)
    mean, covariance = linear_step(rate, value, later, noise @ noise.T, dt)
    return Transformed(coordinates, Normal(y + mean, covariance))


def is_known(sde: AbstractSDE, x: Array) -> bool:
    """Whether transitions from a state x `(d,)` have a closed form."""
    return eqx.filter_eval_shape(exact_transition, sde, x, jnp.ones((), x.dtype)) is not None


def refined(run: Callable[[Array], Any], change: Callable[[Any, Any], float], limit: float) -> Any:
    """`run(num_steps)`, with steps halved until the resulting probabilities change by less than `limit`.

    Warns if 1024 steps are not enough.
    """
    steps, new, moved = FIRST_STEPS, run(jnp.asarray(FIRST_STEPS)), np.inf
    while steps < MAX_STEPS:
        steps, old = 2 * steps, new
        new = run(jnp.asarray(steps))
        moved = change(old, new)
        if moved < limit:
            return new
    warn(
        f"simulated probabilities still change by {moved:.2g} at {steps} steps per transition: the result is "
        f"unreliable{see('long-transitions')}"
    )
    return new


def warn_of_exits(exits: int, count: int) -> None:
    """Warn about paths that left the state space."""
    if exits:
        warn(
            f"{exits} of {count} simulated paths left the state space and are NaN from then on: the SDE "
            f"reaches its boundary{see('long-transitions')}"
        )


def forecast(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    start: Array,
    times: Array,
    key: PRNGKeyArray,
    each: bool = False,
) -> np.ndarray:
    """Simulate paths `(K, T, d)` from states `(K, d)` at times[0] to the other times.

    Transitions are exact, or use steps so short that halving them does not change the distribution. With
    `each`, every path has its own SDE: all arrays in `sde` have a leading axis K.
    """
    rows = lambda places: jax.tree.map(lambda a: a[places] if each and eqx.is_array(a) else a, sde)
    if is_known(rows(0), start[0]):
        paths = _paths(sde, coordinates, start, times, jnp.asarray(1), key, each)
    else:
        # A Kolmogorov–Smirnov test for each time and component.
        tests = (len(times) - 1) * start.shape[1]
        count = max(len(start), min(PILOT_PATHS, int(MAX_FORECAST_SIZE / tests)))
        places = jnp.arange(count) % len(start)
        many = (rows(places), coordinates, start[places], times)
        run = lambda num_steps: np.asarray(_paths(*many, num_steps, key, each))
        limit = np.sqrt(-np.log(0.5 * SIGNIFICANCE / tests) / count)
        paths = refined(run, _distance, limit)[: len(start)]
    warn_of_exits(int(np.isnan(paths[:, -1]).any(axis=-1).sum()), len(paths))
    return np.asarray(paths)


def check_memory(count: float) -> None:
    """Raise an error if a forecast would not fit in memory."""
    if count > MAX_FORECAST_SIZE:
        raise ValueError(
            f"the forecast would have {count:.2g} values, more than {MAX_FORECAST_SIZE:.2g}: "
            "reduce num_paths or the number of times"
        )


@functools.partial(jit, level=1)
def _paths(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    start: Array,
    times: Array,
    num_steps: Array,
    key: PRNGKeyArray,
    each: bool,
) -> Array:
    def path(sde: AbstractSDE, start: Array, key: PRNGKeyArray) -> Array:
        def step(x: Array, now: tuple[Array, Array, PRNGKeyArray]) -> tuple[Array, Array]:
            new = draw(sde, coordinates, x, *now[:2], num_steps, now[2])
            return new, new

        keys = jax.random.split(key, len(times) - 1)
        return jax.lax.scan(step, start, (times[:-1], jnp.diff(times), keys))[1]

    axes = (eqx.if_array(0) if each else None, 0, 0)
    return eqx.filter_vmap(path, in_axes=axes)(sde, start, jax.random.split(key, len(start)))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest Kolmogorov distance between the marginals of two sets of paths `(K, T, d)`."""
    columns = zip(a.reshape(len(a), -1).T, b.reshape(len(b), -1).T, strict=True)
    # All paths that left the state space are assigned the same extra value.
    return max(float(scipy.stats.ks_2samp(_filled(x), _filled(y)).statistic) for x, y in columns)


def _filled(column: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(column), -np.inf, column)


DRAWS_PER_TRANSITION = 1024  # simulated end points per transition whose distribution has no closed form
LIMIT = 0.015  # acceptable root mean square change of residuals when steps are halved
TINY = 1e-15  # keeps residuals away from 0 and 1
CHUNK = 256  # number of transitions simulated at a time
LAGS, POLYNOMIALS = 20, 4  # maximum number of lags, and number of Legendre polynomials
# Tests ignore directions with a smaller variance. Without estimated parameters, all variances are 1.
LEAST_VARIANCE = 0.1


class Residuals(eqx.Module):
    """Generalised residuals of a series, with tests.

    `uniform` `(N,)` is P(X ≤ x | earlier values), independent and uniform under the model (Rosenblatt 1952).
    `uniformity` is the p-value of Neyman's smooth test (1937) with four Legendre polynomials, and `ljung_box`
    the p-value of the Ljung–Box test (1978) for autocorrelation at up to 20 lags. Both tests account for the
    estimation of the parameters through the scores of the fit. With measurement noise there are no scores, so
    the tests are conservative.

    ```python
    import jax, numpy as np
    import roughflow as rf

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12, x, key=jax.random.key(0))
    result.residuals(key=jax.random.key(1)).uniformity
    ```
    """

    uniform: np.ndarray
    ljung_box: float
    uniformity: float


def residuals(
    sde: AbstractSDE, coordinates: AbstractCoordinates, steps: Transition, key: PRNGKeyArray
) -> np.ndarray:
    """P(X ≤ x₁ | x₀) for all transitions, exact or as the fraction of simulated end points below x₁."""
    if steps.start.shape[-1] != 1:
        raise ValueError(f"residuals require one component; this series has {steps.start.shape[-1]}")
    known = jax.vmap(lambda step: exact_transition(sde, step.start, step.dt))(steps)
    if known is not None:
        return np.clip(known.cdf(steps.end), TINY, 1 - TINY)
    run = lambda num_steps: [np.asarray(a) for a in _below(sde, coordinates, steps, num_steps, key)]
    share, exits = refined(run, lambda a, b: distance(a[0], b[0], DRAWS_PER_TRANSITION), LIMIT)
    warn_of_exits(int(exits.sum()), DRAWS_PER_TRANSITION * len(exits))
    return share


def distance(a: np.ndarray, b: np.ndarray, count: int) -> float:
    """Root mean square difference between two sets of probabilities, corrected for the sampling error of
    `count` draws."""
    noise = np.mean(a * (1 - a) + b * (1 - b)) / count
    return float(np.sqrt(max(np.mean((a - b) ** 2) - noise, 0)))


def tested(uniform: np.ndarray, scores: np.ndarray | None, penalty: np.ndarray) -> Residuals:
    """Residuals with their tests. `scores` `(N, p)` are those of the estimated parameters, or None."""
    effect = Estimation(scores, penalty) if scores is not None else None
    normal = scipy.stats.norm.ppf(uniform)
    return Residuals(uniform, ljung_box(normal, effect), smooth_test(uniform, effect))


class Estimation:
    """The reduction of the covariance of N^{−½} Σ φ(uᵢ) due to estimated parameters, for functions φ `(N, K)`
    of the residuals. It is C J⁻¹ Cᵀ with C = E φ sᵀ and J = E s sᵀ, where s are the scores (Pierce 1982)."""

    def __init__(self, scores: np.ndarray, penalty: np.ndarray):
        self.scores = scores
        self.inverse = np.linalg.pinv(scores.T @ scores + np.diag(penalty), hermitian=True)

    def covariance(self, functions: np.ndarray) -> np.ndarray:
        cross = functions.T @ self.scores
        return cross @ self.inverse @ cross.T / len(functions)


def smooth_test(uniform: np.ndarray, effect: Estimation | None) -> float:
    """The p-value of Neyman's smooth test: Σ (N^{−½} Σᵢ φₖ(uᵢ))² is χ² for normalised Legendre polynomials.

    With estimated parameters, the statistic uses the inverse of the covariance I − C J⁻¹ Cᵀ, without
    directions of almost zero variance.
    """
    orders = np.arange(1, POLYNOMIALS + 1)
    values = np.sqrt(2 * orders + 1) * scipy.special.eval_legendre(orders, 2 * uniform[:, None] - 1)
    total = values.sum(axis=0) / np.sqrt(len(uniform))
    covariance = np.eye(POLYNOMIALS) - (0 if effect is None else effect.covariance(values))
    variances, directions = np.linalg.eigh(covariance)
    kept = variances > LEAST_VARIANCE
    statistic = np.sum((total @ directions[:, kept]) ** 2 / variances[kept])
    return float(scipy.stats.chi2.sf(statistic, kept.sum()))


def ljung_box(values: np.ndarray, effect: Estimation | None) -> float:
    """The p-value of the Ljung–Box statistic Q = n(n + 2) Σ ρₖ²/(n − k), which is χ². The degrees of freedom
    are the number of lags minus the trace of the reduction due to estimated parameters."""
    n, centred = len(values), values - values.mean()
    lags = np.arange(1, min(LAGS, n // 5) + 1)
    products = np.zeros((n, len(lags)))
    for k in lags:
        products[k:, k - 1] = centred[k:] * centred[:-k] / np.mean(centred**2)
    statistic = (n + 2) / n * np.sum(products.sum(axis=0) ** 2 / (n - lags))
    freedom = float(len(lags))
    if effect is not None:
        by_chance = len(lags) * effect.scores.shape[1] / n  # expected trace for uncorrelated functions
        freedom = max(freedom - np.trace(effect.covariance(products)) + by_chance, 1.0)
    return float(scipy.stats.chi2.sf(statistic, freedom))


@functools.partial(jit, level=1)
def _below(sde, coordinates, steps: Transition, num_steps: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
    """The fraction of draws below x₁, shifted by half a draw so that it is never 0 or 1; and the number of
    draws that are NaN."""

    def one(arguments: tuple[Transition, PRNGKeyArray]) -> tuple[Array, Array]:
        step, key = arguments
        one = lambda key: draw(sde, coordinates, step.start, step.time, step.dt, num_steps, key)[0]
        drawn = jax.vmap(one)(jax.random.split(key, DRAWS_PER_TRANSITION))
        return (jnp.sum(drawn < step.end[0]) + 0.5) / (DRAWS_PER_TRANSITION + 1), jnp.sum(jnp.isnan(drawn))

    return in_chunks(one, (steps, keys_of(key, steps)), len(steps.dt), CHUNK)
