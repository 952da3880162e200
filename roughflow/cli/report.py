"""`roughflow fit --report`: the page on a fit."""

import argparse
import shlex
from collections.abc import Sequence

import jax
import numpy as np

import roughflow as rf

from .output import check_writable, with_figures
from .refused import Refused


def check_report(arguments: argparse.Namespace) -> None:
    """Refuse a report that could not be written, before there is anything to report."""
    path = arguments.report
    if path is None:
        return
    check_writable(path, force=arguments.force, inputs=[arguments.data])
    if path.resolve() == arguments.out.resolve():
        raise Refused(f"--report and --out both name {path}: give each a file of its own")
    with_figures("roughflow.report")


def report(
    arguments: argparse.Namespace,
    fitted: rf.FittedDensity,
    data: np.ndarray,
    said: Sequence[str],
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
        notes=said,
    )
