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
from roughflow.datasets import AbstractLaw

BATCH, PATHS, RATE = 256, 4, 1e-2
TEST, CHECKED = 10_000, 1000  # fresh points to score on, and those of them that are looked at twice


class Trained(eqx.Module):
    """A flow, the proposal it was trained with, and the seconds that took."""

    flow: rf.StochasticFlow
    proposal: rf.AbstractProposal
    loss: jax.Array  # one number a step
    seconds: float

    @property
    def cheap(self) -> rf.PullBack:
        """Densities for a map: with the learned proposal a few paths do."""
        return rf.PullBack(1 if self.flow.noise_dim == 0 else 64, self.proposal)


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
        law: AbstractLaw,
        *,
        steps: int,
        rate: float = RATE,
        batch: int = BATCH,
        objective: rf.MaximumLikelihood | None = None,
        frozen=lambda flow: flow.base,
    ) -> Trained:
        """Fit a flow to fresh samples of a law; the file `NAME-LABEL.rf` keeps it."""
        file = self.out / f"{self.name}-{label}.rf"
        checkpoint = file.with_suffix(".checkpoint")
        if self.resume and file.exists():
            return Trained(**rf.load(file))
        if not self.resume:
            checkpoint.unlink(missing_ok=True)
        self.say(f"{self.name}: training {label}")
        began = time.perf_counter()
        fitted = rf.fit(
            flow,
            law,
            key=self.key(label),
            objective=objective or rf.MaximumLikelihood(PATHS),
            steps=self.steps or steps,
            batch_size=batch,
            learning_rate=rate,
            frozen=frozen,
            checkpoint=checkpoint,
            resume=checkpoint.exists(),
            progress=self.progress,
        )
        if fitted.interrupted:
            raise KeyboardInterrupt
        seconds = time.perf_counter() - began
        assert isinstance(fitted.objective, rf.MaximumLikelihood)
        proposal = fitted.objective.bound.estimator.proposal
        trained = Trained(fitted.model, proposal, jnp.asarray(fitted.history.loss), seconds)
        rf.save(file, {name: getattr(trained, name) for name in Trained.__annotations__})
        checkpoint.unlink(missing_ok=True)
        return trained

    def excess(self, trained: Trained, law: AbstractLaw, *, paths: int = 64, count: int = TEST) -> dict:
        """−E log p over that of the truth on the same fresh points, by the default estimator and by the

        proposal that was learned. Both are too high by what they miss, so the lower one is the better.
        """
        x = law.sample(key=self.key("test"), shape=(count,))
        estimator = rf.default_estimator(trained.flow, paths)
        began = time.perf_counter()
        estimate = trained.flow.estimate(x, key=self.key("score"), estimator=estimator)
        value = np.array(estimate.log_prob, float)
        lost = np.flatnonzero(np.isneginf(value))
        if lost.size:
            # No path was found to these: the learned proposal's many say at least how low they are.
            many = rf.PullBack(4096, trained.proposal)
            value[lost] = trained.flow.log_prob(x[lost], key=self.key("lost"), estimator=many)
        truth = np.asarray(law.log_prob(x), float)
        second, fine = self._second_opinion(trained, x)
        gap = truth - value
        return {
            "excess": float(gap.mean()),
            "excess_sampling_error": float(gap.std() / count**0.5),
            "estimator_standard_error": float(np.linalg.norm(_finite(estimate.standard_error)) / count),
            "effective_paths": float(np.mean(estimate.effective_paths)),
            "num_paths": int(np.max(estimate.num_paths)),
            "lost_points": int(lost.size),
            "excess_learned_proposal": float(np.mean(truth - second)),
            "integration_error": float(np.mean(np.abs(fine - second[:CHECKED]))),
            "suspect_points": int(np.sum(estimate.suspect)),
            "test_points": count,
            "training_seconds": trained.seconds,
            "training_steps": int(trained.loss.size),
            "scoring_seconds": time.perf_counter() - began,
        }

    def _second_opinion(self, trained: Trained, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """log p by the proposal that was learned, which sees modes that the default estimator may miss, and

        for some points the same on a finer grid: a model can be trained to live off the errors of a coarse
        one.
        """
        finer = eqx.tree_at(lambda f: f.integrator, trained.flow, rf.FixedGrid(steps=48))
        value = lambda flow, x: np.asarray(flow.log_prob(x, key=self.key("check"), estimator=trained.cheap))
        return value(trained.flow, x), value(finer, x[:CHECKED])

    def log_density(self, trained: Trained):
        """log p for a map of the plane."""
        return lambda z: trained.flow.log_prob(z, key=self.key("map"), estimator=trained.cheap)

    def finish(self, figure: Figure, figures: dict) -> dict:
        """Write the figure and its numbers."""
        plots.save(figure, self.out / f"{self.name}.png")
        with rf.whole_file(self.out / f"{self.name}.json") as draft:
            draft.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return figures

    def say(self, text: str) -> None:
        if self.progress:
            print(text, flush=True)


def kolmogorov(samples: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray | jax.Array]) -> float:
    """The largest gap between the samples' distribution function and a law's."""
    samples = np.sort(samples)
    ranks = np.arange(len(samples) + 1) / len(samples)
    truth = np.asarray(distribution(samples))
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
