"""What drives an SDE: paths with the distribution of Brownian motion, and a given path projected on them."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import roughflow as rf

BROWNIAN = {
    "Karhunen-Loeve": rf.KarhunenLoeve(6),
    "Legendre": rf.Legendre(5),
    "uniform": rf.PiecewiseLinear(5),
    "grid": rf.PiecewiseLinear([0.0, 0.1, 0.4, 1.0]),
}
DRIVERS = BROWNIAN | {
    "fractional": rf.FractionalBrownian(0.4, 5),
    "fractional grid": rf.FractionalBrownian(0.7, [0.0, 0.1, 0.4, 1.0]),
    "fractional Legendre": rf.driver.FractionalLegendre(0.35, 5),
    "Gaussian": rf.driver.GaussianDriver(lambda s, t: s * t * (1 + s * t), 2, hurst=1.5),
}
# A horizon of 1 hides a wrong scale, so the other one is for `make test`.
HORIZONS = [pytest.param(1.0, marks=pytest.mark.slow), 2.5]

# One of each kind: the others share their code.
KINDS = ("Karhunen-Loeve", "grid", "fractional Legendre", "time-changed")

every_driver = pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS.keys())
every_kind = pytest.mark.parametrize(
    "driver",
    [pytest.param(d, id=name, marks=[pytest.mark.slow] * (name not in KINDS)) for name, d in DRIVERS.items()],
)
every_brownian = pytest.mark.parametrize("driver", BROWNIAN.values(), ids=BROWNIAN.keys())
every_horizon = pytest.mark.parametrize("horizon", HORIZONS)


@eqx.filter_jit
def values_at(path, times):
    """B at each time, shape (times, ..., m)."""
    return jax.vmap(path.evaluate)(times)


@eqx.filter_jit
def slopes_at(path, times):
    return jax.vmap(path.derivative)(times)


@eqx.filter_jit
def project(driver, path):
    return driver.project(path)


# --------------------------------------------------------------------------------- a path


@every_horizon
@every_driver
def test_path_starts_at_zero_has_its_derivative_and_is_its_own_projection(driver, horizon, key):
    path = driver.sample(key=key, noise_dimension=2, t1=horizon)
    times = horizon * np.array([0.03, 0.17, 0.33, 0.55, 0.71, 0.93])
    h = 1e-5
    quotient = (values_at(path, times + h) - values_at(path, times - h)) / (2 * h)
    slopes = slopes_at(path, times)
    assert slopes.shape == (6, 2)
    np.testing.assert_allclose(quotient, slopes, rtol=0, atol=1e-7)
    np.testing.assert_allclose(values_at(path, jnp.zeros(1))[0], 0, atol=1e-15)
    again = project(driver, path)
    atol = 1e-10 if driver.jumps.size else 1e-5
    np.testing.assert_allclose(again.coefficients, path.coefficients, rtol=0, atol=atol)
    assert again.t1 == horizon


@every_brownian
def test_path_is_the_sum_it_is_documented_to_be(driver):
    """B = ω₀ t/√T + Σ ωₖ √(2T) sin(kπt/T)/(kπ), or √T Σ ωₖ √(2k+1) ∫Pₖ, or ω_k √Δ_k gained on interval k."""
    horizon, n = 2.5, driver.num_functions
    weights = np.arange(1.0, n + 1) * (-1) ** np.arange(n)
    path = driver.path(weights[:, None], horizon)
    if isinstance(driver, rf.KarhunenLoeve):
        t = horizon * np.array([0.2, 0.6, 1.0])
        k = np.arange(1, n)
        waves = np.sqrt(2 * horizon) * np.sin(np.pi * np.outer(t, k) / horizon) / (np.pi * k)
        expected = weights[0] * t / np.sqrt(horizon) + waves @ weights[1:]
    elif isinstance(driver, rf.Legendre):
        t = horizon * np.array([0.2, 0.6, 1.0])
        basis = [np.polynomial.Legendre.basis(k, [0, 1]).integ(lbnd=0)(t / horizon) for k in range(n)]
        expected = np.sqrt(horizon) * (weights * np.sqrt(2 * np.arange(n) + 1)) @ np.stack(basis)
    else:
        t = horizon * np.asarray(driver.knots)[1:]
        expected = np.cumsum(weights * np.sqrt(np.diff(t, prepend=0.0)))
    np.testing.assert_allclose(values_at(path, t)[:, 0], expected, rtol=1e-12, atol=1e-12)


@every_kind
def test_increments(driver, key):
    path = driver.sample(key=key, noise_dimension=2, t1=2.0)
    early, late = values_at(path, jnp.array([0.3, 1.4]))
    np.testing.assert_allclose(path.evaluate(0.3, 1.4), late - early, atol=1e-14)
    np.testing.assert_allclose(path.evaluate(1.4, 0.3), early - late, atol=1e-14)


@pytest.mark.parametrize("horizon", [2.5, 0.7])
@pytest.mark.parametrize("grid", [5, [0.0, 0.1, 0.4, 1.0]], ids=["uniform", "grid"])
def test_derivative_at_a_jump_is_the_limit_from_the_side_asked_for(grid, horizon):
    driver = rf.PiecewiseLinear(grid)
    n = driver.num_functions
    path = driver.path(jnp.arange(1.0, n + 1)[:, None], horizon)
    slopes = np.arange(1.0, n + 1) / np.sqrt(horizon * np.diff(driver.knots))
    times = horizon * np.asarray(driver.knots)
    from_left, from_right = slopes[[0, *range(n)]], slopes[[*range(n), -1]]
    for left, expected in ((True, from_left), (False, from_right)):
        # A single division rounds, a vector of them may be products with the reciprocal.
        one_by_one = [path.derivative(t, left=left)[0] for t in times]
        together = jax.vmap(lambda t, left=left: path.derivative(t, left=left))(times)[:, 0]
        np.testing.assert_allclose(one_by_one, expected, rtol=1e-12)
        np.testing.assert_allclose(together, expected, rtol=1e-12)


def test_only_a_piecewise_linear_path_jumps():
    assert DRIVERS["Karhunen-Loeve"].jumps.size == 0
    np.testing.assert_allclose(DRIVERS["uniform"].jumps, [0.2, 0.4, 0.6, 0.8])
    np.testing.assert_allclose(rf.PiecewiseLinear([0, 1, 4, 5]).jumps, [0.2, 0.8])


@every_kind
def test_horizon_per_path(driver, key):
    horizons = jnp.array([0.5, 1.0, 3.0])
    paths = driver.sample(key=key, noise_dimension=2, shape=(3,), t1=horizons)
    times = jnp.array([0.2, 0.7, 0.7])
    for i in range(3):
        alone = driver.path(paths.coefficients[i], horizons[i])
        np.testing.assert_allclose(paths.evaluate(times)[i], alone.evaluate(times[i]), rtol=1e-12)
        np.testing.assert_allclose(paths.derivative(times)[i], alone.derivative(times[i]), rtol=1e-12)
        np.testing.assert_allclose(paths.evaluate(0.4)[i], alone.evaluate(0.4), rtol=1e-12)
    with pytest.raises(ValueError, match=r"t1 .*\(3,\), got \(2,\)"):
        driver.path(paths.coefficients, horizons[:2])


# diffrax compiles a solve for each: with `make test` one has its turn, with corners and not Brownian.
@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(driver, marks=[pytest.mark.slow] * (name != "fractional"))
        for name, driver in DRIVERS.items()
    ],
    ids=DRIVERS.keys(),
)
def test_path_is_a_control_for_diffrax(driver, key):
    """dy = y dB along a smooth path has the solution exp(B)."""
    path = driver.sample(key=key, t1=2.0)
    solution = diffrax.diffeqsolve(
        diffrax.ControlTerm(lambda t, y, args: y[:, None], path),
        diffrax.Heun(),
        path.t0,
        path.t1,
        0.005,
        jnp.ones(1),
    )
    np.testing.assert_allclose(solution.ys[0], np.exp(path.evaluate(2.0)), rtol=1e-4)


# -------------------------------------------------------------------------- the distribution of a path


@every_brownian
def test_functions_are_orthonormal(driver):
    """By Gauss's rule in each of a hundred cells, whose borders the jumps are among."""
    n, cells = driver.num_functions, 100
    nodes, weights = np.polynomial.legendre.leggauss(6)
    places = jnp.ravel((jnp.arange(cells)[:, None] + (nodes[None] + 1) / 2) / cells)
    basis = jax.vmap(lambda s: driver.slope(s, jnp.eye(n)))(places)
    products = jnp.einsum("ij,ik,i->jk", basis, basis, jnp.tile(weights / 2, cells)) / cells
    np.testing.assert_allclose(products, np.eye(n), atol=1e-10)


@pytest.mark.parametrize("name", ["uniform", "grid"])
def test_piecewise_linear_covariance_is_exact_on_the_grid(name):
    driver = DRIVERS[name]
    s = np.asarray(driver.knots)
    integrals = driver.integrals(s)
    np.testing.assert_allclose(integrals @ integrals.T, np.minimum.outer(s, s), atol=1e-14)


def test_karhunen_loeve_covariance_converges_and_is_exact_at_the_end():
    s = np.linspace(0, 1, 41)
    errors = []
    for n in (1, 4, 16, 64):
        integrals = rf.KarhunenLoeve(n).integrals(s)
        gap = integrals @ integrals.T - np.minimum.outer(s, s)
        np.testing.assert_allclose(gap[-1], 0, atol=1e-14)
        errors.append(np.max(np.abs(gap)))
    # Mercer's remainder: (2/π²) Σ_{k≥n} k⁻² at the most.
    assert np.all(np.array(errors[1:]) < 2 / np.pi**2 / np.array([3.0, 15.0, 63.0]))
    assert np.all(np.diff(errors) < 0)


@every_horizon
@every_kind
def test_sample_covariance(driver, horizon, key):
    """Of two components at three times, within four standard errors entry by entry."""
    paths = driver.sample(key=key, noise_dimension=2, shape=(20_000,), t1=horizon)
    assert paths.batch_shape == (20_000,)
    assert paths.noise_dimension == 2
    s = np.array([0.4, 0.8, 1.0])
    values = np.moveaxis(np.asarray(values_at(paths, horizon * s)), 0, 2).reshape(20_000, 6)
    integrals = driver.integrals(s)
    expected = np.kron(np.eye(2), horizon ** (2 * driver.hurst) * integrals @ integrals.T)
    products = values[:, :, None] * values[:, None, :]
    error = 4 * products.std(axis=0) / np.sqrt(20_000)
    assert np.all(np.abs(products.mean(axis=0) - expected) < error)
    assert stats.kstest(values[:, 2] / np.sqrt(expected[2, 2]), "norm").pvalue > 1e-3


@every_kind
def test_log_prob_is_that_of_standard_normals(driver, key):
    coefficients = driver.sample(key=key, noise_dimension=2, shape=(3, 4)).coefficients
    expected = stats.norm.logpdf(coefficients).sum(axis=(-2, -1))
    assert expected.shape == (3, 4)
    np.testing.assert_allclose(driver.log_prob(coefficients), expected, rtol=1e-12)


# --------------------------------------------------------------------------------- projection


@every_horizon
def test_fine_path_on_coarser_drivers(horizon, key):
    """On a grid the values on the grid stay; on waves the path is approached, its end exactly."""
    fine = rf.PiecewiseLinear(1024).sample(key=key, noise_dimension=2, t1=horizon)
    times = horizon * np.linspace(0, 1, 257)
    truth = values_at(fine, times)
    coarse = project(rf.PiecewiseLinear(16), fine)
    np.testing.assert_allclose(values_at(coarse, times[::16]), truth[::16], atol=1e-10)
    assert np.max(np.abs(values_at(coarse, times) - truth)) > 0.1

    errors, waves = [], []
    for n in (2, 8, 32, 128):
        waves.append(project(rf.KarhunenLoeve(n), fine))
        values = values_at(waves[-1], times)
        np.testing.assert_allclose(values[-1], truth[-1], atol=1e-10)
        errors.append(np.max(np.abs(values - truth)))
    assert np.all(np.diff(errors) < 0)
    assert errors[-1] < 0.2 * errors[0]
    # More functions leave the coefficients there were.
    np.testing.assert_allclose(waves[-1].coefficients[:8], waves[1].coefficients, atol=1e-12)


def test_projected_coefficients_are_standard_normal(key):
    """The distribution of the projection of a Brownian path is the driver's own."""
    fine = rf.PiecewiseLinear(256).sample(key=key, shape=(4000,), t1=2.5)
    coefficients = eqx.filter_jit(rf.KarhunenLoeve(4).project)(fine, resolution=256).coefficients[..., 0]
    covariance = np.cov(coefficients, rowvar=False)
    # Wave k on 256 linear pieces loses (kπ/256)²/12 of its variance: nothing to see here.
    error = 4 * np.sqrt((1 + np.eye(4)) / 4000)
    assert np.all(np.abs(covariance - np.eye(4)) < error)


@every_kind
def test_batches_of_paths_project_like_each_alone(driver, key):
    horizons = jnp.array([0.5, 1.0, 3.0])
    fine = rf.PiecewiseLinear(8)  # as in the next test, which finds the programs of single paths compiled
    for t1 in (2.0, horizons):
        paths = fine.sample(key=key, noise_dimension=2, shape=(3,), t1=t1)
        together = project(driver, paths)
        assert together.coefficients.shape == (3, driver.num_functions, 2)
        for i in range(3):
            alone = project(driver, fine.path(paths.coefficients[i], jnp.broadcast_to(t1, (3,))[i]))
            np.testing.assert_allclose(together.coefficients[i], alone.coefficients, atol=1e-12)
            np.testing.assert_allclose(jnp.broadcast_to(together.t1, (3,))[i], alone.t1)


@every_kind
def test_projection_of_an_interpolation(driver, key):
    """The same path given by its values, as any diffrax path may be."""
    path = rf.PiecewiseLinear(8).sample(key=key, noise_dimension=2, t1=2.0)
    times = jnp.linspace(0, 2.0, 9)
    interpolation = diffrax.LinearInterpolation(times, values_at(path, times))
    got, expected = project(driver, interpolation), project(driver, path)
    np.testing.assert_allclose(got.coefficients, expected.coefficients, atol=1e-10)
    assert got.t1 == 2.0


# --------------------------------------------------------------------------------- refinement


@every_kind
def test_a_refined_path_projects_on_the_path_it_refines(driver, key):
    """Twice the functions, with coefficients that are standard normal again, along the same path."""
    coarse, more = jax.random.normal(key, (2, 3, driver.num_functions, 2))
    refined = driver.refined()
    assert refined.num_functions == 2 * driver.num_functions
    fine = refined.path(driver.refine(coarse, more), 2.5)
    atol = 1e-10 if driver.jumps.size else 2e-5
    np.testing.assert_allclose(project(driver, fine).coefficients, coarse, rtol=0, atol=atol)
    # An orthogonal map of normal numbers.
    squares = jnp.sum(coarse**2 + more**2, axis=(-2, -1))
    np.testing.assert_allclose(jnp.sum(fine.coefficients**2, axis=(-2, -1)), squares, rtol=1e-12)


def test_a_driver_that_cannot_be_refined_says_so():
    class Straight(rf.driver.AbstractDriver):
        num_functions: int = 1
        integrals = slope = jumps = None

    with pytest.raises(NotImplementedError, match=r"^Straight does not define refined\(\)$"):
        Straight().refined()


@pytest.mark.parametrize("name", ["Karhunen-Loeve", "Legendre"])
def test_moments_of_a_brownian_path_are_exact(name):
    """Var B(1) for both; for Legendre polynomials also the covariance with ∫B and with ∫tB."""
    driver = DRIVERS[name]
    nodes, weights = np.polynomial.legendre.leggauss(40)
    s, weights = (nodes + 1) / 2, weights / 2
    functionals = np.stack(
        [driver.integrals(1.0), weights @ driver.integrals(s), (weights * s) @ driver.integrals(s)]
    )
    # B(1), ∫(1 − t) dB and ∫(1 − t²)/2 dB.
    truth = np.array([[1, 1 / 2, 1 / 3], [1 / 2, 1 / 3, 5 / 24], [1 / 3, 5 / 24, 2 / 15]])
    gap = np.abs(functionals @ functionals.T - truth)
    assert gap[0, 0] < 1e-12
    assert (gap.max() < 1e-12) == (name == "Legendre")


# --------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("shape", [(4, 2), (3, 2, 5)])
def test_wrong_coefficients_are_refused_with_both_shapes(shape):
    with pytest.raises(ValueError, match=r"\(\.\.\., 5, m\)") as caught:
        rf.PiecewiseLinear(5).path(jnp.zeros(shape))
    assert str(caught.value).endswith(f"got {shape}")
    assert "\n" not in str(caught.value)
