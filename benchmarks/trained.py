"""Flows fitted to data, for benchmarks of the estimators. They are trained once and stored
(`benchmarks.kept`).

Training and use are in float32, the default precision.
"""

import equinox as eqx
import jax

import roughflow as rf
from benchmarks.kept import kept_file, kept_tree
from roughflow.datasets import DISTRIBUTIONS

ROWS, STEPS = 2000, 400  # rows of the table of `banana_density`, and steps of its fit
LEARN = 600  # steps to learn a proposal


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


def with_learned_proposal(flow: rf.StochasticFlow, data) -> rf.StochasticFlow:
    """The flow with a proposal that is learned for the fixed flow and stored separately.

    References belong to the flow and stay valid if the kind of proposal changes; then only the proposal is
    learned again.
    """
    key = jax.random.key(0)
    like = rf.Amortised(flow, width=64, key=key)

    def make():
        frozen = lambda flow: (flow.sde, flow.base)
        settings = {"steps": LEARN, "objective": rf.MaximumLikelihood(4), "frozen": frozen}
        settings["training"] = rf.train.TrainingOptions(batch_size=128)
        return finished(rf.fit(flow, data, key=key, **settings)).proposal

    file = kept_file("proposal", eqx.filter((flow.sde, flow.base), eqx.is_array), LEARN)
    return flow.with_proposal(kept_tree(file, like, make))


def finished(fitted: rf.train.Fitted):
    """The model of a fit; raise an error if the fit was interrupted."""
    if fitted.interrupted:
        raise KeyboardInterrupt
    return fitted.model
