"""A figure as a file."""

import os
from pathlib import Path

from matplotlib.figure import Figure

import roughflow as rf

from .._checks import check_instance


def save(figure: Figure, path: str | os.PathLike, *, dpi: int = 200) -> Path:
    """Write a figure, whole or not at all: a file that was there before stays until the new one is complete.

    Folders are made as needed. The ending says the format, `.png` or `.pdf` for example.

    ```python
    import tempfile
    from roughflow import plots

    axes = plots.samples([[0.0, 1.0], [1.0, 0.0]])
    plots.save(axes.figure, f"{tempfile.mkdtemp()}/figures/points.png")
    ```
    """
    check_instance("figure", figure, Figure, "a figure of matplotlib")
    with rf.whole_file(path) as draft:
        figure.savefig(draft, dpi=dpi, bbox_inches="tight", pad_inches=0.05)
    return Path(path)
