"""Where paths are drawn: laws with the density they say they have, draws with honest error bars, tails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import AMORTISED, THREE, linear, ou, ou_law
from scipy import integrate, linalg, stats

import roughflow as rf
from roughflow.density._amortised import DiagonalLaw
from roughflow.density._estimate import from_log_weights
from roughflow.density._laplace import TangentLaw
from roughflow.density._pareto import pareto_k
from roughflow.density._prior import PriorLaw
from roughflow.density._proposal import SPARE, free_part
from roughflow.density._sampler import Sampler

# ---------------------------------------------------------------------- laws of the free coordinates

SIZE = 4


def frames(key, d, near=None, by=0.7):
    """Two sets of d orthonormal rows in four dimensions; the second ones near the given ones."""
    matrix = jax.random.normal(key, (2, SIZE, d))
    matrix = matrix if near is None else jnp.swapaxes(near, 1, 2) + by * matrix
    return jnp.swapaxes(jnp.linalg.qr(matrix)[0], 1, 2)


def tangent(d, wide, fell_back):
    rows = frames(jax.random.key(d), d)
    centre = jax.random.normal(jax.random.key(9), (2, SIZE))
    full = lambda flag: jnp.full(2, flag)
    return TangentLaw(centre, frames(jax.random.key(5), d, rows), rows, full(fell_back), full(wide))


def diagonal(d):
    mean, log_scale = 0.5 * jax.random.normal(jax.random.key(7), (2, 2, SIZE))
    return DiagonalLaw(mean, log_scale, frames(jax.random.key(d), d), jnp.zeros(2, bool))


LAWS = {
    "tangent": lambda d: tangent(d, False, False),
    "wide": lambda d: tangent(d, True, False),
    "fallen back": lambda d: tangent(d, False, True),
    "wide, fallen back": lambda d: tangent(d, True, True),
    "diagonal": diagonal,
    "prior": lambda d: PriorLaw(frames(jax.random.key(d), d), jnp.zeros(2, bool)),
}
every_law = pytest.mark.parametrize("name", LAWS)
every_rank = pytest.mark.parametrize("d", [1, 2])


@every_rank
@every_law
def test_a_law_has_the_density_it_says(name, d, key):
    """E_q[g/q] is the mass of g, which is one: for a normal g in the bulk of q and for one off its middle."""
    law = LAWS[name](d)
    delta = law.sample(jax.random.normal(key, (2, 100_000, SIZE + SPARE)))
    np.testing.assert_allclose(jnp.einsum("bij,bkj->bki", law.rows, delta), 0, atol=1e-12)
    for rows, points, log_q in zip(law.rows, delta, law.log_prob(delta), strict=True):
        flat = points @ linalg.null_space(rows)
        covariance = np.cov(flat, rowvar=False)
        for size, shift in ((0.6, 0.0), (0.4, 1.0)):
            middle = flat.mean(axis=0) + shift * np.linalg.cholesky(covariance).sum(axis=1)
            ratio = np.exp(stats.multivariate_normal(middle, size**2 * covariance).logpdf(flat) - log_q)
            error = ratio.std() / np.sqrt(ratio.size)
            assert abs(ratio.mean() - 1) < 4 * error
            assert error < 0.03


@every_rank
@every_law
def test_a_guess_has_the_free_coordinates_it_was_asked_for(name, d, key):
    law = LAWS[name](d)
    delta = law.sample(jax.random.normal(key, (2, 3, SIZE + SPARE)))
    np.testing.assert_allclose(free_part(law.rows, law.guess(delta)), delta, atol=1e-12)


@every_rank
def test_the_guess_of_a_tangent_law_lies_in_the_tangent_space(d, key):
    """So that on a linear SDE it is the solution."""
    law = LAWS["tangent"](d)
    delta = law.sample(jax.random.normal(key, (2, 3, SIZE + SPARE)))
    offset = law.guess(delta) - law.centre[:, None]
    np.testing.assert_allclose(jnp.einsum("bij,bkj->bki", law.normal, offset), 0, atol=1e-12)


def test_only_the_points_that_ask_for_it_are_widened():
    law = LAWS["tangent"](1).widen(jnp.array([False, True]))
    np.testing.assert_array_equal(law.wide, [False, True])
    np.testing.assert_array_equal(law.widen(jnp.array([False, False])).wide, [False, True])


def test_an_amortised_proposal_for_another_flow_is_refused(key):
    two = linear(-np.eye(2), np.eye(2), rf.Normal(jnp.zeros(2)))
    fewer = ou(driver=rf.KarhunenLoeve(2))
    for flow in (two, fewer):
        with pytest.raises(ValueError, match=r"^the proposal was made for 1 dim[^\n]*rf\.Amortised\(flow"):
            flow.estimate(jnp.zeros(flow.dimension), key=key, estimator=rf.PullBack(2, AMORTISED))


# ---------------------------------------------------------------------------------- random numbers


DRAWS = {"Independent": rf.Independent(), "Antithetic": rf.Antithetic(), "Sobol": rf.Sobol()}
every_draw = pytest.mark.parametrize("name", DRAWS)


@every_draw
def test_the_standard_error_of_every_kind_of_draws_is_honest(name, key):
    """The same x two hundred times over, each time with numbers of its own."""
    x = np.full((200, 1), 0.9)
    estimate = ou().estimate(x, key=key, estimator=rf.PullBack(256, rf.Prior(DRAWS[name])))
    error = np.exp(estimate.log_prob - ou_law(driver=THREE).logpdf(x)) - 1
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(200)
    assert 0.7 < np.sqrt(np.mean((error / estimate.standard_error) ** 2)) < 1.4
    assert error.std() < {"Independent": 0.2, "Antithetic": 0.2, "Sobol": 0.05}[name]


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
    """Of eight groups of eight, each has one number in every eighth of the normal law."""
    every = numbers(rf.Sobol(), key, np.arange(64)).reshape(8, 8, 3)
    eighths = np.sort(np.floor(8 * stats.norm.cdf(every)), axis=1)
    np.testing.assert_array_equal(eighths, np.broadcast_to(np.arange(8)[:, None], (8, 8, 3)))


def test_numbers_of_paths_that_do_not_make_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"^num_paths must be even[^\n]*got 7$"):
        rf.Antithetic().group(7)
    for count in (7, 24, 4):
        with pytest.raises(ValueError, match=rf"^num_paths must be 8 times a power of two, got {count}$"):
            rf.Sobol().group(count)
    with pytest.raises(ValueError, match=r"^replicates must be at least 2"):
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
    """Student's law with two degrees of freedom, made from normal numbers as if it were normal."""

    def log_prob(self, z):
        return jnp.sum(jax.scipy.stats.t.logpdf(z, 2.0, self.loc, self.scale))


def test_a_proposal_that_is_too_narrow_is_widened(key):
    """A start with heavy tails: far out the tangent law looks in the wrong place, the wide one everywhere."""
    flow = rf.StochasticFlow(ou().sde, Student(jnp.zeros(1)), 1.0, THREE, integrator=ou().integrator)
    x, estimator = np.array([[0.0], [4.0], [6.0], [8.0]]), rf.PullBack(256, rf.Laplace())
    sampler = Sampler(estimator, flow, x, key)
    narrow = from_log_weights(sampler.all_log_weights().T, 1, sampler.law.fell_back)
    wide = flow.estimate(x, key=key, estimator=estimator)
    # The sum of e⁻¹ Z₀ and a normal number, by quadrature.
    noise = np.sqrt(ou_law(scale=0.0, driver=THREE).cov[0, 0])
    given = lambda z, x: stats.t.pdf(z, 2) * stats.norm.pdf(x, np.exp(-1.0) * z, noise)
    density = [integrate.quad(given, -60, 60, (v,), points=[0, v * np.e], limit=500)[0] for v in x[:, 0]]
    truth = np.log(density)
    assert np.all(narrow.pareto_k > 0.7)
    assert np.all(wide.pareto_k < narrow.pareto_k)
    before, after = np.abs(narrow.log_prob - truth), np.abs(wide.log_prob - truth)
    assert np.all(after < before)
    assert np.all(after < 4 * wide.standard_error)
