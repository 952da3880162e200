"""`roughflow fit`: from a table to a model."""

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path

import jax

import roughflow as rf
from roughflow.faq import see

from .checkpoint import alone, begin, check_checkpoint, checkpoint_of, remove, stopped
from .exits import INTERRUPTED
from .fit_rows import FitRows, fit_rows
from .join import joined, together
from .output import check_writable
from .refused import Refused
from .report import check_report, report
from .rows import table_name
from .summary import summary

# In single precision a number has seven digits: a column this many times its own spread away from zero
# keeps fewer than three of them.
FAR = 1e4


def fit(arguments: argparse.Namespace) -> int:
    with joined(arguments.join):
        if jax.process_index():
            return _follow(arguments)
        check_writable(arguments.out, force=arguments.force, inputs=[arguments.data])
        check_report(arguments)
        with alone(arguments):
            return _run(arguments)


def _follow(arguments: argparse.Namespace) -> int:
    """The part of a process that is not the first: it writes nothing, and says nothing."""
    rows = fit_rows(arguments)
    together()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return INTERRUPTED if _fit(arguments, rows, checkpoint_of(arguments.out)).interrupted else 0


def _run(arguments: argparse.Namespace) -> int:
    checkpoint = checkpoint_of(arguments.out)
    check_checkpoint(checkpoint, arguments)
    rows = fit_rows(arguments)
    said: list[str] = []
    _check_rows(arguments, rows, said)
    begin(checkpoint, arguments)
    together()
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: _warn(str(text), said)
            fitted = _fit(arguments, rows, checkpoint)
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
    summary(out, rows, fitted)
    if arguments.report is not None:
        report(arguments, fitted, rows.rows, said, time.perf_counter() - began)
        print(f"report      {arguments.report}")
    return 0


def _warn(text: str, said: list[str]) -> None:
    """Tell at once, in the command line's own names, and keep for the report."""
    for name in ("given=", "groups=", "bounds=", "marginals=True"):
        text = text.replace(f"({name})", f"(--{name.partition('=')[0]})")
    text = text.replace('rounding="auto"', "--rounding auto")
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


def _fit(arguments: argparse.Namespace, rows: FitRows, checkpoint: Path) -> rf.FittedDensity:
    return rf.fit_density(
        **rows.arguments(),
        key=jax.random.key(arguments.seed),
        validation=arguments.validation,
        family=arguments.family,
        noise=arguments.noise,
        bounds=arguments.bounds,
        rounding=arguments.rounding,
        marginals=arguments.marginals,
        smoothing=arguments.smoothing,
        outliers=arguments.outliers,
        width=arguments.width,
        depth=arguments.depth,
        patience=arguments.patience or None,
        steps=arguments.steps,
        likelihood_steps=arguments.likelihood_steps,
        seconds=arguments.seconds,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        checkpoint=checkpoint,
        resume=arguments.resume,
        progress=not arguments.quiet,
        devices=arguments.devices,
    )


def _check_rows(arguments: argparse.Namespace, rows: FitRows, said: list[str]) -> None:
    """Refuse rows that have no density, by the names of their columns; warn of those with few digits."""
    path = table_name(arguments.data)
    if rows.total < 2:
        raise Refused(f"{path} has 1 row: two are the least, hundreds are better{see('no-density')}")
    for name, column in zip(rows.columns, rows.rows.T, strict=True):
        spread = column.std()
        if column.min() == column.max():
            others = ",".join(other for other in rows.columns if other != name) or "..."
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
