"""How a fit went."""

from typing import Protocol

import numpy as np
from matplotlib.axes import Axes

from .._checks import shown
from ._style import BLUE, SKY, SMALL, VERMILION, curves


class History(Protocol):
    """What `training` draws; the validation may be None or empty."""

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
    """The loss at each step, its moving mean, the validation loss, and the entropy of the data as the floor.

    **Arguments:** `window`, how many steps the moving mean takes in; a fiftieth of all of them if None.

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
        raise TypeError(f"history must be that of a fit, fitted.history, got {shown(history)}")
    step, loss = np.asarray(history.step), np.asarray(history.loss)
    if not np.isfinite(loss).any():
        raise ValueError("history.loss has no finite value to draw")
    ax = curves(ax, "step", "loss (nats)")
    ax.plot(step, loss, color=SKY, linewidth=0.5, alpha=0.7)
    smooth = _moving_mean(loss, window or max(1, len(loss) // 50))
    ax.plot(step, smooth, color=BLUE, linewidth=1.5, label="training")
    drawn = [smooth, np.quantile(loss[np.isfinite(loss)], [0, 0.98])]
    looks, validation = history.validation_step, history.validation_loss
    if looks is not None and validation is not None and validation.size:
        ax.plot(looks, validation, "o-", color=VERMILION, markersize=3, label="validation")
        drawn.append(validation[1:])
    if entropy is not None:
        ax.axhline(entropy, color="black", linewidth=1.0, linestyle="--", label=f"entropy, {entropy:.3f}")
        drawn.append(np.array([entropy]))
    # The first few losses can be so large that the rest would be a flat line.
    low, high = np.nanmin(np.concatenate(drawn)), np.nanmax(np.concatenate(drawn[1:]))
    ax.set(xlim=(step[0], step[-1]), ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)))
    ax.legend(frameon=False, fontsize=SMALL)
    return ax


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the finite ones among the `window` values around each; fewer at the ends."""
    finite, kernel = np.isfinite(values), np.ones(min(window, len(values)))
    total = np.convolve(np.where(finite, values, 0), kernel, "same")
    number = np.round(np.convolve(finite, kernel, "same"))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
