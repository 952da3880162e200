"""Markov chains have the distributions they are meant to have."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from problems import CAUCHY, cauchy_cdf, kolmogorov

import roughflow as rf
from roughflow.sde import noise_matrix

SPREAD = lambda t, z: jnp.sqrt(1 + z**2)[:, None]


class MetropolisHastings(rf.mcmc.AbstractSampler):
    """`rf.AdjustedSampler` by its formula, with dense matrices."""

    sde: rf.sde.AbstractItoSDE
    dt: float

    def init(self, z):
        return rf.mcmc.SamplerState(z)

    def check(self, z):
        del z

    def step(self, key, state):
        key_move, key_accept = jax.random.split(key)
        at = lambda y: (y + self.dt * self.sde.drift(0.0, y), noise_matrix(self.sde.noise(0.0, y)))
        kick = self.dt**0.5 * jax.random.normal(key_move, state.z.shape)
        mean, sigma = at(state.z)
        there = rf.mcmc.SamplerState(mean + sigma @ kick)
        log_q = lambda y, mean, sigma: jax.scipy.stats.multivariate_normal.logpdf(
            y, mean, self.dt * sigma @ sigma.T
        )
        log_p = self.sde.log_density
        ratio = log_p(there.z) + log_q(state.z, *at(there.z)) - log_p(state.z) - log_q(there.z, mean, sigma)
        acceptance = jnp.exp(jnp.minimum(ratio, 0))
        accepted = jax.random.uniform(key_accept) < acceptance
        moved = rf.mcmc.SamplerState(jnp.where(accepted, there.z, state.z))
        return moved, rf.mcmc.SamplerInfo(accepted, acceptance)


LOWER = np.eye(3) + 0.3 * np.tril(np.ones((3, 3)))
TURN = lambda t, z: jnp.array([[0.0, 1, 0], [-1, 0, 2], [0, -2, 0]])
NOISES = {
    "diagonal": (rf.ConstantDiffusion(jnp.array([0.5, 1, 2])), TURN),
    "matrix": (rf.ConstantDiffusion(LOWER), None),
    "turned": (rf.ConstantDiffusion(LOWER), TURN),
    "diagonal, by coordinate": (lambda t, z: lx.DiagonalLinearOperator(jnp.sqrt(1 + z**2)), None),
    "diagonal, mixed": (lambda t, z: lx.DiagonalLinearOperator(jnp.sqrt(1 + z**2 + z[::-1] ** 2)), TURN),
    "general": (lambda t, z: LOWER * (1 + 0.3 * jnp.cos(z))[None] + jnp.outer(z, z) / 20, TURN),
}


COVERED = ("turned", "diagonal, by coordinate", "diagonal", "matrix")  # by "general" and "diagonal, mixed"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COVERED)) for name in NOISES]
)
def test_a_step_is_the_same_whatever_is_known_of_its_noise(name, key):
    diffusion, skew = NOISES[name]
    sde = rf.targeted_sde(lambda z: -0.5 * z @ z - 0.1 * jnp.sum(z**4), diffusion, skew)
    keys, z = jax.random.split(key, 40), 0.7 * jax.random.normal(key, (40, 3))
    run = lambda sampler: jax.jit(jax.vmap(lambda k, z: sampler.step(k, sampler.init(z))))(keys, z)
    (state, info), (expected, told) = run(rf.AdjustedSampler(sde, 0.1)), run(MetropolisHastings(sde, 0.1))
    np.testing.assert_allclose(state.z, expected.z, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(info.acceptance, told.acceptance, rtol=1e-10)
    assert 0.1 < np.mean(info.acceptance) < 0.99


def test_constant_noise_costs_what_mala_costs():
    """Nothing in a step is as large as a matrix, and with a full one nothing is solved."""
    bell = lambda z: -0.5 * jnp.sum(z**2)

    def program(scale):
        sampler = rf.AdjustedSampler(rf.overdamped_langevin(bell, 30, scale=scale), 0.1)
        step = lambda z: sampler.step(jax.random.key(0), sampler.init(z))[0].z
        return str(jax.make_jaxpr(step)(jnp.ones(30)))

    for scale in (1.0, jnp.ones(30)):
        assert "30,30" not in program(scale)
    full = program(jnp.eye(30))
    assert full.count("dot_general") == 3  # at the start, forth, and at the new place
    assert "custom_linear_solve" not in full
    assert "while" not in full


def test_adjusted_chains_with_noise_that_depends_on_the_state_have_the_cauchy_distribution(key):
    """A wrong proposal ratio (σ's determinant left out, say) would show in the tails."""
    sampler = rf.AdjustedSampler(rf.targeted_sde(CAUCHY, SPREAD), dt=1.5)
    chain = rf.sample_chain(sampler, jnp.zeros((500, 1)), key=key, num_steps=200, burn_in=200, thin=10)
    assert chain.samples.shape == (500, 20, 1)
    assert chain.num_gradients == 400
    assert 0.3 < chain.acceptance.mean() < 0.9
    # 10,000 values, neighbours somewhat alike: 0.0136 would be the 5 % point if they were independent.
    assert kolmogorov(chain, cauchy_cdf) < 0.025


@pytest.mark.slow
def test_adjusted_chains_have_the_distribution_of_a_correlated_gaussian_with_a_random_network(key):
    covariance = np.array([[1.0, 0.9], [0.9, 2.0]])
    precision = jnp.asarray(np.linalg.inv(covariance))
    noise, skew = rf.FullDiffusion(2, width=8, key=key), rf.sde.SkewNetwork(2, width=8, key=key)
    sampler = rf.AdjustedSampler(rf.targeted_sde(lambda z: -0.5 * z @ precision @ z, noise, skew), dt=0.3)
    chain = rf.sample_chain(sampler, jnp.zeros((200, 2)), key=key, num_steps=500, burn_in=100, thin=5)
    found = np.cov(np.reshape(chain.samples, (-1, 2)).T)
    np.testing.assert_allclose(found, covariance, atol=0.12)


@pytest.mark.slow
def test_unadjusted_langevin_has_the_variance_that_euler_gives_it(key):
    """dZ = −½Z dt + dB in steps of h keeps 1/(1 − h/4), not 1."""
    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 1)
    chain = rf.sample_chain(sde, jnp.zeros((400, 1)), key=key, num_steps=400, dt=1.0, burn_in=50)
    np.testing.assert_allclose(np.var(chain), 1 / (1 - 1.0 / 4), rtol=0.03)


@pytest.mark.slow
def test_the_implicit_scheme_keeps_a_stiff_gaussian_at_any_step(key):
    target = lambda z: -0.5 * (z[0] ** 2 + 1e3 * z[1] ** 2)
    sde = rf.overdamped_langevin(target, 2)
    sampler = rf.UnadjustedSampler(sde, 2.0, rf.flow.LinearlyImplicitEuler())
    chain = rf.sample_chain(sampler, jnp.zeros((400, 2)), key=key, num_steps=800, burn_in=800, thin=40)
    np.testing.assert_allclose(np.std(chain, axis=(0, 1)), [1, 1e3**-0.5], rtol=0.05)
    with pytest.warns(UserWarning, match="^2 of 2 chains diverged: reduce dt"):
        rf.sample_chain(sde, jnp.ones((2, 2)), key=key, num_steps=500, dt=2.0)


def test_minibatches_are_right_on_average_and_reach_the_posterior(key):
    data = 1 + jax.random.normal(key, (200,))
    target = rf.mcmc.Minibatch(
        lambda z: -0.5 * z @ z, lambda z, y: -0.5 * (y - z[0]) ** 2, data, batch_size=20
    )
    z = jnp.array([0.4])
    guesses = jax.vmap(lambda k: target.draw(key=k)(z))(jax.random.split(key, 4000))
    np.testing.assert_allclose(guesses.mean(), target(z), atol=4 * float(guesses.std()) / 4000**0.5)
    assert guesses.std() > 1
    chain = rf.sample_chain(
        rf.overdamped_langevin(target, 1), jnp.zeros((64, 1)), key=key, num_steps=500, dt=1e-3, burn_in=200
    )
    np.testing.assert_allclose(np.mean(chain), float(data.sum()) / 201, atol=0.02)


@pytest.mark.slow
def test_minibatches_are_seen_inside_a_friction_too(key):
    data = 1 + jax.random.normal(key, (200,))
    target = rf.mcmc.Minibatch(
        lambda z: -0.5 * z @ z, lambda z, y: -0.5 * (y - z[0]) ** 2, data, batch_size=20
    )
    friction = rf.sde.sghmc(target, 1, friction=5.0)
    moved = rf.sample_chain(friction, jnp.zeros((4, 2)), key=key, num_steps=10, dt=1e-3)
    exact = rf.sde.sghmc(lambda z: target(z), 1, friction=5.0)
    still = rf.sample_chain(exact, jnp.zeros((4, 2)), key=key, num_steps=10, dt=1e-3)
    assert not np.allclose(moved.samples, still.samples, atol=1e-6)


def test_one_start_is_one_chain_and_the_same_key_the_same_chain(key):
    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    chain, again = (rf.sample_chain(sde, jnp.zeros(2), key=key, num_steps=7, dt=0.1) for _ in range(2))
    assert chain.samples.shape == (7, 2)
    assert np.array_equal(chain, again)
    numpy_counts = {"num_steps": np.int64(7), "burn_in": np.int64(0), "thin": np.int64(1)}
    assert np.array_equal(chain, rf.sample_chain(sde, jnp.zeros(2), key=key, dt=0.1, **numpy_counts))


def test_a_warm_up_too_short_to_find_a_spread_is_refused(key):
    """One chain in two dimensions: six places are the least its covariance can come from."""
    bell = lambda z: -0.5 * z @ z
    for steps in (1, 8, 16, 43):
        with pytest.raises(ValueError, match=r"^num_steps must be at least 44 for 1 chains in 2 dimensions"):
            rf.warm_up(bell, jnp.zeros((1, 2)), key=key, num_steps=steps)


@pytest.mark.parametrize(("chains", "steps"), [(1, 44), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_a_warm_up_just_long_enough_finds_one(chains, steps, key):
    sampler, z = rf.warm_up(lambda z: -0.5 * z @ z, jnp.zeros((chains, 2)), key=key, num_steps=steps)
    assert np.all(np.isfinite(z))
    widths = np.linalg.svd(sampler.sde.diffusion.matrix, compute_uv=False)
    assert 0.01 < widths.min() < widths.max() < 10


def test_chains_that_stood_still_do_not_make_the_noise_vanish(key):
    """A target as narrow as this refuses the first moves, and the scale stays what it was."""
    needle = lambda z: -0.5e12 * z @ z
    sampler, _ = rf.warm_up(needle, jnp.zeros((4, 1)), key=key, num_steps=8, climb=False)
    assert float(sampler.sde.diffusion.matrix[0, 0]) == 1


def test_warm_up_finds_the_scale_of_an_ill_conditioned_gaussian(key):
    """Condition number 10⁴, correlated: σσᵀ comes near the covariance, acceptance near 0.574."""
    root = jnp.array([[100.0, 0.0], [0.7, 1.0]])
    precision = jnp.asarray(np.linalg.inv(root @ root.T))
    start = jax.random.normal(key, (16, 2))
    sampler, z = rf.warm_up(lambda z: -0.5 * z @ precision @ z, start, key=key, num_steps=4000)
    found = sampler.sde.diffusion.matrix @ sampler.sde.diffusion.matrix.T
    np.testing.assert_allclose(found[0, 0], 1e4, rtol=0.3)
    np.testing.assert_allclose(found[1, 1], 1.49, rtol=0.3)
    chain = rf.sample_chain(sampler, z, key=key, num_steps=2000)
    assert 0.45 < chain.acceptance.mean() < 0.7
    np.testing.assert_allclose(np.std(chain, axis=(0, 1)), [100, 1.49**0.5], rtol=0.1)
    with pytest.raises(ValueError, match=r"^z0 must have shape \(chains, d\), got \(2,\)$"):
        rf.warm_up(lambda z: -z @ z, jnp.zeros(2), key=key)


MINIBATCH = rf.mcmc.Minibatch(lambda z: -z @ z, lambda z, y: y, jnp.zeros(3), batch_size=1)
BAD = {
    "minibatch": (
        lambda: rf.overdamped_langevin(MINIBATCH, 1),
        r"got rf\.mcmc\.Minibatch: use rf\.UnadjustedSampler",
    ),
    "NaN": (
        lambda: rf.targeted_sde(lambda z: jnp.sqrt(z[0] - 5), SPREAD),
        r"^log_density is nan at the start",
    ),
    "skew": (
        lambda: rf.targeted_sde(CAUCHY, SPREAD, lambda t, z: jnp.ones((1, 1))),
        r"^skew must return a 1 × 1 matrix with Qᵀ = −Q, got \[\[1.0\]\]",
    ),
    "still": (
        lambda: rf.overdamped_langevin(CAUCHY, 1, scale=0.0),
        r"^AdjustedSampler needs a nonsingular σ, got a singular one at the start \[0.0\]",
    ),
    "square": (
        lambda: rf.targeted_sde(CAUCHY, lambda t, z: jnp.ones((1, 3))),
        r"^AdjustedSampler needs as many noise components as dimensions, got σ of shape \(1, 3\): "
        r"use rf.UnadjustedSampler",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_targets_are_refused_in_one_line(name, key):
    build, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        rf.sample_chain(rf.AdjustedSampler(build(), dt=0.1), jnp.zeros(1), key=key, num_steps=3)


DENSITIES = {
    "shape": (lambda z: -(z**2), r"^log_density must return one number for z of shape \(2,\), got \(2,\)"),
    "NumPy": (
        lambda z: -np.sum(np.asarray(z) ** 2),
        r"^log_density, which must use jax.numpy, fails for z of",
    ),
    "branch": (lambda z: -z @ z if z[0] > 0 else 0.0, r"^log_density, which must use jax.numpy, fails"),
    "index": (
        lambda z: -(z[5] ** 2),
        r"^log_density, .* fails for z .*: index 5 is out of bounds",
    ),
}


@pytest.mark.parametrize("name", list(DENSITIES))
def test_a_wrong_log_density_is_named_in_one_line(name, key):
    """JAX would clamp the index and sample from another density."""
    log_density, message = DENSITIES[name]
    sampler = rf.AdjustedSampler(rf.overdamped_langevin(log_density, 2), 0.1)
    with pytest.raises(ValueError, match=message):
        rf.sample_chain(sampler, jnp.zeros(2), key=key, num_steps=3)


def test_a_step_size_is_one_number():
    with pytest.raises(ValueError, match=r"^dt must be one number, got an array of shape \(2,\)"):
        rf.AdjustedSampler(rf.overdamped_langevin(lambda z: -z @ z, 2), jnp.ones(2))


def test_chains_that_cannot_move_are_reported(key):
    """At a cusp, where the gradient is infinite, all proposals are rejected."""
    cusp = lambda z: -jnp.sqrt(jnp.abs(z[0]))
    sampler = rf.AdjustedSampler(rf.overdamped_langevin(cusp, 1), 0.5)
    with pytest.warns(UserWarning, match="^1 of 2 chains accept fewer than 1% of the proposals: reduce dt"):
        rf.sample_chain(sampler, jnp.array([[0.0], [1.0]]), key=key, num_steps=50)
