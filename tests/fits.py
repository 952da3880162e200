"""A small fit that tests of the loop share."""

import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf


class Distance(rf.train.AbstractObjective):
    """E (model − x)², with a bend the objective learns itself."""

    bend: jax.Array
    uses_data = True

    def __call__(self, model, x, *, key):
        loss = jnp.mean((model["place"][None] - x + 0.01 * jax.random.normal(key, x.shape)) ** 2)
        return loss + jnp.sum((self.bend - 2) ** 2), {"size": jnp.sum(model["place"] ** 2)}


DATA = np.random.default_rng(0).normal([3.0, -1.0], 0.5, (400, 2))
SETTINGS = {"steps": 300, "batch_size": 32, "learning_rate": 0.05, "progress": False}


OPTIONS = {
    "training": rf.train.TrainingOptions,
    "run": rf.train.RunOptions,
    "flow": rf.tables.FlowOptions,
}


def grouped(settings):
    """Arguments of a fit, with the fields of options in their objects."""
    rest = dict(settings)
    for argument, kind in OPTIONS.items():
        fields = {name: rest.pop(name) for name in kind.__dataclass_fields__ if name in rest}
        if fields:
            rest[argument] = kind(**fields)
    return rest


def fit_density(data, **settings):
    return rf.fit_density(data, **grouped(settings))


def fit(key, model=None, data=DATA, **changes):
    model = {"place": jnp.zeros(2), "other": jnp.ones(1)} if model is None else model
    return rf.fit(model, data, key=key, objective=Distance(jnp.zeros(1)), **grouped(SETTINGS | changes))


def same(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
