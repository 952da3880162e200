"""`roughflow fit`: from a table to a model."""

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

import roughflow as rf
from roughflow.faq import see

from .checkpoint import alone, begin, check_checkpoint, checkpoint_of, remove, stopped
from .output import check_writable
from .refused import Refused
from .report import check_report, report
from .rows import Table, table_name
from .summary import summary
from .table import read_table

# In single precision a number has seven digits: a column this many times its own spread away from zero
# keeps fewer than three of them.
FAR = 1e4


def fit(arguments: argparse.Namespace) -> int:
    check_writable(arguments.out, force=arguments.force, inputs=[arguments.data])
    check_report(arguments)
    with alone(arguments):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    checkpoint = checkpoint_of(arguments.out)
    check_checkpoint(checkpoint, arguments)
    table = _read(arguments)
    train, held_out = _split(table, arguments.validation, arguments.seed)
    said: list[str] = []
    _check_rows(arguments, table, train, said)
    begin(checkpoint, arguments)
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: _warn(str(text), said)
            fitted = _fit(arguments, table.columns, train, held_out, checkpoint)
        if fitted.interrupted:
            stage = list(fitted.stages)[-1]
            return stopped(arguments, checkpoint, f"stopped at step {fitted.history.loss.size} of {stage}")
        out = _free(arguments.out, arguments.force)
        rf.save(out, fitted.model)
    except ValueError as error:
        if "belongs to another run" not in str(error):
            raise
        raise Refused(f"{error}; --resume takes the same table, --force starts afresh") from None
    except KeyboardInterrupt:  # the second one: the first ends a run in good order
        return stopped(arguments, checkpoint, "interrupted")
    remove(checkpoint)
    summary(out, table, fitted, train, held_out)
    if arguments.report is not None:
        report(arguments, fitted, train, held_out, said, time.perf_counter() - began)
        print(f"report      {arguments.report}")
    return 0


def _warn(text: str, said: list[str]) -> None:
    """Tell at once, in the command line's own names, and keep for the report."""
    for name in ("given=", "rounding=", "bounds=", "marginals=True"):
        text = text.replace(f"({name})", f"(--{name.partition('=')[0]})")
    print(f"roughflow: warning: {text}", file=sys.stderr)
    said.append(text)


def _free(out: Path, force: bool) -> Path:
    """Where the model goes: what another run wrote there meanwhile is not overwritten."""
    if force or not out.exists():
        return out
    others = (out.with_stem(f"{out.stem}-{i}") for i in itertools.count(2))
    free = next(path for path in others if not path.exists())
    told = f"{out} was written meanwhile: this model goes to {free}{see('two-runs')}"
    print(f"roughflow: warning: {told}", file=sys.stderr)
    return free


def _read(arguments: argparse.Namespace) -> Table:
    """The table, with the columns that are given last."""
    if arguments.given is None:
        return read_table(arguments.data, arguments.columns)
    wanted = (
        None if arguments.columns is None else list(dict.fromkeys([*arguments.columns, *arguments.given]))
    )
    # Read once: standard input cannot be read again.
    table = read_table(arguments.data, wanted)
    own = [name for name in table.columns if name not in arguments.given]
    if not own:
        raise Refused("--given names all columns: there is none left to have a density")
    return table.chosen(arguments.data, [*own, *arguments.given])


def _fit(arguments, columns, train: np.ndarray, held_out: np.ndarray, checkpoint: Path) -> rf.Fitted:
    context = len(arguments.given or ())
    own = len(columns) - context
    parts = lambda rows: (rows[:, :own], rows[:, own:])
    return rf.fit_density(
        train[:, :own],
        given=train[:, own:] if context else None,
        key=jax.random.key(arguments.seed),
        noise=arguments.noise,
        bounds=arguments.bounds,
        rounding=arguments.rounding,
        marginals=arguments.marginals,
        smoothing=arguments.smoothing,
        outliers=arguments.outliers,
        width=arguments.width,
        depth=arguments.depth,
        columns=columns,
        validation=(parts(held_out) if context else held_out) if len(held_out) else 0.0,
        patience=arguments.patience or None,
        steps=arguments.steps,
        likelihood_steps=arguments.likelihood_steps,
        seconds=arguments.seconds,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        checkpoint=checkpoint,
        resume=arguments.resume,
        progress=not arguments.quiet,
    )


def _split(table: Table, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to validate on; at least one of these if any are asked for."""
    rows = table.rows
    aside = max(1, round(share * len(rows))) if share else 0
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows[order[aside:]], rows[order[:aside]]


def _check_rows(arguments: argparse.Namespace, table: Table, train: np.ndarray, said: list[str]) -> None:
    """Refuse rows that have no density, by the names of their columns; warn of those with few digits."""
    path, count, dimension = table_name(arguments.data), len(table.rows), len(table.columns)
    if dimension < count and len(train) <= dimension:
        least = f"{dimension + 1} are the least for its columns"
        raise Refused(
            f"{path}: {len(train)} of {count} rows are left to train on, {least}: lower --validation"
            + see("no-density")
        )
    if len(train) <= dimension:
        have = "1 row" if count == 1 else f"{count} rows"
        raise Refused(
            f"{path} has {have}: {dimension + 2} are the least for its columns, hundreds are better"
            + see("no-density")
        )
    for name, column in zip(table.columns, train.T, strict=True):
        spread = column.std()
        if column.min() == column.max():
            others = ",".join(other for other in table.columns if other != name) or "..."
            raise Refused(
                f"{path}: column {name!r} is always {column[0]:g}, so it has no density: leave it out, with "
                f"--columns {others}{see('no-density')}"
            )
        if abs(column.mean()) > FAR * spread and not jax.config.jax_enable_x64:  # pyright: ignore
            _warn(
                f"column {name!r} is {column.mean():g} ± {spread:g}: samples in single precision will be "
                "blurred; subtract a constant from it, or set JAX_ENABLE_X64=1" + see("few-digits"),
                said,
            )
