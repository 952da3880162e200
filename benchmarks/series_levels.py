"""Calibration of intervals, forecasts and tests, for `benchmarks.series`: simulated series of six processes.

The search starts from the moments of each series. The benchmark counts intervals that contain the true
parameter, forecast bands that contain the later value, and residual tests (uniformity, Ljung–Box) that reject
the fitted model. Series are simulated in NumPy, by exact transitions or by 200 small steps per value.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import numpy as np

import roughflow as rf
from benchmarks.kept import kept_arrays, kept_file
from benchmarks.timing import format_table, verdict

HORIZONS = (1, 12, 60)  # forecast horizons, in values after the series
TOLERANCE = 0.1  # nats, error of the log-likelihood if transitions are not known
SMALL_STEPS = 200  # per value, if transitions are not known
COVERAGE, REJECTED = (0.91, 0.98), (0.02, 0.09)


def small_steps(drift: Callable, noise: Callable, low: float, high: float) -> Callable:
    """A transition by Milstein's scheme, reflected at the ends of the state space."""

    def step(x: float, dt: float, rng: np.random.Generator) -> float:
        h = dt / SMALL_STEPS
        for e in rng.normal(size=SMALL_STEPS):
            slope = (noise(x + 1e-6) ** 2 - noise(x - 1e-6) ** 2) / 4e-6  # σσ'
            x = x + drift(x) * h + noise(x) * np.sqrt(h) * e + 0.5 * slope * h * (e**2 - 1)
            x = 2 * low - x if x < low else 2 * high - x if x > high else x
        return x

    return step


def vasicek(kappa: float, mu: float, sigma: float) -> Callable:
    spread = lambda dt: sigma * np.sqrt(-np.expm1(-2 * kappa * dt) / (2 * kappa))
    return lambda x, dt, rng: mu + (x - mu) * np.exp(-kappa * dt) + spread(dt) * rng.normal()


def square_root(kappa: float, mu: float, sigma: float) -> Callable:
    def step(x: float, dt: float, rng: np.random.Generator) -> float:
        scale = sigma**2 * -np.expm1(-kappa * dt) / (4 * kappa)
        return scale * rng.noncentral_chisquare(4 * kappa * mu / sigma**2, x * np.exp(-kappa * dt) / scale)

    return step


def jacobi(kappa: float, mu: float, sigma: float) -> Callable:
    noise = lambda x: sigma * np.sqrt(max(x * (1 - x), 0.0))
    return small_steps(lambda x: kappa * (mu - x), noise, 0.0, 1.0)


def double_well(a: float, b: float, sigma: float) -> Callable:
    return small_steps(lambda x: a * x - b * x**3, lambda x: sigma, -np.inf, np.inf)


# Process, true parameters, first value, time between values, number of values, transition in NumPy.
PROBLEMS: dict[str, tuple] = {
    "OU": (rf.OrnsteinUhlenbeck, (2.0, 0.3, 0.4), 0.3, 1 / 12, 500, vasicek),
    "CIR above Feller": (rf.CoxIngersollRoss, (2.0, 0.3, 0.4), 0.3, 1 / 12, 500, square_root),
    "CIR below Feller": (rf.CoxIngersollRoss, (2.0, 0.1, 0.8), 0.1, 1 / 12, 500, square_root),
    "Jacobi": (rf.Jacobi, (2.0, 0.4, 0.6), 0.4, 1 / 12, 500, jacobi),
    "double well": (rf.DoubleWell, (1.0, 1.0, 0.7), 1.0, 0.2, 500, double_well),
    "fractional OU": (rf.FractionalOrnsteinUhlenbeck, (2.0, 0.3, 0.4, 0.3), 0.3, 1 / 12, 500, None),
}


def simulated(name: str, seed: int) -> np.ndarray:
    """A series, and the values after it."""
    kind, true, first, dt, count, transition = PROBLEMS[name]
    length = count + max(HORIZONS)
    if transition is None:
        return np.asarray(kind(*true).sample(first, dt, length - 1, key=jax.random.key(seed)))
    rng, step, x = np.random.default_rng(seed), transition(*true), [first]
    for _ in range(length - 1):
        x.append(step(x[-1], dt, rng))
    return np.maximum(x, 1e-14) if kind is rf.CoxIngersollRoss else np.array(x)


def one_series(name: str, seed: int) -> list[np.ndarray]:
    """Which intervals and forecast bands cover, p-values of residuals, and whether the fit is reliable."""
    kind, true, _, dt, count, _ = PROBLEMS[name]
    x, ahead = simulated(name, seed), np.array(HORIZONS)
    options = {"key": jax.random.key(seed), "tolerance": TOLERANCE}
    result = rf.fit_sde(kind, dt * np.arange(count), x[:count], **options)
    covers = [
        low <= value <= high for (low, high), value in zip(result.confint().values(), true, strict=True)
    ]
    # For a process with memory, each draw of the parameters needs the whole series again.
    uncertain = result.identified and kind is not rf.FractionalOrnsteinUhlenbeck
    options = {"num_paths": 2000, "parameter_uncertainty": uncertain}
    paths = result.forecast(dt * ahead, key=jax.random.key(seed + 1), **options)[..., 0]
    low, high = np.quantile(paths, [0.025, 0.975], axis=0)
    came = x[count - 1 + ahead]
    residuals = result.residuals(key=jax.random.key(seed + 2))
    tests = np.array([residuals.uniformity, residuals.ljung_box])
    error = (result.estimates - true) / list(result.standard_errors.values())
    return [covers, error, (low <= came) & (came <= high), tests, np.array(result.reliable)]


def kept_series(name: str, seed: int, fresh: bool) -> list[np.ndarray]:
    jax.config.update("jax_enable_x64", True)
    file = kept_file("series-levels", seed, name, *PROBLEMS[name][1:5], HORIZONS)
    return kept_arrays(file, lambda: one_series(name, seed), fresh=fresh)


def levels(count: int, fresh: bool) -> Iterator[str]:
    """Yield a table of all processes, then the verdicts."""
    rows, good = [], {"intervals": True, "forecast bands": True, "uniformity tests": True}
    inside = lambda shares, limits: bool(np.all((shares >= limits[0]) & (shares <= limits[1])))
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name in PROBLEMS:
            fits = list(pool.map(kept_series, [name] * count, range(count), [fresh] * count, chunksize=10))
            covers, errors, bands, tests, reliable = (np.array(part) for part in zip(*fits, strict=True))
            shares = covers.mean(axis=0), bands.mean(axis=0), (tests < 0.05).mean(axis=0)
            good["intervals"] &= inside(shares[0], COVERAGE)
            good["forecast bands"] &= inside(shares[1], COVERAGE)
            good["uniformity tests"] &= inside(shares[2][:1], REJECTED)
            cells = [" ".join(f"{100 * share:.1f}" for share in part) for part in shares]
            bias = " ".join(f"{error:+.2f}" for error in np.nanmedian(errors, axis=0))
            rows.append([name, *cells, bias, f"{100 * np.mean(~reliable):.1f}"])
    head = [
        "process",
        "intervals cover, %",
        "bands cover, %",
        "uniformity, Ljung–Box reject, %",
        "median error, standard errors",
        "unreliable, %",
    ]
    yield f"{count} series of each process; 95 % intervals and bands, tests at 5 %\n"
    yield format_table(head, rows)
    limits = {"intervals": COVERAGE, "forecast bands": COVERAGE, "uniformity tests": REJECTED}
    for part, (low, high) in limits.items():
        yield verdict(good[part], f"{part}: {low:.0%} to {high:.0%}", "see above")
