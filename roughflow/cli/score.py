"""`roughflow score`: the log density of each row."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import roughflow as rf
from roughflow.train import progress_bar

from .checkpoint import alone, begin, check_checkpoint, checkpoint_of, stopped
from .exits import TERMINATED, Terminated
from .kept_rows import KeptRows
from .model import chunks_for, read_model
from .output import check_table, write_table
from .refused import Refused
from .tally import Tally
from .text import STANDARD

COLUMNS = ("log_prob", "total_error", "effective_paths")
CHUNK = 4096  # rows that are scored at a time, and written: memory does not limit how many there are


def score(arguments: argparse.Namespace) -> int:
    inputs = [arguments.model, arguments.data]
    check_table(arguments.out, "the scores", arrays=False, force=arguments.force, inputs=inputs)
    if arguments.out is not None and arguments.out != STANDARD:
        with alone(arguments):
            return _to_file(arguments, arguments.out)
    if arguments.resume:
        raise Refused("--resume goes on with a file: name it, with --out")
    model = read_model(arguments.model)
    total, chunks = chunks_for(model, arguments.data, CHUNK)
    tally = Tally()
    write_table(arguments.out, COLUMNS, map(_columns, _estimates(model, total, chunks, arguments, 0, tally)))
    return _tell(tally)


def _to_file(arguments: argparse.Namespace, out: Path) -> int:
    """What is done is kept, for a table may take hours."""
    checkpoint = checkpoint_of(out)
    check_checkpoint(checkpoint, arguments)
    model = read_model(arguments.model)
    kept = KeptRows(out, checkpoint, COLUMNS, sources=[arguments.model])
    tally = Tally.of(kept.resume()) if arguments.resume else Tally()
    total, chunks = chunks_for(model, arguments.data, CHUNK)
    left = kept.reading(chunks)
    begin(checkpoint, arguments)
    try:
        for estimate in _estimates(model, total, left, arguments, kept.chunks, tally):
            kept.add(_columns(estimate), tally.notes)
        kept.finish()
    except KeyboardInterrupt as pressed:
        code = stopped(arguments, checkpoint, f"stopped at row {kept.rows} of {total}")
        return TERMINATED if isinstance(pressed, Terminated) else code
    return _tell(tally)


def _estimates(
    model: rf.Standardised,
    total: int,
    chunks: Iterator[np.ndarray],
    arguments: argparse.Namespace,
    first: int,
    tally: Tally,
) -> Iterator[rf.Estimate]:
    """Of all rows; random numbers depend on the seed and on a row's place in the file."""
    estimates = rf.estimate_chunks(
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


def _tell(tally: Tally) -> int:
    if tally.warnings.line:
        print(f"roughflow: warning: {_advice(tally.warnings.line)}", file=sys.stderr)
    print(f"mean log_prob {tally.mean:.4f} over {tally.count} rows (± {tally.error:.2g})", file=sys.stderr)
    return 0


def _advice(warning: str) -> str:
    """The library's warning, with the command line's own names."""
    return warning.replace("max_paths", "--paths")
