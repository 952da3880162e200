"""Which driver: Legendre, Karhunen–Loève or piecewise linear? Part of `python -m benchmarks.rough`.

On three distributions that are known exactly: an Ornstein–Uhlenbeck process; that of Cox, Ingersoll and Ross;
and dZ₁ = dB₁, dZ₂ = Z₁ dB₂, whose noises do not commute. Against n, the strong error of the endpoint, along
one fine path projected on n functions, and the bias of the log-density.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row

FIGURE = Path("figures") / "drivers.png"
DRIVERS = {
    "Legendre": rf.Legendre,
    "Karhunen–Loève": rf.KarhunenLoeve,
    "piecewise linear": rf.PiecewiseLinear,
}
LOOK = {"Legendre": "#009E73", "Karhunen–Loève": "#0072B2", "piecewise linear": "#D55E00"}
SIZES = (2, 4, 8, 16)
FINE, PATHS, DRAWS = 1024, 200, 2**15
STEPS = 64  # of the solver: polynomials are fast at both ends
TABLE: Columns = (("distribution", 16), ("driver", 16), ("error of", 12), *((f"n = {n}", 9) for n in SIZES))


class Problem(NamedTuple):
    sde: rf.AbstractSDE
    base: rf.Normal
    points: np.ndarray
    truth: np.ndarray
    estimator: rf.AbstractEstimator


def ornstein_uhlenbeck() -> Problem:
    sde = rf.ItoSDE(lambda t, z: -2 * z, lambda t, z: jnp.full((1, 1), 1.3))
    decay = np.exp(-2.0)
    end = stats.norm(0.5 * decay, np.sqrt((0.4 * decay) ** 2 + 1.3**2 * (1 - decay**2) / 4))
    x = end.ppf([0.02, 0.2, 0.5, 0.8, 0.98])
    return Problem(
        sde, rf.Normal(jnp.full(1, 0.5), 0.4), x[:, None], end.logpdf(x), rf.PullBack(64, rf.Laplace())
    )


def cox_ingersoll_ross() -> Problem:
    kappa, mu, sigma = 2.0, 0.3, 0.4
    root = lambda z: jnp.sqrt(jnp.where(z > 1e-3, z, 1e-3))  # where no path should be
    sde = rf.ItoSDE(lambda t, z: kappa * (mu - z), lambda t, z: sigma * root(z)[:, None])
    c = 2 * kappa / (sigma**2 * (1 - np.exp(-kappa)))
    x = np.array([0.12, 0.2, 0.28, 0.38, 0.55])
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    start = 0.4 + 0.03 * nodes[:, None]
    each = stats.ncx2(4 * kappa * mu / sigma**2, 2 * c * start * np.exp(-kappa)).pdf(2 * c * x) * 2 * c
    density = weights @ each / np.sqrt(2 * np.pi)
    return Problem(sde, rf.Normal(jnp.full(1, 0.4), 0.03), x[:, None], np.log(density), rf.Endpoint(1024))


def heisenberg() -> Problem:
    """Given Z₁ the second component is normal with variance ∫Z₁²: Fourier's inversion of Mehler's kernel."""
    sde = rf.ItoSDE(lambda t, z: 0 * z, lambda t, z: jnp.array([[1.0, 0.0], [0.0, z[0]]]))
    mean, spread = np.array([0.5, 0.0]), 0.3
    x = np.array([[0.5, 0.2], [1.2, -0.8], [-0.6, 0.5], [0.0, 0.0], [1.0, 1.5]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    a = (mean[0] + spread * nodes)[:, None]
    frequencies = np.linspace(1e-6, 25, 20_001)
    density = []
    for end, height in x:
        f = frequencies[None]
        kernel = np.sqrt(f / (2 * np.pi * np.sinh(f))) * np.exp(
            -f / (2 * np.sinh(f)) * ((a**2 + end**2) * np.cosh(f) - 2 * a * end)
        )
        whole = weights @ kernel / np.sqrt(2 * np.pi) * np.exp(-0.5 * (spread * frequencies) ** 2)
        whole *= np.cos(frequencies * (height - mean[1])) / np.pi
        density.append(np.trapezoid(whole, frequencies))
    return Problem(
        sde, rf.Normal(jnp.asarray(mean), spread), x, np.log(density), rf.PullBack(DRAWS, rf.Laplace())
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "OU": ornstein_uhlenbeck,
    "CIR": cox_ingersoll_ross,
    "not commutative": heisenberg,
}


def flow_of(problem: Problem, driver: rf.AbstractDriver) -> rf.StochasticFlow:
    return rf.StochasticFlow(problem.sde, problem.base, driver=driver, integrator=rf.FixedGrid(steps=STEPS))


def strong_errors(problem: Problem, make: type) -> list[float]:
    """Root mean square of Z_T along the projection less Z_T along the fine path."""
    fine = rf.PiecewiseLinear(FINE)
    size = flow_of(problem, fine).noise_dimension
    path = fine.sample(key=jax.random.key(0), noise_dimension=size, shape=(PATHS,))
    z = problem.base.sample(key=jax.random.key(1), shape=(PATHS,))
    end = lambda path: flow_of(problem, path.driver).push_forward(z, path)[0]
    truth = end(path)
    gaps = [end(make(n).project(path, resolution=FINE)) - truth for n in SIZES]
    return [float(jnp.sqrt(jnp.mean(jnp.sum(gap**2, axis=-1)))) for gap in gaps]


def biases(problem: Problem, make: type) -> list[tuple[float, float]]:
    """The largest bias of the log-density, and the largest standard error, over the points."""
    found = []
    for n in SIZES:
        flow = flow_of(problem, make(n))
        options = {"estimator": problem.estimator, "solver": False}
        estimate = flow.estimate(problem.points, key=jax.random.key(2), **options)
        gap = np.abs(np.asarray(estimate.log_prob) - problem.truth)
        found.append((float(gap.max()), float(jnp.max(estimate.standard_error))))
    return found


def compare() -> None:
    print_header(TABLE)
    results = {}
    for name, make_problem in PROBLEMS.items():
        problem = make_problem()
        for driver, make in DRIVERS.items():
            strong = strong_errors(problem, make)
            print_row(TABLE, name, driver, "Z at T", *(f"{e:.1e}" for e in strong))
            bias = biases(problem, make)
            print_row(TABLE, name, driver, "log p", *(f"{e:.1e}" for e, _ in bias))
            print_row(TABLE, "", "", "± of log p", *(f"{e:.0e}" for _, e in bias))
            results[name, driver] = (strong, [e for e, _ in bias])
    draw(results)


def draw(results: dict) -> None:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(9, 5.6), sharex=True, sharey="row", layout="constrained")
    for (name, driver), pair in results.items():
        column = list(PROBLEMS).index(name)
        grid[0, column].set_title({"not commutative": "noises that do not commute"}.get(name, name))
        for axes, error in zip(grid[:, column], pair, strict=True):
            axes.loglog(SIZES, error, "o-", color=LOOK[driver], label=driver)
            axes.set_xticks(SIZES, [str(n) for n in SIZES])
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("number of functions $n$")
    grid[0, 0].set_ylabel("strong error of $Z_T$")
    grid[1, 0].set_ylabel(r"largest bias of $\log p$")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    print(f"wrote {FIGURE}")
