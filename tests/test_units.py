"""No unit of time or of a coordinate changes a solve; and what solver and driver do not see in time."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow.flow import unresolved_in_time

jax_float = {"float32": jnp.float32, "float64": jnp.float64}


class Scaled(eqx.Module):
    """A pendulum with noise, in other units."""

    unit: jax.Array

    def drift(self, t, z):
        u = z / self.unit
        return self.unit * jnp.stack([u[1], jnp.sin(u[0]) - u[1]])

    def diffusion(self, t, z):
        noise = 0.3 * jnp.stack(
            [jnp.stack([jnp.ones_like(z[0]), jnp.sin((z / self.unit)[1])]), jnp.array([0, 1.0], z.dtype)]
        )
        return self.unit[:, None] * noise


@pytest.mark.parametrize(
    ("integrator", "dtype"),
    [(rf.FixedGrid(), "float32"), (rf.Adaptive(), "float64")],
    ids=["fixed", "adaptive"],
)
def test_units_of_states(integrator, dtype):
    dtype = jax_float[dtype]
    rng = np.random.default_rng(0)
    coefficients, points = rng.normal(size=(4, 6, 2)), rng.normal(size=(4, 2))

    def value(*unit):
        unit = jnp.asarray(unit, dtype)
        parts = Scaled(unit)
        base = rf.Normal(unit * jnp.asarray([0.3, -0.2], dtype), unit)
        flow = rf.StochasticFlow(rf.ItoSDE(parts.drift, parts.diffusion), base, integrator=integrator)
        path = flow.driver.path(jnp.asarray(coefficients, dtype))
        log_prob = flow.log_prob_given_path(points.astype(dtype) * np.asarray(unit), path)
        return np.asarray(log_prob, float) + np.log(np.asarray(unit, float)).sum()

    expected = value(1.0, 1.0)
    for unit in ((1e9, 1e9), (1e-9, 1e-9), (1e-9, 1e9), (1e5, 1.0)):
        np.testing.assert_allclose(
            value(*unit), expected, rtol=0, atol=1e-4 if dtype == jnp.float32 else 1e-11
        )


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e5, 1e9])
def test_brownian_motion_in_any_units(size, key):
    """Exactly normal given the path: nothing escapes."""
    flow = rf.StochasticFlow(
        rf.ItoSDE(lambda t, z: 0 * z, rf.ConstantDiffusion(size * jnp.eye(1))),
        rf.Normal(jnp.zeros(1), size / 3),
    )
    path = flow.sample_path(key=key, shape=(64,))
    shift = size * path.evaluate(1.0)
    log_prob = flow.log_prob_given_path(jnp.zeros((64, 1)), path)
    expected = -0.5 * (3 * shift[:, 0] / size) ** 2 - np.log(size / 3 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(log_prob, expected, atol=1e-3)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_escapes_in_any_units(size):
    """dz/dt = z³/size² from z₀ leaves for infinity at t = size²/(2 z₀²)."""
    sde = rf.ItoSDE(lambda t, z: z * (z / size) ** 2, rf.sde.NoDiffusion())
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), size), integrator=rf.FixedGrid(steps=200))
    path = flow.sample_path(key=jax.random.key(0))
    outcome = flow.solve(size * jnp.array([[0.1], [0.5], [2.0]]), path, reverse=False)
    assert [rf.flow.Status(code).name for code in outcome.status.tolist()] == ["FINE", "FINE", "ESCAPED"]
    np.testing.assert_allclose(outcome.z[:2, 0] / size, [0.1 / np.sqrt(0.98), 0.5 / np.sqrt(0.5)], rtol=1e-5)


def test_noise_that_does_not_commute_is_refused_in_any_units(key):
    noise = lambda unit: lambda t, z: unit * jnp.array([[1.0, 0.0], [0.0, z[0] / unit]])
    for unit in (1e-9, 1.0, 1e9):
        sde = rf.ItoSDE(lambda t, z: 0 * z, noise(unit))
        with pytest.raises(ValueError, match="commutative"):
            rf.simulate(sde, jnp.zeros(2), key=key, steps=2, scheme=rf.flow.Milstein())


def timed(drift=lambda t: 0.0, sigma=lambda t: 1.0, **options):
    sde = rf.ItoSDE(lambda t, z: drift(t) + 0 * z, lambda t, z: sigma(t) * jnp.eye(1))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1), 0.2), **options)


def unseen(**options):
    return unresolved_in_time(timed(**options), jnp.linspace(-1, 1, 3)[:, None])


def pulse(at, width, height):
    return lambda t: height * (jnp.abs(t - at) < width / 2)


@pytest.mark.parametrize("at", [0.28, 0.531, 0.97])
def test_pulses_in_time_are_found(at):
    # A shift by 1, of a standard deviation √1.04; and a variance of 1 that comes in 0.01.
    np.testing.assert_allclose(unseen(drift=pulse(at, 0.01, 100.0)), 1 / np.sqrt(1.04), rtol=0.3)
    assert unseen(sigma=lambda t: 0.1 + pulse(at, 0.01, 10.0)(t)) > 0.5


def test_functions_of_the_driver_that_do_not_follow_the_noise():
    """∫ cos(12πt) dB has variance ½, and on six functions nearly none."""
    lost = 0.5 * np.log((0.04 + 0.25) / 0.04)
    wave = lambda t: np.sqrt(0.5) * jnp.cos(12 * np.pi * t)
    np.testing.assert_allclose(unseen(sigma=wave), lost, rtol=0.3)
    assert unseen(sigma=wave, driver=rf.KarhunenLoeve(64)) < 2e-3


@pytest.mark.parametrize(
    "options",
    [
        {"drift": lambda t: jnp.sin(6 * t)},
        {"sigma": lambda t: 1 + t},
        {"sigma": lambda t: jnp.sqrt(1 - t + 1e-9), "integrator": rf.FixedGrid(late=2.0)},
        {"drift": lambda t: t, "driver": rf.PiecewiseLinear(8), "integrator": rf.Adaptive()},
    ],
)
def test_smooth_coefficients_are_resolved(options):
    assert unseen(**options) < 1e-3


def test_coefficients_without_time_cost_nothing():
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    assert unresolved_in_time(rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1))), jnp.zeros((1, 1))) == 0
