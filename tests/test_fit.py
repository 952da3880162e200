"""The fitting loop: it learns, it ends when it should, and it says what went wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fits import DATA, SETTINGS, fit, grouped, same

import roughflow as rf


class Broken(rf.train.AbstractObjective):
    """NaN wherever the first row of the batch is negative."""

    uses_data = True

    def __call__(self, model, x, *, key):
        return jnp.where(x[0, 0] < 0, jnp.nan, jnp.mean((model[None] - x) ** 2)), {}


def test_it_finds_the_minimum_and_trains_the_objective_too(key):
    fitted = fit(key)
    np.testing.assert_allclose(fitted.model["place"], DATA.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(fitted.objective.bend, 2, atol=0.02)
    assert fitted.history.loss.shape == fitted.history.metrics["size"].shape == (300,)
    assert not fitted.interrupted
    assert fitted.history.ended is None
    assert fitted.history.skipped == 0


def test_the_same_key_gives_the_same_numbers_and_another_does_not(key):
    assert same(fit(key).model, fit(key).model)
    assert not same(fit(key).model, fit(jax.random.fold_in(key, 1)).model)


def test_frozen_parts_stay(key):
    fitted = fit(key, frozen=lambda model: model["place"])
    assert np.array_equal(fitted.model["place"], np.zeros(2))
    np.testing.assert_allclose(fitted.objective.bend, 2, atol=0.02)


def test_any_optimiser_of_optax_and_a_limit_on_gradients(key):
    slow = fit(key, optimiser=optax.sgd(1.0), clip=1e-3, steps=100)
    # A hundred steps of at most 1e-3.
    assert 0.01 < np.linalg.norm(np.append(slow.model["place"], slow.objective.bend)) < 0.1001


TRACED = []


class Traced(rf.train.AbstractObjective):
    """Notes each time it is compiled."""

    uses_data = True

    def __call__(self, model, x, *, key):
        TRACED.append(x.shape)
        return jnp.mean((model[None] - x) ** 2), {}


def test_a_second_fit_compiles_nothing_whatever_its_numbers(key):
    run = lambda **changes: rf.fit(
        jnp.zeros(2), DATA, key=key, objective=Traced(), **grouped(SETTINGS | {"average": 0.9} | changes)
    )
    run(validation=0.1)
    count = len(TRACED)
    assert count > 0
    run(validation=0.1)
    run(validation=0.1, steps=150, learning_rate=0.02, clip=3.0, average=0.99)
    assert len(TRACED) == count


def test_a_weakly_typed_parameter_is_compiled_once(key):
    """As a strongly typed one, since that is what a step makes of it."""
    settings = {"key": key, "objective": Traced()} | grouped(SETTINGS | {"steps": 3})
    run = lambda start: rf.fit(start, DATA[:, :1], **settings)
    run(jnp.full(1, 0.5, float))
    TRACED.clear()
    weak = jnp.full(1, 0.5)
    assert weak.weak_type
    run(weak)
    assert TRACED == []


def test_validation_keeps_the_best_model_and_ends_a_stale_run(key):
    """Validation data elsewhere: the best model is the one that has just passed them."""
    aside = np.full((10, 2), 0.5)
    fitted = fit(key, validation=aside, validate_every=10, patience=3, steps=1000)
    losses, steps = fitted.history.validation_loss, fitted.history.validation_step
    stale = next(i for i in range(losses.size) if i - np.argmin(losses[: i + 1]) == 3)
    # A quarter of the steps taken until then are left, from the best model on and at a falling rate.
    assert fitted.history.loss.size == steps[stale] + steps[stale] // 4
    assert steps[-1] == fitted.history.loss.size
    assert losses[stale + 1] < losses[stale]
    assert fitted.history.ended.endswith(" of 1,000: validation loss did not improve in 3 checks")
    assert fitted.history.ended in repr(fitted)
    at_best = float(jnp.mean((fitted.model["place"] - 0.5) ** 2))
    assert at_best < 1.5
    assert at_best < float(jnp.mean((DATA.mean(axis=0) - 0.5) ** 2))


def test_a_run_that_cools_down_ends_nearer_the_minimum(key):
    """Minibatches of noisy data: at the full rate the model jumps about, and no look is better for long."""
    data = np.random.default_rng(0).normal(size=(200, 2))
    settings = {"steps": 100_000, "batch_size": 4, "learning_rate": 0.3, "progress": False}
    settings |= {"validate_every": 20, "patience": 10}
    fitted = rf.fit(
        jnp.full(2, 3.0),
        data,
        key=key,
        objective=Near(),
        validation=data,
        **grouped(settings),
    )
    losses = fitted.history.validation_loss
    stale = next(i for i in range(losses.size) if i - np.argmin(losses[: i + 1]) == 10)
    assert fitted.history.loss.size < 10_000
    floor = np.mean((data - data.mean(axis=0)) ** 2)
    before, after = np.mean(losses[5 : stale + 1]) - floor, losses[-1] - floor
    assert after < 0.3 * before


class Near(rf.train.AbstractObjective):
    """The squared distance."""

    uses_data = True

    def __call__(self, model, x, *, key):
        return jnp.mean((model[None] - x) ** 2), {}


class Blind(rf.train.AbstractObjective):
    """The squared distance; on the seven rows to validate on it is NaN while the model is below `until`."""

    until: float
    uses_data = True

    def __call__(self, model, x, *, key):
        loss = jnp.mean((model[None] - x) ** 2)
        return jnp.where((model[0] < self.until) & (x.shape[0] == 7), jnp.nan, loss), {}


@pytest.mark.parametrize("patience", [None, 3])
def test_a_look_that_comes_to_nan_is_worse_than_any_other(key, patience):
    data, aside = np.full((40, 1), 3.0), np.full((7, 1), 3.0)
    settings = SETTINGS | {"steps": 600, "validate_every": 20, "patience": patience}
    fitted = rf.fit(jnp.zeros(1), data, key=key, objective=Blind(0.5), validation=aside, **grouped(settings))
    losses = fitted.history.validation_loss
    assert np.isnan(losses[0])
    np.testing.assert_allclose(fitted.model, 3, atol=0.2)
    assert losses.size > 10


def test_where_every_look_comes_to_nan_the_last_model_is_returned(key):
    data, aside = np.full((40, 1), 3.0), np.full((7, 1), 3.0)
    fitted = rf.fit(jnp.zeros(1), data, key=key, objective=Blind(9.0), validation=aside, **grouped(SETTINGS))
    assert fitted.model[0] > 2


def test_numbers_of_numpy_will_do_as_settings(key, tmp_path):
    settings = {"steps": np.int64(3), "batch_size": np.int64(8), "validate_every": np.int64(2)}
    settings |= {"learning_rate": np.float32(0.1), "clip": np.float32(1), "patience": np.int64(2)}
    file = tmp_path / "run.checkpoint"
    first = fit(key, checkpoint=file, validation=0.1, **settings)
    assert same(first.model, fit(key, checkpoint=file, resume=True, validation=0.1, **settings).model)


def test_steps_that_are_not_finite_are_skipped_and_counted(key):
    data = np.where(np.arange(400)[:, None] % 8 == 0, -1.0, 2.0)
    fitted = rf.fit(jnp.zeros(1), data, key=key, objective=Broken(), **grouped(SETTINGS))
    skipped = fitted.history.skipped
    assert 10 < skipped < 80
    assert np.sum(np.isnan(fitted.history.loss)) == skipped
    assert 1 < float(fitted.model[0]) < 2


def test_a_hopeless_run_ends_with_the_reason(key):
    with pytest.raises(rf.NonFiniteError, match=r"^20 steps in a row up to step 20 were not finite"):
        rf.fit(jnp.zeros(1), -np.ones((9, 1)), key=key, objective=Broken(), **grouped(SETTINGS))


def test_a_model_that_returns_nan_is_named(key):
    drift = lambda t, z: jnp.where(z > 100, z, jnp.nan)
    flow = rf.StochasticFlow(rf.ItoSDE(drift, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(1)))
    with pytest.raises(rf.NonFiniteError, match=r"drift returned a value that is not finite at t = "):
        rf.fit(flow, np.zeros((4, 1)), key=key, steps=30, progress=False)
