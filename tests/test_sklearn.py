"""The scikit-learn estimator keeps scikit-learn's contract."""

import pickle
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import roughflow as rf
from roughflow.interop.sklearn import StochasticFlowDensity


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
        ([[i, i**2] for i in range(9)], {"bounds": {0: (1, 9)}}, "not strictly between its bounds 1 and 9"),
        ([[i, i**2] for i in range(9)], {"rounding": {5: 1.0}}, "there is no column 5"),
        ([[i, i**2] for i in range(9)], {"outliers": 1.0}, "outliers must lie between 0 and 1"),
        (
            [[i, i**2] for i in range(9)],
            {"smoothing": -1.0},
            "smoothing must be a finite number of at least 0",
        ),
        ([[i, i**2] for i in range(9)], {"validation_fraction": 1.0}, "validation must be a fraction"),
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
