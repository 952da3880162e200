"""Coverage of confidence intervals, for `benchmarks.series`: simulated CIR series, each fitted in three ways.

Each finished fit is stored in the temporary directory, so that an interrupted run can be continued.
"""

import time
from collections.abc import Callable, Iterator

import jax
import jax.monitoring
import numpy as np

import roughflow as rf
from benchmarks.kept import kept_arrays, kept_file
from benchmarks.series_peers import euler_cir
from benchmarks.timing import format_table, verdict

TRUE, START = np.array([3.0, 0.3, 0.2]), np.array([2.0, 0.2, 0.3])  # κ, μ, σ
LENGTH, MONTH = 500, 1 / 12
LOW, HIGH = 0.90, 0.98  # accepted coverage of 95 % intervals


def cir_series(seed: int, length: int = LENGTH, dt: float = MONTH) -> np.ndarray:
    """An exact stationary series, from noncentral χ² transitions."""
    rng = np.random.default_rng(seed)
    kappa, mu, sigma = TRUE
    c = 2 * kappa / (sigma**2 * -np.expm1(-kappa * dt))
    freedom = 4 * kappa * mu / sigma**2
    x = [rng.gamma(freedom / 2, sigma**2 / (2 * kappa))]
    for _ in range(length - 1):
        x.append(rng.noncentral_chisquare(freedom, 2 * c * x[-1] * np.exp(-kappa * dt)) / (2 * c))
    return np.array(x)


def coverage(count: int, fresh: bool) -> Iterator[str]:
    """Fit `count` series; yield the table, then the verdicts."""
    fits = [kept_fit(seed, fresh) for seed in range(count)]
    names = ("kappa", "mu", "sigma")
    ours, low, high, exact, exact_low, exact_high, euler, seconds = (
        np.array(part) for part in zip(*fits, strict=True)
    )
    yield f"{count} CIR series of {LENGTH} values, dt = 1/12; median {np.median(seconds):.1f} s per fit\n"
    covers = np.mean((low <= TRUE) & (high >= TRUE), axis=0)
    exact_covers = np.mean((exact_low <= TRUE) & (exact_high >= TRUE), axis=0)
    rows = []
    for i, name in enumerate(names):
        for who, found, cover in (
            ("roughflow", ours, f"{covers[i]:.1%}"),
            ("exact", exact, f"{exact_covers[i]:.1%}"),
            ("Euler", euler, ""),
        ):
            error = found[:, i] - TRUE[i]
            rows.append([f"{name} {who}", f"{error.mean():+.5f}", f"{np.sqrt(np.mean(error**2)):.5f}", cover])
    yield format_table(["parameter, method", "bias", "RMSE", "95 % intervals cover"], rows)
    apart = np.max(np.abs(ours - exact) / exact.std(axis=0), axis=0)
    yield f"roughflow's estimates differ from exact ones by at most {apart.max():.3f} standard deviations\n"
    shown = ", ".join(f"{name} {cover:.1%}" for name, cover in zip(names, covers, strict=True))
    good = bool(np.all((covers >= LOW) & (covers <= HIGH)))
    yield verdict(good, f"coverage of 95 % intervals between {LOW:.0%} and {HIGH:.0%}", shown)
    fit_cir(count, exact=False)
    new = compiled_by(lambda: fit_cir(count + 1, exact=False))
    yield verdict(new == 0, "a second fit of the same shape compiles nothing", f"{new} programs")


def kept_fit(seed: int, fresh: bool) -> list[np.ndarray]:
    """Estimates and intervals from roughflow's transitions and from exact ones, Euler estimates, and
    seconds."""
    file = kept_file("series-coverage", seed, TRUE, START, LENGTH, MONTH)

    def make() -> list[np.ndarray]:
        start = time.perf_counter()
        ours = fit_cir(seed, exact=False)
        seconds = time.perf_counter() - start
        parts = [[fit.estimates, *intervals(fit)] for fit in (ours, fit_cir(seed, exact=True))]
        return [*parts[0], *parts[1], euler_cir(cir_series(seed), MONTH, START), np.array(seconds)]

    return kept_arrays(file, make, fresh=fresh)


def intervals(fit: rf.FittedSDE) -> np.ndarray:
    """Lower and upper ends of the intervals, `(2, p)`."""
    return np.array(list(fit.confint().values())).T


def fit_cir(seed: int, *, exact: bool) -> rf.FittedSDE:
    sde = rf.CoxIngersollRoss(*START.tolist())
    times, key = MONTH * np.arange(LENGTH), jax.random.key(seed)
    return rf.fit_sde(sde, times, cir_series(seed), key=key, num_starts=1, exact=exact)


def compiled_by(call: Callable[[], object]) -> int:
    """The number of programs that a call compiles."""
    programs: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event.endswith("/backend_compile_duration"):
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    call()
    return len(programs)
