"""Nine toys: by maximum likelihood, by regression, and with noise added afterwards."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from roughflow import plots
from roughflow.datasets import DISTRIBUTIONS

from ._run import PIXELS, Run, paper_flow

STEPS, REGRESSION, WIDTH = 400, 3000, 64
NOISE = 0.5
POINTS = 300  # to score on with noise
ROWS = ["data", "maximum\nlikelihood", "regression", f"regression,\nthen λ = {NOISE:g}"]


def toys(run: Run) -> dict:
    """The excess over the entropy of each, for each distribution, and their densities.

    The likelihood is that of a continuous normalizing flow, without noise, in 400 steps with 64 points each,
    so that all of it takes minutes: Figures 2 and 3 show the paper's way with noise. The last row is scored
    on 300 points, and shows a histogram of samples.
    """
    metrics: dict = {}
    shape = len(ROWS), len(DISTRIBUTIONS)
    figure, axes = plt.subplots(
        *shape, figsize=(1.55 * len(DISTRIBUTIONS), 6.6), layout="constrained", squeeze=False
    )
    for column, (name, distribution) in zip(axes.T, DISTRIBUTIONS.items(), strict=True):
        points = plots.grid(distribution.extent, PIXELS)
        flat = jnp.asarray(points.reshape(-1, 2))
        truth = np.asarray(distribution.log_prob(jnp.asarray(points)))
        top = np.quantile(np.exp(truth), 0.995)
        plots.density(truth, extent=distribution.extent, ax=column[0], maximum=top)
        column[0].set_title(name, fontsize=9)
        by_likelihood = run.train(
            f"{name}-CNF", paper_flow(0.0, key=run.key("net")), distribution, steps=STEPS
        )
        regressed = run.regress(
            f"{name}-regression", distribution, steps=REGRESSION, beside=STEPS, width=WIDTH
        )
        scored = {
            "CNF": run.excess(by_likelihood, distribution),
            "regression": run.excess_with(regressed, distribution, 0.0),
            "regression-noise": run.excess_with(regressed, distribution, NOISE, count=POINTS),
        }
        maps = [
            np.asarray(run.log_density(by_likelihood)(flat)).reshape(points.shape[:2]),
            run.picture(regressed, 0.0, distribution.extent),
            run.picture(regressed, NOISE, distribution.extent),
        ]
        for ax, found, values in zip(column[1:], scored.values(), maps, strict=True):
            plots.density(values, extent=distribution.extent, ax=ax, maximum=top)
            ax.set_title(f"excess {found['excess']:.3f}", fontsize=8)
        metrics[name] = {"entropy": distribution.entropy} | scored
    for ax in axes.ravel():
        ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
    for ax, label in zip(axes[:, 0], ROWS, strict=True):
        ax.set_ylabel(label, fontsize=9)
    return run.finish(figure, metrics)
