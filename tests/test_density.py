"""log p(x) of an SDE with error bars, against laws with a closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import GBM2_NOISE, GBM2_RATE, OU4_DRIFT, OU4_NOISE, gbm_2d, ou_1d, ou_4d
from scipy import linalg, stats

import roughflow as rf
from roughflow.density._latent import Latent
from roughflow.density._mode import find_mode


def test_ornstein_uhlenbeck_is_exact_but_for_truncation(key):
    """On a linear law every path has the same weight, in the tails too."""
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, rf.KarhunenLoeve(20))
    x = jnp.array([[0.1], [-2.0], [2.5]])
    estimate = flow.estimate(x, key=key, estimator=rf.Endpoint(num_paths=4))
    variance = 0.25 * np.exp(-4.0) + 1.3**2 / 4 * (1 - np.exp(-4.0))
    truth = stats.norm.logpdf(x[:, 0], np.exp(-2.0), np.sqrt(variance))
    np.testing.assert_allclose(estimate.log_prob, truth, rtol=0, atol=2e-4)
    assert np.all(estimate.standard_error < 1e-8)
    np.testing.assert_allclose(estimate.effective_paths, 4, rtol=1e-8)
    assert estimate.warning is None


def test_fewer_noises_than_dimensions(key):
    """OU in four dimensions with three noises: mean and covariance by matrix exponentials."""
    problem = ou_4d()
    flow = rf.StochasticFlow(problem.ito, problem.base, problem.t1, rf.KarhunenLoeve(12))
    grow = linalg.expm(problem.t1 * OU4_DRIFT)
    noise = OU4_NOISE @ OU4_NOISE.T
    added = linalg.solve_continuous_lyapunov(OU4_DRIFT, grow @ noise @ grow.T - noise)
    covariance = grow @ np.diag(np.asarray(problem.base.scale) ** 2) @ grow.T + added
    truth = stats.multivariate_normal.logpdf(problem.x, np.zeros(4), covariance)
    log_prob = flow.log_prob(problem.x, key=key, estimator=rf.Endpoint(num_paths=2))
    np.testing.assert_allclose(log_prob, truth, rtol=0, atol=2e-3)


def test_geometric_brownian_motion_within_its_error_bars(key):
    """log Z_T = log Z₀ + normal, Z₀ nearly fixed: p by a sum over the start, on a grid."""
    problem = gbm_2d()
    base = rf.Normal(jnp.array([1.0, 2.0]), 0.05)
    flow = rf.StochasticFlow(problem.ito, base, 1.0, rf.KarhunenLoeve(4))
    shift = GBM2_RATE - 0.5 * np.sum(GBM2_NOISE**2, axis=1)
    covariance = GBM2_NOISE @ GBM2_NOISE.T
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    start = np.stack(np.meshgrid(1 + 0.05 * nodes, 2 + 0.05 * nodes, indexing="ij"), -1).reshape(-1, 2)
    weight = np.outer(weights, weights).ravel() / np.sum(weights) ** 2
    x = np.array([[1.2, 1.5], [0.5, 1.0]])
    estimate = flow.estimate(x, key=key)
    for i, point in enumerate(x):
        log_density = stats.multivariate_normal.logpdf(np.log(point / start) - shift, [0, 0], covariance)
        truth = np.log(np.sum(weight * np.exp(log_density))) - np.sum(np.log(point))
        assert abs(estimate.log_prob[i] - truth) < 3 * estimate.standard_error[i] + 1e-6
        assert estimate.standard_error[i] < 0.02


def test_without_noise_it_is_the_continuous_normalizing_flow(key):
    drift = rf.MLP(2, 2, 8, 2, key=key)
    flow = rf.StochasticFlow(
        rf.ItoSDE(drift, rf.NoDiffusion()), rf.Normal(jnp.zeros(2)), integrator=rf.FixedGrid(steps=40)
    )
    x = jax.random.normal(key, (3, 2))
    exact = flow.log_prob_given_path(x, flow.sample_path(key=key))
    np.testing.assert_allclose(flow.log_prob(x, key=key), exact, rtol=0, atol=1e-7)


def double_well():
    """Drift (x − x³, −y + x), noise that does not commute; most backward paths escape."""
    drift = lambda t, z: jnp.stack([z[0] - z[0] ** 3, z[0] - z[1]])
    diffusion = lambda t, z: jnp.stack(
        [
            jnp.stack([jnp.ones_like(z[0]), 0.5 * jnp.tanh(z[1])]),
            jnp.stack([0.5 * jnp.sin(z[0]), jnp.ones_like(z[0])]),
        ]
    )
    return rf.StochasticFlow(rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(2)))


def test_double_well_keeps_its_paths_and_integrates_to_one(key):
    flow = double_well()
    points = jnp.array([[0.0, 0], [1, 1], [-1, 1], [2, -1], [2.2, 3]])
    estimate = flow.estimate(points, key=key)
    assert np.all(estimate.effective_paths > 0.3 * 64)
    side = np.linspace(-4.5, 4.5, 31)
    grid = jnp.asarray(np.stack(np.meshgrid(side, side, indexing="ij"), -1))
    density = np.exp(flow.log_prob(grid, key=key, estimator=rf.Endpoint(num_paths=16)))
    assert abs(density.sum() * (side[1] - side[0]) ** 2 - 1) < 0.02


def test_pull_back_agrees_with_endpoint_where_it_can(key):
    flow = double_well()
    x = jnp.array([0.2, -0.3])
    plain = flow.estimate(x, key=key, estimator=rf.PullBack(num_paths=20_000))
    bent = flow.estimate(x, key=key, estimator=rf.Endpoint(num_paths=256))
    gap = abs(plain.log_prob - bent.log_prob)
    assert gap < 3 * np.hypot(plain.standard_error, bent.standard_error)
    assert plain.escaped > 0
    assert plain.effective_paths / 20_000 < bent.effective_paths / 256


def curved(rate):
    """A flow with a parameter in drift and noise, both closed over."""
    drift = lambda t, z: rate * jnp.tanh(z) - z
    sde = rf.ItoSDE(drift, lambda t, z: (1 + 0.3 * jnp.sin(rate * z))[:, None])
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(4))


def check_gradient(value):
    """The gradient of `value(rate, x)` in both arguments against central differences."""
    value = jax.jit(value)
    x = jnp.array([[0.7], [-1.5]])
    d_rate, d_x = jax.jit(jax.grad(value, argnums=(0, 1)))(0.5, x)
    h, up = 1e-4, jnp.array([[1e-4], [0.0]])
    np.testing.assert_allclose(d_rate, (value(0.5 + h, x) - value(0.5 - h, x)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(d_x[0, 0], (value(0.5, x + up) - value(0.5, x - up)) / (2 * h), rtol=1e-6)


def test_pull_back_gradient(key):
    estimator = rf.PullBack(num_paths=8)
    check_gradient(lambda rate, x: jnp.sum(curved(rate).log_prob(x, key=key, estimator=estimator)))


def test_endpoint_gradient_goes_through_the_newton_solve(key):
    """With the proposal held where it is, as the estimator's own gradient holds it."""
    x0 = jnp.array([[0.7], [-1.5]])
    latent = Latent(curved(0.5))
    mode = jax.jit(lambda: find_mode(latent, x0))()
    noise = jax.random.normal(key, (2, latent.size))
    rows = mode.jacobian
    along = jnp.einsum("bij,bj->bi", rows, noise) / jnp.einsum("bij,bij->bi", rows, rows)
    delta = noise - jnp.einsum("bij,bi->bj", rows, along)
    check_gradient(lambda rate, x: jnp.sum(bent_log_weights(Latent(curved(rate)), x, mode, delta)))


@pytest.mark.parametrize("estimator", [rf.Endpoint(4), rf.PullBack(4)])
def test_chunks_do_not_change_the_numbers(estimator, key, monkeypatch):
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, rf.KarhunenLoeve(3))
    x = jnp.linspace(-1, 1, 5)[:, None]
    whole = flow.log_prob(x, key=key, estimator=estimator)
    monkeypatch.setattr("roughflow.density._estimator.PAIRS", 8)
    np.testing.assert_allclose(flow.log_prob(x, key=key, estimator=estimator), whole, rtol=1e-12)


def test_a_poor_estimate_warns(key):
    """Far in the tail of a broad law given a narrow start, one path carries all the weight."""
    sde = rf.ItoSDE(lambda t, z: 0 * z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), 0.01))
    estimate = flow.estimate(jnp.array([3.0]), key=key, estimator=rf.PullBack(num_paths=100))
    assert estimate.warning is not None
    assert "effective paths" in estimate.warning
    assert "\n" not in estimate.warning
