"""Gradients of log p(x), and of its bounds, in parameters and in x."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    ESTIMATORS,
    SHAKEN,
    THREE,
    Always,
    Linear,
    curved,
    linear,
    ou,
    ou_distribution,
)
from roughflow.density.estimators._weights import EstimatorRun
from roughflow.density.surface import Target

import roughflow as rf


def check_gradient(value):
    """The gradient of `value(rate, x)` in both arguments against central differences."""
    rate, x = jnp.array(0.5), jnp.array([[0.7], [-1.5]])
    both = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))
    value, (d_rate, d_x) = lambda rate, x: both(rate, x)[0], both(rate, x)[1]
    h, up = 1e-4, jnp.array([[1e-4], [0.0]])
    np.testing.assert_allclose(d_rate, (value(rate + h, x) - value(rate - h, x)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(d_x[0, 0], (value(rate, x + up) - value(rate, x - up)) / (2 * h), rtol=1e-6)


def test_pull_back_gradient(key):
    """Of the estimate as it is returned, the allowance for the logarithm's bias included."""
    estimator = rf.PullBack(8)
    check_gradient(lambda rate, x: jnp.sum(curved(rate).log_prob(x, key=key, estimator=estimator)))


def test_bound_gradient(key):
    """With a proposal that itself depends on x, and so has a part in the gradient."""
    bound = rf.LowerBound(rf.PullBack(8, SHAKEN))
    check_gradient(lambda rate, x: jnp.sum(bound(curved(rate), x, key=key)))


@pytest.mark.slow
def test_endpoint_gradient_goes_through_the_newton_solve(key):
    """With the proposal held where it is, as the estimator's own gradient holds it."""
    estimator = rf.Endpoint(4)
    run = EstimatorRun(estimator, curved(jnp.array(0.5)), jnp.array([[0.7], [-1.5]]), key)
    distribution = jax.tree.map(lambda a: a[:2], run.distribution)
    delta = distribution.sample(jax.random.normal(key, (2, 1, 4 + 1)))

    @jax.jit
    def value(rate, x):
        return jnp.sum(estimator.log_joint(curved(rate), Target(x, None), distribution, delta, None))

    check_gradient(value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Tempered", "PullBack-Laplace", "Endpoint-Laplace"])
def test_gradient_around_the_likeliest_path_is_that_of_the_density(name, key):
    """On average: the proposal is held fixed, so that paths with equal weights have slopes that differ."""
    x, h = jnp.linspace(-1, 2, 64)[:, None], 1e-5
    value = lambda rate: ou(rate).log_prob(x, key=key, estimator=ESTIMATORS[name][0])
    slope = jax.jvp(value, (1.0,), (1.0,))[1]
    truth = lambda rate: ou_distribution(rate, driver=THREE).logpdf(x)
    error = np.asarray(slope - (truth(1 + h) - truth(1 - h)) / (2 * h))
    assert abs(error.mean()) < 4 * error.std() / 8
    assert error.std() < 1


def check_slopes(slope, x, h=1e-5):
    """With respect to the rate, at 1: right on average over the points, and as steep as they should be."""
    truth = lambda rate: ou_distribution(rate, driver=THREE).logpdf(x)
    true_slope = (truth(1 + h) - truth(1 - h)) / (2 * h)
    error, size = np.asarray(slope - true_slope), np.sum(true_slope**2)
    assert abs(error.mean()) < 4 * error.std() / error.size**0.5
    assert error.std() < 0.5
    assert abs(np.sum(slope * true_slope) / size - 1) < 4 * error.std() / size**0.5


def test_moved_particles_have_the_gradient_of_the_density(key):
    """On average over points. With two noises for one dimension they are pulled back, and never bent."""
    x = jnp.linspace(-1, 2, 64)[:, None]
    base, noise = rf.Normal(jnp.ones(1), 0.5), 1.2 * jnp.array([[0.6, 0.8]])

    @jax.jit
    def value_and_slope(rate):
        def ask(rate):
            flow = linear(-rate * jnp.eye(1), noise, base)
            estimate = flow.estimate(x, key=key, estimator=Always(64), solver=False)
            return estimate.log_prob, estimate.tempered

        return jax.jvp(ask, (rate,), (1.0,), has_aux=True)

    value, slope, tempered = value_and_slope(1.0)
    assert np.all(tempered)
    np.testing.assert_allclose(value, ou_distribution(driver=THREE).logpdf(x), atol=1e-6)
    check_slopes(slope, x)


@pytest.mark.slow
def test_values_and_gradients_of_moved_particles(key):
    """Values are the same inside jit and grad; gradients are those of the density, by Fisher's identity: the
    mean over particles of the slopes of log p(x, path), on average over points."""
    x = jnp.linspace(-1, 2, 64)[:, None]
    plain = ou().estimate(x, key=key, estimator=Always(64), solver=False)
    assert np.all(plain.tempered)

    @jax.jit
    def both_ways(rate, x):
        ask = lambda rate, x: ou(rate).log_prob(x, key=key, estimator=Always(64))
        values, linear = jax.linearize(ask, rate, x)
        back = jax.linear_transpose(linear, rate, x)
        return values, linear(jnp.ones_like(rate), jnp.zeros_like(x)), back(jnp.ones_like(values))

    values, slope, (d_rate, d_x) = both_ways(jnp.array(1.0), x)
    np.testing.assert_allclose(values, plain.log_prob, rtol=1e-9)
    np.testing.assert_allclose(d_rate, np.sum(slope), rtol=1e-9)
    assert np.all(np.isfinite(d_x))
    check_slopes(slope, x)


class Cubic(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * z**3


def cubic(rate=2.0):
    """Forward paths explode, so that a search for one that ends at x may fail."""
    sde = rf.ItoSDE(Cubic(jnp.asarray(rate)), rf.ConstantDiffusion(0.5 * jnp.eye(1)))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2))


@pytest.mark.slow
def test_a_search_that_fails_is_told(key):
    """Paths that were not found have weight zero; above one in twenty, a warning."""
    x, estimator = jnp.array([[0.5], [1.5]]), rf.Endpoint(256, rf.Prior())
    estimate = cubic().estimate(x, key=key, estimator=estimator, solver=False)
    assert np.all(estimate.unfound > 0.05 * 256)
    np.testing.assert_array_equal(estimate.escaped, 0)
    assert np.all(estimate.suspect)
    assert re.search(r"2 miss paths that a search did not find: use rf\.Tempered", estimate.warning)


def test_a_search_that_fails_leaves_the_gradient_finite(key):
    """Paths that were not found have no part in the slope."""
    x, bound = jnp.array([[0.5], [1.5]]), rf.LowerBound(rf.Endpoint(64, rf.Prior()))
    value, h = jax.jit(jax.value_and_grad(lambda rate: jnp.sum(bound(cubic(rate), x, key=key)))), 1e-5
    slope = (value(2.0 + h)[0] - value(2.0 - h)[0]) / (2 * h)
    np.testing.assert_allclose(value(2.0)[1], slope, rtol=1e-4)


@pytest.mark.slow
def test_values_are_the_same_inside_jit_and_grad_where_some_particles_are_moved(key):
    """Outside a jit only those of the points that need it are."""
    x, estimator = jnp.array([[0.4], [-0.7], [9.0]]), rf.Tempered(64, SHAKEN)
    ask = lambda x: ou().log_prob(x, key=key, estimator=estimator)
    plain = ask(x)
    assert ou().estimate(x, key=key, estimator=estimator, solver=False).tempered[2]
    np.testing.assert_allclose(jax.jit(ask)(x), plain, rtol=1e-9)
    value, slope = jax.value_and_grad(lambda x: jnp.sum(ask(x)))(x)
    np.testing.assert_allclose(value, jnp.sum(plain), rtol=1e-9)
    assert np.all(np.isfinite(slope))


@pytest.mark.slow
def test_a_fitted_model_estimates_with_the_proposal_it_has_learned(key, tmp_path):
    """And so does the one that is read back from a file; without it the numbers are others."""
    data = ou_distribution(driver=THREE).rvs(64, random_state=0)[:, None]
    model = rf.fit(ou(), data, key=key, objective=rf.MaximumLikelihood(4), steps=3, progress=False).model
    assert isinstance(model.proposal, rf.Amortised)
    assert rf.default_estimator(model).proposal is model.proposal
    x = np.array([[0.4], [-0.7], [1.3]])
    values = model.log_prob(x, key=key)
    explicit = rf.Tempered(64, model.proposal)
    np.testing.assert_array_equal(model.with_proposal(None).log_prob(x, key=key, estimator=explicit), values)
    rf.save(tmp_path / "model.rf", model)
    np.testing.assert_array_equal(
        rf.load(tmp_path / "model.rf", classes=[Linear]).log_prob(x, key=key), values
    )
    assert np.all(model.with_proposal(None).log_prob(x, key=key) != values)
