"""`roughflow score`: the log-density of each row."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import roughflow as rf
from roughflow.density import Warnings
from roughflow.train import progress_bar

from .files import check_table, chunks_for, read_model
from .resume import KeptRows, alone, begin, check_checkpoint, checkpoint_of, stopped
from .startup import TERMINATED, Refused, Terminated
from .tables import STANDARD, write_table


@dataclasses.dataclass
class Tally:
    """Running statistics of log-densities: their number, mean and sum of squared deviations, and warnings."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    warnings: Warnings = dataclasses.field(default_factory=Warnings)

    @staticmethod
    def of(notes: dict[str, Any]) -> "Tally":
        """Restore the statistics from their notes."""
        warnings = Warnings()
        warnings.size = notes["count"]
        warnings.found = {name: (count, text) for name, (count, text) in notes["found"].items()}
        return Tally(notes["count"], notes["mean"], notes["squares"], warnings)

    @property
    def notes(self) -> dict[str, Any]:
        """The statistics as JSON values, to be stored in a checkpoint."""
        return {
            "count": self.count,
            "mean": self.mean,
            "squares": self.squares,
            "found": self.warnings.found,
        }

    def add(self, estimate: rf.Estimate) -> None:
        """Add log-densities by merging the means and squared deviations of two sets (Chan et al. 1979)."""
        self.warnings.add(estimate)
        values = np.asarray(estimate.log_prob, float)
        with np.errstate(invalid="ignore"):
            both, apart = self.count + len(values), float(values.mean()) - self.mean
            spread = apart**2 * self.count * len(values) / both
            self.squares += float(np.sum((values - values.mean()) ** 2)) + spread
            self.mean += apart * len(values) / both
        self.count = both

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.squares**0.5 / self.count if np.isfinite(self.squares) else np.inf


COLUMNS = ("log_prob", "total_error", "effective_paths")
CHUNK_ROWS = 4096  # rows scored and written at a time, to limit memory


def score(arguments: argparse.Namespace) -> int:
    inputs = [arguments.model, arguments.data]
    check_table(arguments.out, "the scores", arrays=False, force=arguments.force, inputs=inputs)
    if arguments.out is not None and arguments.out != STANDARD:
        with alone(arguments):
            return _to_file(arguments, arguments.out)
    if arguments.resume:
        raise Refused("--resume needs an output file: set --out")
    model = read_model(arguments.model)
    total, chunks = chunks_for(model, arguments.data, CHUNK_ROWS)
    tally = Tally()
    write_table(arguments.out, COLUMNS, map(_columns, _estimates(model, total, chunks, arguments, 0, tally)))
    return _print_summary(tally)


def _to_file(arguments: argparse.Namespace, out: Path) -> int:
    """Score the rows in chunks and record the progress, because a large table may take hours and the run may
    be interrupted."""
    checkpoint = checkpoint_of(out)
    check_checkpoint(checkpoint, arguments)
    model = read_model(arguments.model)
    kept = KeptRows(out, checkpoint, COLUMNS, sources=[arguments.model])
    tally = Tally.of(kept.resume()) if arguments.resume else Tally()
    total, chunks = chunks_for(model, arguments.data, CHUNK_ROWS)
    left = kept.reading(chunks)
    begin(checkpoint, arguments)
    try:
        for estimate in _estimates(model, total, left, arguments, kept.chunks, tally):
            kept.add(_columns(estimate), tally.notes)
        kept.finish()
    except KeyboardInterrupt as pressed:
        code = stopped(arguments, checkpoint, f"stopped at row {kept.rows} of {total}")
        return TERMINATED if isinstance(pressed, Terminated) else code
    return _print_summary(tally)


def _estimates(
    model: rf.tables.Standardised | rf.tables.WithRelations | rf.tables.MixedDensity,
    total: int,
    chunks: Iterator[np.ndarray],
    arguments: argparse.Namespace,
    first: int,
    tally: Tally,
) -> Iterator[rf.Estimate]:
    """Yield estimates for all rows, chunk by chunk. The random numbers of a row depend only on the seed and
    the index of the row in the file."""
    estimates = rf.tables.estimate_chunks(
        model,
        chunks,
        key=jax.random.key(arguments.seed),
        first=first,
        devices=arguments.devices,
        tolerance=arguments.tolerance,
        **({} if arguments.paths is None else {"max_paths": arguments.paths}),
    )
    shown = not arguments.quiet
    with progress_bar(total, done=tally.count, name="score", unit="row", shown=shown) as bar:
        for estimate in estimates:
            tally.add(estimate)
            yield estimate
            bar.update(len(estimate.log_prob))
            bar.set_postfix_str("")


def _columns(estimate: rf.Estimate) -> list[np.ndarray]:
    return [np.asarray(getattr(estimate, name)) for name in COLUMNS]


def _print_summary(tally: Tally) -> int:
    if tally.warnings.line:
        print(f"roughflow: warning: {_advice(tally.warnings.line)}", file=sys.stderr)
    print(f"mean log_prob {tally.mean:.4f} over {tally.count} rows (± {tally.error:.2g})", file=sys.stderr)
    return 0


def _advice(warning: str) -> str:
    """A warning of the library, with arguments named as on the command line."""
    return warning.replace("max_paths", "--paths")
