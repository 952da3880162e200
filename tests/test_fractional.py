"""Fractional Brownian motion and other Gaussian processes as drivers, and what they do to an SDE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, linalg, stats

import roughflow as rf
from roughflow.series._fit_sde import _likelihood
from roughflow.series._likelihood import toeplitz_errors
from roughflow.series._observed import panel
from roughflow.series.hidden._likelihood import Observation

HURST = [0.35, 0.7]


def covariance(hurst, s, t):
    s, t = np.asarray(s)[:, None], np.asarray(t)[None]
    return 0.5 * (s ** (2 * hurst) + t ** (2 * hurst) - np.abs(s - t) ** (2 * hurst))


# --------------------------------------------------------------------------------- the drivers


@pytest.mark.parametrize("hurst", HURST)
@pytest.mark.parametrize("grid", [7, [0.0, 0.1, 0.15, 1.0]], ids=["uniform", "grid"])
def test_covariance_is_exact_on_the_grid(hurst, grid):
    driver = rf.FractionalBrownian(hurst, grid)
    s = np.asarray(driver.knots)
    values = driver.integrals(s)
    np.testing.assert_allclose(values @ values.T, covariance(hurst, s, s), atol=1e-13)
    assert driver.hurst == hurst


@pytest.mark.parametrize("hurst", HURST)
def test_moments_of_polynomials_are_exact(hurst):
    """Var B(1), Cov(B(1), ∫B), Var ∫B and those of ∫sB, against closed forms and quadrature."""
    driver = rf.driver.FractionalLegendre(hurst, 3)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    s, weights = (nodes + 1) / 2, weights / 2
    paths = driver.integrals(s)
    functionals = np.stack([driver.integrals(1.0), weights @ paths, (weights * s) @ paths])
    got = functionals @ functionals.T
    h = 2 * hurst
    kernel = lambda t, s: 0.5 * (s**h + t**h - abs(s - t) ** h)
    both = lambda power: (
        2
        * integrate.dblquad(lambda t, s: kernel(t, s) * (t * s) ** power, 0, 1, 0, lambda s: s, epsabs=1e-11)[
            0
        ]
    )
    end = integrate.quad(lambda s: kernel(1.0, s), 0, 1)[0]
    np.testing.assert_allclose(
        [got[0, 0], got[0, 1], got[1, 1], got[2, 2]], [1, end, 1 / (h + 2), both(1)], rtol=1e-9
    )


@pytest.mark.parametrize("count", [2, 12])
def test_without_memory_it_is_brownian_motion(count):
    s = np.linspace(0, 1, 9)
    for ours, other in (
        (rf.driver.FractionalLegendre(0.5, count), rf.Legendre(count)),
        (rf.FractionalBrownian(0.5, count), rf.PiecewiseLinear(count)),
    ):
        np.testing.assert_allclose(ours.integrals(s), other.integrals(s), atol=1e-12)
        assert ours.brownian


def test_a_covariance_function_gives_its_process():
    """Fractional Brownian motion by its covariance is that by its exact moments, to what is documented."""
    hurst = 0.4
    kernel = lambda s, t: 0.5 * (s ** (2 * hurst) + t ** (2 * hurst) - jnp.abs(s - t) ** (2 * hurst))
    given, exact = rf.driver.GaussianDriver(kernel, 8, hurst=hurst), rf.driver.FractionalLegendre(hurst, 8)
    np.testing.assert_allclose(given.root @ given.root.T, exact.root @ exact.root.T, atol=2e-4)
    # A smooth process has no variance left for more polynomials, and is drawn all the same.
    smooth = rf.driver.GaussianDriver(lambda s, t: jnp.exp(-((s - t) ** 2)), 24)
    s = np.linspace(0, 1, 6)
    values = smooth.integrals(s)
    kernel = np.exp(-((s[:, None] - s) ** 2))
    expected = kernel - kernel[:, :1] - kernel[:1] + 1  # of B − B(0)
    np.testing.assert_allclose(values @ values.T, expected, atol=1e-5)


@pytest.mark.parametrize("hurst", [0.2, pytest.param(0.7, marks=pytest.mark.slow)])
def test_fractional_noise_has_its_covariance(hurst, key):
    noise = rf.driver.fractional_noise(hurst, 48, key=key, shape=(5, 4001), t1=2.0)
    assert noise.shape == (5, 4001, 48)
    places = np.array([3, 24, 48])
    values = np.cumsum(noise, axis=-1).reshape(-1, 48)[:, places - 1]
    products = values[:, :, None] * values[:, None, :]
    gap = products.mean(axis=0) - covariance(hurst, places / 24, places / 24)
    assert np.all(np.abs(gap) < 4 * products.std(axis=0) / np.sqrt(len(values)))
    # The two halves of a complex transform are independent.
    pairs = (values[: len(values) // 2, 2] * values[-(len(values) // 2) :, 2]).mean()
    assert abs(pairs) < 4 * values[:, 2].var() / np.sqrt(len(values) // 2)


# --------------------------------------------------------------------------------- what they drive


def gaussian_end(hurst, rate, scale, horizon, cells=1500):
    """The variance of ∫ e^{−κ(T−t)} σ dB, from increments on a fine grid."""
    knots = horizon * (0.5 - 0.5 * np.cos(np.pi * np.arange(cells + 1) / cells))
    steps = np.diff(np.diff(covariance(hurst, knots, knots), axis=0), axis=1)
    weights = scale * np.exp(-rate * (horizon - 0.5 * (knots[1:] + knots[:-1])))
    return weights @ steps @ weights


@pytest.mark.parametrize(
    "driver",
    [
        rf.driver.FractionalLegendre(0.4, 8),
        pytest.param(rf.FractionalBrownian(0.7, 16), marks=pytest.mark.slow),
    ],
    ids=["Legendre", "grid"],
)
@pytest.mark.slow  # with `make test`, their covariance is exact
def test_density_of_a_fractional_ornstein_uhlenbeck_process(driver, key):
    horizon, rate, scale = 1.5, 1.2, 0.7
    sde = rf.StratonovichSDE(lambda t, z: -rate * z, lambda t, z: jnp.full((1, 1), scale))
    steps = rf.FixedGrid(steps=24)
    base = rf.Normal(jnp.full(1, 0.3), 0.4)
    flow = rf.StochasticFlow(sde, base, t1=horizon, driver=driver, integrator=steps)
    variance = gaussian_end(driver.hurst, rate, scale, horizon) + np.exp(-2 * rate * horizon) * 0.16
    end = stats.norm(0.3 * np.exp(-rate * horizon), np.sqrt(variance))
    x = end.ppf(np.array([0.001, 0.2, 0.5, 0.9]))[:, None]
    # Exact for a linear SDE, whatever the number of paths.
    got = flow.log_prob(x, key=key, estimator=rf.PullBack(64, rf.Laplace()))
    np.testing.assert_allclose(got, end.logpdf(x[:, 0]), atol=5e-3)


def test_an_ito_sde_is_refused_with_the_remedy():
    ito = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    base = rf.Normal(jnp.zeros(1))
    with pytest.raises(ValueError, match=r"which Itô SDEs require: use a StratonovichSDE"):
        rf.StochasticFlow(ito, base, driver=rf.FractionalBrownian(0.4, 8))
    with pytest.raises(ValueError, match=r"StratonovichSDE"):
        rf.StochasticFlow(ito, base).with_driver(rf.driver.FractionalLegendre(0.7, 8))
    rf.StochasticFlow(ito, base, driver=rf.driver.FractionalLegendre(0.5, 8))


def test_paths_too_rough_for_the_theorem_are_refused():
    base, very_rough = rf.Normal(jnp.zeros(2)), rf.driver.FractionalLegendre(0.3, 8)
    flow = lambda diffusion: rf.StochasticFlow(
        rf.StratonovichSDE(lambda t, z: -z, diffusion), base, driver=very_rough
    )
    with pytest.raises(ValueError, match=r"hurst = 0\.3 is too rough: .* hurst > 1/3"):
        flow(lambda t, z: jnp.diag(1 + z**2))
    flow(lambda t, z: jnp.eye(2))
    flow(lambda t, z: z[:, None])


def test_a_flow_with_a_fractional_driver_is_saved(tmp_path, key):
    sde = rf.StratonovichSDE(rf.MLP(1, 1, key=key), rf.ConstantDiffusion(jnp.eye(1)))
    for driver in (
        rf.FractionalBrownian(0.4, 3),
        rf.driver.FractionalLegendre(0.7, 3),
    ):
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=driver)
        rf.save(tmp_path / "flow.rf", flow)
        again = rf.load(tmp_path / "flow.rf").driver
        np.testing.assert_array_equal(again.integrals(jnp.ones(())), driver.integrals(jnp.ones(())))
        assert again.hurst == driver.hurst
    assert jax.tree.leaves(flow.driver) == []


# --------------------------------------------------------------------------------- series with memory

MODEL = rf.FractionalOrnsteinUhlenbeck(1.3, 0.2, 0.6, 0.3)


@pytest.mark.parametrize("hurst", [0.15, 0.85])
def test_innovations_have_their_covariance(hurst):
    """Of neighbours in three intervals, against sums over a fine grid."""
    model, dt, cells = rf.FractionalOrnsteinUhlenbeck(1.3, 0.2, 0.6, hurst), 0.3, 300
    base = 0.5 - 0.5 * np.cos(np.pi * np.arange(cells + 1) / cells)
    knots = dt * np.concatenate([base[:-1], 1 + base[:-1], 2 + base])
    steps = np.diff(np.diff(covariance(hurst, knots, knots), axis=0), axis=1)
    middle = 0.5 * (knots[1:] + knots[:-1])
    ends = dt * np.arange(1, 4)[:, None]
    inside = (middle < ends) & (middle > ends - dt)
    weights = np.where(inside, 0.6 * np.exp(-1.3 * (ends - middle)), 0)
    got = linalg.toeplitz(model.autocovariance(jnp.asarray(dt), 2))
    np.testing.assert_allclose(weights @ steps @ weights.T, got, atol=3e-5)


def test_schur_algorithm_is_the_normal_density():
    gamma, x = np.asarray(MODEL.autocovariance(jnp.asarray(0.1), 7)), np.sin(np.arange(8.0))
    error, size = toeplitz_errors(jnp.asarray(gamma), jnp.asarray(x)[:, None])
    root = np.linalg.cholesky(linalg.toeplitz(gamma))
    np.testing.assert_allclose(size, np.diag(root), rtol=1e-10)
    np.testing.assert_allclose(error[:, 0], linalg.solve(root, x), rtol=1e-10)


def dense(noise, times, x):
    """The log-density of values with errors given the first one, whose state has a flat prior; means and
    covariances of the states at all times. By matrices, with a prior of variance 1e4."""
    whole = 0.1 * np.arange(30 + 5)
    gamma = np.asarray(MODEL.autocovariance(jnp.asarray(0.1), len(whole)))[: len(whole) - 1]
    decay = float(np.exp(-MODEL.kappa * 0.1))
    moves = np.tril(decay ** (np.arange(len(whole))[:, None] - np.arange(1, len(whole))), -1)
    moves[np.arange(len(whole))[:, None] < np.arange(1, len(whole))] = 0.0
    start = decay ** np.arange(len(whole))
    prior = moves @ linalg.toeplitz(gamma) @ moves.T + 1e4 * np.outer(start, start)
    rows = np.rint(times / 0.1).astype(int)
    joint = prior[np.ix_(rows, rows)] + noise**2 * np.eye(len(rows))
    first = stats.norm(0, np.sqrt(joint[0, 0])).logpdf(x[0] - float(MODEL.mu))
    value = stats.multivariate_normal(np.zeros(len(x)), joint).logpdf(x - float(MODEL.mu)) - first
    weights = np.linalg.solve(joint, prior[rows]).T
    return (
        value,
        float(MODEL.mu) + np.asarray(weights @ (x - float(MODEL.mu))),
        prior - weights @ prior[rows],
        rows,
    )


def values():
    drawn = np.asarray(MODEL.sample(0.5, 0.1, 29, key=jax.random.key(3)))
    return drawn + 0.2 * np.sin(np.arange(30.0) ** 2)


def likelihood_of(times, x, noise, key):
    options = {"coordinates": None, "exact": True}
    return _likelihood(MODEL, panel(times, x), Observation(noise), {}, {}, (), key, options)


@pytest.mark.parametrize("noise", [0.2, pytest.param(None, marks=pytest.mark.slow)])
def test_errors_and_gaps_leave_the_density_normal(noise, key):
    """The likelihood, the states and a forecast, by dense matrices."""
    there = np.isin(np.arange(30), [1, 7, 8, 9, 20], invert=True)
    times, x = 0.1 * np.arange(30)[there], values()[there]
    whole = likelihood_of(times, x, noise, key)
    truth = [float(v) for v in (MODEL.kappa, MODEL.mu, MODEL.sigma, MODEL.hurst)]
    free = whole.parameters.to_free(np.array(truth + ([noise] if noise else [])))
    value, mean, covariance, rows = dense(noise or 0.0, times, x)
    np.testing.assert_allclose(whole.log_likelihood(free), value, atol=2e-4)
    if noise:
        states, deviations = whole.smoothed(free)
        np.testing.assert_allclose(states[:, 0], mean[rows], atol=1e-4)
        np.testing.assert_allclose(deviations[:, 0], np.sqrt(np.diag(covariance)[rows]), rtol=1e-3)
    paths = whole.forecast(free, np.array([0.1, 0.4]), key, 20_000, 0)[..., 0]
    there = np.ix_([30, 33], [30, 33])
    np.testing.assert_allclose(paths.mean(axis=0), mean[[30, 33]], atol=4 * 0.3 / 20_000**0.5)
    np.testing.assert_allclose(np.cov(paths.T), covariance[there], rtol=0.06)
    slopes = whole.scores(free)[1].sum(axis=0)
    move = 1e-5 * np.eye(len(free))
    known = [(whole.log_likelihood(free + m) - whole.log_likelihood(free - m)) / 2e-5 for m in move]
    np.testing.assert_allclose(slopes, known, rtol=1e-5, atol=1e-6)


def test_samples_have_the_distribution_of_the_model(key):
    x = np.asarray(MODEL.sample(0.5, 0.1, 12, key=key, shape=(20_000,)))
    expected = gaussian_end(0.3, 1.3, 0.6, 1.2)
    np.testing.assert_allclose(x[:, -1].var(), expected, rtol=4 * np.sqrt(2 / 20_000) + 1e-3)
    mean = 0.2 + 0.3 * np.exp(-1.3 * 1.2)
    assert abs(x[:, -1].mean() - mean) < 4 * np.sqrt(expected / 20_000)


def test_a_hurst_exponent_is_estimated(key):
    times = 0.05 * np.arange(401)
    x = MODEL.sample(0.2, 0.05, 400, key=key)
    result = rf.fit_sde(rf.FractionalOrnsteinUhlenbeck(1.0, 0.0, 1.0, 0.5), times, x, key=key)
    assert result.warning is None
    low, high = result.confint()["hurst"]
    assert low < 0.3 < high < 0.45
    # Robust errors are near the others, as the model is right.
    ratio = result.robust_errors["hurst"] / result.standard_errors["hurst"]
    assert 0.7 < ratio < 1.4
    assert result.residuals(key=key).uniformity > 1e-3
    # What comes next starts from the last value, and knows the past.
    ahead = result.forecast([0.05, 0.5], key=key, num_paths=2000)
    assert ahead.shape == (2000, 2, 1)
    assert ahead[:, 0].std() < ahead[:, 1].std()
    simpler = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 0.0, 1.0), times, x, key=key)
    assert result.likelihood_ratio(simpler)[1] < 1e-3


def test_without_memory_the_likelihood_is_that_of_transitions(key):
    times, x = 0.05 * np.arange(101), np.sin(np.arange(101.0) ** 2)
    whole = likelihood_of(times, x, None, key)
    free = whole.parameters.to_free(np.array([1.3, 0.2, 0.6, 0.5]))
    known = rf.series_likelihood(rf.OrnsteinUhlenbeck(1.3, 0.2, 0.6), times, x, key=key)
    np.testing.assert_allclose(
        whole.log_likelihood(free), known(rf.OrnsteinUhlenbeck(1.3, 0.2, 0.6)), rtol=1e-10
    )
    # So are forecasts: normal, with the moments of an Ornstein–Uhlenbeck process.
    paths = whole.forecast(free, np.array([0.1, 0.5, 2.0]), key, 1000, 0)[..., 0]
    for drawn, ahead in zip(paths.T, (0.1, 0.5, 2.0), strict=True):
        decay = np.exp(-1.3 * ahead)
        known = stats.norm(0.2 + (x[-1] - 0.2) * decay, 0.6 * np.sqrt((1 - decay**2) / 2.6))
        assert stats.kstest(drawn, known.cdf).pvalue > 1e-3
    # They take parameters for all paths, or for each.
    options = (np.array([0.1, 0.5]), key, 4, 0)
    each = whole.forecast(np.tile(free, (4, 1)), *options)
    np.testing.assert_allclose(each, whole.forecast(free, *options), rtol=1e-9)


def test_what_memory_does_not_allow_is_refused(key):
    times, x = 0.1 * np.arange(20), np.sin(np.arange(20.0) ** 2)
    with pytest.raises(TypeError, match="transition densities require Brownian motion"):
        rf.transition_log_prob(MODEL, x[:1], x[1:2], 0.1, key=key)
    with pytest.raises(TypeError, match="transition densities require Brownian motion"):
        rf.series_likelihood(MODEL, times, x, key=key)
    with pytest.raises(ValueError, match="evenly spaced times"):
        rf.fit_sde(MODEL, times**2, x, key=key)
    with pytest.raises(ValueError, match="of a process with memory must be one number"):
        rf.fit_sde(MODEL, times, x, key=key, measurement_noise=np.full(20, 0.1))
    with pytest.raises(ValueError, match="initial requires an SDE without memory"):
        rf.fit_sde(MODEL, times, x, key=key, initial=[0.1])
    with pytest.raises(TypeError, match="sde must be an ItoSDE or StratonovichSDE"):
        rf.StochasticFlow(MODEL, rf.Normal(jnp.zeros(1)))
