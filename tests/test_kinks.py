"""Kinks and jumps of drift and diffusion."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from fokker_planck import evolved, log_density_at
from scipy import stats

import roughflow as rf
from roughflow.sde import kinks

CONSTANT = lambda t, z: jnp.eye(2)
JUMPS = {
    "sign": jnp.sign,
    "floor": jnp.floor,
    "round": lambda z: jnp.round(z / 7),
    "where": lambda z: jnp.where(z > 3e5, z, -z),
    "mask": lambda z: z * (z > 1e-6),
    "argmax": lambda z: jax.nn.one_hot(jnp.argmax(z), 2),
    "slope of a kinked log density": jax.grad(lambda z: -jnp.sum(jnp.abs(z))),
}
KINKS = {
    "abs": jnp.abs,
    "relu": lambda z: jax.nn.relu(z - 1),
    "clip": lambda z: jnp.clip(z, -2e-4, 2e-4),
    "where": lambda z: jnp.where(z > 0.3, z, 0.6 - z),
    "max": lambda z: jnp.max(z) * jnp.ones(2),
    "sort": jnp.sort,
    "max with a number": lambda z: jnp.maximum(z, 30.0),
}
SMOOTH = {
    "linear": lambda z: -z,
    "softplus": jax.nn.softplus,
    "logaddexp": lambda z: jnp.logaddexp(z, -z),
    "gelu and silu": lambda z: jax.nn.gelu(z) + jax.nn.silu(z),
    "norm": lambda z: -z * jnp.linalg.norm(z),
    "logsumexp": lambda z: z + jax.nn.logsumexp(z),
    "guarded": lambda z: jnp.where(z == 0, 1.0, jnp.sin(z) / jnp.where(z == 0, 1.0, z)),
    "same branches": lambda z: jnp.where(z > 0, z**3 + z, z),
    "elu": jax.nn.elu,
    "soft sign": lambda z: z / (1 + jnp.abs(z)),
}


def kinds(function):
    sde = rf.ItoSDE(lambda t, z: function(z), CONSTANT)
    assert {kink.part for kink in kinks(sde, 2)} <= {"drift"}
    return {kink.kind for kink in kinks(sde, 2)}


@pytest.mark.parametrize("name", JUMPS)
def test_jumps_are_found(name):
    assert kinds(JUMPS[name]) == {"jump"}


@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_found(name):
    assert kinds(KINKS[name]) == {"kink"}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_are_not_reported(name):
    assert kinds(SMOOTH[name]) == set()


def test_a_kink_is_located():
    (kink,) = kinks(rf.ItoSDE(lambda t, z: jnp.abs(z - 0.25)[:1], lambda t, z: jnp.eye(1)), 1)
    np.testing.assert_allclose(kink.point, 0.25, rtol=1e-9)
    assert str(kink) == "drift has a kink (abs) at z = [0.25]"


def test_a_switch_in_a_bounded_region_is_found_between_given_points():
    inside = lambda t, z: jnp.where(jnp.sum((z - 5) ** 2) < 0.1, 1.0, 0.0) * z
    sde = rf.ItoSDE(inside, CONSTANT)
    points = 5 + 0.5 * np.random.default_rng(0).normal(size=(20, 2))
    assert {kink.kind for kink in kinks(sde, 2, points=points)} == {"jump"}


def test_jumps_in_time_are_not_kinks_in_the_state():
    assert not kinks(rf.ItoSDE(lambda t, z: jnp.where(t < 0.3, 1.0, 2.0) * z, CONSTANT), 2)


@pytest.mark.parametrize("wrap", [jnp.diag, lx.DiagonalLinearOperator])
def test_a_kinked_diffusion_is_refused_in_an_ito_sde(wrap):
    kinked, drift = lambda t, z: wrap(0.4 + jnp.abs(z)), lambda t, z: -z
    with pytest.raises(ValueError, match=r"diffusion has a kink \(abs\) at z = .*use a smooth"):
        rf.StochasticFlow(rf.ItoSDE(drift, kinked), rf.Normal(jnp.zeros(2)))
    rf.StochasticFlow(rf.StratonovichSDE(drift, kinked), rf.Normal(jnp.zeros(2)))
    smooth = lambda t, z: wrap(0.4 + jnp.sqrt(z**2 + 0.04))
    rf.StochasticFlow(rf.ItoSDE(drift, smooth), rf.Normal(jnp.zeros(2)))


@pytest.mark.slow
def test_a_kink_in_the_drift_does_no_harm():
    """Most paths around a mode stay on one side of the kink, where the SDE is linear and all weights are
    equal: with 64 paths, a twentieth of the errors were larger than three error bars."""
    drift = lambda xp: lambda z: 1 - 3 * xp.abs(z)
    y, p = evolved(drift(np), lambda z: 0.7, stats.norm.pdf, (-14, 5), 1.0)
    x = np.linspace(-6, 1.6, 40)[:, None]
    sde = rf.ItoSDE(lambda t, z: drift(jnp)(z), rf.ConstantDiffusion(0.7 * jnp.eye(1)))
    estimate = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1))).estimate(x, key=jax.random.key(0))
    assert not np.any(estimate.suspect)
    assert set(estimate.method) <= {"modes", "particles"}
    gap = np.abs(estimate.log_prob - log_density_at(x, y, p)[:, 0])
    assert np.all(gap < 3 * estimate.total_error)
