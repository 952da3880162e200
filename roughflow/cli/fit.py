"""`roughflow fit`: fit a model to a table, with a summary and a report."""

import argparse
import itertools
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import roughflow as rf
from roughflow.faq import see

from .files import check_writable, wanted_columns, with_figures
from .resume import alone, begin, check_checkpoint, checkpoint_of, remove, stopped
from .startup import INTERRUPTED, Refused, joined, together
from .tables import read_mixed, read_table, table_name, table_on_disk


def check_report(arguments: argparse.Namespace) -> None:
    """Raise an error before the fit starts if the report cannot be written."""
    path = arguments.report
    if path is None:
        return
    check_writable(path, force=arguments.force, inputs=[arguments.data])
    if path.resolve() == arguments.out.resolve():
        raise Refused(f"--report and --out are both {path}: choose different files")
    with_figures("roughflow.report")


def report(
    arguments: argparse.Namespace,
    fitted: rf.FittedDensity,
    data: np.ndarray,
    notes: Sequence[str],
    seconds: float,
) -> None:
    from roughflow.report import write_report

    write_report(
        arguments.report,
        fitted,
        data,
        key=jax.random.fold_in(jax.random.key(arguments.seed), 1),
        title=f"The density of {arguments.data.name}",
        made={
            "command": shlex.join(["roughflow", *arguments.argv]),
            "data": str(arguments.data),
            "seed": str(arguments.seed),
            "seconds": f"{seconds:.1f}",
        },
        notes=notes,
    )


SAMPLED_ROWS = 100_000  # number of rows of a table on disk that are checked and plotted


@dataclass(frozen=True)
class FitRows:
    """The rows to fit: the column names, with given columns last; the total number of rows; the rows, or a
    sample of a table on disk; and the group of each row, if there are groups."""

    columns: tuple[str, ...]
    num_given: int
    total: int
    rows: np.ndarray
    groups: np.ndarray | None = None
    on_disk: rf.tables.ParquetTable | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `rf.fit_density` for these rows."""
        if self.on_disk is not None:
            return {"data": self.on_disk, "columns": self.columns}
        own = len(self.columns) - self.num_given
        given = self.rows[:, own:] if self.num_given else None
        return {
            "data": self.rows[:, :own],
            "given": given,
            "columns": self.columns,
            "groups": self.groups,
        }


def fit_rows(arguments: argparse.Namespace) -> FitRows:
    given, group = arguments.given or [], arguments.groups
    mixed = arguments.family == "mixture"
    large = None if mixed else table_on_disk(arguments.data, arguments.columns, given)
    if large is not None:
        if group is not None:
            raise Refused(f"--groups needs a table that fits in memory, but {arguments.data} is too large")
        some = large.subsample(SAMPLED_ROWS, np.random.default_rng(arguments.seed)).astype(float)
        return FitRows(large.columns, large.num_given, len(large), some, on_disk=large)
    last = [*given, *([group] if group is not None else [])]
    read = read_mixed if mixed else read_table
    table = arguments.table or read(arguments.data, wanted_columns(arguments))
    own = [name for name in table.columns if name not in last]
    if not own:
        raise Refused("--given and --groups include all columns: no column is left to model")
    columns = (*own, *given)
    rows = table.chosen(arguments.data, columns).rows
    groups = None if group is None else table.chosen(arguments.data, [group]).rows[:, 0]
    return FitRows(columns, len(given), len(rows), rows, groups)


def summary(out: Path, rows: FitRows, fitted: rf.FittedDensity) -> None:
    aside = 0 if fitted.held_out is None else len(fitted.held_out.rows)
    parts = f": {rows.total - aside} to train on, {aside} to validate on" if aside else ""
    print(f"rows        {rows.total}{parts}")
    own = len(rows.columns) - rows.num_given
    given = f" given {', '.join(rows.columns[own:])}" if rows.num_given else ""
    print(f"columns     {', '.join(rows.columns[:own])}{given}")
    if isinstance(fitted.model, rf.tables.MixedDensity):
        encoding, mixture = fitted.model.encoding, fitted.model.mixture
        print(f"types       {encoding.described()}")
        print(f"missing     {np.mean([[v is None for v in row] for row in rows.rows]):.1%} of the cells")
        print(f"components  {len(mixture.weights)}")
    if isinstance(fitted.model, rf.tables.WithRelations):
        for text in fitted.model.relations.described(rows.columns):
            print(f"relation    {text}")
    for stage, history in fitted.stages.items() if fitted.family != "mixture" else ():
        skipped = f", {history.skipped} skipped" if history.skipped else ""
        early = see("ended-early") if history.loss.size else ""
        ended = f"; ended {history.ended}{early}" if history.ended else ""
        print(f"{stage:<11} {history.loss.size} steps{skipped}{ended}")
    print(f"family      {fitted.family}")
    score = fitted.score
    if score is not None:
        error = f"± {score.standard_error:.2g} nats per row ({score.method}, {score.num_rows} rows)"
        print(f"score       {score.mean:.4f} {error}")
        print(f"Gaussian    {score.gaussian:.4f}, gain {score.gain:.4f} ± {score.gain_error:.2g}")
        if fitted.family == "flow" and score.gain < 0:
            message = "no better than the Gaussian: more rows, fewer columns or more steps may help"
            print(f"            {message}{see('no-better-than-a-gaussian')}")
    print(f"model       {out}")


def fit(arguments: argparse.Namespace) -> int:
    with joined(arguments.join):
        if jax.process_index():
            return _follow(arguments)
        check_writable(arguments.out, force=arguments.force, inputs=[arguments.data])
        check_report(arguments)
        with alone(arguments):
            return _run(arguments)


def _follow(arguments: argparse.Namespace) -> int:
    """Fit in a process other than the first. Such a process writes and prints nothing."""
    rows = fit_rows(arguments)
    together()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return INTERRUPTED if _fit(arguments, rows, checkpoint_of(arguments.out)).interrupted else 0


def _run(arguments: argparse.Namespace) -> int:
    checkpoint = checkpoint_of(arguments.out)
    check_checkpoint(checkpoint, arguments)
    rows = fit_rows(arguments)
    if rows.total < 2:
        few = f"{table_name(arguments.data)} has 1 row: use at least two, preferably hundreds"
        raise Refused(few + see("no-density"))
    notes: list[str] = []
    begin(checkpoint, arguments)
    together()
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: _warn(str(text), notes)
            fitted = _fit(arguments, rows, checkpoint)
        if fitted.interrupted:
            stage = list(fitted.stages)[-1]
            return stopped(arguments, checkpoint, f"stopped at step {fitted.history.loss.size} of {stage}")
        out = _free(arguments.out, arguments.force)
        rf.save(out, fitted.model)
    except ValueError as error:
        if "belongs to another run" not in str(error):
            raise
        raise Refused(f"{error}; use the same table to resume, or --force to start again") from None
    except KeyboardInterrupt:  # the second Ctrl-C; the first one stops a run in an orderly way
        return stopped(arguments, checkpoint, "interrupted")
    remove(checkpoint)
    summary(out, rows, fitted)
    if arguments.report is not None:
        report(arguments, fitted, rows.rows, notes, time.perf_counter() - began)
        print(f"report      {arguments.report}")
    return 0


def _warn(text: str, notes: list[str]) -> None:
    """Print a warning with arguments named as on the command line, and keep it for the report."""
    for name in ("given=", "groups=", "bounds=", "marginals=True of rf.tables.FlowOptions"):
        text = text.replace(f"({name})", f"(--{name.partition('=')[0]})")
    text = text.replace('rounding="auto"', "--rounding auto")
    print(f"roughflow: warning: {text}", file=sys.stderr)
    notes.append(text)


def _free(out: Path, force: bool) -> Path:
    """The output path of the model. A file that another run has written in the meantime is not
    overwritten."""
    if force or not out.exists():
        return out
    others = (out.with_stem(f"{out.stem}-{i}") for i in itertools.count(2))
    free = next(path for path in others if not path.exists())
    message = f"{out} was written by another run: this model is saved as {free}{see('two-runs')}"
    print(f"roughflow: warning: {message}", file=sys.stderr)
    return free


def _fit(arguments: argparse.Namespace, rows: FitRows, checkpoint: Path) -> rf.FittedDensity:
    mixed = arguments.family == "mixture" or arguments.types is not None  # a mixture needs no checkpoint
    kept = None if mixed else checkpoint
    return rf.fit_density(
        **rows.arguments(),
        key=jax.random.key(arguments.seed),
        validation=arguments.validation,
        family=arguments.family,
        types=arguments.types,
        noise=arguments.noise,
        bounds=arguments.bounds,
        rounding=arguments.rounding,
        steps=arguments.steps,
        seconds=arguments.seconds,
        progress=not arguments.quiet,
        flow=rf.tables.FlowOptions(
            width=arguments.width,
            depth=arguments.depth,
            marginals=arguments.marginals,
            smoothing=arguments.smoothing,
            outliers=arguments.outliers,
            likelihood_steps=arguments.likelihood_steps,
        ),
        training=rf.train.TrainingOptions(
            batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            patience=arguments.patience,
        ),
        run=rf.train.RunOptions(checkpoint=kept, resume=arguments.resume, devices=arguments.devices),
    )
