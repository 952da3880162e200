"""The experiments of the paper (Hodgkinson et al. 2020): the demo and figures 1 to 4."""

import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import roughflow as rf
from roughflow import plots
from roughflow.datasets import AbstractDistribution, Banana, Star
from roughflow.report import write_report

BATCH, PATHS, RATE = 64, 4, 3e-3  # settings of the paper's method; with noise, a step takes half a second
ROWS, WIDTH = 200_000, 128  # training rows of a regression, and width of its network
TEST, NOISY_TEST = 4000, 1000  # numbers of new points on which models are scored, without and with noise
SCORED, MANY = 128, 4096  # paths per point, and for points that none of these paths reaches
HISTOGRAM, PIXELS = 150_000, 96  # number of samples in a histogram, and of pixels per side


class Trained(eqx.Module):
    """A flow, the proposal with which it was trained, and the training time in seconds."""

    flow: rf.StochasticFlow
    proposal: rf.density.AbstractProposal
    loss: jax.Array  # one value per step
    seconds: float

    @property
    def cheap(self) -> rf.PullBack:
        """An estimator with few paths from the learned proposal, for heat maps."""
        return rf.PullBack(1 if self.flow.noise_dimension == 0 else 32, self.proposal)


class Regressed(eqx.Module):
    """A model fitted by regression, without noise and in the units of the data, and the training time in
    seconds."""

    model: rf.tables.Standardised
    loss: jax.Array
    seconds: float

    def noisy(self, noise: float) -> rf.tables.Standardised:
        """The model with noise added after training, which does not change the distribution; with `noise=0`,
        the model without noise."""
        flow = rf.with_noise(self.model.flow, noise or None)
        return eqx.tree_at(lambda model: model.flow, self.model, flow)


@dataclass(frozen=True)
class Run:
    """One experiment: its output folder and options."""

    out: Path
    name: str
    steps: int | None
    seed: int
    progress: bool
    resume: bool

    def key(self, label: str) -> PRNGKeyArray:
        """A key derived from the seed and a label."""
        return jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(label.encode()))

    def train(
        self,
        label: str,
        flow: rf.StochasticFlow,
        distribution: AbstractDistribution,
        *,
        steps: int,
        rate: float = RATE,
        batch: int = BATCH,
        objective: rf.MaximumLikelihood | None = None,
        frozen=lambda flow: flow.base,
    ) -> Trained:
        """The paper's method: fit a flow to new samples of a distribution by maximum likelihood."""

        def fit(settings: dict) -> tuple[rf.train.Fitted, dict]:
            fitted = rf.fit(
                flow,
                distribution,
                key=self.key(label),
                objective=objective or rf.MaximumLikelihood(PATHS),
                steps=self.steps or steps,
                frozen=frozen,
                training=rf.train.TrainingOptions(batch_size=batch, learning_rate=rate),
                **settings,
            )
            assert isinstance(fitted.objective, rf.MaximumLikelihood)
            return fitted, {"flow": fitted.model, "proposal": fitted.objective.bound.estimator.proposal}

        return Trained(**self.kept(label, fit))

    def regress(
        self, label: str, distribution: AbstractDistribution, *, steps: int, beside: int, width: int = WIDTH
    ) -> Regressed:
        """Fit by regression: `rf.fit_density` without likelihood steps, so that no ODE is solved.

        `steps` is the number of regression steps if `train` takes `beside` steps; if `--steps` changes the
        number for `train`, that for the regression changes in proportion.
        """
        steps = steps if self.steps is None else -(-steps * self.steps // beside)
        rows = np.asarray(distribution.sample(key=self.key("rows"), shape=(ROWS,)))

        def fit(settings: dict) -> tuple[rf.train.Fitted, dict]:
            fitted = rf.fit_density(
                rows,
                key=self.key(label),
                validation=0.0,
                steps=steps,
                flow=rf.tables.FlowOptions(width=width, likelihood_steps=0),
                **settings,
            )
            return fitted, {"model": fitted.model}

        return Regressed(**self.kept(label, fit))

    def kept(self, label: str, fit: Callable[[dict], tuple[rf.train.Fitted, dict]]) -> dict:
        """The model that `fit` returns, its losses and the training time. With `resume`, all are loaded from
        `NAME-LABEL.rf` if this file exists; otherwise an interrupted run is continued if there is one."""
        file = self.out / f"{self.name}-{label}.rf"
        checkpoint = file.with_suffix(".checkpoint")
        if self.resume and file.exists():
            return rf.load(file)
        if not self.resume:
            checkpoint.unlink(missing_ok=True)
        self.report_progress(f"{self.name}: training {label}")
        began = time.perf_counter()
        kept = rf.train.RunOptions(checkpoint=checkpoint, resume=checkpoint.exists())
        settings = {"run": kept, "progress": self.progress}
        fitted, parts = fit(settings)
        if fitted.interrupted:
            raise KeyboardInterrupt
        parts |= {"loss": jnp.asarray(fitted.history.loss), "seconds": time.perf_counter() - began}
        rf.save(file, parts)
        checkpoint.unlink(missing_ok=True)
        return parts

    def excess(
        self, trained: Trained, distribution: AbstractDistribution, *, count: int | None = None
    ) -> dict:
        """An estimate of how much −E log p exceeds the entropy, computed at new points with the learned
        proposal. It is slightly too high if the proposal misses paths; `effective_paths` is then low."""
        noisy = trained.flow.noise_dimension > 0
        estimator = rf.PullBack(SCORED if noisy else 1, trained.proposal)
        return self._scored(
            trained, trained.flow, distribution, estimator, count or (NOISY_TEST if noisy else TEST)
        )

    def excess_with(self, regressed: Regressed, distribution: AbstractDistribution, noise: float) -> dict:
        """An estimate of the excess, by the default estimator, for a model to which noise is added after
        training."""
        count = NOISY_TEST if noise else TEST
        return self._scored(regressed, regressed.noisy(noise), distribution, None, count)

    def _scored(
        self,
        fitted: Trained | Regressed,
        model: rf.StochasticFlow | rf.tables.Standardised,
        distribution: AbstractDistribution,
        estimator: rf.PullBack | None,
        count: int,
    ) -> dict:
        # All models are scored on the same points, some of them only on the first `count`.
        x = distribution.sample(key=self.key("test"), shape=(TEST,))[:count]
        began = time.perf_counter()
        estimate = model.estimate(x, key=self.key("score"), estimator=estimator)
        value = np.array(estimate.log_prob, float)
        lost = np.flatnonzero(np.isneginf(value))
        if lost.size and estimator is not None:
            # None of the paths reaches these points. Many more paths give a lower bound on the density there.
            many = rf.PullBack(MANY, estimator.proposal)
            value[lost] = model.log_prob(x[lost], key=self.key("lost"), estimator=many)
        gap = np.asarray(distribution.log_prob(x), float) - value
        return {
            "excess": float(gap.mean()),
            "excess_sampling_error": float(gap.std() / count**0.5),
            "estimator_standard_error": float(np.linalg.norm(_finite(estimate.standard_error)) / count),
            "effective_paths": float(np.mean(estimate.effective_paths)),
            "num_paths": int(np.max(estimate.num_paths)),
            "lost_points": int(lost.size),
            "solver_error": float(np.mean(_finite(estimate.solver_error))),
            "suspect_points": int(np.sum(estimate.suspect)),
            "test_points": count,
            "training_seconds": fitted.seconds,
            "training_steps": int(fitted.loss.size),
            "scoring_seconds": time.perf_counter() - began,
        }

    def log_density(self, trained: Trained):
        """A function that returns log p at points of the plane, for a heat map."""
        return lambda z: trained.flow.log_prob(z, key=self.key("map"), estimator=trained.cheap)

    def picture(self, regressed: Regressed, noise: float, extent: plots.Window) -> np.ndarray:
        """log p at `plots.grid(extent, PIXELS)`: the exact density if there is no noise, otherwise from a
        histogram of samples."""
        if noise:
            return self.histogram(regressed.noisy(noise), extent)
        points = plots.grid(extent, PIXELS)
        flat = points.reshape(-1, 2)
        estimate = regressed.model.estimate(flat, key=self.key("map"))
        return np.asarray(estimate.log_prob).reshape(points.shape[:2])

    def histogram(self, model: rf.tables.Standardised, extent: plots.Window) -> np.ndarray:
        """log p in the pixels of `plots.grid(extent, PIXELS)`, from a histogram of samples. With noise, a
        histogram is much cheaper than a density estimate at each pixel, and as accurate."""
        x = np.asarray(model.sample(key=self.key("histogram"), shape=(HISTOGRAM,)))
        rows, columns, _ = plots.grid(extent, PIXELS).shape
        window = [extent[:2], extent[2:]]
        counts, first, second = np.histogram2d(*x.T, bins=(columns, rows), range=window)
        cell = (first[1] - first[0]) * (second[1] - second[0])
        with np.errstate(divide="ignore"):
            return np.log(counts.T / HISTOGRAM / cell)

    def finish(self, figure: Figure, metrics: dict) -> dict:
        """Write the figure and the metrics."""
        plots.save(figure, self.out / f"{self.name}.png")
        with rf.files.whole_file(self.out / f"{self.name}.json") as draft:
            draft.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        return metrics

    def report_progress(self, text: str) -> None:
        if self.progress:
            print(text, flush=True)


def kolmogorov(samples: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray | jax.Array]) -> float:
    """The Kolmogorov distance: the largest difference between the empirical distribution function of the
    samples and a given one."""
    samples = np.sort(samples)
    ranks = np.arange(len(samples) + 1) / len(samples)
    truth = np.asarray(cdf(samples))
    return float(max(np.max(truth - ranks[:-1]), np.max(ranks[1:] - truth)))


def _finite(values) -> np.ndarray:
    return np.where(np.isfinite(values), values, 0)


def paper_flow(
    noise: float,
    *,
    key: PRNGKeyArray,
    learned: bool = True,
    width: int = 64,
    depth: int = 3,
    grid: int = 8,
) -> rf.StochasticFlow:
    """The paper's model in two dimensions: a drift network of four layers with 64 units, a base N(0, I), and

    σ(z) = λ [[1, σ₁(z)], [σ₂(z), 1]] with one hidden layer of 64 units, or σ = λI if it is not learned.
    `grid` is the number of solver steps; with too few, training exploits the solver errors.
    """
    key_drift, key_noise = jax.random.split(key)
    if noise == 0:
        diffusion = rf.sde.NoDiffusion()
    elif learned:
        diffusion = rf.FullDiffusion(2, width=width, scale=noise, key=key_noise)
    else:
        diffusion = rf.ConstantDiffusion(noise * jnp.eye(2))
    drift = rf.MLP(2, 2, width=width, depth=depth, key=key_drift)
    sde, base = rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(2))
    return rf.StochasticFlow(sde, base, integrator=rf.FixedGrid(steps=grid))


# The demo takes about a minute on two cores.
DEMO_ROWS, DEMO_HELD_OUT, DEMO_TEST, DEMO_DRAWN = 20_000, 1000, 4000, 4000
DEMO_STEPS, DEMO_LIKELIHOOD = 2000, 20
DEMO_NOISE = 0.5
DEMO_EXTENT = (-4.0, 4.0, -10.0, 5.0)
DEMO_RESOLUTION = 96  # pixels per side of the heat map


def demo(
    out: Path,
    *,
    seed: int = 0,
    progress: bool = True,
    steps: int = DEMO_STEPS,
    likelihood_steps: int = DEMO_LIKELIHOOD,
) -> dict:
    """Fit a flow to the banana, and write `demo.png`, `demo-training.png`, `demo.json`, `demo-banana.rf` and
    a report, `demo.html`.

    ```python
    from pathlib import Path
    from roughflow import experiments

    experiments.demo(Path("figures"))
    ```
    """
    run, banana = Run(Path(out), "demo", None, seed, progress, resume=False), Banana()
    draw = lambda label, count: np.asarray(banana.sample(key=run.key(label), shape=(count,)))
    data, began = draw("data", DEMO_ROWS), time.perf_counter()
    fitted = rf.fit_density(
        data,
        key=run.key("fit"),
        validation=draw("validation", DEMO_HELD_OUT),
        steps=steps,
        progress=progress,
        flow=rf.tables.FlowOptions(width=64, likelihood_steps=likelihood_steps),
    )
    if fitted.interrupted:
        raise KeyboardInterrupt
    seconds = time.perf_counter() - began
    rf.save(run.out / "demo-banana.rf", fitted.model)
    test = draw("test", DEMO_TEST)
    run.report_progress("demo: scoring on fresh data")
    metrics = {"entropy": banana.entropy, "rows": DEMO_ROWS} | _score(run, fitted.model, banana, test)
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


def _score(run: Run, model: rf.tables.Standardised, banana: Banana, x: np.ndarray) -> dict:
    estimate = model.estimate(x, key=run.key("score"))
    gap = np.asarray(banana.log_prob(jnp.asarray(x))) - np.asarray(estimate.log_prob)
    return {
        "excess": float(gap.mean()),
        "excess_sampling_error": float(gap.std() / len(x) ** 0.5),
        "largest_total_error": float(np.max(estimate.total_error)),
        "test_points": len(x),
    }


def _panels(run: Run, model: rf.tables.Standardised, banana: Banana, metrics: dict) -> Figure:
    """The true density, the density of the flow, and samples of the flow without and with noise."""
    figure, axes = plt.subplots(1, 4, figsize=(11.4, 4.4), layout="constrained")
    top = float(jnp.exp(banana.log_prob(jnp.zeros(2))))  # the true peak, to use one scale for both maps
    plots.density(banana.log_prob, extent=DEMO_EXTENT, ax=axes[0], maximum=top)
    axes[0].set_title("the true density", fontsize=11)
    density = lambda z: model.log_prob(z, key=run.key("map"))
    plots.density(density, extent=DEMO_EXTENT, ax=axes[1], resolution=DEMO_RESOLUTION, maximum=top)
    excess = f"{metrics['excess']:.3f} ± {metrics['excess_sampling_error']:.3f}"
    axes[1].set_title(f"the flow, excess {excess}", fontsize=11)
    plots.samples(model.sample(key=run.key("draw"), shape=(DEMO_DRAWN,)), extent=DEMO_EXTENT, ax=axes[2])
    axes[2].set_title("samples of the flow", fontsize=11)
    noisy = dataclasses.replace(model, flow=rf.with_noise(model.flow, DEMO_NOISE))
    plots.samples(noisy.sample(key=run.key("noisy"), shape=(DEMO_DRAWN,)), extent=DEMO_EXTENT, ax=axes[3])
    axes[3].set_title(f"samples with noise, λ = {DEMO_NOISE:g}", fontsize=11)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return figure


FIG1_FUNCTIONS, FIG1_FINE = 6, 1024


def fig1(run: Run) -> dict:
    """Figure 1: one path, projected onto six functions of each driver."""
    fine = rf.PiecewiseLinear(FIG1_FINE).sample(key=run.key("path"))
    drivers = {
        f"Karhunen–Loève, n = {FIG1_FUNCTIONS}": rf.KarhunenLoeve(FIG1_FUNCTIONS),
        f"piecewise linear, n = {FIG1_FUNCTIONS}": rf.PiecewiseLinear(FIG1_FUNCTIONS),
    }
    paths = {name: driver.project(fine) for name, driver in drivers.items()}
    times = jnp.linspace(0, 1, FIG1_FINE + 1)
    figure, ax = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    plots.approximations(fine, paths, times=times, ax=ax)
    at = lambda path: np.asarray(jax.vmap(path.evaluate)(times))
    gaps = {name: float(np.max(np.abs(at(path) - at(fine)))) for name, path in paths.items()}
    ends = {name: float(path.evaluate(1.0)[0]) for name, path in {"Brownian": fine, **paths}.items()}
    return run.finish(figure, {"largest_gap": gaps, "endpoint": ends})


FIG2_STEPS, FIG2_REGRESSION, FIG2_WIDTH = 600, 6000, 64
FIG2_WALK, FIG2_CHAINS = 10_000, 64  # numbers of Euler–Maruyama steps and of paths; the first path is drawn
# The duration of a path. The duration divided by `autocorrelation_time` tells how much of the stationary
# distribution a path can have explored. With larger noise along the curve, paths explore faster but need
# shorter steps.
FIG2_HORIZONS, PAPER_HORIZON = {"staying-identity": 1000.0, "staying-along": 300.0}, 100.0
FIG2_EXTENT = (-4.0, 4.0, -12.0, 5.0)
FIG2_NOISE = 1.0


def along(t: jax.Array, z: jax.Array) -> jax.Array:
    """σ(z) along and across the curve y = −x²: the Jacobian of the map from N(0, I) to the banana."""
    del t
    return jnp.array([[1.0, 0.0], [0.0, 2**0.5]]) - 2 * z[0] * jnp.array([[0.0, 0.0], [1.0, 0.0]])


def fig2(run: Run) -> dict:
    """Figure 2: σ = I and a state-dependent σ, by two methods.

    The paper's method fits flows with σ = I and with a learned σ to the data at time 1 by maximum likelihood;
    for comparison, it is also run with the paper's own one-path loss. After time 1, nothing keeps the paths
    of these models near the data.

    The second method fits a velocity by regression, to which noise λ = 1 is added. `rf.tables.stationary_sde`
    turns this model into an SDE whose paths stay near the data for any σ; here σ = I, or σ is larger along
    the curve.

    The paper's models are trained for only 600 steps of 64 points each and scored on 1000 points, to keep the
    experiment to a few minutes; use `--steps` to change the number of steps.
    """
    banana, key = Banana(), run.key("net")
    paper = {
        "identity": run.train(
            "identity",
            paper_flow(FIG2_NOISE, key=key, learned=False),
            banana,
            steps=FIG2_STEPS,
            frozen=lambda f: (f.base, f.sde.diffusion),
        ),
        "learned": run.train("learned", paper_flow(FIG2_NOISE, key=key), banana, steps=FIG2_STEPS),
    }
    one = rf.MaximumLikelihood(1, rf.Prior())
    one_path = run.train("one-path", paper_flow(FIG2_NOISE, key=key), banana, steps=FIG2_STEPS, objective=one)
    regressed = run.regress("regression", banana, steps=FIG2_REGRESSION, beside=FIG2_STEPS, width=FIG2_WIDTH)
    staying = {
        "staying-identity": rf.tables.stationary_sde(regressed.model, rf.ConstantDiffusion(jnp.eye(2))),
        "staying-along": rf.tables.stationary_sde(regressed.model, along),
    }

    data = np.asarray(banana.sample(key=run.key("data"), shape=(100_000,)))
    metrics: dict = {"entropy": banana.entropy, "data_median": np.median(data, axis=0).tolist()}
    for name, model in (paper | {"one-path": one_path}).items():
        run.report_progress(f"{run.name}: scoring {name}")
        metrics[name] = run.excess(model, banana)
    for name, noise in (("regression", 0.0), ("regression-noise", FIG2_NOISE)):
        run.report_progress(f"{run.name}: scoring {name}")
        metrics[name] = run.excess_with(regressed, banana, noise)

    sdes = {name: model.flow.sde for name, model in paper.items()} | staying
    walks = {}
    for name, sde in sdes.items():
        horizon = FIG2_HORIZONS.get(name, PAPER_HORIZON)
        paths = walk(sde, horizon, key=run.key("walk"))
        walks[name] = paths[0]
        metrics[name] = metrics.get(name, {}) | distances(paths, data)
        if name in staying:
            metrics[name]["autocorrelation_time"] = autocorrelation_time(paths, horizon)
            metrics[name]["walk_time"] = horizon
    return run.finish(_draw_fig2(banana, sdes, walks, metrics), metrics)


def _draw_fig2(banana: Banana, sdes: dict, walks: dict, metrics: dict) -> Figure:
    figure, axes = plt.subplots(1, 4, figsize=(10.6, 6.5), layout="constrained", sharey=True)
    excess = lambda name: f"{metrics[name]['excess']:.3f}"
    error = metrics["regression-noise"]["excess_sampling_error"]
    noisy = f"{excess('regression-noise')} ± {error:.3f} with λ = {FIG2_NOISE:g}"
    titles = {
        "identity": f"maximum likelihood, σ = I\nexcess {excess('identity')}",
        "learned": f"maximum likelihood, σ learned\nexcess {excess('learned')}",
        "staying-identity": f"regression, then σ = I\nexcess {excess('regression')}; {noisy}",
        "staying-along": "the same regression,\nthen σ along the curve",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        plots.density(banana.log_prob, extent=FIG2_EXTENT, ax=ax)
        # Points far outside are clipped: they are not visible, and very large coordinates would distort the
        # plot.
        plots.trajectory(np.clip(_same_time(name, walks[name]), -1e3, 1e3), ax=ax)
        arrows(ax, sdes[name])
        distance = max(metrics[name]["pooled_kolmogorov"])
        ax.set_title(f"{title}\npaths off the data by {distance:.2f}", fontsize=9)
        ax.set(xlim=FIG2_EXTENT[:2], ylim=FIG2_EXTENT[2:])
        ax.set_ylabel(ax.get_ylabel() if ax is axes[0] else "")
    lines = [
        Line2D([], [], color="black", linewidth=1.3, label="axes of σ on the curve $x_2 = -x_1^2$"),
        Line2D([], [], color="#D55E00", label=f"a path for {PAPER_HORIZON:g} units of time, from ○ to ●"),
        Line2D([], [], linestyle="", label=f"Kolmogorov distance, {FIG2_CHAINS} × {FIG2_WALK:,} steps"),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _same_time(name: str, path: np.ndarray) -> np.ndarray:
    """A few thousand points of a path, over the same duration in all panels."""
    if name in FIG2_HORIZONS:
        return path[: 1 + round(FIG2_WALK * PAPER_HORIZON / FIG2_HORIZONS[name])]
    return path[:: max(1, FIG2_WALK // 2500)]


def walk(sde: rf.AbstractSDE, horizon: float, *, key) -> np.ndarray:
    """Euler–Maruyama paths from the centre of the data, `(64, 10001, 2)`."""
    start = jnp.tile(jnp.array([0.0, -1.0]), (FIG2_CHAINS, 1))
    paths = np.asarray(rf.simulate(sde, start, key=key, t1=horizon, steps=FIG2_WALK, trajectory=True))
    return np.where(np.isfinite(paths), paths, np.inf)


def distances(paths: np.ndarray, data: np.ndarray) -> dict:
    """The Kolmogorov distance between paths and data in each coordinate, for the first path and for all
    paths."""
    cdfs = [_empirical(data[:, i]) for i in range(2)]
    far = lambda values: [kolmogorov(values[..., i].ravel(), cdfs[i]) for i in range(2)]
    return {"walk_kolmogorov": far(paths[0]), "pooled_kolmogorov": far(paths[:, ::10])}


def autocorrelation_time(paths: np.ndarray, horizon: float) -> float:
    """The integrated autocorrelation time 1 + 2 Σ ρ of the slower coordinate, in units of time. The
    autocorrelations ρ are averaged over all paths and summed until they fall below 0.05."""
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


def noise_axes(sde: rf.AbstractSDE, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The singular values of σ at each point, `(N, 2)` in decreasing order, and the directions in which the
    noise acts, `(N, 2, 2)`."""
    sigma = jax.vmap(lambda z: sde.noise(jnp.zeros(()), z))(jnp.asarray(points))
    directions, sizes, _ = np.linalg.svd(np.asarray(sigma))
    return sizes, np.swapaxes(directions, 1, 2)


def arrows(ax, sde: rf.AbstractSDE) -> None:
    """Draw the axes of the noise along the curve, as crosses."""
    x = np.linspace(-2.4, 2.4, 9)
    points = np.stack([x, -(x**2)], axis=1)
    sizes, directions = noise_axes(sde, points)
    for i in range(2):
        arm = 0.35 * sizes[:, i, None] * directions[:, i]
        ends = np.stack([points - arm, points + arm], axis=1)
        ax.plot(*ends.transpose(2, 1, 0), color="black", linewidth=1.3, zorder=4)


FIG3_STEPS, FIG3_REGRESSION = 600, 20_000
FIG3_IN_TRAINING, FIG3_AFTERWARDS = (0.0, 0.1, 0.5, 1.0), (0.0, 0.25, 0.5, 1.0)
FIG3_TOP = 0.35  # the density with the darkest shade


def fig3(run: Run) -> dict:
    """Figure 3: the density of the star for each λ, by maximum likelihood (top), and by one regression with
    noise added afterwards (bottom).

    A second figure, `fig3-noise.png`, shows the excess against λ for both methods: noise during training
    blurs the density, but noise added afterwards does not. Error bars show two standard errors, which grow
    with λ.

    The models at the top are trained by the paper's method for only 600 steps of 64 points each and scored on
    1000 points, to keep the experiment to a few minutes; use `--steps` to change the number of steps.
    Densities with noise at the bottom are histograms.
    """
    star = Star()
    metrics: dict = {"entropy": star.entropy, "likelihood": {}, "regression": {}}
    above, below = {}, {}
    for noise in FIG3_IN_TRAINING:
        label = f"{noise:g}"
        model = run.train(label, paper_flow(noise, key=run.key("net")), star, steps=FIG3_STEPS)
        run.report_progress(f"{run.name}: scoring λ = {label}")
        metrics["likelihood"][label] = run.excess(model, star)
        points = plots.grid(star.extent, PIXELS)
        above[label] = run.log_density(model)(points.reshape(-1, 2)).reshape(points.shape[:2])
    regressed = run.regress("regression", star, steps=FIG3_REGRESSION, beside=FIG3_STEPS)
    for noise in FIG3_AFTERWARDS:
        label = f"{noise:g}"
        run.report_progress(f"{run.name}: scoring regression with λ = {label}")
        metrics["regression"][label] = run.excess_with(regressed, star, noise)
        below[label] = run.picture(regressed, noise, star.extent)
    plots.save(_curves(metrics), run.out / "fig3-noise.png")
    return run.finish(_maps(star, above, below, metrics), metrics)


def _maps(star: Star, above: dict, below: dict, metrics: dict) -> Figure:
    columns = 1 + max(len(above), len(below))
    size = (2.3 * columns, 5.4)
    figure, axes = plt.subplots(2, columns, figsize=size, layout="constrained", sharex=True, sharey=True)
    plots.density(star.log_prob, extent=star.extent, resolution=200, ax=axes[0, 0], maximum=FIG3_TOP)
    axes[0, 0].set_title("data", fontsize=10)
    axes[0, 0].tick_params(labelbottom=True)
    axes[1, 0].set_visible(False)
    for row, maps, kind in ((axes[0, 1:], above, "likelihood"), (axes[1, 1:], below, "regression")):
        for ax, (label, values) in zip(row, maps.items(), strict=True):
            plots.density(values, extent=star.extent, ax=ax, maximum=FIG3_TOP)
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
        # The scatter over points includes the error of the estimator.
        errors = [2 * found["excess_sampling_error"] for found in scored.values()]
        ax.errorbar(noises, values, errors, fmt=style, color=colour, markersize=4, capsize=2.5, label=label)
    ax.axhline(0, color=plots.GREY, linewidth=0.8)
    # The excess of one method is tens of times larger than that of the other, so the scale is linear near
    # zero and logarithmic above.
    ax.set_yscale("symlog", linthresh=0.05)
    ticks = [-0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1]
    ax.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    ax.minorticks_off()
    ax.set(xlabel="noise λ", ylabel="excess over the entropy (nats)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.72))
    return figure


FIG4_STEPS, FIG4_RATE, FIG4_BATCH, FIG4_L1 = 1000, 3e-3, 512, 1e-4
FIG4_PATHS = 0  # additional paths; the fit works without any, and failed with 4 or 16
FIG4_SEEDS = 3
FIG4_WIDTH, FIG4_DEPTH = 32, 3
FIG4_SAMPLES, FIG4_LONG = 20_000, 10_000
FIG4_WALK = 5000  # steps of the long run
FIG4_INSIDE = np.linspace(-4, 4, 161)


class Cauchy(eqx.Module):
    """log 1/(1 + x²), the log-density of the Cauchy distribution up to a constant."""

    def __call__(self, z: jax.Array) -> jax.Array:
        return -jnp.log1p(z[0] ** 2)


def cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 + np.arctan(x) / np.pi


def fig4(run: Run) -> dict:
    """Figure 4: σ trained so that N(0, 1) reaches the Cauchy distribution by time 1, for three seeds.

    The drift −σ²x/(1+x²) + σσ′ leaves the Cauchy distribution invariant. The drift printed by Hodgkinson et
    al. (2020), −2σ²x/(1+x²) + ½σ′, does not; the last panel shows its result with the same σ.
    """
    models = {f"seed-{seed}": _train(run, seed) for seed in range(FIG4_SEEDS)}
    metrics: dict = {}
    samples: dict[str, np.ndarray] = {}
    for name, model in models.items():
        samples[name] = np.asarray(model.sample(key=run.key("draw"), shape=(FIG4_SAMPLES,)))[:, 0]
        ratio = noise(model, FIG4_INSIDE) / np.sqrt(1 + FIG4_INSIDE**2)
        middle = 0.5 * (ratio.max() + ratio.min())
        metrics[name] = {
            "ratio_smallest": float(ratio.min()),
            "ratio_largest": float(ratio.max()),
            "ratio_varies_by": float(ratio.max() / middle - 1),
            "kolmogorov_distance": kolmogorov(samples[name], cdf),
        }
    long = {kind: _long_run(run, models["seed-0"], kind) for kind in ("corrected", "printed")}
    metrics["long_run_kolmogorov_distance"] = {kind: kolmogorov(z, cdf) for kind, z in long.items()}
    return run.finish(_draw_fig4(models, samples["seed-0"], long), metrics)


def _train(run: Run, seed: int) -> rf.StochasticFlow:
    key_net, key_fit = jax.random.split(run.key(f"seed {seed}"))
    # σ must grow with |x|, which a tanh network cannot do.
    diffusion = rf.DiagonalDiffusion(
        1, width=FIG4_WIDTH, depth=FIG4_DEPTH, activation=jax.nn.softplus, key=key_net
    )

    def fit(settings: dict) -> tuple[rf.train.Fitted, dict]:
        fitted = rf.fit(
            _flow(diffusion),
            key=key_fit,
            objective=rf.ReverseKL(Cauchy(), FIG4_PATHS, batch_size=FIG4_BATCH, l1=FIG4_L1),
            steps=run.steps or FIG4_STEPS,
            frozen=lambda f: f.base,
            training=rf.train.TrainingOptions(learning_rate=FIG4_RATE),
            **settings,
        )
        return fitted, {"diffusion": fitted.model.sde.diffusion}  # all other parts of the model are known

    return _flow(run.kept(f"seed-{seed}", fit)["diffusion"])


def _flow(diffusion: rf.DiagonalDiffusion) -> rf.StochasticFlow:
    return rf.StochasticFlow(rf.targeted_sde(Cauchy(), diffusion), rf.Normal(jnp.zeros(1)))


def _long_run(run: Run, model: rf.StochasticFlow, kind: str) -> np.ndarray:
    """The states of many paths after a long time."""
    sigma = lambda z: _noise(model, z)
    slope = lambda z: jax.grad(lambda y: jnp.sum(sigma(y)))(z)
    printed = lambda t, z: -2 * sigma(z) ** 2 * z / (1 + z**2) + 0.5 * slope(z)
    sde = model.sde if kind == "corrected" else rf.ItoSDE(printed, model.sde.diffusion)
    start = jax.random.normal(run.key("long start"), (FIG4_LONG, 1))
    return np.asarray(rf.simulate(sde, start, key=run.key("long"), t1=10.0, steps=FIG4_WALK))[:, 0]


def noise(model: rf.StochasticFlow, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.vmap(lambda z: _noise(model, z))(jnp.asarray(x, float)[:, None]))[:, 0]


def _noise(model: rf.StochasticFlow, z: jax.Array) -> jax.Array:
    sigma: Any = model.sde.noise(jnp.zeros(()), z)  # a diagonal operator
    return sigma.diagonal


def _draw_fig4(models: dict, samples: np.ndarray, long: dict) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.3), layout="constrained")
    x = np.linspace(-6, 6, 241)
    for (name, model), colour in zip(models.items(), ("#0072B2", "#56B4E9", "#009E73"), strict=True):
        axes[0].plot(x, noise(model, x), color=colour, label=f"learned, {name.replace('-', ' ')}")
    level = np.mean([noise(model, FIG4_INSIDE) / np.sqrt(1 + FIG4_INSIDE**2) for model in models.values()])
    axes[0].plot(x, level * np.sqrt(1 + x**2), "--", color="#D55E00", label=f"{level:.2f} √(1 + x²)")
    axes[0].set(xlabel="x", ylabel="σ(x)", ylim=(0, None), title="learned noise")
    width = 0.25
    bins = np.arange(-6, 6 + width, width)
    for ax, values, title in [
        (axes[1], samples, "samples at time 1, seed 0"),
        (axes[2], long["printed"], "drift as printed in the paper, at time 10"),
    ]:
        weight = np.full(len(values), 1 / len(values) / width)  # count samples outside the window too
        ax.hist(values, bins=bins, weights=weight, color="#56B4E9", label="SDE")
        ax.plot(x, 1 / np.pi / (1 + x**2), color="#D55E00", label="Cauchy density")
        ax.set(xlabel="x", ylabel="density", xlim=(-6, 6), title=title)
    top = max(ax.get_ylim()[1] for ax in axes[1:])
    for ax in axes[1:]:
        ax.set_ylim(0, top)
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlim(-6, 6)
    return figure


EXPERIMENTS: Mapping[str, Callable[[Run], dict]] = {
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
}


def run(
    name: str,
    out: Path,
    *,
    steps: int | None = None,
    seed: int = 0,
    progress: bool = True,
    resume: bool = False,
) -> dict:
    """Run one of `EXPERIMENTS`: write `NAME.png` and `NAME.json` to the folder `out`, and return the metrics.

    `steps` replaces the number of likelihood training steps; the number of regression steps changes in
    proportion. With `resume`, finished models are loaded, and an interrupted run is continued.

    ```python
    from pathlib import Path
    from roughflow import experiments

    experiments.run("fig1", Path("figures"))
    ```
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name}: choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name](Run(Path(out), name, steps, seed, progress, resume))
