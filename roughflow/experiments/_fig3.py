"""Figure 3: the star, with more and more noise."""

import matplotlib.pyplot as plt

from roughflow import plots
from roughflow.datasets import Star

from ._run import Run, paper_flow

STEPS = 3000
NOISES = (0.0, 0.1, 0.5, 1.0)
MAP = 120  # pixels a side


def fig3(run: Run) -> dict:
    """One model for each λ; all four densities on one scale, beside the truth."""
    law = Star()
    figures: dict = {"entropy": law.entropy}
    maps = {}
    for noise in NOISES:
        label = f"{noise:g}"
        model = run.train(label, paper_flow(noise, key=run.key("net")), law, steps=STEPS)
        run.say(f"{run.name}: scoring λ = {label}")
        figures[label] = run.excess(model, law)
        points = plots.grid(law.extent, MAP)
        maps[label] = run.log_density(model)(points.reshape(-1, 2)).reshape(points.shape[:2])
    figure, axes = plt.subplots(1, 5, figsize=(11.5, 2.9), layout="constrained", sharey=True)
    plots.density(law.log_prob, extent=law.extent, resolution=MAP, ax=axes[0], maximum=0.35)
    axes[0].set_title("data", fontsize=9)
    for ax, (label, values) in zip(axes[1:], maps.items(), strict=True):
        plots.density(values, extent=law.extent, ax=ax, maximum=0.35)
        best = min(figures[label]["excess"], figures[label]["excess_learned_proposal"])
        ax.set_title(f"λ = {label}: excess {best:.3f}", fontsize=9)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return run.finish(figure, figures)
