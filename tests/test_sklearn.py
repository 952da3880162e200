"""The scikit-learn estimators keep scikit-learn's contract; regression."""

import dataclasses
import pickle
import warnings

import equinox as eqx
import jax
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import roughflow as rf
from roughflow.interop.sklearn import StochasticFlowDensity, StochasticFlowRegressor
from roughflow.tables import _regression


def tiny(**settings):
    """Compiles in seconds: without noise, and with as small a network as can be."""
    cheap = dict(width=4, depth=1, steps=2, likelihood_steps=2, score_paths=2, random_state=0)
    return StochasticFlowDensity(**cheap | settings)


@pytest.fixture(scope="module")
def table():
    pd = pytest.importorskip("pandas")
    rows = np.random.default_rng(0).normal([100, -5], [10, 0.1], (60, 2))
    return pd.DataFrame(rows, columns=["height", "depth"])


@pytest.fixture(scope="module")
def fitted(table):
    return tiny(learning_rate=1e-6).fit(table)


def test_log_densities_are_in_the_units_of_the_data(fitted, table):
    """After two small steps the model is the Gaussian it started from."""
    values = fitted.score_samples(table)
    assert values.shape == (60,)
    assert values.dtype == np.float64
    gaussian = GaussianMixture().fit(table)
    np.testing.assert_allclose(values, gaussian.score_samples(table), atol=1e-3)
    assert fitted.score(table) == pytest.approx(gaussian.score(table), abs=1e-3)
    np.testing.assert_array_equal(fitted.score_samples(table), values)


def test_what_a_fit_leaves(fitted, table, tmp_path):
    assert fitted.n_features_in_ == 2
    assert list(fitted.feature_names_in_) == ["height", "depth"]
    assert fitted.history_.loss.shape == (2,)
    assert fitted.history_.validation_loss.size == 3
    assert isinstance(fitted.model_, rf.tables.Standardised)
    rf.save(tmp_path / "model.rf", fitted.model_)
    assert rf.load(tmp_path / "model.rf").columns == ("height", "depth")
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.score_samples(table[["depth", "height"]])


def test_samples_follow_the_random_state(fitted, table):
    draws = fitted.sample(500)
    assert draws.shape == (500, 2)
    np.testing.assert_array_equal(fitted.sample(500), draws)
    np.testing.assert_array_equal(fitted.sample(500, random_state=np.random.RandomState(0)), draws)
    assert not np.array_equal(fitted.sample(500, random_state=1), draws)
    np.testing.assert_allclose(draws.mean(axis=0), table.mean(), rtol=0.05)
    with pytest.raises(ValueError, match="n_samples"):
        fitted.sample(0)


def test_a_clone_fits_to_the_same_numbers(fitted, table):
    copy = clone(fitted)
    with pytest.raises(NotFittedError):
        copy.score_samples(table)
    np.testing.assert_array_equal(copy.fit(table).score_samples(table), fitted.score_samples(table))


def test_a_fit_can_be_pickled(fitted, table):
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.score_samples(table), fitted.score_samples(table))


def test_options_mean_what_they_mean_to_fit_density(table):
    """Bounds by the names of the columns, and rows that were rounded."""
    options = {"bounds": {"height": (0, None)}, "rounding": {1: 0.01}, "smoothing": 0.1, "outliers": 0.05}
    density = tiny(**options, marginals=False, likelihood_steps=0).fit(table)
    np.testing.assert_array_equal(density.model_.marginals.lower, [0, -np.inf])
    assert np.isfinite(density.score(table))
    assert clone(density).get_params()["rounding"] == {1: 0.01}


@pytest.mark.parametrize(
    ("rows", "settings", "reason"),
    [
        ([[1.0, 2.0]], {}, "1 sample"),
        ([[3.0, 7.0] for i in range(9)], {}, "column 0 is constant, and so are all others"),
        ([[i, np.nan] for i in range(9)], {}, "NaN"),
        ([[i, i**2] for i in range(9)], {"noise": -1.0}, "noise must be positive"),
        ([[i, i**2] for i in range(9)], {"steps": 0}, "steps must be a positive"),
        (
            [[i, i**2] for i in range(9)],
            {"noise": "best", "validation_fraction": 0},
            "needs validation rows",
        ),
    ],
)
def test_what_is_refused(rows, settings, reason):
    with pytest.raises(ValueError, match=reason):
        tiny(**settings).fit(rows)


@pytest.mark.parametrize(
    "name",
    [
        "check_no_attributes_set_in_init",
        "check_do_not_raise_errors_in_init_or_set_params",
        "check_valid_tag_types",
        "check_parameters_default_constructible",
        "check_estimators_unfitted",
        "check_fit2d_1sample",
        "check_complex_data",
        "check_estimators_empty_data_messages",
    ],
)
def test_some_of_the_checks_of_scikit_learn(name):
    """Those that compile nothing."""
    check = getattr(estimator_checks, name)
    check("StochasticFlowDensity", tiny())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_all_checks_of_scikit_learn():
    """None is expected to fail. That of other array libraries is skipped unless SCIPY_ARRAY_API is set."""
    estimator_checks.check_estimator(tiny())


@pytest.mark.slow
def test_few_rows_are_no_reason_to_refuse(table):
    """Too few to set any aside to validate on."""
    few = tiny().fit(table[:4])
    assert few.history_.validation_loss.size == 0
    assert np.isfinite(few.score(table))


@pytest.mark.slow
def test_noise_is_drawn_from_the_random_state(table):
    noisy = tiny(noise=0.3, score_paths=8)
    values = noisy.fit(table).score_samples(table)
    np.testing.assert_array_equal(clone(noisy).fit(table).score_samples(table), values)
    np.testing.assert_allclose(noisy.set_params(score_paths=None).score_samples(table), values, atol=0.3)


@pytest.mark.slow
def test_a_search_over_the_noise_in_a_pipeline(table):
    pipeline = make_pipeline(StandardScaler(), tiny())
    search = GridSearchCV(pipeline, {"stochasticflowdensity__noise": [0.0, 0.3]}, cv=2, error_score="raise")
    search.fit(table)
    assert np.all(np.isfinite(search.cv_results_["mean_test_score"]))
    assert search.best_estimator_.score_samples(table).shape == (60,)


def test_a_search_warns_once_and_names_the_line_that_started_it():
    """The tails of the first column are warned of in each of four fits, with other numbers."""
    rows = np.random.default_rng(1).normal(size=(60, 2))
    rows[:6, 0] *= 1e4
    density, rates = tiny(marginals=False, likelihood_steps=0), {"learning_rate": [1e-3, 2e-3]}
    search = GridSearchCV(density, rates, cv=2, refit=False, scoring=lambda *_: 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search.fit(rows)
    told = [warning for warning in caught if "interquartile ranges from its median" in str(warning.message)]
    assert [warning.filename for warning in told] == [__file__]


# ---------------------------------------------------------------------------------------------- regression

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def line():
    """y is linear in x with normal noise of standard deviation 0.5."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2000, 2))
    return x, 3 + x @ np.array([1.0, -2.0]) + 0.5 * rng.normal(size=2000)


@pytest.fixture(scope="module")
def linear(line):
    x, y = line
    return rf.tables.fit_regression(y, x, key=KEY, family="gaussian")


def test_regression_finds_columns_by_name():
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"a": rng.normal(size=60), "y": 100 * rng.normal(size=60)})
    regression = rf.tables.fit_regression(x.a + 0.1 * rng.normal(size=60), x, key=KEY, family="gaussian")
    there, back = (regression.conditional(x[names]).mean for names in (["a", "y"], ["y", "a"]))
    np.testing.assert_array_equal(there, back)
    with pytest.raises(ValueError, match="given has no column 'a'"):
        regression.conditional(x.rename(columns={"a": "b"}))


def test_predictions_of_a_linear_regression(linear, line):
    x, y = line
    prediction = linear.conditional(x[:50])
    design = np.column_stack([np.ones(2000), x])
    coefficients = np.linalg.lstsq(design, y)[0]
    mean, std = design[:50] @ coefficients, np.std(y - design @ coefficients)
    np.testing.assert_allclose(prediction.mean, mean, atol=0.02)
    np.testing.assert_allclose(prediction.std, std, rtol=0.01)
    low, high = prediction.interval(0.9)
    np.testing.assert_allclose([low, high], stats.norm(mean, std).interval(0.9), atol=0.02)
    np.testing.assert_allclose(prediction.log_prob(y[:50]), stats.norm(mean, std).logpdf(y[:50]), atol=0.06)
    np.testing.assert_allclose(prediction.cdf(y[:50]), stats.norm(mean, std).cdf(y[:50]), atol=0.01)
    assert stats.kstest(prediction.sample(400, key=KEY)[:, 0], stats.norm(mean[0], std).cdf).pvalue > 1e-3


def test_an_ensemble_is_the_average_of_its_members(linear, line):
    """Two normal distributions 4 apart, with a base that is twice as wide."""
    (member,) = linear.members
    shift = np.zeros(3)
    shift[0] = 4.0
    other = eqx.tree_at(lambda m: m.loc, member, member.loc + shift)
    ensemble = rf.tables.Regression((member, other), np.array(2.0)).conditional(line[0][:5])
    one = linear.conditional(line[0][:5])
    parts = stats.norm(one.mean, 2 * one.std), stats.norm(one.mean + 4, 2 * one.std)
    at = one.mean + 3.0
    np.testing.assert_allclose(ensemble.mean, one.mean + 2, atol=1e-3)
    np.testing.assert_allclose(ensemble.std, np.sqrt((2 * one.std) ** 2 + 4), rtol=1e-3)
    np.testing.assert_allclose(ensemble.cdf(at), np.mean([part.cdf(at) for part in parts], axis=0), atol=1e-3)
    density = np.mean([part.pdf(at) for part in parts], axis=0)
    np.testing.assert_allclose(ensemble.log_prob(at), np.log(density), atol=1e-3)
    levels = [0.01, 0.3, 0.5, 0.95]
    found = ensemble.quantile(levels)
    np.testing.assert_allclose(
        np.mean([part.cdf(found) for part in parts], axis=0), np.tile(levels, (5, 1)).T, atol=2e-3
    )
    draws = ensemble.sample(2000, key=KEY)[:, 0]
    assert (np.mean(draws < at[0]) - ensemble.cdf(at)[0]) == pytest.approx(0, abs=0.04)


@pytest.fixture(scope="module")
def member(line):
    x, y = line
    return rf.fit_density(y[:, None], given=x, key=KEY, family="gaussian")


def test_the_base_is_as_wide_as_unseen_rows_need(linear, member):
    """Validation rows whose residuals are three times as large as those of the training rows."""
    fitted = member
    rows = fitted.held_out.rows.copy()
    mean = linear.conditional(rows[:, 1:]).mean
    rows[:, 0] = mean + 3 * (rows[:, 0] - mean)
    unlike = dataclasses.replace(fitted, held_out=dataclasses.replace(fitted.held_out, rows=rows))
    assert _regression._ensemble([fitted]).scale == pytest.approx(1, abs=0.1)
    assert _regression._ensemble([unlike]).scale == pytest.approx(3, abs=0.3)


def test_the_spread_of_the_members_is_not_counted_twice(line, member):
    """Two members that are half a standard deviation off, each in its direction: y is as wide as it is."""
    x, fitted = line[0], member
    shift = np.array([0.25, 0.0, 0.0])
    moved = lambda by: eqx.tree_at(lambda m: m.loc, fitted.model, fitted.model.loc + by)
    both = [dataclasses.replace(fitted, model=moved(by)) for by in (shift, -shift)]
    prediction = _regression._ensemble(both).conditional(x[:5])
    np.testing.assert_allclose(prediction.std, 0.5, rtol=0.08)


def test_quantiles_of_a_flow_invert_its_distribution_function():
    """The slope of the distribution function is the density."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(120, 2)), rng.normal(size=120)
    settings = {"width": 8, "depth": 1, "steps": 20, "likelihood_steps": 0, "random_state": 0}
    regressor = StochasticFlowRegressor(members=2, family="flow", **settings).fit(x, y)
    quantiles = regressor.predict(x[:4], quantiles=[0.2, 0.8])
    prediction = regressor.model_.conditional(x[:4])
    np.testing.assert_allclose(prediction.cdf(quantiles[:, 0]), 0.2, atol=5e-3)
    step = 1e-3
    slope = (prediction.cdf(quantiles[:, 1] + step) - prediction.cdf(quantiles[:, 1] - step)) / (2 * step)
    np.testing.assert_allclose(regressor.log_prob(x[:4], quantiles[:, 1]), np.log(slope), atol=0.02)
    mean, std = regressor.predict(x[:4], return_std=True)
    assert np.all((quantiles[:, 0] < mean) & (mean < quantiles[:, 1]) & (std > 0))
    with pytest.raises(ValueError, match="return_std and quantiles are alternatives"):
        regressor.predict(x[:4], return_std=True, quantiles=[0.5])


@pytest.mark.parametrize(
    ("y", "settings", "reason"),
    [
        (np.ones(30), {}, "y is 1 in all rows"),
        (np.ones((30, 1)), {}, "y must have one value for each row"),
        (np.full(30, np.nan), {}, "not finite"),
        (np.arange(29.0), {}, "y has 29 rows, but given has 30"),
        (np.arange(30.0), {"members": 0}, "members must be a positive"),
    ],
)
def test_what_a_regression_refuses(y, settings, reason):
    x = np.random.default_rng(0).normal(size=(30, 2))
    with pytest.raises(ValueError, match=reason):
        rf.tables.fit_regression(y, x, key=KEY, progress=False, **settings)


def test_predictions_check_their_rows(linear, line):
    with pytest.raises(ValueError, match=r"given must have shape \(..., 2\)"):
        linear.conditional(np.zeros((3, 5)))
    prediction = linear.conditional(line[0][:3])
    with pytest.raises(ValueError, match="levels must lie between"):
        prediction.quantile([0.0, 0.5])
    with pytest.raises(ValueError, match="one value for each of 3 rows"):
        prediction.log_prob(np.zeros(2))


def test_a_linear_function_of_the_given_columns_gets_noise():
    x = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.warns(UserWarning, match="y is a linear function"):
        regressor = StochasticFlowRegressor(family="gaussian", random_state=0).fit(x, x[:, 0])
    np.testing.assert_allclose(regressor.predict(x), x[:, 0], atol=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gaussian", "flow"])
def test_all_checks_of_scikit_learn_for_regression(family):
    settings = {"width": 4, "depth": 1, "steps": 2, "likelihood_steps": 0} if family == "flow" else {}
    estimator_checks.check_estimator(
        StochasticFlowRegressor(members=1, family=family, random_state=0, **settings)
    )
