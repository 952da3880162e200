"""Flows fitted to data, for benchmarks of the estimators: trained once, then kept (`benchmarks.kept`).

They are trained, and to be used, in float32, as a user would.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import equinox as eqx
import jax

import roughflow as rf
from benchmarks.kept import kept_file, kept_tree
from roughflow.datasets import LAWS


@dataclass(frozen=True)
class Recipe:
    """A law of `roughflow.datasets`, a flow, and how long to train it."""

    law: str
    noise: float
    width: int = 32
    depth: int = 3
    paths: int = 4
    steps: int = 2500
    batch: int = 128
    rate: float = 1e-2
    seed: int = 0


RECIPES: Mapping[str, Recipe] = {
    "banana": Recipe("banana", 0.5, depth=2, steps=1000),
    "star-0.5": Recipe("star", 0.5),
    "star-1": Recipe("star", 1.0),
}
ROWS, STEPS = 2000, 400  # of the table that `banana_density` is fitted to, and of that fit


def trained_flow(recipe: Recipe, *, fresh: bool = False) -> rf.StochasticFlow:
    """The flow with the proposal it has learned; three minutes on two cores the first time."""
    key_flow, key_fit = jax.random.split(jax.random.key(recipe.seed))
    flow = rf.neural_flow(2, noise=recipe.noise, width=recipe.width, depth=recipe.depth, key=key_flow)

    def make():
        fitted = rf.fit(
            flow,
            LAWS[recipe.law],
            key=key_fit,
            objective=rf.MaximumLikelihood(recipe.paths),
            steps=recipe.steps,
            batch_size=recipe.batch,
            learning_rate=recipe.rate,
            frozen=lambda flow: flow.base,
        )
        if fitted.interrupted:
            raise KeyboardInterrupt
        return fitted.model.sde, fitted.model.proposal

    like = flow.sde, rf.Amortised(flow, width=64, key=key_fit)
    file = kept_file("flow", repr(sorted(asdict(recipe).items())))
    sde, proposal = kept_tree(file, like, make, fresh=fresh)
    return eqx.tree_at(lambda f: f.sde, flow, sde).with_proposal(proposal)


def banana_density() -> tuple[rf.Standardised, rf.AbstractProposal]:
    """What `rf.fit_density` makes of 2000 points of the banana, and the proposal it has learned."""
    key_data, key_fit = jax.random.split(jax.random.key(0))
    data = LAWS["banana"].sample(key=key_data, shape=(ROWS,))
    flow = rf.neural_flow(2, key=key_fit)

    def make():
        fitted = rf.fit_density(data, key=key_fit, steps=STEPS, patience=None)
        if fitted.interrupted:
            raise KeyboardInterrupt
        fit = fitted.model.flow
        return fit.sde, fit.base, fit.proposal

    like = flow.sde, flow.base, rf.Amortised(flow, width=64, key=key_fit)
    sde, base, proposal = kept_tree(kept_file("density", data, STEPS), like, make)
    flow = eqx.tree_at(lambda f: (f.sde, f.base), flow, (sde, base)).with_proposal(proposal)
    return rf.Standardised(flow, *rf.standardising(data)), proposal
