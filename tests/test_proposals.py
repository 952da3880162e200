"""Where paths are drawn: mixtures with the density they say they have, honest error bars, tails."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import AMORTISED, SHAKEN, THREE, linear, ou, ou_distribution
from roughflow.density.estimators._weights import EstimatorRun
from roughflow.density.proposals import SPARE, Mixture
from roughflow.density.surface import Latent
from scipy import integrate, stats

import roughflow as rf
from roughflow.density import _pareto
from roughflow.density._estimate import from_log_weights

# ---------------------------------------------------------------------- mixtures of coefficients

WIDTH, DIMENSION, BATCH = 3, 2, 2
pareto_k = jax.jit(_pareto.pareto_k)


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
        jnp.zeros(BATCH, bool),
        jnp.zeros(BATCH, bool),
    )


@jax.jit
def log_prob(distribution, omega):
    return distribution.log_prob(omega)


def learned():
    """The distribution of a network with a tilt, one dimension and three coefficients."""
    x = jnp.array([[0.3], [-1.5]])
    return SHAKEN.distribution(Latent(ou()), x, None, None)


MIXTURES = {
    "one": lambda: mixture(1, tilted=False),
    "one, tilted": lambda: mixture(1),
    "three": lambda: mixture(3),
    "three, wide": lambda: mixture(3, scale=1.6),
    "three, with the prior": lambda: mixture(3, prior=0.3),
    "prior": lambda: mixture(2, prior=1.0),
    "defended": lambda: mixture(3).defended().narrowed(jnp.array([False, True])),
    "learned": learned,
}


@jax.jit
def drawn(distribution, noise):
    omega = distribution.sample(noise)
    return omega, distribution.log_prob(omega)


def noise(key, distribution, count):
    return jax.random.normal(key, (BATCH, count, distribution.normal.shape[-1] + SPARE))


ALIKE = ("one", "three", "three, wide", "prior")


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


def test_a_path_has_no_coefficients_without_noise():
    """The distribution of nothing has density one."""
    distribution = rf.Prior().distribution(Latent(still()), jnp.zeros((3, 2)), None, None)
    omega = distribution.sample(jnp.zeros((3, 1, 2 + SPARE)))
    assert omega.shape == (3, 1, 0)
    np.testing.assert_array_equal(log_prob(distribution, omega), np.zeros((3, 1)))


def still():
    return rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, rf.NoDiffusion()), rf.Normal(jnp.zeros(2)))


@pytest.mark.parametrize(
    "name", [pytest.param("three", marks=pytest.mark.slow), "three, with the prior", "learned"]
)
def test_a_move_along_a_component_keeps_its_distribution(name, key):
    """Draws of the whole distribution, reweighted by the ratio that the move returns, still follow the
    distribution: E of the ratio times q(ω′)/q(ω) is one, and so is a mean under it."""
    distribution = MIXTURES[name]()
    keys = jax.random.split(key)
    both = [noise(k, distribution, 50_000) for k in keys]

    @jax.jit
    def move(distribution, first, second):
        omega = distribution.sample(first)
        moved, ratio = distribution.autoregress(omega, second, jnp.full((BATCH, 50_000, 1), 0.6))
        return omega, moved, distribution.log_prob(moved) - distribution.log_prob(omega) + ratio

    omega, moved, log_ratio = move(distribution, *both)
    assert np.all(np.abs(moved - omega) > 0)
    accept = np.exp(np.minimum(log_ratio, 0))
    # Metropolis and Hastings: the mean of any f after the move is that before it.
    for f in (
        lambda a: a[..., 0],
        lambda a: jnp.sum(a**2, axis=-1),
        lambda a: jnp.cos(a[..., 0] + 2 * a[..., 1]),
    ):
        change = accept * (f(moved) - f(omega))
        error = change.std(axis=1) / np.sqrt(change.shape[1])
        assert np.all(np.abs(change.mean(axis=1)) < 4 * error)
        assert np.all(error < 0.02)


def test_a_mixture_of_one_component_accepts_every_move_along_it(key):
    """Nothing but that component is to be kept."""
    distribution = mixture(1)
    omega = distribution.sample(noise(key, distribution, 50))
    moved, ratio = distribution.autoregress(
        omega, noise(jax.random.key(1), distribution, 50), jnp.full((BATCH, 50, 1), 0.3)
    )
    np.testing.assert_allclose(
        log_prob(distribution, moved) - log_prob(distribution, omega) + ratio, 0, atol=1e-10
    )


def test_only_the_points_that_need_it_are_defended():
    distribution, where = mixture(2), jnp.array([False, True])
    defended = distribution.defended().narrowed(where)
    np.testing.assert_allclose(defended.prior, [0.3, 0.0])
    np.testing.assert_allclose(defended.scale[0] / distribution.scale[0], 1.15)
    np.testing.assert_allclose(defended.scale[1], distribution.scale[1], rtol=1e-15)
    # What was missed is the prior's alone.
    lost = eqx.tree_at(lambda d: d.missed, distribution, jnp.array([True, True])).defended()
    np.testing.assert_array_equal(lost.prior, [1.0, 1.0])
    np.testing.assert_array_equal(lost.narrowed(where).prior, [1.0, 1.0])


def test_a_share_of_the_prior_bounds_the_weights(key):
    """Nowhere is a defended distribution less than three tenths of the prior."""
    distribution = mixture(3, scale=0.05).defended()
    omega = 3 * jax.random.normal(key, (BATCH, 1000, WIDTH))
    normal = np.sum(stats.norm.logpdf(omega), axis=-1)
    assert np.all(log_prob(distribution, omega) > normal + math.log(0.3) - 1e-9)


def test_an_amortised_proposal_for_another_flow_is_refused(key):
    two = linear(-np.eye(2), np.eye(2), rf.Normal(jnp.zeros(2)))
    fewer = ou(driver=rf.KarhunenLoeve(2))
    for flow in (two, fewer):
        with pytest.raises(ValueError, match=r"^the proposal was made for 1 dim[^\n]*rf\.Amortised\(flow"):
            flow.estimate(jnp.zeros(flow.dimension), key=key, estimator=rf.PullBack(2, AMORTISED))


def test_an_amortised_proposal_draws_the_functions_it_was_not_made_for_from_the_prior(key):
    """So that a flow trained on three functions can be asked about with six."""
    x, omega = jnp.array([[0.3], [-1.5]]), jax.random.normal(key, (2, 5, 6))
    distribution = SHAKEN.distribution(Latent(ou(driver=rf.KarhunenLoeve(6))), x, None, None)
    added = np.sum(stats.norm.logpdf(omega[..., 3:]), axis=-1)
    np.testing.assert_allclose(
        log_prob(distribution, omega), log_prob(learned(), omega[..., :3]) + added, rtol=1e-10
    )


# ---------------------------------------------------------------------------------- random numbers


DRAWS = {"Independent": rf.Independent(), "Antithetic": rf.Antithetic(), "Sobol": rf.Sobol()}
every_draw = pytest.mark.parametrize("name", DRAWS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Sobol")) for name in DRAWS]
)
def test_the_standard_error_of_every_kind_of_draws_is_honest(name, key):
    """The same x two hundred times over, each time with numbers of its own."""
    x = np.full((200, 1), 0.9)
    estimator = rf.PullBack(256, rf.Prior(DRAWS[name]))
    estimate = ou().estimate(x, key=key, estimator=estimator, solver=False)
    error = estimate.log_prob - ou_distribution(driver=THREE).logpdf(x)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(200)
    assert 0.7 < np.sqrt(np.mean((error / estimate.standard_error) ** 2)) < 1.4
    assert error.std() < {"Independent": 0.2, "Antithetic": 0.2, "Sobol": 0.07}[name]  # half as much


def numbers(draws, key, places, count=64, size=3):
    group = draws.group(count)
    return np.asarray(draws.normal(key, jnp.asarray(places), group, size, jnp.float64))


@every_draw
def test_numbers_belong_to_a_place_and_are_normal(name, key):
    """Whichever places are asked for together; at other places, and with another key, others."""
    draws, places = DRAWS[name], np.arange(4096)
    every = numbers(draws, key, places)
    np.testing.assert_array_equal(numbers(draws, key, places[100:200]), every[100:200])
    assert len(np.unique(np.abs(every[::2]))) == every[::2].size
    assert not np.any(np.isin(numbers(draws, jax.random.key(3), places), every))
    for column in every.T:
        assert stats.kstest(column[::2], "norm").pvalue > 1e-3
    np.testing.assert_allclose(np.corrcoef(every[::2].T), np.eye(3), atol=0.1)


def test_antithetic_numbers_are_opposite_in_pairs(key):
    every = numbers(rf.Antithetic(), key, np.arange(64))
    np.testing.assert_array_equal(every[::2], -every[1::2])


def test_sobol_numbers_are_spread_evenly_in_each_group(key):
    """Of eight groups of eight, each has one number in every eighth of the normal distribution."""
    every = numbers(rf.Sobol(), key, np.arange(64)).reshape(8, 8, 3)
    eighths = np.sort(np.floor(8 * stats.norm.cdf(every)), axis=1)
    np.testing.assert_array_equal(eighths, np.broadcast_to(np.arange(8)[:, None], (8, 8, 3)))


def test_numbers_of_paths_that_do_not_make_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"^num_paths must be even[^\n]*got 7"):
        rf.Antithetic().group(7)
    for count in (7, 24, 4):
        with pytest.raises(ValueError, match=rf"^num_paths must be 8 times a power of two, got {count}"):
            rf.Sobol().group(count)
    with pytest.raises(ValueError, match=r"^num_replicates must be at least 2"):
        rf.Sobol(1)


# ---------------------------------------------------------------------------------- tails of weights


@pytest.mark.parametrize("k", [0.2, 0.5, 1.0])
def test_pareto_k_is_the_shape_of_a_pareto_tail(k):
    weights = np.random.default_rng(0).pareto(1 / k, (100_000, 2)) + 1
    np.testing.assert_allclose(pareto_k(jnp.log(weights)), k, rtol=0, atol=0.1)
    # A common factor, however large, is not a tail.
    np.testing.assert_allclose(pareto_k(jnp.log(weights) + 2000.0), pareto_k(jnp.log(weights)), rtol=1e-6)


def test_pareto_k_of_few_equal_or_no_weights(key):
    assert np.all(np.isnan(pareto_k(jax.random.normal(key, (24, 2)))))
    assert np.all(np.isfinite(pareto_k(jax.random.normal(key, (25, 2)))))
    np.testing.assert_array_equal(pareto_k(jnp.full((100, 2), -3.0)), -np.inf)
    np.testing.assert_array_equal(pareto_k(jnp.full((100, 2), -jnp.inf)), -np.inf)


class Student(rf.Normal):
    """Student's distribution with two degrees of freedom, made from normal numbers as if it were normal."""

    def log_prob(self, z):
        return jnp.sum(jax.scipy.stats.t.logpdf(z, 2.0, self.loc, self.scale))


@pytest.mark.slow
def test_a_proposal_that_is_too_narrow_is_widened(key):
    """A start with heavy tails: far out the tangent looks in the wrong place, a wide one everywhere."""
    flow = rf.StochasticFlow(ou().sde, Student(jnp.zeros(1)), 1.0, THREE, integrator=ou().integrator)
    x, estimator = np.array([[0.0], [4.0], [6.0], [8.0]]), rf.PullBack(256, rf.Laplace())
    run = EstimatorRun(estimator, flow, x, key)
    assert np.all(run.distribution.prior == 0.3)
    plain = run.distribution.narrowed(jnp.ones_like(run.distribution.missed))
    run.distribution = eqx.tree_at(lambda d: d.scale, plain, jnp.ones_like(plain.scale))
    narrow = from_log_weights(run.all_log_weights().T, 1, run.missed)
    wide = flow.estimate(x, key=key, estimator=estimator, solver=False)
    # The sum of e⁻¹ Z₀ and a normal number, by quadrature.
    noise = np.sqrt(ou_distribution(scale=0.0, driver=THREE).cov[0, 0])
    given = lambda z, x: stats.t.pdf(z, 2) * stats.norm.pdf(x, np.exp(-1.0) * z, noise)
    density = [integrate.quad(given, -60, 60, (v,), points=[0, v * np.e], limit=500)[0] for v in x[:, 0]]
    truth = np.log(density)
    assert np.all(narrow.pareto_k > 0.7)
    assert np.all(wide.pareto_k < narrow.pareto_k)
    before, after = np.abs(narrow.log_prob - truth), np.abs(wide.log_prob - truth)
    assert np.all(after[1:] < before[1:])
    assert np.all(after < 4 * wide.standard_error)
