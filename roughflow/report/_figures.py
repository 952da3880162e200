"""The report's figures, all of one width, with type that can be read on a phone."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

import roughflow as rf
from roughflow import plots

WIDTH = 4.6  # inches
BINS = 40
REACH = 4.0  # error bars shown to either side
LEAST = 1e-8  # nats: a smaller solver's error is drawn as this one
NAME = 28  # letters of a column's name on an axis


def pair(data: np.ndarray, model: np.ndarray, names: tuple[str, str]) -> Figure:
    """Two columns of the data beside those of the model's samples, in one window."""
    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    extent = (*_window(data[:, 0]), *_window(data[:, 1]))
    for ax, rows, title in zip(axes, (data, model), ("data", "model"), strict=True):
        plots.samples(rows, ax=ax).set_aspect("auto")
        ax.set(xlim=extent[:2], ylim=extent[2:])
        ax.set_title(title, fontsize=plots.TEXT)
        ax.set_xlabel(_plain(names[0]))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].set_ylabel(_plain(names[1]))
    axes[1].set_ylabel("")
    return figure


def marginal(data: np.ndarray, model: np.ndarray, name: str) -> Figure:
    """One column: histograms of the data and of the model's samples."""
    figure, ax = _curves(_plain(name), "density")
    bins = np.linspace(*_window(data), BINS + 1)
    # Of all rows, not of those in the window: densities that can be compared.
    heights = [np.histogram(part, bins)[0] / len(part) / np.diff(bins) for part in (data, model)]
    ax.stairs(heights[0], bins, fill=True, color=plots.SKY, alpha=0.5, label="data")
    ax.stairs(heights[1], bins, color=plots.VERMILION, linewidth=1.5, label="model")
    ax.set_xlim(bins[0], bins[-1])
    ax.legend(frameon=False, fontsize=plots.SMALL)
    return figure


def training(history: rf.History) -> Figure:
    figure, ax = _curves("step", "loss")
    plots.training(history, ax=ax).set_ylabel("loss")
    return figure


def solver_errors(errors: np.ndarray) -> Figure:
    """How far the solver's steps move log p, row by row."""
    figure, ax = _curves("solver's error of log p (nats)", "rows")
    shown = np.log10(np.maximum(errors, LEAST))
    # From one power of ten to another: on less a logarithmic scale has next to no numbers.
    ends = np.floor(shown.min()), np.floor(shown.max()) + 1
    ax.hist(10**shown, np.logspace(*ends, BINS + 1), color=plots.BLUE)
    ax.set_xscale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    return figure


def calibration(scaled: np.ndarray) -> Figure:
    """Differences of two estimates in units of their error bar, beside the standard normal of honest ones."""
    figure, ax = _curves("difference / error bar", "density")
    bins = np.linspace(-REACH, REACH, BINS // 2 + 1)
    heights = np.histogram(scaled, bins)[0] / max(1, scaled.size) / np.diff(bins)
    ax.stairs(heights, bins, fill=True, color=plots.SKY, alpha=0.5, label="this model")
    x = np.linspace(-REACH, REACH, 200)
    normal = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    ax.plot(x, normal, color=plots.VERMILION, linewidth=1.5, label="honest error bars")
    ax.legend(frameon=False, fontsize=plots.SMALL)
    return figure


def _curves(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    ax = figure.subplots()
    ax.set_xlabel(xlabel, fontsize=plots.TEXT)
    ax.set_ylabel(ylabel, fontsize=plots.TEXT)
    ax.tick_params(labelsize=plots.SMALL)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _window(column: np.ndarray) -> tuple[float, float]:
    """Where nearly all of a column lies: a few far rows would squeeze the rest into a line."""
    low, high = np.quantile(column, [0.002, 0.998])
    if low == high:
        low, high = column.min() - 0.5, column.max() + 0.5
    return float(low - 0.06 * (high - low)), float(high + 0.06 * (high - low))


def _plain(name: str) -> str:
    """A name as it is: between two dollars matplotlib would read mathematics."""
    short = name if len(name) <= NAME else name[: NAME - 1] + "…"
    return short.replace("$", r"\$")
