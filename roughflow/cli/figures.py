"""`roughflow demo` and `roughflow reproduce`: the experiments, from the command line."""

import argparse
from pathlib import Path
from typing import Any

from roughflow.faq import see

from .refused import Refused

FIGURES = ("fig1", "fig2", "fig3", "fig4", "toys")


def demo(arguments: argparse.Namespace) -> int:
    experiments = _experiments(arguments.out)
    metrics = experiments.demo(arguments.out, seed=arguments.seed, progress=not arguments.quiet)
    _tell(metrics, arguments.out)
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
        _tell(metrics, arguments.out)
    return 0


def _experiments(out: Path) -> Any:
    """The experiments, once it is known that they can draw and have where to."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise Refused(f"cannot write to {out}: {folder} is a file, not a folder")
    try:
        import roughflow.experiments as experiments
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("roughflow"):
            raise
        raise Refused(
            f"figures need {error.name}: pip install 'roughflow[plots]'{see('not-installed')}"
        ) from None
    return experiments


def _tell(metrics: dict[str, Any], out: Path, indent: str = "") -> None:
    """Figures by name, one a line; those of a part under its name."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            _tell(value, out, indent + "  ")
        else:
            print(f"{indent}{name:<24} {f'{value:.4f}' if isinstance(value, float) else value}")
    if not indent:
        print(f"written to {out}")
