"""Anomalies: how unlikely a row is compared with samples, and scikit-learn's outlier interface."""

import jax
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks

import roughflow as rf
from roughflow.interop.sklearn import StochasticFlowOutlier

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(size=(600, 3)) @ np.diag([1.0, 10.0, 0.1])


@parametrize_with_checks([StochasticFlowOutlier()])
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


def test_the_anomaly_of_a_gaussian_is_a_chi_squared_probability(rows):
    """Samples are less likely than x with probability P(χ² > |x|²); beyond all samples rows stay ordered."""
    fitted = rf.fit_density(rows, key=KEY, family="gaussian", progress=False)
    radii = np.array([0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 50.0])
    values = fitted.anomaly(fitted.model.loc + radii[:, None] * fitted.model.matrix[:, 0])
    np.testing.assert_allclose(values[:4], stats.chi2.sf(radii[:4] ** 2, 3), atol=0.05)
    assert np.all(np.diff(values) < 0)
    assert 0 < values[-1] < values[4] < 1 / 2000


def test_a_row_with_missing_cells_is_compared_with_samples_without_these_cells():
    """The density of one cell is larger than that of three, so that other rows would all seem typical."""
    rng = np.random.default_rng(0)
    train, new = rng.normal(size=(300, 3)), rng.normal(size=(4000, 3))
    train[:30, 0] = np.nan
    new[:, :2] = np.nan
    values = rf.fit_density(train, key=KEY).anomaly(new)
    assert stats.kstest(values, "uniform").statistic < 0.06


def test_rows_that_violate_a_relation_are_anomalies(rows):
    table = np.column_stack([rows, rows[:, 0] + rows[:, 1]])
    broken = table[:50] + np.array([0, 0, 0, 5.0])
    for model in (rf.fit_density(table, key=KEY, family="gaussian"), rf.tables.KernelDensity.of(table)):
        assert np.all(model.anomaly(broken) < np.quantile(model.anomaly(table[50:]), 0.2))
        assert np.isneginf(model.log_prob(broken)).all()


def test_a_kernel_is_a_density_that_leaves_training_rows_out():
    table = np.random.default_rng(1).standard_normal((400, 1))
    kernel = rf.tables.KernelDensity.of(table)
    grid = np.linspace(-9, 9, 5001)[:, None]
    assert np.exp(kernel.log_prob(grid)).sum() * 18 / 5000 == pytest.approx(1, abs=1e-3)
    others = rf.tables.KernelDensity(
        np.delete(kernel.rows, 7, axis=0), kernel.loc, kernel.scale, kernel.bandwidth
    )
    row = kernel.loc + kernel.scale * kernel.rows[7:8]
    assert kernel.log_prob(row) == pytest.approx(others.log_prob(row) + np.log(399 / 400), abs=1e-9)
    new = np.random.default_rng(2).standard_normal((400, 1))
    assert stats.kstest(kernel.anomaly(new), "uniform").pvalue > 1e-3
    assert stats.ks_2samp(kernel.sample(500, key=KEY)[:, 0], table[:, 0]).pvalue > 1e-3


def test_outliers_are_found_among_contaminated_rows(rows):
    far = np.random.default_rng(3).normal(size=(30, 3)) * [4.0, 40.0, 0.4] + [5.0, 0, 0]
    mixed = np.concatenate([rows, far])
    outliers = StochasticFlowOutlier(contamination=0.05).fit(mixed)
    assert np.mean(outliers.predict(mixed) == -1) == pytest.approx(0.05, abs=0.01)
    new = np.random.default_rng(4).normal(size=(300, 3)) @ np.diag([1.0, 10.0, 0.1])
    labels = np.repeat([0, 1], [300, 30])
    scores = -outliers.decision_function(np.concatenate([new, far]))
    clean = -StochasticFlowOutlier().fit(rows).decision_function(np.concatenate([new, far]))
    assert roc_auc_score(labels, scores) > roc_auc_score(labels, clean) - 0.02 > 0.9


def test_a_cluster_of_outliers_among_the_training_rows_is_unlikely_in_subsamples():
    rng = np.random.default_rng(5)
    rows, cluster, ordinary, new = (rng.normal(size=(n, 10)) for n in (600, 30, 600, 30))
    cluster[:, 0] += 5
    new[:, 0] += 5
    mixed, scored = np.concatenate([rows, cluster]), np.concatenate([ordinary, new])
    area = lambda model: roc_auc_score(np.repeat([0, 1], [600, 30]), -model.log_prob(scored))
    robust = area(StochasticFlowOutlier(contamination=0.05).fit(mixed).model_)
    assert robust > area(rf.tables.KernelDensity.of(mixed)) + 0.05
    assert robust > 0.85


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"contamination": 0.7}, "contamination must be 'auto' or in"),
        ({"method": "x"}, "method must be 'kernel'"),
    ],
)
def test_bad_settings_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        StochasticFlowOutlier(**settings).fit(np.eye(9))


def test_conditional_densities_have_no_anomaly(rows):
    fitted = rf.fit_density(rows[:, :2], given=rows[:, 2:], key=KEY, family="gaussian")
    with pytest.raises(ValueError, match="anomaly does not support conditional densities"):
        fitted.anomaly(rows)
