"""The default estimator where it is hard: `python -m benchmarks.hard [--only fold star-0.5 ...]`.

Problems with several bundles of paths to a point, folds, explosions and strong contraction, in float64, and
three flows fitted to data, in float32 (`benchmarks.hard_problems`). For each point: the reference and its
standard error; the error of `flow.estimate(x, key=jax.random.key(0))` as it comes, its `total_error`, how
many bars the error is (a bar holds both errors) and whether the estimate is flagged as `suspect`; then over
all keys how many estimates are more than three bars off and not flagged, and how many are flagged. The fitted
flows have a line for all their points, over all keys. Seconds are those of a call for all points of a
problem.

Models and references are made once and kept in the temporary directory: half an hour on two cores.
`--fresh` makes them anew. The lines at the end say what was asked for and whether it holds.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.hard_problems import PROBLEMS, SINGLE, HardProblem, Reference, reference
from benchmarks.timing import first_call, timed

KEYS = 20
BARS, FLOOR = 3.0, 1e-4  # bars that an error may have, and what an ODE solver may leave where they are zero
WRONG, FLAGGED = 0.01, 0.05  # shares of estimates
BIASED, BIAS, CLOSE, CLOSE_BARS = "star-0.5", 0.01, 0.93, 2.0
CLIP = 20.0  # nats, for an estimate of −inf

POINTS: Columns = (
    ("problem and point", 17),
    ("reference", 10),
    ("s.e.", 7),
    ("error", 8),
    ("total error", 11),
    ("bars", 5),
    ("flagged", 7),
    ("keys wrong", 10),
    ("keys flagged", 12),
)
SUMMARY: Columns = (
    ("problem", 12),
    ("reference s.e.", 14),
    ("mean error", 10),
    ("rms error", 9),
    ("total error", 11),
    ("in 2 bars", 9),
    ("wrong", 7),
    ("flagged", 7),
)


@dataclass(frozen=True)
class Finding:
    """The default's answers on a problem: everything (keys, points)."""

    error: np.ndarray
    total_error: np.ndarray
    bars: np.ndarray
    flagged: np.ndarray

    @property
    def wrong(self) -> np.ndarray:
        """Beyond three bars, and nothing said."""
        return ~(self.bars <= BARS) & ~self.flagged


def main() -> None:
    options = parse_arguments()
    chosen = [name for name in PROBLEMS if name in (options.only or PROBLEMS)]
    findings = {}
    for single in (False, True):
        group = [name for name in chosen if (name in SINGLE) == single]
        if group:
            print("\nFlows fitted to data, float32\n" if single else "Hard problems, float64\n")
            print_header(SUMMARY if single else POINTS)
        for name in group:
            with jax.enable_x64(not single):
                findings[name] = examine(name, options.keys, options.fresh)
    print("\nWhat was asked for\n")
    print("\n".join(verdicts(findings)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(PROBLEMS), metavar="PROBLEM", help=", ".join(PROBLEMS)
    )
    parser.add_argument("--keys", type=int, default=KEYS, help=f"how many, {KEYS} unless told")
    parser.add_argument("--fresh", action="store_true", help="train and compute references anew")
    return parser.parse_args()


def examine(name: str, keys: int, fresh: bool) -> Finding:
    """Print what the default makes of a problem."""
    problem = PROBLEMS[name](fresh=fresh) if name in SINGLE else PROBLEMS[name]()
    truth = reference(name, problem, fresh=fresh)
    compiling, warm = first_call(lambda: estimate(problem)), timed(lambda: estimate(problem))
    runs = [estimate(problem, key) for key in range(keys)]
    found = compare(truth, runs)
    print(f"{name}: {problem.setting}; {warm:.2f} s ({compiling:.0f} s the first time)")
    (print_summary if problem.single else print_points)(name, problem, truth, found)
    if runs[0].warning:
        print(f"  {runs[0].warning}", flush=True)
    return found


def compare(truth: Reference, runs: list[rf.Estimate]) -> Finding:
    gather = lambda field: np.array([np.asarray(getattr(run, field)) for run in runs])
    error, total = gather("log_prob") - truth.value, gather("total_error")
    bars = np.abs(error) / (np.hypot(total, truth.error) + FLOOR / BARS)
    return Finding(error, total, bars, gather("suspect"))


def print_points(name: str, problem: HardProblem, truth: Reference, found: Finding) -> None:
    del name
    for i, label in enumerate(problem.labels):
        print_row(
            POINTS,
            f"  {label}",
            f"{truth.value[i]:.4f}",
            f"{truth.error[i]:.4f}",
            f"{found.error[0, i]:+.3f}",
            f"{found.total_error[0, i]:.3f}",
            f"{found.bars[0, i]:.1f}",
            "yes" if found.flagged[0, i] else "no",
            f"{found.wrong[:, i].sum()}",
            f"{found.flagged[:, i].sum()}",
        )


def print_summary(name: str, problem: HardProblem, truth: Reference, found: Finding) -> None:
    del problem
    print_row(
        SUMMARY,
        f"  {name}",
        f"{np.sqrt(np.mean(truth.error**2)):.4f}",
        f"{mean_error(found):+.4f}",
        f"{np.sqrt(np.mean(clipped(found) ** 2)):.3f}",
        f"{np.median(found.total_error):.3f}",
        f"{close(found):.1%}",
        f"{found.wrong.mean():.2%}",
        f"{found.flagged.mean():.2%}",
    )


def clipped(found: Finding) -> np.ndarray:
    return np.clip(found.error, -CLIP, CLIP)


def mean_error(found: Finding) -> float:
    return float(np.mean(clipped(found)))


def close(found: Finding) -> float:
    return float(np.mean(found.bars <= CLOSE_BARS))


def verdicts(findings: Mapping[str, Finding]) -> Iterator[str]:
    missed = {name: int(found.wrong[0].sum()) for name, found in findings.items() if found.wrong[0].any()}
    claim = f"with key 0 every estimate within {BARS:g} bars or flagged"
    yield holds(not missed, f"{claim}; those that are not: {missed or 'none'}")
    for group, single in (("hard problems", False), ("fitted flows", True)):
        part = {name: found for name, found in findings.items() if (name in SINGLE) == single}
        if part:
            wrong = {name: found.wrong for name, found in part.items()}
            flagged = {name: found.flagged for name, found in part.items()}
            yield at_most(WRONG, f"{group}, all keys: further off and not flagged", wrong)
            yield at_most(FLAGGED, f"{group}, all keys: flagged", flagged)
    if BIASED in findings:
        bias, share = mean_error(findings[BIASED]), close(findings[BIASED])
        yield holds(abs(bias) <= BIAS, f"{BIASED}: mean error within {BIAS:g}: {bias:+.4f}")
        claim = f"{BIASED}: within {CLOSE_BARS:g} bars in at least {CLOSE:.0%}"
        yield holds(share >= CLOSE, f"{claim}: {share:.1%}")


def at_most(limit: float, claim: str, cases: Mapping[str, np.ndarray]) -> str:
    """One line: the share of the cases that are true, in all and for each problem."""
    share = np.mean(np.concatenate([values.ravel() for values in cases.values()]))
    each = ", ".join(f"{name} {values.mean():.1%}" for name, values in cases.items())
    return holds(bool(share <= limit), f"{claim} at most {limit:.0%}: {share:.2%} ({each})")


def holds(true: bool, claim: str) -> str:
    return f"{'holds' if true else 'FALLS SHORT'}: {claim}"


def estimate(problem: HardProblem, key: int = 0) -> rf.Estimate:
    return jax.block_until_ready(problem.flow.estimate(problem.x, key=jax.random.key(key)))


if __name__ == "__main__":
    main()
