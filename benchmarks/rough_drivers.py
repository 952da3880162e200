"""Comparison of Legendre, Karhunen–Loève and piecewise linear drivers. Part of `python -m benchmarks.rough`.

The three SDEs have known densities: an Ornstein–Uhlenbeck process (OU), a Cox–Ingersoll–Ross process (CIR),
and dZ₁ = dB₁, dZ₂ = Z₁ dB₂, whose noise does not commute. Two errors are computed for each number n of
functions. The strong error is the root mean square difference between Z_T along the projection of a fine
Brownian path and Z_T along that path. The bias of the log-density is the largest at five points. For the
first and the last SDE, densities are known for every n, so their biases are exact. The biases of CIR are
estimated with quasi-random paths and have standard errors. Then, for n = 6 (the default) and n = 16, the
truncation error of Z_T is compared with the error from the default solver steps.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import stats

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.ends import log_prob_along
from benchmarks.tables import verdict

FIGURE = Path("figures") / "drivers.png"
DRIVERS = {
    "Legendre": rf.Legendre,
    "Karhunen–Loève": rf.KarhunenLoeve,
    "piecewise linear": rf.PiecewiseLinear,
}
LOOK = {
    "Legendre": ("#009E73", "o", "-"),
    "Karhunen–Loève": ("#0072B2", "s", "--"),
    "piecewise linear": ("#D55E00", "^", ":"),
}
TITLES = {"not commutative": "noises that do not commute"}
SIZES = (1, 2, 4, 8, 16)
FINE, PATHS, SOBOL, REPLICATES = 4096, 400, 256, 4
STEPS = rf.FixedGrid(steps=64)  # enough steps for the solver error to be negligible
SOME = rf.FixedGrid(steps=32)  # for many paths, where errors of 1e-3 are acceptable
FEW_AND_MANY = (6, 16)  # numbers of functions: the default, and one for high accuracy
LOWEST = 1e-5, 1e-6  # lower limits of the plots
TABLE: Columns = (("SDE", 16), ("driver", 16), ("error of", 8), *((f"n = {n}", 9) for n in SIZES))
GRID: Columns = (
    ("SDE", 16),
    ("driver", 16),
    *(column for n in FEW_AND_MANY for column in ((f"n = {n} omits", 12), ("steps add", 9), ("steps", 5))),
)


class Problem(NamedTuple):
    sde: rf.AbstractSDE
    base: rf.Normal


# ------------------------------------------------------------------------------- three SDEs

RATE, SCALE, START, SPREAD = 2.0, 1.3, 0.5, 0.4
KAPPA, MU, SIGMA, BEGIN = 2.0, 0.3, 0.4, 0.4
CALM = 2.0  # approximate rate at which 2√Z/σ returns to its mean
MEAN, WIDTH = 0.5, 0.3


def square_root(z: Array) -> Array:
    return SIGMA * jnp.sqrt(jnp.where(z > 1e-3, z, 1e-3))[:, None]  # paths should not reach values below 1e-3


PROBLEMS = {
    "OU": Problem(
        rf.ItoSDE(lambda t, z: -RATE * z, lambda t, z: jnp.full((1, 1), SCALE)),
        rf.Normal(jnp.full(1, START), SPREAD),
    ),
    "CIR": Problem(
        rf.ItoSDE(lambda t, z: KAPPA * (MU - z), lambda t, z: square_root(z)),
        rf.Normal(jnp.full(1, BEGIN), 1e-6),
    ),
    "not commutative": Problem(
        rf.ItoSDE(lambda t, z: 0 * z, lambda t, z: jnp.array([[1.0, 0.0], [0.0, z[0]]])),
        rf.Normal(jnp.array([MEAN, 0.0]), WIDTH),
    ),
}


def flow_of(
    problem: Problem, driver: rf.driver.AbstractDriver, integrator: rf.FixedGrid
) -> rf.StochasticFlow:
    return rf.StochasticFlow(problem.sde, problem.base, driver=driver, integrator=integrator)


@eqx.filter_jit
def ends(problem: Problem, path: rf.driver.Path, integrator: rf.FixedGrid) -> Array:
    z = problem.base.sample(key=jax.random.key(1), shape=path.batch_shape[-1:])
    return flow_of(problem, path.driver, integrator).push_forward(z, path)[0]


def projected(driver: rf.driver.AbstractDriver, path: rf.driver.Path, most: int = 0) -> Array:
    """Coefficients of the projection of the fine path, embedded in those of the driver with the most
    functions."""
    increments = jnp.moveaxis(path.coefficients, -2, 0) / FINE**0.5
    coefficients = driver.coefficients_of(np.linspace(0.0, 1.0, FINE + 1), increments)
    return embedded(driver, coefficients, most)


def embedded(driver: rf.driver.AbstractDriver, coefficients: Array, most: int) -> Array:
    """Coefficients of the same path for the driver with the most functions, so that one program serves all
    n."""
    while driver.num_functions < most:
        coefficients = driver.refine(coefficients, jnp.zeros_like(coefficients))
        driver = driver.refined()
    return coefficients


def rms(gap: Array) -> Array:
    """The root mean square over paths."""
    return jnp.sqrt(jnp.mean(jnp.sum(gap**2, axis=-1), axis=-1))


def strong_errors(problem: Problem, make: type, path: rf.driver.Path, truth: Array) -> np.ndarray:
    most = max(SIZES)
    near = make(most).path(jnp.stack([projected(make(n), path, most) for n in SIZES]))
    return np.asarray(rms(ends(problem, near, STEPS) - truth))


# ----------------------------------------------------------------------- biases of log p


def linear_bias(make: type) -> np.ndarray:
    """Z_T is normal; its variance is a sum of independent contributions, one for each function."""
    problem, decay = PROBLEMS["OU"], np.exp(-RATE)
    spread = (SPREAD * decay) ** 2
    truth = stats.norm(START * decay, np.sqrt(spread + SCALE**2 * (1 - decay**2) / (2 * RATE)))
    x, found = truth.ppf([0.02, 0.2, 0.5, 0.8, 0.98]), []
    for n in SIZES:
        flow = flow_of(problem, make(n), STEPS)
        each = flow.push_forward(jnp.zeros((n, 1)), flow.driver.path(jnp.eye(n)[..., None]))[0]
        near = stats.norm(START * decay, np.sqrt(spread + float(jnp.sum(each**2))))
        found.append(np.abs(near.logpdf(x) - truth.logpdf(x)).max())
    return np.array(found)


def heisenberg_log_prob(x: np.ndarray, driver: rf.driver.AbstractDriver) -> np.ndarray:
    """Given Z₁, the second component is normal; its variance |q|² is a quadratic form of the start and the
    coefficients of B₁. Given Z₁(T), E exp(−½λ²|q|²) is known in closed form, and Fourier inversion gives the
    density."""
    n, panels = driver.num_functions, 64  # the edges of the panels are the joints of piecewise paths
    nodes, weights = np.polynomial.legendre.leggauss(12)
    s = ((np.arange(panels)[:, None] + 0.5 + nodes / 2) / panels).ravel()
    weights = np.tile(weights, panels) / (2 * panels)
    functions = np.asarray(jax.vmap(lambda t: driver.slope(t, jnp.eye(n)))(jnp.asarray(s)))
    values = np.column_stack([np.ones_like(s), driver.integrals(jnp.asarray(s))])
    matrix = (weights[:, None] * functions).T @ values
    prior, mean = np.diag([WIDTH**2, *np.ones(n)]), np.array([MEAN, *np.zeros(n)])
    last = np.array([1.0, *np.asarray(driver.integrals(jnp.asarray(1.0)))])
    variance, gain = last @ prior @ last, prior @ last
    covariance = matrix @ (prior - np.outer(gain, gain) / variance) @ matrix.T
    sizes, axes = np.linalg.eigh(covariance)
    centre = (mean + gain * (x[:, :1] - MEAN) / variance) @ matrix.T @ axes
    f = np.linspace(0.0, 25.0, 5001)[:, None, None]
    spread = 1 + f**2 * np.maximum(sizes, 0)
    log_kernel = -0.5 * np.sum(np.log(spread) + (f * centre) ** 2 / spread, axis=-1)
    wave = np.exp(log_kernel - 0.5 * (WIDTH * f[..., 0]) ** 2) * np.cos(f[..., 0] * x[:, 1])
    density = np.trapezoid(wave, f[:, 0, 0], axis=0) / np.pi
    return np.log(density) + stats.norm(MEAN, np.sqrt(variance)).logpdf(x[:, 0])


def heisenberg_truth(x: np.ndarray) -> np.ndarray:
    """The density for Brownian motion, by Mehler's kernel."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    a, f = (MEAN + WIDTH * nodes)[:, None], np.linspace(1e-6, 25, 20_001)[None]
    density = []
    for end, height in x:
        inner = (a**2 + end**2) * np.cosh(f) - 2 * a * end
        kernel = np.sqrt(f / (2 * np.pi * np.sinh(f))) * np.exp(-f / (2 * np.sinh(f)) * inner)
        whole = weights @ kernel / np.sqrt(2 * np.pi) * np.exp(-0.5 * (WIDTH * f[0]) ** 2)
        density.append(np.trapezoid(whole * np.cos(f[0] * height), f[0]) / np.pi)
    return np.log(density)


def heisenberg_bias(make: type) -> np.ndarray:
    x = np.array([[0.5, 0.2], [1.2, -0.8], [-0.6, 0.5], [0.0, 0.0], [1.0, 1.5]])
    truth = heisenberg_truth(x)
    return np.array([np.abs(heisenberg_log_prob(x, make(n)) - truth).max() for n in SIZES])


CIR_POINTS = np.array([0.12, 0.2, 0.28, 0.38, 0.55])


def cir_truth() -> np.ndarray:
    c = 2 * KAPPA / (SIGMA**2 * (1 - np.exp(-KAPPA)))
    end = stats.ncx2(4 * KAPPA * MU / SIGMA**2, 2 * c * BEGIN * np.exp(-KAPPA))
    return end.logpdf(2 * c * CIR_POINTS) + np.log(2 * c)


@eqx.filter_jit
def cir_log_prob(path: rf.driver.Path, direction: Array) -> Array:
    """The log-density at the points given each path except one direction, computed for 2√Z/σ, whose noise is
    additive."""
    drift = lambda t, y: (2 * KAPPA * MU / SIGMA**2 - 0.5) / y - 0.5 * KAPPA * y
    sde = rf.StratonovichSDE(drift, lambda t, y: jnp.ones((1, 1)))
    flow = flow_of(Problem(sde, rf.Normal(jnp.ones(1))), path.driver, SOME)
    start, x = (2 * jnp.sqrt(jnp.asarray(z)) / SIGMA for z in (BEGIN, CIR_POINTS))
    at = lambda y: log_prob_along(flow, start, y, path, direction) + jnp.log(2 / (SIGMA**2 * y))
    return jax.lax.map(at, x)


def cir_bias(make: type) -> np.ndarray:
    """The bias from quasi-random paths. The direction with the largest effect on the end point is integrated
    exactly."""
    middle, most = (np.arange(FINE) + 0.5) / FINE, max(SIZES)
    # The approximate response of the end to noise.
    response = jnp.asarray(np.exp(-CALM * (1 - middle)) / FINE**0.5)[:, None]
    response = rf.PiecewiseLinear(FINE).path(response)
    direction = jnp.stack([projected(make(n), response, most)[:, 0] for n in SIZES])
    direction = direction / jnp.linalg.norm(direction, axis=1, keepdims=True)
    draws = [
        [stats.qmc.MultivariateNormalQMC(np.zeros(n), rng=seed).random(SOBOL) for seed in range(REPLICATES)]
        for n in SIZES
    ]
    paths = [
        embedded(make(n), jnp.asarray(np.concatenate(draw))[..., None], most)
        for n, draw in zip(SIZES, draws, strict=True)
    ]
    weights = np.exp(cir_log_prob(make(most).path(jnp.stack(paths)), direction[:, None]))
    parts = weights.reshape(len(CIR_POINTS), len(SIZES), REPLICATES, SOBOL).mean(axis=-1)
    density, error = parts.mean(axis=-1), parts.std(axis=-1, ddof=1) / REPLICATES**0.5
    print_row(TABLE, "CIR", "", "± log p", *(f"{e:.0e}" for e in (error / density).max(axis=0)))
    return np.abs(np.log(density) - cir_truth()[:, None]).max(axis=0)


BIASES = {"OU": linear_bias, "CIR": cir_bias, "not commutative": heisenberg_bias}

# ------------------------------------------------------------------------------- the whole


def compare() -> Iterator[str]:
    print_header(TABLE)
    results, fine, truth = {}, {}, {}
    for name, problem in PROBLEMS.items():
        size = flow_of(problem, rf.KarhunenLoeve(1), STEPS).noise_dimension
        fine[name] = rf.PiecewiseLinear(FINE).sample(
            key=jax.random.key(0), noise_dimension=size, shape=(PATHS,)
        )
        truth[name] = ends(problem, fine[name], STEPS)
        for driver, make in DRIVERS.items():
            strong = strong_errors(problem, make, fine[name], truth[name])
            bias = BIASES[name](make)
            print_row(TABLE, name, driver, "Z at T", *(f"{e:.1e}" for e in strong))
            print_row(TABLE, "", "", "log p", *(f"{e:.1e}" for e in bias))
            results[name, driver] = (strong, bias)
    draw(results)
    yield from on_default_grid(fine, truth)


def on_default_grid(fine: dict, truth: dict) -> Iterator[str]:
    """The truncation error of Z_T for each number of functions, and the error from the steps of the default
    grid."""
    print()
    print_header(GRID)
    shares = []
    for name, problem in PROBLEMS.items():
        for driver, make in DRIVERS.items():
            cells = []
            for n in FEW_AND_MANY:
                near, default = make(n).path(projected(make(n), fine[name])), rf.FixedGrid()
                whole = ends(problem, near, STEPS)
                left = float(rms(whole - truth[name]))
                moved = float(rms(ends(problem, near, default) - whole))
                cells += [f"{left:.1e}", f"{moved:.1e}", str(len(default.grid(near, None)) - 1)]
                shares += [moved / left] if make is rf.KarhunenLoeve else []
            print_row(GRID, name, driver, *cells)
    worst = max(shares)
    claim = "Karhunen–Loève (default): the error of the default steps is at most 1 % of the truncation error"
    yield verdict(worst < 0.01, f"{claim}, {100 * worst:.2f} %")


def draw(results: dict) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, grid = plt.subplots(2, 3, figsize=(9, 5.6), sharex=True, sharey="row", layout="constrained")
    for (name, driver), pair in results.items():
        column = list(PROBLEMS).index(name)
        grid[0, column].set_title(TITLES.get(name, name), fontsize=10)
        color, marker, line = LOOK[driver]
        for axes, error in zip(grid[:, column], pair, strict=True):
            axes.loglog(SIZES, error, line, marker=marker, markersize=4, color=color, label=driver)
            axes.set_xticks(SIZES, [str(n) for n in SIZES])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("number of functions $n$")
    grid[0, 0].set_ylabel("strong error of $Z_T$")
    grid[1, 0].set_ylabel(r"bias of $\log p$, nats")
    for axes, lowest in zip(grid[:, 0], LOWEST, strict=True):
        axes.set_ylim(bottom=lowest)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)
    plt.close(figure)
    print(f"wrote {FIGURE}")
