"""Colours, sizes and axes that all figures share, and saving of figures."""

import os
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import roughflow as rf

from .._checks import check_instance

BLUE, VERMILION, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
GREY, NIGHT, EMBER = "#767676", "#08306B", "#5C1A00"
DENSITY = LinearSegmentedColormap.from_list("density", ["white", SKY, BLUE, NIGHT])
# Dark enough at both ends for white paper, and distinct from the blue of densities.
TIME = LinearSegmentedColormap.from_list("time", ["#F3B562", VERMILION, EMBER])
COLUMN = 3.4  # inches
TEXT, SMALL = 9, 8  # points

Window = tuple[float, float, float, float]


def labelled(ax: Axes | None, xlabel: str, ylabel: str, height: float = 0.75 * COLUMN) -> Axes:
    """The given axes, or new ones, with labels."""
    if ax is None:
        _, ax = plt.subplots(figsize=(COLUMN, height), layout="constrained")
    ax.tick_params(labelsize=SMALL)
    ax.set_xlabel(xlabel, fontsize=TEXT)
    ax.set_ylabel(ylabel, fontsize=TEXT)
    return ax


def curves(ax: Axes | None, xlabel: str, ylabel: str) -> Axes:
    """Axes for lines, without the top and right spines."""
    ax = labelled(ax, xlabel, ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plane(ax: Axes | None, extent: Window | None) -> Axes:
    """Axes for points of the plane, with equal scales."""
    ax = labelled(ax, "$x_1$", "$x_2$", height=0.9 * COLUMN)
    ax.set_aspect("equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    if extent is not None:
        ax.set(xlim=extent[:2], ylim=extent[2:])
    return ax


def add_colour_bar(ax: Axes, drawn, label: str) -> None:
    bar = ax.figure.colorbar(drawn, ax=ax, fraction=0.045, pad=0.03)
    bar.set_label(label, size=TEXT)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def save(figure: Figure, path: str | os.PathLike, *, dpi: int = 200) -> Path:
    """Save a figure. An existing file is replaced only when the new one is complete.

    Folders are created as needed. The extension determines the format, for example `.png` or `.pdf`.

    ```python
    import tempfile
    from roughflow import plots

    axes = plots.samples([[0.0, 1.0], [1.0, 0.0]])
    plots.save(axes.figure, f"{tempfile.mkdtemp()}/figures/points.png")
    ```
    """
    check_instance("figure", figure, Figure, "a matplotlib figure")
    with rf.files.whole_file(path) as draft:
        figure.savefig(draft, dpi=dpi, bbox_inches="tight", pad_inches=0.05)
    return Path(path)
