"""Gradients of log p(x), and of its bounds, in parameters and in x."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fokker_planck import evolved, log_density_at
from problems import ESTIMATORS, SHAKEN, THREE, Linear, curved, ou, ou_distribution
from scipy import stats

import roughflow as rf


def check_gradient(value):
    """The gradient of `value(rate, x)` in both arguments against central differences; returns it."""
    rate, x = jnp.array(0.5), jnp.array([[0.7], [-1.5]])
    both = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))
    value, (d_rate, d_x) = lambda rate, x: both(rate, x)[0], both(rate, x)[1]
    h, up = 1e-4, jnp.array([[1e-4], [0.0]])
    np.testing.assert_allclose(d_rate, (value(rate + h, x) - value(rate - h, x)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(d_x[0, 0], (value(rate, x + up) - value(rate, x - up)) / (2 * h), rtol=1e-6)
    return d_rate, d_x


def test_pull_back_gradient(key):
    """Of the mean weight: the allowance for the logarithm's bias has no part in it."""
    estimator = rf.PullBack(8)
    bound = rf.density.LowerBound(estimator)
    value = lambda rate, x: jnp.sum(curved(rate).log_prob(x, key=key, estimator=estimator))
    plain = lambda rate, x: jnp.sum(bound(curved(rate), x, key=key))
    slopes = jax.jit(jax.grad(value, (0, 1)))(jnp.array(0.5), jnp.array([[0.7], [-1.5]]))
    for one, two in zip(slopes, check_gradient(plain), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9)


def test_bound_gradient(key):
    """With a proposal that itself depends on x, and so has a part in the gradient."""
    bound = rf.density.LowerBound(rf.PullBack(8, SHAKEN))
    check_gradient(lambda rate, x: jnp.sum(bound(curved(rate), x, key=key)))


@pytest.mark.slow
def test_gradient_around_the_likeliest_path_is_that_of_the_density(key):
    """On average: the proposal is held fixed, so that paths with equal weights have slopes that differ."""
    x, h = jnp.linspace(-1, 2, 64)[:, None], 1e-5
    value = lambda rate: ou(rate).log_prob(x, key=key, estimator=ESTIMATORS["PullBack-Laplace"][0])
    slope = jax.jvp(value, (1.0,), (1.0,))[1]
    truth = lambda rate: ou_distribution(rate, driver=THREE).logpdf(x)
    error = np.asarray(slope - (truth(1 + h) - truth(1 - h)) / (2 * h))
    assert abs(error.mean()) < 4 * error.std() / 8
    assert error.std() < 1


# ------------------------------------------------------------------------------- of the default, inside a jit


@jax.jit
def default_and_gradient(rate, x, weights):
    """The estimate, and the gradients of the weighted sum of log p in the rate and in x."""

    def value(rate, x):
        estimate = ou(rate).estimate(x, key=jax.random.key(20))
        return weights @ estimate.log_prob, estimate

    (_, estimate), slopes = jax.value_and_grad(value, (0, 1), has_aux=True)(rate, x)
    return estimate, slopes


def test_the_default_inside_jit_and_grad():
    """Values are right within the bars, in the bulk and nine deviations out; slopes are those of the density.

    On average over points in the bulk, where paths are drawn from the prior.
    """
    x = jnp.concatenate([jnp.linspace(-1, 2, 30), jnp.array([6.0, 9.0])])[:, None]
    truth = lambda rate: ou_distribution(rate, driver=THREE).logpdf(x)
    slope = (truth(1 + 1e-5) - truth(1 - 1e-5)) / 2e-5
    bulk = np.arange(32) < 30
    signs = np.where(bulk, np.sign(slope), 0)  # so that slopes do not cancel
    estimate, (d_rate, d_x) = default_and_gradient(jnp.array(1.0), x, signs)
    assert not np.any(estimate.suspect)
    assert np.all(np.abs(estimate.log_prob - ou_distribution().logpdf(x)) < 4 * estimate.total_error)
    assert list(estimate.method[-2:]) == ["modes", "modes"]
    assert set(estimate.method) == {"paths", "modes"}
    assert np.abs(slope[bulk]).mean() > 0.5
    assert abs(d_rate - signs @ slope) / 30 < 0.15
    distribution = ou_distribution(driver=THREE)
    true = (distribution.mean - np.asarray(x)) / distribution.cov[0, 0]
    error = (signs[:, None] * np.asarray(d_x) - true)[bulk]
    assert abs(error.mean()) < 4 * error.std() / 30**0.5 + 0.01
    assert error.std() < 0.3
    # Where a model is not finite, no error is raised in a compiled program.
    estimate, _ = default_and_gradient(jnp.array(jnp.nan), x, signs)
    assert not np.any(np.isfinite(estimate.log_prob))
    assert np.all(estimate.suspect)
    assert "32 of 32 estimates are not finite" in estimate.warning


class Cubic(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * z**3


def cubic(rate):
    sde = rf.ItoSDE(Cubic(jnp.asarray(rate)), rf.ConstantDiffusion(0.5 * jnp.eye(1)))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))


@pytest.mark.slow
def test_an_sde_that_explodes_inside_jit_and_its_gradient(key):
    """dZ = 2Z³ dt + ½ dB, against finite volumes that let go what explodes."""
    x = np.array([[0.5], [1.5], [3.0]])

    def truth(rate):
        y, p = evolved(lambda y: rate * y**3, lambda y: 0.5, stats.norm.pdf, (-6, 6), 1.0)
        return log_density_at(x[:, 0], y, p)

    def ask(rate):
        estimate = cubic(rate).estimate(x, key=key)
        return estimate.log_prob, estimate

    _, slope, estimate = jax.jit(lambda rate: jax.jvp(ask, (rate,), (1.0,), has_aux=True))(2.0)
    fine = ~np.asarray(estimate.suspect)
    assert np.sum(fine) >= 2
    assert np.all((np.abs(estimate.log_prob - truth(2.0)) < 3 * estimate.total_error)[fine])
    np.testing.assert_allclose(slope[fine], ((truth(2.01) - truth(1.99)) / 0.02)[fine], atol=0.15)


@pytest.mark.slow
def test_a_fitted_model_estimates_with_the_proposal_it_has_learned(key, tmp_path):
    """Where weights of the prior's paths are poor; and so does the one that is read back from a file."""
    data = ou_distribution(scale=0.1, driver=THREE).rvs(256, random_state=0)[:, None]
    settings = {"objective": rf.MaximumLikelihood(4), "steps": 200, "progress": False}
    model = rf.fit(ou(scale=0.1), data, key=key, **settings).model
    assert isinstance(model.proposal, rf.Amortised)
    x = np.array([[0.4], [-1.7], [2.3]])
    ask = jax.jit(lambda x: model.estimate(x, key=key))
    estimate = ask(x)
    assert "learned" in estimate.method
    rf.save(tmp_path / "model.rf", model)
    again = rf.load(tmp_path / "model.rf", classes=[Linear])
    np.testing.assert_array_equal(jax.jit(lambda x: again.log_prob(x, key=key))(x), estimate.log_prob)
