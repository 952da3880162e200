"""Hidden components, against the dense joint density of all values of a linear SDE."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
from scipy import linalg, stats

import roughflow as rf
from benchmarks.hidden_states import problem
from roughflow.series._observed import panel
from roughflow.series._parameters import Parameters
from roughflow.series.hidden._kalman import is_linear
from roughflow.series.hidden._likelihood import Observation, Setup

KEY = jax.random.key(0)


def dense(rate, constant, sigma, times):
    """G, c and C of x = G x₀ + c + w, w ~ N(0, C), for all states of dX = (A X + b(t)) dt + σ dB, b held."""
    d, n = len(rate), len(times)
    grow, shift, noise = [np.eye(d)], [np.zeros(d)], [np.zeros((d, d))]
    covariance = np.zeros((n * d, n * d))
    for k, h in enumerate(np.diff(times)):
        step = linalg.expm(rate * h)
        block = linalg.expm(h * np.block([[rate, sigma @ sigma.T], [np.zeros((d, d)), -rate.T]]))
        wide = np.block([[rate, constant(times[k])[:, None]], [np.zeros((1, d + 1))]])
        grow.append(step @ grow[-1])
        shift.append(step @ shift[-1] + linalg.expm(h * wide)[:d, d])
        noise.append(step @ noise[-1] @ step.T + block[:d, d:] @ step.T)
    for i in range(n):
        for j in range(i, n):
            tie = linalg.expm(rate * (times[j] - times[i])) @ noise[i]
            covariance[j * d : (j + 1) * d, i * d : (i + 1) * d] = tie
            covariance[i * d : (i + 1) * d, j * d : (j + 1) * d] = tie.T
    return np.concatenate(grow), np.concatenate(shift), covariance


def posterior(grow, shift, covariance, y, error, flat):
    """log p(y) with a flat prior for some components of x₀ (others are y₀), and all states given y."""
    given, v = np.isfinite(y.ravel()), y.ravel()
    shift = shift + grow[:, ~flat] @ y[0][~flat]
    given[: len(flat)] &= flat
    inner = covariance + np.diag(np.broadcast_to(error, y.shape).ravel() ** 2)
    inner, reach, gap = inner[np.ix_(given, given)], grow[given][:, flat], (v - shift)[given]
    half = np.linalg.cholesky(inner)
    white, turned = np.linalg.solve(half, gap), np.linalg.solve(half, reach)
    a, b = turned.T @ turned, turned.T @ white
    value = -0.5 * white @ white - np.log(np.diag(half)).sum() + 0.5 * b @ np.linalg.solve(a, b)
    value -= 0.5 * np.linalg.slogdet(a)[1] + 0.5 * (len(gap) - flat.sum()) * np.log(2 * np.pi)
    delta = np.linalg.solve(a, b)
    gain = np.linalg.solve(inner, covariance[given]).T
    rest = grow[:, flat] - gain @ reach
    mean = shift + grow[:, flat] @ delta + gain @ (gap - reach @ delta)
    spread = covariance - gain @ covariance[given] + rest @ np.linalg.solve(a, rest.T)
    return value, mean.reshape(y.shape), np.sqrt(np.maximum(np.diag(spread), 0)).reshape(y.shape)


def data(d, seed=0):
    """A linear SDE, irregular times with a long gap, and values with hidden components and missing cells."""
    rng = np.random.default_rng(seed)
    kappa = np.diag(np.linspace(0.5, 2, d)) + 0.3 * rng.normal(size=(d, d))
    sigma = np.tril(0.3 * rng.normal(size=(d, d))) + 0.5 * np.eye(d)
    times = np.cumsum(rng.uniform(0.05, 0.4, 12 * d))
    times[6 * d :] += 5
    y = rng.normal(size=(12 * d, d))
    y[:, d // 2 :], y[5, 0], y[9] = np.nan, np.nan, np.nan
    return rf.OrnsteinUhlenbeck(kappa, rng.normal(size=d), sigma), times, y


@pytest.mark.parametrize(
    ("d", "noisy"), [(2, True), (2, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_a_linear_model_is_its_dense_density(d, noisy):
    sde, times, y = data(d)
    kappa, mu, sigma = map(np.asarray, sde._matrices())
    errors = np.random.default_rng(1).uniform(0.05, 0.2, y.shape)
    options = {"measurement_noise": errors} if noisy else {}
    likelihood = rf.series_likelihood(sde, times, y, key=KEY, **options)
    blocks = dense(-kappa, lambda t: kappa @ mu, sigma, times)
    flat = np.isnan(y[0]) | noisy
    value, _, _ = posterior(*blocks, y, errors if noisy else 0.0, flat)
    assert likelihood.method == "kalman"
    np.testing.assert_allclose(likelihood(sde), value, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_a_fit_with_inputs_has_the_states_of_the_dense_posterior():
    """The drift has an input that jumps between values; states are smoothed at the estimates."""
    sde, times, y = data(2)
    mine = rf.ParametricSDE(
        lambda t, x, p, u: p["rate"] @ x + u[0] * jnp.array([0.0, 1.0]),
        lambda t, x, p, u: jnp.asarray(sde.sigma),
        {"rate": -jnp.asarray(sde.kappa)},
    )
    knots, u = np.array([times[0], 3.3, times[-1]]), np.array([0.5, -1.0, 0.0])
    options = {"inputs": (knots, u), "measurement_noise": np.full(y.shape, 0.1), "key": KEY}
    result = rf.fit_sde(mine, times, y, num_starts=1, penalty={"parameters": 1.0}, **options)
    rate = np.asarray(result.sde.parameters["rate"])
    every = np.union1d(times, knots)
    wide = np.full((len(every), 2), np.nan)
    wide[np.searchsorted(every, times)] = y
    constant = lambda t: np.array([0.0, u[np.searchsorted(knots, t, side="right") - 1]])
    blocks = dense(rate, constant, np.asarray(sde.sigma), every)
    value, mean, deviation = posterior(*blocks, wide, 0.1, np.ones(2, bool))
    places = np.searchsorted(every, times)
    np.testing.assert_allclose(result.log_likelihood, value, rtol=0, atol=1e-8)
    np.testing.assert_allclose(result.smoothed[0], mean[places], rtol=0, atol=1e-8)
    np.testing.assert_allclose(result.smoothed[1], deviation[places], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.full((9, 2), np.nan), {}, "values are all missing"),
        (None, {"inputs": (np.zeros(1), np.ones(1))}, "inputs must cover the series"),
        (None, {"inputs": (np.array(["2020", "2021"], "datetime64"), np.ones(2))}, "inputs are dates, but"),
        (None, {"initial": "steady"}, "initial must be"),
        (None, {"measurement_noise": -np.ones((9, 2))}, "positive standard deviation; got -1.0"),
        (None, {"initial": [0.5, 0.2]}, "initial needs 1 value, one for each hidden component, got 2"),
        (None, {"initial": [np.nan]}, "initial must be finite"),
    ],
)
def test_bad_input_is_refused_in_one_line(values, options, message):
    sde, times, y = data(2)
    values = y[:9] if values is None else values
    with pytest.raises((ValueError, TypeError), match=message) as error:
        rf.fit_sde(sde, times[:9], values, key=KEY, **options)
    assert "\n" not in str(error.value)


def test_a_start_that_is_stationary_or_known():
    """The joint normal density of noisy values of a process on a line; from a known start, of the others."""
    rng, kappa, mu, sigma, noise = np.random.default_rng(0), 1.3, 0.4, 0.7, 0.2
    times = np.cumsum(rng.uniform(0.1, 0.9, 30))
    y, lags = rng.normal(size=30), np.abs(times[:, None] - times)
    sde = rf.OrnsteinUhlenbeck(kappa, mu, sigma)
    stationary = sigma**2 / (2 * kappa) * np.exp(-kappa * lags)
    since = times - times[0]
    known = stationary - sigma**2 / (2 * kappa) * np.exp(-kappa * (since[:, None] + since))
    start = np.array([0.9])
    means = {"stationary": np.full(30, mu), "known": mu + (start - mu) * np.exp(-kappa * since)}
    initials = {"stationary": "stationary", "known": start}
    for name, covariance, some in (("stationary", stationary, slice(None)), ("known", known, slice(1, None))):
        spread = (covariance + noise**2 * np.eye(30))[some, some]
        truth = stats.multivariate_normal(means[name][some], spread).logpdf(y[some])
        given = {"measurement_noise": noise, "initial": initials[name]}
        likelihood = rf.series_likelihood(sde, times, y, key=KEY, **given)
        np.testing.assert_allclose(likelihood(sde), truth, rtol=0, atol=1e-8)
        # An unstable SDE has no stationary distribution.
        unstable = likelihood(rf.OrnsteinUhlenbeck(-0.1, mu, 0.01))
        assert np.isfinite(unstable) == (name == "known")


@pytest.mark.parametrize("of", [rf.MultivariateNormal, dist.MultivariateNormal])
def test_a_normal_distribution_of_the_hidden_component_at_the_first_time(of):
    sde, times, y = data(2)
    initial = of(jnp.array([0.3]), jnp.array([[0.7]]))
    likelihood = rf.series_likelihood(sde, times, y, key=KEY, initial=initial)
    kappa, mu, sigma = map(np.asarray, sde._matrices())
    grow, shift, covariance = dense(-kappa, lambda t: kappa @ mu, sigma, times)
    seen = np.isfinite(y.ravel())
    seen[0] = False
    mean = shift + grow @ np.array([y[0, 0], 0.3])
    spread = covariance + 0.7 * np.outer(grow[:, 1], grow[:, 1])
    truth = stats.multivariate_normal(mean[seen], spread[np.ix_(seen, seen)]).logpdf(y.ravel()[seen])
    assert likelihood.method == "kalman"
    np.testing.assert_allclose(likelihood(sde), truth, rtol=0, atol=1e-8)


def test_inputs_are_those_at_the_times_of_the_series():
    """A later series, after other inputs, that starts in equilibrium; tables of pandas; inputs that jump
    inside one step, where a linear model has no exact steps."""
    times, y = np.arange(12.0), np.sin(np.arange(12.0))
    sde = rf.ParametricSDE(
        lambda t, x, p, u: p["rate"] * (u - x), lambda t, x, p, u: 0.5 * jnp.ones((1, 1)), {"rate": 1.0}
    )
    value = lambda times, inputs: rf.series_likelihood(
        sde, times, y, key=KEY, inputs=inputs, initial="stationary", measurement_noise=0.1
    )(sde)
    table = np.append(-1.0, times), np.append(5.0, np.cos(times))
    expected = value(times, table)
    np.testing.assert_allclose(value(times + 8, (table[0] + 8, table[1])), expected, rtol=1e-6)
    np.testing.assert_allclose(value(times, tuple(map(pd.Series, table))), expected, rtol=1e-6)
    options = {"initial": "stationary", "measurement_noise": 0.1, "inputs": table}
    with pytest.raises(ValueError, match="the same inputs at the first time"):
        rf.series_likelihood(sde, [times[:9], times[:9] + 1], [y[:9], y[:9]], key=KEY, **options)
    jump = lambda t: jnp.where(t > 3.3, 1.0, 0.0)[None]
    series = panel(times, y, partial=True)
    setup = Setup(sde, series, Observation(0.1, inputs=jump), rf.transition.Unchanged(), KEY, True, None)
    assert not is_linear(setup.blank(rf.transition.Effort(), "kalman").space(sde))


def test_linear_models_are_recognised_in_single_precision():
    times, counts = 0.2 * np.arange(25), np.round(1 + 0.3 * np.sin(0.2 * np.arange(25)))
    with jax.enable_x64(False):
        sde, observe = rf.OrnsteinUhlenbeck(2.0, 1.0, 0.5), rf.series.Counts(log=True)
        noisy = rf.series_likelihood(sde, times, counts, key=KEY, measurement_noise=0.1)
        given = rf.series_likelihood(sde, times, counts, key=KEY, initial="stationary", observe=observe)
    assert (noisy.method, given.method) == ("kalman", "grid")


def test_numbers_inside_functions_are_not_taken_for_the_measurement_noise():
    """The same linear SDE as functions that contain numbers."""
    times, y = np.arange(12.0) / 4, np.sin(np.arange(12.0) ** 2)
    sde = rf.ParametricSDE(
        lambda t, x, p: 2.0 * p["rate"] * (0.25 - 0.5 * x), lambda t, x, p: 0.5 * jnp.eye(1), {"rate": 1.0}
    )
    parts = panel(times, y, partial=True), Observation(0.3), rf.transition.Unchanged(), KEY, True, None
    likelihood = Setup(sde, *parts).likelihood(Parameters.of(sde, {}), np.zeros(1), {})
    exact = rf.series_likelihood(
        rf.OrnsteinUhlenbeck(1.0, 0.5, 0.5), times, y, key=KEY, measurement_noise=0.3
    )
    free = likelihood.parameters.to_free(np.array([1.0, 0.3]))
    np.testing.assert_allclose(
        likelihood.log_likelihood(free), exact(rf.OrnsteinUhlenbeck(1.0, 0.5, 0.5)), rtol=0, atol=1e-8
    )


def test_noise_that_vanishes_or_is_not_identified_is_named():
    sde, times, y = rf.OrnsteinUhlenbeck(1.0, 0.5, 0.5), np.arange(12.0) / 4, np.sin(np.arange(12.0) ** 2)
    parts = panel(times, y, partial=True), Observation(0.3), rf.transition.Unchanged(), KEY, True, None
    likelihood = Setup(sde, *parts).likelihood(Parameters.of(sde, sde.domains), np.zeros(4), {})
    free = likelihood.parameters.to_free(np.array([1.0, 0.5, 1e-200, 0.3]))
    with pytest.raises(ValueError, match="the estimate of sigma is zero: fix it"):
        likelihood.smoothed(free)
    result = rf.FittedSDE(
        likelihood, (), free, np.diag([1.0, 1.0, 1.0, 0.0]), np.full((2, 4), np.inf), 0.0, 0.1
    )
    assert result.unidentified == ("measurement_noise",)
    assert "measurement_noise is not identified" in result.warning


class _Standard(eqx.Module):
    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x)


class _Joint:
    """The density of all values of a time."""

    def log_prob(self, y):
        return -jnp.sum(y**2)


def _one_noise(t, x):
    return jnp.array([[0.0], [0.3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observe": lambda t, x: _Joint()}, "one log-density for each of the 2 columns"),
        ({"measurement_noise": 0.1, "steps": 2}, "steps requires noise in all components"),
        ({"observe": lambda t, x: _Joint(), "inputs": (np.arange(5.0), np.ones(5))}, "inputs must cover"),
    ],
)
def test_what_several_hidden_components_do_not_support_is_refused_in_one_line(options, message):
    sde = rf.ParametricSDE(
        lambda t, x, p: -(x**3) * p["rate"], lambda t, x, p: _one_noise(t, x), {"rate": 1.0}
    )
    values = np.column_stack([np.sin(np.arange(9.0)), np.cos(np.arange(9.0))])
    values[3, 0] = np.nan
    with pytest.raises(ValueError, match=message) as error:
        rf.series_likelihood(sde, np.arange(9.0), values, key=KEY, **options)
    assert "\n" not in str(error.value)


def test_particles_on_a_linear_model_are_kalmans_filter():
    """With a hidden component, a missing value, known errors, an input that jumps at each time, and one step
    per value as for other SDEs."""
    sde, times, y = data(2)
    times, y = times[:12], y[:12]
    driven = rf.ParametricSDE(
        lambda t, x, p, u: sde.drift(t, x) + p["gain"] * u,
        lambda t, x, p, u: sde.diffusion(t, x),
        {"gain": 1.0},
    )
    inputs = rf.series.Inputs(times, (-1.0) ** np.arange(12))
    options = {"measurement_noise": np.full(y.shape, 0.1), "inputs": inputs}
    exact = rf.series_likelihood(driven, times, y, key=KEY, **options)
    assert exact.method == "kalman"
    setup = Setup(
        driven, panel(times, y, partial=True), Observation(**options), sde.coordinates, KEY, False, None
    )
    found = setup.made(rf.transition.Effort(1, 32, 1), "particles")
    (value,), (error,) = eqx.filter_jit(lambda one: one.parts(one.space(driven)))(found)
    assert error < 0.02
    np.testing.assert_allclose(value, exact(driven), rtol=0, atol=3 * error)


@pytest.mark.slow
def test_the_most_likely_states_of_a_chaotic_sde_with_little_noise_are_found():
    """Lorenz's equations in Euler steps, of which noisy values of one component are observed, with a gap."""
    drift = lambda t, x, p: jnp.stack(
        [10 * (x[1] - x[0]), x[0] * (28 - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]]
    )
    sde = rf.ParametricSDE(drift, lambda t, x, p: p["scale"] * jnp.eye(3), {"scale": 0.1})
    rng, times, x = np.random.default_rng(0), 0.02 * np.arange(30), [np.zeros(3)]
    for _ in times[1:]:
        x.append(x[-1] + 0.02 * np.asarray(drift(0.0, x[-1], None)) + 0.1 * 0.02**0.5 * rng.normal(size=3))
    y = np.full((30, 3), np.nan)
    y[:, 0] = np.array(x)[:, 0] + rng.normal(size=30)
    y[10:20] = np.nan
    options = {"measurement_noise": np.ones(y.shape), "initial": _Standard(), "steps": 1}
    likelihood = rf.series_likelihood(
        sde, times, y, key=KEY, effort=rf.transition.Effort(1, 64, 1), **options
    )
    assert likelihood.with_error(sde)[1] < 0.1


@pytest.mark.slow
def test_counts_of_two_hidden_components_are_those_of_particles():
    """Lotka–Volterra with Poisson counts, some of them missing, beside a bootstrap particle filter."""
    one = problem("lotka-gaps", fits=False)
    one = dataclasses.replace(one, times=one.times[:16])
    y, _ = one.simulated(0)
    assert np.isnan(y).any()
    expected = [one.bootstrap(y, 20_000, seed) for seed in range(4)]
    effort = rf.transition.Effort(1, 32, 1)
    ours = rf.series_likelihood(one.sde, one.times, y, key=KEY, effort=effort, **one.options)
    assert ours.method == "particles"
    value, error = ours.with_error(one.sde)
    assert error < 0.1
    assert abs(value - np.mean(expected)) < 3 * np.hypot(error, np.std(expected) / 2) + 0.01


@pytest.mark.slow
def test_a_fit_of_two_hidden_components():
    """Its maximum, its bands and its forecasts are those of the truth, within their errors."""
    one = problem("lotka", fits=True)
    y, states = one.simulated(0)
    result = rf.fit_sde(one.sde, one.times, y, key=KEY, num_starts=1, **one.options)
    assert result.warning is None
    z = (result.estimates - [float(x) for x in jax.tree.leaves(one.sde)]) / list(
        result.standard_errors.values()
    )
    assert np.all(np.abs(z) < 3.5)
    mean, deviation = result.smoothed
    assert np.mean(np.abs(states - mean) < 1.96 * deviation) > 0.85
    now, wide = result.filtered
    assert np.mean(wide) > np.mean(deviation)
    assert np.mean(np.abs(states - now) < 3 * wide) > 0.9
    paths = result.forecast([1e-4], key=KEY, num_paths=2000)
    np.testing.assert_allclose(paths.mean(axis=(0, 1)), mean[-1], atol=0.3 * deviation[-1])
