"""The page on a fit: one file that needs no other, with everything in it."""

import base64
import csv
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from fits import fit_density

import roughflow as rf
from roughflow import experiments, report
from roughflow.cli import main

SHOWN = 2  # columns
NAMES = ('<b>"bold"</b> & co, ' + "long " * 12, "$x$", "<f>")
TINY = ["--steps", "3", "--likelihood-steps", "2", "--width", "4", "--depth", "1", "--quiet"]
IMAGE = re.compile(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"')


def images(page):
    return [base64.b64decode(data, validate=True) for data in IMAGE.findall(page)]


def assert_whole(page):
    """No word of the page is fetched from elsewhere, and its images are PNG."""
    rest = IMAGE.sub("", page)
    assert not re.search(r"http|src=|href=|url\(|@import|<script|<link", rest)
    assert images(page)
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in image for image in images(page))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a fit from the command line to columns with difficult names, one of few values."""
    folder = tmp_path_factory.mktemp("report")
    rows = np.random.default_rng(0).normal(3, 2, (60, len(NAMES)))
    rows[:, 1] = np.arange(60) % 3
    data = folder / "a & b.csv"
    with data.open("w", newline="") as file:
        csv.writer(file).writerows([NAMES, *rows])
    command = ["fit", str(data), "--out", f"{folder}/m.rf", "--report", f"{folder}/page.html", *TINY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MAX_COLUMNS", SHOWN)
        assert main([*command, "--seed", "3"]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["a & b.csv", "m.rf", "page.html"]
    return (folder / "page.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(page):
    assert_whole(page)
    # Two columns, their pair, two stages, the solver's error.
    assert len(images(page)) == 2 + 1 + 2 + 1


def test_the_page_says_how_it_was_made_and_how_good_it_is(page):
    assert "<title>The density of a &amp; b.csv</title>" in page
    for text in (
        "--steps 3",
        "<dd>60, 6 of them for validation</dd>",
        f"roughflow {rf.__version__}",
        "<dd>3</dd>",
    ):
        assert text in page
    for text in ("log-likelihood", "Gaussian", "3 steps; completed", "2 steps; completed"):
        assert text in page
    assert "exact up to solver error" in page
    assert "<li>column &#x27;$x$&#x27; holds rounded values (in steps of 1)" in page
    assert "(validation rows)" in page


def test_names_are_escaped(page):
    assert "&lt;b&gt;&quot;bold&quot;&lt;/b&gt; &amp; co" in page
    assert "<b>" not in page
    assert "not shown: &lt;f&gt;." in page
    assert "<f>" not in page


def small_fit(key, rows, **settings):
    tiny = {"width": 4, "depth": 1, "steps": 2, "likelihood_steps": 0, "progress": False}
    return fit_density(rows, key=key, **tiny, **settings)


def test_one_column_given_another(key, tmp_path):
    """What is given is shown beside its column; the Gaussian is conditioned too."""
    rows = np.random.default_rng(0).normal(size=(80, 2)) @ np.array([[1.0, 2.0], [0.0, 0.1]])
    fitted = small_fit(key, rows[:, :1], given=rows[:, 1:], columns=("y", "x"), validation=0.0)
    written = report.write_report(tmp_path / "r.html", fitted, rows, key=key, notes=["<mind>"])
    page = written.read_text(encoding="utf-8")
    assert_whole(page)
    assert len(images(page)) == 4
    assert "<dt>given</dt><dd>x</dd>" in page
    assert "rows (rows used in the fit)" in page
    assert "<li>&lt;mind&gt;</li>" in page
    # y given x is normal with this variance: log p is −½ log 2πe s² on average.
    residual = rows[:, 0] - np.polyval(np.polyfit(rows[:, 1], rows[:, 0], 1), rows[:, 1])
    truth = -0.5 * np.log(2 * np.pi * np.e * residual.var())
    told = float(re.search(r"<dt>Gaussian</dt><dd>(-?[\d.]+)", page).group(1))
    np.testing.assert_allclose(told, truth, atol=0.01)


def test_bounds_are_suggested_where_samples_leave_the_range_of_the_data():
    rng = np.random.default_rng(0)
    data = np.stack([rng.exponential(size=2000), rng.normal(size=2000), rng.uniform(2, 3, 2000)], axis=1)
    drawn = np.stack([rng.normal(1, 1, 2000), rng.normal(size=2000), rng.uniform(1.9, 3.1, 2000)], axis=1)
    income, share = report._outside(["income", "height", "share"], data, drawn)
    assert "bounds={'income': (0, None)}" in income
    low, high = data[:, 2].min(), data[:, 2].max()
    assert f"bounds={{'share': ({low:.6g}, {high:.6g})}}" in share


def test_error_bars_are_checked_where_there_is_noise():
    """Honest ones are found honest; an estimate that is not finite is left out."""
    draws = np.random.default_rng(0).normal(0, 0.1, (2, 4001))
    draws[0, 0] = -np.inf
    count = draws.shape[1:]
    paths = {"effective_paths": jnp.full(count, 40.0), "num_paths": jnp.full(count, 64)}
    bars = {"standard_error": jnp.full(count, 0.1)}
    of = lambda value: rf.Estimate.of(jnp.asarray(value), "paths", **bars, **paths)
    section = report._Judged(of(draws[0]), of(draws[1]), np.zeros(count), True).section()
    assert "at 4000 rows" in section
    assert re.search(r"one error bar at 6[789]% of them and by less than two at 9[456]%", section)
    assert "The median error bar of log p is 0.1 nats, with 40 effective paths out of 64" in section
    assert_whole(section)


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, capsys):
    data, out = tmp_path / "data.csv", tmp_path / "m.rf"
    data.write_text("a,b\n" + "".join(f"{i},{i * i}\n" for i in range(30)))
    fit = lambda path: main(["fit", str(data), "--out", str(out), "--report", str(path), *TINY])
    assert fit(out) == 2
    assert "--report and --out are both" in capsys.readouterr().err
    assert fit(data) == 2
    assert "is also the input" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "roughflow.report")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert fit(tmp_path / "r.html") == 2
    assert "figures need matplotlib" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.csv"]


@pytest.mark.slow
def test_the_demo_writes_one_too(tmp_path, monkeypatch):
    for name, value in {"DEMO_ROWS": 200, "DEMO_HELD_OUT": 40, "DEMO_TEST": 30, "DEMO_DRAWN": 50}.items():
        monkeypatch.setattr(experiments, name, value)
    monkeypatch.setattr(experiments, "_panels", lambda *_: report.draw_calibration(np.zeros(3)))
    experiments.demo(tmp_path, seed=2, progress=False, steps=3, likelihood_steps=2)
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert_whole(page)
    assert "roughflow demo --seed 2" in page
    assert "200 to fit, 30 set aside" in page
