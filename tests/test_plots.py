"""Figures show the numbers they were given, say what they show, and reach the disk whole or not at all."""

import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from problems import made

import roughflow as rf

mpl.use("Agg")

import matplotlib.pyplot as plt

from roughflow import plots
from roughflow.plots._series import TimeAxis
from roughflow.series import panel

EXTENT = (-3.0, 3.0, -1.0, 2.0)


@pytest.fixture(autouse=True)
def settings_stay():
    """No function changes matplotlib's settings, and figures do not pile up."""
    before = mpl.rcParams.copy()
    yield
    assert mpl.rcParams == before
    plt.close("all")


@dataclass(frozen=True)
class History:
    step: np.ndarray
    loss: np.ndarray
    validation_step: np.ndarray | None = None
    validation_loss: np.ndarray | None = None


def lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def log_normal(z):
    return -0.5 * jnp.sum(z**2, axis=-1) - jnp.log(2 * jnp.pi)


# ------------------------------------------------------------------------------ the plane


def test_grid_is_of_square_pixels():
    points = plots.grid(EXTENT, 60)
    assert points.shape == (30, 60, 2)
    np.testing.assert_allclose(points[0, 0], [-2.95, -0.95])
    np.testing.assert_allclose(points[-1, -1], [2.95, 1.95])
    with pytest.raises(ValueError, match="extent"):
        plots.grid((1.0, 0.0, 0.0, 1.0))


@pytest.mark.parametrize("given", ["function", "values"])
def test_density_draws_the_density(given):
    sizes = []

    def log_prob(z):
        sizes.append(z.shape)
        return log_normal(z)

    points = plots.grid(EXTENT, 60)
    ax = plots.density(
        log_prob if given == "function" else log_normal(points), extent=EXTENT, resolution=60, chunk=700
    )
    (image,) = ax.get_images()
    np.testing.assert_allclose(image.get_array(), np.exp(log_normal(points)), rtol=1e-12)
    assert (image.origin, tuple(image.get_extent())) == ("lower", EXTENT)
    assert (ax.get_aspect(), ax.get_xlim(), ax.get_ylim()) == (1.0, EXTENT[:2], EXTENT[2:])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("$x_1$", "$x_2$")
    assert sizes == ([(700, 2), (700, 2), (400, 2)] if given == "function" else [])


def test_density_has_a_scale_when_asked():
    assert len(plots.density(log_normal, extent=EXTENT, resolution=10).figure.axes) == 1
    ax = plots.density(log_normal, extent=EXTENT, resolution=10, maximum=0.5, colour_bar=True)
    assert ax.get_images()[0].get_clim() == (0, 0.5)
    assert ax.figure.axes[1].get_ylabel() == "density"


def test_a_density_of_zero_is_drawn_and_nan_is_refused():
    ax = plots.density(np.array([[-np.inf, 0.0], [0.0, -np.inf]]), extent=EXTENT)
    np.testing.assert_array_equal(ax.get_images()[0].get_array(), [[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="NaN at 1 of 2 points"):
        plots.density(np.array([[np.nan, 0.0]]), extent=EXTENT)
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        plots.density(np.zeros(3), extent=EXTENT)


def test_samples_are_dots(key):
    points = np.asarray(jax.random.normal(key, (500, 2)))
    _, ax = plt.subplots()
    assert plots.samples(points, extent=EXTENT, ax=ax) is ax
    np.testing.assert_array_equal(ax.get_lines()[0].get_xydata(), points)
    assert ax.get_xlim() == EXTENT[:2]
    crowd = plots.samples(np.tile(points, (40, 1))).get_lines()[0]
    assert crowd.get_markersize() < ax.get_lines()[0].get_markersize()
    with pytest.raises(ValueError, match=r"\(N, 2\), got \(500,\)"):
        plots.samples(points[:, 0])


def test_trajectory_goes_from_its_start_to_its_end(key):
    path = np.cumsum(np.asarray(jax.random.normal(key, (50, 2))), axis=0)
    ax = plots.trajectory(path, t1=2.0, colour_bar=True)
    (pieces,) = ax.collections
    np.testing.assert_allclose(np.array(pieces.get_segments()), np.stack([path[:-1], path[1:]], axis=1))
    assert pieces.get_clim() == (0, 2.0)
    np.testing.assert_allclose(pieces.get_array()[[0, -1]], [1 / 49, 2 - 1 / 49])
    _, start, end = ax.get_lines()
    np.testing.assert_array_equal(start.get_xydata()[0], path[0])
    np.testing.assert_array_equal(end.get_xydata()[0], path[-1])
    assert ax.figure.axes[1].get_ylabel() == "time"
    assert ax.dataLim.contains(*path[25])
    with pytest.raises(ValueError, match=r"\(T, 2\)"):
        plots.trajectory(path[:1])


def test_trajectory_keeps_the_window_of_a_density():
    ax = plots.density(log_normal, extent=EXTENT, resolution=10)
    plots.trajectory(np.array([[0.0, 0.0], [50.0, 50.0]]), ax=ax)
    assert ax.get_xlim() == EXTENT[:2]


# ------------------------------------------------------------------------ paths over time


def test_sample_paths(key):
    times, paths = np.linspace(0, 2, 30), np.asarray(jax.random.normal(key, (7, 30)))
    ax = plots.sample_paths(times, paths)
    np.testing.assert_array_equal([line.get_ydata() for line in ax.get_lines()], paths)
    assert (ax.get_xlim(), ax.get_xlabel()) == ((0, 2), "time $t$")
    with pytest.raises(ValueError, match=r"got \(30, 7\) and \(30,\)"):
        plots.sample_paths(times, paths.T)


def test_approximations_of_a_path(key):
    fine = rf.PiecewiseLinear(24).sample(key=key)
    times = jnp.linspace(0, 1, 25)
    values = np.asarray(jax.vmap(fine.evaluate)(times))[:, 0]
    coarse = rf.PiecewiseLinear(6).project(fine)
    ax = plots.approximations(fine, {"piecewise linear": coarse, "zero": np.zeros(25)}, times=times)
    drawn = lines(ax)
    assert list(drawn) == ["Brownian path", "piecewise linear", "zero"]
    np.testing.assert_allclose(drawn["Brownian path"].get_ydata(), values)
    # It meets the path at its own knots, and only there.
    gap = drawn["piecewise linear"].get_ydata() - values
    np.testing.assert_allclose(gap[::4], 0, atol=1e-12)
    assert np.all(np.abs(np.delete(gap, np.s_[::4])) > 1e-6)
    assert len({line.get_color() for line in ax.get_lines()}) == 3
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(drawn)
    with pytest.raises(ValueError, match="one-dimensional"):
        plots.approximations(np.zeros((25, 2)), {}, times=times)


# --------------------------------------------------------------------------------- series


def test_bands_are_those_of_the_delta_method(key):
    """Of κ(μ − x) by hand; of a noise of one size they are the interval of its parameter."""
    x = np.convolve(np.sin(12.9898 * np.arange(80) ** 2), 0.8 ** np.arange(20), mode="valid")
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(len(x)) / 4, x, key=key)
    states = np.array([0.8, 1.1])
    drift, noise = plots.bands(result, states, level=0.9).axes
    kappa, mu, _ = result.estimates
    slope = np.stack([mu - states, np.full(2, kappa)], axis=1)
    error = np.sqrt(np.sum(slope @ result.covariance[:2, :2] * slope, axis=1))
    np.testing.assert_allclose(lines(drift)["estimate"].get_ydata(), kappa * (mu - states))
    ends = [kappa * (mu - states) - 1.6449 * error, kappa * (mu - states) + 1.6449 * error]
    np.testing.assert_allclose(band(drift, states), ends, rtol=1e-4)
    np.testing.assert_allclose(band(noise, states).T, [result.confint(0.9)["sigma"]] * 2)
    low, high = plots.bands(result).axes[0].get_xlim()
    np.testing.assert_allclose([low, high], [x.min(), x.max()])
    with pytest.raises(ValueError, match="level must lie"):
        plots.bands(result, level=95)


def band(ax, x):
    """The lower and the upper end of what is filled, at each x."""
    points = ax.collections[0].get_paths()[0].vertices
    at = [points[np.isclose(points[:, 0], one), 1] for one in x]
    return np.array([[ends.min(), ends.max()] for ends in at]).T


# -------------------------------------------------------------------------- how it went


def test_training_shows_loss_validation_and_floor():
    step = np.arange(1000)
    loss = 3 + 100 * np.exp(-step / 3.0) + 0.1 * np.sin(step)
    ax = plots.training(History(step, loss, step[::100], 3.1 + 0 * step[::100]), entropy=2.5)
    raw, drawn = ax.get_lines()[0], lines(ax)
    np.testing.assert_array_equal(raw.get_ydata(), loss)
    # The moving mean takes the wave away, and the first losses do not flatten the rest.
    np.testing.assert_allclose(drawn["training"].get_ydata()[200:-20], 3, atol=0.02)
    np.testing.assert_array_equal(drawn["validation"].get_ydata(), 3.1)
    np.testing.assert_array_equal(drawn["entropy, 2.500"].get_ydata(), 2.5)
    bottom, top = ax.get_ylim()
    assert bottom < 2.5
    assert 3.1 < top < 10
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss (nats)")


def test_training_without_validation_and_with_a_gap():
    loss = np.array([4.0, 3.0, np.nan, 3.0, 2.0])
    ax = plots.training(History(np.arange(5), loss), window=3)
    np.testing.assert_allclose(lines(ax)["training"].get_ydata(), [3.5, 3.5, 3.0, 2.5, 2.5])
    assert "validation" not in lines(ax)
    assert "validation" not in lines(plots.training(rf.train.History(loss=loss)))
    with pytest.raises(ValueError, match="no finite value"):
        plots.training(History(np.arange(2), np.full(2, np.nan)))


def test_diagnostics_say_what_is_suspect(key):
    spread = jnp.linspace(0.1, 3.0, 40)
    log_weights = spread[None] * jax.random.normal(key, (200, 40))
    estimate = made(log_weights.at[:, 7].set(-jnp.inf))
    figure = plots.diagnostics(estimate)
    left, middle, _ = figure.axes
    assert [ax.get_ylabel() for ax in figure.axes] == [
        "effective paths",
        "standard error (nats)",
        "truncation error (nats)",
    ]
    for ax, values in ((left, estimate.effective_paths), (middle, estimate.standard_error)):
        fine, bad = ax.get_lines()[:2]
        assert len(bad.get_ydata()) == int(estimate.suspect.sum()) - 1
        shown = np.sort(np.concatenate([fine.get_ydata(), bad.get_ydata()]))
        np.testing.assert_array_equal(shown, np.sort(np.delete(values, 7)))
    assert (left.get_title(), middle.get_title()) == ("1 not shown (0)", "1 not shown (inf)")
    written = " ".join(figure.get_suptitle().split())
    assert estimate.warning is not None
    assert written == estimate.warning


def test_diagnostics_of_a_good_estimate(key):
    estimate = made(0.01 * jax.random.normal(key, (20, 6)))
    figure = plots.diagnostics(estimate)
    assert figure.get_suptitle() == "none of 6 estimates is suspect"


# ------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_save_makes_the_folder_and_leaves_one_file(tmp_path, ending):
    file = tmp_path / "new" / "folder" / f"figure.{ending}"
    assert plots.save(plots.samples(np.eye(2)).figure, file) == file
    assert file.read_bytes()[:4] == {"png": b"\x89PNG", "pdf": b"%PDF"}[ending]
    assert list(file.parent.iterdir()) == [file]


def test_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "figure.png"
    file.write_text("old")
    figure = plots.samples(np.eye(2)).figure

    def half(path, **settings):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        plots.save(figure, file)
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("figure.png", "old")]


@pytest.mark.filterwarnings("error")
def test_nothing_is_cut_off(tmp_path):
    """The border is white, so no label reaches over it, and the layout found room for all."""
    step = np.arange(50)
    estimate = replace(made(jnp.zeros((30, 4))), steep=jnp.ones(4, bool))
    figures = {
        "density": plots.density(log_normal, extent=EXTENT, resolution=10, colour_bar=True).figure,
        "training": plots.training(History(step, 1e4 + step), entropy=1e4).figure,
        "diagnostics": plots.diagnostics(estimate),
    }
    for name, figure in figures.items():
        pixels = plt.imread(plots.save(figure, tmp_path / f"{name}.png", dpi=100))[..., :3]
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.all(border == 1), name


def test_columns_in_different_units_fill_the_figure():
    """Equal scales would make a figure with hardly any width."""
    points = np.random.default_rng(0).normal(size=(50, 2))
    assert plots.samples(points).get_aspect() == 1.0
    assert plots.samples(points * np.array([1.0, 1e5])).get_aspect() == "auto"
    assert plots.grid((0, 1, 0, 1000), 20).shape == (20, 20, 2)
    assert plots.density(np.zeros((20, 20)), extent=(0, 1, 0, 1000)).get_aspect() == "auto"


def test_a_density_of_zero_is_white():
    image = plots.density(np.full((3, 3), -np.inf), extent=(0, 1, 0, 1)).images[0]
    assert image.get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("log_prob", "extent", "message"),
    [
        (lambda z: 0.0, (0, 1, 0, 1), r"must return shape \(N,\) for points \(N, 2\), got \(\)"),
        (np.full((3, 3), 800.0), (0, 1, 0, 1), "too large for a density, up to 800: subtract a constant"),
        (np.zeros((3, 3)), (1, 0, 0, 1), "extent must be"),
    ],
)
def test_densities_that_cannot_be_drawn_are_refused(log_prob, extent, message):
    with pytest.raises(ValueError, match=message):
        plots.density(log_prob, extent=extent)


def test_entropy_is_visible_on_a_dark_background():
    history = SimpleNamespace(step=[1], loss=[3.0], validation_step=None, validation_loss=None)
    with plt.style.context("dark_background"), warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = plots.training(history, entropy=2.0)
    assert ax.lines[-1].get_color() == "white"
    assert ax.lines[1].get_marker() == "o"  # a line through one step would be invisible


def test_short_series_with_dates_have_an_axis_of_dates():
    hours = np.datetime64("2023-05-03") + np.arange(9) * np.timedelta64(1, "h")
    one = panel(hours, np.arange(9.0))[0]
    axis, ax = TimeAxis.of(one), plt.figure().subplots()
    ax.plot(axis(one.times), one.times)
    assert axis.label(ax, None).get_xlabel() == "date"
    ax.figure.canvas.draw()
    assert "03:00" in [label.get_text() for label in ax.get_xticklabels()]
    assert TimeAxis.of(one, origin=5.0)(0.0) == 5.0
