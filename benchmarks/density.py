"""Densities against the truth: `python -m benchmarks.density [--only ou-1 cir ...]`, in float64.

The problems have known densities (`benchmarks.problems`), which are evaluated at the centre and at three
standard deviations from it. The first part compares the paper's estimator, the mean of p(x | path) over 1000
paths, with `flow.estimate` with default settings and 64 paths. The second part sets `tolerance=1e-2`. The
third part compares the mean square errors of both estimators at equal time. Errors are in log p and include
the truncation error of the driver, which is printed if it is known. Seconds are the time of a warm call for
all points of a problem. The last lines state the requirements and whether they are met.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

import roughflow as rf
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.timing import first_call, interleave

PRIOR = rf.PullBack(num_paths=1000)
KEYS = 20  # number of keys for coverage and mean square errors
BIAS = 5e-3
BARS, FLOOR = 3.0, 1e-6  # standard errors, and the ODE solver error allowed if they are zero
TOLERANCE, MISS = 1e-2, 3e-2
RACE, GAIN = ("ou-1", "double-well"), 100.0
CLIP = 20.0  # nats, error of an estimate of −inf

# Rows are printed as soon as they are available, so their widths are fixed.
Columns = tuple[tuple[str, int], ...]
POINTS: Columns = (
    ("problem and point", 17),
    ("true log p", 10),
    ("prior error", 11),
    ("s.e.", 6),
    ("effective", 9),
    ("lost", 5),
    ("default error", 13),
    ("s.e.", 7),
    ("effective", 9),
    ("truncation", 10),
    (f"> 3 s.e. of {KEYS}", 14),
)
MEETING: Columns = (
    ("problem", 16),
    ("worst error", 11),
    ("of the driver", 13),
    ("s.e. there", 10),
    ("paths", 10),
    ("seconds", 8),
    ("first time", 10),
    ("warning", 8),
)
RACING: Columns = (
    ("problem", 16),
    ("default s", 9),
    ("prior s", 8),
    ("prior paths", 11),
    ("-inf", 6),
    ("default MSE", 11),
    ("prior MSE", 10),
    ("ratio", 8),
)


@dataclass(frozen=True)
class Finding:
    """The results of the first two parts for one problem."""

    problem: Problem
    runs: list[rf.Estimate]  # from the default estimator, for keys 0, 1, …
    met: rf.Estimate  # with the tolerance

    @property
    def bars(self) -> np.ndarray:
        """Errors of the default estimator in standard errors, `(KEYS, k)`."""
        return np.array([in_bars(self.problem, run) for run in self.runs])


def main() -> None:
    options = parse_arguments()
    jax.config.update("jax_enable_x64", True)
    problems, runs = {}, {}
    print(
        f"1. {PRIOR.num_paths} paths from the prior, solved backwards, and the default estimator with 64 "
        "paths\n"
    )
    print_header(POINTS)
    for name in PROBLEMS:
        if name in (options.only or PROBLEMS):
            problems[name] = PROBLEMS[name]()
            runs[name] = compare(name, problems[name])
    print(f"\n2. The default estimator with tolerance={TOLERANCE:g}\n")
    print_header(MEETING)
    met = {name: meet(name, problem) for name, problem in problems.items()}
    print(f"\n3. Mean square error at equal time, over points and {KEYS} keys; errors clipped at {CLIP:g}\n")
    print_header(RACING)
    ratios = {name: race(name, problems[name], runs[name]) for name in RACE if name in problems}
    print("\n4. Requirements\n")
    findings = {name: Finding(problems[name], runs[name], met[name]) for name in problems}
    print("\n".join([*verdicts(findings), *race_verdicts(ratios)]), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(PROBLEMS), metavar="PROBLEM", help=", ".join(PROBLEMS)
    )
    return parser.parse_args()


def compare(name: str, problem: Problem) -> list[rf.Estimate]:
    """Print the rows of a problem, and return the default estimates for all keys. The first one is
    printed."""
    by_default, from_prior = partial(estimate, problem), partial(estimate, problem, estimator=PRIOR)
    compiling = first_call(by_default)
    default, prior = estimate(problem, truncation=True), from_prior()
    times = interleave({"default": by_default, "prior": from_prior}, 3)
    seconds = {which: np.median(t) for which, t in times.items()}
    runs = [estimate(problem, key) for key in range(KEYS)]
    beyond = np.sum([in_bars(problem, run) > BARS for run in runs], axis=0)
    print(
        f"{name}: {problem.setting}; {seconds['prior']:.3f} s from the prior, {seconds['default']:.3f} s "
        f"by default ({compiling:.0f} s the first time)"
    )
    for i, label in enumerate(problem.labels):
        print_row(
            POINTS,
            f"  {label}",
            f"{problem.truth[i]:.4f}",
            f"{errors(problem, prior)[i]:+.3f}",
            f"{prior.standard_error[i]:.3f}",
            f"{prior.effective_paths[i]:.1f}",
            f"{prior.escaped[i]}",
            f"{errors(problem, default)[i]:+.1e}",
            f"{default.standard_error[i]:.1e}",
            f"{default.effective_paths[i]:.1f}",
            f"{default.truncation_error[i]:.1e}",
            "" if problem.goal == "bias" else f"{beyond[i]}",
        )
    for which, warning in (("prior", prior.warning), ("default", default.warning)):
        if warning:
            print(f"  {which}: {warning}", flush=True)
    return runs


def meet(name: str, problem: Problem) -> rf.Estimate:
    """Print the results with a tolerance."""
    run = partial(estimate, problem, tolerance=TOLERANCE)
    compiling = first_call(run)
    start = time.perf_counter()
    met = run()
    seconds = time.perf_counter() - start
    worst = np.argmax(np.abs(errors(problem, met)))
    left_out = np.broadcast_to(problem.left_out, met.log_prob.shape)[worst]
    used = np.unique(met.num_paths)
    print_row(
        MEETING,
        name,
        f"{errors(problem, met)[worst]:+.1e}",
        f"{left_out:+.1e}",
        f"{met.standard_error[worst]:.1e}",
        "-".join(str(count) for count in (used[0], used[-1])[: used.size]),
        f"{seconds:.2f}",
        f"{compiling:.2f}",
        met.warning or "none",
    )
    return met


def race(name: str, problem: Problem, runs: list[rf.Estimate]) -> float:
    """The ratio of the mean square error of paths from the prior to that of the default estimator, at equal
    time."""
    paths, default_s, prior_s = equal_time(problem)
    default = np.array([errors(problem, run) for run in runs])
    prior = np.array(
        [
            errors(problem, estimate(problem, key, estimator=rf.PullBack(num_paths=paths)))
            for key in range(KEYS)
        ]
    )
    mse = [np.mean(np.minimum(np.abs(error), CLIP) ** 2) for error in (default, prior)]
    print_row(
        RACING,
        name,
        f"{default_s:.3f}",
        f"{prior_s:.3f}",
        f"{paths}",
        f"{np.mean(np.isneginf(prior)):.0%}",
        f"{mse[0]:.1e}",
        f"{mse[1]:.1e}",
        f"{mse[1] / mse[0]:.1e}",
    )
    return mse[1] / mse[0]


def equal_time(problem: Problem) -> tuple[int, float, float]:
    """The number of paths from the prior that take as long as the default estimator, and the seconds of
    both."""
    paths = PRIOR.num_paths
    for _ in range(5):
        prior = partial(estimate, problem, estimator=rf.PullBack(num_paths=paths))
        times = interleave({"default": partial(estimate, problem), "prior": prior}, 5)
        default_s, prior_s = np.median(times["default"]), np.median(times["prior"])
        if 0.9 < prior_s / default_s < 1.2:
            break
        paths = int(np.clip(paths * default_s / prior_s, 16, 2**18))
    return paths, default_s, prior_s


def verdicts(findings: Mapping[str, Finding]) -> Iterator[str]:
    exact = {n: errors(f.problem, f.runs[0]) for n, f in findings.items() if f.problem.goal == "bias"}
    if exact:
        yield verdict(f"OU and GBM within {BIAS:g} of the truth with 64 paths", exact, BIAS)
    bars = {n: f.bars for n, f in findings.items() if f.problem.goal == "bars"}
    if bars:
        first = {n: b[0] for n, b in bars.items()}
        yield verdict(
            f"CIR, sech, CNF and double well within {BARS:g} standard errors with 64 paths", first, BARS
        )
        every = np.concatenate([b.ravel() for b in bars.values()])
        yield f"  (with {KEYS} keys, {np.sum(every > BARS)} of {every.size} estimates have larger errors)"
    # A tolerance applies to the Monte Carlo error. `truncation=True` estimates the truncation error of the
    # driver.
    missed = {n: errors(f.problem, f.met) - f.problem.left_out for n, f in findings.items()}
    yield verdict(f"with tolerance={TOLERANCE:g} within {MISS:g} of the driver's density", missed, MISS)
    wide = {n: np.max(f.met.standard_error) for n, f in findings.items()}
    yield verdict(f"with standard errors of at most {TOLERANCE:g}", wide, TOLERANCE)


def race_verdicts(ratios: Mapping[str, float]) -> Iterator[str]:
    for name, ratio in ratios.items():
        word = "holds" if ratio >= GAIN else "FALLS SHORT"
        yield f"{word}: mean square error at equal time {GAIN:g} times smaller on {name}: {ratio:.2g} times"


def verdict(claim: str, metrics: Mapping[str, np.ndarray], limit: float) -> str:
    """One line with the largest number of each problem, and whether it is within the limit."""
    worst = {name: float(np.max(np.abs(values))) for name, values in metrics.items()}
    word = "holds" if all(value <= limit for value in worst.values()) else "FALLS SHORT"
    shown = [f"{name} {value:.2g}{'' if value <= limit else ' (!)'}" for name, value in worst.items()]
    return f"{word}: {claim}; worst: {', '.join(shown)}"


def estimate(problem: Problem, key: int = 0, **arguments) -> rf.Estimate:
    return jax.block_until_ready(problem.flow.estimate(problem.x, key=jax.random.key(key), **arguments))


def errors(problem: Problem, estimate: rf.Estimate) -> np.ndarray:
    return np.asarray(estimate.log_prob) - problem.truth


def in_bars(problem: Problem, estimate: rf.Estimate) -> np.ndarray:
    """Errors in standard errors; errors below `FLOOR` count as zero."""
    return np.abs(errors(problem, estimate)) / (np.asarray(estimate.standard_error) + FLOOR / BARS)


def print_header(columns: Columns) -> None:
    print_row(columns, *(title for title, _ in columns))
    print_row(columns, *("-" * width for _, width in columns))


def print_row(columns: Columns, *cells: str) -> None:
    """Print a row with the first cell left-aligned and the others right-aligned."""
    widths = [width for _, width in columns]
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    print("  ".join([cells[0].ljust(widths[0]), *padded[1:]]), flush=True)


if __name__ == "__main__":
    main()
