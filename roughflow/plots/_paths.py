"""Paths: in the plane, over time, and smooth ones in place of rough ones."""

from collections.abc import Mapping
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

import roughflow as rf

from .._checks import as_real, check_number
from ._style import BLUE, EMBER, GREEN, GREY, PURPLE, SMALL, TIME, VERMILION, add_colour_bar, curves, plane


def trajectory(path: ArrayLike, *, t1: float = 1.0, ax: Axes | None = None, colour_bar: bool = False) -> Axes:
    """A path in the plane at T even times of [0, t1], `(T, 2)`: it darkens, from the open to the full circle.

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
    # White beneath, to stand out from a density.
    ax.plot(*path.T, color="white", linewidth=2.0, solid_joinstyle="round")
    pieces = LineCollection(np.stack([path[:-1], path[1:]], axis=1).tolist(), cmap=TIME, linewidths=1.0)
    pieces.set(array=t1 * (np.arange(len(path) - 1) + 0.5) / (len(path) - 1), clim=(0, t1), zorder=2.5)
    ax.add_collection(pieces)
    ends = {"markersize": 5, "markeredgewidth": 1.0, "zorder": 3}
    ax.plot(*path[0], "o", markerfacecolor="white", markeredgecolor=VERMILION, **ends)
    ax.plot(*path[-1], "o", markerfacecolor=EMBER, markeredgecolor="white", **ends)
    if colour_bar:
        add_colour_bar(ax, pieces, "time")
    return ax


def sample_paths(times: ArrayLike, paths: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """One-dimensional paths over time: `times` `(T,)`, `paths` `(K, T)`.

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
    path: rf.Path | ArrayLike,
    approximations: Mapping[str, rf.Path | ArrayLike],
    *,
    times: ArrayLike,
    ax: Axes | None = None,
    label: str = "Brownian path",
) -> Axes:
    """A rough path, and smooth ones that stand for it. Each is a path, or its values at `times`.

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
    looks = cycle([("-", BLUE), ("--", VERMILION), ("-.", GREEN), (":", PURPLE)])
    for (name, smooth), (style, colour) in zip(approximations.items(), looks, strict=False):
        ax.plot(times, _values(smooth, times), style, color=colour, linewidth=1.5, label=name)
    ax.set_xlim(times[0], times[-1])
    ax.legend(frameon=False, fontsize=SMALL)
    return ax


def _values(path: rf.Path | ArrayLike, times: np.ndarray) -> np.ndarray:
    """A one-dimensional path at some times."""
    is_path = isinstance(path, rf.Path)
    values = np.asarray(jax.vmap(path.evaluate)(jnp.asarray(times)) if is_path else path)
    values = values[..., 0] if values.shape == (*times.shape, 1) else values
    if values.shape != times.shape:
        raise ValueError(f"a path must be one-dimensional, with shape {times.shape}, got {values.shape}")
    return values
