"""A first look: train the banana flow, score it, draw it, keep it."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import roughflow as rf
from roughflow import plots
from roughflow.datasets import Banana

from ._run import Run, paper_flow

STEPS = 500
EXTENT = (-4.0, 4.0, -10.0, 5.0)


def demo(out: Path, *, seed: int = 0, progress: bool = True) -> dict:
    """A stochastic flow learns the banana: `demo.png`, `demo-training.png`, `demo.json`, `demo-banana.rf`.

    ```python
    from pathlib import Path
    from roughflow import experiments

    experiments.demo(Path("figures"))
    ```
    """
    run, law = Run(Path(out), "demo", None, seed, progress, resume=False), Banana()
    flow = paper_flow(1.0, key=run.key("net"), width=32, depth=2, grid=4)
    model = run.train("banana", flow, law, steps=STEPS)
    run.say("demo: scoring on fresh data, with error bars")
    figures = {"entropy": law.entropy} | run.excess(model, law, paths=16, count=1000)
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 4.4), layout="constrained")
    plots.density(law.log_prob, extent=EXTENT, ax=axes[0])
    axes[0].set_title("the law of the data", fontsize=11)
    plots.density(run.log_density(model), extent=EXTENT, ax=axes[1], resolution=120)
    axes[1].set_title(f"the flow, excess {figures['excess']:.3f} nats", fontsize=11)
    samples = model.flow.sample(key=run.key("draw"), shape=(4000,))
    plots.samples(samples, extent=EXTENT, ax=axes[2])
    axes[2].set_title("samples of the flow", fontsize=11)
    run.finish(figure, figures)
    curve, ax = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    plots.training(rf.History(loss=np.asarray(model.loss)), entropy=law.entropy, ax=ax)
    plots.save(curve, run.out / "demo-training.png")
    return figures
