"""How an estimate went."""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import roughflow as rf

from .._checks import check_instance
from ._style import BLUE, COLUMN, GREY, SMALL, TEXT, VERMILION, curves

# Above this the mean of the weights converges too slowly to be trusted; see `Estimate.pareto_k`.
HEAVY_TAIL = 0.7


def diagnostics(estimate: rf.Estimate, *, figure: Figure | None = None) -> Figure:
    """How far to trust an estimate at many points: effective paths, standard errors and tails, each sorted.

    Points the estimate itself calls suspect are red, and its warning is written above.

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
    check_instance("estimate", estimate, rf.Estimate, "what flow.estimate returns")
    if figure is None:
        figure = plt.figure(figsize=(2 * COLUMN + 0.3, 0.75 * COLUMN), layout="constrained")
    suspect = np.ravel(estimate.suspect)
    left, middle, right = figure.subplots(1, 3)
    _sorted(left, estimate.effective_paths, suspect, "effective paths", log=True)
    left.axhline(np.max(estimate.num_paths), color=GREY, linewidth=0.8, linestyle="--", label="all paths")
    if suspect.any():
        left.plot([], [], "o", color=VERMILION, markersize=3, mew=0, label="suspect")
    left.legend(frameon=False, fontsize=SMALL, loc="lower right")
    _sorted(middle, estimate.standard_error, suspect, "standard error (nats)", log=True)
    _sorted(right, estimate.pareto_k, suspect, "Pareto $k$", log=False)
    right.axhline(HEAVY_TAIL, color=GREY, linewidth=0.8, linestyle="--", label=f"{HEAVY_TAIL}: heavy tail")
    right.legend(frameon=False, fontsize=SMALL, loc="upper left")
    text = estimate.warning or f"none of {suspect.size} estimates is suspect"
    figure.suptitle("\n".join(textwrap.wrap(text, 105)), fontsize=TEXT, x=0.01, ha="left")
    return figure


def _sorted(ax: Axes, values: ArrayLike, suspect: np.ndarray, label: str, *, log: bool) -> None:
    """Values against the share of points that lie below them; those that no scale holds are counted."""
    order = np.argsort(np.ravel(values))
    ranked, bad = np.ravel(values)[order], suspect[order]
    drawn = np.isfinite(ranked)
    positive = ranked[drawn & (ranked > 0)]
    # On less than a decade a logarithmic scale has next to no ticks.
    if log and positive.size and positive[-1] > 10 * positive[0]:
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
