"""Fits do not depend on the units of time and values, on the precision of the process, or on a bad start."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import roughflow as rf

N = 150
TIMES = np.arange(N + 1) / 12


def simulate(step, start):
    """A series whose next value is `step(value, normal number)`."""
    generator, x = np.random.default_rng(5), [start]
    for _ in range(N):
        x.append(step(x[-1], generator.normal(size=np.shape(start))))
    return np.array(x)


LINE = simulate(lambda x, e: 0.05 + (x - 0.05) * np.exp(-3.0 / 12) + 0.0055 * e, 0.05)
POSITIVE = simulate(lambda x, e: np.exp(np.log(x) + (0.05 / x - 1) / 4 + 0.08 * e), 0.05)
PLANE = simulate(lambda x, e: x + np.array([[-0.1, 0.03], [-0.02, -0.06]]) @ x + [0.1, 0.05] * e, np.zeros(2))

# How the parameters change if times are multiplied by τ and values by c.
CASES = {
    "ou": (
        rf.OrnsteinUhlenbeck,
        LINE,
        lambda p, tau, c: {"kappa": p["kappa"] / tau, "mu": c * p["mu"], "sigma": c * p["sigma"] / tau**0.5},
    ),
    "cir": (
        rf.CoxIngersollRoss,
        POSITIVE,
        lambda p, tau, c: {
            "kappa": p["kappa"] / tau,
            "mu": c * p["mu"],
            "sigma": p["sigma"] * (c / tau) ** 0.5,
        },
    ),
    "ckls": (
        rf.CKLS,
        POSITIVE,
        lambda p, tau, c: {
            "kappa": p["kappa"] / tau,
            "mu": c * p["mu"],
            "sigma": p["sigma"] * c ** (1 - p["gamma"]) / tau**0.5,
            "gamma": p["gamma"],
        },
    ),
    "plane": (
        rf.OrnsteinUhlenbeck,
        PLANE,
        lambda p, tau, c: {
            name: value * {"k": 1 / tau, "m": c, "s": c / tau**0.5}[name[0]] for name, value in p.items()
        },
    ),
    "fractional": (
        rf.FractionalOrnsteinUhlenbeck,
        LINE,
        lambda p, tau, c: {
            "kappa": p["kappa"] / tau,
            "mu": c * p["mu"],
            "sigma": p["sigma"] * c / tau ** p["hurst"],
            "hurst": p["hurst"],
        },
    ),
}


@pytest.fixture(scope="module")
def fits():
    return {}


def fitted(fits, name, tau=1.0, c=1.0):
    kind, values, _ = CASES[name]
    if (name, tau, c) not in fits:
        fits[name, tau, c] = rf.fit_sde(kind, tau * TIMES, c * values, key=jax.random.key(0))
    return fits[name, tau, c]


@pytest.mark.parametrize(("tau", "c"), [(1e-9, 1e9), (3e7, 1.0)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "ckls")) for n in CASES])
def test_units_change_nothing(name, tau, c, fits):
    """Estimates, the covariance mapped by the Jacobian of the change of units, and the log-likelihood."""
    change, plain, other = CASES[name][2], fitted(fits, name), fitted(fits, name, tau, c)
    assert plain.reliable
    assert other.reliable
    names = list(plain.params)
    as_array = lambda values: jnp.stack(list(change(dict(zip(names, values, strict=True)), tau, c).values()))
    expected = as_array(jnp.asarray(plain.estimates))
    np.testing.assert_allclose(other.estimates, expected, rtol=1e-5, atol=0)
    slopes = np.asarray(jax.jacfwd(as_array)(jnp.asarray(plain.estimates)))
    errors = np.sqrt(np.diag(slopes @ plain.covariance @ slopes.T))
    np.testing.assert_allclose(list(other.standard_errors.values()), errors, rtol=1e-5)
    jacobian = plain.num_transitions * plain.series[0].values.shape[1] * np.log(c)
    np.testing.assert_allclose(other.log_likelihood + jacobian, plain.log_likelihood, rtol=1e-5)


def test_single_precision_gives_the_same_fit(fits):
    plain = fitted(fits, "cir")
    with jax.enable_x64(False):
        single = rf.fit_sde(rf.CoxIngersollRoss, TIMES, POSITIVE, key=jax.random.key(0))
        np.testing.assert_allclose(single.estimates, plain.estimates, rtol=1e-9)
        np.testing.assert_allclose(single.covariance, plain.covariance, rtol=1e-6)
        np.testing.assert_allclose(single.log_likelihood, plain.log_likelihood)
        assert single.sde.kappa.dtype == jnp.float32
        assert single.posterior()(single.posterior().start).dtype == jnp.float32


@pytest.mark.slow  # with `make test` one is found from H = ½ in a longer series
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hurst_exponent_is_found_from_a_bad_start(seed):
    """From H = ½ the search alone ends at another maximum, with κ = 0 or with H near 1."""
    truth = rf.FractionalOrnsteinUhlenbeck(1.0, 0.0, 0.3, 0.1)
    x, times = truth.sample(0.0, 1 / 252, 300, key=jax.random.key(seed)), np.arange(301) / 252
    start = rf.FractionalOrnsteinUhlenbeck(0.5, 0.0, 0.3, 0.5)
    found = rf.fit_sde(start, times, x, key=jax.random.key(0))
    near = rf.fit_sde(truth, times, x, key=jax.random.key(0))
    assert found.log_likelihood > near.log_likelihood - 1e-6
    assert abs(found.params["hurst"] - 0.1) < 4 * found.standard_errors["hurst"]


@pytest.mark.parametrize("name", ["BrownianMotion", "GeometricBrownianMotion", "CoxIngersollRoss"])
def test_moments_of_a_line_are_near_the_maximum(name):
    kind = getattr(rf, name)
    start, result = (
        kind.from_series(TIMES, POSITIVE),
        rf.fit_sde(kind, TIMES, POSITIVE, key=jax.random.key(0)),
    )
    assert result.converged
    errors = np.array(list(result.standard_errors.values()))
    found = np.array([float(getattr(start, name)) for name in result.params])
    assert np.all(np.abs(found - result.estimates) < 4 * errors)


@pytest.mark.parametrize(
    "sde",
    [
        rf.DoubleWell(1.0, 1.0, 0.5),
        rf.LotkaVolterra(0.5, 0.03, 0.8, 0.03, 0.1, 0.1),
        rf.Heston(0.05, 3.0, 0.1, 0.25, -0.7),
        rf.FitzHughNagumo(0.1, 0.0, 1.5, 0.8, 0.3, 0.3),
    ],
    ids=lambda sde: type(sde).__name__,
)
def test_moments_of_a_simulated_series_are_near_the_truth(sde):
    start = {"DoubleWell": [1.0], "LotkaVolterra": [30.0, 15.0], "Heston": [100.0, 0.1]}
    first = jnp.array(start.get(type(sde).__name__, [0.0, 0.0]))
    times = np.linspace(0.0, 40.0, 4001)
    path = rf.simulate(sde, first, key=jax.random.key(0), t1=40.0, steps=4000, trajectory=True)
    found = type(sde).from_series(times, path)
    for name in sde.domains:
        np.testing.assert_allclose(getattr(found, name), getattr(sde, name), rtol=0.5, atol=0.3, err_msg=name)


def test_a_class_without_moments_is_refused():
    class Own(rf.series.AbstractNamedSDE):
        rate: float
        domains: ClassVar = {"rate": rf.series.Domain()}
        coordinates: ClassVar = rf.transition.Unchanged()

        def drift(self, t, z):
            return -self.rate * z

        def diffusion(self, t, z):
            return jnp.eye(1)

    with pytest.raises(TypeError, match="Own does not define starting_values: pass an SDE"):
        rf.fit_sde(Own, TIMES, LINE, key=jax.random.key(0))
    with pytest.raises(TypeError, match="got the class StochasticFlow"):
        rf.fit_sde(rf.StochasticFlow, TIMES, LINE, key=jax.random.key(0))  # pyright: ignore


def test_measurement_noise_that_is_not_there_is_reported():
    key, start = jax.random.key(0), rf.OrnsteinUhlenbeck(0.8, 0.05, 0.02)
    noisy = rf.fit_sde(start, TIMES, LINE, key=key, measurement_noise=0.002, num_starts=1)
    plain = rf.fit_sde(start, TIMES, LINE, key=key, num_starts=1)
    assert {*noisy.boundary, *noisy.near_boundary} == {"measurement_noise"}
    assert "measurement_noise" in noisy.warning
    low, high = noisy.confint()["measurement_noise"]
    assert low == 0
    assert 0 < high < 0.006  # increments have a standard deviation of 0.0055
    # The other parameters have errors as without noise, or a little larger.
    assert 0.9 < noisy.standard_errors["mu"] / plain.standard_errors["mu"] < 1.5
    statistic, p = noisy.likelihood_ratio(plain)
    assert statistic >= -1e-3
    np.testing.assert_allclose(p, 0.5 * scipy.stats.chi2.sf(statistic, 1) if statistic > 0 else 1.0)


def test_the_test_of_a_unit_root_has_its_level():
    """Under Brownian motion without drift the χ² distribution would reject far too often."""
    rejected, by_wilks = 0, 0
    generator = np.random.default_rng(0)
    for _ in range(20):
        x = np.append(0.0, np.cumsum(generator.normal(size=100)))
        times = np.arange(101.0)
        fit = lambda kind, x=x, times=times: rf.fit_sde(kind, times, x, key=jax.random.key(0), num_starts=1)
        statistic, p = fit(rf.OrnsteinUhlenbeck).likelihood_ratio(fit(rf.BrownianMotion))
        rejected, by_wilks = rejected + (p < 0.05), by_wilks + (scipy.stats.chi2.sf(statistic, 1) < 0.05)
    assert rejected <= 4  # of 20, with 99.7 % probability if the level is 5 %
    assert by_wilks > 4


def test_a_profile_above_the_maximum_is_reported():
    """`profile` names the better point; `confint` and `summary` warn of it."""
    result = rf.fit_sde(rf.OrnsteinUhlenbeck, TIMES, LINE, key=jax.random.key(0), num_starts=1)
    falls = result.falls.copy()
    falls[0, result.names.index("kappa")] = 1.0  # kappa is close to a boundary, so it is profiled
    away = result.free + np.array([0.0, 0.0, 0.5])
    off = dataclasses.replace(result, free=away, falls=falls)
    better = f"higher at kappa = {result.params['kappa']:.4g}"
    with pytest.raises(ValueError, match=f"the fit is not at the maximum: .* {better}") as error:
        off.profile("kappa")
    assert "\n" not in str(error.value)
    with pytest.warns(UserWarning, match=better):
        assert np.isnan(off.confint()["kappa"]).all()
