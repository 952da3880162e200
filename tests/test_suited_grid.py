"""Grids with as many steps as log-densities need."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow.flow._suited_grid import STILL, _values, with_steps


def turning(rate, **settings):
    """dz = rate·(−z₂, z₁)·|z|² dt from N(0, I): volumes stay, so log p is that of the start."""
    drift = lambda t, z: rate * jnp.sum(z**2) * jnp.stack([-z[1], z[0]])
    return rf.StochasticFlow(rf.ItoSDE(drift, rf.NoDiffusion()), rf.Normal(jnp.zeros(2)), **settings)


def error(flow, x):
    path = flow.sample_path(key=jax.random.key(0))
    truth = jnp.sum(jax.scipy.stats.norm.logpdf(x), axis=-1)
    return float(jnp.sqrt(jnp.mean((flow.log_prob_given_path(x, path) - truth) ** 2)))


def test_a_faster_model_gets_more_steps_and_all_are_as_accurate(key):
    x = jax.random.uniform(key, (64, 2), minval=-1.2, maxval=1.2)
    flows = [rf.suited_grid(turning(rate), x, key=key) for rate in (0.1, 1.0, 4.0)]
    steps = [flow.integrator.steps for flow in flows]
    assert steps[0] < steps[1] < steps[2]
    for flow, count in zip(flows, steps, strict=True):
        assert error(flow, x) < 1.5 * STILL
        if count > 2:
            assert error(with_steps(flow, count - 1), x) > 0.7 * STILL


def test_a_looser_tolerance_takes_fewer_steps(key):
    x = jax.random.uniform(key, (64, 2), minval=-1.2, maxval=1.2)
    loose = rf.suited_grid(turning(4.0), x, key=key, tolerance=1e-2)
    assert loose.integrator.steps < rf.suited_grid(turning(4.0), x, key=key).integrator.steps
    with pytest.raises(ValueError, match="tolerance"):
        rf.suited_grid(turning(4.0), x, key=key, tolerance=0.0)


@pytest.mark.parametrize("late", [1.0, 2.0])
@pytest.mark.parametrize("driver", [rf.KarhunenLoeve(3), rf.PiecewiseLinear(3)])
def test_steps_counted_at_run_time_are_those_of_the_grid(driver, late, key):
    sde = rf.ItoSDE(lambda t, z: jnp.sin(z + t), lambda t, z: 1 + 0.3 * jnp.cos(z)[:, None])
    grid = rf.FixedGrid(steps=6, late=late)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=driver, integrator=grid)
    x, path = jnp.linspace(-1, 1, 5)[:, None], flow.sample_path(key=key, shape=(5,))
    each = jnp.asarray(6 // (driver.jumps.size + 1))
    np.testing.assert_allclose(
        _values(flow, each, x, path, key), flow.log_prob_given_path(x, path), atol=1e-12
    )


def test_a_piecewise_linear_path_keeps_its_corners(key):
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.PiecewiseLinear(5))
    steps = rf.suited_grid(flow, jnp.ones((8, 1)), key=key).integrator.steps
    assert steps % 5 == 0


def test_what_cannot_be_suited_comes_back_as_it_is(key):
    x = jnp.ones((4, 2))
    wild = turning(1e4)
    assert rf.suited_grid(wild, x, key=key).integrator.steps is None
    adaptive = turning(1.0, integrator=rf.Adaptive())
    assert eqx.tree_equal(rf.suited_grid(adaptive, x, key=key), adaptive)
