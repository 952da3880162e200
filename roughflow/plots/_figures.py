"""Figures of densities, samples, paths, training and estimates."""

import os
import textwrap
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, ArrayLike
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import roughflow as rf

from .._checks import as_real, check_count, check_instance, check_number, shown

BLUE, VERMILION, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
GREY, NIGHT, EMBER = "#767676", "#08306B", "#5C1A00"
DENSITY = LinearSegmentedColormap.from_list("density", ["white", SKY, BLUE, NIGHT])
# Both ends of this range of colours are dark enough for white paper, and it is distinct from the blue of
# densities.
TIME = LinearSegmentedColormap.from_list("time", ["#F3B562", VERMILION, EMBER])
COLUMN = 3.4  # inches
TEXT, SMALL = 9, 8  # points
MAX_ASPECT = 10.0  # ratio of the sides of a window up to which both axes have the same scale
MAX_EXPONENT = 700.0  # log-density above which a density overflows

Window = tuple[float, float, float, float]


def labelled(ax: Axes | None, xlabel: str, ylabel: str, height: float = 0.75 * COLUMN) -> Axes:
    """The given axes, or new ones, with labels for x and y."""
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
    """Axes for points in the plane, with equal scales unless one range is much wider than the other."""
    if extent is not None:
        _checked(extent)
    ax = labelled(ax, "$x_1$", "$x_2$", height=0.9 * COLUMN)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    if extent is not None:
        ax.set(xlim=extent[:2], ylim=extent[2:])
    return ax


def _scaled(ax: Axes) -> Axes:
    """Set equal scales for the axes of a plane, if the ranges of its points allow this."""
    ax.autoscale_view()
    width, height = np.ptp(ax.get_xlim()), np.ptp(ax.get_ylim())
    ax.set_aspect("equal" if _are_similar(width, height) else "auto")
    return ax


def _are_similar(width: float, height: float) -> bool:
    """Whether equal scales suit a window of this size. Columns of a table may have different units."""
    return 1 / MAX_ASPECT <= width / height <= MAX_ASPECT


def _checked(extent: Window) -> np.ndarray:
    window = np.asarray(as_real("extent", extent), float)
    if (
        window.shape != (4,)
        or not np.isfinite(window).all()
        or not (window[0] < window[1] and window[2] < window[3])
    ):
        raise ValueError(f"extent must be (left, right, bottom, top), each pair increasing, got {extent}")
    return window


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


def grid(extent: Window, resolution: int = 200) -> np.ndarray:
    """The centres of pixels that fill a window, `(rows, columns, 2)`, lowest row first. Pixels are square
    unless one side of the window is more than ten times longer than the other.

    **Arguments:** `extent`, (left, right, bottom, top); `resolution`, the number of pixels along the longer
    side.

    ```python
    from roughflow import plots

    plots.grid((-4, 4, -2, 2), 200).shape  # (100, 200, 2)
    ```
    """
    check_count("resolution", resolution)
    left, right, bottom, top = _checked(extent).tolist()
    width, height, columns, rows = right - left, top - bottom, resolution, resolution
    if _are_similar(width, height):
        pixel = max(width, height) / resolution
        columns, rows = max(1, round(width / pixel)), max(1, round(height / pixel))
    x = left + (np.arange(columns) + 0.5) * (right - left) / columns
    y = bottom + (np.arange(rows) + 0.5) * (top - bottom) / rows
    return np.stack(np.meshgrid(x, y), axis=-1)


def density(
    log_prob: Callable[[Array], ArrayLike] | ArrayLike,
    *,
    extent: Window,
    ax: Axes | None = None,
    resolution: int = 200,
    chunk: int = 10_000,
    maximum: float | None = None,
    colour_bar: bool = False,
) -> Axes:
    """A heat map of exp(log_prob) in a window of the plane.

    **Arguments:**

    - `log_prob`: a function from points `(N, 2)` to log-densities `(N,)`, called on `chunk` points at a time;
      or the log-densities at the points of `grid(extent, resolution)`.
    - `extent`: (left, right, bottom, top).
    - `maximum`: the density with the darkest shade, by default the highest density; set it to use one scale
      for several maps.

    ```python
    from roughflow import plots
    from roughflow.datasets import Star

    plots.density(Star().log_prob, extent=Star.extent, colour_bar=True)
    plots.density(Star().log_prob(plots.grid(Star.extent, 100)), extent=Star.extent)
    ```
    """
    if callable(log_prob):
        points = grid(extent, resolution)
        flat = jnp.asarray(points.reshape(-1, 2))
        parts = [np.asarray(log_prob(flat[i : i + chunk])) for i in range(0, len(flat), chunk)]
        if parts[0].shape != (len(flat[:chunk]),):
            given = f"{parts[0].shape} for {len(flat[:chunk])} points"
            raise ValueError(f"log_prob must return shape (N,) for points (N, 2), got {given}")
        values = np.concatenate(parts).reshape(points.shape[:2])
    else:
        values = np.asarray(as_real("log_prob", log_prob))
        if values.ndim != 2:
            raise ValueError(f"log_prob must be a function or have shape (rows, columns), got {values.shape}")
    if np.isnan(values).any():
        raise ValueError(f"log_prob is NaN at {int(np.isnan(values).sum())} of {values.size} points")
    if values.max() > MAX_EXPONENT:
        raise ValueError(
            f"log_prob is too large for a density, up to {values.max():.4g}: subtract a constant"
        )
    ax = plane(ax, extent)
    darkest = maximum or np.exp(values).max() or 1.0
    image = ax.imshow(np.exp(values), extent=extent, origin="lower", cmap=DENSITY, vmin=0, vmax=darkest)
    _scaled(ax)
    if colour_bar:
        add_colour_bar(ax, image, "density")
    return ax


def samples(points: ArrayLike, *, extent: Window | None = None, ax: Axes | None = None) -> Axes:
    """A scatter plot of points in the plane, `(N, 2)`. The dots are smaller and paler if there are many.

    ```python
    import jax
    from roughflow import plots
    from roughflow.datasets import Moons

    plots.samples(Moons().sample(key=jax.random.key(0), shape=(2000,)), extent=Moons.extent)
    ```
    """
    points = np.asarray(as_real("points", points))
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(f"points must have shape (N, 2), got {points.shape}")
    ax = plane(ax, extent)
    fade = max(len(points) / 1000, 1) ** -0.25
    # Rasterised even in a PDF, because ten thousand vector dots are slow to render.
    ax.plot(*points.T, ".", color=BLUE, markersize=3 * fade, alpha=0.6 * fade, mew=0, rasterized=True)
    return _scaled(ax)


def trajectory(path: ArrayLike, *, t1: float = 1.0, ax: Axes | None = None, colour_bar: bool = False) -> Axes:
    """A path in the plane, `(T, 2)`, given at T equally spaced times in [0, t1]. It darkens with time, from
    an open circle at its start to a filled circle at its end.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow import plots

    path = rf.KarhunenLoeve(50).sample(key=jax.random.key(0), noise_dimension=2)
    plots.trajectory(jax.vmap(path.evaluate)(jnp.linspace(0, 1, 500)))
    ```
    """
    check_number("t1", t1, above=0)
    path = np.asarray(as_real("path", path))
    if path.ndim != 2 or path.shape[1] != 2 or len(path) < 2:
        raise ValueError(f"path must have shape (T, 2) with T at least 2, got {path.shape}")
    ax = plane(ax, None)
    # A wider line is drawn beneath in the colour of the background, so that the path stands out.
    ax.plot(*path.T, color=ax.get_facecolor(), linewidth=2.0, solid_joinstyle="round")
    pieces = LineCollection(np.stack([path[:-1], path[1:]], axis=1).tolist(), cmap=TIME, linewidths=1.0)
    pieces.set(array=t1 * (np.arange(len(path) - 1) + 0.5) / (len(path) - 1), clim=(0, t1), zorder=2.5)
    ax.add_collection(pieces)
    ends = {"markersize": 5, "markeredgewidth": 1.0, "zorder": 3}
    ax.plot(*path[0], "o", markerfacecolor="white", markeredgecolor=VERMILION, **ends)
    ax.plot(*path[-1], "o", markerfacecolor=EMBER, markeredgecolor="white", **ends)
    if colour_bar:
        add_colour_bar(ax, pieces, "time")
    return _scaled(ax)


def sample_paths(times: ArrayLike, paths: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """One-dimensional `paths`, `(K, T)`, over `times`, `(T,)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow import plots

    times = jnp.linspace(0, 1, 200)
    brownian = rf.KarhunenLoeve(100).sample(key=jax.random.key(0), shape=(20,))
    plots.sample_paths(times, jax.vmap(brownian.evaluate, out_axes=1)(times)[..., 0])
    ```
    """
    times, paths = np.asarray(as_real("times", times)), np.asarray(as_real("paths", paths))
    if paths.ndim != 2 or times.shape != paths.shape[1:]:
        raise ValueError(f"paths must have shape (K, T) for times (T,), got {paths.shape} and {times.shape}")
    ax = curves(ax, "time $t$", "$Z_t$")
    ax.plot(times, paths.T, color=BLUE, linewidth=0.7, alpha=min(0.9, 3 / len(paths) ** 0.5))
    ax.set_xlim(times[0], times[-1])
    return ax


def approximations(
    path: rf.driver.Path | ArrayLike,
    approximations: Mapping[str, rf.driver.Path | ArrayLike],
    *,
    times: ArrayLike,
    ax: Axes | None = None,
    label: str = "Brownian path",
) -> Axes:
    """A rough path and its smooth approximations. Each is given as a path or by its values at `times`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow import plots

    fine = rf.PiecewiseLinear(1024).sample(key=jax.random.key(0))
    smooth = {"Karhunen–Loève": rf.KarhunenLoeve(6), "piecewise linear": rf.PiecewiseLinear(6)}
    projected = {name: driver.project(fine) for name, driver in smooth.items()}
    plots.approximations(fine, projected, times=jnp.linspace(0, 1, 1025))
    ```
    """
    times = np.asarray(times)
    ax = curves(ax, "time $t$", "$B(t)$")
    ax.plot(times, _values(path, times), color=GREY, linewidth=0.6, alpha=0.8, label=label)
    styles = cycle([("-", BLUE), ("--", VERMILION), ("-.", GREEN), (":", PURPLE)])
    for (name, smooth), (style, colour) in zip(approximations.items(), styles, strict=False):
        ax.plot(times, _values(smooth, times), style, color=colour, linewidth=1.5, label=name)
    ax.set_xlim(times[0], times[-1])
    ax.legend(frameon=False, fontsize=SMALL)
    return ax


def _values(path: rf.driver.Path | ArrayLike, times: np.ndarray) -> np.ndarray:
    """The values of a one-dimensional path at these times."""
    is_path = isinstance(path, rf.driver.Path)
    values = np.asarray(jax.vmap(path.evaluate)(jnp.asarray(times)) if is_path else path)
    values = values[..., 0] if values.shape == (*times.shape, 1) else values
    if values.shape != times.shape:
        raise ValueError(f"a path must be one-dimensional, with shape {times.shape}, got {values.shape}")
    return values


def diagnostics(estimate: rf.Estimate, *, figure: Figure | None = None) -> Figure:
    """Diagnostics of an estimate at many points: the effective paths, standard errors and truncation errors,
    each sorted.

    Suspect points are red, and the warning of the estimate is the title.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow import plots

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
    x = jnp.linspace(-3, 3, 20)[:, None]
    plots.diagnostics(flow.estimate(x, key=jax.random.key(0), estimator=rf.PullBack(num_paths=100)))
    ```
    """
    check_instance("estimate", estimate, rf.Estimate, "the result of flow.estimate")
    if figure is None:
        figure = plt.figure(figsize=(2 * COLUMN + 0.3, 0.75 * COLUMN), layout="constrained")
    suspect = np.ravel(estimate.suspect)
    left, middle, right = figure.subplots(1, 3)
    _sorted(left, estimate.effective_paths, suspect, "effective paths")
    left.axhline(np.max(estimate.num_paths), color=GREY, linewidth=0.8, linestyle="--", label="all paths")
    if suspect.any():
        left.plot([], [], "o", color=VERMILION, markersize=3, mew=0, label="suspect")
    if np.max(estimate.num_paths) > 10 * np.min(estimate.effective_paths):
        left.set_yscale("log")
    left.legend(frameon=False, fontsize=SMALL)
    _sorted(middle, estimate.standard_error, suspect, "standard error (nats)")
    _sorted(right, estimate.truncation_error, suspect, "truncation error (nats)")
    text = estimate.warning or f"none of {suspect.size} estimates is suspect"
    figure.suptitle("\n".join(textwrap.wrap(text, 105)), fontsize=TEXT, x=0.01, ha="left")
    return figure


def _sorted(ax: Axes, values: ArrayLike, suspect: np.ndarray, label: str) -> None:
    """Plot sorted values against the fraction of smaller values. The title counts the values that the scale
    cannot show."""
    order = np.argsort(np.ravel(values))
    ranked, bad = np.ravel(values)[order], suspect[order]
    drawn = np.isfinite(ranked)
    positive = ranked[drawn & (ranked > 0)]
    # A logarithmic scale of less than a decade has hardly any ticks.
    if positive.size and positive[-1] > 10 * positive[0]:
        ax.set_yscale("log")
        drawn &= ranked > 0
    share = 100 * (np.arange(ranked.size) + 0.5) / ranked.size
    for which, colour in ((drawn & ~bad, BLUE), (drawn & bad, VERMILION)):
        if which.any():
            ax.plot(share[which], ranked[which], "o", color=colour, markersize=3, mew=0, clip_on=False)
    curves(ax, "points (%), sorted", label).set_xlim(0, 100)
    if not drawn.all():
        kinds = ", ".join(sorted({f"{value:g}" for value in ranked[~drawn]}))
        ax.set_title(f"{np.sum(~drawn)} not shown ({kinds})", fontsize=SMALL, color=GREY)


class History(Protocol):
    """The fields of a history that `training` plots; those of the validation loss may be None or empty."""

    @property
    def step(self) -> np.ndarray: ...
    @property
    def loss(self) -> np.ndarray: ...
    @property
    def validation_step(self) -> np.ndarray | None: ...
    @property
    def validation_loss(self) -> np.ndarray | None: ...


def training(
    history: History, *, ax: Axes | None = None, entropy: float | None = None, window: int | None = None
) -> Axes:
    """The loss at each step, its moving mean, the validation loss, and the entropy of the data, which is a
    lower bound on the expected loss.

    **Arguments:** `window`, the number of steps in the moving mean, by default 2 % of all steps.

    ```python
    import numpy as np
    from types import SimpleNamespace
    from roughflow import plots

    step = np.arange(500)
    loss = 3 + np.exp(-step / 50) + 0.1 * np.random.default_rng(0).normal(size=500)
    history = SimpleNamespace(step=step, loss=loss, validation_step=None, validation_loss=None)
    plots.training(history, entropy=2.9)
    ```
    """
    if not hasattr(history, "loss") or not hasattr(history, "step"):
        raise TypeError(f"history must be the history of a fit (fitted.history), got {shown(history)}")
    step, loss = np.asarray(history.step), np.asarray(history.loss)
    if not np.isfinite(loss).any():
        raise ValueError("history.loss has no finite value to plot")
    ax = curves(ax, "step", "loss (nats)")
    ax.plot(step, loss, color=SKY, linewidth=0.5, alpha=0.7)
    smooth = _moving_mean(loss, window or max(1, len(loss) // 50))
    ax.plot(step, smooth, "o-"[len(step) > 1 :], color=BLUE, linewidth=1.5, label="training")
    drawn = [smooth, np.quantile(loss[np.isfinite(loss)], [0, 0.98])]
    checks, validation = history.validation_step, history.validation_loss
    if checks is not None and validation is not None and validation.size:
        ax.plot(checks, validation, "o-", color=VERMILION, markersize=3, label="validation")
        drawn.append(validation[1:])
    if entropy is not None:
        text = plt.rcParams["text.color"]  # white on a dark background
        ax.axhline(entropy, color=text, linewidth=1.0, linestyle="--", label=f"entropy, {entropy:.3f}")
        drawn.append(np.array([entropy]))
    # Without these limits, the large losses of the first steps would flatten the rest of the curve.
    low, high = np.nanmin(np.concatenate(drawn)), np.nanmax(np.concatenate(drawn[1:]))
    pad = 0.05 * (high - low) or 0.05 * max(abs(high), 1.0)
    ax.set_ylim(low - pad, high + pad)
    ax.margins(x=0)
    ax.legend(frameon=False, fontsize=SMALL)
    return ax


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """For each value, the mean of the finite values among the `window` values around it; fewer at the
    ends."""
    finite, kernel = np.isfinite(values), np.ones(min(window, len(values)))
    total = np.convolve(np.where(finite, values, 0), kernel, "same")
    number = np.round(np.convolve(finite, kernel, "same"))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
