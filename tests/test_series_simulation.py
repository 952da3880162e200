"""Exact transitions, and simulation where there are none, against SciPy and the Fokker–Planck equation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fokker_planck import kolmogorov_distance, transition_density
from scipy import linalg, stats

import roughflow as rf
from roughflow.series._observed import Observed
from roughflow.series._simulation import forecast, residuals
from roughflow.series.models._distributions import Beta, NoncentralChiSquare, linear_moments

BELOW_FELLER = rf.CoxIngersollRoss(0.8, 0.05, 0.35)


def cir_distribution(sde, x0, dt):
    kappa, mu, sigma = (float(part) for part in (sde.kappa, sde.mu, sde.sigma))
    decay = np.exp(-kappa * dt)
    scale = sigma**2 * (1 - decay) / (4 * kappa)
    return stats.ncx2(4 * kappa * mu / sigma**2, x0 * decay / scale, scale=scale)


def by_eigenvectors(kappa, sigma, dt):
    """e^{−κ dt} and the covariance of a plane Ornstein–Uhlenbeck process."""
    values, vectors = np.linalg.eig(kappa)
    inverse = np.linalg.inv(vectors)
    sums = values[:, None] + values[None, :]
    inner = inverse @ sigma @ sigma.T @ inverse.T * -np.expm1(-sums * dt) / sums
    return ((vectors * np.exp(-values * dt)) @ inverse).real, (vectors @ inner @ vectors.T).real


@pytest.mark.parametrize(
    ("fast", "wide"),
    [(3.0, True), (40.0, True), (3000.0, True), (20.0, False), (40.0, False)],
)
def test_a_fast_and_a_slow_rate_do_not_overflow(fast, wide):
    turn = np.array([[np.cos(0.6), -np.sin(0.6)], [np.sin(0.6), np.cos(0.6)]])
    kappa = turn @ np.diag([0.2, fast]) @ np.array([[1, 0.3], [0, 1]]) @ turn.T
    sigma, x0, x1 = np.array([[0.3, 0], [0.1, 0.2]]), np.array([0.2, -0.1]), np.array([0.1, 0.05])
    grow, covariance = by_eigenvectors(kappa, sigma, 1.0)
    with jax.enable_x64(wide):
        sde = rf.OrnsteinUhlenbeck(kappa, np.zeros(2), sigma)
        found = rf.transition_log_prob(sde, x0, x1, 1.0, key=jax.random.key(0))
    expected = stats.multivariate_normal.logpdf(x1, grow @ x0, covariance)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * fast if wide else 2e-3)


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param([[0.0, 1.0], [0.0, 0.0]], id="singular"),
        pytest.param([[0.5, 3.0], [-3.0, 0.5]], id="growing"),
        pytest.param([[-2.0, 90.0], [0.0, -2.0]], id="not normal"),
    ],
)
def test_moments_of_any_linear_sde(rate):
    """By quadrature with SciPy's exponential."""
    rate, noise, dt = np.array(rate), np.array([[0.3, 0.1], [0.1, 0.2]]), 1.5
    change, integral, covariance = linear_moments(jnp.asarray(rate), jnp.asarray(noise), jnp.asarray(dt))
    places, weights = np.polynomial.legendre.leggauss(40)
    powers = linalg.expm(rate * (0.5 * dt * (1 + places))[:, None, None])
    weights = 0.5 * dt * weights
    np.testing.assert_allclose(change, linalg.expm(rate * dt) - np.eye(2), rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(integral, np.einsum("k,kij->ij", weights, powers), rtol=1e-10, atol=1e-11)
    inner = np.einsum("k,kij,jl,kml->im", weights, powers, noise, powers)
    np.testing.assert_allclose(covariance, inner, rtol=1e-10, atol=1e-11)


def test_a_slow_rate_beside_a_fast_one_keeps_its_digits():
    change, _, _ = linear_moments(jnp.diag(jnp.array([-1e-9, -3000.0])), jnp.eye(2), jnp.asarray(1.0))
    np.testing.assert_allclose(change[0, 0], np.expm1(-1e-9), rtol=1e-10)


@pytest.mark.parametrize(("df", "noncentrality"), [(0.25, 0.3), (0.8, 80.0), (9.0, 2.0)])
def test_draws_of_a_noncentral_chi_square(df, noncentrality):
    distribution = NoncentralChiSquare(jnp.asarray(0.1), jnp.asarray(df), jnp.asarray(noncentrality))
    drawn = jax.vmap(distribution.sample)(jax.random.split(jax.random.key(0), 10_000))[:, 0]
    assert stats.kstest(10 * drawn, stats.ncx2(df, noncentrality).cdf).pvalue > 1e-3


def test_cir_below_fellers_condition_is_forecast_and_has_residuals():
    """Zero is reached: 4κμ/σ² = 1.3."""
    rng, dt, x = np.random.default_rng(3), 1 / 12, [0.04]
    for _ in range(200):
        x.append(cir_distribution(BELOW_FELLER, x[-1], dt).rvs(random_state=rng))
    result = rf.fit_sde(BELOW_FELLER, dt * np.arange(201), np.array(x), key=jax.random.key(0), num_starts=1)
    paths = result.forecast([dt, 10.0], key=jax.random.key(1), num_paths=10_000)[..., 0]
    for drawn, ahead in zip(paths.T, (dt, 10.0), strict=True):
        assert stats.kstest(drawn, cir_distribution(result.sde, x[-1], ahead).cdf).pvalue > 1e-3
    expected = [cir_distribution(result.sde, a, dt).cdf(b) for a, b in itertools.pairwise(x)]
    np.testing.assert_allclose(result.residuals(key=jax.random.key(2)).uniform, expected, rtol=1e-8)


def test_stiff_drifts_do_not_blow_up():
    """A rate of 190 over three years, for an SDE whose transitions are not known."""
    sde = rf.ParametricSDE(
        lambda t, x, p: -p["k"] * x, lambda t, x, p: p["s"] * jnp.eye(1), {"k": 190.0, "s": 1.0}
    )
    paths = forecast(
        sde,
        rf.transition.Unchanged(),
        jnp.full((4000, 1), 2.0),
        jnp.array([0.0, 0.002, 3.0]),
        jax.random.key(0),
    )
    for drawn, ahead in zip(paths[..., 0].T, (0.002, 3.0), strict=True):
        mean, deviation = 2 * np.exp(-190 * ahead), np.sqrt(-np.expm1(-380 * ahead) / 380)
        assert stats.kstest(drawn, stats.norm(mean, deviation).cdf).pvalue > 1e-3


@pytest.mark.slow  # with `make test`, for Jacobi
def test_steps_are_halved_until_a_double_well_is_right():
    """The share that has crossed over, as by the Fokker–Planck equation."""
    centres, density = transition_density(lambda x: 2 * x - 2 * x**3, 0.8, (-3, 3), -1.0, 8.0)
    well = rf.DoubleWell(2.0, 2.0, 0.8)
    paths = forecast(
        well, well.coordinates, jnp.full((8192, 1), -1.0), jnp.array([0.0, 8.0]), jax.random.key(0)
    )
    assert kolmogorov_distance(paths[:, 0, 0], centres, density) < 0.03


@pytest.mark.parametrize("sigma", [pytest.param(0.3, marks=pytest.mark.slow), 0.9])
def test_jacobi_is_simulated_where_it_reaches_its_ends_too(sigma):
    """In the arc y, dy = (κ(μ − x) − ¼σ²(1 − 2x))/√(x(1 − x)) dt + σ dB."""
    sde, x0, dt = rf.Jacobi(0.5, 0.3, sigma), 0.1, 0.5

    def drift(y):
        x = np.sin(0.5 * y) ** 2
        return (0.5 * (0.3 - x) - 0.25 * sigma**2 * (1 - 2 * x)) / np.sqrt(x * (1 - x))

    arc = lambda x: 2 * np.arcsin(np.sqrt(x))
    centres, density = transition_density(drift, sigma, (1e-6, np.pi - 1e-6), arc(x0), dt)
    times = jnp.array([0.0, dt])
    paths = forecast(sde, sde.coordinates, jnp.full((4096, 1), x0), times, jax.random.key(0))
    assert kolmogorov_distance(arc(paths[:, 0, 0]), centres, density) < 0.04
    below = np.interp(arc(0.2), centres, np.cumsum(density) * (centres[1] - centres[0]))
    series = Observed(np.array([0.0, dt]), np.array([[x0], [0.2]]))
    found = residuals(sde, sde.coordinates, series.transitions(), jax.random.key(1))
    assert abs(found[0] - below) < 0.06


def test_a_beta_step_has_the_moments_of_jacobi():
    """Those of the equations E' = κ(μ − E) and S' = (2κμ + σ²)E − (2κ + σ²)S."""
    kappa, mu, sigma, x0, dt = 1.3, 0.3, 0.7, 0.8, 0.9
    matrix = np.array(
        [[-kappa, 0, kappa * mu], [2 * kappa * mu + sigma**2, -2 * kappa - sigma**2, 0], [0, 0, 0]]
    )
    mean, square, _ = linalg.expm(matrix * dt) @ [x0, x0**2, 1]
    step = rf.Jacobi(kappa, mu, sigma).short_transition(jnp.full(1, x0), jnp.asarray(dt))
    assert isinstance(step, Beta)
    np.testing.assert_allclose([step.mean, step.variance], [mean, square - mean**2], rtol=1e-10)


def test_the_variance_of_heston_may_reach_zero():
    """4κθ/σ² = 0.32; the price is a martingale but for its drift."""
    sde = rf.Heston(mu=0.05, kappa=1.0, theta=0.02, sigma=0.5, rho=-0.7)
    start, times = jnp.tile(jnp.array([[1.0, 0.02]]), (8192, 1)), jnp.array([0.0, 0.5])
    paths = forecast(sde, sde.coordinates, start, times, jax.random.key(0))[:, 0]
    variance = cir_distribution(rf.CoxIngersollRoss(1.0, 0.02, 0.5), 0.02, 0.5)
    assert stats.kstest(paths[:, 1], variance.cdf).pvalue > 1e-3
    assert abs(paths[:, 0].mean() - np.exp(0.025)) < 4 * paths[:, 0].std() / 8192**0.5


def test_paths_that_leave_the_state_space_are_reported():
    """A price that is absorbed at zero: with zero for NaN its mean is x₀e^{μt}."""
    sde = rf.ConstantElasticity(0.05, 0.3, 0.5)
    start, times = jnp.full((8192, 1), 0.05), jnp.array([0.0, 1.0])
    with pytest.warns(UserWarning, match=r"\d+ of 8192 simulated paths left the state space"):
        paths = forecast(sde, sde.coordinates, start, times, jax.random.key(0))[:, 0, 0]
    gone = np.isnan(paths).mean()
    # Absorbed with probability exp(−2μx₀/(σ²(1 − e^{−μt}))) (Feller 1951).
    assert (
        abs(gone - np.exp(-2 * 0.05 * 0.05 / (0.09 * -np.expm1(-0.05)))) < 0.035
    )  # a shift that halving may miss
    assert abs(np.nan_to_num(paths).mean() - 0.05 * np.exp(0.05)) < 0.002
