"""The fitting loop: it learns, it can be cut in two, and it says what went wrong."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import roughflow as rf


class Distance(rf.AbstractObjective):
    """E (model − x)², with a bend the objective learns itself."""

    bend: jax.Array
    uses_data = True

    def __call__(self, model, x, *, key):
        loss = jnp.mean((model["place"][None] - x + 0.01 * jax.random.normal(key, x.shape)) ** 2)
        return loss + jnp.sum((self.bend - 2) ** 2), {"size": jnp.sum(model["place"] ** 2)}


class Broken(rf.AbstractObjective):
    """NaN wherever the first row of the batch is negative."""

    uses_data = True

    def __call__(self, model, x, *, key):
        return jnp.where(x[0, 0] < 0, jnp.nan, jnp.mean((model[None] - x) ** 2)), {}


DATA = np.random.default_rng(0).normal([3.0, -1.0], 0.5, (400, 2))
SETTINGS = {"steps": 300, "batch_size": 32, "learning_rate": 0.05, "progress": False}


def fit(key, model=None, data=DATA, **changes):
    model = {"place": jnp.zeros(2), "other": jnp.ones(1)} if model is None else model
    return rf.fit(model, data, key=key, objective=Distance(jnp.zeros(1)), **(SETTINGS | changes))


def same(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_it_finds_the_minimum_and_trains_the_objective_too(key):
    fitted = fit(key)
    np.testing.assert_allclose(fitted.model["place"], DATA.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(fitted.objective.bend, 2, atol=0.02)
    assert fitted.history.loss.shape == fitted.history.metrics["size"].shape == (300,)
    assert not fitted.interrupted
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


def test_a_run_cut_in_two_ends_where_the_whole_one_does(key, tmp_path, interrupt_when_written):
    """Stopped by SIGINT in the middle, and gone on with from its checkpoint: equal to the last bit."""
    settings = {"steps": 4000, "validation": 0.2, "every": 50}
    whole = fit(key, **settings)
    file = tmp_path / "run.checkpoint"
    with interrupt_when_written(file):
        half = fit(key, checkpoint=file, **settings)
    assert half.interrupted
    assert 0 < half.history.loss.size < 4000
    rest = fit(key, checkpoint=file, resume=True, **settings)
    assert not rest.interrupted
    assert same(whole.model, rest.model)
    for name, values in whole.history.to_arrays().items():
        assert np.array_equal(values, rest.history.to_arrays()[name]), name


def test_a_checkpoint_is_neither_overwritten_nor_taken_for_another_run(key, tmp_path):
    file = tmp_path / "run.checkpoint"
    with pytest.raises(FileNotFoundError, match=r"^there is no file"):
        fit(key, checkpoint=file, resume=True)
    fit(key, checkpoint=file)
    with pytest.raises(ValueError, match=r"^checkpoint .* exists: resume=True goes on from it"):
        fit(key, checkpoint=file)
    with pytest.raises(ValueError, match=r"another run: steps was 300, now 301"):
        fit(key, checkpoint=file, resume=True, steps=301)
    with pytest.raises(ValueError, match=r"another run: data is different"):
        fit(key, data=DATA + 1, checkpoint=file, resume=True)
    with pytest.raises(ValueError, match=r"shape of parameters.0.other was float64\[1\], now float64\[2\]"):
        fit(key, {"place": jnp.zeros(2), "other": jnp.ones(2)}, checkpoint=file, resume=True)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"is not a roughflow checkpoint, or is damaged"):
        fit(key, checkpoint=file, resume=True)


@pytest.mark.parametrize("average", [None, 0.9])
def test_the_average_is_what_is_returned_and_a_cut_run_has_the_same(key, tmp_path, average):
    """a ← a + (1 − d)(p − a) with d = min(average, (1 + n)/(10 + n)), p the parameters after each step."""
    settings = {"steps": 60, "optimiser": optax.sgd(0.1), "clip": None, "average": average}
    whole = fit(key, **settings)
    # Runs of one step more each say where the parameters were.
    path = [fit(key, **(settings | {"steps": n, "average": None})).model["place"] for n in (1, 2, 3)]
    mean = np.zeros(2)
    for n, place in enumerate(path):
        mean = mean + (1 - min(0.9, (1 + n) / (10 + n))) * (place - mean)
    short = fit(key, **(settings | {"steps": 3})).model["place"]
    np.testing.assert_allclose(short, path[-1] if average is None else mean, rtol=1e-12)
    file = tmp_path / "run.checkpoint"
    first = fit(key, checkpoint=file, validation=DATA[:7], every=9, **settings)
    again = fit(key, checkpoint=file, validation=DATA[:7], every=9, resume=True, **settings)
    assert same(first.model, again.model)
    with pytest.raises(ValueError, match=r"another run: average was"):
        fit(key, checkpoint=file, resume=True, validation=DATA[:7], every=9, **(settings | {"average": 0.5}))
    assert not same(whole.model, {"place": path[-1], "other": whole.model["other"]})


def test_an_averaged_run_cut_in_two_ends_where_the_whole_one_does(key, tmp_path, interrupt_when_written):
    settings = {"steps": 3000, "validation": 0.2, "every": 50, "average": 0.99}
    whole = fit(key, **settings)
    file = tmp_path / "run.checkpoint"
    with interrupt_when_written(file):
        half = fit(key, checkpoint=file, **settings)
    assert half.interrupted
    rest = fit(key, checkpoint=file, resume=True, **settings)
    assert same(whole.model, rest.model)
    assert np.array_equal(whole.history.validation_loss, rest.history.validation_loss)


TRACED = []


class Traced(rf.AbstractObjective):
    """Notes each time it is compiled."""

    uses_data = True

    def __call__(self, model, x, *, key):
        TRACED.append(x.shape)
        return jnp.mean((model[None] - x) ** 2), {}


def test_a_second_fit_compiles_nothing_whatever_its_numbers(key):
    run = lambda **changes: rf.fit(
        jnp.zeros(2), DATA, key=key, objective=Traced(), **(SETTINGS | {"average": 0.9} | changes)
    )
    run(validation=0.1)
    count = len(TRACED)
    assert count > 0
    run(validation=0.1)
    run(validation=0.1, steps=150, learning_rate=0.02, clip=3.0, average=0.99)
    assert len(TRACED) == count


class Walk(rf.AbstractStatefulObjective):
    """A chain beside the model, whose place is the state."""

    uses_data = False

    def start(self, model, *, key):
        return {"place": jnp.ones(1), "count": jnp.asarray(0)}

    def step(self, model, x, state, *, key):
        bad = state["count"] == 5  # a step that comes to nothing leaves the chain where it is
        moved = {"place": state["place"] + jax.random.normal(key, (1,)), "count": state["count"] + 1}
        loss = jnp.mean((model - state["place"]) ** 2)
        once = bad & (jax.random.uniform(key) < 0.5)
        return jnp.where(once, jnp.nan, loss), (moved, {"place": state["place"][0]})


def test_a_state_is_carried_from_step_to_step_and_kept_in_the_checkpoint(key, tmp_path):
    run = lambda **changes: rf.fit(
        jnp.zeros(1), key=key, objective=Walk(), **({"steps": 40, "progress": False} | changes)
    )
    fitted = run()
    places = fitted.history.metrics["place"]
    assert places[0] == 1
    assert len(set(places)) > 30
    assert fitted.state["count"] == 40 - fitted.history.skipped
    file = tmp_path / "run.checkpoint"
    run(checkpoint=file)
    assert same(run(checkpoint=file, resume=True).state, fitted.state)


def bell(z, loc):
    return -0.5 * jnp.sum((z - loc) ** 2)


def far(z, loc=5.0):
    return bell(z, loc)


WORDS = frozenset(["one", "two", "three", "four", "five", "six", "seven", "eight"])
RUN = """
import sys
sys.path.insert(0, {folder!r})
from roughflow.learn._fingerprint import fingerprint
from test_fit import WORDS, run
print(fingerprint(WORDS, "words"))
try:
    run({file!r}, resume=True)
    print("accepted")
except ValueError as error:
    print(error)
"""


def run(file, *, steps=None, driver=2, target=None, optimiser=None, l1=0.0, batch=8, resume=False):
    """A short run with a checkpoint; another process that asks for the same is to go on with it."""
    key = jax.random.key(0)
    flow = rf.StochasticFlow(
        rf.ItoSDE(rf.MLP(1, 1, width=2, depth=1, key=key), rf.ConstantDiffusion(0.5 * jnp.eye(1))),
        rf.Normal(jnp.zeros(1)),
        driver=rf.KarhunenLoeve(driver),
        integrator=rf.FixedGrid(steps=steps),
    )
    target = functools.partial(bell, loc=jnp.array([1.0])) if target is None else target
    objective = rf.ReverseKL(target, 0, batch, l1)
    return rf.fit(
        flow,
        key=key,
        objective=objective,
        steps=2,
        optimiser=optimiser,
        checkpoint=file,
        resume=resume,
        progress=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is done: going on with it takes no step, only the checks."""
    file = tmp_path_factory.mktemp("runs") / "run.checkpoint"
    run(file)
    return file


def test_a_run_is_the_same_in_another_process(finished):
    """The target is a partial function and the optimiser a closure: neither has a name that lasts."""
    from roughflow.learn._fingerprint import fingerprint

    script = RUN.format(folder=str(Path(__file__).parent), file=str(finished))
    # Each process has its own order of hashes.
    words = os.environ | {"PYTHONHASHSEED": "7", "JAX_ENABLE_X64": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=words
    )
    assert done.stdout.splitlines() == [str(fingerprint(WORDS, "words")), "accepted"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 50}, r"model.integrator.steps was None, now 50"),
        ({"driver": 3}, r"model.driver.num_functions was 2, now 3"),
        ({"batch": 9}, r"objective.batch_size was 8, now 9"),
        ({"l1": 0.5}, r"objective.l1 was 0.0, now 0.5"),
        ({"target": lambda z: bell(z, 1.0)}, r"log_density was functools.partial, now test_fit.<lambda>"),
        (
            {"target": functools.partial(bell, loc=jnp.array([2.0]))},
            r"log_density.keywords.loc is different",
        ),
        (
            {"target": functools.partial(far, loc=jnp.array([1.0]))},
            r"log_density.function was test_fit.bell, now test_fit.far",
        ),
        ({"optimiser": optax.adam(1e-3)}, r"another run: optimiser\..*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_a_run_depends_on_is_noted(finished, changes, message):
    with pytest.raises(ValueError, match=message):
        run(finished, resume=True, **changes)


def test_functions_are_told_apart_by_what_they_do():
    from roughflow.learn._fingerprint import difference, fingerprint

    told = lambda one, two: difference(fingerprint(one, "f"), fingerprint(two, "f"))
    shifted = lambda loc: lambda z: z - loc
    assert told(shifted(1.0), shifted(1.0)) is None
    assert told(shifted(1.0), shifted(2.0)) == "f.loc was 1.0, now 2.0"
    assert told(shifted(shifted(1.0)), shifted(shifted(2.0))) == "f.loc.loc was 1.0, now 2.0"
    assert told(shifted(np.ones(2)), shifted(np.zeros(2))) == "f.loc is different"
    first, second = (lambda z: z + 1), (lambda z: z + 2)
    assert told(first, second) == "f.its code.constants.1 was 1, now 2"
    inner = lambda n: eval(f"lambda z: (lambda y: y * {n})(z)")
    assert "constants" in told(inner(3), inner(4))
    default = lambda n: eval(f"lambda z, n={n}: z + n")
    assert told(default(1), default(2)) == "f.its defaults.0.0 was 1, now 2"
    add, subtract = eval("lambda z: z + z"), eval("lambda z: z - z")
    assert told(add, subtract) == "f.its code is different"
    of_module = lambda n: eval("lambda z: SCALE * z", {"SCALE": n})
    assert told(of_module(1), of_module(2)) == "f.SCALE was 1, now 2"
    assert told(optax.adam(1e-3, b1=0.9), optax.adam(1e-3, b1=0.9)) is None
    assert told(optax.adam(1e-3, b1=0.9), optax.adam(1e-3, b1=0.8)) is not None
    assert told(jax.jit(shifted(1.0)), jax.jit(shifted(2.0))) is not None
    assert told(Distance(jnp.zeros(1)).__call__, Distance(jnp.ones(1)).__call__) is not None


def test_words_for_values_hold_no_address_and_no_order_of_a_hash():
    from roughflow.learn._fingerprint import fingerprint

    class Plain:
        def __init__(self):
            self.itself, self.words = self, {"one", "two", "three"}

    value = [Plain(), object(), np.add, jnp.add, jax.nn.relu, {"b": 1, "a": (2,) * 20}, frozenset({1}), ...]
    told = repr(fingerprint(value, "it"))
    assert "0x" not in told
    assert told == repr(fingerprint([Plain(), object(), *value[2:]], "it"))


def test_a_checkpoint_of_an_older_version_is_named(finished, tmp_path):
    from roughflow.learn._checkpoint import VERSION
    from roughflow.learn._files import read_archive, write_archive

    header, arrays = read_archive(finished, "checkpoint", VERSION)
    write_archive(tmp_path / "old.checkpoint", header | {"version": 1}, arrays)
    with pytest.raises(ValueError, match=r"was written by an older roughflow"):
        run(tmp_path / "old.checkpoint", resume=True)


def test_validation_keeps_the_best_model_and_ends_a_stale_run(key):
    """Validation data elsewhere: the best model is the one that has just passed them."""
    aside = np.full((10, 2), 0.5)
    fitted = fit(key, validation=aside, every=10, patience=3, steps=1000)
    losses, steps = fitted.history.validation_loss, fitted.history.validation_step
    stale = next(i for i in range(losses.size) if i - np.argmin(losses[: i + 1]) == 3)
    # A quarter of the steps taken until then are left, from the best model on and at a falling rate.
    assert fitted.history.loss.size == steps[stale] + steps[stale] // 4
    assert steps[-1] == fitted.history.loss.size
    assert losses[stale + 1] < losses[stale]
    at_best = float(jnp.mean((fitted.model["place"] - 0.5) ** 2))
    assert at_best < 1.5
    assert at_best < float(jnp.mean((DATA.mean(axis=0) - 0.5) ** 2))


def test_a_run_that_cools_down_ends_nearer_the_minimum(key):
    """Minibatches of noisy data: at the full rate the model jumps about, and no look is better for long."""
    data = np.random.default_rng(0).normal(size=(200, 2))
    settings = {"steps": 100_000, "batch_size": 4, "learning_rate": 0.3, "every": 20, "progress": False}
    fitted = rf.fit(
        jnp.full(2, 3.0), data, key=key, objective=Near(), validation=data, patience=10, **settings
    )
    losses = fitted.history.validation_loss
    stale = next(i for i in range(losses.size) if i - np.argmin(losses[: i + 1]) == 10)
    assert fitted.history.loss.size < 10_000
    floor = np.mean((data - data.mean(axis=0)) ** 2)
    before, after = np.mean(losses[5 : stale + 1]) - floor, losses[-1] - floor
    assert after < 0.3 * before


class Near(rf.AbstractObjective):
    """The squared distance."""

    uses_data = True

    def __call__(self, model, x, *, key):
        return jnp.mean((model[None] - x) ** 2), {}


class Blind(rf.AbstractObjective):
    """The squared distance; on the seven rows to validate on it is NaN while the model is below `until`."""

    until: float
    uses_data = True

    def __call__(self, model, x, *, key):
        loss = jnp.mean((model[None] - x) ** 2)
        return jnp.where((model[0] < self.until) & (x.shape[0] == 7), jnp.nan, loss), {}


@pytest.mark.parametrize("patience", [None, 3])
def test_a_look_that_comes_to_nan_is_worse_than_any_other(key, patience):
    data, aside = np.full((40, 1), 3.0), np.full((7, 1), 3.0)
    settings = SETTINGS | {"steps": 600, "every": 20, "patience": patience}
    fitted = rf.fit(jnp.zeros(1), data, key=key, objective=Blind(0.5), validation=aside, **settings)
    losses = fitted.history.validation_loss
    assert np.isnan(losses[0])
    np.testing.assert_allclose(fitted.model, 3, atol=0.2)
    assert losses.size > 10


def test_where_every_look_comes_to_nan_the_last_model_is_returned(key):
    data, aside = np.full((40, 1), 3.0), np.full((7, 1), 3.0)
    fitted = rf.fit(jnp.zeros(1), data, key=key, objective=Blind(9.0), validation=aside, **SETTINGS)
    assert fitted.model[0] > 2


def test_numbers_of_numpy_will_do_as_settings(key, tmp_path):
    settings = {"steps": np.int64(3), "batch_size": np.int64(8), "every": np.int64(2)}
    settings |= {"learning_rate": np.float32(0.1), "clip": np.float32(1), "patience": np.int64(2)}
    file = tmp_path / "run.checkpoint"
    first = fit(key, checkpoint=file, validation=0.1, **settings)
    assert same(first.model, fit(key, checkpoint=file, resume=True, validation=0.1, **settings).model)


def test_steps_that_are_not_finite_are_skipped_and_counted(key):
    data = np.where(np.arange(400)[:, None] % 8 == 0, -1.0, 2.0)
    fitted = rf.fit(jnp.zeros(1), data, key=key, objective=Broken(), **SETTINGS)
    skipped = fitted.history.skipped
    assert 10 < skipped < 80
    assert np.sum(np.isnan(fitted.history.loss)) == skipped
    assert 1 < float(fitted.model[0]) < 2


def test_a_hopeless_run_ends_with_the_reason(key):
    with pytest.raises(rf.NonFiniteError, match=r"^20 steps in a row up to step 20 were not finite"):
        rf.fit(jnp.zeros(1), -np.ones((9, 1)), key=key, objective=Broken(), **SETTINGS)


def test_a_model_that_returns_nan_is_named(key):
    drift = lambda t, z: jnp.where(z > 100, z, jnp.nan)
    flow = rf.StochasticFlow(rf.ItoSDE(drift, rf.NoDiffusion()), rf.Normal(jnp.zeros(1)))
    with pytest.raises(rf.NonFiniteError, match=r"drift returned a value that is not finite at t = "):
        rf.fit(flow, np.zeros((4, 1)), key=key, steps=30, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"^steps must be a positive whole number"),
        ({"batch_size": -1}, r"^batch_size must be a positive whole number"),
        ({"learning_rate": 0.0}, r"^learning_rate must be positive"),
        ({"validation": 1.5}, r"^validation must be a share of the data"),
        ({"patience": 3}, r"^patience needs validation data"),
        ({"resume": True}, r"^resume needs a checkpoint"),
        ({"data": None}, r"^Distance needs data"),
        ({"data": np.ones(3)}, r"^data must have shape \(rows, dimensions\), got \(3,\)"),
        (
            {"data": np.array([[1.0, 2.0], [np.nan, 1.0]])},
            r"^data has a value that is not finite, first in row 1",
        ),
    ],
)
def test_bad_settings_get_one_line(key, changes, message):
    with pytest.raises(ValueError, match=message):
        fit(key, **changes)


# ------------------------------------------------------------------------------ maximum likelihood


def flow_of(noise, key):
    drift, diffusion = rf.MLP(1, 1, width=8, depth=1, key=key), rf.ConstantDiffusion(noise * jnp.eye(1))
    sde, integrator = rf.ItoSDE(drift, diffusion), rf.FixedGrid(rf.RK4(), steps=6)
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2), integrator=integrator)


@pytest.mark.parametrize(
    "proposal", [None, pytest.param(rf.Prior(), marks=pytest.mark.slow)], ids=["learned", "prior"]
)
def test_maximum_likelihood_finds_a_normal_distribution(key, proposal):
    """N(1, 0.7²) from N(0, 1) with noise: the loss comes near the entropy."""
    data = 1 + 0.7 * jax.random.normal(key, (2000, 1))
    # Paths that do not learn where to look take more of them, and more steps.
    paths, steps = (4, 300) if proposal is None else (16, 500)
    settings = {"objective": rf.MaximumLikelihood(paths, proposal), "steps": steps, "batch_size": 64}
    fitted = rf.fit(flow_of(0.5, key), data, key=key, **settings, progress=False)
    truth = 0.5 * np.log(2 * np.pi * np.e * 0.49)
    assert abs(fitted.history.recent() - truth) < 0.1
    assert fitted.history.recent("effective_paths") > (3 if proposal is None else 5)
    assert fitted.history.metrics["lost"].max() == 0


def test_one_path_from_the_prior_is_the_paper_s_bound(key):
    """−E log p(x | path), and more paths are below it."""
    flow, x = flow_of(0.8, key), jax.random.normal(key, (512, 1))
    keys = jax.random.split(key, 3)
    loss = eqx.filter_jit(lambda objective: objective(flow, x, key=keys[0])[0])
    one, many = (loss(rf.MaximumLikelihood(k, rf.Prior())) for k in (1, 32))
    given = flow.log_prob_given_path(x, flow.sample_path(key=keys[1], shape=(512,)))
    assert abs(one + given.mean()) < 4 * float(given.std()) * np.sqrt(2 / 512)
    assert many < one


def test_stationarity_is_zero_for_the_distribution_an_sde_keeps_and_only_for_it(key):
    """Langevin of a correlated Gaussian with state-dependent noise: μ = ½(−σσᵀC⁻¹z + div σσᵀ)."""
    covariance = np.array([[1.0, 0.6], [0.6, 2.0]])
    precision = np.linalg.inv(covariance)
    square = lambda z: 1 + z @ z  # σσᵀ = (1 + |z|²) I, of divergence 2z
    sde = rf.ItoSDE(
        lambda t, z: z - 0.5 * square(z) * (precision @ z), lambda t, z: jnp.sqrt(square(z)) * jnp.eye(2)
    )
    x = jax.random.normal(key, (20_000, 2)) @ np.linalg.cholesky(covariance).T
    rate = eqx.filter_jit(lambda sde, x: rf.stationarity(sde, x, key=key))
    assert abs(rate(sde, x)) < 3e-4
    assert rate(sde, x + 0.5) > 0.003
    assert rate(sde, 1.3 * x) > 0.003
    # Without Itô's term it keeps another distribution.
    assert rate(rf.StratonovichSDE(sde.drift, sde.diffusion), x) > 0.003
    np.testing.assert_allclose(rate(rf.to_stratonovich(sde), x), rate(sde, x), atol=1e-12)


def test_confinement_is_zero_for_an_sde_that_comes_back_and_not_for_one_that_wanders(key):
    """dZ = −a(Z − c) dt + s dB: far from c, LV/V is −2a but for the noise, s²d/V."""
    centre, spread = np.array([5.0, -2.0]), np.array([3.0, 0.1])
    x = jax.random.normal(key, (256, 2)) @ np.diag(spread) + centre[None]

    def away(rate, noise, centre=centre, asked=1.0):
        sde = rf.ItoSDE(lambda t, z: -rate * (z - centre), lambda t, z: noise * jnp.diag(spread))
        return float(rf.confinement(sde, x, key=key, rate=asked))

    assert away(0.9, 0.1) == 0
    np.testing.assert_allclose(away(0.0, 0.0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(away(0.25, 0.0, np.asarray(x.mean(axis=0)), asked=2.0), 1.5**2, rtol=1e-6)
    assert away(0.9, 10.0) > 0.1  # noise alone carries it off
    assert away(0.9, 0.1, centre + 100) > 0.1  # it comes back, to another place


def test_stationarity_does_not_mind_the_order_of_the_sample(key):
    """Halves of sorted data are two distributions: the SDE that keeps the whole moves each of them."""
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: 2**0.5 * jnp.eye(1))
    x = jnp.sort(jax.random.normal(key, (4096, 1)), axis=0)
    assert abs(rf.stationarity(sde, x, key=key)) < 2e-3


@pytest.mark.slow
def test_no_sde_makes_the_stationary_loss_negative(key):
    """Drift to the right in one half of the data and to the left in the other, as strong as one likes."""
    x = jnp.sort(jax.random.normal(key, (64, 1)), axis=0)
    for drift in (lambda t, z: 1e3 * jnp.tanh(9 * z), lambda t, z: 1e3 * jnp.cos(400 * z)):
        sde = rf.ItoSDE(drift, lambda t, z: jnp.eye(1))
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), t1=1e-6)
        for seed in range(5):
            key = jax.random.key(seed)
            _, metrics = rf.MaximumLikelihood(1, rf.Prior(), stationary=1.0)(flow, x, key=key)
            assert metrics["moved"] > 0


def test_stationary_adds_what_the_sde_moves_and_what_it_lets_go(key):
    sde = rf.ItoSDE(lambda t, z: 0.3 * z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), t1=2.0)
    x = jax.random.normal(key, (64, 1))
    value = eqx.filter_jit(lambda objective: objective(flow, x, key=key))
    plain, _ = value(rf.MaximumLikelihood(2, rf.Prior()))
    loss, metrics = value(rf.MaximumLikelihood(2, rf.Prior(), stationary=3.0))
    assert metrics["moved"] > 0.01
    assert metrics["away"] > 0.5  # LV/V > 0.6, asked −0.25
    np.testing.assert_allclose(loss, plain + 3 * (metrics["moved"] + metrics["away"]), rtol=1e-12)
    with pytest.raises(ValueError, match="weight"):
        rf.MaximumLikelihood(stationary=-1)


def test_many_paths_with_an_estimated_divergence_are_refused(key):
    """log mean exp(log w + error) exceeds log mean w: training would make the error large."""
    flow = rf.neural_flow(20, noise=0.5, width=4, depth=1, key=key)
    x = jax.random.normal(key, (3, 20))
    with pytest.raises(ValueError, match="num_paths must be 1 with a divergence that is estimated"):
        rf.MaximumLikelihood(2)(flow, x, key=key)
    one = rf.MaximumLikelihood(1, rf.Prior())
    assert np.isfinite(jax.jit(lambda x: one(flow, x, key=key)[0])(x))


def test_without_noise_one_path_is_taken(key):
    flow = rf.neural_flow(2, noise=0.0, width=4, depth=1, key=key)
    x = jax.random.normal(key, (8, 2))
    fitted = rf.fit(flow, x, key=key, objective=rf.MaximumLikelihood(8), steps=1, progress=False)
    assert fitted.objective.bound.estimator.num_paths == 1


def test_a_model_gains_nothing_by_losing_points(key):
    """dZ = −a Z³ dt: the larger a, the more of the data no path reaches."""
    drift = lambda a: lambda t, z: -a * z**3
    flow = lambda a: rf.StochasticFlow(
        rf.ItoSDE(drift(a), rf.ConstantDiffusion(0.3 * jnp.eye(1))), rf.Normal(jnp.zeros(1))
    )
    x = jax.random.normal(key, (64, 1))
    objective = rf.MaximumLikelihood(2, rf.Prior())
    loss = jax.jit(lambda a: objective(flow(a), x, key=key))
    (none, kept), (many, lost) = loss(1e-3), loss(5.0)
    assert kept["lost"] == 0
    assert lost["lost"] > 0.5
    assert none < 3
    assert many > 990 * lost["lost"]


@pytest.mark.slow
def test_paths_that_do_not_reach_a_point_are_counted_and_leave_gradients_finite(key):
    """dZ = −Z³ dt: backwards from far out every path escapes."""
    flow = rf.StochasticFlow(
        rf.ItoSDE(lambda t, z: -(z**3), rf.ConstantDiffusion(0.1 * jnp.eye(1))), rf.Normal(jnp.zeros(1))
    )
    x = jnp.array([[0.1], [5.0]])
    loss = lambda flow: rf.MaximumLikelihood(2, rf.Prior())(flow, x, key=key)
    (value, metrics), slope = eqx.filter_value_and_grad(loss, has_aux=True)(flow)
    assert metrics["lost"] == 0.5
    # The point that is lost counts 1000 nats, and the other one what it does alone.
    x = x[:1]
    np.testing.assert_allclose(value, (1000 + loss(flow)[0]) / 2, rtol=1e-3)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slope))
