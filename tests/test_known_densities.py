"""log p(x) with error bars, for SDEs whose density is known."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    AMORTISED,
    ESTIMATORS,
    GBM2_NOISE,
    GBM2_RATE,
    OU4_DRIFT,
    OU4_NOISE,
    SHAKEN,
    THREE,
    LogNormal,
    double_well,
    gbm_1d,
    gbm_2d,
    linear,
    linear_distribution,
    ou,
    ou_1d,
    ou_4d,
    ou_distribution,
)
from roughflow.density.surface import Latent
from scipy import stats

import roughflow as rf

FINE = rf.FixedGrid(rf.RK4(), steps=64)


# ------------------------------------------------------------------------------------- linear SDEs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "Tempered")) for n in ESTIMATORS]
)
def test_every_estimator_finds_the_distribution_of_a_linear_sde(name, key):
    """Truncated as the driver truncates it. Eight estimates at each of eight points, pooled."""
    estimator, largest = ESTIMATORS[name]
    for numbers in ((1.0, 1.2, 1.0, 0.5), (0.5, 0.8, -0.5, 1.0)):
        distribution = ou_distribution(*numbers, driver=THREE)
        x = distribution.mean + np.linspace(-1.75, 1.75, 8)[:, None] * np.sqrt(distribution.cov[0, 0])
        x8 = np.repeat(x, 8, axis=0)
        estimate = ou(*numbers).estimate(x8, key=key, estimator=estimator, solver=False)
        gap = np.reshape(estimate.log_prob, (8, 8)) - distribution.logpdf(x)[:, None]
        error = np.reshape(estimate.standard_error, (8, 8))
        assert np.all(np.abs(gap.mean(axis=1)) < 4 * np.sqrt(np.sum(error**2, axis=1)) / 8 + 1e-6)
        assert np.all(error < largest)
        assert not np.any(estimate.fell_back)


def test_an_amortised_proposal_starts_as_the_prior(key):
    """And no longer is when something has trained it."""
    omega = jax.random.normal(key, (5, 7, 3))
    mixture = lambda proposal: proposal.distribution(
        Latent(ou()), jnp.linspace(-1, 2, 5)[:, None], None, None
    )
    normal = np.sum(stats.norm.logpdf(omega), axis=-1)
    np.testing.assert_allclose(mixture(AMORTISED).log_prob(omega), normal, rtol=1e-12)
    assert np.all(np.abs(mixture(SHAKEN).log_prob(omega) - normal) > 1e-8)


@pytest.mark.slow
def test_ornstein_uhlenbeck_is_exact_but_for_truncation(key):
    """On a linear SDE every path has the same weight, in the tails too."""
    problem = ou_1d()
    fine = rf.FixedGrid(steps=256)
    flow = rf.StochasticFlow(problem.ito, problem.base, 1.0, rf.KarhunenLoeve(20), integrator=fine)
    x = jnp.array([[0.1], [-2.0], [2.5]])
    estimate = flow.estimate(x, key=key, estimator=rf.Tempered(num_paths=4))
    truth = ou_distribution(2.0, 1.3, 1.0, 0.5).logpdf(x)
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
    truth = linear_distribution(OU4_DRIFT, OU4_NOISE, np.zeros(4), covariance, t1=problem.t1).logpdf(
        problem.x
    )
    log_prob = flow.log_prob(problem.x, key=key, estimator=rf.Tempered(num_paths=2))
    np.testing.assert_allclose(log_prob, truth, rtol=0, atol=2e-3)


# ---------------------------------------------------------------------------------- nonlinear SDEs


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [rf.Tempered(8), rf.Endpoint(8)], ids=["Tempered", "Endpoint"])
def test_geometric_brownian_motion_from_a_base_on_half_of_space(estimator, key):
    """Lognormal for good, and in logarithms linear. Nothing reaches x < 0: density zero, and a warning."""
    base = LogNormal(jnp.array([0.2]), jnp.array([0.3]))
    flow = rf.StochasticFlow(gbm_1d(0.3, 0.6).ito, base, 1.0, THREE, integrator=FINE)
    x = jnp.array([[0.5], [1.5], [4.0], [-1.0]])
    estimate = flow.estimate(x, key=key, estimator=estimator)
    truth = stats.lognorm.logpdf(x[:3, 0], np.sqrt(0.3**2 + 0.6**2), scale=np.exp(0.2 + 0.3 - 0.18))
    assert np.all(np.abs(estimate.log_prob[:3] - truth) < estimate.total_error[:3])
    assert np.all(estimate.total_error[:3] < 1e-5)
    assert np.isneginf(estimate.log_prob[3])
    assert np.isinf(estimate.standard_error[3])
    np.testing.assert_array_equal(estimate.suspect, [False, False, False, True])
    lost = [0, 0, 0, 8]
    if estimator.searches:
        np.testing.assert_array_equal(estimate.fell_back, [False, False, False, True])
        np.testing.assert_array_equal(estimate.unfound, lost)
        assert "1 found no likely path" in estimate.warning
    else:
        np.testing.assert_array_equal(estimate.tempered, [False, False, False, True])
        np.testing.assert_array_equal(estimate.escaped, lost)
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
    """From its stationary distribution, a gamma, which the map from normal numbers only resembles."""
    kappa, theta, s = CIR
    shape, scale = 2 * kappa * theta / s**2, s**2 / (2 * kappa)
    flow = cir(LogNormal(jnp.log(jnp.array([theta])), jnp.array([shape**-0.5]), (shape, scale)))
    x = stats.gamma.ppf([0.1, 0.3, 0.5, 0.7, 0.9], shape, scale=scale)[:, None]
    estimate = flow.estimate(x, key=key, truncation=True, estimator=rf.Tempered(8192))
    error = np.abs(estimate.log_prob - stats.gamma.logpdf(x[:, 0], shape, scale=scale))
    assert np.all(error < 3 * estimate.standard_error + estimate.truncation_error)
    assert np.all(estimate.standard_error + estimate.truncation_error < 0.02)


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
    """The divergence is exact, whatever the flow trains with; a long run lies within the error bars."""
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
    flow = eqx.tree_at(lambda f: f.divergence, flow, rf.ExactDivergence())
    long = flow.estimate(x, key=jax.random.key(1), estimator=rf.PullBack(2048, rf.Laplace()))
    gap = np.abs(estimate.log_prob - long.log_prob)
    assert np.all(gap < 3 * np.hypot(estimate.standard_error, long.standard_error))
    assert np.all(long.standard_error < 0.05)


# ---------------------------------------------------------------------------------- several bundles of paths


def right_or_suspect(estimate, truth):
    """Within three total errors wherever it is to be trusted, which is most of the time, and of some use."""
    gap, trusted = np.abs(estimate.log_prob - truth), ~np.asarray(estimate.suspect)
    assert np.all(gap[trusted] < 3 * estimate.total_error[trusted])
    assert np.mean(trusted) > 0.5
    assert np.all(estimate.total_error[trusted] < 0.5)


def two_bundles(x1, x2):
    """log p(x₁, x₂) of dZ₁ = dB₁, dZ₂ = 3Z₁² dt + 0.3 dB₂ from N(0, 0.1²) on six functions.

    Z₁(1) = z + ω₀ is normal; given that it is x₁, Z₁(t) = z + (x₁ − z)t + Σ ωₖ √2 sin(kπt)/(kπ), and given
    all that Z₂(1) is normal: a mean over z and ω₁, …, ω₅.
    """
    rng, count, wider = np.random.default_rng(0), 200_000, 2.5
    nodes, weights = np.polynomial.legendre.leggauss(32)
    t = (nodes + 1) / 2
    z = rng.normal(x1 * 0.01 / 1.01, 0.1 / np.sqrt(1.01), (count, 1))
    omega = rng.normal(size=(count, 5))
    omega[:, 0] *= wider  # most of the way out and back
    ratio = wider * np.exp(0.5 * omega[:, 0] ** 2 * (wider**-2 - 1))
    waves = np.pi * np.arange(1, 6)[:, None]
    path = z + (x1 - z) * t + omega @ (np.sqrt(2) * np.sin(waves * t) / waves)
    given = ratio * stats.norm.pdf(x2, 1.5 * path**2 @ weights, np.sqrt(0.01 + 0.09))
    assert given.std() / given.mean() / np.sqrt(count) < 0.01
    return np.log(given.mean()) + stats.norm.logpdf(x1, 0, np.sqrt(1.01))


@pytest.mark.slow
def test_the_default_sees_both_bundles_of_paths(key):
    """To be high, Z₁ must have gone far to either side and come back. Four estimates of each point."""
    drift = lambda t, z: jnp.stack([jnp.zeros_like(z[0]), 3 * z[0] ** 2])
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(jnp.diag(jnp.array([1.0, 0.3]))))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2), 0.1))
    x = np.array([[0.0, 1.0], [0.0, 3.0]])
    truth = np.array([two_bundles(*point) for point in x])
    np.testing.assert_allclose(truth[0], -2.1698, atol=0.01)
    estimate = flow.estimate(np.repeat(x, 4, axis=0), key=key)
    right_or_suspect(estimate, np.repeat(truth, 4))


def test_the_default_on_an_sde_that_explodes(key):
    """dZ = 2Z³ dt + ½ dB on two functions: p(x) is an integral over two coefficients, here over a grid."""
    sde = rf.ItoSDE(lambda t, z: 2 * z**3, rf.ConstantDiffusion(0.5 * jnp.eye(1)))
    flow = rf.StochasticFlow(
        sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2), integrator=rf.FixedGrid(steps=32)
    )
    x = np.array([[0.5], [1.5], [3.0]])
    side = np.linspace(-8, 8, 81)
    nodes = np.stack(np.meshgrid(side, side, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    path = flow.driver.path(jnp.asarray(nodes), flow.t1)
    given = np.asarray(flow.log_prob_given_path(x[:, None], path))
    given = given + np.sum(stats.norm.logpdf(nodes), axis=(1, 2))
    truth = np.log(np.sum(np.exp(given), axis=1)) + 2 * np.log(side[1] - side[0])
    np.testing.assert_allclose(truth, [-1.9648, -4.1397, -6.1766], rtol=0, atol=1e-3)
    estimate = flow.estimate(np.repeat(x, 4, axis=0), key=key)
    right_or_suspect(estimate, np.repeat(truth, 4))


@pytest.mark.slow
def test_random_probes_are_for_training_only(key):
    """In twenty dimensions the default takes the divergence exactly; a pull-back says what probes add."""
    rng = np.random.default_rng(0)
    drift, noise = 0.6 * rng.normal(size=(20, 20)) / np.sqrt(20) - 0.5 * np.eye(20), 0.5 * np.eye(20)
    flow = linear(drift, noise, rf.Normal(jnp.zeros(20)))
    flow = eqx.tree_at(lambda f: f.divergence, flow, rf.HutchinsonDivergence(1))
    distribution = linear_distribution(drift, noise, np.zeros(20), np.eye(20), THREE)
    x = distribution.rvs(2, random_state=1)
    estimate = flow.estimate(x, key=key, estimator=rf.Tempered(4))
    np.testing.assert_allclose(estimate.log_prob, distribution.logpdf(x), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(estimate.divergence_error, 0)
    probed = flow.estimate(x, key=key, estimator=rf.PullBack(16))
    assert np.all(probed.divergence_error > 0.01)
    assert np.all(probed.total_error > probed.divergence_error)


# ---------------------------------------------------------------------------------- from a fixed start

LANGEVIN = np.array([[0.0, 1.0], [-2.0, -0.5]])
STARTS = np.array([[0.5, -1.0], [0.0, 0.0], [1.0, 2.0]])


@pytest.mark.slow
def test_transition_density_of_langevin_dynamics_with_noise_in_the_velocity_only(key):
    """A start for each x; three functions of the driver reach both position and velocity."""
    noise = np.array([[0.0], [0.8]])
    known = [linear_distribution(LANGEVIN, noise, start, np.zeros((2, 2)), THREE) for start in STARTS]
    x = np.stack([one.mean + np.linalg.cholesky(one.cov) @ [1.0, -0.5] for one in known])
    estimator = rf.Endpoint(4, start=STARTS)
    estimate = linear(LANGEVIN, noise, rf.Normal(jnp.zeros(2))).estimate(x, key=key, estimator=estimator)
    truth = [one.logpdf(point) for one, point in zip(known, x, strict=True)]
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
@pytest.mark.parametrize("proposal", [rf.Laplace(), rf.Prior()], ids=["Laplace", "Prior"])
def test_transition_density_of_ornstein_uhlenbeck(proposal, key):
    x, start = np.array([[0.1], [-1.0], [1.5]]), 0.7
    estimate = ou().estimate(x, key=key, estimator=rf.Endpoint(512, proposal, start=jnp.array([start])))
    truth = ou_distribution(mean=start, scale=0.0, driver=THREE).logpdf(x)
    assert np.all(np.abs(estimate.log_prob - truth) < 3 * estimate.standard_error + 1e-6)
    assert np.all(estimate.standard_error < (1e-6 if isinstance(proposal, rf.Laplace) else 0.1))


@pytest.mark.slow
def test_transition_density_of_cox_ingersoll_ross(key):
    """Against the noncentral chi-squared distribution."""
    kappa, theta, s = CIR
    decay = np.exp(-kappa / 12)
    c = 2 * kappa / (s**2 * (1 - decay))
    start = np.array([0.03, 0.06, 0.06, 0.1, 0.1])
    x = np.array([0.04, 0.05, 0.07, 0.09, 0.12])
    flow = cir(rf.Normal(jnp.array([theta]), 1e-3))
    estimator = rf.Endpoint(start=start[:, None])
    estimate = flow.estimate(x[:, None], key=key, estimator=estimator, truncation=True)
    distribution = stats.ncx2(4 * kappa * theta / s**2, 2 * c * start * decay)
    error = np.abs(estimate.log_prob - distribution.logpdf(2 * c * x) - np.log(2 * c))
    assert np.all(error < 3 * estimate.standard_error + estimate.truncation_error)
    assert np.all(estimate.standard_error + estimate.truncation_error < 0.05)


# -------------------------------------------------------------------- what the driver leaves out


def out_by(numbers, driver, estimator, key, **settings):
    """The estimate at points where truncation shows, and its error against the SDE's own distribution."""
    distribution = ou_distribution(*numbers)
    x = distribution.mean + np.linspace(-0.5, 0.5, 64)[:, None] * np.sqrt(distribution.cov[0, 0])
    estimate = ou(*numbers, driver=driver).estimate(x, key=key, estimator=estimator, **settings)
    return estimate, np.abs(estimate.log_prob - distribution.logpdf(x))


def test_truncation_error_bounds_what_the_driver_leaves_out(key):
    """And extrapolation by the order it falls with takes most of it away; where it is large that is told."""
    estimator = ESTIMATORS["PullBack-Laplace"][0]
    estimate, error = out_by((), THREE, estimator, key, truncation=True, solver=False)
    assert np.all(error < estimate.truncation_error)
    assert np.all(estimate.truncation_error < 10 * error)
    assert estimate.warning is None
    faster, _ = out_by((12.0,), THREE, estimator, key, truncation=True, solver=False)
    large = np.asarray(faster.truncation_error) > 0.5
    assert large.any()
    np.testing.assert_array_equal(faster.suspect, large)
    assert faster.warning.startswith(f"of 64 estimates, {large.sum()} depend on the driver's functions")
    _, left = out_by((), THREE, rf.Richardson(estimator, order=3), key, solver=False)
    assert np.all(left < error / 5)


@pytest.mark.slow
def test_truncation_error_of_what_richardson_returns(key):
    richardson = rf.Richardson(ESTIMATORS["PullBack-Laplace"][0], order=3)
    better, left = out_by((), THREE, richardson, key, truncation=True, solver=False)
    assert np.all(left < better.truncation_error)


@pytest.mark.slow
def test_truncation_error_with_legendre_polynomials(key):
    estimate, error = out_by((2.0, 1.3, 1.0, 0.5), rf.Legendre(3), rf.Tempered(4), key, truncation=True)
    assert np.all(error < estimate.truncation_error)
    assert np.all(estimate.truncation_error < 10 * error)


@pytest.mark.slow
def test_richardson_extrapolation_of_six_functions(key):
    numbers, six = (2.0, 1.3, 1.0, 0.5), rf.KarhunenLoeve(6)
    _, error = out_by(numbers, six, rf.Tempered(4), key)
    _, left = out_by(numbers, six, rf.Richardson(rf.Tempered(4), order=3), key)
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
