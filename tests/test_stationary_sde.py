"""The SDE that stays where the data are: for a normal distribution its score is known."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

LOC, MATRIX, T = np.array([3.0, -1.0]), np.array([[2.0, 0.0], [1.0, 0.5]]), 2.0


def velocity(t, y):
    """From N(0, I) to N(0, I) along straight lines."""
    s = t / T
    return (2 * s - 1) / ((1 - s) ** 2 + s**2) / T * y


def model(num_given=0):
    transport = rf.sde.NormalTransport(velocity, jnp.zeros(2), jnp.ones(2), T, num_given)
    flow = rf.StochasticFlow(rf.sde.TransportSDE(transport), rf.Normal(jnp.zeros(2)), T)
    return rf.tables.Standardised(flow, LOC, MATRIX)


@pytest.mark.parametrize("at", [0.7, 0.9, 0.99])
def test_the_score_is_that_of_the_blurred_data_in_their_own_units(at):
    covariance = MATRIX @ MATRIX.T * (1 + ((1 - at) / at) ** 2)
    sde = rf.tables.stationary_sde(model(), rf.ConstantDiffusion(jnp.eye(2)), time=at)
    for x in (np.array([0.0, 0.0]), np.array([5.0, -3.0])):
        expected = -0.5 * np.linalg.solve(covariance, x - LOC)
        np.testing.assert_allclose(sde.drift(jnp.zeros(()), jnp.asarray(x)), expected, rtol=1e-8)


def test_maps_of_the_columns_bend_the_score_too():
    """u = log x is normal: x is log-normal, blurred in u."""
    line, none = np.array([[-1.0, 1.0]] * 2), np.full(2, np.inf)
    maps = rf.tables.Marginals(line, line, np.ones((2, 2)), np.zeros(2), none)
    plain = eqx.tree_at(lambda m: m.marginals, model(), maps, is_leaf=lambda part: part is None)
    sde = rf.tables.stationary_sde(plain, rf.ConstantDiffusion(jnp.eye(2)), time=0.9)
    covariance = MATRIX @ MATRIX.T * (1 + 1 / 81)

    def log_density(x):
        u = jnp.log(x)
        return -0.5 * (u - LOC) @ jnp.linalg.solve(covariance, u - LOC) - jnp.sum(u)

    for x in (jnp.array([0.3, 2.0]), jnp.array([30.0, 0.1])):
        expected = 0.5 * jax.grad(log_density)(x)
        np.testing.assert_allclose(sde.drift(jnp.zeros(()), x), expected, rtol=1e-8)


def test_a_flow_is_in_its_own_units_and_its_base_may_lie_elsewhere():
    """From N(5, I) to N(5, I), which moves as the one around zero."""
    shifted = lambda t, y: velocity(t, y - 5)
    transport = rf.sde.NormalTransport(shifted, jnp.full(2, 5.0), jnp.ones(2), T)
    flow = rf.StochasticFlow(rf.sde.TransportSDE(transport), rf.Normal(jnp.full(2, 5.0)), T)
    sde = rf.tables.stationary_sde(flow, rf.ConstantDiffusion(jnp.eye(2)), time=0.8)
    expected = -0.5 * np.array([-5.0, 1.0]) / (1 + 0.25**2)
    np.testing.assert_allclose(sde.drift(jnp.zeros(()), jnp.array([0.0, 6.0])), expected, rtol=1e-8)


def test_paths_come_to_the_distribution_and_stay_whatever_the_noise(key):
    # Near enough to the shape of the distribution for paths to get there soon.
    mixed = jnp.asarray(MATRIX @ np.array([[1.2, 0.3], [-0.2, 1.0]]))
    sde = rf.tables.stationary_sde(model(), lambda t, z: mixed * (1 + 0.3 * jnp.sin(z[0])))
    x = rf.simulate(sde, jnp.zeros((4000, 2)), key=key, t1=8.0, steps=200)
    np.testing.assert_allclose(np.mean(x, axis=0), LOC, atol=0.12)
    np.testing.assert_allclose(np.cov(x.T), MATRIX @ MATRIX.T * (1 + 1 / 81), atol=0.3)


def test_what_has_no_score_or_a_condition_is_refused():
    still = rf.ConstantDiffusion(jnp.eye(2))
    ode = rf.StochasticFlow(rf.ItoSDE(velocity, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)), T)
    with pytest.raises(TypeError, match=r"^stationary_sde needs a model with a known score: fit it with"):
        rf.tables.stationary_sde(ode, still)
    with pytest.raises(ValueError, match=r"^time must lie between 0 and 1, got 1"):
        rf.tables.stationary_sde(model(), still, time=1.0)
    with pytest.raises(ValueError, match=r"^stationary_sde does not support conditional densities"):
        rf.tables.stationary_sde(model(num_given=1), still)


def test_the_score_is_given_and_not_trained():
    """Training the noise leaves the distribution alone."""
    sde = rf.tables.stationary_sde(model(), rf.FullDiffusion(2, width=4, key=jax.random.key(0)))
    slope = eqx.filter_grad(lambda sde: jnp.sum(sde.drift(jnp.zeros(()), jnp.ones(2))))(sde)
    assert not np.any(slope.score.matrix)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(slope.diffusion))
