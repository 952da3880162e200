"""Columns that are constant, copies, or linear in others."""

import jax
import numpy as np
import pandas as pd
import pytest

import roughflow as rf

KEY = jax.random.key(0)


def dependent_rows(count=80):
    """x0, x2 free; x1 constant; x3 a copy of x0 in other units; x4 = 5 + 2 x0 − x2."""
    a, b = np.random.default_rng(0).normal(size=(2, count))
    return np.column_stack([a, np.full(count, 7.0), b, 1e3 * a, 5 + 2 * a - b])


def gaussian(rows, **settings):
    return rf.fit_density(rows, key=KEY, family="gaussian", progress=False, **settings)


@pytest.fixture(scope="module")
def fitted():
    return gaussian(dependent_rows())


def test_relations_are_removed_and_restored(fitted, tmp_path):
    rows = dependent_rows()
    assert fitted.model.relations.removed == (1, 3, 4)
    assert fitted.model.relations.described(()) == ["x2 = 7", "x4 = 1000 x1", "x5 = 5 + 2 x1 - 1 x3"]
    free = gaussian(rows[:, [0, 2]])
    np.testing.assert_allclose(fitted.log_prob(rows[:9]), free.log_prob(rows[:9, [0, 2]]), atol=1e-5)
    assert fitted.score.mean == pytest.approx(free.score.mean, abs=1e-5)
    draws = np.asarray(fitted.sample(500, key=KEY))
    assert draws.shape == (500, 5)
    assert np.all(np.isfinite(fitted.log_prob(draws)))
    np.testing.assert_allclose(draws[:, 4], 5 + 2 * draws[:, 0] - draws[:, 2], atol=1e-4)
    rf.save(tmp_path / "m.rf", fitted.model)
    again = rf.load(tmp_path / "m.rf")
    np.testing.assert_array_equal(again.log_prob(rows[:3], key=KEY), fitted.log_prob(rows[:3]))
    assert "x5 = 5 + 2 x1 - 1 x3" in repr(fitted.model)


def test_a_row_that_violates_a_relation_has_density_zero(fitted):
    rows = dependent_rows()[:4]
    rows[1, 1], rows[2, 4], rows[3, 3] = 8.0, rows[2, 4] + 0.01, 1.1 * rows[3, 3]
    np.testing.assert_array_equal(np.isfinite(fitted.log_prob(rows)), [True, False, False, False])
    penalised = fitted.log_prob(rows, violation="penalty")
    free = gaussian(dependent_rows()[:, [0, 2]]).log_prob(rows[:, [0, 2]])
    rest = np.abs(rows[2, 4] - (5 + 2 * rows[2, 0] - rows[2, 2])) / dependent_rows()[:, 4].std()
    np.testing.assert_allclose(penalised[0], free[0], atol=1e-5)
    np.testing.assert_allclose(penalised[2], free[2] - np.log(81) - 2 * np.log1p(rest), atol=1e-4)
    with pytest.raises(ValueError, match='violation must be "zero" or "penalty"'):
        fitted.log_prob(rows, violation="none")


def test_names_bounds_and_validation_follow_the_columns():
    rows = dependent_rows()
    frame = pd.DataFrame(rows, columns=list("abcde"))
    fitted = gaussian(frame, bounds={"c": (-9, 9), "e": (-99, 99)}, validation=frame[:20])
    assert fitted.model.columns == tuple("abcde")
    assert fitted.model.core.columns == ("a", "c")
    np.testing.assert_array_equal(fitted.model.marginals.lower, [-np.inf, -9])
    np.testing.assert_allclose(fitted.held_out.rows, rows[:20])
    shuffled = frame[list("edcba")]
    np.testing.assert_array_equal(fitted.log_prob(shuffled), fitted.log_prob(frame))
    wrong = frame.assign(b=8.0)
    with pytest.raises(ValueError, match=r"row 0 of validation violates a relation of the data \(b = 7"):
        gaussian(frame, validation=wrong)


def test_a_column_may_depend_on_the_given_ones():
    rows = dependent_rows()
    fitted = gaussian(rows[:, [0, 4]], given=rows[:, [2]])
    assert fitted.model.relations.removed == (1,)
    draws = np.asarray(fitted.sample(6, key=KEY, given=rows[:3, [2]]))
    assert draws.shape == (6, 3, 2)
    np.testing.assert_allclose(draws[..., 1], 5 + 2 * draws[..., 0] - rows[:3, 2], atol=1e-4)
    new = np.column_stack([rows[:3, 0], rows[:3, 4]])
    assert np.isfinite(fitted.log_prob(new, given=rows[:3, [2]])).all()
    assert not np.isfinite(fitted.log_prob(new, given=rows[:3, [2]] + 1)).any()
    with pytest.raises(ValueError, match="column 0 is a linear function of the given columns"):
        gaussian(rows[:, [4]], given=rows[:, [0, 2]])


def test_chance_relations_of_few_rows_are_kept():
    """Four rows span four dimensions at most, but only copies are certain."""
    rows = np.random.default_rng(1).normal(size=(6, 8))
    rows[:, 7] = -3 * rows[:, 2] + 1
    fitted = gaussian(rows)
    assert fitted.model.relations.removed == (7,)
    assert rf.tables.Relations.of(rows[:, :7], 7) is None
