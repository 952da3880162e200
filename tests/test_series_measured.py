"""Series observed with errors, against Kalman's filter."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

import roughflow as rf
from roughflow.series._observed import panel
from roughflow.series.hidden._likelihood import Observation, Setup

LINE = rf.OrnsteinUhlenbeck(2.0, 0.1, 0.5)
PLANE = rf.OrnsteinUhlenbeck([[1.0, 0.4], [-0.3, 0.7]], [0.1, -0.2], [[0.4, 0.0], [0.2, 0.3]])
CIR = rf.CoxIngersollRoss(0.8, 0.05, 0.12)


def matrices(kappa, sigma, times):
    """e^{−κ dt}, and the covariance, of each transition by Van Loan's way."""
    d = len(kappa)
    block = np.block([[kappa, sigma @ sigma.T], [np.zeros((d, d)), -kappa.T]])
    power = linalg.expm(block * np.diff(times)[:, None, None])
    grow = np.swapaxes(power[:, d:, d:], 1, 2)
    return zip(grow, grow @ power[:, :d, d:], strict=True)


def kalman(kappa, mu, sigma, noise, times, y):
    """log p(y₁, … | y₀) with a flat prior for the first state."""
    kappa, sigma = np.atleast_2d(kappa), np.atleast_2d(sigma)
    mu, error = np.atleast_1d(mu), np.diag(np.broadcast_to(noise, len(kappa)) ** 2)
    mean, variance, total = y[0], error, 0.0
    for value, (grow, covariance) in zip(y[1:], matrices(kappa, sigma, times), strict=True):
        mean, variance = mu + grow @ (mean - mu), grow @ variance @ grow.T + covariance
        spread, gap = variance + error, value - mean
        total -= 0.5 * (gap @ np.linalg.solve(spread, gap) + np.linalg.slogdet(2 * np.pi * spread)[1])
        gain = variance @ np.linalg.inv(spread)
        mean, variance = mean + gain @ gap, variance - gain @ variance
    return total


def observed(sde, noise, count=100, seed=0):
    """Irregular times, and values of a linear SDE with errors."""
    rng = np.random.default_rng(seed)
    kappa, mu, sigma = (np.asarray(part) for part in sde._matrices())
    times, x = np.cumsum(rng.uniform(0.02, 0.2, count)), [mu]
    for grow, covariance in matrices(kappa, sigma, times):
        x.append(mu + grow @ (x[-1] - mu) + np.linalg.cholesky(covariance) @ rng.normal(size=len(mu)))
    return times, np.array(x) + noise * rng.normal(size=(count, len(mu)))


def hidden(sde, times, y, method, key, **options):
    """The log-likelihood by one method, and its error."""
    series = panel(times, y, partial=True)
    setup = Setup(sde, series, Observation(**options), sde.coordinates, key, exact=True, effort=None)
    likelihood = setup.made(rf.transition.Effort(1, 32, 2), method)
    return likelihood, eqx.filter_jit(lambda one: one.parts(one.space(sde)))(likelihood)


@pytest.mark.slow
def test_particles_on_a_linear_panel_need_no_luck(key):
    """A panel of two, with missing cells, is as Kalman's filter has it."""
    noise = 0.1
    series = [observed(PLANE, noise, count, seed) for seed, count in enumerate((40, 30))]
    times, y = [one[0] for one in series], [one[1] for one in series]
    exact = rf.series_likelihood(PLANE, times, y, key=key, measurement_noise=noise)
    expected = [kalman(PLANE.kappa, PLANE.mu, PLANE.sigma, noise, *one) for one in series]
    assert exact.method == "kalman"
    np.testing.assert_allclose(exact(PLANE), sum(expected), rtol=0, atol=1e-8)
    y[0][3, 1] = y[1][5, 0] = np.nan
    likelihood = rf.series_likelihood(PLANE, times, y, key=key, measurement_noise=noise)
    exact, slopes = eqx.filter_value_and_grad(likelihood)(PLANE)
    smooth, (value, error) = hidden(PLANE, times, y, "laplace", key, measurement_noise=jnp.asarray(noise))
    np.testing.assert_allclose(jnp.sum(value), exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(error, 0, atol=1e-5)
    # Particles have wider draws of the first state, and the derivatives of the joint density.
    guided = dataclasses.replace(smooth, method="particles")
    value, found = eqx.filter_value_and_grad(guided)(PLANE)
    np.testing.assert_allclose(value, exact, rtol=0, atol=0.03)
    for name in ("kappa", "mu", "sigma"):
        np.testing.assert_allclose(getattr(found, name), getattr(slopes, name), rtol=0.1, atol=0.5)


def test_a_fit_with_errors_is_that_of_kalmans_filter():
    times, y = observed(LINE, 0.1)
    start = rf.OrnsteinUhlenbeck(1.0, 0.3, 0.3)
    result = rf.fit_sde(start, times, y, key=jax.random.key(0), measurement_noise=0.05, num_starts=1)
    assert result.converged
    assert result.names == ("kappa", "mu", "sigma", "measurement_noise")

    def loss(free):
        return -kalman(free[0], free[1], np.exp(free[2]), np.exp(free[3]), times, y)

    free = np.append(result.estimates[:2], np.log(result.estimates[2:]))
    np.testing.assert_allclose(result.log_likelihood, -loss(free), rtol=0, atol=1e-8)
    h = 1e-3 * np.eye(4)
    slope = [(loss(free + a) - loss(free - a)) / 2e-3 for a in h]
    moved = lambda a, b: loss(free + a + b) - loss(free + a - b)
    information = np.array([[(moved(a, b) + moved(-a, -b)) / 4e-6 for b in h] for a in h])
    errors = np.sqrt(np.diag(np.linalg.inv(information)))
    scale = np.append(np.ones(2), result.estimates[2:])
    np.testing.assert_allclose(list(result.standard_errors.values()), scale * errors, rtol=1e-3)
    assert np.all(np.abs(np.linalg.solve(information, slope)) < 1e-2 * errors)
    # Values have no scores of their own.
    assert np.isnan(list(result.robust_errors.values())).all()
    assert "robust" not in result.summary()
    assert "Kalman filter, exact" in result.summary()
    assert result.warning is None
    # What is known of the states is what Kalman's filter knows of the last.
    states, deviations = result.smoothed
    paths = result.forecast([1e-3], key=jax.random.key(1), num_paths=2000)
    assert abs(paths.mean() - states[-1, 0]) < 5 * deviations[-1, 0] / 2000**0.5
    np.testing.assert_allclose(paths.std(), deviations[-1, 0], rtol=0.15)
    residuals = result.residuals(key=jax.random.key(2))
    assert residuals.uniform.shape == (99,)
    assert residuals.uniformity > 0.01


@pytest.mark.parametrize("case", ["number", "values", "hidden", "plane"])
def test_missing_values_before_the_first_are_dropped(case, key):
    """The flat prior belongs to the first value, in each series of a panel."""
    lead, rng = 20, np.random.default_rng(1)
    sde = LINE if case in ("number", "values") else PLANE
    times, y = observed(sde, 0.1, count=60)
    if case == "hidden":
        y[:, 1] = np.nan
    late = np.where(np.arange(60)[:, None] < lead, np.nan, y)
    errors = [rng.uniform(0.05, 0.2, y.shape) for _ in range(2)]

    def likelihood(start):
        noise = {"number": 0.1, "values": [errors[0], errors[1][start:]]}
        noise["plane"] = noise["values"]
        panel = [times, times[start:]], [y, late[start:]]
        return rf.series_likelihood(sde, *panel, key=key, measurement_noise=noise.get(case))

    whole, short = likelihood(0), likelihood(lead)
    assert whole.method == "kalman"
    np.testing.assert_allclose(whole(sde), short(sde), rtol=0, atol=1e-9)
    known = {"measurement_noise": 0.1, "initial": np.zeros(y.shape[1])}
    whole, short = (rf.series_likelihood(sde, times[i:], late[i:], key=key, **known) for i in (0, lead))
    assert abs(whole(sde) - short(sde)) > 0.01


def test_states_before_the_first_value_are_missing():
    times, y = observed(LINE, 0.1, count=60)
    y[:20] = np.nan
    fit = lambda i: rf.fit_sde(
        LINE, times[i:], y[i:], key=jax.random.key(0), measurement_noise=0.1, num_starts=1
    )
    whole, short = fit(0), fit(20)
    assert whole.params == pytest.approx(short.params)
    for states in ("smoothed", "filtered"):
        mine, other = getattr(whole, states), getattr(short, states)
        for a, b in zip(mine, other, strict=True):
            assert np.isnan(a[:20]).all()
            np.testing.assert_allclose(a[20:], b, rtol=1e-6)


@pytest.mark.slow
def test_cir_with_errors_is_the_same_by_grid_and_particles(key):
    """Some values are negative, which no state is."""
    fine = rf.simulate(CIR, jnp.full(1, 0.03), key=jax.random.key(4), t1=6.0, steps=1200, trajectory=True)
    y = np.asarray(fine[::20]) + 0.015 * np.random.default_rng(0).normal(size=(61, 1))
    assert (y < 0).any()
    noise = {"measurement_noise": jnp.asarray(0.015)}
    _, ((exact,), _) = hidden(CIR, np.arange(61) / 10, y, "grid", key, **noise)
    _, ((drawn,), (spread,)) = hidden(CIR, np.arange(61) / 10, y, "particles", key, **noise)
    assert abs(drawn - exact) < 4 * spread < 0.2
