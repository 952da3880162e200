"""Conditional densities p(y | x) by two methods: `python -m benchmarks.conditional`.

`rf.fit_density(y, given=x)` is compared with flowjax's conditional spline flow, both with default settings,
on two tasks. For a distribution whose p(y | x) is known, the excess loss over the truth is shown. The other
task is a real table: the price of a diamond given six of its measurements (`benchmarks.tables_data`). Errors
are standard errors over the test rows. Seconds are the time for fitting and scoring, including compilation.
The last lines state the requirements and whether they are met. This needs the extra `peers`.

`python -m benchmarks.conditional uci_splits.npz NAME …` instead fits `rf.tables.fit_regression` to regression
tables with fixed splits (arrays NAME__x, NAME__y, NAME__tr0, NAME__te0, …): it prints the log-likelihood of y
given x and the coverage of 90 % intervals over the test rows of all splits.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from scipy import stats

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.tables import standard_error, verdict
from benchmarks.tables_data import splits
from benchmarks.tables_peers import flowjax

ROWS = (9_000, 1_000, 10_000)  # training, validation and test rows
EXCESS = 0.03
PRICE = 3  # index of the column of the price
TABLE: Columns = (("table", 12), ("method", 10), ("log-likelihood", 18), ("excess", 16), ("seconds", 7))


@dataclass(frozen=True)
class Task:
    """Rows whose last `context` columns are given, and the true log-densities of the test rows if they are
    known."""

    parts: tuple[np.ndarray, np.ndarray, np.ndarray]
    context: int
    truth: np.ndarray | None = None


def known() -> Task:
    """Two branches that separate and meet again, with a spread that changes along them; x is uniform."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, sum(ROWS))
    place, spread = branches(x)
    y = np.where(rng.uniform(size=x.size) < 0.5, place, -place) + spread * rng.normal(size=x.size)
    parts = np.split(np.stack([y, x], axis=1), np.cumsum(ROWS)[:2])
    place, spread = branches(parts[2][:, 1])
    each = [stats.norm.logpdf(parts[2][:, 0], sign * place, spread) for sign in (-1, 1)]
    return Task((parts[0], parts[1], parts[2]), 1, np.logaddexp(*each) - np.log(2))


def branches(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return 1 + np.sin(2 * x), 0.15 + 0.1 * x**2


def price() -> Task:
    (split,) = splits("diamonds")
    moved = [np.roll(part, -PRICE, axis=1) for part in (split.train, split.validation, split.test)]
    return Task((moved[0], moved[1], moved[2]), split.train.shape[1] - 1)


def ours(task: Task) -> np.ndarray:
    own = task.parts[0].shape[1] - task.context
    (y, x), held_out, (test, given) = (np.split(part, [own], axis=1) for part in task.parts)
    key_fit, key_test = jax.random.split(jax.random.key(0))
    fitted = rf.fit_density(y, given=x, validation=tuple(held_out), key=key_fit, progress=False)
    return np.asarray(fitted.model.log_prob(test, given=given, key=key_test), float)


METHODS: dict[str, Callable[[Task], np.ndarray]] = {
    "flowjax": lambda task: flowjax(*task.parts, seed=0, context=task.context),
    "roughflow": ours,
}


def main() -> None:
    print_header(TABLE)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, task in (("two branches", known()), ("diamonds", price())):
        found[name] = {}
        for method, run in METHODS.items():
            start = time.perf_counter()
            value = run(task)
            seconds = time.perf_counter() - start
            found[name][method] = value if task.truth is None else task.truth - value
            missed = "" if task.truth is None else told(task.truth - value)
            print_row(TABLE, name, method, told(value), missed, f"{seconds:.0f}")
    mine = found["two branches"]["roughflow"]
    print("\n" + verdict(mine.mean() <= EXCESS, f"excess at most {EXCESS:g}: {told(mine)}"))
    gain = found["diamonds"]["roughflow"] - found["diamonds"]["flowjax"]
    print(
        verdict(gain.mean() >= 0, f"at least as good as flowjax on the diamonds, row by row {told(gain)}"),
        flush=True,
    )


def uci(path: str, names: list[str]) -> None:
    arrays = np.load(path)
    for name in names:
        x, y, found = arrays[f"{name}__x"], arrays[f"{name}__y"][:, 0], []
        start = time.perf_counter()
        while f"{name}__tr{len(found)}" in arrays:
            train, test = (arrays[f"{name}__{part}{len(found)}"] for part in ("tr", "te"))
            key = jax.random.key(len(found))
            regression = rf.tables.fit_regression(y[train], x[train], key=key, progress=False)
            prediction = regression.conditional(x[test])
            inside = np.abs(prediction.cdf(y[test]) - 0.5) < 0.45
            found.append(np.stack([prediction.log_prob(y[test]), inside]))
        log_prob, inside = np.concatenate(found, axis=1)
        seconds = time.perf_counter() - start
        covered = f"{inside.mean():.1%} in 90 % intervals"
        print(f"{name}: {told(log_prob)}, {covered}, {len(found)} splits, {seconds:.0f} s", flush=True)


def told(rows: np.ndarray) -> str:
    return f"{rows.mean():.3f} ± {standard_error(rows):.3f}"


if __name__ == "__main__":
    if sys.argv[1:]:
        uci(sys.argv[1], sys.argv[2:])
    else:
        main()
