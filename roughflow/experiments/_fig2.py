"""Figure 2: the banana, with constant and with learned noise, and one long path of each."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import roughflow as rf
from roughflow import plots
from roughflow.datasets import Banana

from ._run import PATHS, Run, Trained, paper_flow

STEPS, STAYING, RATE, WEIGHT = 2000, 500, 3e-3, 3.0  # of the first fit, and of the second
GRID = 16  # steps of the solver: staying makes the drift steep
WALK, HORIZON = 10_000, 100.0  # Euler–Maruyama steps, and the time they take
EXTENT = (-4.0, 4.0, -12.0, 5.0)
TITLES = {"identity": "σ = I", "learned": "σ learned, λ = 1"}


def fig2(run: Run) -> dict:
    """σ = I and σ learned with λ = 1: fitted to the data at time 1, then taught to stay there.

    Beside them what the paper's own loss, one path and nothing more, comes to.
    """
    law, key = Banana(), run.key("net")
    flows = {name: paper_flow(1.0, key=key, learned=name == "learned", grid=GRID) for name in TITLES}
    models: dict[str, Trained] = {}
    for name, flow in flows.items():
        models[name], models[f"{name}-staying"] = _recurrent(run, name, flow, law)
    one_path = rf.MaximumLikelihood(1, rf.Prior())
    models["one-path"] = run.train("one-path", flows["learned"], law, steps=STEPS, objective=one_path)
    figures: dict = {"entropy": law.entropy}
    walks = {}
    for name, model in models.items():
        run.say(f"{run.name}: scoring {name}")
        walks[name] = walk(model, key=run.key("walk"))
        figures[name] = run.excess(model, law) | recurrence(walks[name])
        if "identity" not in name:
            figures[name] |= alignment(model)
    return run.finish(_draw(law, models, walks, figures), figures)


def _recurrent(run: Run, name: str, flow: rf.StochasticFlow, law: Banana) -> tuple[Trained, Trained]:
    """Two fits, so that each has its own rate: staying is delicate, and costs a little likelihood."""
    frozen = (lambda f: f.base) if name == "learned" else (lambda f: (f.base, f.sde.diffusion))
    first = run.train(name, flow, law, steps=STEPS, frozen=frozen)
    staying = rf.MaximumLikelihood(PATHS, first.proposal, stationary=WEIGHT)
    second = run.train(
        f"{name}-staying", first.flow, law, steps=STAYING, rate=RATE, objective=staying, frozen=frozen
    )
    return first, second


def _draw(law: Banana, models: dict, walks: dict, figures: dict) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(5.6, 5.2), layout="constrained", sharey=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        plots.density(law.log_prob, extent=EXTENT, ax=ax)
        plots.trajectory(walks[f"{name}-staying"][::4], t1=HORIZON, ax=ax)
        arrows(ax, models[f"{name}-staying"])
        before, after = figures[name]["excess"], figures[f"{name}-staying"]["excess"]
        ax.set_title(f"{title}\nexcess {before:.3f} nats, staying {after:.3f}", fontsize=9)
        ax.set(xlim=EXTENT[:2], ylim=EXTENT[2:])
    axes[1].set_ylabel("")
    return figure


def walk(model: Trained, *, key) -> np.ndarray:
    """One Euler–Maruyama path of 10,000 steps from the middle of the data."""
    start = jnp.array([0.0, -1.0])
    return np.asarray(rf.simulate(model.flow.sde, start, key=key, t1=HORIZON, steps=WALK, trajectory=True))


def recurrence(path: np.ndarray) -> dict:
    """How far the path went, and how often it came back to where half of the data are."""
    middle = np.hypot(path[:, 0], (path[:, 1] + path[:, 0] ** 2) / 2**0.5) < 1.18
    return {
        "walk_range": [float(v) for v in (*path.min(axis=0), *path.max(axis=0))],
        "walk_inside_data_range": bool(np.all(np.abs(path[:, 0]) < 5) & np.all(np.abs(path[:, 1]) < 25)),
        "walk_time_in_the_middle": float(middle.mean()),
        "walk_returns": int(np.sum(~middle[:-1] & middle[1:])),
    }


def noise_axes(model: Trained, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes `(N, 2)`, larger first, and directions `(N, 2, 2)` of the noise at each point."""
    sigma = jax.vmap(lambda z: model.flow.sde.noise(jnp.zeros(()), z))(jnp.asarray(points))
    directions, sizes, _ = np.linalg.svd(np.asarray(sigma))
    return sizes, np.swapaxes(directions, 1, 2)


def alignment(model: Trained) -> dict:
    """Whether the larger noise runs along the curve y = −x²: the mean |cos| of the angle between them."""
    x = np.linspace(-2, 2, 41)
    sizes, directions = noise_axes(model, np.stack([x, -(x**2)], axis=1))
    along = np.stack([np.ones_like(x), -2 * x], axis=1)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    cosine = np.abs(np.sum(directions[:, 0] * along, axis=1))
    weight = np.exp(-0.5 * x**2)
    return {
        "noise_along_the_curve_mean_cosine": float(np.sum(weight * cosine) / np.sum(weight)),
        "noise_ratio_long_to_short": float(np.sum(weight * sizes[:, 0] / sizes[:, 1]) / np.sum(weight)),
    }


def arrows(ax, model: Trained) -> None:
    """The axes of the noise along the curve, as crosses."""
    x = np.linspace(-2.4, 2.4, 9)
    points = np.stack([x, -(x**2)], axis=1)
    sizes, directions = noise_axes(model, points)
    for i in range(2):
        arm = 0.45 * sizes[:, i, None] * directions[:, i]
        ends = np.stack([points - arm, points + arm], axis=1)
        ax.plot(*ends.transpose(2, 1, 0), color="black", linewidth=1.3, zorder=4)
