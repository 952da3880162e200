"""Figure 3: the star, with more and more noise, in training and after it."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from roughflow import plots
from roughflow.datasets import Star

from ._run import PIXELS, Run, paper_flow

STEPS, REGRESSION = 600, 20_000
IN_TRAINING, AFTERWARDS = (0.0, 0.1, 0.5, 1.0), (0.0, 0.25, 0.5, 1.0)
TOP = 0.35  # the density shown darkest


def fig3(run: Run) -> dict:
    """The star's density for each λ: above by maximum likelihood, below by one regression and noise after it.

    A second figure, `fig3-noise.png`, has the excess against λ for both: noise in training blurs, noise
    afterwards does not. Bars are two standard errors, and grow with λ: the price of noise.

    The models above, the paper's way, get 600 steps with 64 points each and are scored on 1000 points, so
    that all of it takes minutes; `--steps` gives them more. Densities below with noise are histograms.
    """
    star = Star()
    metrics: dict = {"entropy": star.entropy, "likelihood": {}, "regression": {}}
    above, below = {}, {}
    for noise in IN_TRAINING:
        label = f"{noise:g}"
        model = run.train(label, paper_flow(noise, key=run.key("net")), star, steps=STEPS)
        run.say(f"{run.name}: scoring λ = {label}")
        metrics["likelihood"][label] = run.excess(model, star)
        points = plots.grid(star.extent, PIXELS)
        above[label] = run.log_density(model)(points.reshape(-1, 2)).reshape(points.shape[:2])
    regressed = run.regress("regression", star, steps=REGRESSION, beside=STEPS)
    for noise in AFTERWARDS:
        label = f"{noise:g}"
        run.say(f"{run.name}: scoring regression with λ = {label}")
        metrics["regression"][label] = run.excess_with(regressed, star, noise)
        below[label] = run.picture(regressed, noise, star.extent)
    plots.save(_curves(metrics), run.out / "fig3-noise.png")
    return run.finish(_maps(star, above, below, metrics), metrics)


def _maps(star: Star, above: dict, below: dict, metrics: dict) -> Figure:
    columns = 1 + max(len(above), len(below))
    size = (2.3 * columns, 5.4)
    figure, axes = plt.subplots(2, columns, figsize=size, layout="constrained", sharex=True, sharey=True)
    plots.density(star.log_prob, extent=star.extent, resolution=200, ax=axes[0, 0], maximum=TOP)
    axes[0, 0].set_title("data", fontsize=10)
    axes[0, 0].tick_params(labelbottom=True)
    axes[1, 0].set_visible(False)
    for row, maps, kind in ((axes[0, 1:], above, "likelihood"), (axes[1, 1:], below, "regression")):
        for ax, (label, values) in zip(row, maps.items(), strict=True):
            plots.density(values, extent=star.extent, ax=ax, maximum=TOP)
            ax.set_title(f"λ = {label}: excess {_number(metrics[kind][label])}", fontsize=9)
    for ax in axes[0, 1:]:
        ax.set_xlabel("")
    for ax in axes[:, 1]:
        ax.tick_params(labelleft=True)
    for ax in axes[:, 2:].ravel():
        ax.set_ylabel("")
    steps = {kind: metrics[kind]["0"]["training_steps"] for kind in ("likelihood", "regression")}
    axes[0, 1].set_ylabel(f"maximum likelihood with\nnoise λ, {steps['likelihood']:,} steps", fontsize=9)
    axes[1, 1].set_ylabel(f"regression, {steps['regression']:,} steps,\nnoise λ afterwards", fontsize=9)
    return figure


def _number(scored: dict) -> str:
    value = f"{scored['excess']:.3f} ± {scored['excess_sampling_error']:.3f}"
    return value.replace("-", "−")


def _curves(metrics: dict) -> Figure:
    figure, ax = plt.subplots(figsize=(4.4, 3.2), layout="constrained")
    looks = {
        "likelihood": ("s--", plots.VERMILION, "maximum likelihood with noise"),
        "regression": ("o-", plots.BLUE, "regression, noise afterwards"),
    }
    for kind, (style, colour, label) in looks.items():
        scored = metrics[kind]
        noises = [float(noise) for noise in scored]
        values = [found["excess"] for found in scored.values()]
        # The scatter over points has the estimator's in it already.
        errors = [2 * found["excess_sampling_error"] for found in scored.values()]
        ax.errorbar(noises, values, errors, fmt=style, color=colour, markersize=4, capsize=2.5, label=label)
    ax.axhline(0, color=plots.GREY, linewidth=0.8)
    # One is tens of times the other: both are seen on a scale that is even near zero, logarithmic above.
    ax.set_yscale("symlog", linthresh=0.05)
    ticks = [-0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1]
    ax.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    ax.minorticks_off()
    ax.set(xlabel="noise λ", ylabel="excess over the entropy (nats)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.72))
    return figure
