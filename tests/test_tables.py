"""Tables as they come: copies of rows, few rows, rounded values, columns by name."""

import jax
import numpy as np
import pytest
from fits import fit_density
from scipy import stats

import roughflow as rf
from roughflow.tables._families import ClosedForm
from roughflow.tables._marginals import Gaussian
from roughflow.tables._table import Table
from roughflow.train._data import Links, copies_of, grid_step, hold_out, mean_and_error

KEY = jax.random.key(0)
TINY = {"width": 8, "depth": 1, "steps": 2, "likelihood_steps": 0, "progress": False}
CORRELATED = np.array([[1.0, 0.5], [0.5, 1.0]])


def rows_of(seed, count, covariance=CORRELATED):
    return np.random.default_rng(seed).multivariate_normal(np.zeros(len(covariance)), covariance, count)


# -------------------------------------------------------------------------------------------------- splits


def shared(rows, train, aside):
    """Rows that are on both sides."""
    return {tuple(row) for row in rows[train]} & {tuple(row) for row in rows[aside]}


@pytest.mark.parametrize("kind", ["upsampled", "bootstrapped", "rounded", "plain"])
def test_no_row_is_on_both_sides_of_a_split(kind):
    rows = rows_of(0, 100)
    rows = {
        "upsampled": np.repeat(rows, 20, axis=0),
        "bootstrapped": rows[np.random.default_rng(1).integers(0, 100, 300)],
        "rounded": np.repeat(rows.round(3), 5, axis=0),
        "plain": rows,
    }[kind]
    train, aside = hold_out(Links.of(rows).labels, 0.2, KEY)
    assert sorted([*train, *aside]) == list(range(len(rows)))
    assert 0.1 < len(aside) / len(rows) < 0.3
    assert not shared(rows, train, aside)


def test_any_fit_keeps_copies_together():
    rows = np.repeat(rows_of(0, 40), 5, axis=0)
    train, aside = rf.train._data.split(rows, 0.2, rf.MaximumLikelihood(1), KEY)
    assert aside is not None
    assert not {tuple(row) for row in np.asarray(train)} & {tuple(row) for row in np.asarray(aside)}


def test_a_table_on_disk_keeps_copies_together(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = np.repeat(rows_of(0, 300), 4, axis=0)
    pq.write_table(pa.table({"a": rows[:, 0], "b": rows[:, 1]}), tmp_path / "rows.parquet")
    rest, aside = rf.tables.ParquetTable(tmp_path / "rows.parquet").split(0.1, key=KEY)
    left = rest.subsample(len(rest), np.random.default_rng(0))
    assert len(aside) == 120
    assert not {tuple(row) for row in left} & {tuple(row) for row in aside}


def test_rows_of_a_join_stay_together():
    """Two columns of each record are repeated; so are others, by chance."""
    rng = np.random.default_rng(2)
    record = np.repeat(np.arange(60), 5)
    rows = np.column_stack([rng.normal(size=(60, 2))[record], rng.normal(size=300), rng.integers(0, 3, 300)])
    links = Links.of(rows)
    np.testing.assert_array_equal(links.labels, record)
    assert links.distinct == 300
    assert links.joined == (0, 1)
    with pytest.warns(UserWarning, match="columns 0, 1 repeat together, as after a join") as caught:
        fit_density(rows[:, :3], key=KEY, family="gaussian")
    assert len(caught) == 1


def test_equal_integers_are_no_copies():
    """Thirty-one values make 2,500 rows; with a continuous column beside them, equal rows are copies."""
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 31, (2500, 1)).astype(float)
    assert copies_of(rows).max() == 2499
    zeros = np.where(rng.uniform(size=(500, 1)) < 0.3, 0, rng.normal(size=(500, 1)))
    assert copies_of(zeros).max() == 499
    both = np.repeat(np.column_stack([rows[:50], rng.normal(size=50)]), 2, axis=0)
    assert copies_of(both).max() == 49


def test_groups_are_validated_together():
    rows = rows_of(3, 60)
    groups = np.array([f"patient {i // 6}" for i in range(60)])
    train, aside = hold_out(Links.of(rows, groups).labels, 0.3, KEY)
    assert len(aside) == 18
    assert not set(groups[train]) & set(groups[aside])
    for wrong, reason in (
        (groups[:3], "one label for each of the 60 rows"),
        ([None] * 60, "no label in row 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            Links.of(rows, wrong)


def test_standard_errors_count_groups_once():
    values, labels = np.random.default_rng(0).normal(size=50), np.arange(50)
    mean, error = mean_and_error(values, labels)
    assert error == pytest.approx(values.std(ddof=1) / 50**0.5)
    again = mean_and_error(np.repeat(values, 20), np.repeat(labels, 20))
    np.testing.assert_allclose(again, (mean, error))


@pytest.mark.parametrize(
    ("values", "step"),
    [
        (np.array([3.0, 9.0, 5.0]), 2.0),
        (np.array([0.1, 0.7, 0.4, 1.2]), 0.1),
        (np.array([0.1, 0.7, 0.4, 1.2], np.float32), 0.1),
        (2.54 * np.arange(40.0), 2.54),
        (1e6 + np.arange(9.0), 1.0),
        (np.full(4, 7.0), 0.0),
        (np.sqrt(np.arange(50.0)), 0.0),
    ],
)
def test_the_grid_of_rounded_values_is_found(values, step):
    assert grid_step(np.asarray(values, float)) == pytest.approx(step, rel=1e-5)


# ------------------------------------------------------------------------------------------- small tables


def test_the_gaussian_of_few_rows_predicts_better_than_that_of_their_moments():
    """On average over tables; with more columns than rows the latter has no density."""
    gains = []
    for seed, (count, size) in enumerate([(4, 1), (6, 3), (10, 2), (12, 7), (30, 8), (60, 2)] * 3):
        mix = np.random.default_rng(seed).normal(size=(size, size))
        rows, others = rows_of(seed, count, mix @ mix.T), rows_of(seed + 100, 1000, mix @ mix.T)
        plain = stats.multivariate_normal(rows.mean(axis=0), np.cov(rows.T)).logpdf(others).mean()
        gains.append(Gaussian.shrunk(rows, Links.of(rows)).log_prob(others).mean() - plain)
    assert np.mean(gains) > 0.3
    assert np.median(gains) > 0
    few = rows_of(0, 4, np.eye(8))
    assert np.isfinite(Gaussian.shrunk(few, Links.of(few)).log_prob(rows_of(1, 50, np.eye(8)))).all()


def test_many_rows_have_the_gaussian_of_their_moments():
    rows, given = rows_of(0, 5000), 1
    truth = stats.multivariate_normal(rows.mean(axis=0), np.cov(rows.T, bias=True))
    np.testing.assert_allclose(
        Gaussian.shrunk(rows, Links.of(rows)).log_prob(rows[:9]), truth.logpdf(rows[:9]), atol=0.01
    )
    # The regression of the first column on the second.
    first = stats.norm(rows[:, 1].mean(), rows[:, 1].std()).logpdf(rows[:9, 1])
    conditional = Gaussian.of(rows, given).log_prob(rows[:9])
    np.testing.assert_allclose(conditional, truth.logpdf(rows[:9]) - first, atol=1e-4)


def test_a_tiny_table_gets_a_gaussian_with_its_score():
    rows = rows_of(4, 10)
    fitted = fit_density(rows, key=KEY)
    assert fitted.family == "gaussian"
    others = rows_of(5, 2000)
    reached = np.asarray(fitted.log_prob(others))
    plain = stats.multivariate_normal(rows.mean(axis=0), np.cov(rows.T, bias=True)).logpdf(others)
    assert reached.mean() > plain.mean()
    assert fitted.score.method == "cross-validation"
    assert abs(fitted.score.mean - reached.mean()) < 2 * fitted.score.standard_error + 0.1
    assert "score" in repr(fitted)
    # The flow leaves the closed form as it is, and so does the choice of numbers.
    closed = ClosedForm.of("gaussian", Table.of(rows, None, None, (), {}, {}))
    np.testing.assert_allclose(reached[:50], closed.log_prob(others[:50]), atol=1e-3)
    assert fitted.sample(3, key=KEY).shape == (3, 2)


def test_a_score_is_that_of_new_rows_on_average():
    """Over 12 tables of 8 rows and 3 columns; rows that were fitted to have 0.8 nats more."""
    gaps = []
    for seed in range(12):
        rows, others = rows_of(seed, 8, np.eye(3)), rows_of(seed + 100, 500, np.eye(3))
        score = fit_density(rows, key=KEY, family="gaussian").score
        gaps.append(score.mean - Gaussian.shrunk(rows, Links.of(rows)).log_prob(others).mean())
    assert abs(np.mean(gaps)) < 3 * np.std(gaps) / 12**0.5
    assert np.std(gaps) / 12**0.5 < 0.3


def test_skewed_columns_get_marginals():
    rng = np.random.default_rng(0)
    fitted = fit_density(rng.lognormal(size=(60, 2)), key=KEY)
    assert fitted.family == "marginals"
    assert fitted.score.gain > fitted.score.gain_error > 0


def test_a_conditional_gaussian_is_a_regression():
    rng = np.random.default_rng(1)
    x = rng.normal(10, 2, (50, 1))
    rows = np.column_stack([2 + 3 * x[:, 0] + 0.5 * rng.normal(size=50), x])
    fitted = fit_density(rows[:, :1], given=rows[:, 1:], key=KEY)
    at = np.array([[9.0], [13.0]])
    draws = np.asarray(fitted.sample(4000, given=at, key=KEY))[..., 0]
    np.testing.assert_allclose(draws.mean(axis=0), [29, 41], atol=0.4)
    np.testing.assert_allclose(draws.std(axis=0), 0.5, rtol=0.3)
    assert fitted.score.mean == pytest.approx(-0.5 * np.log(2 * np.pi * np.e * 0.25), abs=0.4)


@pytest.mark.slow
def test_a_small_table_gets_a_flow_or_a_mixture_where_it_is_better():
    """A ring, which neither a Gaussian nor maps of its columns know: the score is that of new rows."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, 3150)
    ring = np.column_stack([np.cos(angle), np.sin(angle)]) + 0.1 * rng.normal(size=(3150, 2))
    fitted = fit_density(ring[:150], width=32, depth=2, key=KEY, progress=False)
    assert fitted.family in ("flow", "mixture")
    assert "likelihood" not in fitted.stages
    assert fitted.score.method == "cross-validation"
    assert fitted.score.gain > 0.5
    values = np.asarray(fitted.log_prob(ring[150:]))
    assert abs(values.mean() - fitted.score.mean) < 3 * fitted.score.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["upsampled", "bootstrapped", "joined"])
def test_the_score_of_a_table_with_copies_is_that_of_new_rows(kind):
    rng = np.random.default_rng(1)
    rows, others = rows_of(1, 100), rows_of(2, 4000)
    if kind == "joined":
        record = np.repeat(np.arange(100), 5)
        rows = np.column_stack([rows[record], rng.normal(size=500)])
        others = np.column_stack([others, rng.normal(size=4000)])
    else:
        rows = np.repeat(rows, 20, axis=0) if kind == "upsampled" else rows[rng.integers(0, 100, 200)]
    fitted = fit_density(rows, key=KEY, progress=False)
    values = np.asarray(fitted.log_prob(others))
    error = np.hypot(fitted.score.standard_error, values.std() / 4000**0.5)
    assert abs(values.mean() - fitted.score.mean) < 2 * error


# ----------------------------------------------------------------------------------------------- rounding


def test_rounded_values_are_spread_by_auto():
    """Integers 0 to 30: the density at them adds up to one."""
    rows = np.random.default_rng(5).integers(0, 31, (400, 1)).astype(float)
    with pytest.warns(UserWarning, match=r'^column 0 holds rounded values .* pass rounding="auto"'):
        fit_density(rows, key=KEY, family="gaussian")
    fitted = fit_density(rows, key=KEY, rounding="auto", family="marginals")
    assert np.exp(fitted.log_prob(np.arange(31.0)[:, None])).sum() == pytest.approx(1, abs=0.05)
    with pytest.raises(ValueError, match='rounding must be "auto" or'):
        fit_density(rows, key=KEY, rounding="all")


# ---------------------------------------------------------------------------------------------- DataFrames


@pytest.fixture(scope="module")
def frame():
    pd = pytest.importorskip("pandas")
    height = np.random.default_rng(0).normal(170, 10, 60)
    weight = 0.9 * (height - 100) + np.random.default_rng(1).normal(0, 8, 60)
    return pd.DataFrame({"height": height, "weight": weight, "visit": np.arange(60) // 6})


@pytest.fixture(scope="module")
def fitted(frame):
    return fit_density(frame, groups="visit", key=KEY)


def test_columns_of_a_frame_are_matched_by_name(frame, fitted):
    assert fitted.model.columns == ("height", "weight")
    by_name = fitted.log_prob(frame[["weight", "visit", "height"]][:4])
    np.testing.assert_array_equal(by_name, fitted.log_prob(frame[["height", "weight"]].to_numpy()[:4]))
    with pytest.raises(ValueError, match="x has no column 'weight'; it has height, mass"):
        fitted.log_prob(frame[["height", "weight"]].rename(columns={"weight": "mass"}))
    with pytest.raises(ValueError, match="x is complex"):
        fitted.log_prob(np.ones((2, 2)) + 1j)
    with pytest.raises(ValueError, match="x holds 'tall', not numbers"):
        fitted.log_prob([["tall", "heavy"]])


def test_given_names_columns_of_a_frame(frame):
    fitted = fit_density(frame, given="height", groups="visit", key=KEY)
    assert fitted.model.columns == ("weight", "height")
    rows = frame[["weight", "height"]].to_numpy()
    arrays = fitted.log_prob(rows[:4, :1], given=rows[:4, 1:])
    np.testing.assert_array_equal(fitted.log_prob(frame[:4]), arrays)
    np.testing.assert_array_equal(fitted.log_prob(frame[["weight"]][:4], given=frame[["height"]][:4]), arrays)
    named = fit_density(rows, columns=["weight", "height"], given=["height"], key=KEY)
    np.testing.assert_array_equal(named.log_prob(rows[:4, :1], given=rows[:4, 1:]), arrays)
    with pytest.raises(ValueError, match="data has no column 'age'; it has height, weight, visit"):
        fit_density(frame, given="age", key=KEY)
    with pytest.raises(ValueError, match="no column is left to model"):
        fit_density(frame[["height"]], given="height", key=KEY)


def test_noise_is_added_in_units_of_the_table(frame, fitted):
    noisy = fitted.with_noise(0.5)
    model = rf.with_noise(fitted.model, 0.5)
    assert noisy.model.flow.noise_dimension == model.flow.noise_dimension == 2
    assert model.columns == ("height", "weight")
    assert noisy.with_noise(None).model.flow.noise_dimension == 0
    draws = np.asarray(model.sample(key=KEY, shape=(500,)))
    np.testing.assert_allclose(draws.mean(axis=0), frame[["height", "weight"]].mean(), atol=3)
    with pytest.raises(TypeError, match="or a fitted density, got int"):
        rf.with_noise(3, 0.5)


# ------------------------------------------------------------------------------------------------ refused
