"""Flows to save, and files to spoil."""

import json
import zipfile

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import roughflow as rf


class Pull(eqx.Module):
    """A user's own drift."""

    rate: Array
    power: int = eqx.field(static=True, default=1)

    def __call__(self, t, z):
        return -self.rate * z**self.power


def flow_of(key, drift=None):
    drift = rf.MLP(2, 2, width=4, depth=1, activation=jax.nn.softplus, key=key) if drift is None else drift
    return rf.StochasticFlow(
        rf.ItoSDE(drift, rf.FullDiffusion(2, width=4, scale=0.3, key=key)),
        rf.Normal(jnp.array([0.5, -1.0]), jnp.array([1.0, 2.0])),
        t1=0.7,
        driver=rf.PiecewiseLinear(3),
        divergence=rf.HutchinsonDivergence(2),
        integrator=rf.FixedGrid(diffrax.Tsit5(), steps=5),
    )


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    equal = lambda a, b: np.array_equal(a, b) and jnp.asarray(a).dtype == jnp.asarray(b).dtype
    return all(a is b if callable(a) else equal(a, b) for a, b in leaves)


def rewritten(file, change):
    """The file with its header changed."""
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(parts["header.json"])
    change(header)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (parts | {"header.json": json.dumps(header)}).items():
            archive.writestr(name, content)
