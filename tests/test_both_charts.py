"""Paths searched for and paths pulled back, weighed together."""

import jax.numpy as jnp
import numpy as np
import pytest
from roughflow.density.estimators._both_charts import BothCharts
from scipy import special, stats

import roughflow as rf

START, SPREAD, TURN = np.array([1.5, 0.0]), 0.3, 3.0


def turned():
    """dZ = 3JZ ∘ dB turns the start by the angle 3B(1), which the first function has exactly."""
    sde = rf.StratonovichSDE(lambda t, z: jnp.zeros(2), lambda t, z: TURN * jnp.stack([-z[1], z[0]])[:, None])
    base, driver = rf.Normal(jnp.asarray(START), SPREAD), rf.KarhunenLoeve(1)
    return rf.StochasticFlow(sde, base, driver=driver, integrator=rf.FixedGrid(steps=32))


def turned_density(x):
    """log ∫ N(θ; 0, 3²) N(R(−θ)x; start, spread² I) dθ."""
    angle = np.linspace(-30, 30, 4001)
    cos, sin = np.cos(angle), np.sin(angle)
    back = np.stack([x[0] * cos + x[1] * sin, x[1] * cos - x[0] * sin], axis=-1)
    terms = np.sum(stats.norm.logpdf(back, START, SPREAD), axis=-1) + stats.norm.logpdf(angle, 0, TURN)
    return special.logsumexp(terms) + np.log(angle[1] - angle[0])


def test_ways_that_the_search_leaves_out_are_not_missed(key):
    """A turn to the left and one to the right lead to the same x, and a search finds one of them."""
    x = np.array([-1.5, 0.0])
    estimate = turned().estimate(x, key=key, estimator=BothCharts(num_paths=1024), solver=False)
    assert estimate.standard_error < 0.05
    assert abs(estimate.log_prob - turned_density(x)) < 3 * estimate.standard_error


@pytest.mark.slow
def test_a_tolerance_is_met_where_backward_solves_escape(key):
    """The search does it. The value is a quadrature over both coefficients, pulled back with 64 steps."""
    sde = rf.ItoSDE(lambda t, z: z - z**3, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(
        sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2), integrator=rf.FixedGrid(steps=16)
    )
    estimate = flow.estimate(np.array([2.0]), key=key, tolerance=0.03, solver=False)
    assert not estimate.tempered
    assert not estimate.suspect
    assert estimate.num_paths < 2000
    assert estimate.standard_error <= 0.03
    assert abs(estimate.log_prob - (-7.118)) < 4 * estimate.standard_error
