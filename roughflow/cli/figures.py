"""`roughflow demo` and `roughflow reproduce`: run the experiments from the command line."""

import argparse
from pathlib import Path
from typing import Any

from .files import check_folder, check_writable, with_figures

FIGURES = ("fig1", "fig2", "fig3", "fig4")


def demo(arguments: argparse.Namespace) -> int:
    experiments = _experiments(arguments.out)
    steps = {} if arguments.steps is None else {"steps": arguments.steps, "likelihood_steps": 0}
    metrics = experiments.demo(arguments.out, seed=arguments.seed, progress=not arguments.quiet, **steps)
    _print_metrics(metrics, arguments.out)
    return 0


def reproduce(arguments: argparse.Namespace) -> int:
    experiments = _experiments(arguments.out)
    for name in FIGURES if arguments.name == "all" else (arguments.name,):
        metrics = experiments.run(
            name,
            arguments.out,
            steps=arguments.steps,
            seed=arguments.seed,
            progress=not arguments.quiet,
            resume=arguments.resume,
        )
        print(name)
        _print_metrics(metrics, arguments.out)
    return 0


def _experiments(out: Path) -> Any:
    """The module `experiments`, after a check that figures can be drawn and written."""
    if out.exists():
        check_folder(out.absolute(), out)
    else:
        check_writable(out, force=False)
    return with_figures("roughflow.experiments")


def _print_metrics(metrics: dict[str, Any], out: Path, indent: str = "") -> None:
    """Print metrics by name, one per line, with nested ones indented."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            _print_metrics(value, out, indent + "  ")
        else:
            print(f"{indent}{name:<24} {f'{value:.4f}' if isinstance(value, float) else value}")
    if not indent:
        print(f"written to {out}")
