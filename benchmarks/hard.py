"""Error bars of the default estimate on hard SDEs: `python -m benchmarks.hard [--keys 20] [--only fold ...]`.

The SDEs have several bundles of paths to a point, folds, explosions or strong contraction. References are
closed forms and solutions of the Fokker–Planck equation of the SDE, which do not depend on paths or a driver.
An estimate counts as wrong if its error exceeds three of its error bars and it is not flagged as suspect.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg, special, stats

import roughflow as rf
from benchmarks.fokker_planck import fokker_planck

BARS, FLOOR = 3.0, 1e-3  # error bars; nats, smaller errors do not count


class Problem(NamedTuple):
    flow: rf.StochasticFlow
    x: np.ndarray  # (k, d)
    log_prob: np.ndarray  # (k,), that of the SDE


def cubic() -> Problem:
    """dZ = 2Z³ dt + ½ dB: most paths explode before time 1."""
    sde = rf.ItoSDE(lambda t, z: 2 * z**3, lambda t, z: jnp.array([[0.5]]))
    x = np.array([[0.0], [0.5], [1.0], [1.5]])
    truth = line(lambda y: 2 * y**3, lambda y: 0.5 + 0 * y, x, half=10, size=8000, steps=20_000)
    return Problem(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1))), x, truth)


def wiggly() -> Problem:
    """Drift 3 sin 3z and noise 1 + 0.7 sin 4z: several wells, and noise that depends strongly on the
    state."""
    sde = rf.ItoSDE(lambda t, z: 3 * jnp.sin(3 * z), lambda t, z: 1 + 0.7 * jnp.sin(4 * z)[:, None])
    x = np.linspace(-3, 3, 16)[:, None]
    truth = line(lambda y: 3 * np.sin(3 * y), lambda y: 1 + 0.7 * np.sin(4 * y), x, half=9, size=24_000)
    likely = truth > truth.max() - 9
    return Problem(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1))), x[likely], truth[likely])


def well(slope: float) -> Problem:
    """dZ = slope (Z − Z³) dt + ½ dB."""
    sde = rf.ItoSDE(lambda t, z: slope * (z - z**3), lambda t, z: jnp.array([[0.5]]))
    x = np.array([[0.0], [0.5], [0.9], [1.0], [-1.1]])
    truth = line(lambda y: slope * (y - y**3), lambda y: 0.5 + 0 * y, x, half=4)
    return Problem(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1))), x, truth)


def fold() -> Problem:
    """Drift 3|z|²Jz: the further out, the faster the rotation. The density stays N(0, 1.25 I)."""
    drift = lambda t, z: 3 * jnp.sum(z**2) * jnp.stack([-z[1], z[0]])
    flow = rf.StochasticFlow(rf.ItoSDE(drift, lambda t, z: jnp.eye(2)), rf.Normal(jnp.zeros(2), 0.5))
    x = np.array([[0.5, 0], [1.0, 0.5], [1.5, 0], [2.5, 0]])
    return Problem(flow, x, stats.multivariate_normal(np.zeros(2), 1.25 * np.eye(2)).logpdf(x))


def rotation() -> Problem:
    """dZ = 3JZ ∘ dB rotates the start by 3B(1): several rotations lead to the same point."""
    sde = rf.StratonovichSDE(lambda t, z: jnp.zeros(2), lambda t, z: 3 * jnp.stack([-z[1], z[0]])[:, None])
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.array([1.5, 0.0]), 0.3))
    x = np.array([[1.5, 0], [0, 1.5], [-1.5, 0], [0, -1.2], [1.0, 1.5]])
    angle = np.linspace(-36, 36, 20_001)
    cos, sin = np.cos(angle), np.sin(angle)
    back = np.stack([x[:, :1] * cos + x[:, 1:] * sin, x[:, 1:] * cos - x[:, :1] * sin], axis=-1)
    terms = np.sum(stats.norm.logpdf(back, [1.5, 0], 0.3), axis=-1) + stats.norm.logpdf(angle, 0, 3)
    return Problem(flow, x, special.logsumexp(terms, axis=1) + np.log(angle[1] - angle[0]))


def two_bundles(dimension: int) -> Problem:
    """dZ₁ = dB₁, dZ₂ = 3Z₁² dt + 0.3 dB₂ from N(0, 0.1² I): two bundles of paths; dZ₃ = −Z₃ dt + dB₃."""
    rates = jnp.array([0.0, 0.0, 1.0])[:dimension]
    drift = lambda t, z: (3 * z[0] ** 2 * jnp.eye(dimension)[1]) - rates * z
    noise = jnp.diag(jnp.array([1.0, 0.3, 1.0])[:dimension])
    flow = rf.StochasticFlow(rf.ItoSDE(drift, lambda t, z: noise), rf.Normal(jnp.zeros(dimension), 0.1))
    x = np.array([[0.0, 3, 0.2], [0, 5, -1], [0.5, 4, 1], [0, 1, 0.2]])[:, :dimension]
    truth = two_bundles_density(x[:, :2])
    if dimension == 3:
        variance = 0.01 * np.exp(-2) + 0.5 * (1 - np.exp(-2))
        truth = truth + stats.norm.logpdf(x[:, 2], 0, variance**0.5)
    return Problem(flow, x, truth)


def double_well() -> Problem:
    """A double well in the plane with noise that depends on the state."""
    drift = lambda t, z: jnp.stack([z[0] - z[0] ** 3, z[0] - z[1]])
    rows = lambda z: ([1.0, 0.5 * jnp.tanh(z[1])], [0.5 * jnp.sin(z[0]), 1.0])
    sde = rf.ItoSDE(drift, lambda t, z: jnp.stack([jnp.stack(jnp.broadcast_arrays(*row)) for row in rows(z)]))
    x = np.array([[0.0, 0], [1, 1], [-1, 1], [2, -1], [2.2, 3]])
    return Problem(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2))), x, np.log(fokker_planck(sde, x)))


def contraction(dimension: int) -> Problem:
    """dZ = −A Z dt + 2 dB with rates up to 6: backward solves expand by e⁶."""
    a = np.diag([6.0, 5.0, 4.0])[:dimension, :dimension] + np.triu(np.ones((dimension, dimension)), 1)
    sde = rf.ItoSDE(lambda t, z: -jnp.asarray(a) @ z, lambda t, z: 2 * jnp.eye(dimension))
    grown = linalg.expm(-a)
    end = linalg.solve_continuous_lyapunov(a, 4 * np.eye(dimension))
    end = end + grown @ (np.eye(dimension) - end) @ grown.T
    x = np.array([[0.0, 0, 0], [0.6, 0.3, -0.5], [-1.0, 0.5, 1.0]])[:, :dimension]
    truth = stats.multivariate_normal(np.zeros(dimension), end).logpdf(x)
    return Problem(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(dimension))), x, truth)


def line(
    drift: Callable, sigma: Callable, x: np.ndarray, *, half: float, size: int = 6000, steps: int = 4000
) -> np.ndarray:
    """log p(1, x) in one dimension from N(0, 1), by finite volumes and the trapezoidal rule. Mass that leaves
    [−half, half] is lost."""
    edges = np.linspace(-half, half, size + 1)
    y, h, dt = 0.5 * (edges[1:] + edges[:-1]), edges[1] - edges[0], 1 / steps
    velocity, spread = 0.5 * drift(edges), 0.5 * sigma(y) ** 2 / h
    left, right = velocity + np.append(0, spread), velocity - np.append(spread, 0)
    bands = np.zeros((3, size))
    bands[0, 1:], bands[1], bands[2, :-1] = -right[1:-1] / h, (right[:-1] - left[1:]) / h, left[1:-1] / h
    apply = lambda p: bands[1] * p + np.append(bands[0, 1:] * p[1:], 0) + np.append(0, bands[2, :-1] * p[:-1])
    implicit = -0.5 * dt * bands
    implicit[1] += 1
    p = stats.norm.pdf(y)
    for _ in range(steps):
        p = linalg.solve_banded((1, 1), implicit, p + 0.5 * dt * apply(p))
    return np.interp(x[:, 0], y, np.log(np.maximum(p, 1e-300)))


def two_bundles_density(x: np.ndarray, functions: int = 400) -> np.ndarray:
    """log p of the two bundles in the plane, extrapolated from expansions with n and 2n functions. Their
    errors decrease as 1/n: about 0.001 for n = 400, and 1e-5 after the extrapolation."""
    return 2 * truncated_density(x, 2 * functions) - truncated_density(x, functions)


def truncated_density(x: np.ndarray, functions: int, scale: float = 0.1) -> np.ndarray:
    """log p of the two bundles in the plane, from an expansion of the Brownian motion.

    Given Z₁(1) = x₁, Z₁(t) = z + (x₁ − z)t + Σ ωₖ √2 sin(kπt)/(kπ) with z normal, so Z₂(1) is a quadratic
    form of normal numbers u plus an independent one: Y = a + bᵀu + uᵀAu + √v N, v = scale² + 0.09. Its
    characteristic function is exp(ias − ½vs² − ½s² Σ βⱼ²/(1 − 2isλⱼ)) Π (1 − 2isλⱼ)^(−½), where λ are the
    eigenvalues of A and β is b in the basis of eigenvectors. The density is its Fourier integral.
    """
    nodes, weights = special.roots_legendre(1000)
    t, weights = 0.5 * (nodes + 1), 0.5 * weights
    waves = np.pi * np.arange(1, functions)
    variance, v = 1 + scale**2, scale**2 + 0.09
    s = np.linspace(-14 / v**0.5, 14 / v**0.5, 20_001)
    result = []
    for x1, x2 in x:
        mean, spread = x1 * scale**2 / variance, (scale**2 / variance) ** 0.5  # of z given x₁
        centre = mean + (x1 - mean) * t
        shapes = np.vstack([spread * (1 - t), 2**0.5 * np.sin(waves[:, None] * t) / waves[:, None]])
        a, b = 3 * weights @ centre**2, 6 * shapes @ (weights * centre)
        sizes, axes = np.linalg.eigh(3 * (shapes * weights) @ shapes.T)
        below = 1 - 2j * np.outer(s, sizes)
        exponent = 1j * s * (a - x2) - 0.5 * v * s**2 - 0.5 * s**2 * np.sum((b @ axes) ** 2 / below, axis=1)
        # The root is taken of each factor separately, because each factor stays in the right half-plane.
        terms = np.exp(exponent) / np.exp(0.5 * np.sum(np.log(below), axis=1))
        density = np.sum(terms.real) * (s[1] - s[0]) / (2 * np.pi)
        result.append(np.log(density) + stats.norm.logpdf(x1, 0, variance**0.5))
    return np.array(result)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cubic": cubic,
    "wiggly": wiggly,
    "well, slope 1": lambda: well(1.0),
    "well, slope 9": lambda: well(9.0),
    "fold": fold,
    "rotation": rotation,
    "two bundles, 2-D": lambda: two_bundles(2),
    "two bundles, 3-D": lambda: two_bundles(3),
    "double well, 2-D": double_well,
    **{f"contraction, {d}-D": lambda d=d: contraction(d) for d in (1, 2, 3)},
}


def run(name: str, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, str]:
    """Errors, error bars and flags of all points and keys, the median seconds of a call, and the methods
    used."""
    jax.config.update("jax_enable_x64", True)
    problem, seconds, estimates = PROBLEMS[name](), [], []
    for number in range(keys):
        began = time.perf_counter()
        estimate = problem.flow.estimate(problem.x, key=jax.random.key(number))
        estimates.append(jax.block_until_ready(estimate))
        seconds.append(time.perf_counter() - began)
    error = np.concatenate([np.asarray(e.log_prob) - problem.log_prob for e in estimates])
    bar = np.concatenate([np.asarray(e.total_error) for e in estimates])
    flagged = np.concatenate([np.asarray(e.suspect) for e in estimates])
    methods = ", ".join(sorted({method for e in estimates for method in e.method}))
    return error, bar, flagged, float(np.median(seconds)), methods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    totals = np.zeros(3, int)
    print(
        "problem             estimates  wrong  flagged  rms error  worst bars  median bar    s/call  methods"
    )
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(run, name, options.keys): name for name in options.only}
        for job in as_completed(jobs):
            name, (error, bar, flagged, seconds, methods) = jobs[job], job.result()
            wrong = ~flagged & ~(np.abs(error) <= BARS * bar + FLOOR)
            totals += [wrong.size, wrong.sum(), flagged.sum()]
            sure = ~flagged
            worst = np.max(np.abs(error[sure]) / (bar[sure] + FLOOR / BARS), initial=0)
            rms = np.sqrt(np.mean(error[sure] ** 2)) if sure.any() else np.nan
            print(
                f"{name:19s} {wrong.size:9d} {wrong.sum():6d} {flagged.sum():8d} {rms:10.4f} {worst:11.1f} "
                f"{np.median(bar):11.4f} {seconds:9.2f}  {methods}",
                flush=True,
            )
    print(
        f"{totals[0]} estimates: {100 * totals[1] / totals[0]:.2f} % wrong and not flagged (at most 0.5), "
        f"{100 * totals[2] / totals[0]:.2f} % flagged (at most 2)"
    )


if __name__ == "__main__":
    main()
