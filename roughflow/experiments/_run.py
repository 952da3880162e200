"""What the experiments share: training with files that keep the work, scores, and figures."""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure

import roughflow as rf
from roughflow import plots
from roughflow.datasets import AbstractDistribution

BATCH, PATHS, RATE = 64, 4, 3e-3  # of the paper's recipe, in which a step with noise takes half a second
ROWS, WIDTH = 200_000, 128  # of the regression
TEST, NOISY_TEST = 4000, 1000  # fresh points to score on
SCORED, MANY = 128, 4096  # paths per point by a learned proposal; where none was found
HISTOGRAM, PIXELS = 150_000, 96  # samples, and cells along a side


class Trained(eqx.Module):
    """A flow, the proposal it was trained with, and the seconds that took."""

    flow: rf.StochasticFlow
    proposal: rf.AbstractProposal
    loss: jax.Array  # one number a step
    seconds: float

    @property
    def cheap(self) -> rf.PullBack:
        """Densities for a map: with the learned proposal a few paths do."""
        return rf.PullBack(1 if self.flow.noise_dimension == 0 else 32, self.proposal)


class Regressed(eqx.Module):
    """A model fitted by regression, without noise, in the units of the data; and the seconds that took."""

    model: rf.Standardised
    loss: jax.Array
    seconds: float

    def noisy(self, noise: float) -> rf.Standardised:
        """The same distribution, with noise added afterwards; 0 for none."""
        flow = rf.with_noise(self.model.flow, noise or None)
        return eqx.tree_at(lambda model: model.flow, self.model, flow)


@dataclass(frozen=True)
class Run:
    """One experiment: where it writes, and how it was asked to run."""

    out: Path
    name: str
    steps: int | None
    seed: int
    progress: bool
    resume: bool

    def key(self, label: str) -> PRNGKeyArray:
        """A key that belongs to the seed and to what it is for."""
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
        """The paper's way: fit a flow to fresh samples of a distribution by maximum likelihood."""

        def fit(settings: dict) -> tuple[rf.Fitted, dict]:
            fitted = rf.fit(
                flow,
                distribution,
                key=self.key(label),
                objective=objective or rf.MaximumLikelihood(PATHS),
                steps=self.steps or steps,
                batch_size=batch,
                learning_rate=rate,
                frozen=frozen,
                **settings,
            )
            assert isinstance(fitted.objective, rf.MaximumLikelihood)
            return fitted, {"flow": fitted.model, "proposal": fitted.objective.bound.estimator.proposal}

        return Trained(**self._kept(label, fit))

    def regress(
        self, label: str, distribution: AbstractDistribution, *, steps: int, beside: int, width: int = WIDTH
    ) -> Regressed:
        """The new way: `rf.fit_density` without its steps of likelihood, so that nothing is solved.

        `steps` beside the `beside` steps of `train`: where others than these are asked for, in proportion.
        """
        steps = steps if self.steps is None else -(-steps * self.steps // beside)
        rows = np.asarray(distribution.sample(key=self.key("rows"), shape=(ROWS,)))

        def fit(settings: dict) -> tuple[rf.Fitted, dict]:
            fitted = rf.fit_density(
                rows,
                key=self.key(label),
                width=width,
                validation=0.0,
                steps=steps,
                likelihood_steps=0,
                **settings,
            )
            return fitted, {"model": fitted.model}

        return Regressed(**self._kept(label, fit))

    def _kept(self, label: str, fit: Callable[[dict], tuple[rf.Fitted, dict]]) -> dict:
        """What `fit` returns to keep, with its losses and seconds: from the file `NAME-LABEL.rf` if it is
        there, else by training, which goes on from where it was interrupted."""
        file = self.out / f"{self.name}-{label}.rf"
        checkpoint = file.with_suffix(".checkpoint")
        if self.resume and file.exists():
            return rf.load(file)
        if not self.resume:
            checkpoint.unlink(missing_ok=True)
        self.say(f"{self.name}: training {label}")
        began = time.perf_counter()
        settings = {"checkpoint": checkpoint, "resume": checkpoint.exists(), "progress": self.progress}
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
        """−E log p over that of the truth on fresh points, by the proposal that was learned: a little too
        high where it has not learned all paths, which `effective_paths` shows."""
        noisy = trained.flow.noise_dimension > 0
        estimator = rf.PullBack(SCORED if noisy else 1, trained.proposal)
        return self._scored(
            trained, trained.flow, distribution, estimator, count or (NOISY_TEST if noisy else TEST)
        )

    def excess_with(
        self,
        regressed: Regressed,
        distribution: AbstractDistribution,
        noise: float,
        *,
        count: int | None = None,
    ) -> dict:
        """The same with this noise added afterwards, by the default estimator."""
        count = count or (NOISY_TEST if noise else TEST)
        return self._scored(regressed, regressed.noisy(noise), distribution, None, count)

    def _scored(
        self,
        fitted: Trained | Regressed,
        model: rf.StochasticFlow | rf.Standardised,
        distribution: AbstractDistribution,
        estimator: rf.PullBack | None,
        count: int,
    ) -> dict:
        # The first of the same points for all models.
        x = distribution.sample(key=self.key("test"), shape=(TEST,))[:count]
        began = time.perf_counter()
        estimate = model.estimate(x, key=self.key("score"), estimator=estimator)
        value = np.array(estimate.log_prob, float)
        lost = np.flatnonzero(np.isneginf(value))
        if lost.size and estimator is not None:
            # No path was found to these: many say at least how low they are.
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
        """log p for a map of the plane."""
        return lambda z: trained.flow.log_prob(z, key=self.key("map"), estimator=trained.cheap)

    def picture(self, regressed: Regressed, noise: float, extent: plots.Window) -> np.ndarray:
        """log p at `plots.grid(extent, PIXELS)`: exact without noise, a histogram with it."""
        if noise:
            return self.histogram(regressed.noisy(noise), extent)
        points = plots.grid(extent, PIXELS)
        flat = points.reshape(-1, 2)
        estimate = regressed.model.estimate(flat, key=self.key("map"))
        return np.asarray(estimate.log_prob).reshape(points.shape[:2])

    def histogram(self, model: rf.Standardised, extent: plots.Window) -> np.ndarray:
        """log p in the cells of `plots.grid(extent, PIXELS)` from samples: with noise far cheaper than a
        density in each, and as true."""
        x = np.asarray(model.sample(key=self.key("histogram"), shape=(HISTOGRAM,)))
        rows, columns, _ = plots.grid(extent, PIXELS).shape
        window = [extent[:2], extent[2:]]
        counts, first, second = np.histogram2d(*x.T, bins=(columns, rows), range=window)
        cell = (first[1] - first[0]) * (second[1] - second[0])
        with np.errstate(divide="ignore"):
            return np.log(counts.T / HISTOGRAM / cell)

    def finish(self, figure: Figure, metrics: dict) -> dict:
        """Write the figure and its numbers."""
        plots.save(figure, self.out / f"{self.name}.png")
        with rf.whole_file(self.out / f"{self.name}.json") as draft:
            draft.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        return metrics

    def say(self, text: str) -> None:
        if self.progress:
            print(text, flush=True)


def kolmogorov(samples: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray | jax.Array]) -> float:
    """The largest gap between the samples' distribution function and a given one."""
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
    """The paper's model of the plane: a drift of four layers with 64 units, N(0, I) at the start, and

    σ(z) = λ [[1, σ₁(z)], [σ₂(z), 1]] with one hidden layer of 64 units, or σ = λI if it is not learned.
    `grid`: steps of the solver; too few, and training learns to live off their errors.
    """
    key_drift, key_noise = jax.random.split(key)
    if noise == 0:
        diffusion = rf.NoDiffusion()
    elif learned:
        diffusion = rf.FullDiffusion(2, width=width, scale=noise, key=key_noise)
    else:
        diffusion = rf.ConstantDiffusion(noise * jnp.eye(2))
    drift = rf.MLP(2, 2, width=width, depth=depth, key=key_drift)
    sde, base = rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(2))
    return rf.StochasticFlow(sde, base, integrator=rf.FixedGrid(steps=grid))
