"""log p(x) with error bars, for SDEs whose density is known."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fokker_planck import evolved, log_density_at
from problems import (
    AMORTISED,
    ESTIMATORS,
    GBM2_NOISE,
    GBM2_RATE,
    OU4_DRIFT,
    OU4_NOISE,
    ROTATION,
    SHAKEN,
    THREE,
    LogNormal,
    gbm_2d,
    linear,
    linear_distribution,
    ou,
    ou_4d,
    ou_distribution,
    right_or_suspect,
    turned,
)
from scipy import special, stats

import roughflow as rf

# ------------------------------------------------------------------------------------- linear SDEs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "PullBack-Sobol")) for n in ESTIMATORS]
)
def test_every_estimator_finds_the_distribution_of_a_linear_sde(name, key):
    """Truncated as the driver truncates it. Eight estimates at each of four points, pooled."""
    estimator, largest = ESTIMATORS[name]
    for numbers in ((1.0, 1.2, 1.0, 0.5), (0.5, 0.8, -0.5, 1.0)):
        distribution = ou_distribution(*numbers, driver=THREE)
        x = distribution.mean + np.linspace(-1.75, 1.75, 4)[:, None] * np.sqrt(distribution.cov[0, 0])
        estimate = ou(*numbers).estimate(np.repeat(x, 8, axis=0), key=key, estimator=estimator)
        gap = np.reshape(estimate.log_prob, (4, 8)) - distribution.logpdf(x)[:, None]
        error = np.reshape(estimate.standard_error, (4, 8))
        assert np.all(np.abs(gap.mean(axis=1)) < 4 * np.sqrt(np.sum(error**2, axis=1)) / 8 + 1e-6)
        assert np.all(np.sqrt(np.mean(error**2, axis=1)) < largest)


def test_an_amortised_proposal_starts_as_the_prior(key):
    """And no longer is when something has trained it."""
    omega = jax.random.normal(key, (5, 7, 3))
    x = jnp.linspace(-1, 2, 5)[:, None]
    log_prob = jax.jit(lambda proposal: proposal.distribution(ou(), x, None).log_prob(omega))
    normal = np.sum(stats.norm.logpdf(omega), axis=-1)
    np.testing.assert_allclose(log_prob(AMORTISED), normal, rtol=1e-12)
    assert np.all(np.abs(log_prob(SHAKEN) - normal) > 1e-8)


@pytest.mark.slow
def test_the_default_on_a_linear_sde_with_fewer_noises_than_dimensions(key):
    """Four dimensions, three noises, in the bulk and six deviations out: paths, then modes, to 0.02."""
    problem = ou_4d()
    flow = rf.StochasticFlow(problem.ito, problem.base, problem.t1)
    covariance = np.diag(np.asarray(problem.base.scale) ** 2)
    truth = linear_distribution(OU4_DRIFT, OU4_NOISE, np.zeros(4), covariance, t1=problem.t1)
    far = 6 * np.linalg.cholesky(truth.cov) @ [0.5, -0.5, 0.5, 0.5]
    x = np.concatenate([problem.x, [far]])
    estimate = flow.estimate(x, key=key)
    right_or_suspect(estimate, truth.logpdf(x), trusted=1.0, largest=0.03)
    assert estimate.method[-1] == "modes"


# ---------------------------------------------------------------------------------- nonlinear SDEs


@pytest.mark.slow
def test_geometric_brownian_motion_from_a_base_on_half_of_space(key):
    """Lognormal for good, and in logarithms linear. Nothing reaches x < 0: density zero, and a warning."""
    base = LogNormal(jnp.array([0.2]), jnp.array([0.3]))
    sde = rf.ItoSDE(lambda t, z: 0.3 * z, lambda t, z: 0.6 * z[:, None])
    x = np.array([[0.5], [1.5], [4.0], [-1.0]])
    estimate = rf.StochasticFlow(sde, base).estimate(x, key=key)
    truth = stats.lognorm.logpdf(x[:, 0], np.sqrt(0.3**2 + 0.6**2), scale=np.exp(0.2 + 0.3 - 0.18))
    assert np.all(np.abs(estimate.log_prob - truth)[:3] < 3 * estimate.total_error[:3])
    assert np.isneginf(estimate.log_prob[3])
    np.testing.assert_array_equal(estimate.suspect, [False, False, False, True])


@pytest.mark.slow
def test_correlated_geometric_brownian_motion_within_its_error_bars(key):
    """log Z_T = log Z₀ + normal: p by a sum over the start, by Gauss's rule."""
    problem = gbm_2d()
    base = rf.Normal(jnp.array([1.0, 2.0]), 0.05)
    flow = rf.StochasticFlow(problem.ito, base, 1.0)
    shift = GBM2_RATE - 0.5 * np.sum(GBM2_NOISE**2, axis=1)
    covariance = GBM2_NOISE @ GBM2_NOISE.T
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    start = np.stack(np.meshgrid(1 + 0.05 * nodes, 2 + 0.05 * nodes, indexing="ij"), -1).reshape(-1, 2)
    weight = np.outer(weights, weights).ravel() / np.sum(weights) ** 2
    x = np.array([[1.2, 1.5], [0.5, 1.0]])
    given = [stats.multivariate_normal.logpdf(np.log(p / start) - shift, [0, 0], covariance) for p in x]
    truth = np.log(np.exp(given) @ weight) - np.sum(np.log(x), axis=1)
    right_or_suspect(flow.estimate(x, key=key), truth, trusted=1.0, largest=0.05)


def test_without_noise_it_is_the_continuous_normalizing_flow(key):
    drift = rf.MLP(2, 2, 8, 2, key=key)
    flow = rf.StochasticFlow(
        rf.ItoSDE(drift, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)), integrator=rf.FixedGrid(steps=40)
    )
    x = jax.random.normal(key, (3, 2))
    exact = flow.log_prob_given_path(x, flow.sample_path(key=key))
    estimate = flow.estimate(x, key=key)
    np.testing.assert_allclose(estimate.log_prob, exact, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(estimate.standard_error, 0)
    assert np.all(estimate.method == "exact")
    np.testing.assert_allclose(jax.jit(lambda x: flow.log_prob(x, key=key))(x), exact, atol=1e-7)


CIR = (2.0, 0.06, 0.15)


@pytest.mark.slow
def test_cox_ingersoll_ross_stays_stationary(key):
    """dX = κ(θ − X) dt + s √X dB over a month, from its stationary distribution, a gamma, which the map from
    normal numbers only resembles."""
    kappa, theta, s = CIR
    shape, scale = 2 * kappa * theta / s**2, s**2 / (2 * kappa)
    base = LogNormal(jnp.log(jnp.array([theta])), jnp.array([shape**-0.5]), (shape, scale))
    sde = rf.ItoSDE(lambda t, z: kappa * (theta - z), lambda t, z: s * jnp.sqrt(z)[:, None])
    x = stats.gamma.ppf([0.1, 0.3, 0.5, 0.7, 0.9], shape, scale=scale)[:, None]
    estimate = rf.StochasticFlow(sde, base, 1 / 12).estimate(x, key=key)
    truth = stats.gamma.logpdf(x[:, 0], shape, scale=scale)
    right_or_suspect(estimate, truth, trusted=1.0, largest=0.05)


class Sinh(eqx.Module):
    """R sinh(N(0, ½²)) in three dimensions."""

    def from_normal(self, u):
        return jnp.asarray(ROTATION) @ jnp.sinh(0.5 * u)

    def sample(self, *, key, shape=()):
        return jnp.sinh(0.5 * jax.random.normal(key, (*shape, 3))) @ jnp.asarray(ROTATION).T

    def log_prob(self, z):
        u = jnp.asarray(ROTATION).T @ z
        return jnp.sum(jax.scipy.stats.norm.logpdf(jnp.arcsinh(u), 0, 0.5) - 0.5 * jnp.log1p(u**2))


@pytest.mark.slow
def test_noise_that_depends_on_the_state_in_three_dimensions(key):
    """U = sinh Y, dY = −Y dt + dB: by Itô's formula dU = (U/2 − Y cosh Y) dt + cosh Y dB, Y = arsinh U."""
    u = np.array([[0.0, 0.5, -1], [2.0, 0.0, 1.0], [-1.0, 3.0, 0.3]])
    drift = lambda u: 0.5 * u - jnp.arcsinh(u) * jnp.sqrt(1 + u**2)
    flow, x = turned(drift, lambda u: jnp.sqrt(1 + u**2), u, Sinh())
    variance = 0.25 * np.exp(-2) + 0.5 * (1 - np.exp(-2))
    truth = np.sum(stats.norm.logpdf(np.arcsinh(u), 0, variance**0.5) - 0.5 * np.log1p(u**2), axis=1)
    right_or_suspect(flow.estimate(x, key=key), truth)


class Bumps(eqx.Module):
    """A mixture of two normal distributions in three dimensions."""

    def log_prob(self, z):
        logs = [jax.scipy.stats.norm.logpdf(z, m).sum() for m in (-1.0, 1.0)]
        return jnp.logaddexp(*logs) - jnp.log(2.0)

    def sample(self, *, key, shape=()):
        one, two = jax.random.split(key)
        side = 2.0 * jax.random.bernoulli(one, shape=(*shape, 1)) - 1
        return side + jax.random.normal(two, (*shape, 3))


@pytest.mark.slow
def test_langevin_dynamics_stay_where_they_are(key):
    """Of a distribution with two modes, from itself."""
    sde = rf.overdamped_langevin(Bumps().log_prob, 3)
    x = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [-2.0, 0.0, 1.0]])
    truth = jax.vmap(Bumps().log_prob)(x)
    right_or_suspect(rf.StochasticFlow(sde, Bumps()).estimate(x, key=key), truth, trusted=1.0, largest=0.1)


@pytest.mark.slow
def test_sixty_four_dimensions(key):
    """The divergence is exact, whatever the flow trains with: a linear SDE, turned by its matrix."""
    rng = np.random.default_rng(0)
    drift, noise = 0.6 * rng.normal(size=(64, 64)) / 8 - 0.5 * np.eye(64), 0.5 * np.eye(64)
    flow = linear(drift, noise, rf.Normal(jnp.zeros(64)))
    flow = eqx.tree_at(lambda f: f.divergence, flow, rf.HutchinsonDivergence(1))
    distribution = linear_distribution(drift, noise, np.zeros(64), np.eye(64))
    x = distribution.rvs(2, random_state=1)
    estimate = flow.estimate(x, key=key)
    right_or_suspect(estimate, distribution.logpdf(x), trusted=1.0, largest=0.1)


# ---------------------------------------------------------------------------------- several bundles of paths


def two_bundles(x1, x2, functions=24):
    """log p(x₁, x₂) of dZ₁ = dB₁, dZ₂ = 3Z₁² dt + 0.3 dB₂ from N(0, 0.1²), within 0.01.

    Z₁(1) = z + ω₀ is normal; given that it is x₁, Z₁(t) = z + (x₁ − z)t + Σ ωₖ √2 sin(kπt)/(kπ), and given
    all that Z₂(1) is normal: a mean over z and ω₁, ω₂, … Of the functions left out, the mean of ω² stays.
    """
    rng, count, wider = np.random.default_rng(0), 100_000, 2.5
    nodes, weights = np.polynomial.legendre.leggauss(80)
    t = (nodes + 1) / 2
    z = rng.normal(x1 * 0.01 / 1.01, 0.1 / np.sqrt(1.01), (count, 1))
    omega = rng.normal(size=(count, functions))
    omega[:, 0] *= wider  # most of the way out and back
    ratio = wider * np.exp(0.5 * omega[:, 0] ** 2 * (wider**-2 - 1))
    waves = np.pi * np.arange(1, functions + 1)[:, None]
    path = z + (x1 - z) * t + omega @ (np.sqrt(2) * np.sin(waves * t) / waves)
    rest = 3 * (1 / 6 - np.sum(1 / waves**2))
    given = ratio * stats.norm.pdf(x2, 1.5 * path**2 @ weights + rest, np.sqrt(0.01 + 0.09))
    assert given.std() / given.mean() / np.sqrt(count) < 0.015
    return np.log(given.mean()) + stats.norm.logpdf(x1, 0, np.sqrt(1.01))


@pytest.mark.slow
def test_the_default_sees_both_bundles_of_paths(key):
    """To be high, Z₁ must have gone far to either side and come back; an estimate that misses one side is too
    low by log 2. A third coordinate of its own keeps grids away. Four estimates of each point."""
    drift = lambda t, z: jnp.stack([jnp.zeros_like(z[0]), 3 * z[0] ** 2, -z[2]])
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(jnp.diag(jnp.array([1.0, 0.3, 1.0]))))
    x = np.array([[0.0, 1.0, 0.2], [0.0, 3.0, -0.5]])
    spread = np.sqrt(0.01 * np.exp(-2) + 0.5 * (1 - np.exp(-2)))
    truth = np.array([two_bundles(*p[:2]) for p in x]) + stats.norm.logpdf(x[:, 2], 0, spread)
    estimate = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(3), 0.1)).estimate(np.repeat(x, 4, axis=0), key=key)
    right_or_suspect(estimate, np.repeat(truth, 4), largest=np.log(2))
    gap = np.abs(np.asarray(estimate.log_prob) - np.repeat(truth, 4))
    assert np.all(gap[~np.asarray(estimate.suspect)] < 0.5), gap


@pytest.mark.parametrize(
    ("reach", "suspect"),
    [
        pytest.param(2.2, True, id="bent", marks=pytest.mark.slow),
        pytest.param(np.inf, False, id="linear"),
    ],
)
def test_values_far_in_the_tail_are_flagged_unless_the_sde_is_linear(reach, suspect, key):
    """To reach (0, 1.75), Z₂ is pushed by noise alone or by a detour of Z₁ beyond 2.2. The search finds only
    the direct paths, as if there were no detour, and its value is too low by up to 0.36."""
    drift = lambda t, z: jnp.stack([0 * z[0], 60 * jnp.maximum(jnp.abs(z[0]) - reach, 0) ** 2])
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(jnp.diag(jnp.array([1.0, 0.3]))))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2), 0.1), integrator=rf.FixedGrid(steps=8))
    estimate = flow.estimate(np.array([[0.0, 1.75]]), key=key, max_paths=1024)
    assert bool(estimate.suspect[0]) == suspect
    direct = stats.norm.logpdf([0, 1.75], 0, np.sqrt([1.01, 0.1])).sum()
    assert suspect or abs(estimate.log_prob[0] - direct) < 1e-3


CUBIC = np.array([[0.5, -0.2, 0.1], [1.5, 0.3, 0.0], [1.5, -1.5, 0.4], [3.0, 0.0, 0.0]])


@pytest.mark.slow
def test_the_default_on_an_sde_that_explodes(key):
    """dU = 2U³ dt + ½ dB, three of them, turned."""
    y, p = evolved(lambda u: 2 * u**3, lambda u: 0.5, stats.norm.pdf, (-6, 6), 1.0)
    flow, x = turned(lambda u: 2 * u**3, lambda u: 0.5 * jnp.ones(3), CUBIC)
    right_or_suspect(flow.estimate(x, key=key), np.sum(log_density_at(CUBIC, y, p), axis=1))


def fold(dimension):
    """Drift 3|z|²Jz, J skew: it turns the faster the further out, so that x is reached with any number of
    turns. Turning changes nothing about a round distribution: N(0, (¼ + t) I) at time t."""
    skew = np.triu(np.ones((dimension, dimension)), 1) - np.tril(np.ones((dimension, dimension)), -1)
    sde = rf.ItoSDE(
        lambda t, z: 3 * jnp.sum(z**2) * (jnp.asarray(skew) @ z), rf.ConstantDiffusion(jnp.eye(dimension))
    )
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(dimension), 0.5))
    return flow, stats.multivariate_normal(np.zeros(dimension), 1.25 * np.eye(dimension))


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.slow
def test_the_default_where_paths_turn(dimension, key):
    flow, truth = fold(dimension)
    x = np.eye(dimension)[0] * np.array([[0.3], [1.0], [1.5]])
    right_or_suspect(flow.estimate(x, key=key), truth.logpdf(x), largest=2.0)


START, SPREAD, TURN = np.array([1.5, 0.0]), 0.3, 3.0


def turned_density(x):
    """log ∫ N(θ; 0, 3²) N(R(−θ)x; start, spread² I) dθ."""
    angle = np.linspace(-30, 30, 4001)
    cos, sin = np.cos(angle), np.sin(angle)
    back = np.stack([x[0] * cos + x[1] * sin, x[1] * cos - x[0] * sin], axis=-1)
    terms = np.sum(stats.norm.logpdf(back, START, SPREAD), axis=-1) + stats.norm.logpdf(angle, 0, TURN)
    return special.logsumexp(terms) + np.log(angle[1] - angle[0])


def test_a_turn_to_the_left_and_one_to_the_right(key):
    """dZ = 3JZ ∘ dB turns the start by the angle 3B(1): several turns lead to the same x. Paths alone."""
    diffusion = lambda t, z: TURN * jnp.stack([-z[1], z[0]])[:, None]
    sde = rf.StratonovichSDE(lambda t, z: jnp.zeros(2), diffusion)
    base, grid = rf.Normal(jnp.asarray(START), SPREAD), rf.FixedGrid(steps=32)
    flow = rf.StochasticFlow(sde, base, driver=rf.KarhunenLoeve(2), integrator=grid)
    x = np.array([[-1.5, 0.0], [1.2, 0.8]])
    estimate = flow.estimate(x, key=key, estimator=rf.PullBack(1024, rf.Prior(rf.density.Sobol())))
    right_or_suspect(estimate, [turned_density(p) for p in x], trusted=1.0, largest=0.1)


# -------------------------------------------------------------------- what the driver leaves out


def test_truncation_error_bounds_what_the_driver_leaves_out(key):
    """Where it is large that is told."""

    def out_by(rate):
        distribution = ou_distribution(rate)
        x = distribution.mean + np.linspace(-0.5, 0.5, 16)[:, None] * np.sqrt(distribution.cov[0, 0])
        estimate = ou(rate).estimate(x, key=key, estimator=rf.PullBack(1024, rf.Prior(rf.density.Sobol())))
        return estimate, np.abs(estimate.log_prob - distribution.logpdf(x))

    estimate, error = out_by(1.0)
    assert np.all(error < 3 * estimate.total_error)
    assert np.mean(error < estimate.total_error) > 0.7
    assert np.all(estimate.truncation_error > 1e-4)
    assert estimate.warning is None
    faster, _ = out_by(4.0)
    large = np.asarray(faster.truncation_error) > 0.5
    assert large.any()
    assert np.all(np.asarray(faster.suspect)[large])
    told = f"{large.sum()} of {large.size} estimates have a large truncation or solver error"
    assert told in faster.warning


@pytest.mark.slow
@pytest.mark.parametrize("driver", [THREE, rf.Legendre(3), rf.PiecewiseLinear(4)], ids=repr)
def test_the_default_corrects_what_the_driver_leaves_out(driver, key):
    """Against the density of the SDE, not of the driver's."""
    distribution = ou_distribution(2.0)
    x = distribution.mean + np.linspace(-2, 2, 4)[:, None] * np.sqrt(distribution.cov[0, 0])
    estimate = ou(2.0, driver=driver).estimate(x, key=key)
    right_or_suspect(estimate, distribution.logpdf(x), trusted=1.0, largest=0.1)


# ------------------------------------------------------------------------------------ units


@pytest.mark.slow  # with `make test`, log p given a path and grids have no unit
@pytest.mark.parametrize("units", [(1e-9, 1e-9), (1e9, 1e9), (1e-3, 1e6)], ids=str)
def test_units_of_the_columns_change_nothing_but_the_jacobian(units, key):
    """A nonlinear plane SDE in other units: the same paths, so the same number, less log |det|."""
    plain, scaled = in_units(np.ones(2)), in_units(np.array(units))
    x = np.array([[0.3, -0.5], [1.5, 1.0]])
    one, two = (
        flow.estimate(x * u, key=key, estimator=rf.PullBack(64, rf.Laplace()))
        for flow, u in ((plain, np.ones(2)), (scaled, np.array(units)))
    )
    np.testing.assert_allclose(two.log_prob + np.sum(np.log(units)), one.log_prob, rtol=0, atol=1e-6)
    np.testing.assert_allclose(two.total_error, one.total_error, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("units", [(1e-9, 1e9), (1e9, 1e9)], ids=str)
def test_the_default_in_other_units(units, key):
    plain, scaled = in_units(np.ones(2)), in_units(np.array(units))
    x = np.array([[0.3, -0.5], [1.5, 1.0], [4.0, -3.0]])
    one, two = plain.estimate(x, key=key), scaled.estimate(x * np.array(units), key=key)
    gap = np.abs(two.log_prob + np.sum(np.log(units)) - one.log_prob)
    assert np.all(gap < one.total_error + two.total_error)
    np.testing.assert_array_equal(one.suspect, two.suspect)


def in_units(units):
    u = jnp.asarray(units)

    def drift(t, z):
        a, b = z / u
        return u * jnp.stack([jnp.sin(b) - a, 0.5 * a - b])

    def diffusion(t, z):
        a, b = z / u
        rows = [[0.6 + 0.2 * jnp.cos(b), 0.1 * a], [jnp.zeros_like(a), 0.5 + 0.1 * jnp.sin(a)]]
        return u[:, None] * jnp.stack([jnp.stack(row) for row in rows])

    return rf.StochasticFlow(rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(2), 0.5 * u))


def test_a_correlated_normal_base(key):
    """Its own density, its samples, and the density of an Ornstein–Uhlenbeck process that starts from it."""
    loc, covariance = np.array([0.5, -1.0]), np.array([[1.0, 0.9], [0.9, 2.0]])
    base, x = rf.MultivariateNormal(loc, covariance), np.array([[0.3, 0.1], [1.0, -2.0]])
    inside_jit = jax.jit(lambda covariance: rf.MultivariateNormal(loc, covariance).log_prob(x))
    np.testing.assert_allclose(inside_jit(covariance), base.log_prob(x), rtol=1e-12)
    np.testing.assert_allclose(base.log_prob(x), stats.multivariate_normal(loc, covariance).logpdf(x))
    np.testing.assert_allclose(np.cov(base.sample(key=key, shape=(50_000,)).T), covariance, atol=0.04)
    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2)), base)
    end = stats.multivariate_normal(
        np.exp(-1) * loc, np.exp(-2) * covariance + 0.5 * (1 - np.exp(-2)) * np.eye(2)
    )
    estimate = flow.estimate(x, key=key, estimator=rf.PullBack(64, rf.Laplace()))
    assert np.all(np.abs(estimate.log_prob - end.logpdf(x)) < 3 * estimate.total_error + 1e-4)
    assert np.all(estimate.total_error < 0.05)
    for bad in (np.eye(3), np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([[1.0, 0.5], [0.0, 1.0]])):
        with pytest.raises(ValueError, match=r"^(loc must|covariance must)[^\n]*$"):
            rf.MultivariateNormal(loc, bad)
