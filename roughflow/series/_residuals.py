"""Residuals of a series under the SDE fitted to it, and tests of them."""

import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..sde import AbstractSDE
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Transition
from ._forecast import draw
from ._transition import in_chunks, keys_of

DRAWS = 1024  # of each transition, to see where in them the value that came lies
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
    sde: AbstractSDE, coordinates: AbstractCoordinates, steps: Transition, effort: Effort, key: PRNGKeyArray
) -> Residuals:
    """By simulation: the share of draws from x₀ that end below x₁, for SDEs of one component."""
    if steps.start.shape[-1] != 1:
        raise ValueError(f"residuals are for series of one component, this one has {steps.start.shape[-1]}")
    below = np.asarray(_below(sde, coordinates, steps, effort, key), float)
    return tested((below + 0.5) / (DRAWS + 1))  # half a draw up, so never 0 or 1


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
def _below(sde, coordinates, steps: Transition, effort: Effort, key: PRNGKeyArray) -> Array:
    def one(arguments: tuple[Transition, PRNGKeyArray]) -> Array:
        step, key = arguments
        start, end = coordinates.from_state(step.start), coordinates.from_state(step.end)
        drawn = draw(sde, coordinates, Transition(start, end, step.time, step.dt), effort, key, DRAWS)
        return jnp.sum(drawn[:, 0] < end[0])

    return in_chunks(one, (steps, keys_of(key, steps)), len(steps.dt), CHUNK)
