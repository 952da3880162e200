"""Short transitions by paths, and long ones by everything else, against references that know no paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg, stats

import roughflow as rf
from roughflow._programs import jit
from roughflow.transition import InCoordinates, Transition, curvature, short_time

SWIRL = np.array([[-0.2, -1.1], [1.1, -0.2]])
START = np.array([1.0, 0.0])
LOG_PROBS = jit(lambda base, x: jax.vmap(base.log_prob)(x), level=1)


def turned_noise(t, z):
    """0.4 times a rotation that depends on the state: isotropic, so in the Itô sense it changes nothing."""
    cos, sin = jnp.cos(2.6 * z[0]), jnp.sin(2.6 * z[0])
    return 0.4 * jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])


TURNED = rf.ItoSDE(lambda t, z: jnp.asarray(SWIRL, z.dtype) @ z, turned_noise)


def turned_log_prob(x, dt, start=START):
    """That of the linear SDE with the noise 0.4 dB."""
    spread = 0.4 * np.sqrt((1 - np.exp(-0.4 * dt)) / 0.4)
    return stats.norm.logpdf(x, linalg.expm(SWIRL * dt) @ start, spread).sum(axis=-1)


def turned_places(dt, count, seed=0):
    rng = np.random.default_rng(seed)
    spread = 0.4 * np.sqrt((1 - np.exp(-0.4 * dt)) / 0.4)
    return linalg.expm(SWIRL * dt) @ START + spread * rng.normal(size=(count, 2))


def test_the_density_a_short_while_after_a_point_starts_a_flow(key):
    first, error = short_time(TURNED, jnp.asarray(START), 1.0)
    span = float(first.span)
    assert error < 0.02
    assert 0.005 < span < 0.2
    # Itself, near and far: with the functions that noises which do not commute ask for it is off by `error`.
    x = np.concatenate([turned_places(span, 6), [[1.0, 30.0]]])
    found = LOG_PROBS(first, x)
    np.testing.assert_allclose(found[:-1], turned_log_prob(x[:-1], span), atol=5 * error)
    assert found[-1] < -1000  # out of reach
    drawn = jax.jit(lambda key: first.sample(key=key, shape=(4000,)))(key)
    mean = linalg.expm(SWIRL * span) @ START
    np.testing.assert_allclose(np.mean(drawn, axis=0), mean, atol=0.03 * np.std(drawn[:, 0]) + 1e-3)
    assert np.std(drawn[:, 0]) == pytest.approx(0.4 * np.sqrt(span), rel=0.05)
    # The rest of the span is counted from its end.
    sde = rf.ItoSDE(lambda t, z: t * jnp.ones(1), lambda t, z: jnp.eye(1))
    later = rf.ShortTime(sde, jnp.zeros(1), 0.25).later
    assert float(later.drift(0.5, jnp.zeros(1))[0]) == 0.75


def test_curvature_has_no_unit_and_is_zero_for_linear_sdes():
    def of(sde, start, dt):
        step = Transition(jnp.asarray(start), jnp.asarray(start), jnp.zeros(()), jnp.asarray(dt))
        return float(jit(curvature, level=0)(sde, rf.Unchanged(), step))

    linear = rf.ItoSDE(lambda t, z: jnp.asarray(3 * SWIRL) @ z, lambda t, z: jnp.diag(jnp.array([1.0, 1e-6])))
    assert of(linear, START, 2.0) < 1e-6
    scaled = lambda a: rf.ItoSDE(lambda t, z: z - z**3 / a**2, lambda t, z: 0.5 * a * jnp.eye(1))
    values = [of(scaled(a), [0.3 * a], 1.0) for a in (1e-6, 1.0, 1e6)]
    np.testing.assert_allclose(values, values[1], rtol=1e-6)
    assert 0.1 < values[1] < 0.5
    assert of(TURNED, START, 1.0) > 3 * of(TURNED, START, 0.03) > 0.1


def test_an_sde_in_coordinates_is_the_stratonovich_one():
    """Itô's formula for y = log x of dX = μX dt + σX dB: dY = (μ − σ²/2) dt + σ dB."""
    sde = rf.ItoSDE(lambda t, z: 0.1 * t * z, lambda t, z: 0.3 * z[:, None])
    inner = InCoordinates(sde, rf.Logarithm(), 2.0)
    y = jnp.array([0.7])
    np.testing.assert_allclose(inner.drift(1.0, y), 0.3 - 0.045, rtol=1e-12)
    np.testing.assert_allclose(inner.diffusion(1.0, y), 0.3, rtol=1e-12)
