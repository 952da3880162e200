"""Grids with as many steps as log-densities need."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import grouped

import roughflow as rf
from roughflow.flow._resolution import STILL_TOLERANCE, _values, with_steps
from roughflow.train import _checkpoint, _loop


class Turning(eqx.Module):
    """With its rate as a number, so that one program serves all."""

    rate: float

    def __call__(self, t, z):
        return self.rate * jnp.sum(z**2) * jnp.stack([-z[1], z[0]])


def turning(rate, **settings):
    """dz = rate·(−z₂, z₁)·|z|² dt from N(0, I): volumes stay, so log p is that of the start."""
    sde = rf.ItoSDE(Turning(rate), rf.sde.NoDiffusion())
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), **settings)


def error(flow, x):
    path = flow.sample_path(key=jax.random.key(0))
    truth = jnp.sum(jax.scipy.stats.norm.logpdf(x), axis=-1)
    return float(jnp.sqrt(jnp.mean((flow.log_prob_given_path(x, path) - truth) ** 2)))


def test_a_faster_model_gets_more_steps_and_all_are_as_accurate(key):
    x = jax.random.uniform(key, (64, 2), minval=-1.2, maxval=1.2)
    flows = [rf.flow.tune_steps(turning(rate), x, key=key) for rate in (0.1, 1.0, 4.0)]
    steps = [flow.integrator.steps for flow in flows]
    assert steps[0] < steps[1] < steps[2]
    for flow, count in zip(flows, steps, strict=True):
        assert error(flow, x) < 1.5 * STILL_TOLERANCE
        if count > 2:
            assert error(with_steps(flow, count - 1), x) > 0.7 * STILL_TOLERANCE


def test_a_looser_tolerance_takes_fewer_steps(key):
    x = jax.random.uniform(key, (64, 2), minval=-1.2, maxval=1.2)
    loose = rf.flow.tune_steps(turning(4.0), x, key=key, tolerance=1e-2)
    assert loose.integrator.steps < rf.flow.tune_steps(turning(4.0), x, key=key).integrator.steps
    with pytest.raises(ValueError, match="tolerance"):
        rf.flow.tune_steps(turning(4.0), x, key=key, tolerance=0.0)


@pytest.mark.parametrize(("driver", "late"), [(rf.KarhunenLoeve(3), 2.0), (rf.PiecewiseLinear(3), 1.0)])
def test_steps_counted_at_run_time_are_those_of_the_grid(driver, late, key):
    sde = rf.ItoSDE(lambda t, z: jnp.sin(z + t), lambda t, z: 1 + 0.3 * jnp.cos(z)[:, None])
    grid = rf.FixedGrid(steps=6, late=late)
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=driver, integrator=grid)
    x, path = jnp.linspace(-1, 1, 5)[:, None], flow.sample_path(key=key, shape=(5,))
    each = jnp.asarray(6 // (driver.jumps.size + 1))
    np.testing.assert_allclose(
        _values(flow, each, x, path, key), flow.log_prob_given_path(x, path), atol=1e-12
    )


def test_a_piecewise_linear_path_keeps_its_corners(key):
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.PiecewiseLinear(5))
    steps = rf.flow.tune_steps(flow, jnp.ones((8, 1)), key=key).integrator.steps
    assert steps % 5 == 0


def test_what_cannot_be_suited_comes_back_as_it_is(key):
    x = jnp.ones((4, 2))
    wild = turning(1e4)
    assert rf.flow.tune_steps(wild, x, key=key).integrator.steps is None
    adaptive = turning(1.0, integrator=rf.Adaptive())
    assert eqx.tree_equal(rf.flow.tune_steps(adaptive, x, key=key), adaptive)


class Stretch(eqx.Module):
    """dz = rate·z dt: z(1) is N(0, e^(2·rate)), and the larger the rate, the more steps that takes."""

    rate: jax.Array

    def __call__(self, t, z):
        return self.rate * z


def stretched(key, **settings):
    """A fit in which the rate grows, towards 5, with a look at the steps every twenty."""
    grid = rf.FixedGrid(steps=settings.pop("grid", None))
    sde = rf.ItoSDE(Stretch(jnp.zeros(())), rf.sde.NoDiffusion())
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), integrator=grid)
    data = np.exp(5) * np.random.default_rng(0).normal(size=(64, 1))
    settings = {
        "steps": 100,
        "validate_every": 20,
        "learning_rate": 0.3,
        "clip": math.inf,
        "progress": False,
    } | settings
    return rf.fit(flow, data, key=key, frozen=lambda flow: flow.base, **grouped(settings))


@pytest.fixture
def every_fit_looks(monkeypatch):
    monkeypatch.setattr(_loop, "MIN_STEPS_FOR_GRID", 0)


def off(flow):
    """How far log p is from that of N(0, e^(2·rate))."""
    scale = jnp.exp(flow.sde.drift.rate)
    x = scale * jnp.linspace(-2, 2, 9)[:, None]
    truth = jax.scipy.stats.norm.logpdf(x[:, 0], scale=scale)
    return float(jnp.max(jnp.abs(flow.log_prob(x, key=jax.random.key(0)) - truth)))


def test_a_fit_takes_the_steps_that_its_model_needs_as_it_changes(every_fit_looks, key, monkeypatch):
    seen, needed = [], _loop.GridChoice.needed

    def noted(self, model, now):
        seen.append(needed(self, model, now))
        return seen[-1]

    monkeypatch.setattr(_loop.GridChoice, "needed", noted)
    fitted = stretched(key)
    assert len(seen) == 6
    assert seen[0] == 2
    assert sorted(seen) == seen
    assert fitted.model.integrator.steps == seen[-1] > 4  # what it would have taken by itself
    assert off(fitted.model) < 1e-3 < 5e-3 < off(with_steps(fitted.model, 4))


@pytest.mark.slow
def test_a_fit_keeps_the_steps_it_is_given_and_a_short_one_its_own(every_fit_looks, key, monkeypatch):
    assert stretched(key, grid=3).model.integrator.steps == 3
    monkeypatch.setattr(_loop, "MIN_STEPS_FOR_GRID", 200)
    assert stretched(key, steps=40).model.integrator.steps is None


def test_a_fit_that_chooses_its_steps_can_be_cut_in_two(every_fit_looks, key, tmp_path, monkeypatch):
    file, whole = tmp_path / "run.checkpoint", stretched(key)
    needed, looks = _loop.GridChoice.needed, []

    def cut(self, model, now):
        looks.append(now)
        if len(looks) == 4:
            raise KeyboardInterrupt
        return needed(self, model, now)

    monkeypatch.setattr(_checkpoint, "SECONDS_BETWEEN_WRITES", 0)
    monkeypatch.setattr(_loop.GridChoice, "needed", cut)
    with pytest.raises(KeyboardInterrupt):
        stretched(key, checkpoint=file)
    rest = stretched(key, checkpoint=file, resume=True)
    assert eqx.tree_equal(rest.model, whole.model)
    assert looks[4] == looks[3]  # it went on with the steps it had
