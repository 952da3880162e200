"""Models in the units of the data."""

import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import same

import roughflow as rf


def test_a_standardised_model_comes_back_with_its_columns(key, tmp_path):
    model = rf.tables.Standardised(
        rf.neural_flow(2, width=4, depth=1, key=key), *rf.tables.standardisation(DATA), ("a", "b")
    )
    rf.save(tmp_path / "m.rf", model)
    again = rf.load(tmp_path / "m.rf")
    assert same(model, again)
    assert again.columns == ("a", "b")


DATA = np.random.default_rng(1).multivariate_normal([100.0, -3.0], [[25.0, 4.0], [4.0, 2.0]], 400)


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_densities_are_in_the_units_of_the_data(noise, key):
    """An untrained neural flow is N(0, I), so the model is the normal with the data's moments."""
    flow = rf.neural_flow(2, noise=noise, width=4, depth=1, key=key).with_driver(rf.Legendre(4))
    model = rf.tables.Standardised(flow, *rf.tables.standardisation(DATA))
    mean, covariance = DATA.mean(axis=0), np.cov(DATA.T, bias=True)
    gap = np.linalg.solve(covariance, (DATA[:5] - mean).T).T
    truth = -0.5 * np.sum(gap * (DATA[:5] - mean), axis=1) - 0.5 * np.log(
        np.linalg.det(2 * np.pi * covariance)
    )
    np.testing.assert_allclose(model.log_prob(DATA[:5], key=key), truth, atol=1e-4)
    samples = np.asarray(model.sample(key=key, shape=(4000,)))
    np.testing.assert_allclose(samples.mean(axis=0), mean, atol=4 * np.sqrt(np.diag(covariance) / 4000).max())
    np.testing.assert_allclose(np.cov(samples.T), covariance, rtol=0.2)


def test_data_without_a_density_are_refused():
    with pytest.raises(ValueError, match=r"^column 1 is constant"):
        rf.tables.standardisation(np.stack([np.arange(5.0), np.full(5, 7.0)], axis=1))
    with pytest.raises(ValueError, match=r"^columns 0, 1 are linearly dependent"):
        rf.tables.standardisation(np.stack([np.arange(5.0), 2 * np.arange(5.0)], axis=1))
    with pytest.raises(ValueError, match=r"^data must have shape .* at least two rows"):
        rf.tables.standardisation(np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"^data has a value that is not finite, first in row 0"):
        rf.tables.standardisation(np.array([[np.nan, 1.0], [1.0, 2.0]]))


def test_a_small_spread_around_a_large_number_keeps_its_digits(key):
    """Ten million and one: single precision has no digits left for the one."""
    flow = rf.neural_flow(1, noise=0.0, width=4, depth=1, key=key)
    rows = np.random.default_rng(2).normal(size=(200, 1))
    plain, far = (
        rf.tables.Standardised(flow, *rf.tables.standardisation(rows + shift)) for shift in (0, 1e7)
    )
    with jax.enable_x64(False):
        single = eqx.tree_at(lambda m: m.flow, far, jax.tree.map(to_single, flow))
        moved = single.log_prob(rows + 1e7, key=key)
    assert moved.dtype == jnp.float32
    np.testing.assert_allclose(moved, plain.log_prob(rows, key=key), atol=1e-4)


def to_single(leaf):
    return jnp.asarray(leaf, jnp.float32) if eqx.is_inexact_array(leaf) else leaf


def test_a_standardised_model_may_be_an_argument_of_a_jit(key):
    model = rf.tables.Standardised(
        rf.neural_flow(2, noise=0.0, width=4, depth=1, key=key), *rf.tables.standardisation(DATA)
    )
    inside = eqx.filter_jit(lambda model, x: model.log_prob(x, key=key))(model, jnp.asarray(DATA[:3]))
    np.testing.assert_allclose(inside, model.log_prob(DATA[:3], key=key), rtol=1e-9)


def test_fields_and_metrics_by_their_old_names_are_read(tmp_path):
    file = tmp_path / "laplace.rf"
    rf.save(file, rf.Laplace(num_starts=3))
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["header.json"] = parts["header.json"].replace(b'"num_starts"', b'"starts"')
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert rf.load(file).num_starts == 3
    history = rf.train.History.from_arrays({"loss": np.zeros(2), "figures/lost": np.ones(2)})
    np.testing.assert_array_equal(history.metrics["lost"], 1)
