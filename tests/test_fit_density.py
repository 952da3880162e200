"""From a table to a density: two stages, what is given, and tables that have none."""

import dataclasses
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import fit_density
from scipy import stats

import roughflow as rf
from roughflow.tables import second_file
from roughflow.tables._families import Comparison
from roughflow.tables._stages import Smoothed
from roughflow.tables._table import Table
from roughflow.train._flows import best_noise

TINY = {
    "width": 8,
    "depth": 1,
    "steps": 20,
    "likelihood_steps": 2,
    "batch_size": 64,
    "patience": 0,
    "progress": False,
}
ROWS = np.random.default_rng(0).normal([100, -5], [10, 0.1], (80, 2))


@pytest.fixture(scope="module")
def fitted():
    return fit_density(ROWS, key=jax.random.key(0), columns=["a", "b"], **TINY)


def test_before_it_learns_a_model_is_the_normal_distribution_of_the_data(key):
    """Each stage hardly moves: regression by a small rate, likelihood not at all."""
    settings = TINY | {"steps": 1, "likelihood_steps": 0, "learning_rate": 1e-9}
    model = fit_density(ROWS, key=key, validation=0.0, **settings).model
    got = model.log_prob(ROWS[:5], key=key)
    truth = stats.multivariate_normal(ROWS.mean(axis=0), np.cov(ROWS.T, bias=True)).logpdf(ROWS[:5])
    np.testing.assert_allclose(got, truth, atol=1e-4)


def test_a_fit_has_both_stages(fitted):
    assert {name: history.loss.size for name, history in fitted.stages.items()} == {
        "regression": 20,
        "likelihood": 2,
    }
    assert fitted.history.loss.size == 2
    assert fitted.model.columns == ("a", "b")
    assert isinstance(fitted.model.flow.sde, rf.sde.TransportSDE)


@dataclasses.dataclass
class Level:
    """A density whose log-densities are near one level, with NaN for the first row of each call."""

    level: float
    nan: bool = False

    def log_prob(self, rows):
        values = self.level + 0.1 * rows[:, 1]
        return np.where(np.arange(len(rows)) == 0, np.nan, values) if self.nan else values


def test_cross_validation_ends_when_the_difference_is_clear(key):
    whole = Table.of(np.random.default_rng(1).normal(size=(100, 2)), None, None, (), {}, {})
    comparison = Comparison(whole, whole.split(0.1, key), cross=True, own=True)
    others = np.zeros(100)
    for level, rows, better in ((0.0, 100, False), (2.0, 20, True), (-2.0, 20, False)):
        values = comparison.values(lambda table, level=level: Level(level), others)
        assert np.sum(~np.isnan(values)) == rows
        assert comparison.is_better(values, others) == better
        assert comparison.score(values).num_rows == rows
    broken = comparison.values(lambda table: Level(2.0, nan=True), others)
    assert not np.isnan(broken).any()
    assert not comparison.is_better(broken, others)


def test_patience_does_not_end_a_short_run(key):
    """Though at this rate every step is for the worse."""
    settings = TINY | {"patience": 5, "learning_rate": 3.0, "likelihood_steps": 0}
    assert fit_density(ROWS, key=key, **settings).history.loss.size == 20


@pytest.mark.slow
def test_noise_may_be_asked_for_at_once_and_later(fitted, key):
    """It leaves the distribution nearly as it is, for a velocity that is nearly right."""
    noisy = fit_density(ROWS, key=jax.random.key(0), noise=0.5, **TINY).model
    assert noisy.flow.noise_dimension == 2
    later = dataclasses.replace(fitted.model, flow=rf.with_noise(fitted.model.flow, 0.5))
    x = ROWS[:4]
    values = [m.log_prob(x, key=key) for m in (noisy, later)]
    np.testing.assert_allclose(*values, atol=1e-8)
    np.testing.assert_allclose(values[0], fitted.model.log_prob(x, key=key), atol=0.5)


@pytest.mark.parametrize(("start", "best"), [pytest.param(1.0, 0.0, marks=pytest.mark.slow), (0.7, 1.0)])
def test_the_best_noise_is_chosen_on_validation_rows(start, best, key):
    """The score is that of N(0, 1): from there noise gains nothing, and a narrower start gains most from the
    most noise. Quantiles instead of random rows, so that no row needs a search for modes."""
    transport = rf.sde.GivenTransport(lambda t, z: 0 * z, lambda t, z: -z)
    flow = rf.StochasticFlow(rf.sde.TransportSDE(transport), rf.Normal(jnp.zeros(1), start))
    rows = jnp.asarray(stats.norm.ppf((np.arange(100) + 0.5) / 100)[:, None])
    assert best_noise(flow, rows, key) == best


def test_the_best_noise_needs_rows_set_aside(key):
    with pytest.raises(ValueError, match="needs validation rows"):
        fit_density(ROWS, key=key, noise="best", validation=0.0, **TINY)


def test_a_budget_may_be_in_seconds_and_a_run_resumed_keeps_its_steps(key, tmp_path, monkeypatch):
    settings = TINY | {"steps": None, "likelihood_steps": 0, "seconds": 2.0, "key": key}
    file = tmp_path / "run.checkpoint"
    with monkeypatch.context() as patch:
        interrupt_at(patch, file)
        first = fit_density(ROWS, checkpoint=file, **settings)
    assert first.interrupted
    again = fit_density(ROWS, checkpoint=file, resume=True, **settings)
    planned = rf.train._checkpoint.steps_of(file)
    assert again.history.loss.size == planned > 40
    with pytest.raises(ValueError, match="steps and seconds are alternatives"):
        fit_density(ROWS, key=key, seconds=1.0, **TINY)


def test_smoothed_rows_have_the_noise_asked_for(key):
    """Two widths, 0.3 and 2, around the rows, none of it on what is given."""
    rows = jnp.array([[1.0, 2.0, 3.0]])
    drawn = Smoothed(rows, 0.3, 0.1, num_given=1).sample(key=key, shape=(40_000,))
    np.testing.assert_array_equal(drawn[:, 2], 3.0)
    noise = drawn[:, :2] - rows[:, :2]
    np.testing.assert_allclose(jnp.var(noise, axis=0), 0.9 * 0.3**2 + 0.1 * 2**2, rtol=0.05)
    np.testing.assert_allclose(jnp.mean(jnp.abs(noise) > 2.0, axis=0), 0.1 * 2 * stats.norm.sf(1), rtol=0.1)


@pytest.mark.slow
def test_outliers_to_be_make_heavier_tails(key):
    """Normal rows, half of them with noise: far out ½N(0, 1) + ½N(0, 5) is 3.3 nats more."""
    rows = np.random.default_rng(0).normal(size=(1000, 3))
    settings = TINY | {"width": 16, "depth": 2, "steps": 400, "likelihood_steps": 0, "learning_rate": 1e-2}
    settings |= {"validation": 0.0, "marginals": False}
    far = rows[:50] * 4 / np.linalg.norm(rows[:50], axis=1, keepdims=True)
    fit = lambda share: fit_density(rows, key=key, outliers=share, **settings).model
    score = lambda model: float(np.mean(model.log_prob(far, key=key)))
    assert 1.5 < score(fit(0.5)) - score(fit(0.0)) < 4.5


@pytest.mark.slow
def test_few_rows_are_smoothed_in_training_and_not_learned_by_heart(key):
    """Twelve rows of a normal distribution: with smoothing their own likelihood stays near that of others."""
    rng = np.random.default_rng(3)
    rows, others = rng.normal(size=(12, 2)), rng.normal(size=(500, 2))
    settings = TINY | {"width": 32, "depth": 2, "steps": 800, "likelihood_steps": 0, "validation": 0.0}
    settings |= {"learning_rate": 2e-2}
    score = lambda model: float(np.mean(model.log_prob(others, key=key)))
    smooth, sharp = (fit_density(rows, key=key, smoothing=h, **settings).model for h in (None, 0.0))
    assert score(smooth) > score(sharp) + 0.1


def interrupt_at(monkeypatch, file):
    """Press Ctrl-C, once, when the first step of a stage is written to its file."""
    write_archive = rf.train._checkpoint.write_archive
    pressed = []

    def write(path, header, arrays):
        write_archive(path, header, arrays)
        if Path(path) == file and header["step"] == 1 and not pressed:
            pressed.append(file)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rf.train._checkpoint, "write_archive", write)
    monkeypatch.setattr(rf.train._checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)


@pytest.mark.parametrize("stage", ["regression", "likelihood"])
def test_a_run_cut_in_either_stage_goes_on_to_the_same_bits(fitted, tmp_path, stage, monkeypatch):
    file = tmp_path / "run.checkpoint"
    settings = TINY | {"columns": ["a", "b"], "key": jax.random.key(0), "checkpoint": file}
    with monkeypatch.context() as patch:
        interrupt_at(patch, file if stage == "regression" else second_file(file))
        first = fit_density(ROWS, **settings)
    assert first.interrupted
    assert list(first.stages)[-1] == stage
    assert first.history.loss.size == 1
    again = fit_density(ROWS, resume=True, **settings)
    assert not again.interrupted
    for one, other in zip(jax.tree.leaves(again.model), jax.tree.leaves(fitted.model), strict=True):
        np.testing.assert_array_equal(one, other)


# ------------------------------------------------------------------------------------------ what is given


@pytest.fixture(scope="module")
def conditional():
    """y | x ~ N(2 + 3x, 0.5²): in the units of the data, with what is given far from standard."""
    rng = np.random.default_rng(1)
    x = rng.normal(10, 2, (1500, 1))
    y = 2 + 3 * x + 0.5 * rng.normal(size=(1500, 1))
    settings = {"width": 32, "depth": 2, "steps": 1500, "likelihood_steps": 0, "batch_size": 64}
    return fit_density(y, given=x, key=jax.random.key(0), **settings, progress=False).model


def test_a_conditional_density_is_found(conditional, key):
    x = np.linspace(7, 13, 40)[:, None]
    y = 2 + 3 * x + 0.5 * np.random.default_rng(2).normal(size=x.shape)
    got = conditional.log_prob(y, given=x, key=key)
    truth = stats.norm(2 + 3 * x[:, 0], 0.5).logpdf(y[:, 0])
    assert abs(np.mean(truth - got)) < 0.15
    # It integrates to one over y, for every x.
    grid = np.linspace(25, 45, 401)[:, None]
    density = np.exp(conditional.log_prob(grid, given=np.array([11.0]), key=key))
    assert np.trapezoid(density, grid[:, 0]) == pytest.approx(1, abs=2e-3)


def test_samples_belong_to_what_is_given(conditional, key):
    draws = conditional.sample(key=key, shape=(500,), given=np.array([[8.0], [12.0]]))
    assert draws.shape == (500, 2, 1)
    np.testing.assert_allclose(draws.mean(axis=0)[:, 0], [26, 38], atol=0.3)
    np.testing.assert_allclose(draws.std(axis=0)[:, 0], 0.5, atol=0.2)


@pytest.mark.slow
def test_noise_leaves_what_is_given_alone(conditional, key):
    noisy = dataclasses.replace(conditional, flow=rf.with_noise(conditional.flow, 0.5))
    assert noisy.flow.noise_dimension == 1
    with pytest.raises(ValueError, match="the last 1 of 2 coordinates are given"):
        rf.with_noise(conditional.flow, rf.FullDiffusion(2, width=4, key=key))
    start = jnp.array([[0.3, 1.2]])
    path = noisy.flow.sample_path(key=key, shape=(1,))
    assert float(noisy.flow.push_forward(start, path)[0][0, 1]) == pytest.approx(1.2, abs=1e-12)
    y, x = np.array([[32.2], [31.5]]), np.array([[10.0], [10.0]])
    value = conditional.log_prob(y, given=x, key=key)
    estimate = noisy.estimate(y, given=x, key=key, estimator=rf.PullBack(512))
    np.testing.assert_allclose(estimate.log_prob, value, atol=0.25)


def test_a_model_asks_for_what_is_given(conditional, fitted, key):
    with pytest.raises(ValueError, match="needs given, with 1 columns"):
        conditional.log_prob(np.zeros((2, 1)), key=key)
    with pytest.raises(ValueError, match="takes no given columns"):
        fitted.model.log_prob(ROWS[:2], given=np.zeros((2, 1)), key=key)
    with pytest.raises(ValueError, match="takes no given columns"):
        fitted.model.sample(given=np.zeros((2, 1)), key=key)
    with pytest.raises(ValueError, match="but given has"):
        fit_density(ROWS, given=ROWS[:3], key=key, **TINY)


def test_a_conditional_model_comes_back(conditional, tmp_path, key):
    rf.save(tmp_path / "model.rf", conditional)
    y, x = np.array([[32.0]]), np.array([[10.0]])
    value = rf.load(tmp_path / "model.rf").log_prob(y, given=x, key=key)
    np.testing.assert_array_equal(value, conditional.log_prob(y, given=x, key=key))


# ------------------------------------------------------------------------------- tables without a density


def test_a_data_frame_keeps_its_names(key):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(ROWS, columns=["length", "width"])
    quick = TINY | {"steps": 1, "likelihood_steps": 0}
    assert fit_density(frame, key=key, **quick).model.columns == ("length", "width")
    model = fit_density(frame[["width"]], given=ROWS[:, :1], key=key, **quick).model
    assert model.columns == ("width", "x2")
    with pytest.raises(ValueError, match="column 'kind' of data holds 'x', not numbers"):
        fit_density(frame.assign(kind="x"), key=key, **quick)
    with pytest.raises(ValueError, match=r"column 'day' of data holds '2020-01-01.*', not numbers"):
        fit_density(frame.assign(day=pd.Timestamp("2020-01-01")), key=key, **quick)
    with pytest.raises(ValueError, match="not finite, first in row 3, column 'width'"):
        fit_density(frame.assign(width=frame["width"].where(frame.index != 3)), key=key, **quick)


def test_samples_of_any_shape(fitted, key):
    assert fitted.model.sample(key=key, shape=5).shape == (5, 2)
    assert fitted.model.sample(key=key, shape=(3, 0)).shape == (3, 0, 2)
    assert fitted.model.flow.sample(key=key, shape=0).shape == (0, 2)
    for shape in (-1, (2, -1), 2.5):
        with pytest.raises(ValueError, match="shape must be a tuple of non-negative whole numbers"):
            fitted.model.sample(key=key, shape=shape)
        with pytest.raises(ValueError, match="shape must be a tuple"):
            fitted.model.flow.sample(key=key, shape=shape)


def test_rounded_columns_are_said_in_one_line(key):
    rows = np.stack([ROWS[:, 0], np.arange(len(ROWS)) % 3, ROWS[:, 1].round(1)], axis=1)
    with pytest.warns(UserWarning, match="rounded values") as caught:
        rf.fit_density(rows, key=key, family="gaussian")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    said = str(caught[0].message)
    assert said.startswith("columns 1, 2 hold rounded values (in steps of 1, 0.1)")
    assert 'pass rounding="auto"' in said
