"""What an estimate of log p(x) reports, and how it is made: failures, rounds, chunks, error bars."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import ESTIMATORS, THREE, LogNormal, gbm_1d, linear, ou, ou_distribution

import roughflow as rf
from roughflow.density import _ladder, _paths

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
    estimate = flow(jnp.array(1.0)).estimate(x, key=key, estimator=estimator)
    paths = flow(jnp.array(1.0)).sample_path(key=key, shape=(4000, 1))
    given = np.exp(flow(jnp.array(1.0)).log_prob_given_path(x, paths))
    error = np.hypot(estimate.standard_error, given.std(axis=0) / given.mean(axis=0) / np.sqrt(4000))
    assert np.all(np.abs(estimate.log_prob - np.log(given.mean(axis=0))) < 4 * error)
    share = np.mean(given == 0, axis=0)
    assert share[1] > 0.3
    np.testing.assert_allclose(estimate.escaped / 512, share, rtol=0, atol=0.08)
    value = lambda rate: jnp.sum(rf.density.LowerBound(estimator)(flow(rate), x, key=key))
    value, h = jax.jit(jax.value_and_grad(value)), 1e-5
    slope = (value(jnp.array(1 + h))[0] - value(jnp.array(1 - h))[0]) / (2 * h)
    np.testing.assert_allclose(value(jnp.array(1.0))[1], slope, rtol=1e-5)


@pytest.mark.parametrize("name", [None, pytest.param("PullBack-Laplace", marks=pytest.mark.slow)])
def test_a_model_that_is_not_finite_is_an_error_of_one_line(name, key):
    estimator = None if name is None else ESTIMATORS[name][0]
    with pytest.raises(rf.NonFiniteError, match=r"^[^\n]*drift[^\n]*$"):
        ou(np.nan).estimate(jnp.linspace(-1, 2, 4)[:, None], key=key, estimator=estimator)


def test_no_program_raises_where_nothing_fails(key, monkeypatch):
    """JAX's cache on disk keeps none that may, and a second process would compile it anew."""
    asked, run = [], _paths._run
    record = lambda function, *rest: asked.append(function.level.flow.raises) or run(function, *rest)
    monkeypatch.setattr(_paths, "_run", record)
    ou().estimate(jnp.zeros((1, 1)), key=key, estimator=rf.PullBack(16))
    assert len(asked) == 2  # as it is, and with twice the functions and steps
    assert not any(asked)


@pytest.mark.slow
def test_running_out_of_steps_is_an_error_of_one_line(key):
    """With `make test` log_prob_given_path says so."""
    flow = eqx.tree_at(lambda f: f.integrator, ou(), rf.Adaptive(max_steps=2))
    with pytest.raises(rf.OutOfStepsError, match=r"^[^\n]*max_steps[^\n]*$"):
        flow.estimate(jnp.zeros((1, 1)), key=key, estimator=rf.PullBack(2))


def test_points_that_cannot_be_asked_about_are_refused(key):
    for x, message in (
        (jnp.zeros((2, 2)), r"^x must have shape \(\.\.\., 1\)"),
        (jnp.array([[jnp.nan]]), "^x has a value that is not finite"),
        (jnp.zeros((0, 1)), "^x contains no points"),
    ):
        with pytest.raises(ValueError, match=message):
            ou().estimate(x, key=key)


def test_points_of_any_batch_shape(key):
    """And whole numbers are points too."""
    x = np.array([[[1.0], [0.0]], [[-1.0], [2.0]]])
    estimate = ou().estimate(x, key=key)
    flat = ou().estimate(x.reshape(-1, 1).astype(int), key=key)
    for part in jax.tree.leaves(estimate):
        assert part.shape == (2, 2)
    for one, two in zip(jax.tree.leaves(estimate), jax.tree.leaves(flat), strict=True):
        np.testing.assert_array_equal(np.ravel(one), two)
    single = ou().estimate(x[0, 0], key=key)
    assert single.log_prob.shape == single.method.shape == ()
    np.testing.assert_array_equal(single.log_prob, flat.log_prob[0])


@pytest.mark.parametrize(
    "estimator", [pytest.param(None, marks=pytest.mark.slow), rf.PullBack(64)], ids=["default", "PullBack"]
)
def test_a_point_out_of_reach_leaves_the_others_as_they_are(estimator, key):
    """A start on half of space, which paths never leave: no density below zero, and it comes to an end."""
    base = LogNormal(jnp.array([0.2]), jnp.array([0.3]))
    flow = rf.StochasticFlow(gbm_1d().ito, base, 1.0, THREE)
    settings = {} if estimator is None else {"tolerance": 0.2, "max_paths": 256}
    estimate = flow.estimate(np.array([[-1.0], [1.5]]), key=key, estimator=estimator, **settings)
    assert np.isneginf(estimate.log_prob[0])
    np.testing.assert_array_equal(estimate.suspect, [True, False])
    # In logarithms it is a sum of normal numbers.
    truth = -0.5 * ((np.log(1.5) - 0.32) ** 2 / 0.45 + np.log(2 * np.pi * 0.45)) - np.log(1.5)
    assert abs(estimate.log_prob[1] - truth) < 3 * estimate.total_error[1]
    assert "estimates are not finite: x may be outside the support" in estimate.warning


def test_the_error_of_the_solvers_steps_is_in_the_error_bar(key):
    """Two steps of a method of fourth order: right within the bar. The same for a stiff SDE: suspect."""
    x, rough = np.array([[0.0], [2.0]]), rf.FixedGrid(rf.flow.RK4(), steps=2)
    flow = lambda rate: eqx.tree_at(lambda f: f.integrator, ou(rate), rough)
    ask = lambda rate: flow(rate).estimate(x, key=key, estimator=rf.PullBack(16, rf.Laplace()))
    estimate = ask(1.5)
    error = np.abs(estimate.log_prob - ou_distribution(1.5, driver=THREE).logpdf(x))
    assert np.all(error < 3 * estimate.total_error)
    assert np.all(estimate.truncation_error > 1e-4)
    estimate = ask(40.0)
    assert np.all(estimate.suspect)
    assert "have a large truncation or solver error: increase num_functions" in estimate.warning


# ---------------------------------------------------------------------------------- more paths, in rounds

POINTS = np.array([[0.4], [-0.7], [1.3]])
SOBOL = rf.PullBack(64, rf.Prior(rf.density.Sobol()))


def test_a_tolerance_is_met_by_more_paths_where_they_are_needed(key):
    """Tolerance and error bar are of the total error. The paths added are those that come next in the
    sequence: as many at once are the same."""
    ask = lambda estimator, **settings: ou().estimate(POINTS, key=key, estimator=estimator, **settings)
    estimate = ask(SOBOL, tolerance=0.06)
    assert np.all(estimate.total_error <= 0.06)
    assert not np.any(estimate.unmet)
    assert estimate.warning is None
    assert np.all(estimate.num_paths > 64)
    count = int(estimate.num_paths[0])
    error = np.abs(estimate.log_prob - ou_distribution().logpdf(POINTS))
    assert np.all(error < 3 * estimate.total_error)
    at_once = ask(rf.PullBack(count, rf.Prior(rf.density.Sobol())))
    more = np.asarray(estimate.num_paths) == count
    np.testing.assert_allclose(estimate.log_prob[more], at_once.log_prob[more], rtol=1e-12)
    np.testing.assert_allclose(estimate.total_error[more], at_once.total_error[more], rtol=1e-10)


def test_a_grid_that_resolves_every_point_ends_the_default(key, monkeypatch):
    """Then no paths are needed."""
    monkeypatch.setattr(_ladder, "GRID_POINTS", {1: 3})
    estimate = ou().estimate(POINTS, key=key)
    assert list(estimate.method) == ["grid"] * 3
    np.testing.assert_array_equal(estimate.num_paths, 0)
    np.testing.assert_allclose(estimate.log_prob, ou_distribution().logpdf(POINTS), rtol=0, atol=0.05)


def test_one_point_in_a_hundred_is_flagged_rather_than_searched_for(key, monkeypatch):
    """Far out, where weights are poor."""
    monkeypatch.setattr(_ladder, "GRID_POINTS", {1: 1000})
    x = np.append(np.linspace(-1, 2, 99), 12.0)[:, None]
    estimate = ou().estimate(x, key=key)
    assert set(estimate.method) == {"paths"}
    np.testing.assert_array_equal(np.flatnonzero(estimate.suspect), [99])


def test_a_tolerance_that_is_met_at_once_changes_nothing(key):
    plain = ou().estimate(POINTS, key=key, estimator=SOBOL)
    easy = ou().estimate(POINTS, key=key, estimator=SOBOL, tolerance=10.0)
    jax.tree.map(np.testing.assert_array_equal, plain, easy)


def test_a_tolerance_that_is_not_met_warns(key):
    estimate = ou().estimate(POINTS, key=key, estimator=SOBOL, tolerance=1e-4, max_paths=256)
    assert np.all(estimate.unmet)
    assert np.all(estimate.suspect)
    np.testing.assert_array_equal(estimate.num_paths, 256)
    assert "3 of 3 estimates did not reach the tolerance: increase max_paths" in estimate.warning
    assert "\n" not in estimate.warning


def test_a_tolerance_is_refused_where_there_are_no_values(key):
    for estimator in (None, SOBOL):
        ask = lambda x, estimator=estimator: ou().estimate(x, key=key, estimator=estimator, tolerance=0.1)
        with pytest.raises(ValueError, match=r"^tolerance cannot be used inside jit or grad"):
            jax.eval_shape(ask, POINTS[:1])
    for wrong in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"^tolerance must be positive"):
            ou().estimate(POINTS, key=key, tolerance=wrong)


def test_a_poor_estimate_warns(key):
    """Far in the tail, with a narrow start, one path carries all the weight."""
    estimate = ou(scale=0.01).estimate(np.array([[5.0]]), key=key, estimator=rf.PullBack(64))
    assert np.all(estimate.suspect)
    assert re.match(r"^1 of 1 estimates rest on fewer than 5 effective paths \(.*: .*$", estimate.warning)
    assert estimate.effective_paths < 5


@pytest.mark.parametrize(
    "estimator", [pytest.param(None, marks=pytest.mark.slow), rf.PullBack(5)], ids=["default", "PullBack"]
)
def test_chunks_do_not_change_the_numbers(estimator, key, monkeypatch):
    """However many points, and paths of them, are solved together; nor do the points that follow."""
    x = np.array([[0.2], [9.0], [-0.5]])
    whole = ou().estimate(x, key=key, estimator=estimator)
    assert np.all(np.isfinite(whole.log_prob))
    monkeypatch.setattr(_paths, "ROWS", {"cpu": (2,)})
    monkeypatch.setattr(_paths, "SOLVES_PER_BLOCK", {"cpu": 16})
    parts = ou().estimate(x[:2], key=key, estimator=estimator)
    np.testing.assert_array_equal(parts.method, whole.method[:2])
    np.testing.assert_allclose(parts.log_prob, whole.log_prob[:2], rtol=1e-10)
    np.testing.assert_allclose(parts.total_error, whole.total_error[:2], rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_random_probes_belong_to_a_path(key, monkeypatch):
    """And not to what is solved beside it. In a hundred dimensions the divergence is not taken exactly."""
    flow = linear(-np.eye(100), 0.5 * np.eye(100), rf.Normal(jnp.zeros(100)), rf.KarhunenLoeve(1))
    flow = eqx.tree_at(lambda f: f.divergence, flow, rf.HutchinsonDivergence())
    x = 0.1 * np.ones((3, 100))
    whole = flow.estimate(x, key=key, estimator=rf.PullBack(16))
    monkeypatch.setattr(_paths, "ROWS", {"cpu": (2,)})
    parts = flow.estimate(x, key=key, estimator=rf.PullBack(16))
    np.testing.assert_allclose(parts.log_prob, whole.log_prob, rtol=1e-12)


# ---------------------------------------------------------------------------------- single precision


@pytest.mark.slow
def test_single_precision(key):
    """The numbers are those of double precision within the bars, in the tail too."""
    x = np.array([[0.1], [-1.0], [7.0]])
    with jax.enable_x64(False):
        estimate = ou().estimate(x, key=key)
    assert estimate.log_prob.dtype == estimate.total_error.dtype == "float32"
    error = np.abs(estimate.log_prob - ou_distribution().logpdf(x))
    assert np.all(error < 3 * estimate.total_error + 1e-4)
    assert np.all(estimate.total_error < 0.05)


@pytest.mark.parametrize(
    "estimator",
    [pytest.param(None, marks=pytest.mark.slow), rf.PullBack(64, rf.Laplace())],
    ids=["default", "PullBack"],
)
def test_no_lapack_where_two_calls_could_wait_for_each_other(estimator, key):
    """Two batched LAPACK calls at once can stop a CPU with few cores for ever; see `_linear`."""
    flow = linear(-np.eye(4), np.eye(4), rf.Normal(jnp.zeros(4)))
    ask = jax.jit(lambda x: flow.estimate(x, key=key, estimator=estimator))
    program = ask.lower(jnp.zeros((4, 4))).as_text()
    assert "lapack" not in program
    assert "while" in program


def test_the_finer_of_the_first_two_levels_is_the_flow():
    """Functions and steps of the flow are those of the correction, not a multiple of them."""
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    for driver, steps in ((rf.KarhunenLoeve(6), None), (rf.Legendre(4), 10)):
        integrator = rf.FixedGrid(steps=steps)
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=driver, integrator=integrator)
        coarse = _paths.coarser(flow)
        assert coarse.driver.num_functions == driver.num_functions // 2
        assert coarse.driver.refined() == driver
        assert int(_paths.levels(coarse)[1].each) == integrator.count(driver, 1)


def test_in_many_dimensions_paths_around_modes_follow_early_unless_few_points_need_them(key):
    """With a flow of 30 columns, points with up to 65,536 paths were off by 0.04. Paths around modes took a
    fifth of the time and were off by less than 0.001."""
    most, hard = 2**16, np.full(5, 2.0**13)
    limit = lambda count, dimension: _ladder.Climb(
        np.zeros((count, dimension)), key, rf.density.Accuracy()
    ).limit(most, hard)
    assert limit(50, 3) == _ladder.MAX_PATHS_WITHOUT_GRID
    assert limit(500, 3) > 4 * _ladder.MAX_PATHS_WITHOUT_GRID
    assert limit(50, 2) > 4 * _ladder.MAX_PATHS_WITHOUT_GRID


def test_a_round_of_many_points_has_no_more_paths_than_a_round_of_few(key):
    """1,000 points of a flow fitted to the star data took more than 400 s on two cores."""
    climb = _ladder.Climb(np.zeros((1000, 2)), key, rf.density.Accuracy())
    most = {len(needed): climb.limit(2**16, needed) for needed in (np.full(k, 2.0**13) for k in (4, 250))}
    assert most[4] == 2**16
    assert 250 * most[250] <= _ladder.PATHS_PER_ROUND["cpu"]
