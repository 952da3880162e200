"""`roughflow fit`: from a table to a model."""

import argparse
import math
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

import roughflow as rf
from roughflow.learn import LIKELIHOOD_ROWS, second_file

from .checkpoint import check_checkpoint, stopped
from .output import check_writable
from .refused import Refused
from .report import check_report, report
from .table import Table, read_table

# In single precision a number has seven digits: a column this many times its own spread away from zero
# keeps fewer than three of them.
FAR = 1e4


def fit(arguments: argparse.Namespace) -> int:
    check_writable(arguments.out, force=arguments.force, inputs=[arguments.data])
    check_report(arguments)
    checkpoint = arguments.out.with_name(arguments.out.name + ".checkpoint")
    check_checkpoint(checkpoint, arguments)
    table = _read(arguments)
    train, held_out = _split(table, arguments.validation, arguments.seed)
    said: list[str] = []
    _check_rows(arguments.data, table, train, said)
    if checkpoint.exists() and not arguments.resume:
        _remove(checkpoint)  # as --force asked
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: _warn(str(text), said)
            fitted = _fit(arguments, table.columns, train, held_out, checkpoint)
    except KeyboardInterrupt:  # the second one: the first ends a run in good order
        return stopped(arguments, checkpoint, "interrupted")
    if fitted.interrupted:
        stage = list(fitted.stages)[-1]
        return stopped(arguments, checkpoint, f"stopped at step {fitted.history.loss.size} of {stage}")
    rf.save(arguments.out, fitted.model)
    _remove(checkpoint)
    _report(arguments.out, table, fitted, train, held_out)
    if arguments.report is not None:
        report(arguments, fitted, train, held_out, said, time.perf_counter() - began)
        print(f"report      {arguments.report}")
    return 0


def _warn(text: str, said: list[str]) -> None:
    """Tell at once, and keep for the report."""
    print(f"roughflow: warning: {text}", file=sys.stderr)
    said.append(text)


def _read(arguments: argparse.Namespace) -> Table:
    """The table, with the columns that are given last."""
    if arguments.given is None:
        return read_table(arguments.data, arguments.columns)
    columns = arguments.columns or read_table(arguments.data).columns
    own = [name for name in columns if name not in arguments.given]
    if not own:
        raise Refused("--given names all columns: there is none left to have a density")
    return read_table(arguments.data, [*own, *arguments.given])


def _remove(checkpoint: Path) -> None:
    for file in (checkpoint, second_file(checkpoint)):
        file.unlink(missing_ok=True)


def _fit(arguments, columns, train: np.ndarray, held_out: np.ndarray, checkpoint: Path) -> rf.Fitted:
    context = len(arguments.given or ())
    own = len(columns) - context
    parts = lambda rows: (rows[:, :own], rows[:, own:])
    return rf.fit_density(
        train[:, :own],
        given=train[:, own:] if context else None,
        key=jax.random.key(arguments.seed),
        noise=arguments.noise,
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


def _check_rows(path: Path, table: Table, train: np.ndarray, said: list[str]) -> None:
    """Refuse rows that have no density, by the names of their columns; warn of those with few digits."""
    count, dimension = len(table.rows), len(table.columns)
    if len(train) <= dimension:
        have = "1 row" if count == 1 else f"{count} rows"
        need = f"{dimension + 1 + count - len(train)} are the least for its columns, hundreds are better"
        raise Refused(f"{path} has {have}: {need}")
    for name, column in zip(table.columns, train.T, strict=True):
        spread = column.std()
        if column.min() == column.max():
            others = ",".join(other for other in table.columns if other != name) or "..."
            raise Refused(
                f"{path}: column {name!r} is always {column[0]:g}, so it has no density: leave it out, with "
                f"--columns {others}"
            )
        if abs(column.mean()) > FAR * spread and not jax.config.jax_enable_x64:  # pyright: ignore
            _warn(
                f"column {name!r} is {column.mean():g} ± {spread:g}: samples in single precision will be "
                "blurred; subtract a constant from it, or set JAX_ENABLE_X64=1",
                said,
            )


def _report(out: Path, table: Table, fitted: rf.Fitted, train: np.ndarray, held_out: np.ndarray) -> None:
    history = fitted.history
    print(f"rows        {len(table.rows)}: {len(train)} to train on, {len(held_out)} to validate on")
    own = len(table.columns) - fitted.model.context
    given = f" given {', '.join(table.columns[own:])}" if fitted.model.context else ""
    print(f"columns     {', '.join(table.columns[:own])}{given}")
    for stage, steps in fitted.stages.items():
        skipped = f", {steps.skipped} skipped" if steps.skipped else ""
        print(f"{stage:<11} {steps.loss.size} steps{skipped}")
    if len(held_out) and "likelihood" in fitted.stages:
        model, rows = fitted.model, held_out[:LIKELIHOOD_ROWS]
        loc, matrix = (np.asarray(part, float) for part in (model.loc, model.matrix))
        log_volume = float(np.sum(np.log(np.abs(np.diagonal(matrix)))))
        if model.marginals is not None:
            log_volume -= float(np.mean(np.sum(model.marginals.forward(rows[:, :own])[1], axis=1)))
        # What is given counts as N(0, 1) in the loss: out again with it.
        unconditional = -float(np.min(history.validation_loss)) - log_volume
        reached = unconditional - _gaussian(loc[own:], matrix[own:, own:], rows[:, own:])
        normal = _gaussian(*rf.standardisation(train[:, :own]), rows[:, :own])
        told = "the Gaussian with their mean and covariance"
        print(f"validation  {reached:.4f} nats per row; {told} {normal:.4f}")
    print(f"model       {out}")


def _gaussian(loc: np.ndarray, matrix: np.ndarray, rows: np.ndarray) -> float:
    """The mean log density of rows under a normal law."""
    unit = np.linalg.solve(matrix, (rows - loc).T)
    square = np.mean(np.sum(unit**2, axis=0))
    log_volume = np.sum(np.log(np.abs(np.diagonal(matrix))))
    return float(-0.5 * square - 0.5 * len(loc) * math.log(2 * math.pi) - log_volume)
