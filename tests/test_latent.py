"""Latent SDEs: bounds and likelihoods beside Kalman's filter, and bad input."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from benchmarks.latent import kalman, oscillator
from roughflow.latent._bound import mismatch
from roughflow.latent._fit_latent import Drawn, components, initial_model, second_run
from roughflow.latent._latent_sde import MAX_CHANGE, ROUNDS, combined, input_table, padded
from roughflow.latent._particles import stepped
from roughflow.series import panel

KEY = jax.random.key(0)
TIMES, VALUES = oscillator(12, 12, 0)
TIMES[3], VALUES[3] = TIMES[3][:8], VALUES[3][:8]  # a shorter series
TRUE_RATE = jnp.array([[0.2, -1.5], [1.5, 0.2]])


class Linear(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return -self.rate @ z


@pytest.fixture(scope="module")
def fitted():
    """A model of four series of the oscillator, whose SDE and decoder are right at the start."""
    loadings = jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, -1.0]])
    decoder = rf.latent.NormalDecoder(jnp.zeros(4), jnp.ones(4), loadings, deviation=0.3, depth=0, key=KEY)
    sde = rf.ItoSDE(Linear(TRUE_RATE), rf.ConstantDiffusion(jnp.full(2, 0.4**0.5)))
    options = rf.train.TrainingOptions(batch_size=4, learning_rate=1e-2, average=0.99)
    return rf.fit_latent(
        TIMES[:4], VALUES[:4], dimension=2, key=KEY, sde=sde, decoder=decoder, width=16, num_times=16,
        steps=500, validation=0.0, progress=False, training=options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def exact(fitted):
    return np.array([kalman(fitted.model, *one) for one in zip(TIMES[:4], VALUES[:4], strict=True)])


@pytest.fixture(scope="module")
def estimate(fitted):
    return fitted.model.log_likelihood(TIMES[:4], VALUES[:4], key=KEY)


def test_likelihoods_are_those_of_kalmans_filter(estimate, exact):
    """Up to the errors of steps in time, some hundredths here."""
    assert np.all(np.abs(estimate.log_likelihood - exact) < 3 * estimate.standard_error + 0.15)
    assert estimate.total_error < 0.6
    assert abs(estimate.total / exact.sum() - 1) < 0.01


def test_likelihoods_with_large_errors_are_flagged():
    """A NaN is one too."""
    errors = np.array([0.1, 0.9, np.nan])
    estimate = rf.latent.LikelihoodEstimate(np.zeros(3), errors, np.zeros(3), np.ones(3))
    assert estimate.suspect.tolist() == [False, True, True]
    assert "2 of 3 log-likelihoods are unreliable, with errors up to 0.9: raise" in estimate.warning
    assert rf.latent.LikelihoodEstimate(*np.zeros((4, 3))).warning is None


def test_steps_follow_the_rate_of_the_drift():
    """An SDE that is much faster than the gaps between observations keeps its stationary variance of 1."""
    rate, part = 30.0, panel(np.arange(4.0), np.arange(4.0), partial=True)
    sde = rf.ItoSDE(Linear(jnp.full((1, 1), rate)), rf.ConstantDiffusion(jnp.full(1, (2 * rate) ** 0.5)))
    model = initial_model(part, 1, None, sde, None, None, 4, KEY)
    dt, zero = 1 / model.num_steps(jnp.arange(4.0)), jnp.zeros(1)
    assert dt * rate <= MAX_CHANGE
    step = lambda z, normal: stepped(model, jnp.asarray(0.0), jnp.asarray(dt), z, normal)
    kept, added = (slope[0, 0] for slope in jax.jacobian(step, argnums=(0, 1))(zero, zero))
    assert abs(added**2 / (1 - kept**2) - 1) < 0.01


@pytest.mark.parametrize("deviation", [0.1, 1.0, 3.0])
def test_errors_of_likelihoods_cover_the_truth(deviation):
    """Runs with lognormal estimates of a likelihood of 1, for series alone and for all of them together."""
    normals = np.random.default_rng(0).normal(size=(20, 50, ROUNDS))
    rows = [combined(deviation * x - 0.5 * deviation**2, np.ones(50)) for x in normals]
    alone = np.concatenate([row.log_likelihood / row.standard_error for row in rows])
    together = np.array([row.total / row.total_error for row in rows])
    assert np.mean(np.abs(alone) < 2) > 0.9
    assert np.mean(np.abs(together) < 2) > 0.85


def test_bounds_rise_with_particles_and_stay_below(estimate, exact, fitted):
    """That of training is the one of a single particle that follows the posterior."""
    one = fitted.model.lower_bound(TIMES[:4] * 16, VALUES[:4] * 16, key=KEY).sum() / 16
    assert exact.sum() - 30 < one < estimate.bound.sum() < exact.sum() + 0.5


@pytest.mark.slow  # with `make test`, the bounds are in order
def test_the_bound_without_simulation_is_that_of_simulated_paths(fitted):
    """Paths that are simulated with the drift of the posterior have its marginals, and their mean log-weight
    is the bound."""
    model = fitted.model
    series = jax.tree.map(lambda leaf: leaf[0], model.arrays(TIMES[:1], VALUES[:1])[0])
    reading, times, noise = model.posterior.read(series), series.times, model.sde.diffusion.matrix

    def path(key):
        first, _ = model.posterior.at(reading, times[0])
        u = jax.random.normal(key, (2,))

        def step(carry, inputs):
            (z, total), (t, dt, key) = carry, inputs
            now, _ = model.posterior.at(reading, t)
            cost, f = mismatch(model, reading, t, jnp.linalg.solve(now.root, z - now.mean))
            z = z + dt * f + jnp.sqrt(dt) * noise * jax.random.normal(key, (2,))
            return (z, total - dt * cost), z

        ends = times[:-1, None] + jnp.diff(times)[:, None] * jnp.arange(1, 65)[None] / 64
        starts = jnp.concatenate([times[:1], ends.ravel()[:-1]])
        inputs = starts, ends.ravel() - starts, jax.random.split(jax.random.fold_in(key, 1), starts.size)
        z = first.mean + first.root @ u
        total = model.initial.log_prob(z) - first.log_prob_at(u)
        (_, total), path = jax.lax.scan(step, (z, total), inputs)
        states = jnp.concatenate([z[None], path[63::64]])
        return total + jnp.sum(jax.vmap(model.observed)(states, series.values, series.seen)), states[-1]

    logs, last = jax.jit(jax.vmap(path))(jax.random.split(KEY, 256))
    marginal, _ = model.posterior.at(reading, times[-1])
    apart = np.linalg.solve(marginal.root, (last - marginal.mean[None]).T)
    np.testing.assert_allclose(apart.mean(axis=1), 0, atol=0.2)
    np.testing.assert_allclose(np.cov(apart), np.eye(2), atol=0.3)
    bound = fitted.model.lower_bound(TIMES[:1] * 16, VALUES[:1] * 16, key=KEY, num_times=4096)
    assert abs(logs.mean() - bound.mean()) < 3 * np.hypot(logs.std() / 16, bound.std() / 4) + 0.1


def test_a_longer_series_does_not_change_a_shorter_one(fitted):
    """Whatever fills up the arrays of the shorter one is not read."""
    model, when = fitted.model, jnp.linspace(0, 1, 7) * np.ptp(TIMES[3]) + TIMES[3][0]
    alone, beside = model.arrays(TIMES[3], VALUES[3])[0], model.arrays(TIMES[:4], VALUES[:4])[0]
    assert alone.times.shape[1] < beside.times.shape[1]
    last = [jax.tree.map(lambda leaf: leaf[-1], one) for one in (alone, beside)]
    at = jax.jit(lambda one: jax.vmap(partial(model.posterior.at, model.posterior.read(one)))(when))
    marginals = [at(one) for one in last]
    for one, other in zip(*map(jax.tree.leaves, marginals), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_smoothed_paths_keep_what_was_observed(fitted):
    paths = fitted.model.smoothed(TIMES[0], VALUES[0], key=KEY)
    seen = np.isfinite(VALUES[0])
    np.testing.assert_array_equal(paths.values[:, seen] - VALUES[0][seen], 0)
    assert np.isfinite(paths.values).all()
    assert (paths.values[:, ~seen].std(axis=0) > 0.2).all()


def test_forecasts_are_those_of_the_sde(fitted):
    """Far ahead the oscillator is at rest, with covariance about I; at once it is where it was."""
    paths = fitted.model.forecast(TIMES[0], VALUES[0], [0.01, 40.0], key=KEY)
    last = fitted.model.smoothed(TIMES[0], VALUES[0], key=KEY).states[:, -1]
    np.testing.assert_allclose(paths.states[:, 0].mean(axis=0), last.mean(axis=0), atol=0.15)
    rate = np.asarray(fitted.model.sde.drift.rate)
    noise = np.diag(np.asarray(fitted.model.sde.diffusion.matrix) ** 2)
    lyapunov = np.linalg.solve(np.kron(rate, np.eye(2)) + np.kron(np.eye(2), rate), noise.ravel())
    np.testing.assert_allclose(np.cov(paths.states[:, 1].T), lyapunov.reshape(2, 2), atol=0.35)


def test_samples_start_at_the_initial_distribution(fitted):
    dates = np.array(["2020-01-01", "2020-02-01"], "datetime64")
    assert fitted.model.sample(dates, key=KEY).times[1] == pytest.approx(31 / 365.25)
    paths = fitted.model.sample([0.0, 0.1], key=KEY, num_samples=512)
    np.testing.assert_allclose(paths.states[:, 0].mean(axis=0), fitted.model.initial.loc, atol=0.2)


@pytest.fixture(scope="module")
def default_fit():
    """The default networks, for very few steps, with series from a function."""
    sizes = []

    def draw(size, rng):
        sizes.append(size)
        return TIMES, VALUES

    fitted = rf.fit_latent(draw, **SMALL)
    assert sizes[0] == 1024
    assert set(sizes[1:]) == {64}
    return fitted


SMALL = {"dimension": 2, "key": KEY, "width": 8, "num_times": 8, "steps": 20, "progress": False}


def test_training_lowers_the_loss(default_fit):
    loss = default_fit.history.loss
    assert len(loss) == 20
    assert np.isfinite(loss).all()
    assert loss[-1] < loss[0]


def test_a_forecast_bounds_the_likelihood_from_further_below(default_fit):
    """From three observations, beside the bound with all of them."""
    rows = default_fit.model.arrays(TIMES, VALUES)[0].rows()
    loss = jax.jit(lambda objective: objective(default_fit.model, jnp.asarray(rows), key=KEY)[0])
    matching, forecasting = map(loss, (rf.latent.SDEMatching(4, 64), rf.latent.Forecasting(4, 3, 2, 64)))
    assert 0 < forecasting - matching < 5


@pytest.mark.slow
def test_a_fit_may_go_on_with_forecasts():
    draw = lambda size, rng: (TIMES, VALUES)
    stages = rf.fit_latent(draw, num_given=3, forecast_steps=20, **SMALL).stages
    assert list(stages) == ["SDE matching", "forecasting"]
    assert all(len(history.loss) == 20 for history in stages.values())
    assert all(np.isfinite(history.loss).all() for history in stages.values())


def test_a_saved_model_gives_the_same_numbers(default_fit, tmp_path):
    rf.save(tmp_path / "model.rf", default_fit.model)
    loaded = rf.load(tmp_path / "model.rf")
    bound = lambda model: model.lower_bound(TIMES[0], VALUES[0], key=KEY, num_times=8)
    np.testing.assert_array_equal(bound(loaded), bound(default_fit.model))


def test_units_do_not_matter(default_fit):
    """Times in days instead of years and values in other units: the same loss, up to rounding."""
    draw = lambda size, rng: ([365 * t for t in TIMES], [1e6 * v for v in VALUES])
    again = rf.fit_latent(draw, **SMALL)
    loss = default_fit.history.loss
    np.testing.assert_allclose(again.history.loss - np.log(1e6), loss, rtol=1e-4)


@pytest.mark.slow  # with `make test`, that of the series does not
def test_the_unit_of_time_of_an_sde_does_not_matter():
    """An SDE in days with series in days has the bound of the SDE in years with series in years."""

    def bound(unit):
        sde = rf.ItoSDE(Linear(TRUE_RATE / unit), rf.ConstantDiffusion(jnp.full(2, (0.4 / unit) ** 0.5)))
        parts = panel([unit * t for t in TIMES], VALUES, partial=True, fewest=2)
        model = initial_model(parts, 2, None, sde, None, None, 8, KEY)
        return model.lower_bound(unit * TIMES[0], VALUES[0], key=KEY, num_times=8)

    np.testing.assert_allclose(bound(365.0), bound(1.0), rtol=1e-8)


def driven(count, length):
    """Oscillators without other noise, pushed by inputs that change every two units of time."""
    rng, knots, fine, step = np.random.default_rng(0), np.arange(0.0, 13.0, 2.0), np.arange(0, 12, 0.02), 0.02
    times = [np.sort(rng.uniform(0, 11.9, length)) for _ in range(count)]
    inputs = [(knots, rng.choice([-1.0, 1.0], (7, 1))) for _ in range(count)]
    states = np.zeros((len(fine), count, 2))
    for k, t in enumerate(fine[:-1]):
        push = np.array([u[int(t // 2), 0] for _, u in inputs])
        x, v = states[k].T
        v = v + step * (push - x - 0.8 * v)
        states[k + 1] = np.stack([x + step * v, v], axis=1)
    rows = [np.stack([np.interp(t, fine, c) for c in states[:, i].T], axis=1) for i, t in enumerate(times)]
    return times, [row + 0.05 * rng.normal(size=row.shape) for row in rows], inputs


def test_inputs_drive_the_states(tmp_path):
    times, values, inputs = driven(24, 16)
    opposite = [(knots, -u) for knots, u in inputs]
    options = rf.train.TrainingOptions(batch_size=16, learning_rate=1e-2)
    model = rf.fit_latent(
        times, values, dimension=2, key=KEY, inputs=inputs, width=12, num_times=8, steps=200, validation=0.0,
        progress=False, training=options,
    ).model  # fmt: skip
    rf.save(tmp_path / "model.rf", model)
    loaded = rf.load(tmp_path / "model.rf")
    bound = lambda model, u: model.lower_bound(times, values, key=KEY, num_times=64, inputs=u)
    np.testing.assert_array_equal(bound(loaded, inputs), bound(model, inputs))
    assert np.mean(bound(model, inputs) - bound(model, opposite)) > 20

    def error(u):
        """Mean squared error of forecasts of the second half of the first series."""
        t, y = times[0], values[0]
        paths = model.forecast(t[:8], y[:8], t[8:] - t[7], key=KEY, inputs=u)
        return np.mean((paths.values.mean(axis=0) - y[8:]) ** 2)

    assert error(inputs[0]) < 0.2 * min(error(opposite[0]), np.var(values[0][8:]))
    with pytest.raises(ValueError, match="inputs must have 1 columns, as in the fit; got 0"):
        model.lower_bound(times, values, key=KEY)
    with pytest.raises(ValueError, match="inputs must cover the series: they are given from time 0 to 12"):
        model.forecast(times[0], values[0], [5.0], key=KEY, inputs=inputs[0])


def test_inputs_of_all_kinds_become_tables():
    part = panel(2 + np.arange(5.0), np.zeros((5, 1)), partial=True)
    at = jnp.array([0.0, 0.4, 1.0, 1.6])  # since the first time, in units of two
    shown = lambda u, ahead=0.0: jax.vmap(
        jax.tree.map(lambda x: x[0], input_table(u, part, 2.0, 0.01, ahead))
    )(at)[:, 0]
    columns = np.arange(9.0) ** 2
    np.testing.assert_allclose(shown((np.arange(9.0), columns)), [4, 4, 16, 25])
    np.testing.assert_allclose(shown(rf.series.Inputs(np.arange(9.0), columns, held=False)), [4, 8, 16, 27.2])
    np.testing.assert_allclose(shown(lambda t: t**2), (2 + 2 * at) ** 2, rtol=1e-4)
    np.testing.assert_allclose(shown(lambda t: t**2, ahead=3.0), (2 + 2 * at) ** 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("times", "values", "message"),
    [
        ([1.0], np.ones((1, 2)), "a series needs at least 2 values, got 1"),
        ([1.0, 1.0, 2.0], np.ones((3, 2)), "times must increase, but 1 follows 1"),
        ([1.0, 2.0, 3.0], np.full((3, 2), np.nan), "values are all missing"),
        ([1.0, 2.0, 3.0], np.full((3, 2), np.inf), "values must be finite or missing"),
        ([1.0, 2.0], np.ones((3, 2)), "times must have shape"),
    ],
)
def test_bad_series_are_refused_in_one_line(times, values, message):
    with pytest.raises(ValueError, match=message) as error:
        rf.fit_latent(times, values, dimension=2, key=KEY)
    assert "\n" not in str(error.value)


def test_series_that_single_precision_cannot_hold_are_refused():
    """Without differences in time, observations would be dropped."""
    seconds = panel(1.7e9 + 60 * np.arange(5.0), np.arange(5.0), partial=True)
    level = panel(np.arange(5.0), 1e6 + 0.5 * np.arange(5.0), partial=True)
    assert components(level, 1)[1] < 1
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="times are too far from zero for JAX's precision, float32: sub"):
            padded(seconds, None, np.zeros(1))
        assert padded(seconds, 60.0, np.zeros(1)).times[0, -1] == 4
        with pytest.raises(ValueError, match="column 0 of values varies too little, compared with its size"):
            components(level, 1)


def test_a_fit_that_was_killed_before_its_second_stage_resumes(tmp_path):
    file = tmp_path / "fit.checkpoint"
    run = rf.train.RunOptions(checkpoint=file, resume=True)
    assert not second_run(run).resume
    second_run(run).checkpoint.touch()
    assert second_run(run).resume
    assert second_run(rf.train.RunOptions()) == rf.train.RunOptions()


class Joint(eqx.Module):
    """A distribution with one log-density for all columns together."""

    def log_prob(self, y):
        return jnp.sum(y)

    def sample(self, key):
        return jnp.zeros(4)


def test_bad_arguments_are_refused(fitted):
    fit = partial(rf.fit_latent, TIMES, VALUES, dimension=2, key=KEY)
    with pytest.raises(ValueError, match=r"log_prob\(y\) of .* must have shape \(4,\), .* got \(\)"):
        fit(decoder=lambda z: Joint())
    with pytest.raises(ValueError, match=r"decoder must map a state of shape \(2,\) to a distribution with"):
        fit(decoder=lambda z: z)
    with pytest.raises(TypeError, match="initial must have the methods sample"):
        fit(initial="normal")
    with pytest.raises(ValueError, match="initial must have dimension 2, as the states; got 3"):
        fit(initial=rf.Normal(jnp.zeros(3)))
    with pytest.raises(ValueError, match="values are missing: pass times and values, or a function"):
        rf.fit_latent(TIMES, dimension=2, key=KEY)
    with pytest.raises(ValueError, match="must return a list of times and a list of values, got an array"):
        rf.fit_latent(lambda size, rng: np.zeros(9), dimension=2, key=KEY)
    with pytest.raises(ValueError, match="dimension must be a positive whole number"):
        rf.fit_latent(TIMES, VALUES, dimension=0, key=KEY)
    with pytest.raises(ValueError, match="one entry per series, or one for all: got 2 for 12 series"):
        rf.fit_latent(TIMES, VALUES, dimension=2, key=KEY, inputs=[jnp.sin, jnp.cos])
    with pytest.raises(ValueError, match="times is a function: omit values"):
        rf.fit_latent(lambda size, rng: (TIMES, VALUES), VALUES, dimension=2, key=KEY)
    drawn = Drawn(lambda size, rng: (TIMES, VALUES), None, np.zeros(4), 8)
    with pytest.raises(ValueError, match="a series has 12 observations, but may have at most 8, as in the"):
        drawn.batch(12, np.random.default_rng(0))
    with pytest.raises(ValueError, match="num_given must be less than 12"):
        rf.fit_latent(TIMES, VALUES, dimension=2, key=KEY, num_given=12)
    thin = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.ones((2, 1)))
    with pytest.raises(ValueError, match="as many Brownian motions as states"):
        rf.fit_latent(TIMES, VALUES, dimension=2, key=KEY, sde=thin)
    with pytest.raises(ValueError, match="values have 3 columns, but the model has 4"):
        fitted.model.log_likelihood([0.0, 1.0], np.ones((2, 3)), key=KEY)
    with pytest.raises(ValueError, match="pass one series at a time, got 2"):
        fitted.model.smoothed(TIMES[:2], VALUES[:2], key=KEY)
