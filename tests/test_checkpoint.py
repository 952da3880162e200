"""Runs that are cut in two end where whole ones do, and none is taken for another."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fits import DATA, Distance, fit, grouped, same

import roughflow as rf


def test_a_run_cut_in_two_ends_where_the_whole_one_does(key, tmp_path, interrupt_when_written):
    """Stopped by SIGINT in the middle, and gone on with from its checkpoint: equal to the last bit."""
    settings = {"steps": 3000, "validation": 0.2, "validate_every": 50, "average": 0.99}
    whole = fit(key, **settings)
    file = tmp_path / "run.checkpoint"
    with interrupt_when_written(file):
        half = fit(key, checkpoint=file, **settings)
    assert half.interrupted
    assert 0 < half.history.loss.size < 3000
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
    with pytest.raises(ValueError, match=r"^checkpoint .* exists: set resume=True to continue it"):
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
    settings = {"steps": 60, "optimiser": optax.sgd(0.1), "clip": math.inf, "average": average}
    whole = fit(key, **settings)
    # Runs of one step more each say where the parameters were.
    path = [fit(key, **(settings | {"steps": n, "average": 0})).model["place"] for n in (1, 2, 3)]
    mean = np.zeros(2)
    for n, place in enumerate(path):
        mean = mean + (1 - min(0.9, (1 + n) / (10 + n))) * (place - mean)
    short = fit(key, **(settings | {"steps": 3})).model["place"]
    np.testing.assert_allclose(short, path[-1] if average is None else mean, rtol=1e-12)
    file = tmp_path / "run.checkpoint"
    first = fit(key, checkpoint=file, validation=DATA[:7], validate_every=9, **settings)
    again = fit(key, checkpoint=file, validation=DATA[:7], validate_every=9, resume=True, **settings)
    assert same(first.model, again.model)
    with pytest.raises(ValueError, match=r"another run: average was"):
        fit(
            key,
            checkpoint=file,
            resume=True,
            validation=DATA[:7],
            validate_every=9,
            **(settings | {"average": 0.5}),
        )
    assert not same(whole.model, {"place": path[-1], "other": whole.model["other"]})


class Walk(rf.train.AbstractStatefulObjective):
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
        jnp.zeros(1), key=key, objective=Walk(), **grouped({"steps": 40, "progress": False} | changes)
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
from roughflow.train._checkpoint import fingerprint
from test_checkpoint import WORDS, run
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
        progress=False,
        training=rf.train.TrainingOptions(optimiser=optimiser),
        run=rf.train.RunOptions(checkpoint=file, resume=resume),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is done: going on with it takes no step, only the checks."""
    file = tmp_path_factory.mktemp("runs") / "run.checkpoint"
    run(file)
    return file


@pytest.mark.slow  # with `make test`, what is noted has no address and no order of a hash
def test_a_run_is_the_same_in_another_process(finished):
    """The target is a partial function and the optimiser a closure: neither has a name that lasts."""
    from roughflow.train._checkpoint import fingerprint

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
        (
            {"target": lambda z: bell(z, 1.0)},
            r"log_density was functools.partial, now test_checkpoint.<lambda>",
        ),
        (
            {"target": functools.partial(bell, loc=jnp.array([2.0]))},
            r"log_density.keywords.loc is different",
        ),
        (
            {"target": functools.partial(far, loc=jnp.array([1.0]))},
            r"log_density.function was test_checkpoint.bell, now test_checkpoint.far",
        ),
        ({"optimiser": optax.adam(1e-3)}, r"another run: optimiser\..*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_a_run_depends_on_is_noted(finished, changes, message):
    with pytest.raises(ValueError, match=message):
        run(finished, resume=True, **changes)


def test_functions_are_told_apart_by_what_they_do():
    from roughflow.train._checkpoint import difference, fingerprint

    told = lambda one, two: difference(fingerprint(one, "f"), fingerprint(two, "f"))
    shifted = lambda loc: lambda z: z - loc
    assert told(shifted(1.0), shifted(1.0)) is None
    assert told(shifted(1.0), shifted(2.0)) == "f.loc was 1.0, now 2.0"
    assert told(shifted(shifted(1.0)), shifted(shifted(2.0))) == "f.loc.loc was 1.0, now 2.0"
    assert told(shifted(np.ones(2)), shifted(np.zeros(2))) == "f.loc is different"
    first, second = (lambda z: z + 1), (lambda z: z + 2)
    assert told(first, second) == "f.its source.0 was 'lambda z: z + 1', now 'lambda z: z + 2'"
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
    from roughflow.train._checkpoint import fingerprint

    class Plain:
        def __init__(self):
            self.itself, self.words = self, {"one", "two", "three"}

    value = [Plain(), object(), np.add, jnp.add, jax.nn.relu, {"b": 1, "a": (2,) * 20}, frozenset({1}), ...]
    told = repr(fingerprint(value, "it"))
    assert "0x" not in told
    assert told == repr(fingerprint([Plain(), object(), *value[2:]], "it"))


def test_a_checkpoint_of_an_older_version_is_named(finished, tmp_path):
    from roughflow.files import read_archive, write_archive
    from roughflow.train._checkpoint import VERSION

    header, arrays = read_archive(finished, "checkpoint", VERSION)
    write_archive(tmp_path / "old.checkpoint", header | {"version": 1}, arrays)
    with pytest.raises(ValueError, match=r"was written by an older version"):
        run(tmp_path / "old.checkpoint", resume=True)


def test_a_python_upgrade_keeps_checkpoints():
    """Bytecode differs between versions of Python, so a function in a file counts by its source."""
    from roughflow.train._checkpoint import fingerprint

    def described():  # the same in all versions
        return 2.0

    parts = fingerprint(described, "f")
    assert parts["f.its source.0"] == "'def described():'"
    code = described.__code__
    described.__code__ = code.replace(co_code=code.co_code + code.co_code[-2:])
    assert fingerprint(described, "f") == parts


def test_a_checkpoint_that_compared_bytecode_is_resumed(finished, tmp_path):
    """Version 4 also named the modules of roughflow's classes, and a field of FixedGrid differently."""
    from roughflow.files import read_archive, write_archive
    from roughflow.train._checkpoint import VERSION

    header, arrays = read_archive(finished, "checkpoint", VERSION)
    settings = {
        place.replace(".solver", ".method"): text.replace(
            "roughflow.train._reverse_kl", "roughflow.learn._reverse_kl"
        )
        for place, text in header["settings"].items()
        if ".its source" not in place
    }
    assert settings != header["settings"]
    settings["objective.log_density.function.its code"] = "0123456789abcdef"
    file = tmp_path / "old.checkpoint"
    write_archive(file, header | {"version": 4, "settings": settings}, arrays)
    run(file, resume=True)
    with pytest.raises(ValueError, match=r"objective.batch_size was 8, now 9"):
        run(file, resume=True, batch=9)
    write_archive(file, header | {"settings": settings}, arrays)
    with pytest.raises(ValueError, match=r"belongs to another run"):
        run(file, resume=True)
