"""Densities and samples on the plane."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike
from matplotlib.axes import Axes

from .._checks import as_real, check_count
from ._style import BLUE, DENSITY, Window, add_colour_bar, plane


def grid(extent: Window, resolution: int = 200) -> np.ndarray:
    """The centres of square pixels that fill a window, `(rows, columns, 2)`, the lowest row first.

    **Arguments:** `extent`, (left, right, bottom, top); `resolution`, the pixels along the longer side.

    ```python
    from roughflow import plots

    plots.grid((-4, 4, -2, 2), 200).shape  # (100, 200, 2)
    ```
    """
    check_count("resolution", resolution)
    window = np.asarray(as_real("extent", extent), float)
    if (
        window.shape != (4,)
        or not np.isfinite(window).all()
        or not (window[0] < window[1] and window[2] < window[3])
    ):
        raise ValueError(f"extent must be (left, right, bottom, top), each pair increasing, got {extent}")
    left, right, bottom, top = window.tolist()
    pixel = max(right - left, top - bottom) / resolution
    columns, rows = max(1, round((right - left) / pixel)), max(1, round((top - bottom) / pixel))
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
    """A heat map of exp(log_prob) on a window of the plane.

    **Arguments:**

    - `log_prob`: takes points `(N, 2)` to log-densities `(N,)`, `chunk` points at a time; or the
      log-densities themselves, at the points of `grid(extent, resolution)`.
    - `extent`: (left, right, bottom, top).
    - `maximum`: the density shown darkest, to give several maps one scale; the highest if None.

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
        values = np.concatenate(parts).reshape(points.shape[:2])
    else:
        values = np.asarray(as_real("log_prob", log_prob))
        if values.ndim != 2:
            raise ValueError(f"log_prob must be a function or have shape (rows, columns), got {values.shape}")
    if np.isnan(values).any():
        raise ValueError(f"log_prob is NaN at {int(np.isnan(values).sum())} of {values.size} points")
    ax = plane(ax, extent)
    image = ax.imshow(np.exp(values), extent=extent, origin="lower", cmap=DENSITY, vmin=0, vmax=maximum)
    if colour_bar:
        add_colour_bar(ax, image, "density")
    return ax


def samples(points: ArrayLike, *, extent: Window | None = None, ax: Axes | None = None) -> Axes:
    """Points of the plane, `(N, 2)`, as dots that are smaller and paler the more there are.

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
    # As pixels even in a PDF: ten thousand dots as shapes make a file no viewer likes.
    ax.plot(*points.T, ".", color=BLUE, markersize=3 * fade, alpha=0.6 * fade, mew=0, rasterized=True)
    return ax
