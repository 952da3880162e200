"""Flows fitted to data, for benchmarks of the estimators: trained once, then kept (`benchmarks.kept`).

They are trained, and to be used, in float32, as a user would.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import equinox as eqx
import jax

import roughflow as rf
from benchmarks.kept import kept_file, kept_tree
from roughflow.datasets import DISTRIBUTIONS


@dataclass(frozen=True)
class Recipe:
    """A distribution of `roughflow.datasets`, a flow, and how long to train it."""

    distribution: str
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
LEARN = 600  # steps to learn a proposal


def trained_flow(recipe: Recipe, *, fresh: bool = False) -> rf.StochasticFlow:
    """The flow, with a proposal; four minutes on two cores the first time."""
    key_flow, key_fit = jax.random.split(jax.random.key(recipe.seed))
    flow = rf.neural_flow(2, noise=recipe.noise, width=recipe.width, depth=recipe.depth, key=key_flow)
    distribution = DISTRIBUTIONS[recipe.distribution]

    def make():
        settings = {"steps": recipe.steps, "batch_size": recipe.batch, "learning_rate": recipe.rate}
        objective = rf.MaximumLikelihood(recipe.paths)
        frozen = lambda flow: flow.base
        return finished(
            rf.fit(flow, distribution, key=key_fit, objective=objective, frozen=frozen, **settings)
        ).sde

    file = kept_file("flow", repr(sorted(asdict(recipe).items())))
    sde = kept_tree(file, flow.sde, make, fresh=fresh)
    return with_learned_proposal(eqx.tree_at(lambda f: f.sde, flow, sde), distribution, fresh=fresh)


def banana_density() -> rf.tables.Standardised:
    """A neural SDE fitted to 2000 points of the banana by maximum likelihood, standardised."""
    key_data, key_fit = jax.random.split(jax.random.key(0))
    data = DISTRIBUTIONS["banana"].sample(key=key_data, shape=(ROWS,))
    flow = rf.neural_flow(2, key=key_fit)

    units = rf.tables.standardisation(data)

    def make():
        rows = rf.tables.Standardised(flow, *units).standardise(data)
        fitted = finished(rf.fit(flow, rows, key=key_fit, objective=rf.MaximumLikelihood(4), steps=STEPS))
        return fitted.sde, fitted.base

    parts = kept_tree(kept_file("density", data, STEPS), (flow.sde, flow.base), make)
    model = rf.tables.Standardised(eqx.tree_at(lambda f: (f.sde, f.base), flow, parts), *units)
    flow = with_learned_proposal(model.flow, model.standardise(data))
    return eqx.tree_at(lambda m: m.flow, model, flow)


def with_learned_proposal(flow: rf.StochasticFlow, data, *, fresh: bool = False) -> rf.StochasticFlow:
    """The flow with a proposal learned for it as it is, and kept beside it.

    References belong to the flow, and should outlive a new kind of proposal: then that alone is learned anew.
    """
    key = jax.random.key(0)
    like = rf.Amortised(flow, width=64, key=key)

    def make():
        frozen = lambda flow: (flow.sde, flow.base)
        settings = {"steps": LEARN, "batch_size": 128, "objective": rf.MaximumLikelihood(4), "frozen": frozen}
        return finished(rf.fit(flow, data, key=key, **settings)).proposal

    file = kept_file("proposal", eqx.filter((flow.sde, flow.base), eqx.is_array), LEARN)
    return flow.with_proposal(kept_tree(file, like, make, fresh=fresh))


def finished(fitted: rf.train.Fitted):
    """The model of a fit that was not stopped on the way: only that is worth keeping."""
    if fitted.interrupted:
        raise KeyboardInterrupt
    return fitted.model
