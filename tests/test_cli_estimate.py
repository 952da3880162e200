"""`roughflow estimate`: what it prints and writes for a series, and what it says when something is wrong."""

import dataclasses
import gzip
import io
import json
import os
import sys

import jax
import matplotlib as mpl
import numpy as np
import pytest
from scipy import stats

import roughflow as rf
from roughflow.cli import main
from roughflow.cli.arguments import MODELS
from roughflow.cli.estimate import KINDS
from roughflow.cli.startup import Refused

mpl.use("Agg")

COLUMNS = ["--time", "date", "--value", "rate"]


def vasicek(count=121, seed=3):
    """Monthly values of dX = 0.5(4 − X) dt + 0.6 dB."""
    rng, x = np.random.default_rng(seed), [4.0]
    decay = np.exp(-0.5 / 12)
    for noise in 0.6 * np.sqrt(1 - decay**2) * rng.normal(size=count - 1):
        x.append(4 + decay * (x[-1] - 4) + noise)
    return np.array(x)


def months(count):
    return [str(np.datetime64("2000-01") + i) for i in range(count)]


def table(path, times, values):
    path.write_text("".join(f"{t},{v}\n" for t, v in [("date", "rate"), *zip(times, values, strict=True)]))
    return path


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Estimate from these times and values: it must be refused in one line, with nothing written."""
    monkeypatch.chdir(tmp_path)

    def run(times, values, *options):
        table(tmp_path / "series.csv", times, values)
        code = main(["estimate", "series.csv", *COLUMNS, "--out", "figures", "--quiet", *options])
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert said.err.startswith("roughflow: error: ")
        assert said.err.count("\n") == 1
        assert os.listdir(tmp_path) == ["series.csv"]
        return said.err

    return run


def test_a_series_of_dates_with_gaps(tmp_path, capsys):
    """The figures and the numbers, those of the library for the same series in years."""
    x = vasicek()
    cells = [f"{value:.6f}" for value in x]
    cells[100], cells[50] = "", "NA"
    file = table(tmp_path / "series.csv", months(len(x)), cells)
    out = tmp_path / "figures"
    options = ["--model", "vasicek", "--scale", "0.01", "--out", str(out)]
    assert main(["estimate", str(file), *COLUMNS, *options]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "OrnsteinUhlenbeck by maximum likelihood, 118 transitions" in said.out
    assert sorted(os.listdir(out)) == ["estimate.json", "estimate.png"]
    assert (out / "estimate.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((out / "estimate.json").read_text())
    assert numbers["series"]["missing"] == 2
    there = np.array([cell not in ("", "NA") for cell in cells])
    times = np.array([np.datetime64(month, "D") for month in months(len(x))])[there]
    start = rf.OrnsteinUhlenbeck(1.0, 0.04, 0.01)
    known = rf.fit_sde(start, times, np.round(x, 6)[there] / 100, key=jax.random.key(0))
    assert numbers["params"] == pytest.approx(known.params, rel=1e-4)
    assert numbers["standard_errors"] == pytest.approx(known.standard_errors, rel=1e-3)
    assert numbers["log_likelihood"] == pytest.approx(known.log_likelihood, abs=1e-5)
    for name, error in numbers["standard_errors"].items():
        true = {"kappa": 0.5, "mu": 0.04, "sigma": 0.006}[name]
        assert abs(numbers["params"][name] - true) < 3 * error
    # A second time they are not overwritten, unless asked for.
    assert main(["estimate", str(file), *COLUMNS, *options]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize("form", [".tsv", ".csv.gz", "-"])
def test_other_tables_and_times_as_numbers(form, tmp_path, monkeypatch, capsys):
    text = "".join(f"{t},x,{v}\n" for t, v in [("date", "rate"), *enumerate(vasicek(60))])
    file = tmp_path / f"series{form}"
    if form == ".tsv":
        file.write_text(text.replace(",", "\t"))
    elif form == ".csv.gz":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    out = tmp_path / "numbers.json"
    where = "-" if form == "-" else str(file)
    assert main(["estimate", where, *COLUMNS, "--model", "brownian", "--json", str(out)]) == 0
    numbers = json.loads(out.read_text())
    x = vasicek(60)
    assert numbers["params"]["mu"] == pytest.approx((x[-1] - x[0]) / 59, rel=1e-4)
    assert numbers["params"]["sigma"] == pytest.approx(np.std(np.diff(x)), rel=1e-4)
    assert "residuals: Ljung–Box p = " in capsys.readouterr().out


def test_models_are_compared(tmp_path, capsys, monkeypatch):
    """The best first; one that cannot be is said to, with why."""
    from roughflow.cli import estimate

    some = {name: MODELS[name] for name in ("brownian", "vasicek", "cir")}
    monkeypatch.setattr(estimate, "MODELS", some)
    file = table(tmp_path / "series.csv", np.arange(240) / 12, vasicek(240) - 4)
    assert main(["estimate", str(file), *COLUMNS, "--compare", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "log-likelihood", "parameters", "AIC", "ΔAIC", "BIC"]
    rows = [line.split() for line in lines[1:3]]
    assert {row[0]: row[2] for row in rows} == {"brownian": "2", "vasicek": "3"}
    assert [len(row) for row in rows] == [7, 6]
    assert rows[0][6] == "best"
    assert rows[0][4] == "0.00"
    assert float(rows[1][4]) == pytest.approx(float(rows[1][3]) - float(rows[0][3]), abs=0.011)
    assert lines[3].startswith("  cir: values must lie above 0, but they range from -")
    named = {"brownian": "BrownianMotion", "vasicek": "OrnsteinUhlenbeck"}
    assert lines[5].startswith(named[rows[0][0]])


def test_models_that_cannot_be_told_apart_are_tied(tmp_path, capsys, monkeypatch):
    """Far from zero the noise of CIR is as good as constant."""
    from roughflow.cli import estimate

    monkeypatch.setattr(estimate, "MODELS", {name: MODELS[name] for name in ("cir", "brownian", "vasicek")})
    file = table(tmp_path / "series.csv", np.arange(240) / 12, 1000 + vasicek(240))
    assert main(["estimate", str(file), *COLUMNS, "--compare", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marks = {line.split()[0]: line.split()[6:] for line in lines[1:4]}
    tied = {name for name, mark in marks.items() if mark == ["tied"]}
    assert {"cir", "vasicek"} <= tied
    assert lines[4].endswith(
        f"are tied; the summary is for {'brownian' if 'brownian' in tied else lines[1].split()[0]}"
    )


def test_an_unreliable_fit_is_not_ranked_first():
    from roughflow.cli.estimate import _best, _comparison

    series = np.arange(600) / 12, vasicek(600)
    good = rf.fit_sde(rf.BrownianMotion(0.0, 0.6), *series, key=jax.random.key(0), num_starts=1)
    better = rf.fit_sde(rf.OrnsteinUhlenbeck(0.5, 4.0, 0.6), *series, key=jax.random.key(0), num_starts=1)
    assert better.aic < good.aic
    assert _best({"vasicek": better, "brownian": good}) == "vasicek"
    doubtful = dataclasses.replace(better, likelihood_error=1.0)  # nats
    compared = {"vasicek": doubtful, "brownian": good}
    assert _best(compared) == "brownian"
    rows = [line.split() for line in _comparison(compared).splitlines()]
    assert [row[0] for row in rows[1:]] == ["brownian", "vasicek", "vasicek:"]
    assert rows[1][4:] == ["0.00", rows[1][5], "best"]
    assert rows[2][4] == "–"
    assert rows[2][6:] == ["see", "below"]
    # A fit on a boundary stands for a simpler model.
    reverting = rf.fit_sde(rf.CoxIngersollRoss(0.5, 4.0, 0.3), *series, key=jax.random.key(0), num_starts=1)
    flat = reverting.falls * np.array([[0, 1, 1], [1, 1, 1]])  # no fall towards kappa = 0
    at_zero = dataclasses.replace(reverting, falls=flat)
    assert at_zero.boundary == ("kappa",)
    assert _best({"cir": reverting, "brownian": good}) == "cir"
    assert _best({"cir": at_zero, "brownian": good}) == "brownian"
    with pytest.raises(Refused, match="could be fitted reliably: vasicek, the log-likelihood is known"):
        _best({"vasicek": doubtful})


def test_forecasts_as_numbers(tmp_path, capsys):
    """Quantiles of the fitted SDE at dates, with a time zone, and at years after the last value."""
    x = vasicek()
    stamps = [f"{month}-01T02:00:00+02:00" for month in months(len(x))]
    file = table(tmp_path / "series.csv", stamps, x)
    command = ["estimate", str(file), *COLUMNS, "--model", "vasicek", "--quiet"]
    out = tmp_path / "figures"
    ahead = "2010-07-01T00:00Z, 2020-01-01T00:00Z"
    assert main([*command, "--forecast", ahead, "--out", str(out)]) == 0
    assert sorted(os.listdir(out)) == ["estimate.json", "estimate.png", "forecast.csv"]
    lines = [line.split(",") for line in (out / "forecast.csv").read_text().splitlines()]
    assert lines[0] == ["time", "q05", "q25", "q50", "q75", "q95"]
    assert [line[0] for line in lines[1:]] == ["2010-07-01T00:00:00Z", "2020-01-01T00:00:00Z"]
    numbers = json.loads((out / "estimate.json").read_text())
    assert numbers["series"]["first"] == "2000-01-01T00:00:00Z"
    kappa, mu, sigma = numbers["params"].values()
    for line, days in zip(lines[1:], (181, 3652), strict=True):
        decay = np.exp(-kappa * days / 365.25)
        spread = sigma * np.sqrt((1 - decay**2) / (2 * kappa))
        levels = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
        known = stats.norm.ppf(levels, mu + (x[-1] - mu) * decay, spread)
        np.testing.assert_allclose(np.array(line[1:], float), known, rtol=0, atol=0.06 * spread)
    assert numbers["forecast"]["q50"] == [float(line[3]) for line in lines[1:]]
    capsys.readouterr()
    assert main([*command, "--forecast", "10", "--parameter-uncertainty"]) == 0
    said = capsys.readouterr().out.splitlines()
    wider = np.array(said[-1].split()[1:], float)
    last = np.array(lines[2][1:], float)
    assert wider[-1] - wider[0] > 1.03 * (last[-1] - last[0])


X = [1.0, 2.0, 1.5, 1.7, 1.2, 1.9]
BAD = {
    "a time that is not a number": ([0, 1, "nan", 3, 4, 5], X, "cir", "'date' is 'nan'"),
    "dates and numbers": ([*months(5), "7"], X, "cir", "line 7 cannot be used"),
    "dates of the US": ([f"01/{i:02}/2024" for i in range(1, 7)], X, "cir", "2024-01-31 (year-month-day)"),
    "months without dashes": (
        range(201001, 201007),
        X,
        "cir",
        "'date' is 201001, a date without dashes: write 2010-01",
    ),
    "a date without a time zone": (
        [f"2024-01-0{i}T00:00{'Z' * (i < 5)}" for i in range(1, 7)],
        X,
        "cir",
        "lines 6, 7 cannot be used, the first because 'date' is '2024-01-05T00:00', without a time zone",
    ),
    "only missing ones": (range(2), ["", "nan"], "vasicek", "has 0 values in column 'rate'"),
    "not identified": (
        range(3),
        [1.0, 2.0, 1.5],
        "vasicek",
        "not identified: the information matrix",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_series_are_refused_in_one_line(case, refused):
    times, values, model, expected = BAD[case]
    assert expected in refused(times, values, "--model", model)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ("2000-06-01", "increase and be later than 2000-06-01; got '2000-06-01'"),
        ("2001-02-30", "increase and be later than 2000-06-01"),
        ("2,1", "increase and be later than the last value, from which they are counted; got '2,1'"),
        ("1e40", "increase and be later than"),
        ("soon", "takes dates such as 2000-06-01, or numbers, separated by commas; got 'soon'"),
        ("2001-01-01T00:00Z", "takes dates such as 2000-06-01"),
        ("", "takes dates"),
    ],
)
def test_bad_times_of_forecasts_are_refused_in_one_line(times, expected, refused):
    assert expected in refused(months(6), X, "--model", "cir", "--forecast", times)
    if times.startswith("2001"):
        assert "--forecast takes numbers" in refused(range(6), X, "--model", "cir", "--forecast", times)


def test_a_search_starts_near_the_truth():
    """The moments of a long series, for each model with values of its kind."""
    assert set(KINDS) == set(MODELS)
    dt = 0.02
    for name, true in {
        "brownian": (0.5, 0.2),
        "gbm": (0.05, 0.2),
        "vasicek": (1.0, 2.0, 0.3),
        "cir": (1.0, 2.0, 0.3),
        "ckls": (1.0, 2.0, 0.3, 0.8),
        "cev": (0.05, 0.2, 0.5),
        "jacobi": (1.0, 0.5, 0.3),
        "double-well": (1.0, 1.0, 0.7),
    }.items():
        sde, start = KINDS[name](*true), np.array([0.5 if name == "jacobi" else 1.0])
        key = jax.random.key(1)
        x = rf.simulate(sde, start, key=key, t1=5000 * dt, steps=5000, trajectory=True)[:, 0]
        guess = KINDS[name].from_series(dt * np.arange(5001), np.asarray(x))
        assert type(guess) is type(sde)
        # Of Euler's own path: what is left is the error of 100 units of time.
        for field in sde.domains:
            close = {"rtol": 0.2} if field == "sigma" else {"atol": 0.5}
            np.testing.assert_allclose(getattr(guess, field), getattr(sde, field), **close)
