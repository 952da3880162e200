"""Maps of a table's columns, and models of rows with edges, steps and tails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import fit_density
from scipy import stats

import roughflow as rf
from roughflow.tables._marginals import fit_marginals

TINY = {"width": 8, "depth": 1, "steps": 20, "likelihood_steps": 0, "patience": 0, "progress": False}
TINY |= {"batch_size": 64}  # so that fits share their programs, as far as they have as many rows
RNG = np.random.default_rng(0)
SKEWED = RNG.gamma(0.7, size=(600, 2)) @ np.array([[1.0, 0.3], [0.0, 2.0]])


@pytest.fixture(scope="module")
def maps():
    found = fit_marginals(SKEWED, 2, -np.inf)
    assert found is not None
    return found


def test_a_map_and_its_inverse_undo_each_other_beyond_the_knots_too(maps):
    x = np.concatenate([SKEWED[:50], [[-3.0, -3.0], [40.0, 90.0]]])
    u, _ = maps.forward(x)
    assert np.all(np.diff(u[np.argsort(x[:, 0]), 0]) > 0)
    np.testing.assert_allclose(jax.jit(lambda u: maps.inverse(u))(u), x, rtol=1e-9, atol=1e-9)


def test_the_slope_is_the_derivative_and_tracing_changes_nothing(maps):
    x = np.concatenate([SKEWED[:50], [[-3.0, 90.0]]])
    u, log_slope = maps.forward(x)
    traced, slopes = jax.jit(jax.vmap(jax.value_and_grad(lambda r: jnp.sum(maps.forward(r)[0]))))(x)
    np.testing.assert_allclose(traced, u.sum(axis=1), rtol=1e-9)
    np.testing.assert_allclose(jnp.log(slopes), log_slope, atol=1e-9)


def test_mapped_columns_are_nearly_normal(maps):
    u = maps.forward(SKEWED)[0]
    for column, before in zip(u.T, SKEWED.T, strict=True):
        assert stats.kstest(column, "norm").statistic < 0.04
        assert stats.kstest(stats.zscore(before), "norm").statistic > 0.08


def test_normal_columns_are_left_alone():
    rows = np.random.default_rng(1).normal(size=(500, 3))
    assert fit_marginals(rows, 3, 0.0) is None


def test_maps_must_gain_what_is_asked(maps):
    assert fit_marginals(SKEWED, 2, 0.1) is not None
    light = np.clip(SKEWED, 0, 3)
    assert fit_marginals(light, 2, -np.inf).x.shape[1] >= 4
    assert fit_marginals(light, 2, 5.0) is None
    assert fit_marginals(light, 2, np.inf) is None


@pytest.mark.parametrize(("low", "high"), [(0.0, np.inf), (-np.inf, 2.0), (0.0, 2.0), (-np.inf, np.inf)])
def test_bounds_are_kept(low, high):
    line = np.array([[-1.0, 1.0]])
    maps = rf.tables.Marginals(line, line, np.ones((1, 2)), np.array([low]), np.array([high]))
    x = np.linspace(0.1, 1.9, 7)[:, None]
    u, log_slope = maps.forward(x)
    back, slope = jax.jit(
        lambda u, x: (maps.inverse(u), jax.vmap(jax.grad(lambda v: maps.forward(v[None])[0][0]))(x))
    )(u, x[:, 0])
    np.testing.assert_allclose(back, x, rtol=1e-9)
    np.testing.assert_allclose(jnp.log(slope), log_slope[:, 0], atol=1e-9)
    far = np.asarray(jax.jit(lambda u: maps.inverse(u))(jnp.array([[-30.0], [30.0]])))
    assert np.all((far >= low) & (far <= high))
    outside = maps.forward(np.array([[-1.0], [3.0]]))[1][:, 0]
    np.testing.assert_array_equal(np.isneginf(outside), [np.isfinite(low), np.isfinite(high)])


def test_knots_that_make_no_map_are_refused():
    line = np.array([[-1.0, 1.0]])
    with pytest.raises(ValueError, match="must increase"):
        rf.tables.Marginals(line[:, ::-1], line, np.ones((1, 2)))
    with pytest.raises(ValueError, match="must have the same shape"):
        rf.tables.Marginals(line, line, np.ones((1, 3)))


# ------------------------------------------------------------------------------------------------ in a fit


@pytest.fixture(scope="module")
def bounded():
    rows = np.random.default_rng(2).exponential(size=(300, 1))
    return fit_density(rows, key=jax.random.key(0), bounds={0: (0.0, None)}, marginals=True, **TINY).model


@pytest.fixture(scope="module")
def on_grid(bounded):
    """A grid, and the density on it; then at a point out of bounds. At once, to compile it once."""
    grid = np.append(np.linspace(1e-3, 40, 8001), -0.5)[:, None]
    density = np.exp(bounded.log_prob(grid, key=jax.random.key(1)))
    return grid[:-1], density[:-1], density[-1]


def test_a_mapped_density_integrates_to_one_within_its_bounds(bounded, on_grid, key):
    grid, density, outside = on_grid
    assert np.trapezoid(density, grid[:, 0]) == pytest.approx(1, abs=5e-3)
    assert outside == 0
    assert float(jnp.min(bounded.sample(key=key, shape=(500,)))) > 0
    truth = np.mean(stats.expon.logpdf(grid[1:2000, 0]) * density[1:2000])
    got = np.mean(np.log(density[1:2000]) * density[1:2000])
    assert got == pytest.approx(truth, abs=0.05 * abs(truth))


def test_a_mapped_model_comes_back(bounded, tmp_path, key):
    rf.save(tmp_path / "model.rf", bounded)
    x = np.array([[0.3], [2.0]])
    value = rf.load(tmp_path / "model.rf").log_prob(x, key=key)
    np.testing.assert_array_equal(value, bounded.log_prob(x, key=key))


def test_samples_of_a_mapped_model_have_its_density(bounded, on_grid, key):
    draws = np.asarray(bounded.sample(key=key, shape=(2000,)))[:, 0]
    grid, density, _ = on_grid
    cdf = np.cumsum(density) * (grid[1] - grid[0])
    assert stats.kstest(draws, lambda x: np.interp(x, grid[:, 0], cdf)).pvalue > 1e-3


def test_rounded_rows_are_spread_over_their_steps(key):
    rows = np.random.default_rng(3).poisson(3, (300, 1)).astype(float)
    model = fit_density(rows, key=key, rounding={"count": 1.0}, columns=["count"], **TINY).model
    # The normal it starts from has the variance of the rows and that of the noise, or hardly less.
    assert model.sample(key=key, shape=(4000,)).var() == pytest.approx(rows.var() + 1 / 12, rel=0.15)


@pytest.mark.slow
def test_a_rounded_column_may_be_constant(key):
    """Noise as wide as the step gives it a density: uniform."""
    rows = np.stack([np.random.default_rng(3).normal(size=200), np.zeros(200)], axis=1)
    model = fit_density(rows, key=key, rounding={1: 1.0}, **TINY).model
    assert model.sample(key=key, shape=(2000,))[:, 1].std() == pytest.approx(12**-0.5, rel=0.2)


def test_what_cannot_be_within_bounds_is_refused(key):
    rows = np.random.default_rng(4).uniform(size=(80, 2))
    fit = lambda **settings: fit_density(rows, key=key, **settings, **TINY)
    with pytest.raises(
        ValueError, match=r"column 1 has values that are not strictly between its bounds 0 and 0\.5"
    ):
        fit(bounds={1: (0, 0.5)})
    with pytest.raises(ValueError, match="there is no column 'z' to model; the columns are a, b"):
        fit(bounds={"z": (0, 1)}, columns=["a", "b"])
    with pytest.raises(ValueError, match="rounding must be positive"):
        fit(rounding={0: -1.0})


def test_spikes_and_tails_are_said(key):
    rng = np.random.default_rng(5)
    spike = np.where(rng.uniform(size=200) < 0.2, 0.0, rng.normal(size=200))
    settings = TINY | {"steps": 1}
    with pytest.warns(UserWarning, match="column 'a' has 18% of its rows at 0, where a density may grow"):
        fit_density(np.stack([spike, rng.normal(size=200)], 1), key=key, columns=["a", "b"], **settings)
    tail = rng.standard_cauchy(size=(400, 1))
    with pytest.warns(UserWarning, match=r"column 0 reaches \d+ interquartile ranges from its median"):
        fit_density(tail, key=key, **settings)


@pytest.mark.parametrize("least", [-np.inf, np.inf])
@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.0])
def test_far_rows_of_a_small_table_cost_little(freedom, least):
    """Also for linear maps, and if the tails of 200 rows look normal; without Pareto tails, millions."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rows, new = (rng.standard_t(freedom, size=(n, 1)) for n in (200, 10_000))
        u, log_slope = fit_marginals(rows, 1, least).forward(new)
        loss = stats.t(freedom).logpdf(new) - stats.norm.logpdf(u) - log_slope
        assert loss.max() < 12


def test_pareto_tails_cost_little_if_a_column_is_normal():
    rows = np.concatenate([np.random.default_rng(0).normal(size=500), [4.5]])[:, None]
    maps = fit_marginals(rows, 1, np.inf)
    assert maps is not None
    new = stats.norm.isf(np.linspace(1e-7, 1 - 1e-7, 100_001))
    u, log_slope = maps.forward(new[:, None])
    loc, scale = rows.mean(), rows.std()
    loss = stats.norm(loc, scale).logpdf(new) - (stats.norm.logpdf(u) + log_slope)[:, 0]
    assert loss.mean() < 0.005


@pytest.mark.parametrize(("freedom", "excess"), [(2.0, 0.05), (1.0, 0.05)])
def test_tails_follow_those_of_the_data(freedom, excess):
    """Student-t₂ and Cauchy columns: no row of 10,000 costs more than 20 nats beyond the truth."""
    rows, new = (
        np.random.default_rng(seed).standard_t(freedom, size=(n, 1)) for seed, n in ((0, 1000), (1, 10_000))
    )
    maps = fit_marginals(rows, 1, 0.5)
    assert np.all(maps.tails > 0.3)
    u, log_slope = maps.forward(new)
    loss = stats.t(freedom).logpdf(new) - stats.norm.logpdf(u) - log_slope
    assert loss.max() < 5
    assert -0.01 < loss.mean() < excess
    grid = np.array([[-1e4], [-30.0], [-2.0], [0.0], [3.0], [1e3]])
    np.testing.assert_allclose(
        jax.jit(lambda u: maps.inverse(u))(maps.forward(grid)[0]), grid, rtol=3e-3, atol=1e-5
    )
    step = 1e-5 * np.abs(grid) + 1e-6
    slope = (maps.forward(grid + step)[0] - maps.forward(grid - step)[0]) / (2 * step)
    np.testing.assert_allclose(np.log(slope), maps.forward(grid)[1], atol=1e-4)
    traced = jax.jit(lambda x: maps.forward(x))(jnp.asarray(grid))
    np.testing.assert_allclose(traced[0], maps.forward(grid)[0], rtol=1e-4, atol=1e-5)


def test_normal_tails_stay_linear():
    rows = np.random.default_rng(0).normal(size=(2000, 1)) ** 3
    light = fit_marginals(np.clip(np.random.default_rng(0).laplace(size=(2000, 1)), -3, 3), 1, 0.0)
    assert light is None or light.tails is None or not np.any(light.tails > 0.34)
    assert fit_marginals(rows, 1, -np.inf).tails is not None
