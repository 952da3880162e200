"""What an estimate of log p(x) reports, and how it is made: failures, chunks, error bars."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    ESTIMATORS,
    THREE,
    Linear,
    LogNormal,
    curved,
    gbm_1d,
    linear,
    linear_distribution,
    made,
    ou,
    ou_distribution,
)
from roughflow.density.estimators import _importance, _weights
from roughflow.density.estimators._weights import EstimatorRun, Weighed
from scipy import stats

import roughflow as rf

# ---------------------------------------------------------------------------------- escapes and failures


class Bistable(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * (z - z**3)


def test_paths_that_escape_have_weight_zero_and_leave_the_gradient_finite(key):
    """Half of the paths back from 1.3 in a double well go to infinity: they count as paths."""
    base, x = rf.Normal(jnp.zeros(1)), jnp.array([[0.3], [1.3]])
    flow = lambda rate: rf.StochasticFlow(rf.ItoSDE(Bistable(rate), rf.ConstantDiffusion(jnp.eye(1))), base)
    estimator = rf.PullBack(512)
    estimate = flow(jnp.array(1.0)).estimate(x, key=key, estimator=estimator, solver=False)
    paths = flow(jnp.array(1.0)).sample_path(key=key, shape=(20_000, 1))
    given = np.exp(flow(jnp.array(1.0)).log_prob_given_path(x, paths))
    error = np.hypot(estimate.standard_error, given.std(axis=0) / given.mean(axis=0) / np.sqrt(20_000))
    assert np.all(np.abs(estimate.log_prob - np.log(given.mean(axis=0))) < 4 * error)
    share = np.mean(given == 0, axis=0)
    assert share[1] > 0.3
    np.testing.assert_allclose(estimate.escaped / 512, share, rtol=0, atol=0.08)
    value = lambda rate: jnp.sum(rf.LowerBound(estimator)(flow(rate), x, key=key))
    value, h = jax.jit(jax.value_and_grad(value)), 1e-5
    slope = (value(jnp.array(1 + h))[0] - value(jnp.array(1 - h))[0]) / (2 * h)
    np.testing.assert_allclose(value(jnp.array(1.0))[1], slope, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Tempered", marks=pytest.mark.slow),
        pytest.param("PullBack-Prior", marks=pytest.mark.slow),
        "Endpoint-Prior",
        pytest.param("Endpoint-Laplace", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_not_finite_is_an_error_of_one_line(name, key):
    """And so for a plain pull-back, in the test that follows."""
    x = jnp.linspace(-1, 2, 64)[:, None]
    with pytest.raises(rf.NonFiniteError, match=r"^[^\n]*drift[^\n]*$"):
        ou(np.nan).estimate(x, key=key, estimator=ESTIMATORS[name][0])


def test_no_program_raises_where_nothing_fails(key, monkeypatch):
    """JAX's cache on disk keeps none that may, and a second process would compile it anew."""
    asked, weigh = [], _weights.weigh
    record = lambda estimator, flow, *rest: asked.append(flow.raises) or weigh(estimator, flow, *rest)
    monkeypatch.setattr(_weights, "weigh", record)
    ou().estimate(jnp.zeros((1, 1)), key=key, estimator=rf.PullBack(2), solver=False)
    assert asked == [False]
    with pytest.raises(rf.NonFiniteError, match=r"^[^\n]*drift[^\n]*$"):
        ou(np.nan).estimate(jnp.zeros((1, 1)), key=key, estimator=rf.PullBack(2))
    assert asked == [False, False, True]


@pytest.mark.parametrize(
    "estimator",
    [rf.PullBack(2), pytest.param(rf.Endpoint(2), marks=pytest.mark.slow)],
    ids=["PullBack", "Endpoint"],
)
def test_running_out_of_steps_is_an_error_of_one_line(estimator, key):
    sde = ou().sde
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), 1.0, THREE, integrator=rf.Adaptive(max_steps=2))
    with pytest.raises(rf.OutOfStepsError, match=r"^[^\n]*max_steps[^\n]*$"):
        flow.estimate(jnp.zeros((1, 1)), key=key, estimator=estimator)


def test_points_that_cannot_be_asked_about_are_refused(key):
    for x, message in (
        (jnp.zeros((2, 2)), r"^x must have shape \(\.\.\., 1\)"),
        (jnp.array([[jnp.nan]]), "^x has a value that is not finite"),
        (jnp.zeros((0, 1)), "^x holds no points"),
    ):
        with pytest.raises(ValueError, match=message):
            ou().estimate(x, key=key)


def test_whole_numbers_are_points_too(key):
    whole, x = np.array([[1], [0]]), np.array([[1.0], [0.0]])
    same = ou().log_prob(x, key=key, estimator=rf.PullBack(64))
    np.testing.assert_array_equal(ou().log_prob(whole, key=key, estimator=rf.PullBack(64)), same)


def test_a_point_out_of_reach_leaves_the_others_as_they_are(key):
    """Geometric Brownian motion from 0.9: nothing comes to 0, where there is no noise either. Integers
    for x do not round the start."""
    diffusion = lambda t, z: 0.3 * z[:, None]
    sde = rf.ItoSDE(lambda t, z: 0.1 * z, diffusion)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1), 0.1), driver=rf.KarhunenLoeve(2))
    x, estimator = np.array([[1], [0]]), rf.Endpoint(16, start=jnp.array([0.9]))
    estimate = flow.estimate(x, key=key, estimator=estimator, solver=False)
    truth = stats.lognorm.logpdf(1.0, 0.3, scale=0.9 * np.exp(0.1 - 0.045))
    assert abs(estimate.log_prob[0] - truth) < 3 * estimate.total_error[0]
    assert estimate.total_error[0] < 1e-3
    assert np.isneginf(estimate.log_prob[1])
    np.testing.assert_array_equal(estimate.suspect, [False, True])


@pytest.mark.parametrize(
    ("rate", "estimator"),
    [
        pytest.param(5.0, rf.Tempered(16), marks=pytest.mark.slow),
        pytest.param(40.0, rf.Tempered(16), marks=pytest.mark.slow),
        (10.0, rf.PullBack(16, rf.Laplace())),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, eqx.Module) else None,
)
def test_the_error_of_the_solvers_steps_is_in_the_error_bar(rate, estimator, key):
    """Eight steps are too few for a stiff SDE: it is right, or suspect, and says what to do."""
    sde = rf.ItoSDE(Linear(jnp.array([[-rate]])), rf.ConstantDiffusion(np.sqrt(2 * rate) * jnp.eye(1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=THREE)
    x = np.array([[0.0], [2.0]])
    noise = np.sqrt(2 * rate) * np.eye(1)
    truth = linear_distribution(np.array([[-rate]]), noise, np.zeros(1), np.eye(1), THREE).logpdf(x)
    estimate = flow.estimate(x, key=key, estimator=estimator)
    right = np.abs(estimate.log_prob - truth) < 3 * estimate.total_error
    assert np.all(right | estimate.suspect)
    assert np.all(estimate.total_error >= estimate.solver_error)
    if rate == 5.0:
        assert not np.any(estimate.suspect)
    else:
        assert np.any(estimate.solver_error > 0.5)
        assert "depend on the solver's steps: take more, rf.FixedGrid(steps=...)" in estimate.warning
    blind = flow.estimate(x, key=key, estimator=estimator, solver=False)
    assert blind.solver_error is None
    np.testing.assert_array_equal(blind.log_prob, estimate.log_prob)


@pytest.mark.parametrize(
    "estimator",
    [pytest.param(rf.Tempered(64), marks=pytest.mark.slow), rf.PullBack(2)],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_finite_is_suspect(estimator, key):
    """Where errors are switched off a model that gives NaN has a NaN, or nothing, for a density."""
    flow = ou(np.nan).without_errors()
    estimate = flow.estimate(jnp.zeros((1, 1)), key=key, estimator=estimator, solver=False)
    assert not np.any(np.isfinite(estimate.log_prob))
    assert np.all(estimate.suspect)
    assert "1 have a value or an error bar that is not finite" in estimate.warning


def test_paths_that_were_not_found_are_counted_and_more_than_one_in_twenty_are_a_warning():
    weights = np.zeros((64, 3))
    weights[:3, 1] = weights[:4, 2] = -np.inf
    estimate = made(weights, searched=True)
    np.testing.assert_array_equal(estimate.unfound, [0, 3, 4])
    np.testing.assert_array_equal(estimate.suspect, [False, False, True])
    assert estimate.warning.startswith("of 3 estimates, 1 miss paths that a search did not find: use rf.")
    escaped = made(weights)
    np.testing.assert_array_equal(escaped.escaped, [0, 3, 4])
    assert escaped.warning is None


# ---------------------------------------------------------------------------------- more paths, in chunks


@pytest.fixture
def one_by_one(monkeypatch):
    """Sixty-four paths of one point at a time, so that any number of them share a compilation."""
    monkeypatch.setattr("roughflow.density.estimators._weights.PAIRS", 64)


POINTS = np.array([[0.4], [-0.7], [1.3]])


def test_a_tolerance_is_met_by_more_paths_where_they_are_needed(one_by_one, key):
    estimate = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=0.1, solver=False)
    assert np.all(estimate.standard_error <= 0.1)
    assert not np.any(estimate.unmet)
    assert estimate.warning is None
    assert len(set(estimate.num_paths.tolist())) > 1
    error = np.abs(estimate.log_prob - ou_distribution(driver=THREE).logpdf(POINTS))
    assert np.all(error < 4 * estimate.standard_error)
    # The paths added are those that come next: as many at once would have been the same.
    most = int(np.argmax(estimate.num_paths))
    many = rf.PullBack(int(estimate.num_paths[most]))
    at_once = ou().estimate(POINTS, key=key, estimator=many, solver=False)
    np.testing.assert_allclose(estimate.log_prob[most], at_once.log_prob[most], rtol=1e-12)
    np.testing.assert_allclose(estimate.standard_error[most], at_once.standard_error[most], rtol=1e-10)


def test_a_tolerance_is_met_by_the_errors_of_particles(monkeypatch):
    """Which are larger than those of the same weights of single paths; these weights are made up."""
    rng = np.random.default_rng(0)

    def draw(points, _):
        weights = jnp.asarray(rng.normal(size=(len(points), 64)))
        remedy, doubt = np.zeros(len(points), int), np.zeros(len(points), bool)
        return Weighed(weights, weights, jnp.asarray(remedy), jnp.asarray(doubt), None, None)

    run: Any = SimpleNamespace(estimator=SimpleNamespace(num_paths=64), group=1, weighed=draw)
    monkeypatch.setattr(_importance, "_gather", lambda have, *_: have)
    for weights in _importance._until(run, draw(range(3), 0), 0.05, 2**16):
        estimate = made(np.asarray(weights)[:, None], tempered=np.ones(1, bool))
        assert estimate.standard_error[0] <= 0.05


def test_a_tolerance_that_is_met_at_once_changes_nothing(one_by_one, key):
    plain = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64))
    easy = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=10.0)
    jax.tree.map(np.testing.assert_array_equal, plain, easy)


def test_a_tolerance_that_is_not_met_warns(one_by_one, key):
    estimate = ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=1e-3, max_paths=200)
    assert np.all(estimate.unmet)
    assert np.all(estimate.suspect)
    np.testing.assert_array_equal(estimate.num_paths, 192)
    assert "3 did not meet the tolerance within max_paths" in estimate.warning
    assert "\n" not in estimate.warning


def test_a_tolerance_is_refused_where_there_are_no_values(one_by_one, key):
    ask = lambda x: ou().estimate(x, key=key, estimator=rf.PullBack(64), tolerance=0.1).log_prob
    with pytest.raises(ValueError, match=r"^tolerance needs values"):
        jax.eval_shape(ask, POINTS[:1])
    for wrong in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"^tolerance must be positive"):
            ou().estimate(POINTS, key=key, estimator=rf.PullBack(64), tolerance=wrong)


def test_a_tolerance_where_nothing_has_weight_comes_to_an_end(one_by_one, key):
    """A start on half of space, which paths never leave: no density below zero, no division by it."""
    base = LogNormal(jnp.array([0.2]), jnp.array([0.3]))
    flow = rf.StochasticFlow(gbm_1d().ito, base, 1.0, THREE)
    estimate = flow.estimate(
        np.array([[-1.0], [1.5]]), key=key, estimator=rf.PullBack(64), tolerance=0.2, max_paths=256
    )
    assert np.isneginf(estimate.log_prob[0])
    np.testing.assert_array_equal(estimate.suspect, [True, False])
    np.testing.assert_array_equal(estimate.num_paths[0], 256)


def test_a_poor_estimate_warns(one_by_one, key):
    """Far in the tail, with a narrow start, one path carries all the weight."""
    estimate = ou(scale=0.01).estimate(np.array([[5.0]]), key=key, estimator=rf.PullBack(64))
    assert np.all(estimate.suspect)
    assert re.match(r"^of 1 estimates, 1 rest on fewer than 5 effective paths \(.*: .*$", estimate.warning)
    assert estimate.effective_paths < 5


@pytest.mark.parametrize("pairs", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_chunks_do_not_change_the_numbers(pairs, key, monkeypatch):
    """Chunks of paths and of points; probes are random too."""
    flow = linear(jnp.array([[-1.0, 0.8], [0.3, -0.5]]), 0.7 * jnp.eye(2), rf.Normal(jnp.zeros(2)))
    flow = eqx.tree_at(lambda f: f.divergence, flow, rf.HutchinsonDivergence())
    x = jnp.array([[0.2, -0.3], [1.0, 0.5], [-0.5, 0.0]])
    whole = flow.log_prob(x, key=key, estimator=rf.PullBack(5))
    assert np.all(np.isfinite(whole))
    monkeypatch.setattr("roughflow.density.estimators._weights.PAIRS", pairs)
    np.testing.assert_allclose(flow.log_prob(x, key=key, estimator=rf.PullBack(5)), whole, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draws", [rf.Independent(), rf.Antithetic(), rf.Sobol(2)], ids=lambda d: type(d).__name__
)
def test_chunks_do_not_change_the_numbers_of_endpoint(draws, key, monkeypatch):
    estimator = rf.Endpoint(4, rf.Laplace(draws=draws))
    x = jnp.array([[0.2], [1.0], [-0.5]])
    whole = curved(jnp.array(0.5)).log_prob(x, key=key, estimator=estimator)
    for pairs in (3, 8):
        monkeypatch.setattr("roughflow.density.estimators._weights.PAIRS", pairs)
        again = curved(jnp.array(0.5)).log_prob(x, key=key, estimator=estimator)
        np.testing.assert_allclose(again, whole, rtol=1e-12)


# ---------------------------------------------------------------------------------- float32

SINGLE = """
import jax, jax.numpy as jnp, numpy as np
import roughflow as rf
from problems import ou, ou_distribution
x = jnp.array([[0.1], [-1.0], [2.0]])
estimate = ou().estimate(x, key=jax.random.key(0))
assert estimate.log_prob.dtype == "float32" and estimate.standard_error.dtype == "float32"
print(np.max(np.abs(estimate.log_prob - ou_distribution(driver=ou().driver).logpdf(x))))
"""


@pytest.mark.slow
def test_single_precision():
    """In a process of its own, for this one has double precision switched on."""
    done = subprocess.run(
        [sys.executable, "-c", SINGLE], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-3


@pytest.mark.parametrize(
    ("dimension", "estimator"),
    [
        (2, rf.PullBack(2, rf.Laplace())),
        pytest.param(2, rf.Tempered(2), marks=pytest.mark.slow),
        *(pytest.param(d, rf.Endpoint(2), marks=pytest.mark.slow) for d in (2, 10)),
        pytest.param(10, rf.Tempered(2), marks=pytest.mark.slow),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, eqx.Module) else None,
)
def test_no_lapack_where_two_calls_could_wait_for_each_other(dimension, estimator, key):
    """Two batched LAPACK calls at once can stop a CPU with few cores for ever; see `_linear`."""
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(dimension))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(dimension)), driver=THREE)
    x = jnp.zeros((4, dimension))
    program = jax.jit(lambda x: flow.log_prob(x, key=key, estimator=estimator)).lower(x).as_text()
    assert "lapack" not in program
    assert "while" in program


class Hopeful(rf.Tempered):
    """Calls no weights poor beforehand."""

    def decide(self, flow, distribution, trial):
        distribution = super().decide(flow, distribution, trial)
        return eqx.tree_at(lambda d: d.poor, distribution, jnp.zeros_like(distribution.poor))


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "jit"])
def test_weights_that_turn_out_poor_are_improved_after_all(traced, key):
    """What would be suspect is estimated by particles, inside a jit too; a bound keeps what it drew."""
    estimator, x = Hopeful(64, rf.Prior()), jnp.array([[0.9], [2.0]])
    flow = ou(scale=0.05)
    estimate = flow.estimate(x, key=key, estimator=estimator, solver=False)
    assert np.all(estimate.tempered)
    assert not np.any(estimate.suspect)
    truth = ou_distribution(scale=0.05, driver=THREE).logpdf(x)
    assert np.all(np.abs(estimate.log_prob - truth) < 3 * estimate.total_error)
    if traced:
        inside = jax.jit(lambda x: flow.estimate(x, key=key, estimator=estimator, solver=False).log_prob)(x)
        np.testing.assert_allclose(inside, estimate.log_prob, rtol=1e-9)
    run = EstimatorRun(estimator, flow, x, key)
    plain = run.weighed(np.arange(2), np.zeros(2, int))
    np.testing.assert_array_equal(plain.log_weights, plain.plain)
