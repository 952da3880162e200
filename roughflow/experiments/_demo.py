"""A first look: fit a banana from a table, score it, draw it, keep it."""

import dataclasses
import time
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import roughflow as rf
from roughflow import plots
from roughflow.datasets import Banana
from roughflow.report import write_report

from ._run import Run

ROWS, HELD_OUT, TEST, DRAWN = 20_000, 2000, 10_000, 4000
STEPS, LIKELIHOOD = 6000, 60
NOISE = 0.5
EXTENT = (-4.0, 4.0, -10.0, 5.0)
RESOLUTION = 160  # of the map, per side


def demo(
    out: Path,
    *,
    seed: int = 0,
    progress: bool = True,
    steps: int = STEPS,
    likelihood_steps: int = LIKELIHOOD,
) -> dict:
    """A flow learns the banana: `demo.png`, `demo-training.png`, `demo.json`, `demo-banana.rf`,
    and all of it on a page, `demo.html`.

    ```python
    from pathlib import Path
    from roughflow import experiments

    experiments.demo(Path("figures"))
    ```
    """
    run, banana = Run(Path(out), "demo", None, seed, progress, resume=False), Banana()
    draw = lambda label, count: np.asarray(banana.sample(key=run.key(label), shape=(count,)))
    data, began = draw("data", ROWS), time.perf_counter()
    fitted = rf.fit_density(
        data,
        key=run.key("fit"),
        validation=draw("validation", HELD_OUT),
        width=64,
        steps=steps,
        likelihood_steps=likelihood_steps,
        progress=progress,
    )
    if fitted.interrupted:
        raise KeyboardInterrupt
    seconds = time.perf_counter() - began
    rf.save(run.out / "demo-banana.rf", fitted.model)
    test = draw("test", TEST)
    run.say("demo: scoring on fresh data")
    metrics = {"entropy": banana.entropy, "rows": ROWS} | _score(run, fitted.model, banana, test)
    run.finish(_panels(run, fitted.model, banana, metrics), metrics)
    curve, ax = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    plots.training(fitted.stages["regression"], ax=ax)
    ax.set_ylabel("loss of the regression")
    plots.save(curve, run.out / "demo-training.png")
    write_report(
        run.out / "demo.html",
        fitted,
        data,
        held_out=test,
        key=run.key("report"),
        title="A banana, learned from samples",
        made={"command": f"roughflow demo --seed {seed}", "seed": str(seed), "seconds": f"{seconds:.1f}"},
    )
    return metrics


def _score(run: Run, model: rf.Standardised, banana: Banana, x: np.ndarray) -> dict:
    estimate = model.estimate(x, key=run.key("score"))
    gap = np.asarray(banana.log_prob(jnp.asarray(x))) - np.asarray(estimate.log_prob)
    return {
        "excess": float(gap.mean()),
        "excess_sampling_error": float(gap.std() / len(x) ** 0.5),
        "largest_total_error": float(np.max(estimate.total_error)),
        "test_points": len(x),
    }


def _panels(run: Run, model: rf.Standardised, banana: Banana, metrics: dict) -> Figure:
    """The distribution, its density by the flow, and samples without and with noise on the way."""
    figure, axes = plt.subplots(1, 4, figsize=(11.4, 4.4), layout="constrained")
    top = float(jnp.exp(banana.log_prob(jnp.zeros(2))))  # its own peak: one scale for both maps
    plots.density(banana.log_prob, extent=EXTENT, ax=axes[0], maximum=top)
    axes[0].set_title("the true density", fontsize=11)
    density = lambda z: model.log_prob(z, key=run.key("map"))
    plots.density(density, extent=EXTENT, ax=axes[1], resolution=RESOLUTION, maximum=top)
    excess = f"{metrics['excess']:.3f} ± {metrics['excess_sampling_error']:.3f}"
    axes[1].set_title(f"the flow, excess {excess}", fontsize=11)
    plots.samples(model.sample(key=run.key("draw"), shape=(DRAWN,)), extent=EXTENT, ax=axes[2])
    axes[2].set_title("samples of the flow", fontsize=11)
    noisy = dataclasses.replace(model, flow=rf.with_noise(model.flow, NOISE))
    plots.samples(noisy.sample(key=run.key("noisy"), shape=(DRAWN,)), extent=EXTENT, ax=axes[3])
    axes[3].set_title(f"the same with noise, λ = {NOISE:g}", fontsize=11)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return figure
