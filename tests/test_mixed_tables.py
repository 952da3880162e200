"""Tables with categories, integers, point masses and missing cells."""

from itertools import product

import jax
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import logsumexp

import roughflow as rf

KEY = jax.random.key(0)
WEIGHTS = np.array([0.6, 0.4])
MEANS = np.array([[0.0, 1.0, -1.0], [3.0, -1.0, 1.0]])
COVARIANCES = np.array(
    [[[1, 0.5, 0], [0.5, 1, 0.3], [0, 0.3, 1.0]], [[0.5, 0, 0], [0, 1, -0.6], [0, -0.6, 1.0]]]
)


def truth(rows):
    """The log-density of the observed cells."""
    out = np.zeros(len(rows))
    for i, row in enumerate(rows):
        seen = ~np.isnan(row)
        if seen.any():
            parts = [
                np.log(weight)
                + stats.multivariate_normal(mean[seen], cov[np.ix_(seen, seen)]).logpdf(row[seen])
                for weight, mean, cov in zip(WEIGHTS, MEANS, COVARIANCES, strict=True)
            ]
            out[i] = logsumexp(parts)
    return out


def gaussians(count, seed, missing=0.0):
    rng = np.random.default_rng(seed)
    label = rng.choice(2, count, p=WEIGHTS)
    roots = np.linalg.cholesky(COVARIANCES)
    rows = MEANS[label] + np.einsum("nij,nj->ni", roots[label], rng.normal(size=(count, 3)))
    rows[rng.random(rows.shape) < missing] = np.nan
    return rows


@pytest.fixture(scope="module")
def incomplete():
    return rf.fit_density(gaussians(2000, 0, 0.3), key=KEY)


def messy(count, seed):
    """Colour, height given colour, an integer given height, rain (zero for half of the reds)."""
    rng = np.random.default_rng(seed)
    red = rng.random(count) < 0.3
    height = np.where(red, 3.0, 0.0) + rng.normal(size=count)
    visits = rng.poisson(np.exp(2 + 0.2 * height))
    dry = rng.random(count) < np.where(red, 0.5, 0.1)
    rain = np.where(dry, 0.0, 5 + height + rng.normal(size=count))
    colour = np.where(red, "red", "blue")
    value = np.log(np.where(red, 0.3, 0.7)) + stats.norm(np.where(red, 3.0, 0.0)).logpdf(height)
    value += stats.poisson(np.exp(2 + 0.2 * height)).logpmf(visits)
    chance = np.where(red, 0.5, 0.1)
    value += np.where(dry, np.log(chance), np.log(1 - chance) + stats.norm(5 + height).logpdf(rain))
    return pd.DataFrame({"colour": colour, "height": height, "visits": visits, "rain": rain}), value


@pytest.fixture(scope="module")
def mixed():
    return rf.fit_density(messy(1500, 0)[0], key=KEY)


def test_densities_of_incomplete_rows_are_near_the_truth(incomplete):
    """30 % of the cells are missing, in training and in scoring."""
    new = gaussians(1000, 1, 0.3)
    assert incomplete.family == "mixture"
    gap = truth(new) - incomplete.log_prob(new)
    assert -0.01 < gap.mean() < 0.03
    nothing = np.full((1, 3), np.nan)
    assert incomplete.log_prob(nothing) == pytest.approx(0.0, abs=1e-9)


def test_imputations_follow_the_conditional_distribution(incomplete):
    """Incomplete rows of the truth, completed, are rows of the truth; observed cells stay."""
    rows = gaussians(1500, 2, 0.3)
    filled = incomplete.impute(rows, 1, key=KEY)[0]
    seen = ~np.isnan(rows)
    np.testing.assert_allclose(filled[seen], rows[seen])
    other = gaussians(1500, 3)
    for direction in np.random.default_rng(0).normal(size=(4, 3)):
        assert stats.ks_2samp(filled @ direction, other @ direction).pvalue > 1e-3


@pytest.fixture(scope="module")
def five():
    """A mixture of two Gaussians in five columns, and its samples."""
    rng = np.random.default_rng(7)
    roots = rng.normal(size=(2, 5, 5)) / 2 + np.eye(5)
    covariances, means = roots @ np.swapaxes(roots, 1, 2), 2 * rng.normal(size=(2, 5))
    cells = list(rng.normal(size=(5, 50)))
    encoding = rf.tables.Encoding.of(cells, ("a", "b", "c", "d", "e"), {})
    unit = means - encoding.loc, covariances
    scaled = unit[0] / encoding.scale, unit[1] / np.outer(encoding.scale, encoding.scale)
    mixture = rf.tables.MixtureComponents(WEIGHTS, *scaled, (), np.zeros(5))
    return rf.tables.MixedDensity(encoding, mixture), means, covariances


def test_conditionals_for_all_subsets_are_those_of_closed_forms(five):
    """Thirty subsets of five columns: densities, and quantiles, means and deviations of each other column."""
    model, means, covariances = five
    rows = np.asarray(model.sample(key=KEY, shape=(20,)), float)
    names = model.columns
    for mask in product([False, True], repeat=5):
        own = np.array(mask)
        if own.all() or not own.any():
            continue
        known = np.stack(
            [
                np.log(w) + stats.multivariate_normal(m[own], c[np.ix_(own, own)]).logpdf(rows[:, own])
                for w, m, c in zip(WEIGHTS, means, covariances, strict=True)
            ]
        ).reshape(2, -1)
        whole = [
            np.log(w) + stats.multivariate_normal(m, c).logpdf(rows)
            for w, m, c in zip(WEIGHTS, means, covariances, strict=True)
        ]
        conditional = model.conditional(rows, [name for name, seen in zip(names, mask, strict=True) if seen])
        expected = logsumexp(whole, axis=0) - logsumexp(known, axis=0)
        np.testing.assert_allclose(conditional.log_prob(rows), expected, atol=1e-8)
        share = np.exp(known - logsumexp(known, axis=0))
        for j in np.flatnonzero(~own):
            gain = [np.linalg.solve(c[np.ix_(own, own)], c[own, j]) for c in covariances]
            at = [m[j] + (rows[:, own] - m[own]) @ g for m, g in zip(means, gain, strict=True)]
            spread = [np.sqrt(c[j, j] - c[own, j] @ g) for c, g in zip(covariances, gain, strict=True)]
            mean = sum(w * a for w, a in zip(share, at, strict=True))
            square = sum(w * (s**2 + a**2) for w, a, s in zip(share, at, spread, strict=True))
            np.testing.assert_allclose(conditional.mean(names[j]), mean, atol=1e-8)
            np.testing.assert_allclose(conditional.std(names[j]) ** 2, square - mean**2, atol=1e-8)
            found = conditional.quantile([0.05, 0.6], names[j])
            parts = zip(share, at, spread, strict=True)
            levels = sum(w * stats.norm(a, s).cdf(found) for w, a, s in parts)
            np.testing.assert_allclose(levels, np.tile([[0.05], [0.6]], 20), atol=1e-8)


def test_conditionals_of_mixed_columns_agree_with_their_samples(mixed):
    """An integer and a zero-inflated column given the colour and the height."""
    frame = messy(4, 9)[0]
    conditional = mixed.conditional(frame, ["colour", "height"])
    draws = conditional.sample(4000, key=KEY)
    for j, column in ((2, "visits"), (3, "rain")):
        own = draws[:, :, j].astype(float)
        np.testing.assert_allclose(conditional.mean(column), own.mean(axis=0), atol=0.25)
        np.testing.assert_allclose(conditional.std(column), own.std(axis=0), rtol=0.1)
        quantiles = conditional.quantile([0.04, 0.5, 0.9], column)
        np.testing.assert_allclose(quantiles, np.quantile(own, [0.04, 0.5, 0.9], axis=0), atol=1.01)
    with pytest.raises(ValueError, match="'height' is given"):
        conditional.mean("height")


def test_quantiles_of_a_conditional(incomplete):
    """90 % intervals cover 90 % of new values."""
    rows = gaussians(400, 5)
    low, high = incomplete.conditional(rows, ["x1", "x3"]).quantile([0.05, 0.95], "x2")
    assert np.mean((low < rows[:, 1]) & (rows[:, 1] < high)) == pytest.approx(0.9, abs=0.05)


def test_a_mixed_table_with_a_known_distribution(mixed):
    assert mixed.model.encoding.types == ("category", "continuous", "integer", "zero-inflated")
    new, value = messy(1500, 1)
    assert (value - mixed.log_prob(new)).mean() < 0.08
    assert mixed.score.gain > 0


def test_probabilities_sum_to_one(mixed):
    """Over colours and counts, and over the point mass and the density of rain."""
    empty = {"colour": None, "height": np.nan, "visits": np.nan, "rain": np.nan}
    total = lambda **columns: np.exp(
        mixed.log_prob(pd.DataFrame(empty | columns, index=range(len(next(iter(columns.values()))))))
    ).sum()
    assert total(colour=["red", "blue"]) == pytest.approx(1, abs=1e-9)
    assert total(visits=np.arange(60)) == pytest.approx(1, abs=1e-2)
    grid = np.linspace(-20, 30, 2001)
    assert total(rain=grid[grid != 0]) * (grid[1] - grid[0]) + total(rain=[0.0]) == pytest.approx(1, abs=1e-2)


def test_samples_and_completions_have_the_types_of_the_table(mixed, tmp_path):
    frame, _ = messy(1500, 2)
    draws = pd.DataFrame(mixed.sample(1500, key=KEY), columns=mixed.model.columns)
    assert set(draws.colour) == {"red", "blue"}
    assert np.all(draws.visits == draws.visits.astype(float).round())
    assert np.mean(draws.rain == 0) == pytest.approx(np.mean(frame.rain == 0), abs=0.05)
    assert stats.ks_2samp(draws.height.astype(float), frame.height).pvalue > 1e-3
    holes = frame[:5].astype(object)
    holes.loc[0, "colour"], holes.loc[1, "rain"] = None, np.nan
    filled = mixed.impute(holes, 20, key=KEY)
    assert set(filled[:, 0, 0]) <= {"red", "blue"}
    assert np.array_equal(filled[0, 2:], frame[2:5].to_numpy(object))
    rf.save(tmp_path / "m.rf", mixed.model)
    np.testing.assert_array_equal(rf.load(tmp_path / "m.rf").log_prob(frame[:9]), mixed.log_prob(frame[:9]))


def test_unknown_categories_have_density_zero(mixed):
    frame = messy(5, 3)[0].assign(colour="green")
    assert np.isneginf(mixed.log_prob(frame)).all()
    assert np.isfinite(mixed.log_prob(frame, violation="penalty")).all()
    assert np.all(mixed.anomaly(frame) < 0.05)


def test_weights_count_rows():
    rows = gaussians(300, 6)
    weights = np.where(rows[:, 0] > 1.5, 3.0, 1.0)
    fitted = rf.fit_density(rows, key=KEY, weights=weights)
    named = rf.fit_density(pd.DataFrame(rows).assign(w=weights), key=KEY, weights="w")
    np.testing.assert_array_equal(named.log_prob(rows), fitted.log_prob(rows))
    draws = fitted.sample(4000, key=KEY)
    assert np.mean(draws[:, 0] > 1.5) == pytest.approx(
        np.average(rows[:, 0] > 1.5, weights=weights), abs=0.04
    )


TEXTS = np.array([["a", 1.0], ["b", 2.0], ["a", 3.0]] * 10, object)
FRAME = pd.DataFrame({"z": [1.0, 2, 4] * 20, "c": list("ab") * 30})


@pytest.mark.parametrize(
    ("rows", "settings", "reason"),
    [
        (TEXTS, {"family": "flow"}, "column 0 of data holds 'a', not numbers"),
        (TEXTS, {"family": "flow", "types": {}}, "need family 'mixture', not 'flow'"),
        (np.array([["a", np.inf]] * 9, object), {"types": {}}, "column 'x2' of data has values beyond"),
        (TEXTS, {"given": np.ones((30, 1)), "types": {}}, "does not support given="),
        (TEXTS, {"types": {"x1": "integer"}}, "column 'x1' holds text, so its type must be 'category'"),
        (
            TEXTS,
            {"types": {"x2": "number"}},
            "types must be among continuous, integer, category, zero-inflated; column 'x2'",
        ),
        (TEXTS, {"types": {"y": "integer"}}, "types has an unknown column 'y'; the table has x1, x2"),
        (TEXTS, {"weights": [1.0, -1.0]}, "weights must be 30 non-negative numbers"),
        (
            np.array([[str(i), i] for i in range(40)], object),
            {},
            "column 'x1' has 40 different text values in 40 rows: drop it",
        ),
        (np.array([["a", 1.0], [3.0, 2.0]], object), {}, "column 0 of data holds 'a', not numbers"),
        (FRAME.replace(4.0, np.inf), {}, "column 'z' of data has values beyond"),
        (
            FRAME.assign(d=pd.Timestamp("2024-01-31")),
            {},
            "column 'd' of data holds '2024.*dates are not supp",
        ),
        (FRAME, {"groups": "nope"}, "data has no column 'nope'; it has z, c"),
        (FRAME, {"weights": "c"}, "weights holds 'a', not numbers"),
        (np.array([[None, 1.0], [None, 2.0]], object), {}, "column 'x1' of data has no values: drop it"),
    ],
)
def test_bad_tables_are_refused(rows, settings, reason):
    with pytest.raises(ValueError, match=reason) as error:
        rf.fit_density(rows, key=KEY, **settings)
    assert "\n" not in str(error.value)


def test_other_families_have_no_conditionals():
    fitted = rf.fit_density(gaussians(40, 0), key=KEY, family="gaussian")
    with pytest.raises(ValueError, match="conditional needs the family 'mixture', not 'gaussian'"):
        fitted.conditional(gaussians(3, 1), ["x1"])


def test_conditionals_reject_cells_that_contradict_them(key):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"c": rng.choice(["a", "b"], 120), "x": rng.normal(size=120)})
    fitted = rf.fit_density(table, key=key)
    conditional = fitted.conditional(table[:1], given=["c"])
    assert np.isfinite(conditional.log_prob(table[:1])).all()
    with pytest.raises(ValueError, match="rows differ from the given cells in the columns c"):
        conditional.log_prob(table[:1].replace({"a": "b", "b": "a"}))
    unseen = table[:1].assign(c="z")
    with pytest.raises(ValueError, match="rows has a category that does not occur"):
        fitted.conditional(unseen, given=["c"])
    with pytest.raises(ValueError, match="validation has a category that does not occur"):
        rf.fit_density(table, key=key, validation=unseen)


def test_scores_are_weighted_means(key):
    """Rows of almost no weight, far from the others, do not count."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(100, 1)), np.repeat([1.0, 1e-6], 50)
    x[50:] += 20
    fitted = rf.fit_density(x, weights=weights, key=key)
    assert fitted.score.mean == pytest.approx(np.average(fitted.log_prob(x), weights=weights), abs=0.1)


def test_a_mixture_warns_of_linear_relations(key):
    x = np.random.default_rng(0).normal(size=(60, 2))
    table = np.column_stack([x, x @ [1.0, 2.0]])
    table[0, 0] = np.nan
    with pytest.warns(UserWarning, match="linear functions of others have no density"):
        rf.fit_density(table, key=key)
