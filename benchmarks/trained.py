"""Flows fitted to data, for benchmarks of the estimators: trained once, then kept (`benchmarks.kept`).

They are trained, and to be used, in float32, as a user would.
"""

import equinox as eqx
import jax

import roughflow as rf
from benchmarks.kept import kept_file, kept_tree
from roughflow.datasets import DISTRIBUTIONS

ROWS, STEPS = 2000, 400  # of the table that `banana_density` is fitted to, and of that fit
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
    """The flow with a proposal learned for it as it is, and kept beside it.

    References belong to the flow, and should outlive a new kind of proposal: then that alone is learned anew.
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
    """The model of a fit that was not stopped on the way: only that is worth keeping."""
    if fitted.interrupted:
        raise KeyboardInterrupt
    return fitted.model
