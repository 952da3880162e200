"""Nine toys: a continuous normalizing flow and a stochastic one, with the same budget."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from roughflow import plots
from roughflow.datasets import LAWS

from ._run import Run, paper_flow

STEPS, RATE = 1500, 3e-3  # at 1e-2 some of the laws blow up
NOISE = 0.1
MODELS = {"CNF": 0.0, "stochastic": NOISE}


def toys(run: Run) -> dict:
    """The excess over the entropy of both, for each law, and their densities."""
    figures: dict = {}
    figure, axes = plt.subplots(len(MODELS) + 1, len(LAWS), figsize=(14, 4.9), layout="constrained")
    for column, (name, law) in zip(axes.T, LAWS.items(), strict=True):
        points = plots.grid(law.extent, 100)
        truth = np.asarray(law.log_prob(jnp.asarray(points)))
        top = np.quantile(np.exp(truth), 0.995)
        plots.density(truth, extent=law.extent, ax=column[0], maximum=top)
        column[0].set_title(name, fontsize=9)
        figures[name] = {"entropy": law.entropy}
        for ax, (kind, noise) in zip(column[1:], MODELS.items(), strict=True):
            flow = paper_flow(noise, key=run.key("net"))
            model = run.train(f"{name}-{kind}", flow, law, steps=STEPS, rate=RATE)
            figures[name][kind] = run.excess(model, law)
            values = run.log_density(model)(points.reshape(-1, 2)).reshape(points.shape[:2])
            plots.density(values, extent=law.extent, ax=ax, maximum=top)
            ax.set_title(f"excess {figures[name][kind]['excess']:.3f}", fontsize=8)
    for ax in axes.ravel():
        ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
    for ax, label in zip(axes[:, 0], ["data", "CNF", f"λ = {NOISE:g}"], strict=True):
        ax.set_ylabel(label)
    return run.finish(figure, figures)
