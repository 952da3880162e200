"""Residuals of a series under the SDE fitted to it, and tests of them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..sde import AbstractSDE
from ._coordinates import AbstractCoordinates
from ._ends import Transition
from ._simulation import draw, refined, warn_of_exits
from ._transition import in_chunks, keys_of
from .models import exact_transition

DRAWS = 1024  # of each transition, where its distribution is not known
LIMIT = 0.015  # root mean square by which residuals may change with steps of half the length
TINY = 1e-15  # so that no residual is at the end of its range
CHUNK = 256  # transitions at a time
LAGS = 20


class Residuals(eqx.Module):
    """Generalised residuals of a series: `uniform` `(N,)`, P(X ≤ x | what came before), which under the model
    are independent and uniform (Rosenblatt 1952). `ljung_box` is the p-value of the test of Ljung & Box
    (1978) that they are not correlated, of as many as 20 lags; `uniformity` that of Kolmogorov and Smirnov's.

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
) -> Residuals:
    """P(X ≤ x₁ | x₀), exact or by the share of draws from x₀ that end below x₁; for SDEs of one component."""
    if steps.start.shape[-1] != 1:
        raise ValueError(f"residuals are for series of one component, this one has {steps.start.shape[-1]}")
    known = jax.vmap(lambda step: exact_transition(sde, step.start, step.dt))(steps)
    if known is not None:
        return tested(np.clip(known.cdf(steps.end), TINY, 1 - TINY))
    run = lambda num_steps: [np.asarray(a) for a in _below(sde, coordinates, steps, num_steps, key)]
    share, exits = refined(run, lambda a, b: distance(a[0], b[0], DRAWS), LIMIT)
    warn_of_exits(int(exits.sum()), DRAWS * len(exits))
    return tested(share)


def distance(a: np.ndarray, b: np.ndarray, count: int) -> float:
    """How far two sets of probabilities are from each other, less what is to be expected of shares of `count`
    draws; a root mean square."""
    noise = np.mean(a * (1 - a) + b * (1 - b)) / count
    return float(np.sqrt(max(np.mean((a - b) ** 2) - noise, 0)))


def tested(uniform: np.ndarray) -> Residuals:
    """Residuals with the tests of them."""
    normal = scipy.stats.norm.ppf(uniform)
    return Residuals(uniform, ljung_box(normal), float(scipy.stats.kstest(uniform, "uniform").pvalue))


def ljung_box(values: np.ndarray) -> float:
    """The p-value of Q = n(n + 2) Σ ρₖ²/(n − k)."""
    n, centred = len(values), values - values.mean()
    lags = np.arange(1, min(LAGS, n // 5) + 1)
    rho = np.array([centred[k:] @ centred[:-k] for k in lags]) / (centred @ centred)
    return float(scipy.stats.chi2.sf(n * (n + 2) * np.sum(rho**2 / (n - lags)), len(lags)))


@functools.partial(jit, level=1)
def _below(sde, coordinates, steps: Transition, num_steps: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
    """The share of draws below x₁, half a draw up so that it is never 0 or 1; and how many are NaN."""

    def one(arguments: tuple[Transition, PRNGKeyArray]) -> tuple[Array, Array]:
        step, key = arguments
        one = lambda key: draw(sde, coordinates, step.start, step.time, step.dt, num_steps, key)[0]
        drawn = jax.vmap(one)(jax.random.split(key, DRAWS))
        return (jnp.sum(drawn < step.end[0]) + 0.5) / (DRAWS + 1), jnp.sum(jnp.isnan(drawn))

    return in_chunks(one, (steps, keys_of(key, steps)), len(steps.dt), CHUNK)
