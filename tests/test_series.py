"""Transition densities and fits of observed series, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import roughflow as rf
from roughflow.series._observed import panel
from roughflow.series.models._distributions import linear_moments, log_bessel_ie
from roughflow.transition import Bridges

CIR = rf.CoxIngersollRoss(3.0, 0.3, 0.2)
VASICEK = rf.OrnsteinUhlenbeck(2.0, 0.1, 0.5)
PLANE = rf.OrnsteinUhlenbeck([[1.0, 0.4], [-0.3, 0.7]], [0.1, -0.2], [[0.4, 0.0], [0.2, 0.3]])
SPOTS = np.linspace(-2.5, 2.5, 5)[:, None]


def cir_log_prob(sde, x0, x1, dt):
    """By SciPy's noncentral χ²."""
    kappa, mu, sigma = (float(part) for part in (sde.kappa, sde.mu, sde.sigma))
    c = 2 * kappa / (sigma**2 * (1 - np.exp(-kappa * dt)))
    spread = 2 * c * x0 * np.exp(-kappa * dt)
    return np.log(2 * c) + stats.ncx2.logpdf(2 * c * x1, 4 * kappa * mu / sigma**2, spread)


def vasicek_series(sde, count, dt, seed=0):
    """A series drawn from the exact transitions."""
    rng, x = np.random.default_rng(seed), [float(sde.mu)]
    kappa, mu, sigma = (float(part) for part in (sde.kappa, sde.mu, sde.sigma))
    steps = np.broadcast_to(dt, count - 1)
    for step in steps:
        decay = np.exp(-kappa * step)
        spread = sigma * np.sqrt((1 - decay**2) / (2 * kappa))
        x.append(mu + (x[-1] - mu) * decay + spread * rng.normal())
    return np.concatenate([[0.0], np.cumsum(steps)]), np.array(x)


@pytest.mark.parametrize("q", [-0.5, 0.3, 40.0, 700.0])
def test_the_bessel_function_is_scipys(q):
    z = np.array([1.0, 60.0, 600.0, 1900.0, 2100.0, 5e4])
    known = special.ive(q, z) > 0
    expected = np.log(special.ive(q, z[known]))
    found = jax.jit(jax.vmap(log_bessel_ie, (None, 0)))(q, z)[known]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize(
    ("dt", "most"),
    [
        pytest.param(1 / 250, 1e-5, marks=pytest.mark.slow),
        (1 / 12, 2e-4),
        pytest.param(1.0, 5e-3, marks=pytest.mark.slow),
    ],
)
def test_cir_transitions_are_those_of_the_noncentral_chi_square(dt, most, key):
    spread = 0.2 * np.sqrt(0.3 * (1 - np.exp(-6 * dt)) / 6)
    x0, x1 = np.array([0.3]), 0.3 + spread * SPOTS
    expected = cir_log_prob(CIR, 0.3, x1[:, 0], dt)
    np.testing.assert_allclose(rf.transition_log_prob(CIR, x0, x1, dt, key=key), expected, atol=1e-9)
    estimate = rf.transition_estimate(CIR, x0, x1, dt, key=key, exact=False)
    np.testing.assert_allclose(estimate.log_prob, expected, rtol=0, atol=most)
    assert int(estimate.escaped.sum()) == 0


@pytest.mark.slow  # with `make test`, CIR has transitions of this kind
@pytest.mark.parametrize("sde", [VASICEK, PLANE], ids=["line", "plane"])
def test_linear_transitions_need_no_luck(sde, key):
    """All weights are equal, so that the key makes no difference; what n functions leave out falls fast."""
    d = sde.mu.size
    x0, x1 = jnp.full(d, 0.3), 0.2 + 0.2 * SPOTS * np.arange(1, d + 1)
    exact = rf.transition_log_prob(sde, x0, x1, 0.2, key=key)
    effort = rf.transition.Effort(4, 4, 8)
    estimate = rf.transition_estimate(sde, x0, x1, 0.2, key=key, exact=False, effort=effort)
    np.testing.assert_allclose(estimate.log_prob, exact, rtol=0, atol=1e-6)
    np.testing.assert_allclose(estimate.standard_error, 0, atol=1e-6)
    options = {"key": jax.random.key(7), "exact": False, "effort": effort}
    again = rf.transition_log_prob(sde, x0, x1, 0.2, **options)
    np.testing.assert_allclose(again, estimate.log_prob, rtol=0, atol=1e-12)


def test_the_plane_is_that_of_a_matrix_exponential(key):
    """Against Kalman's way: the covariance by quadrature."""
    kappa, sigma = np.asarray(PLANE.kappa), np.asarray(PLANE.sigma)
    s, weights = np.polynomial.legendre.leggauss(30)
    powers = [np.asarray(jax.scipy.linalg.expm(-kappa * 0.25 * (1 + t))) @ sigma for t in s]
    covariance = 0.25 * sum(w * power @ power.T for w, power in zip(weights, powers, strict=True))
    x0, x1 = np.array([0.4, 0.1]), np.array([0.2, 0.3])
    mean = PLANE.mu + np.asarray(jax.scipy.linalg.expm(-kappa * 0.5)) @ (x0 - np.asarray(PLANE.mu))
    expected = stats.multivariate_normal.logpdf(x1, mean, covariance)
    np.testing.assert_allclose(rf.transition_log_prob(PLANE, x0, x1, 0.5, key=key), expected, atol=1e-10)


@jax.jit
def line_and_plane(kappa):
    """log p and its derivative in κ, from the closed form on a line and from that of a matrix."""
    x0, x1, dt = jnp.full(1, 0.3), jnp.full(1, 0.7), jnp.asarray(0.25)
    line = lambda k: rf.OrnsteinUhlenbeck(k, 0.2, 0.4).exact_transition(x0, dt).log_prob(x1)

    def matrix(k):
        change, _, covariance = linear_moments(-k * jnp.eye(1), jnp.full((1, 1), 0.16), dt)
        return jax.scipy.stats.norm.logpdf(x1 - x0, change @ (x0 - 0.2), jnp.sqrt(covariance[0]))[0]

    return jax.value_and_grad(line)(kappa), jax.jvp(matrix, (kappa,), (1.0,))


@pytest.mark.parametrize("kappa", [-1.0, 0.0, 1e-6, 0.02, 3.0])
def test_the_line_is_a_plane_of_one_dimension(kappa):
    """The closed form with its derivative, also where κ is zero or the process explodes."""
    np.testing.assert_allclose(*line_and_plane(kappa), rtol=1e-8)


@pytest.mark.slow  # with `make test`, roots are the coordinates of CIR
@pytest.mark.parametrize(
    ("convert", "coordinates"),
    [(lambda sde: sde, None), (rf.to_stratonovich, rf.transition.Logarithm())],
    ids=["state", "logarithm"],
)
def test_any_coordinates_and_any_calculus_give_one_density(convert, coordinates, key):
    """CIR in the state itself, and as a Stratonovich SDE in its logarithm."""
    x0, x1, dt = np.array([0.3]), np.array([[0.25], [0.36]]), 1 / 12
    expected = cir_log_prob(CIR, 0.3, x1[:, 0], dt)
    effort = rf.transition.Effort(2, 16, 4)
    plain = rf.ParametricSDE(
        lambda t, x, p: p["k"] * (p["m"] - x),
        lambda t, x, p: p["s"] * jnp.sqrt(x)[:, None],
        {"k": 3.0, "m": 0.3, "s": 0.2},
    )
    options = {"effort": effort, "coordinates": coordinates}
    found = rf.transition_log_prob(convert(plain), x0, x1, dt, key=key, **options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_a_transition_is_differentiable_in_the_parameters(key):
    """With `make test` a fit is, whose estimates and standard errors are those of the closed form."""
    x0, x1 = np.array([[0.28], [0.33]]), np.array([[0.31], [0.29]])
    effort = rf.transition.Effort(2, 128, 3)

    def total(kappa, **options):
        sde = rf.CoxIngersollRoss(kappa, 0.3, 0.2)
        return jnp.sum(rf.transition_log_prob(sde, x0, x1, 1 / 12, key=key, **options))

    exact = jax.jacfwd(total)(3.0)
    found = jax.jacfwd(lambda kappa: total(kappa, exact=False, effort=effort))(3.0)
    assert abs(exact) > 0.01
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def series():
    """Irregular times."""
    rng = np.random.default_rng(1)
    return vasicek_series(VASICEK, 400, rng.uniform(0.02, 0.2, 399))


START = rf.OrnsteinUhlenbeck(1.0, 0.3, 0.3)


@pytest.fixture(scope="module")
def fitted(series):
    return rf.fit_sde(START, *series, key=jax.random.key(0))


def test_a_fit_is_that_of_the_closed_form(series, fitted):
    """Exact transitions against SciPy's optimum of the normal likelihood; generic ones against exact ones."""
    times, x = series
    exact = fitted
    # Parameters of a process in single precision; the fit itself is in double precision.
    single = jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), START)
    generic = rf.fit_sde(single, times, x, key=jax.random.key(0), exact=False, num_starts=1)
    assert exact.converged
    assert generic.converged
    assert exact.effort is None
    errors = np.array(list(exact.standard_errors.values()))
    assert np.all(np.abs(exact.estimates - generic.estimates) < 0.01 * errors)
    assert abs(exact.log_likelihood - generic.log_likelihood) < 0.02
    np.testing.assert_allclose(list(generic.standard_errors.values()), errors, rtol=0.05)
    assert np.all(np.abs(exact.estimates - [2.0, 0.1, 0.5]) < 3 * errors)

    def normal(kappa, mu, sigma):
        decay = np.exp(-kappa * np.diff(times))
        spread = sigma * np.sqrt((1 - decay**2) / (2 * kappa))
        return stats.norm.logpdf(x[1:], mu + (x[:-1] - mu) * decay, spread).sum()

    best = normal(*exact.estimates)
    np.testing.assert_allclose(exact.log_likelihood, best, rtol=1e-10)
    for move in np.eye(3):
        curve = [normal(*(exact.estimates + side * 0.1 * errors * move)) for side in (-1, 0, 1)]
        assert curve[1] > max(curve[0], curve[2])
    np.testing.assert_allclose(exact.aic, 6 - 2 * best)
    text = exact.summary()
    assert "kappa" in text
    assert "AIC" in text
    assert "warning" not in text


def test_intervals_respect_domains_and_errors_have_two_kinds(fitted):
    result = fitted
    low, high = result.confint()["sigma"]
    assert 0 < low < result.params["sigma"] < high
    assert set(result.robust_errors) == set(result.standard_errors)
    # The model is right, so both kinds agree.
    ratio = np.array(list(result.robust_errors.values())) / list(result.standard_errors.values())
    assert np.all((ratio > 0.6) & (ratio < 1.6))
    with pytest.raises(ValueError, match="between 0 and 1"):
        result.confint(2.0)


def test_residuals_are_uniform_under_the_model_and_not_under_another(series, fitted):
    result = fitted
    found = result.residuals(key=jax.random.key(1))
    assert found.uniform.shape == (399,)
    assert found.uniformity > 0.01
    assert found.ljung_box > 0.01
    wrong = rf.fit_sde(rf.BrownianMotion(0.0, 0.5), *series, key=jax.random.key(0), num_starts=1)
    assert wrong.residuals(key=jax.random.key(1)).ljung_box < found.ljung_box
    # Vasicek's model is Brownian motion with one more parameter.
    statistic, p = result.likelihood_ratio(wrong)
    assert statistic > 20
    assert p < 1e-3  # by simulation, 1/2001 at least


def test_forecasts_have_the_moments_of_the_model(series, fitted):
    result = fitted
    paths = result.forecast([0.1, 3.0], key=jax.random.key(2), num_paths=4000)
    kappa, mu, sigma = result.estimates
    assert paths.shape == (4000, 2, 1)
    for i, t in enumerate((0.1, 3.0)):
        decay = np.exp(-kappa * t)
        spread = sigma * np.sqrt((1 - decay**2) / (2 * kappa))
        mean = mu + (series[1][-1] - mu) * decay
        assert abs(paths[:, i, 0].mean() - mean) < 4 * spread / 4000**0.5
        np.testing.assert_allclose(paths[:, i, 0].std(), spread, rtol=0.05)


def test_missing_values_are_longer_gaps_and_panels_are_sums(series):
    times, x = series
    key = jax.random.key(0)
    holes = x.copy()
    holes[10:20] = np.nan
    kept = ~np.isnan(holes)
    one = rf.fit_sde(VASICEK, times, holes, key=key, num_starts=1)
    two = rf.fit_sde(VASICEK, times[kept], x[kept], key=key, num_starts=1)
    assert one.params == two.params
    panel = rf.fit_sde(VASICEK, [times[:200], times[200:]], [x[:200], x[200:]], key=key, num_starts=1)
    assert panel.num_transitions == len(x) - 2


def test_dates_count_in_years():
    days = np.datetime64("2020-01-01") + np.arange(100)
    times, x = vasicek_series(VASICEK, 100, 1 / 365.25)
    one = rf.fit_sde(VASICEK, days, x, key=jax.random.key(0), num_starts=1)
    two = rf.fit_sde(VASICEK, times, x, key=jax.random.key(0), num_starts=1)
    np.testing.assert_allclose(one.estimates, two.estimates, rtol=1e-5)


def test_months_and_years_count_as_their_first_days():
    months, x = np.array(["2020-01", "2020-02", "2021-01"], "datetime64[M]"), np.arange(3)
    for times in (months, months.astype("datetime64[ns]"), months.astype("datetime64[D]")):
        np.testing.assert_allclose(panel(times, x)[0].times, [0, 31 / 365.25, 366 / 365.25])
    years = np.array(["2020", "2021", "2022"], "datetime64[Y]")
    np.testing.assert_allclose(panel(years, x)[0].times, [0, 366 / 365.25, 731 / 365.25])


def test_parameters_that_cannot_be_told_apart_are_reported(series):
    """Only the product of two of them matters."""
    twice = rf.ParametricSDE(
        lambda t, x, p: -p["a"] * p["b"] * x,
        lambda t, x, p: p["s"] * jnp.eye(1),
        {"a": 1.0, "b": 2.0, "s": 0.5},
    )
    effort = rf.transition.Effort(2, 2, 2)
    times, x = (part[:100] for part in series)
    result = rf.fit_sde(twice, times, x, key=jax.random.key(0), num_starts=1, effort=effort)
    assert not result.identified
    assert not result.converged
    assert result.unidentified == ("parameters.a", "parameters.b")
    assert "parameters.a and parameters.b are not identified" in result.warning
    assert "not identified" in result.summary()
    assert np.isnan(list(result.standard_errors.values())).all()


@pytest.mark.slow
def test_a_great_change_is_reached_by_the_likeliest_path(key):
    """A rate that falls to a tenth within a quarter: in its logarithm, as CKLS is solved, and in its root."""
    sde, x0, x1 = rf.CKLS(0.02, 0.034, 0.0767, 0.547), np.array([0.0117]), np.array([0.0012])
    values = [
        rf.transition_log_prob(
            sde, x0, x1, 0.25, key=key, effort=rf.transition.Effort(4, 8, 6), coordinates=way
        )
        for way in (None, rf.transition.Root())
    ]
    np.testing.assert_allclose(*values, atol=0.01)


def test_a_transition_too_long_for_its_paths_is_told(key):
    """From one well to the other, or to where it was: by the Fokker–Planck equation −1.993 and 0.364."""
    well = rf.ItoSDE(lambda t, z: z - z**3, lambda t, z: jnp.full((1, 1), 0.7))
    x1, dt = np.array([[1.0], [-1.0]]), np.array([3.0, 0.25])
    with pytest.warns(UserWarning, match="did not reach the tolerance: .* effort of transitions"):
        value = rf.transition_log_prob(
            well, -np.ones(1), x1, dt, key=key, effort=rf.transition.Effort(4, 16, 8)
        )
    assert abs(value[1] - 0.364) < 0.005


WELL = (rf.DoubleWell(1.0, 1.0, 0.5), -1.0, [-1.4, 0.4, 1.0], 2.0, [-1.43373357, -3.48775658, -4.59377573])
JACOBI = (rf.Jacobi(0.5, 0.3, 0.9), 0.1, [0.02, 0.1, 0.3], 0.3, [1.71810945, 0.96952347, -0.11468235])


@pytest.mark.parametrize(
    ("sde", "x0", "x1", "dt", "truth"),
    [WELL, JACOBI],
    ids=["well", "jacobi"],
)
@pytest.mark.slow
def test_error_bars_hold_what_paths_do_not_know(sde, x0, x1, dt, truth, key):
    """The truth by eigenfunctions of the generator: of a double well, and of Jacobi that reaches zero, where
    paths by way of the boundary are missing."""
    options = {"effort": rf.transition.Effort(4, 16, 6), "exact": False}
    found = rf.transition_estimate(sde, np.array([x0]), np.array(x1)[:, None], dt, key=key, **options)
    good = np.abs(found.log_prob - np.array(truth)) < 3 * found.total_error
    assert np.all(good | found.suspect)
    assert not np.all(found.suspect)


def test_the_logarithm_of_a_mean_of_few_weights_is_right_on_average(key):
    """Of lognormal ones: by itself it would be low by half of its variance, 0.012."""
    normal = 0.3 * jax.random.normal(key, (50_000, 4)) - 0.045
    weights = jnp.concatenate([normal, normal], axis=1)  # each with itself as its opposite
    value, error = jax.vmap(lambda w: Bridges(w, jnp.ones(8, bool)).log_mean())(weights)
    assert abs(float(value.mean())) < 0.002
    np.testing.assert_allclose(error.mean(), value.std(), rtol=0.15)
    half = Bridges(jnp.zeros(8), jnp.arange(8) < 4).log_mean()  # their opposites were not found
    np.testing.assert_allclose(half[1], np.log(2), atol=1e-12)


@pytest.mark.slow
def test_a_fit_with_transitions_that_are_too_long_says_so(key):
    """Values of a double well far apart in time: some paths from one well to the other are not found."""
    values = np.array([-1.0, 1.0, -1.0, 1.0, -0.9, 0.9])
    well = rf.ParametricSDE(lambda t, x, p: x - x**3, lambda t, x, p: p["s"] * jnp.eye(1), {"s": 0.7})
    options = {
        "domains": {"s": rf.series.Domain(lower=0.0)},
        "effort": rf.transition.Effort(4, 16, 8),
        "num_starts": 1,
    }
    result = rf.fit_sde(well, 3.0 * np.arange(6), values, key=key, **options)
    assert (
        "transition densities are inaccurate, because their time steps are too long: raise effort"
        in result.warning
    )
