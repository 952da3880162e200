"""Figure 1: a Brownian path and its two smooth approximations."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import roughflow as rf
from roughflow import plots

from ._run import Run

FUNCTIONS, FINE = 6, 1024


def fig1(run: Run) -> dict:
    """The same path, projected on six functions of each driver."""
    fine = rf.PiecewiseLinear(FINE).sample(key=run.key("path"))
    drivers = {
        f"Karhunen–Loève, n = {FUNCTIONS}": rf.KarhunenLoeve(FUNCTIONS),
        f"piecewise linear, n = {FUNCTIONS}": rf.PiecewiseLinear(FUNCTIONS),
    }
    paths = {name: driver.project(fine) for name, driver in drivers.items()}
    times = jnp.linspace(0, 1, FINE + 1)
    figure, ax = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    plots.approximations(fine, paths, times=times, ax=ax)
    at = lambda path: np.asarray(jax.vmap(path.evaluate)(times))
    gaps = {name: float(np.max(np.abs(at(path) - at(fine)))) for name, path in paths.items()}
    ends = {name: float(path.evaluate(1.0)[0]) for name, path in {"Brownian": fine, **paths}.items()}
    return run.finish(figure, {"largest_gap": gaps, "endpoint": ends})
