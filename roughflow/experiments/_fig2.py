"""Figure 2: the banana, with constant noise and with noise that depends on the state, and long paths."""

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

from ._run import Run, kolmogorov, paper_flow

STEPS, REGRESSION, WIDTH = 600, 6000, 64
WALK, CHAINS = 10_000, 64  # Euler–Maruyama steps of a path; paths, of which the first is drawn
# The time a path takes: `autocorrelation_time` of the staying ones says how much of the distribution it can
# have seen. Larger noise, along the curve, sees it sooner and needs shorter steps.
HORIZONS, PAPER_HORIZON = {"staying-identity": 1000.0, "staying-along": 300.0}, 100.0
EXTENT = (-4.0, 4.0, -12.0, 5.0)
NOISE = 1.0


def along(t: jax.Array, z: jax.Array) -> jax.Array:
    """σ(z) along the curve y = −x² and across it: the Jacobian of the map from N(0, I) to the banana."""
    del t
    return jnp.array([[1.0, 0.0], [0.0, 2**0.5]]) - 2 * z[0] * jnp.array([[0.0, 0.0], [1.0, 0.0]])


def fig2(run: Run) -> dict:
    """In two ways, σ = I and a σ that depends on the state.

    The paper's: σ = I, and σ learned, fitted to the data at time 1 by maximum likelihood; beside them what
    its own loss, one path and nothing more, comes to. Nothing keeps their paths at the data afterwards.

    The new one: a velocity by regression, then noise λ = 1 added; and `rf.staying_sde`, which stays where
    the data are for any σ, here σ = I and one along the curve.

    The paper's models get 600 steps with 64 points each, and are scored on 1000 points, so that all of it
    takes minutes; `--steps` gives them more.
    """
    banana, key = Banana(), run.key("net")
    paper = {
        "identity": run.train(
            "identity",
            paper_flow(NOISE, key=key, learned=False),
            banana,
            steps=STEPS,
            frozen=lambda f: (f.base, f.sde.diffusion),
        ),
        "learned": run.train("learned", paper_flow(NOISE, key=key), banana, steps=STEPS),
    }
    one = rf.MaximumLikelihood(1, rf.Prior())
    one_path = run.train("one-path", paper_flow(NOISE, key=key), banana, steps=STEPS, objective=one)
    regressed = run.regress("regression", banana, steps=REGRESSION, beside=STEPS, width=WIDTH)
    staying = {
        "staying-identity": rf.staying_sde(regressed.model, rf.ConstantDiffusion(jnp.eye(2))),
        "staying-along": rf.staying_sde(regressed.model, along),
    }

    data = np.asarray(banana.sample(key=run.key("data"), shape=(100_000,)))
    metrics: dict = {"entropy": banana.entropy, "data_median": np.median(data, axis=0).tolist()}
    for name, model in (paper | {"one-path": one_path}).items():
        run.say(f"{run.name}: scoring {name}")
        metrics[name] = run.excess(model, banana)
        if name != "identity":
            metrics[name] |= alignment(model.flow.sde)
    for name, noise in (("regression", 0.0), ("regression-noise", NOISE)):
        run.say(f"{run.name}: scoring {name}")
        metrics[name] = run.excess_with(regressed, banana, noise)

    sdes = {name: model.flow.sde for name, model in paper.items()} | staying
    walks = {}
    for name, sde in sdes.items():
        horizon = HORIZONS.get(name, PAPER_HORIZON)
        paths = walk(sde, horizon, key=run.key("walk"))
        walks[name] = paths[0]
        metrics[name] = metrics.get(name, {}) | recurrence(walks[name]) | distances(paths, data)
        if name in staying:
            metrics[name]["autocorrelation_time"] = autocorrelation_time(paths, horizon)
            metrics[name]["walk_time"] = horizon
    return run.finish(_draw(banana, sdes, walks, metrics), metrics)


def _draw(banana: Banana, sdes: dict, walks: dict, metrics: dict) -> Figure:
    figure, axes = plt.subplots(1, 4, figsize=(10.6, 6.5), layout="constrained", sharey=True)
    excess = lambda name: f"{metrics[name]['excess']:.3f}"
    error = metrics["regression-noise"]["excess_sampling_error"]
    noisy = f"{excess('regression-noise')} ± {error:.3f} with λ = {NOISE:g}"
    titles = {
        "identity": f"maximum likelihood, σ = I\nexcess {excess('identity')}",
        "learned": f"maximum likelihood, σ learned\nexcess {excess('learned')}",
        "staying-identity": f"regression, then σ = I\nexcess {excess('regression')}; {noisy}",
        "staying-along": "the same regression,\nthen σ along the curve",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        plots.density(banana.log_prob, extent=EXTENT, ax=ax)
        # Far outside nothing is seen, and numbers beyond all bounds upset the drawing.
        plots.trajectory(np.clip(_same_time(name, walks[name]), -1e3, 1e3), ax=ax)
        arrows(ax, sdes[name])
        distance = max(metrics[name]["pooled_kolmogorov"])
        ax.set_title(f"{title}\npaths off the data by {distance:.2f}", fontsize=9)
        ax.set(xlim=EXTENT[:2], ylim=EXTENT[2:])
        ax.set_ylabel(ax.get_ylabel() if ax is axes[0] else "")
    lines = [
        Line2D([], [], color="black", linewidth=1.3, label="axes of σ on the curve $x_2 = -x_1^2$"),
        Line2D([], [], color="#D55E00", label=f"a path for {PAPER_HORIZON:g} units of time, from ○ to ●"),
        Line2D([], [], linestyle="", label=f"off by: Kolmogorov's distance, {CHAINS} × {WALK:,} steps"),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _same_time(name: str, path: np.ndarray) -> np.ndarray:
    """Some thousand points of the path, over the same time in all panels."""
    if name in HORIZONS:
        return path[: 1 + round(WALK * PAPER_HORIZON / HORIZONS[name])]
    return path[:: max(1, WALK // 2500)]


def walk(sde: rf.AbstractSDE, horizon: float, *, key) -> np.ndarray:
    """Euler–Maruyama paths from the middle of the data, `(64, 10001, 2)`."""
    start = jnp.tile(jnp.array([0.0, -1.0]), (CHAINS, 1))
    paths = np.asarray(rf.simulate(sde, start, key=key, t1=horizon, steps=WALK, trajectory=True))
    return np.where(np.isfinite(paths), paths, np.inf)


def distances(paths: np.ndarray, data: np.ndarray) -> dict:
    """Kolmogorov's distance of each coordinate from the data's, for one path and for all of them."""
    cdfs = [_empirical(data[:, i]) for i in range(2)]
    far = lambda values: [kolmogorov(values[..., i].ravel(), cdfs[i]) for i in range(2)]
    return {"walk_kolmogorov": far(paths[0]), "pooled_kolmogorov": far(paths[:, ::10])}


def autocorrelation_time(paths: np.ndarray, horizon: float) -> float:
    """1 + 2 Σ of the autocorrelations, in units of time, of the slower coordinate: up to where they first
    fall below 0.05, on the mean over all paths."""
    centred = paths - paths.mean(axis=(0, 1))
    size = paths.shape[1]
    spectrum = np.abs(np.fft.rfft(centred, 2 * size, axis=1)) ** 2
    covariance = np.fft.irfft(spectrum, axis=1)[:, :size].mean(axis=0)  # (lags, 2)
    correlation = covariance / covariance[0] * size / (size - np.arange(size))[:, None]
    last = [int(np.argmax(c < 0.05)) for c in correlation.T]
    sums = [1 + 2 * correlation[1:end, i].sum() for i, end in enumerate(last)]
    return float(max(sums) * horizon / (size - 1))


def _empirical(values: np.ndarray):
    ordered = np.sort(values)
    return lambda x: np.searchsorted(ordered, x, side="right") / len(ordered)


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
        "walk_kolmogorov_across": kolmogorov(across, norm.cdf),
    }


def noise_axes(sde: rf.AbstractSDE, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes `(N, 2)`, larger first, and directions `(N, 2, 2)` of the noise at each point."""
    sigma = jax.vmap(lambda z: sde.noise(jnp.zeros(()), z))(jnp.asarray(points))
    directions, sizes, _ = np.linalg.svd(np.asarray(sigma))
    return sizes, np.swapaxes(directions, 1, 2)


def alignment(sde: rf.AbstractSDE) -> dict:
    """Whether the larger noise runs along the curve y = −x²: the mean |cos| of the angle between them."""
    x = np.linspace(-2, 2, 41)
    sizes, directions = noise_axes(sde, np.stack([x, -(x**2)], axis=1))
    along = np.stack([np.ones_like(x), -2 * x], axis=1)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    cosine = np.abs(np.sum(directions[:, 0] * along, axis=1))
    weight = np.exp(-0.5 * x**2)
    return {
        "noise_along_the_curve_mean_cosine": float(np.sum(weight * cosine) / np.sum(weight)),
        "noise_ratio_long_to_short": float(np.sum(weight * sizes[:, 0] / sizes[:, 1]) / np.sum(weight)),
    }


def arrows(ax, sde: rf.AbstractSDE) -> None:
    """The axes of the noise along the curve, as crosses."""
    x = np.linspace(-2.4, 2.4, 9)
    points = np.stack([x, -(x**2)], axis=1)
    sizes, directions = noise_axes(sde, points)
    for i in range(2):
        arm = 0.35 * sizes[:, i, None] * directions[:, i]
        ends = np.stack([points - arm, points + arm], axis=1)
        ax.plot(*ends.transpose(2, 1, 0), color="black", linewidth=1.3, zorder=4)
