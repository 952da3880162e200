"""The divergence of a field: the exact trace, and Hutchinson's estimate of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

DISTRIBUTIONS = [jax.random.rademacher, jax.random.normal]
PROBES = 4000

RATE = np.array([[-1.0, 0.8, 0.3], [-0.5, 0.4, -0.6], [0.9, 0.2, 0.7]])
NOISE = np.array([[1.0, 0.2], [0.0, 0.7], [0.3, -0.4]])
GRID = rf.FixedGrid(rf.flow.RK4(), steps=16)


def field_of(dimension):
    """A nonlinear field with a full Jacobian that is not symmetric."""
    matrix = np.random.default_rng(1).normal(size=(dimension, dimension))
    return lambda z: jnp.sin(jnp.asarray(matrix) @ z) * (1 + 0.1 * jnp.roll(z, 1) ** 2)


def linear_flow(divergence):
    sde = rf.ItoSDE(lambda t, z: jnp.asarray(RATE) @ z, lambda t, z: jnp.asarray(NOISE))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(3)), 0.5, divergence=divergence, integrator=GRID)


@pytest.mark.parametrize("dimension", [1, 3, 12])
def test_exact_is_the_trace_of_the_jacobian(dimension, key):
    """Up to 8 dimensions and above: the two are computed in different ways."""
    field = field_of(dimension)
    z = jax.random.normal(key, (5, dimension))
    got = lambda y: rf.ExactDivergence()(field, y, None)
    expected = lambda y: (field(y), jnp.trace(jax.jacrev(field)(y)))
    got, expected = jax.jit(jax.vmap(lambda y: (got(y), expected(y))))(z)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@eqx.filter_jit
def estimates(hutchinson, z, key):
    """One estimate for each of many draws of probes, the exact divergence, and both values of the field."""
    field = field_of(z.size)
    probes = hutchinson.draw((PROBES,), z.size, key=key)
    values, guesses = jax.vmap(lambda p: hutchinson(field, z, p))(probes)
    return guesses, rf.ExactDivergence()(field, z, None)[1], values, field(z)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda f: f.__name__)
def test_hutchinson_is_right_on_average(distribution, key):
    """Over 4000 draws within three standard errors; and it does vary."""
    z = jax.random.normal(key, (6,))
    guesses, exact, values, value = estimates(rf.HutchinsonDivergence(distribution=distribution), z, key)
    spread = np.std(guesses, ddof=1)
    assert spread > 0.1
    assert abs(np.mean(guesses) - exact) < 3 * spread / np.sqrt(PROBES)
    np.testing.assert_allclose(values, np.broadcast_to(value, values.shape), rtol=1e-12)


@pytest.mark.parametrize(
    ("distribution", "number"), [(DISTRIBUTIONS[0], 4), (DISTRIBUTIONS[1], 16)], ids=["rademacher", "normal"]
)
def test_more_probes_less_variance(distribution, number, key):
    """Few probes and many are computed in different ways; both average independent estimates."""
    z = jax.random.normal(key, (6,))
    one, exact, _, _ = estimates(rf.HutchinsonDivergence(distribution=distribution), z, key)
    many, _, _, _ = estimates(rf.HutchinsonDivergence(number, distribution), z, key)
    assert abs(np.mean(many) - exact) < 3 * np.std(many) / np.sqrt(PROBES)
    ratio = np.var(one) / np.var(many)
    # A ratio of variances from 4000 draws each is good to some percent.
    assert 0.8 * number < ratio < 1.25 * number


def test_rademacher_is_exact_for_a_diagonal_jacobian(key):
    hutchinson = rf.HutchinsonDivergence()
    z = jax.random.normal(key, (5,))
    probes = hutchinson.draw((), 5, key=key)
    assert set(np.unique(probes)) == {-1.0, 1.0}
    np.testing.assert_allclose(hutchinson(jnp.sin, z, probes)[1], jnp.sum(jnp.cos(z)), rtol=1e-12)


def test_log_density_of_a_linear_flow_is_right_on_average(key):
    """Its trajectories do not depend on the probes, so neither bias nor more than their variance."""
    x = jnp.array([0.3, -1.0, 0.5])
    exact, guess = linear_flow(rf.ExactDivergence()), linear_flow(rf.HutchinsonDivergence())
    path = exact.sample_path(key=key)
    truth = exact.log_prob_given_path(x, path)
    guesses = guess.log_prob_given_path(jnp.broadcast_to(x, (PROBES, 3)), path, key=key)
    spread = np.std(guesses, ddof=1)
    # For signs ε, Var ε·Sε = 2 Σ_{i≠j} Sᵢⱼ², S the symmetric part; the horizon is ½.
    symmetric = (RATE + RATE.T) / 2
    expected = 0.5 * np.sqrt(2 * (np.sum(symmetric**2) - np.sum(np.diag(symmetric) ** 2)))
    np.testing.assert_allclose(spread, expected, rtol=0.05)
    assert abs(np.mean(guesses) - truth) < 3 * spread / np.sqrt(PROBES)


def test_probes_are_drawn_per_sample_and_fixed_along_a_solve(key):
    """For the field (z₂, z₁), ε·Dfε = 2ε₁ε₂ is ±2: redrawn along the way it would average out."""
    sde = rf.ItoSDE(lambda t, z: z[::-1], lambda t, z: jnp.eye(2))
    flow = rf.StochasticFlow(
        sde, rf.Normal(jnp.zeros(2)), divergence=rf.HutchinsonDivergence(), integrator=GRID
    )
    path = flow.sample_path(key=key)
    x = jnp.zeros((200, 2))
    _, change = flow.pull_back(x, path, key=key)
    np.testing.assert_allclose(np.abs(change), 2.0, rtol=1e-12)
    assert 50 < np.sum(change > 0) < 150
    np.testing.assert_array_equal(change, flow.pull_back(x, path, key=key)[1])
    assert np.any(change != flow.pull_back(x, path, key=jax.random.key(1))[1])


def test_a_key_is_asked_for(key):
    flow = linear_flow(rf.HutchinsonDivergence())
    path = flow.sample_path(key=key)
    with pytest.raises(TypeError, match=r"HutchinsonDivergence.*pass key=jax\.random\.key") as caught:
        flow.log_prob_given_path(jnp.zeros(3), path)
    assert "\n" not in str(caught.value)


def test_numbers_of_probes_below_one_are_refused():
    with pytest.raises(ValueError, match="num_probes must be a positive"):
        rf.HutchinsonDivergence(0)
