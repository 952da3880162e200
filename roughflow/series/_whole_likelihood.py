"""The log-likelihood of series with memory: of each as a whole, and jointly normal."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._programs import jit
from ..faq import see
from ..transition import Effort, Transition
from ._forecast import check_memory
from ._likelihood import AbstractLikelihood, information_by_differences
from ._observed import Observed, transitions
from ._parameters import Parameters
from ._residuals import TINY
from .models import FractionalOrnsteinUhlenbeck

EVEN = 1e-3  # of a step, by which times may be off


class WholeLikelihood(AbstractLikelihood):
    """log p(x₁, … | x₀), in parts log p(xᵢ | x₀, …, xᵢ₋₁)."""

    parameters: Parameters
    penalty: np.ndarray
    steps: Transition
    values: tuple[np.ndarray, ...]
    gaps: tuple[float, ...]
    effort: None = None
    coordinates: None = None

    @staticmethod
    def of(parameters: Parameters, penalty: np.ndarray, series: Sequence[Observed]) -> "WholeLikelihood":
        values = tuple(one.values[:, 0] for one in series)
        gaps = tuple(_even(one.times) for one in series)
        return WholeLikelihood(
            parameters=parameters, penalty=penalty, steps=transitions(series), values=values, gaps=gaps
        )

    def scores(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        value, slopes = _scores(self, jnp.asarray(free, float))
        return np.asarray(value), np.asarray(slopes), np.zeros(len(value))

    def log_likelihood(self, free: np.ndarray) -> float:
        return float(self.scores(free)[0].sum())

    def information(self, free: np.ndarray) -> np.ndarray:
        return information_by_differences(self, free)

    def quick_information(self, free: np.ndarray) -> np.ndarray:
        slopes = self.scores(free)[1]
        return slopes.T @ slopes + np.diag(self.penalty)

    def total_errors(self, free: np.ndarray) -> tuple[float, float]:
        return 0.0, 0.0

    def with_effort(self, effort: Effort) -> "WholeLikelihood":
        return self

    def described(self) -> str:
        return "exact, those of one series jointly normal"

    def sde(self, free: Array) -> FractionalOrnsteinUhlenbeck:
        return self.parameters.sde(self.parameters.from_free(free))

    def residuals(self, free: np.ndarray) -> np.ndarray:
        """Uniform under the model: each value's place in its distribution given all before it."""
        normal = np.concatenate([np.asarray(e) for _, e in self.parts(self.sde(jnp.asarray(free, float)))])
        return np.clip(scipy.stats.norm.cdf(normal), TINY, 1 - TINY)

    def parts(self, sde: FractionalOrnsteinUhlenbeck) -> list[tuple[Array, Array]]:
        """log p and the standardised prediction error of each value, of each series."""
        pairs = zip(self.values, self.gaps, strict=True)
        return [
            toeplitz_log_probs(
                sde.autocovariance(jnp.asarray(dt), len(x) - 2), sde.innovations(jnp.asarray(x), dt)
            )
            for x, dt in pairs
        ]

    def forecast(
        self, free: np.ndarray, ahead: np.ndarray, key: PRNGKeyArray, count: int, place: int
    ) -> np.ndarray:
        """Paths `(count, T, 1)` after one of the series, given all of it, at times counted from its end; with
        free parameters `(p,)`, or `(count, p)` with each path's own."""
        values, dt = self.values[place], self.gaps[place]
        places = np.rint(ahead / dt).astype(int)
        if np.abs(places * dt - ahead).max() > EVEN * dt:
            raise ValueError(f"times of a forecast must be multiples of the step of the series, {dt:g}")
        n, m = len(values) - 1, int(places[-1])
        check_memory(m * (count + n + m))
        sdes = jax.vmap(self.sde)(jnp.atleast_2d(jnp.asarray(free, float)))
        gammas, pasts = map(np.asarray, _moments(sdes, jnp.asarray(values), jnp.asarray(dt), n + m - 1))
        normal = np.split(np.asarray(jax.random.normal(key, (count, m))), len(gammas))
        noise = np.concatenate([_continued(*part) for part in zip(gammas, pasts, normal, strict=True)])
        mu, decay = np.asarray(sdes.mu), np.exp(-np.asarray(sdes.kappa) * dt)
        paths, now = [], np.full(count, values[-1]) - mu
        for xi in noise.T:
            now = decay * now + xi
            paths.append(mu + now)
        return np.stack(paths, axis=1)[:, places - 1, None]


@functools.partial(jit, level=1)
def _moments(sdes: FractionalOrnsteinUhlenbeck, values: Array, dt: Array, count: int) -> tuple[Array, Array]:
    """The autocovariances and the innovations of a series, for each of several SDEs."""
    return jax.vmap(lambda sde: (sde.autocovariance(dt, count), sde.innovations(values, dt)))(sdes)


def _continued(gamma: np.ndarray, past: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Draws `(K, m)` of a stationary normal sequence after its first n values, from standard normal ones."""
    n, m = len(past), normal.shape[1]
    cross = gamma[np.abs(np.arange(n)[:, None] - (n + np.arange(m)))]
    weights = scipy.linalg.solve_toeplitz(gamma[:n], cross)
    spread = scipy.linalg.cholesky(scipy.linalg.toeplitz(gamma[:m]) - cross.T @ weights, lower=True)
    return past @ weights + normal @ spread.T


@functools.partial(jit, level=1)
def _scores(likelihood: WholeLikelihood, free: Array) -> tuple[Array, Array]:
    def log_probs(free: Array) -> tuple[Array, Array]:
        value = jnp.concatenate([part for part, _ in likelihood.parts(likelihood.sde(free))])
        return value, value

    slopes, value = jax.jacfwd(log_probs, has_aux=True)(free)
    return value, slopes


def toeplitz_log_probs(gamma: Array, x: Array) -> tuple[Array, Array]:
    """log p(xᵢ | x₀, …, xᵢ₋₁) `(n,)` of a stationary normal sequence with autocovariance γ `(n,)`, and its
    standardised prediction errors: by Schur's algorithm, in O(n²) and without a matrix."""
    ahead = gamma / jnp.sqrt(gamma[0])
    shift = lambda a: jnp.concatenate([a[1:], jnp.zeros_like(a[:1])])

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple:
        # `ahead` is the current column of Cholesky's factor, from its diagonal on.
        ahead, back, rest = carry
        error = rest[0] / ahead[0]
        value = -0.5 * error**2 - jnp.log(ahead[0]) - 0.5 * jnp.log(2 * jnp.pi)
        back, rest = shift(back), shift(rest - error * ahead)
        rho = back[0] / ahead[0]
        root = jnp.sqrt(1 - rho**2)
        return ((ahead - rho * back) / root, (back - rho * ahead) / root, rest), (value, error)

    start = (ahead, ahead.at[0].set(0.0), x)
    return jax.lax.scan(step, start, None, length=x.size)[1]


def _even(times: np.ndarray) -> float:
    """The step of times that come at even distances."""
    steps = np.diff(times)
    dt = float((times[-1] - times[0]) / len(steps))
    if np.abs(steps - dt).max() > EVEN * dt:
        raise ValueError(
            "a series with memory needs values at even times, without gaps: number the trading days, say"
            + see("series")
        )
    return dt
