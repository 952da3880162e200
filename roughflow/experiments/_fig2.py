"""Figure 2: the banana, with constant and with learned noise, and one long path of each."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.stats import norm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import roughflow as rf
from roughflow import plots
from roughflow.datasets import Banana

from ._run import Run, Trained, kolmogorov, paper_flow

STEPS = 2000
STAYING, RATE, BATCH, PATHS, WEIGHT = 3500, 3e-3, 1024, 8, 10.0  # to stay; at a rate of 5e-3 it blows up
WALK, HORIZON = 10_000, 100.0  # Euler–Maruyama steps, and the time they take
EXTENT = (-4.0, 4.0, -12.0, 5.0)
TITLES = {"identity": "σ = I", "learned": "σ learned, λ = 1"}


def fig2(run: Run) -> dict:
    """σ = I and σ learned with λ = 1, each fitted to the data at time 1, and again so that it stays there.

    Beside them what the paper's own loss, one path and nothing more, comes to.
    """
    law, key = Banana(), run.key("net")
    flows = {name: paper_flow(1.0, key=key, learned=name == "learned") for name in TITLES}
    models: dict[str, Trained] = {}
    staying = rf.MaximumLikelihood(PATHS, stationary=WEIGHT)
    for name, flow in flows.items():
        still = (lambda f: f.base) if name == "learned" else (lambda f: (f.base, f.sde.diffusion))
        models[name] = run.train(name, flow, law, steps=STEPS, frozen=still)
        # From nothing: a fit that leaves the data is a bad place to start from.
        models[f"{name}-staying"] = run.train(
            f"{name}-staying",
            flow,
            law,
            steps=STAYING,
            rate=RATE,
            batch=BATCH,
            objective=staying,
            frozen=still,
        )
    one_path = rf.MaximumLikelihood(1, rf.Prior())
    models["one-path"] = run.train("one-path", flows["learned"], law, steps=STEPS, objective=one_path)
    data = law.sample(key=run.key("data"), shape=(100_000,))
    figures: dict = {"entropy": law.entropy, "data_median": np.median(data, axis=0).tolist()}
    walks = {}
    for name, model in models.items():
        run.say(f"{run.name}: scoring {name}")
        walks[name] = walk(model, key=run.key("walk"))
        figures[name] = run.excess(model, law) | recurrence(walks[name])
        if "identity" not in name:
            figures[name] |= alignment(model)
    return run.finish(_draw(law, models, walks, figures), figures)


def _draw(law: Banana, models: dict, walks: dict, figures: dict) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(5.4, 5.8), layout="constrained", sharey=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        plots.density(law.log_prob, extent=EXTENT, ax=ax)
        plots.trajectory(walks[f"{name}-staying"][::4], t1=HORIZON, ax=ax)
        arrows(ax, models[f"{name}-staying"])
        before, after = figures[name]["excess"], figures[f"{name}-staying"]["excess"]
        ax.set_title(f"{title}: excess {after:.3f} nats\n({before:.3f} if it need not stay)", fontsize=9)
        ax.set(xlim=EXTENT[:2], ylim=EXTENT[2:])
    axes[1].set_ylabel("")
    lines = [
        Line2D([], [], color="black", linewidth=1.3, label="axes of σ on the curve y = −x²"),
        Line2D([], [], color="#D55E00", label=f"path of {WALK:,} steps, from the open to the full circle"),
    ]
    figure.legend(handles=lines, loc="outside lower center", frameon=False, fontsize=8)
    return figure


def walk(model: Trained, *, key) -> np.ndarray:
    """One Euler–Maruyama path of 10,000 steps from the middle of the data."""
    start = jnp.array([0.0, -1.0])
    return np.asarray(rf.simulate(model.flow.sde, start, key=key, t1=HORIZON, steps=WALK, trajectory=True))


def recurrence(path: np.ndarray) -> dict:
    """How far the path went, and how often it came back to where half of the data are."""
    across = (path[:, 1] + path[:, 0] ** 2) / 2**0.5  # for the data N(0, 1), as x, and independent of it
    middle = np.hypot(path[:, 0], across) < 1.18
    return {
        "walk_range": [float(v) for v in (*path.min(axis=0), *path.max(axis=0))],
        "walk_inside_data_range": bool(np.all(np.abs(path[:, 0]) < 5) & np.all(np.abs(path[:, 1]) < 25)),
        "walk_time_in_the_middle": float(middle.mean()),
        "walk_returns": int(np.sum(~middle[:-1] & middle[1:])),
        "walk_median": [float(v) for v in np.median(path, axis=0)],
        "walk_kolmogorov_x": kolmogorov(path[:, 0], norm.cdf),
        "walk_kolmogorov_across": kolmogorov(across, norm.cdf),
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
        arm = 0.35 * sizes[:, i, None] * directions[:, i]
        ends = np.stack([points - arm, points + arm], axis=1)
        ax.plot(*ends.transpose(2, 1, 0), color="black", linewidth=1.3, zorder=4)
