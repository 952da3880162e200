"""Densities from the Fokker–Planck equation on a mesh, against closed forms and another discretisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fokker_planck import transition_density
from problems import LogNormal
from scipy import linalg, stats
from scipy.integrate import quad_vec

import roughflow as rf
from roughflow.density._grid import MAX_WORK, Expansion, Work, estimate

KEY = jax.random.key(0)
MATRICES = {
    "full": ([[-1.0, 0.8], [-0.6, -0.5]], [[0.7, 0.2], [0.0, 0.5]]),
    "degenerate": ([[0.0, 1.0], [-1.0, -0.5]], [[0.0], [0.8]]),
}


def linear_sde(matrix, noise):
    matrix, noise = jnp.asarray(matrix), jnp.asarray(noise)
    return rf.ItoSDE(lambda t, z: matrix @ z, lambda t, z: noise)


def linear_moments(matrix, noise, span, start=None):
    """Mean and covariance from a point, or from a standard normal start."""
    matrix, noise = np.asarray(matrix), np.asarray(noise)
    flow = lambda s: linalg.expm(matrix * s)
    covariance = quad_vec(lambda s: flow(s) @ noise @ noise.T @ flow(s).T, 0, span)[0]
    if start is None:
        return np.zeros(len(matrix)), covariance + flow(span) @ flow(span).T
    return flow(span) @ start, covariance


def ring_points(mean, covariance, reach=5.25, count=12):
    """Points from the mean to where the density is 1e-6 of its maximum."""
    radius, angle = np.meshgrid(np.linspace(0, reach, count), np.linspace(0, 6, count))
    units = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1, 2)
    return mean + units @ np.linalg.cholesky(covariance).T


def check(flow, x, truth, start=None, error=1e-3):
    """log p within 1e-3 wherever p exceeds 1e-6 of its maximum, and within its error bar."""
    x, truth = x[truth > truth.max() - 13.8], truth[truth > truth.max() - 13.8]
    estimator = rf.density.Grid(start=start)
    estimate = flow.estimate(jnp.asarray(x), key=KEY, estimator=estimator, tolerance=1e-3)
    gap = np.abs(np.asarray(estimate.log_prob) - truth)
    assert gap.max() < error
    assert np.all(estimate.total_error < error)
    assert np.mean(gap <= estimate.total_error + 1e-9) > 0.95
    assert np.all(gap <= 3 * estimate.total_error + 1e-9)
    assert estimate.warning is None


# From a point in two dimensions, `make test` has noise that turns with the state.
FROM_A_POINT = [pytest.param((1.0, 0.5), kind, marks=pytest.mark.slow) for kind in MATRICES]


@pytest.mark.parametrize(("start", "kind"), [*((None, kind) for kind in MATRICES), *FROM_A_POINT])
def test_linear_sdes_have_normal_densities(kind, start):
    mean, covariance = linear_moments(*MATRICES[kind], 1.0, start)
    flow = rf.StochasticFlow(linear_sde(*MATRICES[kind]), rf.Normal(jnp.zeros(2)))
    x = ring_points(mean, covariance)
    check(flow, x, stats.multivariate_normal(mean, covariance).logpdf(x), start and jnp.asarray(start))


def test_geometric_brownian_motion_from_a_point():
    sde = rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.3 * z[:, None])
    x = np.exp(np.linspace(-1.6, 1.6, 60))
    truth = stats.lognorm(0.3, scale=np.exp(0.1 - 0.045)).logpdf(x)
    check(rf.StochasticFlow(sde, rf.Normal(jnp.ones(1))), x[:, None], truth, jnp.ones(1))


@pytest.mark.slow  # with `make test`, from a point
def test_geometric_brownian_motion_from_a_distribution():
    """The box of a skewed base and that of the density move apart faster than a frame can follow."""
    sde = rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.3 * z[:, None])
    flow = rf.StochasticFlow(sde, LogNormal(jnp.zeros(1), 0.2 * jnp.ones(1)))
    x = np.exp(np.linspace(-1.9, 2.0, 60))
    check(flow, x[:, None], stats.lognorm(np.hypot(0.3, 0.2), scale=np.exp(0.055)).logpdf(x))


def reference(drift, start, width, span):
    """Points and log-densities by finite volumes, extrapolated in the size of the cells."""
    middle = 0 if callable(start) else start
    ends = (middle - width, middle + width)
    coarse, fine = (transition_density(drift, 1.0, ends, start, span, size) for size in (401, 1203))
    density = (9 * fine[1][1::3] - coarse[1]) / 8
    return coarse[0][::8, None], np.log(np.maximum(density[::8], 1e-300))


@pytest.mark.parametrize(
    ("drift", "width"),
    [
        pytest.param(lambda z: z - z**3, 4.5, id="slope 1", marks=pytest.mark.slow),
        pytest.param(lambda z: 9 * (z - z**3), 2.6, id="slope 9"),
        pytest.param(lambda z: 2 * jnp.sin(2 * z), 6.0, id="sine", marks=pytest.mark.slow),
    ],
)
def test_nonlinear_sdes_from_a_point(drift, width):
    sde = rf.ItoSDE(lambda t, z: drift(z), lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    x, truth = reference(lambda z: np.asarray(drift(z)), 0.4, width, 1.0)
    check(flow, x, truth, jnp.array([0.4]))


@pytest.mark.slow  # with `make test`, from a point
def test_noise_that_turns_from_a_distribution():
    """Rotations, also by noise, do not change a round density."""
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    noise = lambda t, z: jnp.stack([jnp.array([0.4, 0.0]), jnp.array([0.0, 0.4]), 0.8 * (turn @ z)], axis=1)
    drift = lambda t, z: (-0.2 - 0.5 * 0.8**2) * z + 1.1 * (turn @ z)
    flow = rf.StochasticFlow(rf.ItoSDE(drift, noise), rf.Normal(jnp.zeros(2), 0.5), t1=0.5)
    # Without the rotation this is an Ornstein–Uhlenbeck process, of the same round density.
    variance = 0.25 * np.exp(-0.2) + 0.16 * (1 - np.exp(-0.2)) / 0.4
    x = ring_points(np.zeros(2), variance * np.eye(2), count=8)
    check(flow, x, stats.multivariate_normal(np.zeros(2), variance).logpdf(x))


def test_noise_that_turns_with_the_state_from_a_point():
    """In the Itô sense it is that of a linear SDE, however fast it turns."""
    swirl = np.array([[-0.2, -1.1], [1.1, -0.2]])

    def noise(t, z):
        cos, sin = jnp.cos(2.6 * z[0]), jnp.sin(2.6 * z[0])
        return 0.4 * jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])

    sde = rf.ItoSDE(lambda t, z: jnp.asarray(swirl) @ z, noise)
    start, variance = np.array([1.0, 0.0]), 0.16 * (1 - np.exp(-0.4)) / 0.4
    normal = stats.multivariate_normal(linalg.expm(swirl) @ start, variance * np.eye(2))
    x = jnp.array([[0.4, 0.7], [0.0, 1.0], [0.8, 0.3], [-0.2, 0.4], [0.9, 1.2]])
    estimate = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2))).estimate(x, key=KEY, start=start)
    assert np.all(estimate.total_error < 0.02)
    assert np.all(np.abs(estimate.log_prob - normal.logpdf(x)) <= estimate.total_error)


@pytest.fixture
def work(monkeypatch):
    """The work of an estimate, part by part."""
    parts, spend = [], Work.spend
    monkeypatch.setattr(Work, "spend", lambda self, part: parts.append(part) or spend(self, part))
    return parts


def test_points_out_of_reach_take_no_more_work_than_there_is(work):
    """A budget bounds the work, and what it does not resolve is refused."""
    sde = rf.ItoSDE(lambda t, z: 0.3 * z, lambda t, z: 0.6 * z[:, None])
    flow = rf.StochasticFlow(sde, LogNormal(jnp.zeros(1), 0.5 * jnp.ones(1)))
    value, error = estimate(flow, jnp.array([[-1.0], [1.5]]), 0.02, max_work=MAX_WORK / 10)
    assert sum(work[:-1]) <= MAX_WORK / 10
    assert np.isnan(value[0])
    assert np.isinf(error[0])
    truth = stats.lognorm(np.hypot(0.5, 0.6), scale=np.exp(0.12)).logpdf(1.5)
    assert np.isinf(error[1]) or abs(value[1] - truth) < error[1]


@pytest.mark.slow  # with `make test`, a budget bounds the work
def test_hopeless_densities_are_given_up_early(work):
    """In a steep field the first, coarse solution is the last."""
    drift, noise = lambda t, z: 2 * jnp.tanh(60 * jnp.sin(4 * z[::-1])), lambda t, z: 0.1 * jnp.eye(2)
    flow = rf.StochasticFlow(rf.ItoSDE(drift, noise), rf.Normal(jnp.zeros(2)), t1=0.1)
    _, error = estimate(flow, jnp.array([[0.3, 0.1]]), 1e-3)
    assert sum(work[:-1]) <= 0.1 * MAX_WORK
    assert error[0] > 1e-3


def test_typical_points_take_less_work_than_points_in_the_tails(work):
    """Only densities as low as those at the given points are resolved."""
    sde = rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.3 * z[:, None])
    flow, spent = rf.StochasticFlow(sde, LogNormal(jnp.zeros(1), 0.2 * jnp.ones(1))), []
    for x in (np.exp([-0.5, 0.6]), np.exp([-1.8, 0.6, 1.9])):
        value, error = estimate(flow, jnp.asarray(x)[:, None], 1e-3)
        truth = stats.lognorm(np.hypot(0.3, 0.2), scale=np.exp(0.055)).logpdf(x)
        assert np.all(np.abs(value - truth) <= 3 * error)
        assert np.all(error <= 1e-3)
        spent.append(sum(work) - sum(spent))
    assert spent[0] < 0.2 * spent[1]


@pytest.mark.parametrize("damping", [0.0, 30.0, 5000.0])
@pytest.mark.parametrize("frequency", [0.5, 40.0, 800.0])
def test_expansions_of_the_exponential(damping, frequency):
    expansion = Expansion.of(damping, frequency, 1e-13)
    real, imaginary = np.meshgrid(np.linspace(-damping, 0, 9), np.linspace(-frequency, frequency, 9))
    exponent = real + 1j * imaginary
    z = (exponent / expansion.repeats + expansion.centre) / expansion.scale
    before, now, total = 0 * z, np.ones_like(z), 0 * z
    for coefficient, ratio in expansion.terms.reshape(-1, 2):
        before, now, total = now, z * now - ratio * before, total + coefficient * now
    assert np.allclose(total**expansion.repeats, np.exp(exponent), atol=1e-9)


def test_double_well_from_a_distribution():
    drift = lambda z: 9 * (z - z**3)
    sde = rf.ItoSDE(lambda t, z: drift(z), lambda t, z: jnp.eye(1))
    x, truth = reference(drift, stats.norm(0, 0.3).pdf, 2.0, 0.5)
    check(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), 0.3), t1=0.5), x, truth)


@pytest.mark.parametrize("ends", [pytest.param((0, 0.3), marks=pytest.mark.slow), (0.4, 0.45)])
def test_noise_that_jumps_in_time(ends):
    """Also for a short while."""
    noise = lambda t, z: jnp.where((t >= ends[0]) & (t < ends[1]), 2.0, 0.2) * jnp.eye(1)
    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: 0 * z, noise), rf.Normal(jnp.zeros(1), 0.5))
    x = np.linspace(-3, 3, 9)
    check(flow, x[:, None], stats.norm(0, np.sqrt(0.29 + 3.96 * (ends[1] - ends[0]))).logpdf(x))


def test_gradients_match_differences():
    x = jnp.array([[0.3], [1.2], [-0.5]])

    def value(theta, x):
        drift = lambda t, z: theta[0] * jnp.sin(z) - z
        noise = lambda t, z: theta[1] * (1 + 0.3 * jnp.cos(z))[:, None]
        flow = rf.StochasticFlow(rf.ItoSDE(drift, noise), rf.Normal(jnp.zeros(1), jnp.exp(theta[2])))
        return flow.estimate(x, key=KEY, estimator=rf.density.Grid(), tolerance=1e-5).log_prob

    theta, h = jnp.array([0.8, 0.6, 0.1]), 1e-3
    slope, slope_x = jax.grad(lambda *a: jnp.sum(value(*a)), (0, 1))(theta, x)
    for i in range(3):
        ahead, behind = value(theta.at[i].add(h), x), value(theta.at[i].add(-h), x)
        assert np.isclose(slope[i], np.sum(ahead - behind) / (2 * h), rtol=1e-4)
    # Points do not touch one another, so all are moved at once.
    difference = (value(theta, x + h) - value(theta, x - h)) / (2 * h)
    assert np.allclose(slope_x[:, 0], difference, rtol=1e-4, atol=0)


def test_units_do_not_matter():
    def value(x, c):
        drift = lambda t, z: c * jnp.sin(z[::-1] / c[::-1])
        noise = lambda t, z: jnp.diag(c * (1 + 0.2 * jnp.cos(z / c)))
        flow = rf.StochasticFlow(rf.ItoSDE(drift, noise), rf.Normal(jnp.zeros(2), c), t1=0.5)
        return flow.estimate(x * c[None], key=KEY, estimator=rf.density.Grid())

    x = jnp.array([[0.5, -1.0], [2.0, 1.0]])
    plain = value(x, jnp.ones(2))
    for unit in (1e-9, 1e9):
        other = value(x, jnp.array([unit, 1.0]))
        assert np.allclose(other.log_prob + np.log(unit), plain.log_prob, atol=1e-6)
        assert np.allclose(other.total_error, plain.total_error, rtol=0.1)


def test_single_precision_is_solved_in_double_precision():
    matrix, noise = MATRICES["full"]
    mean, covariance = linear_moments(matrix, noise, 1.0)
    x = ring_points(mean, covariance, reach=4, count=4)
    truth = stats.multivariate_normal(mean, covariance).logpdf(x)
    with jax.enable_x64(False):
        flow = rf.StochasticFlow(linear_sde(matrix, noise), rf.Normal(jnp.zeros(2)))
        value = lambda x: flow.estimate(x, key=KEY, estimator=rf.density.Grid(tolerance=1e-4))
        estimate = value(jnp.asarray(x, jnp.float32))
        slope = jax.grad(lambda x: jnp.sum(value(x).log_prob))(jnp.asarray(x, jnp.float32))
    assert estimate.log_prob.dtype == estimate.total_error.dtype == slope.dtype == jnp.float32
    assert np.allclose(estimate.log_prob, truth, atol=1e-5)
    assert np.allclose(slope, -(x - mean) @ np.linalg.inv(covariance), atol=1e-4)


def test_points_outside_the_box_are_not_guessed():
    flow = rf.StochasticFlow(linear_sde([[-1.0]], [[1.0]]), rf.Normal(jnp.zeros(1)))
    estimate = flow.estimate(jnp.array([[0.0], [40.0], [8.0]]), key=KEY, estimator=rf.density.Grid())
    assert np.array_equal(np.isfinite(estimate.total_error), [True, False, False])
    assert np.array_equal(np.isnan(estimate.log_prob), [False, True, True])
    assert "estimates are not finite" in estimate.warning


def test_refusals():
    grid, x = rf.density.Grid(), jnp.zeros(1)
    still = rf.ItoSDE(lambda t, z: -z, rf.sde.NoDiffusion())
    noisy = lambda d: rf.StochasticFlow(linear_sde(-np.eye(d), np.eye(d)), rf.Normal(jnp.zeros(d)))
    with pytest.raises(ValueError, match="a grid needs one or two dimensions, got 3"):
        noisy(3).estimate(jnp.zeros(3), key=KEY, estimator=grid)
    with pytest.raises(ValueError, match="a grid needs noise"):
        rf.StochasticFlow(still, rf.Normal(jnp.zeros(1))).estimate(x, key=KEY, estimator=grid)
    bounded = rf.StochasticFlow(rf.CoxIngersollRoss(1.0, 0.3, 0.2), rf.Normal(jnp.ones(1), 0.01))
    with pytest.raises(ValueError, match="a grid needs a state space without boundaries"):
        bounded.estimate(x + 0.3, key=KEY, estimator=grid)
    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    fractional = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)), driver=rf.driver.FractionalLegendre(0.7, 4))
    with pytest.raises(ValueError, match="a grid needs Brownian motion"):
        fractional.estimate(x, key=KEY, estimator=grid)
    with pytest.raises(TypeError, match="call it outside of jit and vmap"):
        jax.jit(lambda x: noisy(1).log_prob(x, key=KEY, estimator=grid))(x)
