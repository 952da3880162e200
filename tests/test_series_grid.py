"""Nonlinear series with one hidden component, against dense quadrature written in NumPy."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import roughflow as rf
from benchmarks.series_hidden import COORDINATES, LogHeston
from roughflow.series._observed import panel
from roughflow.series.hidden._likelihood import Observation, Setup

KEY = jax.random.key(0)
HESTON = LogHeston(*map(jnp.asarray, (5e-4, 0.05, 1e-4, 2e-3, -0.7)))


def returns(count, seed=0):
    """Logarithms of a price by Euler steps."""
    rng, v, x = np.random.default_rng(seed), 1e-4, [0.0]
    p = [float(leaf) for leaf in jax.tree.leaves(HESTON)]
    for _ in range(count - 1):
        a, b = rng.normal(size=2)
        x.append(x[-1] + p[0] - v / 2 + np.sqrt(v) * a)
        shock = p[4] * a + np.sqrt(1 - p[4] ** 2) * b
        v = max(v + p[1] * (p[2] - v) + p[3] * np.sqrt(v) * shock, 1e-6)
    return np.array(x)


def euler_filter(x, parameters, v0, count=200):
    """The log-likelihood of Euler steps by the trapezoidal rule on nodes of √V."""
    mu, kappa, theta, xi, rho = parameters
    root = np.linspace(1e-4, 0.04, count)
    v, weight = root**2, 2 * root * (root[1] - root[0])
    total, share, nodes = 0.0, np.ones(1), np.array([v0])
    for rise in np.diff(x):
        own = stats.norm.pdf(rise, mu - nodes / 2, np.sqrt(nodes))
        shock = rho * (rise - mu + nodes / 2) / np.sqrt(nodes)
        mean = nodes + kappa * (theta - nodes) + xi * np.sqrt(nodes) * shock
        joint = (share * own) @ stats.norm.pdf(v, mean[:, None], xi * np.sqrt(nodes * (1 - rho**2))[:, None])
        nodes, share = v, joint * weight
        total += np.log(share.sum())
        share = share / share.sum()
    return total


def test_euler_steps_are_those_of_dense_quadrature():
    x = returns(12)
    values = np.column_stack([x, np.full(12, np.nan)])
    options = {"coordinates": COORDINATES, "initial": np.array([1e-4]), "steps": 1}
    likelihood = rf.series_likelihood(HESTON, np.arange(12), values, key=KEY, **options)
    truth = [float(leaf) for leaf in jax.tree.leaves(HESTON)]
    value, slopes = eqx.filter_value_and_grad(likelihood)(HESTON)
    np.testing.assert_allclose(value, euler_filter(x, truth, 1e-4), rtol=0, atol=2e-3)
    for i, slope in enumerate(jax.tree.leaves(slopes)):
        h = 1e-3 * truth[i]
        moved = [
            euler_filter(x, [*truth[:i], truth[i] + side * h, *truth[i + 1 :]], 1e-4) for side in (1, -1)
        ]
        np.testing.assert_allclose(slope * truth[i], (moved[0] - moved[1]) / 2e-3, rtol=1e-2, atol=1e-2)


def on_grid(sde, times, values, steps, exact):
    setup = Setup(sde, panel(times, values, partial=True), Observation(), sde.coordinates, KEY, exact, None)
    return setup.made(rf.transition.Effort(1, 32, steps), "grid")


@pytest.mark.parametrize(
    ("closed", "error"),
    [(True, 1e-6), pytest.param(False, 1e-3, marks=pytest.mark.slow)],
    ids=["exact", "paths"],
)
def test_a_linear_model_is_that_of_kalmans_filter(closed, error):
    """With a hidden component, missing values and a long gap."""
    rng = np.random.default_rng(0)
    sde = rf.OrnsteinUhlenbeck([[1.0, -0.8], [0.2, 0.7]], [0.1, -0.2], [[0.4, 0.0], [0.2, 0.3]])
    times = np.cumsum(rng.uniform(0.05, 0.15, 16))
    times[10:] += 0.5
    y = np.column_stack([0.3 * rng.normal(size=16), np.full(16, np.nan)])
    y[7] = np.nan
    exact = rf.series_likelihood(sde, times, y, key=KEY)
    assert exact.method == "kalman"
    likelihood = on_grid(sde, times, y, 1, closed)
    np.testing.assert_allclose(likelihood(sde), exact(sde), rtol=0, atol=error)


def particles(sde, dt, prices, count, substeps, seed=0):
    """The log-likelihood of a stochastic volatility model: given the log-variance, log-prices are normal.

    The log-variance moves exactly, and integrals over time are those of the trapezoidal rule; ∫ √V dB of its
    noise follows from Itô's formula for √V. (Sums of the values at the start of each step are .07 off.)
    """
    rng, total = np.random.default_rng(seed), 0.0
    mu, kappa, theta, sigma, rho = (float(leaf) for leaf in jax.tree.leaves(sde))
    h, step = theta + sigma / np.sqrt(2 * kappa) * rng.normal(size=count), dt / substeps
    decay = np.exp(-kappa * step)
    spread = sigma * np.sqrt((1 - decay**2) / (2 * kappa))
    for rise in np.diff(np.log(prices)):
        mean, variance = np.full(count, mu * dt), np.zeros(count)
        for _ in range(substeps):
            later = theta + decay * (h - theta) + spread * rng.normal(size=count)
            roots = np.exp(h / 2), np.exp(later / 2)
            v = (roots[0] ** 2 + roots[1] ** 2) / 2
            pull = roots[0] * (kappa * (theta - h) + sigma**2 / 4)
            pull = (pull + roots[1] * (kappa * (theta - later) + sigma**2 / 4)) / 2
            shock = (2 * (roots[1] - roots[0]) - pull * step) / sigma
            mean += rho * shock - 0.5 * v * step
            variance += (1 - rho**2) * v * step
            h = later
        weight = stats.norm.pdf(rise, mean, np.sqrt(variance))
        total += np.log(weight.mean())
        points = (np.arange(count) + rng.uniform()) / count * weight.sum()
        h = h[np.minimum(np.searchsorted(np.cumsum(weight), points), count - 1)]
    return total - np.log(prices[1:]).sum()


@pytest.mark.slow
def test_stochastic_volatility_is_that_of_particles():
    """In continuous time, which one step per value is close to."""
    sde = rf.series.StochasticVolatility(0.05, 6.0, -3.5, 2.5, -0.6)
    path = rf.simulate(sde, jnp.array([100.0, -3.0]), key=KEY, t1=0.5, steps=1000, trajectory=True)
    prices = np.array(path[::20])
    expected = [particles(sde, 0.01, prices[:, 0], 40_000, 10, seed) for seed in range(6)]
    mean, error = np.mean(expected), np.std(expected) / 6**0.5
    prices[:, 1] = np.nan
    likelihood = rf.series_likelihood(
        sde,
        0.01 * np.arange(51),
        prices,
        key=KEY,
        initial="stationary",
        effort=rf.transition.Effort(1, 32, 1),
    )
    finer = dataclasses.replace(likelihood, mesh=likelihood.mesh.with_steps(2))
    values = float(likelihood(sde)), float(finer(sde))
    assert error < 0.02
    assert abs(values[0] - mean) < 0.05 + 3 * error
    assert abs(values[1] - mean) < 0.02 + 3 * error


class Poisson(eqx.Module):
    """Counts with an intensity e^x."""

    scale: jax.Array

    def __call__(self, t, x):
        return _Counts(self.scale * jnp.exp(x[0]))


class _Counts(eqx.Module):
    rate: jax.Array

    def log_prob(self, y):
        return y * jnp.log(self.rate) - self.rate - jax.lax.lgamma(y + 1)

    def cdf(self, y):
        return jax.scipy.special.gammaincc(jnp.floor(y) + 1, self.rate)


def counts(count=60):
    rng, kappa, sigma = np.random.default_rng(1), 0.5, 0.6
    times = np.cumsum(rng.uniform(0.2, 0.8, count))
    x = [0.3]
    for gap in np.diff(times):
        decay = np.exp(-kappa * gap)
        x.append(decay * x[-1] + sigma * np.sqrt((1 - decay**2) / (2 * kappa)) * rng.normal())
    return times, rng.poisson(5 * np.exp(x)).astype(float)


def counts_filter(times, y, kappa, sigma, scale):
    """Log-likelihood, and the mean of the last state, with a stationary start."""
    nodes = np.linspace(-6, 6, 401)
    share = stats.norm.pdf(nodes, 0, sigma / np.sqrt(2 * kappa)) * (nodes[1] - nodes[0])
    total = 0.0
    for i, value in enumerate(y):
        if i:
            decay = np.exp(-kappa * (times[i] - times[i - 1]))
            wide = sigma * np.sqrt((1 - decay**2) / (2 * kappa))
            share = share @ stats.norm.pdf(nodes, decay * nodes[:, None], wide) * (nodes[1] - nodes[0])
        if np.isfinite(value):
            share = share * stats.poisson.pmf(value, scale * np.exp(nodes))
        total += np.log(share.sum())
        share = share / share.sum()
    return total, share @ nodes


def test_counts_of_a_hidden_intensity():
    """With missing values; the density has a parameter of its own."""
    times, y = counts(30)
    y[20:23] = np.nan
    sde = rf.OrnsteinUhlenbeck(0.5, 0.0, 0.6)
    options = {"observe": Poisson(jnp.asarray(5.0)), "initial": "stationary"}
    likelihood = rf.series_likelihood(sde, times, y, key=KEY, **options)
    expected, last = counts_filter(times, y, 0.5, 0.6, 5.0)
    np.testing.assert_allclose(likelihood(sde), expected, rtol=0, atol=1e-4)
    assert "exact transitions" in likelihood.described()
    assert last  # its mean is compared in the test of fits


@pytest.mark.slow
def test_a_grid_that_does_not_cover_the_states_is_replaced():
    """Far from the SDE that it was made for; but not in a compiled program."""
    times, y = counts()
    far = rf.OrnsteinUhlenbeck(0.5, 1.5, 1.2)
    options = {"observe": Poisson(jnp.asarray(5.0)), "initial": "stationary", "key": KEY}
    near = rf.series_likelihood(rf.OrnsteinUhlenbeck(0.5, 0.0, 0.1), times, y, **options)
    expected = rf.series_likelihood(far, times, y, **options)(far)
    np.testing.assert_allclose(near(far), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(near.with_error(far)[0], expected, rtol=0, atol=1e-4)
    assert abs(eqx.filter_jit(near)(far) - expected) > 0.1


@pytest.mark.slow
def test_a_fit_to_counts_has_the_states_of_dense_quadrature():
    times, y = counts()
    domains = {"mu": rf.series.Domain(lower=-1e-6, upper=1e-6), "scale": rf.series.Domain(lower=0.0)}
    result = rf.fit_sde(
        rf.OrnsteinUhlenbeck(0.4, 0.0, 0.5), times, y, key=KEY, num_starts=1, domains=domains,
        observe=Poisson(jnp.asarray(4.0)), initial="stationary",
    )  # fmt: skip
    p = result.params
    expected, last = counts_filter(times, y, p["kappa"], p["sigma"], p["scale"])
    np.testing.assert_allclose(result.log_likelihood, expected, rtol=0, atol=1e-3)
    np.testing.assert_allclose(result.filtered[0][-1, 0], last, rtol=0, atol=1e-3)
    np.testing.assert_allclose(result.smoothed[0][-1, 0], last, rtol=0, atol=1e-3)
    names = ("kappa", "sigma", "scale")
    for name in names:
        for side in (-0.02, 0.02):
            moved = {k: p[k] * (1 + side * (k == name)) for k in names}
            assert counts_filter(times, y, **moved)[0] < expected
    residuals = result.residuals(key=KEY)
    assert residuals.ljung_box > 1e-3
    paths = result.forecast([1e-4], key=KEY, num_paths=4000)
    np.testing.assert_allclose(paths.mean(), last, atol=5 * result.filtered[1][-1, 0] / 4000**0.5)


LINE = rf.OrnsteinUhlenbeck(1.0, 0.0, 1.0)


class _NotANumber(eqx.Module):
    def log_prob(self, y):
        return jnp.nan * y


@pytest.mark.parametrize(
    ("sde", "values", "options", "message"),
    [
        (HESTON, "hidden", {"steps": 0}, "steps must be"),
        (HESTON, "hidden", {"initial": "stationary"}, "initial='stationary' requires a linear SDE or one"),
        (rf.FitzHughNagumo, "hidden", {}, "no starting values if component 1 is hidden"),
        (HESTON, "nothing", {}, "values are all missing"),
        (rf.OrnsteinUhlenbeck(1.0, 0.0, 1.0), "counts", {"observe": lambda t, x: _NotANumber()}, "of NaN"),
        (
            rf.OrnsteinUhlenbeck(1.0, 0.0, 1.0),
            "counts",
            {"observe": lambda t, x: x},
            "an object with log_prob",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(sde, values, options, message):
    columns = {
        "hidden": np.column_stack([returns(9), np.full(9, np.nan)]),
        "nothing": np.full((9, 2), np.nan),
        "counts": np.arange(9.0),
    }
    with pytest.raises((ValueError, TypeError), match=message) as error:
        rf.fit_sde(sde, np.arange(9), columns[values], key=KEY, **options)
    assert "\n" not in str(error.value)
