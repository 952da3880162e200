"""Series as users have them: dates, time zones, missing values, panels, and what is refused of them."""

import datetime as dt

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import StepPatch

import roughflow as rf
from roughflow.series._observed import panel

mpl.use("Agg")

KEY = jax.random.key(0)
X = np.array([1.0, 2.0, 1.5, 3.0])
DAYS = np.array([0, 1, 2, 4])
DATES = [dt.date(2020, 1, 1 + int(day)) for day in DAYS]
INDEX = pd.DatetimeIndex(DATES)
UTC, NEW_YORK = dt.UTC, dt.timezone(dt.timedelta(hours=-5))
OU = rf.OrnsteinUhlenbeck(1.0, 0.05, 0.02)


def ou_series(count=120, dt=1 / 12, seed=0, kappa=1.0, mu=0.05, sigma=0.02):
    """Values of an Ornstein–Uhlenbeck process, by its exact transitions."""
    rng, x, decay = np.random.default_rng(seed), [mu], np.exp(-kappa * dt)
    for noise in sigma * np.sqrt((1 - decay**2) / (2 * kappa)) * rng.normal(size=count - 1):
        x.append(mu + (x[-1] - mu) * decay + noise)
    return np.array(x)


@pytest.fixture(scope="module")
def dated():
    """A fit to monthly values."""
    months = pd.date_range("2000-01-01", periods=120, freq="MS")
    return rf.fit_sde(OU, months, ou_series(), key=KEY, num_starts=1)


TIMES = {
    "dates": DATES,
    "datetimes": [dt.datetime(d.year, d.month, d.day) for d in DATES],
    "dates and datetimes": [DATES[0], dt.datetime(2020, 1, 2), *DATES[2:]],
    "datetime64": np.array(DATES, "datetime64[D]"),
    "a list of datetime64": list(np.array(DATES, "datetime64[ns]")),
    "an index": INDEX,
    "a Series": pd.Series(INDEX),
    "periods": pd.PeriodIndex(DATES, freq="D"),
    "an index with a time zone": INDEX.tz_localize("America/New_York"),
    "a Series with a time zone": pd.Series(INDEX.tz_localize("Asia/Tokyo")),
    "several time zones": [
        dt.datetime(2020, 1, 1, tzinfo=UTC),
        dt.datetime(2020, 1, 1, 19, tzinfo=NEW_YORK),
        dt.datetime(2020, 1, 3, tzinfo=UTC),
        dt.datetime(2020, 1, 5, tzinfo=UTC),
    ],
    "timedelta64": DAYS.astype("timedelta64[D]"),
    "timedeltas": [dt.timedelta(days=int(day)) for day in DAYS],
    "a timedelta index": pd.to_timedelta(DAYS, unit="D"),
}


@pytest.mark.parametrize("kind", TIMES)
def test_dates_and_timedeltas_of_all_kinds_count_in_years(kind):
    np.testing.assert_allclose(panel(TIMES[kind], X)[0].times, DAYS / 365.25, rtol=1e-12)


def test_a_change_of_clocks_is_an_hour():
    """In New York 2020-03-08 had 23 hours; without a time zone it would have 24."""
    days = pd.DatetimeIndex(["2020-03-08", "2020-03-09", "2020-03-10"])
    local = panel(days.tz_localize("America/New_York"), X[:3])[0].times
    np.testing.assert_allclose(local, np.array([0, 23, 47]) / 24 / 365.25)
    np.testing.assert_allclose(panel(days, X[:3])[0].times, np.array([0, 1, 2]) / 365.25)


def test_nanoseconds_are_kept():
    times = np.datetime64("2020-01-01", "ns") + np.array([0, 100, 250]).astype("timedelta64[ns]")
    np.testing.assert_allclose(panel(times, X[:3])[0].times * 365.25 * 86400, [0, 1e-7, 2.5e-7])


HOLES = {
    "masked": np.ma.masked_equal([1, 0, 2, 3, 2], 0),
    "None": [1, None, 2, 3, 2],
    "pandas' NA": pd.array([1, None, 2, 3, 2], "Int64"),
    "a frame": pd.DataFrame({"a": [1, np.nan, 2, 3, 2]}),
}


@pytest.mark.parametrize("kind", HOLES)
def test_missing_values_of_all_kinds_are_longer_gaps(kind):
    one = panel(range(5), HOLES[kind])[0]
    np.testing.assert_array_equal(one.times, [0, 2, 3, 4])
    np.testing.assert_array_equal(one.values, [[1], [2], [3], [2]])


BAD = {
    "NaT": (pd.DatetimeIndex(["2020-01-01", None, "2020-01-03", "2020-01-04"]), X, r"times\[1\] is NaT"),
    "a masked time": (np.ma.masked_equal([1, 2, 3, 4], 3), X, "times must be finite"),
    "None as a time": ([DATES[0], None, *DATES[2:]], X, "got NoneType and date"),
    "dates and numbers": ([DATES[0], 1, *DATES[2:]], X, "got dates and numbers"),
    "some with a time zone": (
        [dt.datetime(2020, 1, 1), *(dt.datetime(2020, 1, d, tzinfo=UTC) for d in (2, 3, 4))],
        X,
        "got dates and dates with a time zone",
    ),
    "text": ([str(d) for d in DATES], X, "got <U10; use np.array.*datetime64"),
    "text of pandas": (pd.Series([str(d) for d in DATES]), X, "got str; use np.array.*datetime64"),
    "complex times": (DAYS * 1j, X, "times must be numbers, dates or timedeltas, got complex128"),
    "complex values": (DAYS, X * 1j, "values must be real numbers, got complex128"),
    "text as values": (DAYS, list("1234"), "values must be real numbers"),
    "booleans": (DAYS, X > 1, "values must be real numbers, got bool"),
    "times and values swapped": (X, INDEX, "values must be real numbers, got datetime64"),
    "newest first": (INDEX[::-1], X, "2020-01-03 follows 2020-01-05: sort"),
    "one date twice": ([DATES[0], *DATES[:3]], X, "2020-01-01 follows 2020-01-01: sort"),
    "no unit": (DAYS.astype("timedelta64"), X, "without a unit"),
    "rows of two lengths": (DAYS, [[1, 2], [1]], "times must be a list of arrays too"),
    "rows as lists": ([1, 2, 3, 4], [[1], [2], [3], [4]], r"for one series pass np.array\(values\)"),
    "a panel of two kinds": ([DAYS, INDEX], [X, X], "the same kind, got dates and numbers"),
    "a panel of two widths": ([DAYS, DAYS], [X, np.stack([X, X], 1)], "columns, got 1 and 2"),
    "a list too short": ([DAYS], [X, X], "values must be a list of the same length; got 1 and 2"),
    "nothing": ([], [], "values must have shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_refused_in_one_line(case):
    times, values, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        rf.fit_sde(OU, times, values, key=KEY)
    assert "\n" not in str(error.value)


def test_a_panel_with_dates_has_one_origin():
    """A seasonal drift: the log-likelihood is that of the same times as numbers."""
    sde = rf.ParametricSDE(
        lambda t, x, p: p["k"] * (jnp.sin(2 * jnp.pi * t) - x),
        lambda t, x, p: p["s"] * jnp.eye(1),
        {"k": 2.0, "s": 0.4},
    )
    times = [np.arange(6) / 16, 0.5 + np.arange(6) / 16]
    values = [np.sin(2 * np.pi * t) + 0.1 * np.cos(7 * t) for t in times]
    start = np.datetime64("2001-01-01", "s")
    dates = [start + np.round(t * 365.25 * 86400).astype("timedelta64[s]") for t in times]
    likelihoods = [
        rf.series_likelihood(sde, when, values, key=KEY, effort=rf.transition.Effort(1, 2, 2))(sde)
        for when in (times, dates, [t - t[0] for t in times])
    ]
    np.testing.assert_allclose(likelihoods[1], likelihoods[0], rtol=1e-6)
    assert abs(likelihoods[2] - likelihoods[0]) > 1  # what each series from its own date would give


TWO = np.stack([1 + 0.1 * np.sin(np.arange(20)), 2 + 0.2 * np.cos(np.arange(20))], axis=1)
NAMED = [
    (OU, 1),
    (rf.OrnsteinUhlenbeck(np.eye(3), np.zeros(3), np.eye(3)), 3),
    (rf.CoxIngersollRoss(1.0, 1.0, 0.3), 1),
    (rf.FractionalOrnsteinUhlenbeck(1.0, 0.0, 0.3, 0.3), 1),
    (rf.Heston(0.05, 3.0, 0.1, 0.25, -0.7), 2),
]


@pytest.mark.parametrize(("sde", "dimension"), NAMED, ids=lambda part: type(part).__name__)
def test_the_wrong_number_of_columns_is_refused_by_name(sde, dimension):
    count = 1 if dimension == 2 else 2
    told = f"but {type(sde).__name__} has dimension {dimension}"
    with pytest.raises(ValueError, match=f"values have {count} columns?, {told}"):
        rf.fit_sde(sde, np.arange(20), TWO[:, :count], key=KEY)
    if isinstance(sde, rf.FractionalOrnsteinUhlenbeck):
        return
    with pytest.raises(ValueError, match=f"x0 and x1 have dimension {count}, {told}"):
        rf.transition_log_prob(sde, TWO[0, :count], TWO[1, :count], 0.1, key=KEY)
    with pytest.raises(ValueError, match=f"z0 has dimension {count}, {told}"):
        rf.simulate(sde, TWO[0, :count], key=KEY)


def test_columns_that_do_not_fit_an_sde_of_ones_own():
    sde = rf.ParametricSDE(lambda t, x, p: -p["k"] * x, lambda t, x, p: jnp.eye(1), {"k": 1.0})
    with pytest.raises(ValueError, match="values have 2 columns, but drift and diffusion have 1: diffusion"):
        rf.fit_sde(sde, np.arange(20), TWO, key=KEY)


def test_likelihood_ratios_are_between_fits_of_the_same_data(dated):
    times, x = np.arange(120) / 12, ou_series()
    larger = rf.fit_sde(OU, times, x, key=KEY, num_starts=1)
    smaller = rf.BrownianMotion(0.0, 0.02)
    assert larger.likelihood_ratio(rf.fit_sde(smaller, times, x, key=KEY, num_starts=1))[0] > 0
    for other in ((times, 100 * x), (2 * times, x)):
        with pytest.raises(ValueError, match="two fits of the same data"):
            larger.likelihood_ratio(rf.fit_sde(smaller, *other, key=KEY, num_starts=1))
    with pytest.raises(ValueError, match="fewer than 3 parameters, got one with 3"):
        larger.likelihood_ratio(dated)


def test_forecasts_take_dates_and_timedeltas(dated):
    """The same paths as at the same times in years after the last value, 2009-12-01."""
    dates = pd.DatetimeIndex(["2010-01-01", "2010-12-01"])
    expected = dated.forecast(np.array([31, 365]) / 365.25, key=KEY, num_paths=50)
    ahead = np.array([31, 365]).astype("timedelta64[D]")
    for times in (dates, list(dates.date), dates.to_numpy(), ahead, pd.to_timedelta(ahead)):
        np.testing.assert_allclose(dated.forecast(times, key=KEY, num_paths=50), expected, rtol=1e-9)
    one = dated.forecast(dt.date(2010, 1, 1), key=KEY, num_paths=50)
    assert one.shape == (50, 1, 1)


def test_bad_times_of_forecasts_are_refused_in_one_line(dated):
    for times, message in {
        "2009-12-01": "must be after the last value, 2009-12-01, and increase; got 2009-12-01",
        ("2010-02-01", "2010-01-01"): "must be after the last value, 2009-12-01, and increase",
        -1.0: "must be positive and increase; got -1.0",
        (0.2, 0.2): "increase",
        (0.2, np.inf): "times must be finite",
    }.items():
        given = np.array(times, "datetime64[D]") if np.array(times).dtype.kind == "U" else times
        with pytest.raises(ValueError, match=message) as error:
            dated.forecast(given, key=KEY)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="are dates with a time zone, but those of the series are dates"):
        dated.forecast(pd.DatetimeIndex(["2010-01-01"], tz="UTC"), key=KEY)
    with pytest.raises(ValueError, match="num_paths"):
        dated.forecast([0.1], key=KEY, num_paths=10**12)
    plain = rf.fit_sde(OU, np.arange(120) / 12, ou_series(), key=KEY, num_starts=1)
    for times in (np.array(["2030-01-01"], "datetime64"), np.array([3], "timedelta64[D]")):
        with pytest.raises(ValueError, match="those of the series are numbers"):
            plain.forecast(times, key=KEY)


def test_a_forecast_says_which_series_of_a_panel_it_continues():
    """From the last value of each; at a short horizon paths have not moved."""
    values = [ou_series(seed=seed) + shift for seed, shift in ((1, 0.0), (2, 0.03), (3, -0.02))]
    result = rf.fit_sde(OU, [np.arange(120) / 12] * 3, values, key=KEY, num_starts=1)
    for i, x in enumerate(values):
        paths = result.forecast([1e-9], key=KEY, num_paths=10, series=i)
        np.testing.assert_allclose(paths[..., 0], x[-1], atol=1e-5)
    for series in (None, 3, -1, 1.0):
        with pytest.raises(ValueError, match="series must be an index from 0 to 2; got"):
            result.forecast([0.1], key=KEY, series=series)


def test_forecasts_with_the_uncertainty_of_the_parameters():
    """Brownian motion over a span h: a variance of σ²h, and of h² times that of the drift beside it."""
    x = np.cumsum(np.random.default_rng(0).normal(size=101))
    result = rf.fit_sde(rf.BrownianMotion(0.0, 1.0), np.arange(101), x, key=KEY, num_starts=1)
    drift, sigma = result.params.values()
    for uncertain in (False, True):
        paths = result.forecast([100.0], key=KEY, num_paths=4000, parameter_uncertainty=uncertain)
        spread = np.sqrt(100 * sigma**2 + uncertain * (100 * result.standard_errors["mu"]) ** 2)
        assert abs(paths.mean() - x[-1] - 100 * drift) < 4 * spread / 4000**0.5
        np.testing.assert_allclose(paths.std(), spread, rtol=0.05)


def test_a_page_on_a_fit_has_the_years_of_its_dates(dated):
    """And the bars of the residuals over the band of their expected range, not below."""
    figure = rf.plots.fitted_sde(dated, key=KEY)
    series, histogram = figure.axes[:2]
    assert series.get_xlabel() == "year"
    np.testing.assert_allclose(series.lines[0].get_xdata()[[0, -1]], [2000, 2009 + 334 / 365.25], atol=0.003)
    band, bars = histogram.patches
    assert isinstance(bars, StepPatch)
    assert band.get_zorder() <= bars.get_zorder()
