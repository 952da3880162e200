"""`roughflow score`: the log density of each row."""

import argparse
import sys
from collections.abc import Iterator

import jax
import numpy as np

import roughflow as rf
from roughflow.flow import Warnings
from roughflow.learn import progress_bar

from .join import devices_of_cpu
from .model import chunks_for, read_model
from .output import check_table, write_table

COLUMNS = ("log_prob", "total_error", "effective_paths")
CHUNK = 4096  # rows that are scored at a time, and written: memory does not limit how many there are


def score(arguments: argparse.Namespace) -> int:
    devices_of_cpu(arguments.devices)
    inputs = [arguments.model, arguments.data]
    check_table(arguments.out, "the scores", arrays=False, force=arguments.force, inputs=inputs)
    model = read_model(arguments.model)
    total, chunks = chunks_for(model, arguments.data, CHUNK)
    done = _Done()
    write_table(arguments.out, COLUMNS, done.noted(_estimates(model, total, chunks, arguments)))
    if done.warnings.line:
        print(f"roughflow: warning: {_advice(done.warnings.line)}", file=sys.stderr)
    print(f"mean log_prob {done.mean:.4f} over {done.count} rows (± {done.error:.2g})", file=sys.stderr)
    return 0


def _estimates(
    model: rf.Standardised, total: int, chunks: Iterator[np.ndarray], arguments: argparse.Namespace
) -> Iterator[rf.Estimate]:
    """Of all rows; random numbers depend on the seed and on a row's place in the file."""
    paths = arguments.paths
    estimates = rf.estimate_chunks(
        model,
        chunks,
        key=jax.random.key(arguments.seed),
        devices=arguments.devices,
        estimator=None if paths is None else rf.default_estimator(model.flow, paths),
        tolerance=arguments.tolerance,
    )
    with progress_bar(total, name="score", unit="row", shown=not arguments.quiet) as bar:
        for estimate in estimates:
            yield estimate
            bar.update(len(estimate.log_prob))
            bar.set_postfix_str("")


class _Done:
    """What is to be said in the end of rows that went by."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.warnings = Warnings()

    def noted(self, estimates: Iterator[rf.Estimate]) -> Iterator[list[np.ndarray]]:
        """The columns to write."""
        for estimate in estimates:
            self.warnings.add(estimate)
            columns = [np.asarray(getattr(estimate, name)) for name in COLUMNS]
            self._add(columns[0].astype(float))
            yield columns

    def _add(self, values: np.ndarray) -> None:
        """Mean and squares about it, of what there was and of these (Chan et al. 1979)."""
        with np.errstate(invalid="ignore"):
            both, apart = self.count + len(values), values.mean() - self.mean
            self.squares += np.sum((values - values.mean()) ** 2) + apart**2 * self.count * len(values) / both
            self.mean += apart * len(values) / both
        self.count = both

    @property
    def error(self) -> float:
        """Of the mean."""
        return self.squares**0.5 / self.count if np.isfinite(self.squares) else np.inf


def _advice(warning: str) -> str:
    """The library's warning, with the command line's own names."""
    return warning.replace("num_paths", "--paths").replace("max_paths: raise either", "--tolerance: raise it")
