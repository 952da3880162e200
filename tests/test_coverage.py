"""How often the truth lies within two standard errors, over random SDEs, points and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import ESTIMATORS, THREE, made, ou, ou_distribution

from roughflow.density import log_mean

POINTS = 64


def cases(count, driver, seed):
    """Random linear SDEs with closed form, points drawn from each, and a key."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        numbers = (rng.uniform(0.3, 1.5), rng.uniform(0.6, 1.4), rng.normal(), rng.uniform(0.4, 1.0))
        distribution = ou_distribution(*numbers, driver=driver)
        x = distribution.rvs(POINTS, random_state=rng)[:, None]
        yield ou(*numbers), x, distribution.logpdf(x), jax.random.fold_in(jax.random.key(seed), i)


def percent(inside, counted):
    return 100 * np.sum(inside & counted) / np.sum(counted)


def report(name, inside, counted, suspect):
    """The percentage inside of the cases that are not suspect; printed with that of all."""
    total, trusted = percent(inside, counted), percent(inside, counted & ~suspect)
    print(f"{name}: {total:.1f} % of {counted.sum()}, {trusted:.1f} % without {suspect.sum()} suspect ones")
    return trusted


def check(name, estimate_at, count, seed):
    """Against the distribution the finite driver has: a standard error is all there is."""
    error, deviation, suspect = [], [], []
    for flow, x, truth, key in cases(count, THREE, seed):
        estimate = estimate_at(flow, x, key)
        error.append(np.abs(estimate.log_prob - truth))
        deviation.append(estimate.standard_error)
        suspect.append(estimate.suspect)
    error, deviation, suspect = map(np.concatenate, (error, deviation, suspect))
    counted = deviation > 1e-9
    assert np.mean(counted) > 0.9
    assert 90 <= report(name, error < 2 * deviation, counted, suspect) <= 99


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("spread", [0.25, 0.5, 1.0])
def test_the_error_bar_of_few_skewed_weights(spread, count):
    """Lognormal weights with mean 1, whose tail few of them show: log p is 0."""
    estimate = made(spread * np.random.default_rng(0).normal(size=(count, 4000)) - spread**2 / 2)
    assert np.mean(np.abs(estimate.log_prob) < 2 * estimate.standard_error) > 0.92
    assert np.median(estimate.standard_error) < 1.6 * np.std(estimate.log_prob)


def test_the_logarithm_of_a_mean_of_few_weights_is_not_low():
    """Which it would be by half the variance of the mean."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(16, 40_000)) - 0.5)
    bias, before = np.mean(made(weights).log_prob), np.mean(log_mean(weights))
    assert abs(before + 0.5 * (np.e - 1) / 16) < 0.015
    assert abs(bias) < abs(before) / 3


@pytest.mark.parametrize("count", [256, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 3])
def test_the_error_bar_of_weights_that_are_bumps(size, count):
    """Of paths that mostly miss: a few weights like one another, the rest next to nothing. No tail there."""
    normal = np.random.default_rng(0).normal(size=(count, 4000, size))
    estimate = made(-5 * np.sum(normal**2, axis=-1))
    score = (estimate.log_prob + 0.5 * size * np.log(11)) / estimate.standard_error
    trusted = ~np.asarray(estimate.suspect)
    assert np.mean(np.abs(score[trusted]) < 2) > 0.92
    assert np.sqrt(np.mean(score[trusted] ** 2)) > 0.7


CHECKED = ("PullBack-Prior", "PullBack-Sobol", "PullBack-Amortised-shaken")


def plainly(name):
    return lambda flow, x, key: flow.estimate(x, key=key, estimator=ESTIMATORS[name][0])


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.slow
def test_truth_is_within_two_standard_errors_nineteen_times_in_twenty(name):
    check(name, plainly(name), 4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_truth_is_within_two_standard_errors_over_fifty_sdes(name):
    check(name, plainly(name), 50, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "PullBack-Sobol", "PullBack-Laplace"])
def test_truth_of_the_sde_is_within_two_total_errors(name):
    """With Laplace there is hardly a standard error, so there the truncation error stands alone."""
    estimator, inside, suspect = ESTIMATORS.get(name, (None,))[0], [], []
    for flow, x, truth, key in cases(8, None, seed=3):
        estimate = flow.estimate(x, key=key, estimator=estimator)
        inside.append(np.abs(estimate.log_prob - truth) < 2 * estimate.total_error)
        suspect.append(estimate.suspect)
    inside, suspect = np.concatenate(inside), np.concatenate(suspect)
    assert report(f"{name} against the SDE", inside, np.ones_like(inside), suspect) >= 93
