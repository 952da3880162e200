"""Accuracy of `rf.density.Grid` against closed forms and expansions in sinc functions.

    python -m benchmarks.grid [CASE …]

Each SDE starts from a distribution and from a point. The columns are the largest error of log p where p
exceeds 1e-6 of its maximum, the largest error bar there, the fraction of points whose error is within the
error bar, and CPU seconds with and without compilation. At the end, gradients are compared with central
differences.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import integrate, linalg, special, stats

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.fokker_planck import line_kernel
from benchmarks.timing import verdict

TOLERANCE = 1e-3
LOWEST = -13.8  # lower limit of log p relative to its maximum, for points that count
TABLE: Columns = (
    ("SDE", 18),
    ("from", 12),
    ("points", 6),
    ("error", 8),
    ("bar", 8),
    ("covered", 7),
    ("first / s", 9),
    ("again / s", 9),
)


@dataclass(frozen=True)
class Case:
    """A flow, its starting point if it has one, and points with their log-densities."""

    flow: rf.StochasticFlow
    start: np.ndarray | None
    x: np.ndarray
    log_density: np.ndarray


def linear(matrix: Any, noise: Any, start: np.ndarray | None) -> Case:
    """An Ornstein–Uhlenbeck process, from N(0, I) or a point."""
    a, s = np.array(matrix), np.array(noise)
    added = integrate.quad_vec(lambda t: linalg.expm(a * t) @ s @ s.T @ linalg.expm(a * t).T, 0, 1)[0]
    flow = linalg.expm(a)
    mean, covariance = (flow @ start, added) if start is not None else (0 * a[0], added + flow @ flow.T)
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(a) @ z, lambda t, z: jnp.asarray(s))
    return normal_case(sde, rf.Normal(jnp.zeros(2)), start, mean, covariance)


def rotation(start: np.ndarray | None) -> Case:
    """Noise that rotates with the state. The Itô SDE has the distribution of a linear SDE."""
    swirl = np.array([[-0.2, -1.1], [1.1, -0.2]])

    def noise(t, z):
        cos, sin = jnp.cos(2.6 * z[0]), jnp.sin(2.6 * z[0])
        return 0.4 * jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])

    variance = 0.16 * (1 - np.exp(-0.4)) / 0.4
    mean, covariance = np.zeros(2), (variance + np.exp(-0.4)) * np.eye(2)
    if start is not None:
        mean, covariance = linalg.expm(swirl) @ start, variance * np.eye(2)
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(swirl) @ z, noise)
    return normal_case(sde, rf.Normal(jnp.zeros(2)), start, mean, covariance)


def rotations(start: np.ndarray | None) -> Case:
    """Random rotations of strength 0.8, which leave a rotationally symmetric density unchanged, from the
    origin or a distribution around it."""
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    noise = lambda t, z: jnp.stack([jnp.array([0.4, 0.0]), jnp.array([0.0, 0.4]), 0.8 * (turn @ z)], axis=1)
    sde = rf.ItoSDE(lambda t, z: (-0.2 - 0.32) * z + 1.1 * (turn @ z), noise)
    if start is not None:
        start = np.zeros(2)
    variance = (0 if start is not None else 0.25 * np.exp(-0.4)) + 0.16 * (1 - np.exp(-0.4)) / 0.4
    return normal_case(sde, rf.Normal(jnp.zeros(2), 0.5), start, np.zeros(2), variance * np.eye(2))


def normal_case(
    sde: Any, base: Any, start: np.ndarray | None, mean: np.ndarray, covariance: np.ndarray
) -> Case:
    radius, angle = np.meshgrid(np.linspace(0, 5.25, 12), np.linspace(0, 6, 12))
    units = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1, 2)
    x = mean + units @ np.linalg.cholesky(covariance).T
    return Case(rf.StochasticFlow(sde, base), start, x, stats.multivariate_normal.logpdf(x, mean, covariance))


class LogNormal(eqx.Module):
    """exp N(0, scale²)."""

    scale: float

    def sample(self, *, key, shape=()):
        return jnp.exp(self.scale * jax.random.normal(key, (*shape, 1)))

    def log_prob(self, z):
        inside = jnp.where(z > 0, z, 1.0)
        value = jax.scipy.stats.norm.logpdf(jnp.log(inside), 0.0, self.scale) - jnp.log(inside)
        return jnp.sum(jnp.where(z > 0, value, -jnp.inf))


def geometric(start: np.ndarray | None) -> Case:
    """Geometric Brownian motion."""
    sde = rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.3 * z[:, None])
    scale = 0.3 if start is not None else np.hypot(0.3, 0.2)
    x = np.exp(0.055 + scale * np.linspace(-5.6, 5.3, 80))
    truth = stats.lognorm.logpdf(x, scale, scale=np.exp(0.055))
    return Case(
        rf.StochasticFlow(sde, LogNormal(0.2)), None if start is None else np.ones(1), x[:, None], truth
    )


def potential(drift: Callable, width: float, reach: float) -> Callable[[np.ndarray | None], Case]:
    """dZ = drift(Z) dt + dB, from N(0, 0.3²) or 0.4. Paths that leave [−`reach`, `reach`] are negligible."""

    def case(start: np.ndarray | None) -> Case:
        x, begin = np.linspace(-width, width, 101), np.array([0.4])
        if start is None:
            begin = np.linspace(-2.1, 2.1, 241)
        log_density = line_kernel(drift, 1.0, (-reach, reach), 0.01, begin, x)(1.0)
        if start is None:  # the trapezoidal rule converges exponentially
            log_start = stats.norm.logpdf(begin, 0, 0.3) + np.log(begin[1] - begin[0])
            log_density = special.logsumexp(log_density + log_start[:, None], axis=0, keepdims=True)
        flow = rf.StochasticFlow(
            rf.ItoSDE(lambda t, z: drift(z), lambda t, z: jnp.eye(1)), rf.Normal(jnp.zeros(1), 0.3)
        )
        return Case(flow, None if start is None else begin, x[:, None], log_density[0])

    return case


CASES: dict[str, Callable[[np.ndarray | None], Case]] = {
    "OU, full": lambda start: linear([[-1.0, 0.8], [-0.6, -0.5]], [[0.7, 0.2], [0.0, 0.5]], start),
    "OU, degenerate": lambda start: linear([[0.0, 1.0], [-1.0, -0.5]], [[0.0], [0.8]], start),
    "rotation, 2.6": rotation,
    "rotations": rotations,
    "GBM": geometric,
    "sine": potential(lambda z: 2 * jnp.sin(2 * z), 6.0, 40.0),
    "well, slope 1": potential(lambda z: z - z**3, 4.0, 6.0),
    "well, slope 9": potential(lambda z: 9 * (z - z**3), 2.0, 3.0),
}


def row(name: str, case: Case) -> tuple[float, float, float]:
    """Print a row, and return the largest error, the largest error bar and the fraction of points within
    their error bars."""
    counts = case.log_density > case.log_density.max() + LOWEST
    x, truth = jnp.asarray(case.x[counts]), case.log_density[counts]
    grid = rf.density.Grid(start=None if case.start is None else jnp.asarray(case.start))
    estimate = lambda: case.flow.estimate(x, key=jax.random.key(0), estimator=grid, tolerance=TOLERANCE)
    begin = time.process_time()
    found = estimate()
    middle = time.process_time()
    estimate()
    seconds = [middle - begin, time.process_time() - middle]
    gap, bar = np.abs(np.asarray(found.log_prob) - truth), np.asarray(found.total_error)
    gap = np.where(np.isnan(gap), np.inf, gap)
    covered = float(np.mean(gap <= bar + 1e-9))
    begins = "distribution" if case.start is None else "point"
    cells = [f"{len(truth)}", f"{gap.max():.1e}", f"{bar.max():.1e}", f"{covered:.0%}"]
    print_row(TABLE, name, begins, *cells, *(f"{s:.1f}" for s in seconds))
    return float(gap.max()), float(bar.max()), covered


def gradient_gap() -> float:
    """The largest relative difference between gradients and central differences, in parameters and points."""
    x, key = jnp.array([[0.3], [1.2], [-0.5]]), jax.random.key(0)

    def value(theta, x):
        drift = lambda t, z: theta[0] * jnp.sin(z) - z
        noise = lambda t, z: theta[1] * (1 + 0.3 * jnp.cos(z))[:, None]
        flow = rf.StochasticFlow(rf.ItoSDE(drift, noise), rf.Normal(jnp.zeros(1), jnp.exp(theta[2])))
        return jnp.sum(flow.estimate(x, key=key, estimator=rf.density.Grid(), tolerance=1e-5).log_prob)

    theta, h, gaps = jnp.array([0.8, 0.6, 0.1]), 1e-3, []
    slope, slope_x = jax.grad(value, (0, 1))(theta, x)
    for i in range(3):
        central = (value(theta.at[i].add(h), x) - value(theta.at[i].add(-h), x)) / (2 * h)
        gaps.append(abs(slope[i] / central - 1))
        central = (value(theta, x.at[i].add(h)) - value(theta, x.at[i].add(-h))) / (2 * h)
        gaps.append(abs(slope_x[i, 0] / central - 1))
    return float(max(gaps))


def main(only: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    print_header(TABLE)
    starts = (None, np.array([1.0, 0.5]))
    chosen = {name: case for name, case in CASES.items() if not only or any(word in name for word in only)}
    rows = np.array([row(name, case(start)) for name, case in chosen.items() for start in starts])
    print(verdict(bool(rows[:, 0].max() < TOLERANCE), "errors below 1e-3", f"{rows[:, 0].max():.1e}"))
    print(verdict(bool(rows[:, 2].min() > 0.95), "95 % within their error bars", f"{rows[:, 2].min():.0%}"))
    gap = gradient_gap()
    print(verdict(gap < 1e-4, "gradients within 1e-4 of central differences", f"{gap:.1e}"))


if __name__ == "__main__":
    main(sys.argv[1:])
