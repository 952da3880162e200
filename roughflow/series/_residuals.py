"""Residuals of a series under a fitted SDE, and tests of them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..sde import AbstractSDE
from ..transition import AbstractCoordinates, Transition, in_chunks, keys_of
from ._simulation import draw, refined, warn_of_exits
from .models import exact_transition

DRAWS_PER_TRANSITION = 1024  # simulated per transition, if its distribution has no closed form
LIMIT = 0.015  # acceptable root mean square change of residuals when steps are halved
TINY = 1e-15  # keeps residuals away from 0 and 1
CHUNK = 256  # transitions simulated at a time
LAGS, POLYNOMIALS = 20, 4
LEAST_VARIANCE = 0.1  # smallest variance, 1 without estimation, of a direction used by a test


class Residuals(eqx.Module):
    """Generalised residuals of a series, with tests.

    `uniform` `(N,)` is P(X ≤ x | earlier values), independent and uniform under the model (Rosenblatt 1952).
    `uniformity` is the p-value of Neyman's smooth test (1937) with four Legendre polynomials, and `ljung_box`
    that of the Ljung–Box test (1978) for autocorrelation at up to 20 lags. Both tests account for the
    estimation of the parameters through the scores of the fit. With measurement noise there are no scores,
    and the tests are conservative.

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
    """P(X ≤ x₁ | x₀) of all transitions, exact or as the fraction of simulated end points below x₁."""
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
    """Residuals with their tests, given the scores `(N, p)` of the estimated parameters."""
    effect = Estimation(scores, penalty) if scores is not None else None
    normal = scipy.stats.norm.ppf(uniform)
    return Residuals(uniform, ljung_box(normal, effect), smooth_test(uniform, effect))


class Estimation:
    """The reduction, due to estimated parameters, of the covariance of N^{−½} Σ φ(uᵢ) for functions φ of
    residuals `(N, K)`: C J⁻¹ Cᵀ with C = E φ sᵀ and J = E s sᵀ, s the scores (Pierce 1982)."""

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
    are the number of lags less the trace of the reduction due to estimation."""
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
    NaNs."""

    def one(arguments: tuple[Transition, PRNGKeyArray]) -> tuple[Array, Array]:
        step, key = arguments
        one = lambda key: draw(sde, coordinates, step.start, step.time, step.dt, num_steps, key)[0]
        drawn = jax.vmap(one)(jax.random.split(key, DRAWS_PER_TRANSITION))
        return (jnp.sum(drawn < step.end[0]) + 0.5) / (DRAWS_PER_TRANSITION + 1), jnp.sum(jnp.isnan(drawn))

    return in_chunks(one, (steps, keys_of(key, steps)), len(steps.dt), CHUNK)
