"""What is said about a fitted SDE beyond its estimates: profiles, functions of parameters, networks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from fokker_planck import transition_density
from scipy import optimize, stats

import roughflow as rf
from roughflow.series._likelihood import MANY, Likelihood, SeriesLikelihood
from roughflow.series._observed import panel
from roughflow.series._parameters import Parameters
from roughflow.series._simulation import tested as with_tests
from roughflow.transition import Transition

rng = np.random.default_rng(5)
TIMES = np.arange(120) / 12
RATE = 0.05 + 0.01 * np.cumsum(rng.normal(size=120) - 0.2 * np.sin(np.arange(120)))


@pytest.fixture(scope="module")
def vasicek():
    return rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 0.05, 0.03), TIMES, RATE, key=jax.random.key(0))


def normal_series(rng, shape):
    """Residuals and scores of independent normal numbers with estimated mean and deviation."""
    x = rng.normal(size=shape)
    white = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    for row in white:
        yield stats.norm.cdf(row), np.stack([row, row**2 - 1], axis=1)


def test_tests_of_residuals_have_their_level_though_parameters_were_estimated():
    """400 series; the test of Kolmogorov and Smirnov rejects none of them."""
    drawn = list(normal_series(np.random.default_rng(0), (400, 200)))
    found = [with_tests(uniform, scores, np.zeros(2)) for uniform, scores in drawn]
    for p in ([one.uniformity for one in found], [one.ljung_box for one in found]):
        assert 0.02 < np.mean(np.array(p) < 0.05) < 0.08
        assert 0.42 < np.mean(np.array(p) < 0.5) < 0.58
    plain = [with_tests(uniform, None, np.zeros(2)).uniformity for uniform, _ in drawn]
    assert np.mean(np.array(plain) < 0.05) < 0.02


def test_tests_of_residuals_reject_other_models():
    """Heavy tails and skewness, after fitting mean and deviation; a moving average."""
    rng = np.random.default_rng(1)
    for x in (rng.standard_t(3, size=300), rng.gamma(4.0, size=300)):
        white = (x - x.mean()) / x.std()
        scores = np.stack([white, white**2 - 1], axis=1)
        assert with_tests(stats.norm.cdf(white), scores, np.zeros(2)).uniformity < 1e-3
    noise = rng.normal(size=301)
    white = (noise[1:] + 0.4 * noise[:-1]) / np.hypot(1, 0.4)
    scores = np.stack([white, white**2 - 1], axis=1)
    assert with_tests(stats.norm.cdf(white), scores, np.zeros(2)).ljung_box < 1e-3


def test_degrees_of_freedom_fall_with_those_estimated():
    """An autoregression takes one of the test of Ljung and Box (1978)."""
    rng, level, count = np.random.default_rng(2), [], 400
    for _ in range(count):
        x = scipy.signal.lfilter([1], [1, -0.3], rng.normal(size=250))
        slope = x[1:] @ x[:-1] / (x[:-1] @ x[:-1])
        gap = x[1:] - slope * x[:-1]
        white = gap / gap.std()
        scores = np.stack([white * x[:-1], white**2 - 1], axis=1)
        level.append(with_tests(stats.norm.cdf(white), scores, np.zeros(2)).ljung_box < 0.5)
    assert abs(np.mean(level) - 0.5) < 3 * 0.5 / count**0.5


@pytest.mark.slow  # with `make test`, error bars of transitions hold
def test_the_error_of_a_log_likelihood_is_that_of_its_paths():
    """Of 25 transitions of a double well, with 12 keys. The difference to twice the effort is no measure of
    it: it is as random as the error, and at times small by chance."""
    rng, dt = np.random.default_rng(0), 0.2
    start = np.linspace(-1.3, 1.3, 25)
    end = start + dt * (start - start**3) + 0.7 * np.sqrt(dt) * rng.normal(size=25)
    centres, density = transition_density(lambda x: x - x**3, 0.7, (-3.5, 3.5), start, dt, 900)
    truth = sum(np.log(np.interp(x, centres, row)) for x, row in zip(end, density, strict=True))
    steps = Transition(*map(jnp.asarray, (start[:, None], end[:, None], np.zeros(25), np.full(25, dt))))
    sde, effort = rf.DoubleWell(np.array(1.0), np.array(1.0), np.array(0.7)), rf.transition.Effort(4, 8, 8)
    parameters = Parameters.of(sde, sde.domains)
    free, ratios = parameters.to_free(parameters.values(sde)), []
    for seed in range(12):
        of_sde = SeriesLikelihood(steps, jax.random.key(seed), effort, None)
        likelihood = Likelihood(parameters=parameters, of_sde=of_sde, penalty=np.zeros(3))
        drawn, moved = likelihood.total_errors(free)
        assert moved < 0.7 * drawn  # finer paths are the same paths
        ratios.append((likelihood.log_likelihood(free) - truth) / np.hypot(drawn, moved))
    assert 0.5 < np.sqrt(np.mean(np.square(ratios))) < 1.6
    assert np.max(np.abs(ratios)) < 4


def test_effort_is_raised_against_the_larger_error():
    effort = rf.transition.Effort(4, 8, 8)
    assert effort.raised(0.01, 0.05, 0.02) == rf.transition.Effort(8, 8, 16)
    assert effort.raised(0.04, 0.01, 0.02) == rf.transition.Effort(4, 64, 8)  # (0.04 / 0.016)² = 6.25
    assert effort.raised(9.0, 0.01, 0.02) == rf.transition.Effort(4, 128, 8)


def test_a_profile_ends_where_the_likelihood_ratio_test_rejects(vasicek):
    """The maximum over the others by a search of another kind, from the closed form in NumPy."""

    def log_likelihood(kappa, mu, log_sigma):
        decay, sigma = np.exp(-kappa / 12), np.exp(log_sigma)
        variance = sigma**2 * (1 - decay**2) / (2 * kappa)
        gap = RATE[1:] - mu - (RATE[:-1] - mu) * decay
        return -0.5 * np.sum(gap**2 / variance + np.log(2 * np.pi * variance))

    def profile(kappa):
        loss = lambda others: -log_likelihood(kappa, *others)
        start = [vasicek.params["mu"], np.log(vasicek.params["sigma"])]
        options = {"xatol": 1e-8, "fatol": 1e-8, "maxiter": 4000}
        return -optimize.minimize(loss, start, method="Nelder-Mead", options=options).fun

    low, high = vasicek.profile("kappa", level=0.8)
    assert low < vasicek.params["kappa"] < high
    falls = [vasicek.log_likelihood - profile(end) for end in (low, high)]
    np.testing.assert_allclose(falls, 0.5 * 1.6424, atol=5e-3)  # half of χ²'s 80 % point


def test_the_error_of_a_function_of_the_parameters(vasicek):
    """Of a half-life, log 2 / κ, and of two numbers at once."""
    kappa, error = vasicek.params["kappa"], vasicek.standard_errors["kappa"]
    value, of_it = vasicek.delta_method(lambda sde: jnp.log(2) / sde.kappa)
    np.testing.assert_allclose([value, of_it], [np.log(2) / kappa, np.log(2) / kappa**2 * error], rtol=1e-6)
    _, both = vasicek.delta_method(lambda sde: jnp.stack([sde.kappa, 2 * sde.mu]))
    np.testing.assert_allclose(both, [error, 2 * vasicek.standard_errors["mu"]], rtol=1e-6)


def test_a_penalty_holds_a_parameter_back_by_its_closed_form(key):
    """The drift of Brownian motion: μ(T + λσ²) = X(T) − X(0)."""
    strength = 200.0
    start = rf.BrownianMotion(0.1, 0.05)
    result = rf.fit_sde(start, TIMES, RATE, penalty={"mu": strength}, key=key)
    mu, sigma = result.params["mu"], result.params["sigma"]
    span = TIMES[-1] - TIMES[0]
    np.testing.assert_allclose(mu * (span + strength * sigma**2), RATE[-1] - RATE[0], rtol=1e-4)
    known = span / sigma**2
    np.testing.assert_allclose(result.num_effective, 1 + known / (known + strength), rtol=1e-3)
    assert "1 penalised parameters" in result.summary()
    with pytest.raises(ValueError, match="likelihood_ratio does not support penalties"):
        rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 0.05, 0.05), TIMES, RATE, key=key).likelihood_ratio(result)
    assert result.aic == 2 * result.num_effective - 2 * result.log_likelihood


class NetworkDrift(rf.sde.AbstractItoSDE):
    network: eqx.nn.MLP
    sigma: jax.Array

    def drift(self, t, z):
        return self.network(z)

    def diffusion(self, t, z):
        return self.sigma * jnp.eye(1)


def network_drift(key):
    return NetworkDrift(eqx.nn.MLP(1, 1, 5, 1, activation=jnp.tanh, key=key), jnp.asarray(1.0))


def test_scores_of_many_parameters_are_those_of_few(key):
    """They go backwards, one by one; the sum of them against a difference of the likelihood."""
    sde, effort = network_drift(key), rf.transition.Effort(1, 2, 1)
    parameters = Parameters.of(sde, {"sigma": rf.series.Domain(lower=0.0)})
    (series,) = panel(TIMES[:8], 10 * RATE[:8])
    held = parameters.penalties({"network": 2.0})
    of_sde = SeriesLikelihood(series.transitions(), key, effort, None)
    likelihood = Likelihood(parameters=parameters, of_sde=of_sde, penalty=held)
    free = parameters.to_free(parameters.values(sde))
    assert free.size >= MANY
    slope = likelihood.total(free)[1]
    for direction in np.random.default_rng(0).normal(size=(3, free.size)):
        ahead, behind = (likelihood.value(free + h * direction) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(slope @ direction, (ahead - behind) / 2e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_network_finds_the_drift_within_its_bands(key):
    """Of a double well, 2z − 2z³."""
    key_path, key_net, key_fit = jax.random.split(key, 3)
    truth = lambda x: 2 * x - 2 * x**3
    well = rf.ItoSDE(lambda t, z: truth(z), lambda t, z: jnp.full((1, 1), 0.8))
    # A series from each well: one alone may hardly see the other.
    values = []
    for start, key_start in zip((-1.0, 1.0), jax.random.split(key_path), strict=True):
        fine = rf.simulate(well, jnp.full(1, start), key=key_start, t1=30.0, steps=3000, trajectory=True)
        values.append(np.asarray(fine[::20, 0]))
    result = rf.fit_sde(
        network_drift(key_net),
        [0.2 * np.arange(len(one)) for one in values],
        values,
        penalty={"network": 0.3},
        domains={"sigma": rf.series.Domain(lower=0.0)},
        num_starts=1,
        effort=rf.transition.Effort(2, 4, 3),
        tolerance=0.5,
        key=key_fit,
    )
    assert result.converged
    assert 3 < result.num_effective < 10
    grid = np.linspace(-1.25, 1.25, 11)
    drift, error = result.delta_method(lambda sde: jax.vmap(sde.network)(grid[:, None])[:, 0])
    assert np.mean(np.abs(drift - truth(grid)) < 2 * error) >= 0.9
    assert (error < 1.0).all()
    assert np.corrcoef(drift, truth(grid))[0, 1] > 0.9
    assert f"and {len(result.names) - 1} penalised parameters" in result.summary()
