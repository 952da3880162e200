"""SDEs that leave a given distribution as it is, whatever their noise: the Fokker–Planck equation says so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

GAUSS = np.random.default_rng(0).normal(size=(10, 10)) / 10**0.5
PRECISION = np.linalg.inv(GAUSS @ GAUSS.T + 0.1 * np.eye(10))


def mixture(z):
    return jnp.logaddexp(-0.5 * jnp.sum((z - 1.5) ** 2), np.log(0.4) - jnp.sum((z + 1) ** 2))


TARGETS = {
    "cauchy": (1, lambda z: -jnp.log1p(z[0] ** 2)),
    "banana": (2, lambda z: -0.5 * z[0] ** 2 - 0.25 * (z[1] + z[0] ** 2) ** 2),
    "gaussian": (10, lambda z: -0.5 * z @ PRECISION @ z),
    "mixture": (2, mixture),
}


@eqx.filter_jit
def stationary_residual(sde, log_density, z):
    """∇·(μp − ½ ∇·(σσᵀp))/p at z, by exact derivatives: zero if p is invariant."""
    t = jnp.zeros(())

    def flux(y):
        p = lambda x: jnp.exp(log_density(x) - jax.lax.stop_gradient(log_density(z)))

        def spread(x):
            sigma = sde.noise(t, x)
            sigma = sigma.as_matrix() if hasattr(sigma, "as_matrix") else sigma
            return sigma @ sigma.T * p(x)

        return sde.drift(t, y) * p(y) - 0.5 * jnp.trace(jax.jacfwd(spread)(y), axis1=1, axis2=2)

    return jnp.trace(jax.jacfwd(flux)(z))


@eqx.filter_jit
def random_sde(dimension, log_density, key):
    """Random networks for σ and Q, of a size that matters."""
    keys = jax.random.split(key)
    diagonal = rf.DiagonalDiffusion(1, width=8, key=keys[0])
    full = rf.FullDiffusion(max(dimension, 2), width=8, key=keys[0])
    skew = rf.sde.SkewNetwork(dimension, width=8, key=keys[1]) if dimension > 1 else None
    return rf.targeted_sde(log_density, diagonal if dimension == 1 else full, skew)


class Corrupted(eqx.Module):
    """A drift that is off by a little."""

    sde: rf.sde.AbstractItoSDE

    def __call__(self, t, z):
        return self.sde.drift(t, z) + 1e-4 * z


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "banana")) for name in TARGETS],
)
def test_the_target_is_invariant_whatever_the_networks(name, key):
    dimension, log_density = TARGETS[name]
    sde = random_sde(dimension, log_density, key)
    points = 1.5 * jax.random.normal(key, (32, dimension))
    residual = eqx.filter_jit(
        lambda sde: jax.vmap(lambda z: stationary_residual(sde, log_density, z))(points)
    )
    assert np.max(np.abs(residual(sde))) < 1e-8
    corrupted = rf.ItoSDE(Corrupted(sde), sde.diffusion)
    assert np.max(np.abs(residual(corrupted))) > 1e-6
    if dimension > 1:  # without its divergence the skew part is no longer harmless
        plain = rf.targeted_sde(log_density, sde.diffusion)
        without = lambda t, z: plain.drift(t, z) + sde.skew(t, z) @ jax.grad(log_density)(z)
        assert np.max(np.abs(residual(rf.ItoSDE(without, sde.diffusion)))) > 1e-3


def test_the_printed_drift_of_the_cauchy_sampler_misses_the_cauchy_distribution():
    """Hodgkinson et al. (2020) print −2σ²x/(1+x²) + ½σ′ for −σ²x/(1+x²) + σσ′."""
    _, log_density = TARGETS["cauchy"]
    sigma = lambda t, z: jnp.sqrt(1 + z**2)[:, None]
    printed = lambda t, z: -2 * z + 0.5 * z / jnp.sqrt(1 + z**2)
    z = jnp.array([0.7])
    assert abs(stationary_residual(rf.ItoSDE(printed, sigma), log_density, z)) > 0.1
    np.testing.assert_allclose(rf.targeted_sde(log_density, sigma).drift(0.0, z), 0, atol=1e-12)


@pytest.mark.parametrize("build", [rf.underdamped_langevin, rf.sde.sghmc])
def test_momenta_keep_the_distribution_of_the_place(build):
    """π(q) exp(−p²/2M) is invariant; with gradient noise left out of the kicks it is not."""
    _, log_density = TARGETS["banana"]
    sde = build(log_density, 2, friction=1.7, mass=0.6)
    joint = lambda z: log_density(z[:2]) - 0.5 * z[2:] @ z[2:] / 0.6
    z = jnp.array([0.3, -1.2, 0.8, 0.4])
    assert abs(stationary_residual(sde, joint, z)) < 1e-12
    np.testing.assert_allclose(sde.drift(jnp.zeros(()), z)[:2], z[2:] / 0.6)
    if build is rf.sde.sghmc:
        weaker = build(log_density, 2, friction=1.7, mass=0.6, gradient_noise=0.5)
        assert abs(stationary_residual(weaker, joint, z)) > 0.1
        with pytest.raises(ValueError, match=r"^gradient_noise must lie between 0 and friction, got 2"):
            build(log_density, 2, friction=1.7, gradient_noise=2)


def test_a_preconditioner_is_a_matrix():
    scale = jnp.array([[1.0, 0.0], [0.5, 2.0]])
    _, log_density = TARGETS["banana"]
    sde = rf.overdamped_langevin(log_density, 2, scale=scale)
    z = jnp.array([0.3, -1.2])
    np.testing.assert_allclose(sde.drift(0.0, z), 0.5 * scale @ scale.T @ jax.grad(log_density)(z))


def test_a_flow_of_a_targeted_sde_trains_one_copy_of_its_noise(key):
    """Were σ held by drift and diffusion each, training would move them apart."""
    sde = rf.targeted_sde(TARGETS["cauchy"][1], rf.DiagonalDiffusion(1, width=4, key=key))
    count = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(sde, eqx.is_array)))
    assert count == sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(sde.diffusion, eqx.is_array)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    assert flow.sample(key=key, shape=(3,)).shape == (3, 1)
    assert rf.to_ito(sde) is sde


def test_a_log_density_that_is_not_a_number_is_refused(key):
    sde = rf.targeted_sde(lambda z: -0.5 * z**2, lambda t, z: jnp.eye(2))
    with pytest.raises(
        ValueError, match=r"log_density must return one number for z of shape \(2,\), got \(2,\)"
    ):
        rf.sample_chain(sde, jnp.zeros(2), key=key, num_steps=3, dt=0.1)


@pytest.mark.parametrize("name", ["cauchy", pytest.param("banana", marks=pytest.mark.slow)])
def test_a_score_will_do_in_place_of_a_log_density(name, key):
    dimension, log_density = TARGETS[name]
    known = random_sde(dimension, log_density, key)
    sde = rf.targeted_sde(diffusion=known.diffusion, skew=known.skew, score=jax.grad(log_density))
    points = jax.random.normal(key, (8, dimension))
    drifts = lambda sde: jax.jit(jax.vmap(lambda z: sde.drift(0.0, z)))(points)
    np.testing.assert_allclose(drifts(sde), drifts(known), rtol=1e-12)
    z = 0.1 * jnp.ones(dimension)
    for build in (rf.AdjustedSampler, rf.mcmc.FlowSampler):
        with pytest.raises(TypeError, match=r" needs the log density, but its target has only a score"):
            build(sde, 0.1)
    chain = rf.sample_chain(rf.UnadjustedSampler(sde, 0.01), z, key=key, num_steps=3)
    assert np.all(np.isfinite(chain.samples))


def test_a_target_is_one_thing(key):
    noise = rf.ConstantDiffusion(jnp.eye(2))
    with pytest.raises(TypeError, match=r"^pass exactly one of log_density and score"):
        rf.targeted_sde(diffusion=noise)
    with pytest.raises(TypeError, match=r"^pass exactly one of log_density and score"):
        rf.targeted_sde(lambda z: -z @ z, noise, score=lambda z: -z)
    with pytest.raises(TypeError, match=r"^targeted_sde needs a diffusion"):
        rf.targeted_sde(lambda z: -z @ z)
    with pytest.raises(ValueError, match=r"^score must return shape \(2,\) .* got \(\)"):
        rf.targeted_sde(diffusion=noise, score=lambda z: -z @ z).drift(0.0, jnp.ones(2))
