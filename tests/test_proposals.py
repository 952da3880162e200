"""Where paths are drawn: mixtures with the density they say they have, honest error bars, tails."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import AMORTISED, SHAKEN, THREE, linear, linear_distribution, ou, ou_distribution
from scipy import integrate, stats

import roughflow as rf
from roughflow.density import Mixture, _paths

# ---------------------------------------------------------------------- mixtures of coefficients

WIDTH, DIMENSION, BATCH = 3, 2, 2


@functools.partial(jax.jit, static_argnames=("components", "tilted", "seed"))
def mixture(components, prior=0.0, scale=1.0, tilted=True, seed=7):
    """Mixtures of three coefficients for two points, each with directions across its plane."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (BATCH, components)
    directions = jax.random.normal(keys[0], (*shape, DIMENSION + WIDTH, DIMENSION))
    # Near (I, 0), so that the start sees every plane.
    directions = (0.5 if tilted else 0.0) * directions + jnp.eye(DIMENSION + WIDTH, DIMENSION)[None, None]
    return Mixture(
        1.2 * jax.random.normal(keys[1], (*shape, WIDTH)),
        scale * jnp.exp(0.2 * jax.random.normal(keys[2], (*shape, WIDTH))),
        jnp.swapaxes(jnp.linalg.qr(directions)[0], 2, 3),
        jax.nn.log_softmax(jax.random.normal(keys[3], shape)),
        jnp.full(BATCH, prior),
    )


@jax.jit
def log_prob(distribution, omega):
    return distribution.log_prob(omega)


def learned():
    """The distribution of a network with a tilt, one dimension and three coefficients."""
    x = jnp.array([[0.3], [-1.5]])
    return SHAKEN.distribution(ou(), x, None)


MIXTURES = {
    "one": lambda: mixture(1, tilted=False),
    "one, tilted": lambda: mixture(1),
    "three": lambda: mixture(3),
    "three, wide": lambda: mixture(3, scale=1.6),
    "three, with the prior": lambda: mixture(3, prior=0.3),
    "prior": lambda: mixture(2, prior=1.0),
    "learned": learned,
}


@jax.jit
def drawn(distribution, noise):
    omega = distribution.sample(noise)
    return omega, distribution.log_prob(omega)


def noise(key, distribution, count):
    return jax.random.normal(key, (BATCH, count, distribution.num_normals))


ALIKE = ("one", "one, tilted", "three", "three, wide", "prior")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in MIXTURES]
)
def test_a_mixture_has_the_density_it_says(name, key):
    """E_q[g/q] is the mass of g, which is one: for a normal g in the bulk of q and for one off its middle."""
    distribution = MIXTURES[name]()
    omega, density = drawn(distribution, noise(key, distribution, 100_000))
    for points, log_q in zip(omega, density, strict=True):
        covariance = np.cov(points, rowvar=False)
        for size, shift in ((0.6, 0.0), (0.4, 1.0)):
            middle = points.mean(axis=0) + shift * np.linalg.cholesky(covariance).sum(axis=1)
            ratio = np.exp(stats.multivariate_normal(middle, size**2 * covariance).logpdf(points) - log_q)
            error = ratio.std() / np.sqrt(ratio.size)
            assert abs(ratio.mean() - 1) < 4 * error
            assert error < 0.03


def test_a_tilted_mixture_has_the_precision_of_a_plane_seen_along_the_start():
    """Its density at two points, from I + GᵀG with G = N₀⁻¹N₁."""
    distribution = mixture(1, scale=1.6)
    omega = jax.random.normal(jax.random.key(1), (BATCH, 2, WIDTH))
    for i in range(BATCH):
        start, path = np.split(np.asarray(distribution.normal[i, 0]), [DIMENSION], axis=1)
        slope = np.linalg.solve(start, path)
        scale = np.diag(distribution.scale[i, 0])
        covariance = scale @ np.linalg.inv(np.eye(WIDTH) + slope.T @ slope) @ scale
        truth = stats.multivariate_normal(distribution.centre[i, 0], covariance).logpdf(omega[i])
        np.testing.assert_allclose(log_prob(distribution, omega)[i], truth, rtol=1e-10)


def test_a_share_of_the_prior_bounds_the_weights(key):
    """Nowhere is the distribution less than that share of the prior."""
    distribution = mixture(3, scale=0.05).with_prior(0.3)
    omega = 3 * jax.random.normal(key, (BATCH, 1000, WIDTH))
    normal = np.sum(stats.norm.logpdf(omega), axis=-1)
    assert np.all(log_prob(distribution, omega) > normal + math.log(0.3) - 1e-9)
    np.testing.assert_array_equal(mixture(1, prior=0.5).with_prior(0.3).prior, 0.5)


def test_an_amortised_proposal_for_another_flow_is_refused(key):
    two = linear(-np.eye(2), np.eye(2), rf.Normal(jnp.zeros(2)))
    fewer = ou(driver=rf.KarhunenLoeve(2))
    for flow in (two, fewer):
        with pytest.raises(ValueError, match=r"^the proposal was made for 1 dim[^\n]*rf\.Amortised\(flow"):
            flow.estimate(jnp.zeros(flow.dimension), key=key, estimator=rf.PullBack(2, AMORTISED))


def test_an_amortised_proposal_draws_the_functions_it_was_not_made_for_from_the_prior(key):
    """So that a flow trained on three functions can be asked about with six."""
    x, omega = jnp.array([[0.3], [-1.5]]), jax.random.normal(key, (2, 5, 6))
    distribution = SHAKEN.distribution(ou(driver=rf.KarhunenLoeve(6)), x, None)
    added = np.sum(stats.norm.logpdf(omega[..., 3:]), axis=-1)
    np.testing.assert_allclose(
        log_prob(distribution, omega), log_prob(learned(), omega[..., :3]) + added, rtol=1e-10
    )


# ---------------------------------------------------------------------------------- random numbers


DRAWS = {"Independent": rf.density.Independent(), "Sobol": rf.density.Sobol()}
every_draw = pytest.mark.parametrize("name", DRAWS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Sobol")) for name in DRAWS]
)
@pytest.mark.slow  # with `make test`, gaps of a linear SDE are within error bars
def test_the_standard_error_of_every_kind_of_draws_is_honest(name, key):
    """The same x two hundred times over, each time with numbers of its own."""
    x = np.full((200, 1), 0.9)
    estimator = rf.PullBack(256, rf.Prior(DRAWS[name]))
    estimate = ou().estimate(x, key=key, estimator=estimator)
    error = estimate.log_prob - ou_distribution(driver=THREE).logpdf(x)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(200)
    assert 0.6 < np.sqrt(np.mean((error / estimate.standard_error) ** 2)) < 1.4
    assert error.std() < {"Independent": 0.2, "Sobol": 0.07}[name]  # half as much


def numbers(draws, key, places, size=3, most=4096):
    return np.asarray(draws.normal(key, jnp.asarray(places), most, size, jnp.dtype("float64")))


@pytest.mark.parametrize("name", ["Sobol", pytest.param("Independent", marks=pytest.mark.slow)])
def test_numbers_belong_to_a_place_and_are_normal(name, key):
    """Whichever places are asked for together; at other places, and with another key, others."""
    draws, places = DRAWS[name], np.arange(4096)
    every = numbers(draws, key, places)
    np.testing.assert_array_equal(numbers(draws, key, places[100:200]), every[100:200])
    assert len(np.unique(every)) == every.size
    assert not np.any(np.isin(numbers(draws, jax.random.key(3), places), every))
    for column in every.T:
        assert stats.kstest(column[::2], "norm").pvalue > 1e-3
    np.testing.assert_allclose(np.corrcoef(every[::2].T), np.eye(3), atol=0.1)


def test_sobol_numbers_are_spread_evenly_in_each_shift(key):
    """Of sixteen shifts of eight numbers, each has one in every eighth of the normal distribution; terms of
    the standard error are means over a shift."""
    every = numbers(rf.density.Sobol(16), key, np.arange(128))
    eighths = np.sort(np.floor(8 * stats.norm.cdf(every.reshape(8, 16, 3))), axis=0)
    np.testing.assert_array_equal(eighths, np.broadcast_to(np.arange(8)[:, None, None], (8, 16, 3)))
    assert np.all(np.abs(rf.density.Sobol(16).terms(every)) < np.abs(stats.norm.ppf(1 / 16)))


@pytest.mark.parametrize("name", ["Sobol", pytest.param("Independent", marks=pytest.mark.slow)])
def test_a_sequence_extends_itself(name, key):
    """The first 64 numbers are the same, whether 64 or 256 are to follow."""
    places = np.arange(64)
    few, many = (numbers(DRAWS[name], key, places, most=most) for most in (64, 4 * 64))
    np.testing.assert_array_equal(few, many)


def test_numbers_of_paths_that_do_not_make_whole_groups_are_refused():
    for count in (7, 48, 8):
        with pytest.raises(ValueError, match=rf"^num_paths must be 16 times a power of two, got {count}"):
            rf.density.Sobol(16).check(count)
    with pytest.raises(ValueError, match=r"^num_replicates must be at least 2"):
        rf.density.Sobol(1)


# ---------------------------------------------------------------------------------- tails of weights


class Student(rf.Normal):
    """Student's distribution with two degrees of freedom, made from normal numbers as if it were normal."""

    def log_prob(self, z):
        return jnp.sum(jax.scipy.stats.t.logpdf(z, 2.0, self.loc, self.scale))


@pytest.mark.slow
def test_a_start_with_heavy_tails(key):
    """Far out the tangent looks in the wrong place. The prior's share, more paths or particles find it."""
    flow = rf.StochasticFlow(ou().sde, Student(jnp.zeros(1)), 1.0, THREE, integrator=ou().integrator)
    x = np.array([[0.0], [4.0], [6.0], [8.0]])
    noise = np.sqrt(ou_distribution(scale=0.0).cov[0, 0])
    # The sum of e⁻¹ Z₀ and a normal number, by quadrature.
    given = lambda z, x: stats.t.pdf(z, 2) * stats.norm.pdf(x, np.exp(-1.0) * z, noise)
    density = [integrate.quad(given, -60, 60, (v,), points=[0, v * np.e], limit=500)[0] for v in x[:, 0]]
    for estimator in (None, rf.PullBack(1024, rf.Laplace())):
        estimate = flow.estimate(x, key=key, estimator=estimator)
        right = np.abs(estimate.log_prob - np.log(density)) < 3 * estimate.total_error
        assert np.all(right | np.asarray(estimate.suspect))
        assert not np.any(estimate.suspect[:2])


# ---------------------------------------------------------------------------------- control variates


def test_paths_around_the_likeliest_are_exact_on_a_linear_sde(key):
    """In spite of the prior's share of them: what is left to chance is regressed out."""
    flow = linear(np.array([[-1.0, 0.8], [0.3, -0.5]]), 0.7 * np.eye(2), rf.Normal(jnp.zeros(2)))
    x = np.array([[0.2, -0.3], [3.0, 2.0]])
    truth = linear_distribution(
        np.array([[-1.0, 0.8], [0.3, -0.5]]), 0.7 * np.eye(2), np.zeros(2), np.eye(2), THREE
    ).logpdf(x)
    estimate = flow.estimate(x, key=key, estimator=rf.PullBack(64, rf.Laplace()))
    np.testing.assert_allclose(estimate.log_prob, truth, rtol=0, atol=1e-7)
    assert np.all(estimate.standard_error < 1e-7)


def test_a_control_variate_keeps_the_mean_and_is_left_where_it_would_spoil_it():
    """Weights that are a constant, a multiple of the control and some noise: the noise is left."""
    rng = np.random.default_rng(0)
    control = rng.choice([0.5, 3.0], p=[0.8, 0.2], size=(4096, 2))
    weights = 1 + 0.3 * (control - 1) + 0.01 * rng.normal(size=(4096, 2))
    left = _paths._regressed(weights, control, lambda a: a, np)
    assert np.all(np.abs(left.mean(axis=0) - 1) < 4 * 0.01 / 64)
    assert np.all(left.std(axis=0) < 0.011)
    control = np.array([[3.0, 3.0]] * 7 + [[1.5, 1.5]])
    weights = np.where(control > 2, 1.0, 1e-9)
    np.testing.assert_array_equal(_paths._regressed(weights, control, lambda a: a, np), weights)
