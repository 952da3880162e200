"""The drift and the noise that a fit found, and how well they are known."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, ArrayLike
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

import roughflow as rf

from .._checks import check_instance, check_number
from ._style import BLUE, COLUMN, GREY, SKY, SMALL, curves

POINTS = 200


def bands(
    result: rf.FittedSDE,
    x: ArrayLike | None = None,
    *,
    level: float = 0.95,
    time: float = 0.0,
    figure: Figure | None = None,
    value_label: str = "x",
) -> Figure:
    """The drift and the noise of a fitted SDE of one component, with bands for each state by
    `FittedSDE.delta_method`; ticks below are the values observed.

    **Arguments:** `x`, the states `(n,)`, by default over the range of the series; `time`, where the SDE
    depends on it.

    ```python
    import jax, numpy as np
    import roughflow as rf
    from roughflow import plots

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12, x, key=jax.random.key(0))
    drift, noise = plots.bands(result).axes
    drift.axhline(0.0, color=plots.GREY)
    ```
    """
    check_instance("result", result, rf.FittedSDE, "what rf.fit_sde returns")
    values = np.concatenate([np.asarray(one.values) for one in result.series])
    if values.shape[1] != 1:
        raise ValueError(f"bands are for SDEs of one component, this one has {values.shape[1]}")
    check_number("level", level, above=0, below=1)
    x = np.linspace(values.min(), values.max(), POINTS) if x is None else np.asarray(x, float)
    states, when = jnp.asarray(x)[:, None], jnp.asarray(time, float)

    def coefficients(sde: rf.AbstractSDE) -> Array:
        """The drift, and the logarithm of the noise, so that its band is positive."""
        drift = jax.vmap(lambda z: sde.drift(when, z)[0])(states)
        noise = jax.vmap(lambda z: jnp.linalg.norm(jnp.asarray(sde.diffusion(when, z))))(states)  # pyright: ignore[reportCallIssue]
        return jnp.stack([drift, jnp.log(noise)])

    (drift, log_noise), (drift_error, noise_error) = result.delta_method(coefficients)
    width = stats.norm.ppf(0.5 + 0.5 * level)
    if figure is None:
        figure = plt.figure(figsize=(2 * COLUMN + 0.3, 0.75 * COLUMN), layout="constrained")
    left, right = figure.subplots(1, 2)
    parts = [(left, "drift", drift, drift_error), (right, "noise", log_noise, noise_error)]
    for ax, name, middle, error in parts:
        drawn = np.array([middle, middle - width * error, middle + width * error])
        _band(curves(ax, value_label, name), x, np.exp(drawn) if ax is right else drawn, level)
        ticks = {"color": GREY, "alpha": 0.5, "transform": ax.get_xaxis_transform()}
        ax.plot(values[:, 0], np.zeros(len(values)), "|", **ticks)
        ax.set_xlim(x.min(), x.max())
    right.set_ylim(bottom=0.0)
    left.legend(frameon=False, fontsize=SMALL)
    return figure


def _band(ax: Axes, x: np.ndarray, drawn: np.ndarray, level: float) -> None:
    middle, low, high = drawn
    ax.fill_between(x, low, high, color=SKY, alpha=0.35, linewidth=0, label=f"{100 * level:g} % bands")
    ax.plot(x, middle, color=BLUE, linewidth=1.5, label="estimate")
