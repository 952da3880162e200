"""log p(x) of an SDE with error bars, against laws with a closed form."""

import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    ESTIMATORS,
    GBM2_NOISE,
    GBM2_RATE,
    OU4_DRIFT,
    OU4_NOISE,
    SHAKEN,
    THREE,
    LogNormal,
    gbm_1d,
    gbm_2d,
    linear,
    linear_law,
    ou,
    ou_1d,
    ou_4d,
    ou_law,
)
from scipy import stats

import roughflow as rf
from roughflow.density._latent import Latent, Target
from roughflow.density._sampler import Sampler

FINE = rf.FixedGrid(rf.RK4(), steps=64)


# ------------------------------------------------------------------------------------- linear laws


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_finds_the_law_of_a_linear_sde(name, key):
    """Truncated as the driver truncates it. Eight estimates of p at each of eight points, pooled."""
    estimator, largest = ESTIMATORS[name]
    for numbers in ((1.0, 1.2, 1.0, 0.5), (0.5, 0.8, -0.5, 1.0)):
        law = ou_law(*numbers, driver=THREE)
        x = law.mean + np.linspace(-1.75, 1.75, 8)[:, None] * np.sqrt(law.cov[0, 0])
        estimate = ou(*numbers).estimate(np.repeat(x, 8, axis=0), key=key, estimator=estimator)
        ratio = np.exp(np.reshape(estimate.log_prob, (8, 8)) - law.logpdf(x)[:, None])
        error = np.reshape(estimate.standard_error, (8, 8)) * ratio
        assert np.all(np.abs(ratio.mean(axis=1) - 1) < 4 * np.sqrt(np.sum(error**2, axis=1)) / 8 + 1e-6)
        assert np.all(error < largest)
        assert not np.any(estimate.fell_back)


@pytest.mark.parametrize("chart", ["PullBack", "Endpoint"])
def test_an_amortised_proposal_starts_as_the_prior(chart, key):
    x = jnp.linspace(-1, 2, 64)[:, None]
    plain, amortised = (ESTIMATORS[f"{chart}-{name}"][0] for name in ("Prior", "Amortised"))
    same = ou().log_prob(x, key=key, estimator=plain)
    np.testing.assert_allclose(ou().log_prob(x, key=key, estimator=amortised), same, rtol=1e-12)
    shaken = ESTIMATORS[f"{chart}-Amortised-shaken"][0]
    assert np.all(np.abs(ou().log_prob(x, key=key, estimator=shaken) - same) > 1e-8)


@pytest.mark.slow
def test_ornstein_uhlenbeck_is_exact_but_for_truncation(key):
    """On a linear law every path has the same weight, in the tails too."""
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, rf.KarhunenLoeve(20))
    x = jnp.array([[0.1], [-2.0], [2.5]])
    estimate = flow.estimate(x, key=key, estimator=rf.Endpoint(num_paths=4))
    truth = ou_law(2.0, 1.3, 1.0, 0.5).logpdf(x)
    np.testing.assert_allclose(estimate.log_prob, truth, rtol=0, atol=2e-4)
    assert np.all(estimate.standard_error < 1e-8)
    np.testing.assert_allclose(estimate.effective_paths, 4, rtol=1e-8)
    assert estimate.warning is None


@pytest.mark.slow
def test_fewer_noises_than_dimensions(key):
    """OU in four dimensions with three noises: mean and covariance by matrix exponentials."""
    problem = ou_4d()
    flow = rf.StochasticFlow(problem.ito, problem.base, problem.t1, rf.KarhunenLoeve(12))
    covariance = np.diag(np.asarray(problem.base.scale) ** 2)
    truth = linear_law(OU4_DRIFT, OU4_NOISE, np.zeros(4), covariance, t1=problem.t1).logpdf(problem.x)
    log_prob = flow.log_prob(problem.x, key=key, estimator=rf.Endpoint(num_paths=2))
    np.testing.assert_allclose(log_prob, truth, rtol=0, atol=2e-3)


# ---------------------------------------------------------------------------------- nonlinear laws


def test_geometric_brownian_motion_from_a_base_on_half_of_space(key):
    """Lognormal for good, and in logarithms linear. Nothing reaches x < 0: density zero, and a warning."""
    base = LogNormal(jnp.array([0.2]), jnp.array([0.3]))
    flow = rf.StochasticFlow(gbm_1d(0.3, 0.6).ito, base, 1.0, THREE, integrator=FINE)
    x = jnp.array([[0.5], [1.5], [4.0], [-1.0]])
    estimate = flow.estimate(x, key=key, estimator=rf.Endpoint(8))
    truth = stats.lognorm.logpdf(x[:3, 0], np.sqrt(0.3**2 + 0.6**2), scale=np.exp(0.2 + 0.3 - 0.18))
    np.testing.assert_allclose(estimate.log_prob[:3], truth, rtol=0, atol=1e-6)
    assert np.all(estimate.standard_error[:3] < 1e-6)
    assert np.isneginf(estimate.log_prob[3])
    assert np.isinf(estimate.standard_error[3])
    np.testing.assert_array_equal(estimate.fell_back, [False, False, False, True])
    np.testing.assert_array_equal(estimate.suspect, [False, False, False, True])
    np.testing.assert_array_equal(estimate.escaped, [0, 0, 0, 8])
    assert "1 found no likeliest path and drew from the prior" in estimate.warning
    assert "\n" not in estimate.warning


@pytest.mark.slow
def test_correlated_geometric_brownian_motion_within_its_error_bars(key):
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
    estimate = flow.estimate(x, key=key)
    np.testing.assert_allclose(estimate.log_prob, exact, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(estimate.standard_error, 0)


def cir(base):
    """dX = κ(θ − X) dt + s √X dB over a month."""
    kappa, theta, s = CIR
    sde = rf.ItoSDE(lambda t, z: kappa * (theta - z), lambda t, z: s * jnp.sqrt(z)[:, None])
    return rf.StochasticFlow(sde, base, 1 / 12, rf.KarhunenLoeve(6))


CIR = (2.0, 0.06, 0.15)


@pytest.mark.slow
def test_cox_ingersoll_ross_from_a_base_on_half_of_space_stays_stationary(key):
    """From its stationary law, a gamma law, which the map from normal numbers only resembles."""
    kappa, theta, s = CIR
    shape, scale = 2 * kappa * theta / s**2, s**2 / (2 * kappa)
    flow = cir(LogNormal(jnp.log(jnp.array([theta])), jnp.array([shape**-0.5]), (shape, scale)))
    x = stats.gamma.ppf([0.1, 0.3, 0.5, 0.7, 0.9], shape, scale=scale)[:, None]
    estimate = flow.estimate(x, key=key, truncation=True)
    error = np.abs(estimate.log_prob - stats.gamma.logpdf(x[:, 0], shape, scale=scale))
    assert np.all(error < 3 * estimate.standard_error + estimate.truncation_error)
    assert np.all(estimate.standard_error + estimate.truncation_error < 0.05)


class Well(eqx.Module):
    """Drift (rate (x − x³), x − y)."""

    rate: jax.Array

    def __call__(self, t, z):
        return jnp.stack([self.rate * (z[0] - z[0] ** 3), z[0] - z[1]])


def no_commuting(t, z):
    rows = [[jnp.ones_like(z[0]), 0.5 * jnp.tanh(z[1])], [0.5 * jnp.sin(z[0]), jnp.ones_like(z[0])]]
    return jnp.stack([jnp.stack(row) for row in rows])


def double_well(rate=1.0, **settings):
    """Noise that does not commute; most backward paths escape."""
    return rf.StochasticFlow(
        rf.ItoSDE(Well(jnp.asarray(rate)), no_commuting), rf.Normal(jnp.zeros(2)), **settings
    )


@pytest.mark.slow
def test_double_well_keeps_its_paths_and_integrates_to_one(key):
    flow = double_well()
    points = jnp.array([[0.0, 0], [1, 1], [-1, 1], [2, -1], [2.2, 3]])
    estimate = flow.estimate(points, key=key)
    assert np.all(estimate.effective_paths > 0.3 * 64)
    side = np.linspace(-4.5, 4.5, 31)
    grid = jnp.asarray(np.stack(np.meshgrid(side, side, indexing="ij"), -1))
    # On finer steps than the default: eight leave an error of their own of this size.
    fine = eqx.tree_at(lambda f: f.integrator, flow, rf.FixedGrid(steps=16))
    density = np.exp(fine.log_prob(grid, key=key, estimator=rf.Endpoint(num_paths=128)))
    assert abs(density.sum() * (side[1] - side[0]) ** 2 - 1) < 0.01


@pytest.mark.slow
def test_pull_back_agrees_with_endpoint_where_it_can(key):
    flow = double_well()
    x = jnp.array([0.2, -0.3])
    plain = flow.estimate(x, key=key, estimator=rf.PullBack(num_paths=20_000))
    bent = flow.estimate(x, key=key, estimator=rf.Endpoint(num_paths=256))
    gap = abs(plain.log_prob - bent.log_prob)
    assert gap < 3 * np.hypot(plain.standard_error, bent.standard_error)
    assert plain.escaped > 0
    assert plain.effective_paths / 20_000 < bent.effective_paths / 256


@pytest.mark.slow
def test_sixty_four_dimensions(key):
    """The default there is a pull-back with random probes; a long run lies within its error bars."""
    drift, noise = rf.MLP(64, 64, 32, 2, scale=0.5, key=key), rf.ConstantDiffusion(0.5 * jnp.eye(64))
    flow = rf.StochasticFlow(
        rf.ItoSDE(drift, noise),
        rf.Normal(jnp.zeros(64)),
        driver=THREE,
        divergence=rf.HutchinsonDivergence(8),
    )
    x = flow.sample(key=key, shape=(4,))
    estimate = flow.estimate(x, key=key)
    assert np.all(estimate.num_paths == 64)
    long = flow.estimate(x, key=jax.random.key(1), estimator=rf.PullBack(2048, rf.Laplace()))
    gap = np.abs(estimate.log_prob - long.log_prob)
    assert np.all(gap < 3 * np.hypot(estimate.standard_error, long.standard_error))
    assert np.all(long.standard_error < 0.05)


# ---------------------------------------------------------------------------------- from a fixed start

LANGEVIN = np.array([[0.0, 1.0], [-2.0, -0.5]])
STARTS = np.array([[0.5, -1.0], [0.0, 0.0], [1.0, 2.0]])


def test_transition_density_of_langevin_dynamics_with_noise_in_the_velocity_only(key):
    """A start for each x; three functions of the driver reach both position and velocity."""
    noise = np.array([[0.0], [0.8]])
    laws = [linear_law(LANGEVIN, noise, start, np.zeros((2, 2)), THREE) for start in STARTS]
    x = np.stack([law.mean + np.linalg.cholesky(law.cov) @ [1.0, -0.5] for law in laws])
    estimator = rf.Endpoint(4, start=STARTS)
    estimate = linear(LANGEVIN, noise, rf.Normal(jnp.zeros(2))).estimate(x, key=key, estimator=estimator)
    truth = [law.logpdf(point) for law, point in zip(laws, x, strict=True)]
    np.testing.assert_allclose(estimate.log_prob, truth, rtol=0, atol=1e-6)
    assert np.all(estimate.standard_error < 1e-6)
    still = linear(LANGEVIN, 0 * noise, rf.Normal(jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"^[^\n]*rf\.PullBack[^\n]*$"):
        still.estimate(x, key=key, estimator=estimator)


@pytest.mark.parametrize("shape", [(), (1,), (3, 3)])
def test_a_start_of_the_wrong_shape_is_refused(shape, key):
    with pytest.raises(ValueError, match=r"^start must have shape \(\.\.\., 2\)[^\n]*$"):
        double_well().estimate(jnp.zeros((3, 2)), key=key, estimator=rf.Endpoint(start=jnp.zeros(shape)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "proposal", [rf.Laplace(), rf.Prior(), SHAKEN], ids=["Laplace", "Prior", "Amortised"]
)
def test_transition_density_of_ornstein_uhlenbeck(proposal, key):
    x, start = np.array([[0.1], [-1.0], [1.5]]), 0.7
    estimate = ou().estimate(x, key=key, estimator=rf.Endpoint(512, proposal, start=jnp.array([start])))
    truth = ou_law(mean=start, scale=0.0, driver=THREE).logpdf(x)
    assert np.all(np.abs(estimate.log_prob - truth) < 3 * estimate.standard_error + 1e-6)
    assert np.all(estimate.standard_error < (1e-6 if isinstance(proposal, rf.Laplace) else 0.1))


@pytest.mark.slow
def test_transition_density_of_cox_ingersoll_ross(key):
    """Against the noncentral chi-squared law."""
    kappa, theta, s = CIR
    decay = np.exp(-kappa / 12)
    c = 2 * kappa / (s**2 * (1 - decay))
    start = np.array([0.03, 0.06, 0.06, 0.1, 0.1])
    x = np.array([0.04, 0.05, 0.07, 0.09, 0.12])
    flow = cir(rf.Normal(jnp.array([theta]), 1e-3))
    estimator = rf.Endpoint(start=start[:, None])
    estimate = flow.estimate(x[:, None], key=key, estimator=estimator, truncation=True)
    law = stats.ncx2(4 * kappa * theta / s**2, 2 * c * start * decay)
    error = np.abs(estimate.log_prob - law.logpdf(2 * c * x) - np.log(2 * c))
    assert np.all(error < 3 * estimate.standard_error + estimate.truncation_error)
    assert np.all(estimate.standard_error + estimate.truncation_error < 0.05)


# -------------------------------------------------------------------- what the driver leaves out


def out_by(numbers, driver, estimator, key, **settings):
    """The estimate at points where truncation shows, and its error against the SDE's own law."""
    law = ou_law(*numbers)
    x = law.mean + np.linspace(-0.5, 0.5, 64)[:, None] * np.sqrt(law.cov[0, 0])
    estimate = ou(*numbers, driver=driver).estimate(x, key=key, estimator=estimator, **settings)
    return estimate, np.abs(estimate.log_prob - law.logpdf(x))


def test_truncation_error_bounds_what_the_driver_leaves_out(key):
    """And extrapolation by the order it falls with takes most of it away."""
    estimator = ESTIMATORS["PullBack-Laplace"][0]
    estimate, error = out_by((), THREE, estimator, key, truncation=True)
    assert np.all(error < estimate.truncation_error)
    assert np.all(estimate.truncation_error < 10 * error)
    better, left = out_by((), THREE, rf.Richardson(estimator, order=3), key, truncation=True)
    assert np.all(left < error / 5)
    assert np.all(left < better.truncation_error)


@pytest.mark.slow
def test_truncation_error_with_legendre_polynomials(key):
    estimate, error = out_by((2.0, 1.3, 1.0, 0.5), rf.Legendre(3), rf.Endpoint(4), key, truncation=True)
    assert np.all(error < estimate.truncation_error)
    assert np.all(estimate.truncation_error < 10 * error)


@pytest.mark.slow
def test_richardson_extrapolation_of_six_functions(key):
    numbers, six = (2.0, 1.3, 1.0, 0.5), rf.KarhunenLoeve(6)
    _, error = out_by(numbers, six, rf.Endpoint(4), key)
    _, left = out_by(numbers, six, rf.Richardson(rf.Endpoint(4), order=3), key)
    assert np.all(left < error / 30)


@pytest.mark.slow
def test_richardson_reports_the_error_of_what_it_returns(key):
    """The same x many times over, each with paths of its own: spread and standard error agree."""
    x = jnp.full((256, 1), 0.3)
    estimator = rf.Richardson(rf.PullBack(256), order=3)
    estimate = ou().estimate(x, key=key, estimator=estimator)
    assert 0.8 < np.std(estimate.log_prob) / np.mean(estimate.standard_error) < 1.25


def test_richardson_takes_no_tolerance(key):
    with pytest.raises(ValueError, match=r"^Richardson takes no tolerance"):
        ou().estimate(jnp.zeros(1), key=key, estimator=rf.Richardson(), tolerance=0.1)


# ---------------------------------------------------------------------------------- gradients


class Curved(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * jnp.tanh(z) - z


class Waves(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return (1 + 0.3 * jnp.sin(self.rate * z))[:, None]


def curved(rate):
    """A flow with a parameter in drift and noise."""
    sde = rf.ItoSDE(Curved(rate), Waves(rate))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=THREE)


def check_gradient(value):
    """The gradient of `value(rate, x)` in both arguments against central differences."""
    rate, x = jnp.array(0.5), jnp.array([[0.7], [-1.5]])
    d_rate, d_x = jax.grad(value, argnums=(0, 1))(rate, x)
    h, up = 1e-4, jnp.array([[1e-4], [0.0]])
    np.testing.assert_allclose(d_rate, (value(rate + h, x) - value(rate - h, x)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(d_x[0, 0], (value(rate, x + up) - value(rate, x - up)) / (2 * h), rtol=1e-6)


def test_pull_back_gradient(key):
    """With a proposal that itself depends on x, and so has a part in the gradient."""
    estimator = rf.PullBack(8, SHAKEN)
    check_gradient(lambda rate, x: jnp.sum(curved(rate).log_prob(x, key=key, estimator=estimator)))


def test_endpoint_gradient_goes_through_the_newton_solve(key):
    """With the proposal held where it is, as the estimator's own gradient holds it."""
    estimator = rf.Endpoint(4)
    sampler = Sampler(estimator, curved(jnp.array(0.5)), jnp.array([[0.7], [-1.5]]), key)
    noise = jax.random.normal(key, (2, 1, 4 + 6))
    delta = sampler.law.sample(noise)
    guess = sampler.law.guess(delta)[:, 0]

    @jax.jit
    def value(rate, x):
        flow = curved(rate)
        rows, target = sampler.law.rows, Target(x, None)
        return jnp.sum(estimator.log_joint(flow, Latent(flow), target, rows, delta[:, 0], guess, None))

    check_gradient(value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PullBack-Laplace", "Endpoint-Laplace"])
def test_gradient_around_the_likeliest_path_is_that_of_the_law(name, key):
    """On average: the proposal is held fixed, so that paths with equal weights have slopes that differ."""
    x, h = jnp.linspace(-1, 2, 64)[:, None], 1e-5
    value = lambda rate: ou(rate).log_prob(x, key=key, estimator=ESTIMATORS[name][0])
    slope = jax.jvp(value, (1.0,), (1.0,))[1]
    law = lambda rate: ou_law(rate, driver=THREE).logpdf(x)
    error = np.asarray(slope - (law(1 + h) - law(1 - h)) / (2 * h))
    assert abs(error.mean()) < 4 * error.std() / 8
    assert error.std() < 1


# ---------------------------------------------------------------------------------- escapes and failures


class Bistable(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * (z - z**3)


def test_paths_that_escape_have_weight_zero_and_leave_the_gradient_finite(key):
    """Half of the paths back from 1.3 in a double well go to infinity: they count as paths."""
    base, x = rf.Normal(jnp.zeros(1)), jnp.array([[0.3], [1.3]])
    flow = lambda rate: rf.StochasticFlow(rf.ItoSDE(Bistable(rate), rf.ConstantDiffusion(jnp.eye(1))), base)
    estimator = rf.PullBack(512)
    estimate = flow(jnp.array(1.0)).estimate(x, key=key, estimator=estimator)
    paths = flow(jnp.array(1.0)).sample_path(key=key, shape=(20_000, 1))
    given = np.exp(flow(jnp.array(1.0)).log_prob_given_path(x, paths))
    error = np.hypot(estimate.standard_error, given.std(axis=0) / given.mean(axis=0) / np.sqrt(20_000))
    assert np.all(np.abs(estimate.log_prob - np.log(given.mean(axis=0))) < 4 * error)
    share = np.mean(given == 0, axis=0)
    assert share[1] > 0.3
    np.testing.assert_allclose(estimate.escaped / 512, share, rtol=0, atol=0.08)
    value = lambda rate: jnp.sum(flow(rate).log_prob(x, key=key, estimator=estimator))
    slope, h = jax.grad(value)(jnp.array(1.0)), 1e-5
    np.testing.assert_allclose(
        slope, (value(jnp.array(1 + h)) - value(jnp.array(1 - h))) / (2 * h), rtol=1e-5
    )


@pytest.mark.parametrize("name", ["PullBack-Prior", "Endpoint-Prior", "PullBack-Laplace", "Endpoint-Laplace"])
def test_a_model_that_is_not_finite_is_an_error_of_one_line(name, key):
    x = jnp.linspace(-1, 2, 64)[:, None]
    with pytest.raises(rf.NonFiniteError, match=r"^[^\n]*drift[^\n]*$"):
        ou(np.nan).estimate(x, key=key, estimator=ESTIMATORS[name][0])


@pytest.mark.parametrize(
    "estimator",
    [rf.PullBack(2), pytest.param(rf.Endpoint(2), marks=pytest.mark.slow)],
    ids=["PullBack", "Endpoint"],
)
def test_running_out_of_steps_is_an_error_of_one_line(estimator, key):
    sde = ou().sde
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), 1.0, THREE, integrator=rf.Adaptive(max_steps=2))
    with pytest.raises(rf.OutOfStepsError, match=r"^[^\n]*max_steps[^\n]*$"):
        flow.estimate(jnp.zeros((1, 1)), key=key, estimator=estimator)


def test_points_that_cannot_be_asked_about_are_refused(key):
    for x, message in (
        (jnp.zeros((2, 2)), r"^x must have shape \(\.\.\., 1\)"),
        (jnp.array([[jnp.nan]]), "^x has a value that is not finite"),
        (jnp.zeros((0, 1)), "^x holds no points"),
    ):
        with pytest.raises(ValueError, match=message):
            ou().estimate(x, key=key)


# ---------------------------------------------------------------------------------- more paths, in chunks


@pytest.fixture
def one_by_one(monkeypatch):
    """Sixty-four paths of one point at a time, so that any number of them share a compilation."""
    monkeypatch.setattr("roughflow.density._sampler.PAIRS", 64)


POINTS = np.array([[0.4], [-0.7], [1.3]])


def test_a_tolerance_is_met_by_more_paths_where_they_are_needed(one_by_one, key):
    estimate = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=0.05)
    assert np.all(estimate.standard_error <= 0.05)
    assert not np.any(estimate.unmet)
    assert estimate.warning is None
    assert len(set(estimate.num_paths.tolist())) > 1
    error = np.abs(estimate.log_prob - ou_law(driver=THREE).logpdf(POINTS))
    assert np.all(error < 4 * estimate.standard_error)
    # The paths added are those that come next: as many at once would have been the same.
    most = int(np.argmax(estimate.num_paths))
    at_once = ou().estimate(POINTS, key=key, estimator=rf.PullBack(int(estimate.num_paths[most])))
    np.testing.assert_allclose(estimate.log_prob[most], at_once.log_prob[most], rtol=1e-12)
    np.testing.assert_allclose(estimate.standard_error[most], at_once.standard_error[most], rtol=1e-10)


def test_a_tolerance_that_is_met_at_once_changes_nothing(one_by_one, key):
    plain = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64))
    easy = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=10.0)
    jax.tree.map(np.testing.assert_array_equal, plain, easy)


def test_a_tolerance_that_is_not_met_warns(one_by_one, key):
    estimate = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=1e-3, max_paths=200)
    assert np.all(estimate.unmet)
    assert np.all(estimate.suspect)
    np.testing.assert_array_equal(estimate.num_paths, 192)
    assert "3 did not meet the tolerance within max_paths" in estimate.warning
    assert "\n" not in estimate.warning


def test_a_tolerance_is_refused_where_there_are_no_values(one_by_one, key):
    ask = lambda x: ou().estimate(x, key=key, estimator=rf.PullBack(64), tolerance=0.1).log_prob
    with pytest.raises(ValueError, match=r"^tolerance needs values"):
        jax.eval_shape(ask, POINTS[:1])
    for wrong in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"^tolerance must be positive"):
            ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=wrong)


def test_a_poor_estimate_warns(one_by_one, key):
    """Far in the tail, with a narrow start, one path carries all the weight."""
    estimate = ou(scale=0.01).estimate(np.array([[5.0]]), key=key, estimator=rf.PullBack(64))
    assert np.all(estimate.suspect)
    assert re.match(r"^of 1 estimates, 1 rest on fewer than 5 effective paths \(.*: .*$", estimate.warning)
    assert estimate.effective_paths < 5


@pytest.mark.parametrize("pairs", [3, 10])
def test_chunks_do_not_change_the_numbers(pairs, key, monkeypatch):
    """Chunks of paths and of points; probes are random too."""
    flow = double_well(driver=THREE, divergence=rf.HutchinsonDivergence())
    x = jnp.array([[0.2, -0.3], [1.0, 0.5], [-0.5, 0.0]])
    whole = flow.log_prob(x, key=key, estimator=rf.PullBack(5))
    assert np.all(np.isfinite(whole))
    monkeypatch.setattr("roughflow.density._sampler.PAIRS", pairs)
    np.testing.assert_allclose(flow.log_prob(x, key=key, estimator=rf.PullBack(5)), whole, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draws", [rf.Independent(), rf.Antithetic(), rf.Sobol(2)], ids=lambda d: type(d).__name__
)
def test_chunks_do_not_change_the_numbers_of_endpoint(draws, key, monkeypatch):
    estimator = rf.Endpoint(4, rf.Laplace(draws=draws))
    x = jnp.array([[0.2], [1.0], [-0.5]])
    whole = curved(jnp.array(0.5)).log_prob(x, key=key, estimator=estimator)
    for pairs in (3, 8):
        monkeypatch.setattr("roughflow.density._sampler.PAIRS", pairs)
        again = curved(jnp.array(0.5)).log_prob(x, key=key, estimator=estimator)
        np.testing.assert_allclose(again, whole, rtol=1e-12)


# ---------------------------------------------------------------------------------- float32

SINGLE = """
import jax, jax.numpy as jnp, numpy as np
import roughflow as rf
from problems import ou, ou_law
x = jnp.array([[0.1], [-1.0], [2.0]])
estimate = ou().estimate(x, key=jax.random.key(0), estimator=rf.Endpoint(16))
assert estimate.log_prob.dtype == "float32" and estimate.standard_error.dtype == "float32"
print(np.max(np.abs(estimate.log_prob - ou_law(driver=ou().driver).logpdf(x))))
"""


@pytest.mark.slow
def test_single_precision():
    """In a process of its own, for this one has double precision switched on."""
    done = subprocess.run([sys.executable, "-c", SINGLE], capture_output=True, text=True, cwd=__file__[:-16])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-3


@pytest.mark.parametrize("dimension", [2, 10])
def test_no_lapack_where_two_calls_could_wait_for_each_other(dimension, key):
    """Two batched LAPACK calls at once can stop a CPU with few cores for ever; see `_linear`."""
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(dimension))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(dimension)), driver=THREE)
    x = jnp.zeros((4, dimension))
    for estimator in (rf.Endpoint(2), rf.PullBack(2, rf.Laplace())):
        program = jax.jit(lambda x, e=estimator: flow.log_prob(x, key=key, estimator=e)).lower(x).as_text()
        assert "lapack" not in program
        assert "while" in program
