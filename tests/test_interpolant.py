"""Regression on straight lines: between normal distributions the velocity it should find is known."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fits import grouped

import roughflow as rf

# From N(M0, C0²) to N(M1, C1²) in the time T, in one dimension.
M0, C0, M1, C1, T = 0.5, 0.8, -1.0, 1.7, 2.0
BASE = rf.Normal(jnp.full(1, M0), C0)


class Target(eqx.Module):
    def sample(self, *, key, shape=()):
        return M1 + C1 * jax.random.normal(key, (*shape, 1))


class Exact(eqx.Module):
    """The velocity between the two distributions, with numbers that should stay at zero."""

    shift: jax.Array
    slope: jax.Array
    wave: jax.Array

    def __call__(self, t, y):
        s = t / T
        variance = (1 - s) ** 2 * C0**2 + s**2 * C1**2
        covariance = s * C1**2 - (1 - s) * C0**2
        off = y - (1 - s) * M0 - s * M1
        exact = (M1 - M0 + covariance / variance * off) / T
        return exact + self.shift + self.slope * off + self.wave * jnp.sin(3 * y + t)


def exact(shift=0.0):
    return Exact(jnp.full(1, shift), jnp.zeros(1), jnp.zeros(1))


def flow_of(velocity, base=BASE, t1=T):
    return rf.StochasticFlow(rf.ItoSDE(velocity, rf.sde.NoDiffusion()), base, t1)


@pytest.mark.parametrize("late", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_the_gradient_vanishes_at_the_exact_velocity_and_only_there(late, key):
    x = Target().sample(key=key, shape=(200_000,))
    objective = rf.Interpolant(late)
    loss = lambda velocity: objective(flow_of(velocity), x, key=jax.random.key(1))[0]
    slope = lambda velocity: jnp.concatenate(jax.tree.leaves(jax.grad(loss)(velocity)))
    noise = 3 * 2 * T * 2.5 / 200_000**0.5  # of the gradient's mean: 2T |residual| times the field
    assert np.max(np.abs(slope(exact()))) < noise
    assert np.max(np.abs(slope(exact(0.05)))) > 2 * noise
    # The residual is the conditional spread of x − z: E|x − z|² − E|T v|², at the times that are drawn.
    u = (np.arange(100_000) + 0.5) / 100_000
    s = 1 - u**late
    variance = (1 - s) ** 2 * C0**2 + s**2 * C1**2
    spread = C0**2 + C1**2 - (s * C1**2 - (1 - s) * C0**2) ** 2 / variance
    np.testing.assert_allclose(loss(exact()), spread.mean(), rtol=0.02)


def test_a_fit_finds_the_velocity_and_leaves_the_base_alone(key):
    """Weight decay too: what is not trained does not move at all."""
    optimiser = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-4), optax.scale(-0.01))
    fitted = rf.fit(
        flow_of(exact(1.0)),
        Target(),
        key=key,
        objective=rf.Interpolant(),
        steps=400,
        progress=False,
        training=rf.train.TrainingOptions(optimiser=optimiser, batch_size=256, average=0.98),
    )
    velocity = fitted.model.sde.transport.velocity
    for leaf in jax.tree.leaves(velocity):
        assert np.max(np.abs(leaf)) < 0.06
    assert jax.tree.all(jax.tree.map(np.array_equal, fitted.model.base, BASE))
    x = jnp.linspace(-3, 2, 6)[:, None]
    truth = -0.5 * ((x[:, 0] - M1) / C1) ** 2 - np.log(C1 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(fitted.model.log_prob(x, key=key), truth, atol=0.1)
    noisy = rf.with_noise(fitted.model, 0.5)
    t, y = 1.2, jnp.array([0.3])
    s = t / T
    variance = (1 - s) ** 2 * C0**2 + s**2 * C1**2
    score = -(y - (1 - s) * M0 - s * M1) / variance
    pull = (noisy.sde.drift(t, y) - fitted.model.sde.drift(t, y)) / (0.5 * 0.25 * (1 - s))
    np.testing.assert_allclose(pull, score, atol=0.3)
    np.testing.assert_array_equal(noisy.sde.transport.loc, [M0])


def test_models_without_a_velocity_to_train_are_refused(key):
    x = np.zeros((4, 1))
    fit = lambda flow, **kw: rf.fit(flow, x, key=key, objective=rf.Interpolant(**kw), steps=1, progress=False)
    noisy = rf.StochasticFlow(rf.ItoSDE(exact(), rf.ConstantDiffusion(jnp.eye(1))), BASE, T)
    with pytest.raises(
        TypeError, match=r"^Interpolant trains the velocity of an ODE: .* ItoSDE with 1 noise components"
    ):
        fit(noisy)
    still = rf.StochasticFlow(rf.overdamped_langevin(lambda z: -0.5 * z @ z, 1), BASE, T)
    with pytest.raises(TypeError, match=r"got TargetedSDE with 1 noise components"):
        fit(still)
    given = rf.sde.TransportSDE(rf.sde.GivenTransport(exact(), lambda t, z: -z))
    with pytest.raises(TypeError, match=r"^Interpolant cannot train an rf.sde.GivenTransport"):
        fit(rf.StochasticFlow(given, BASE, T))
    known = rf.sde.TransportSDE(rf.sde.NormalTransport(exact(), BASE.loc, BASE.scale, T))
    with pytest.raises(ValueError, match=r"^the flow ends at t1 = 1.0, but its transport at 2.0"):
        fit(rf.StochasticFlow(known, BASE, 1.0))
    with pytest.raises(ValueError, match=r"^late must be positive"):
        rf.Interpolant(0.0)


def test_the_noise_is_trained_while_the_velocity_stays(key):
    """And regression on a noisy flow trains the velocity while the noise stays."""
    known = rf.sde.TransportSDE(rf.sde.NormalTransport(exact(), BASE.loc, BASE.scale, T))
    flow = rf.StochasticFlow(known, BASE, T, rf.KarhunenLoeve(2))
    noisy = rf.with_noise(flow, 0.5)
    x = Target().sample(key=key, shape=(64,))
    parts = lambda flow: (flow.sde.transport.velocity, flow.sde.diffusion.diffusion)
    same = lambda one, two: jax.tree.all(jax.tree.map(np.array_equal, one, two))
    settings = {"key": key, "steps": 2, "progress": False, "clip": math.inf}
    likely = rf.MaximumLikelihood(2, rf.Prior())
    fitted = rf.fit(
        noisy, x, objective=likely, frozen=lambda f: (f.sde.transport, f.base), **grouped(settings)
    ).model
    assert same(parts(fitted)[0], parts(noisy)[0])
    assert not same(parts(fitted)[1], parts(noisy)[1])
    fitted = rf.fit(noisy, x, objective=rf.Interpolant(), **grouped(settings)).model
    assert not same(parts(fitted)[0], parts(noisy)[0])
    assert same(parts(fitted)[1], parts(noisy)[1])
