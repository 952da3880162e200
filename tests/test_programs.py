"""Compiled programs: another number needs no other program, and there are never too many of them."""

import contextlib
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow import _programs
from roughflow._programs import jit, memory_maps, runs_long

EVENTS = []
jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: EVENTS.append(event))


class Pull(eqx.Module):
    """A drift with a plain number."""

    rate: float

    def __call__(self, t, z):
        return -self.rate * z


class Steep(eqx.Module):
    """A drift whose code looks at its number."""

    rate: float

    def __call__(self, t, z):
        return -(z**3) if self.rate > 1 else -z


@contextlib.contextmanager
def no_new_program():
    EVENTS.clear()
    yield
    assert [event for event in EVENTS if event.endswith("/backend_compile_duration")] == []


def test_compiling_is_seen():
    with pytest.raises(AssertionError), no_new_program():
        jax.jit(lambda x: x + 1)(jnp.ones(2))


def test_another_number_needs_no_other_program(key):
    z, noise = jnp.ones((5, 1)), rf.ConstantDiffusion(jnp.zeros((1, 1)))
    end = lambda rate, t1: rf.simulate(rf.ItoSDE(Pull(rate), noise), z, key=key, t1=t1, steps=400)
    np.testing.assert_allclose(end(1.0, 1.0), np.exp(-1), rtol=5e-3)
    end(3.0, 2.0)  # JAX's own small programs for another pair of numbers
    with no_new_program():
        np.testing.assert_allclose(end(2.0, 0.5), np.exp(-1), rtol=5e-3)


def test_another_scale_or_step_needs_no_other_program(key):
    def run(scale, dt):
        sde = rf.ItoSDE(Pull(scale), rf.FullDiffusion(2, width=3, scale=scale, key=key))
        return rf.sample_chain(sde, jnp.zeros(2), key=key, num_steps=7, dt=dt).samples

    one = run(0.5, 0.1)
    with no_new_program():
        two = run(0.25, 0.2)
    assert not np.allclose(one, two)


def test_a_flow_with_other_numbers_needs_no_other_program(key):
    """An end time, a rate of a drift of the user's, one of the library's, the scale of a network's noise."""
    x, drift = jnp.ones((3, 2)), rf.RestoringDrift(2, 0.5, width=3, depth=1, key=key)

    def density(number):
        for part in (Pull(number), eqx.tree_at(lambda d: d.rate, drift, number)):
            noise = rf.FullDiffusion(2, width=3, scale=number, key=key)
            flow = rf.StochasticFlow(rf.ItoSDE(part, noise), rf.Normal(jnp.zeros(2)), t1=number)
            yield np.asarray(flow.log_prob_given_path(x, flow.sample_path(key=key)))

    one = list(density(0.5))
    list(density(0.7))  # JAX's own small programs
    with no_new_program():
        two = list(density(0.25))
    assert not np.allclose(one, two)


@pytest.mark.parametrize(
    "estimator", [rf.PullBack(8), pytest.param(None, marks=pytest.mark.slow)], ids=["PullBack", "default"]
)
def test_another_number_of_points_needs_no_other_program(estimator, key):
    flow = rf.StochasticFlow(rf.ItoSDE(Pull(1.0), lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    x = np.linspace(-1, 1, 40)[:, None]
    five = flow.estimate(x[:5], key=key, estimator=estimator)
    with no_new_program():
        forty = flow.estimate(x, key=key, estimator=estimator)
    np.testing.assert_allclose(forty.log_prob[:5], five.log_prob, rtol=1e-12)


def test_code_that_looks_at_its_numbers_works_too(key):
    z, noise = 2 * jnp.ones((5, 1)), rf.ConstantDiffusion(jnp.zeros((1, 1)))
    end = lambda rate: rf.simulate(rf.ItoSDE(Steep(rate), noise), z, key=key, steps=1000)[0, 0]
    for _ in range(2):
        np.testing.assert_allclose(end(0.5), 2 * np.exp(-1), rtol=5e-3)
        np.testing.assert_allclose(end(2.0), 2 / np.sqrt(1 + 8), rtol=5e-3)  # z/√(1 + 2z²t)


def test_an_error_in_the_code_is_told_as_it_is():
    @jit
    def broken(x, rate):
        raise TypeError("a user's mistake")

    @jit
    def asks(x, rate):
        return bool(x[0] > rate)

    with pytest.raises(TypeError, match="a user's mistake"):
        broken(jnp.ones(2), 1.0)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        asks(jnp.ones(2), 1.0)


def test_plain_numbers_do_not_change_a_dtype():
    """To JAX a Python float has no precision of its own, and a NumPy scalar has."""
    double = jit(lambda x, number: x * number)
    x = jnp.ones(2, jnp.float32)
    assert double(x, 2.0).dtype == jnp.float32
    assert double(x, np.float64(2)).dtype == jnp.float64
    assert double(x, number=np.float32(2)).dtype == jnp.float32
    assert double(x, 2).dtype == jnp.float32


def test_gradients_and_batches_pass_through():
    power = jit(lambda x, rate: x**2 * rate)
    np.testing.assert_allclose(jax.grad(lambda x: power(x, 3.0))(2.0), 12)
    np.testing.assert_allclose(jax.vmap(lambda x: power(x, 3.0))(jnp.arange(3.0)), [0, 3, 12])
    np.testing.assert_allclose(jax.jit(lambda x: power(x, 3.0))(2.0), 12)


@pytest.fixture
def unset(monkeypatch):
    """No options of the user's, and none known yet."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    _programs.known_options.cache_clear()
    yield monkeypatch
    _programs.known_options.cache_clear()


def test_options_that_are_not_known_or_that_the_user_has_set_are_left_out(unset):
    unset.setattr(_programs, "QUICK", {"xla_no_such_option": True})
    assert _programs.known_options(1) == {_programs.LEVEL: 1}
    assert jit(lambda x: 2 * x, level=1)(3.0) == 6
    unset.setenv("XLA_FLAGS", f"--{_programs.LEVEL}=0")
    _programs.known_options.cache_clear()
    assert _programs.known_options(1) == {}


def test_on_a_gpu_every_program_is_spared_the_search_for_kernels(unset):
    unset.setattr(jax, "default_backend", lambda: "gpu")
    for level in (None, 0, 1):
        assert _programs.known_options(level) == {"xla_gpu_enable_triton_gemm": False}
    unset.undo()
    _programs.known_options.cache_clear()
    assert _programs.known_options(None) == {}


def test_quickly_compiled_programs_become_parts_of_others(unset):
    """Where options are refused: inside a jit or grad, also of what a function closes over."""
    assert _programs.known_options(0)
    power = jit(lambda x, rate: x**2 * rate, level=0)
    assert power(2.0, 3.0) == 12
    np.testing.assert_allclose(jax.grad(lambda x: power(x, 3.0))(2.0), 12)
    np.testing.assert_allclose(jax.vmap(lambda x: power(x, 3.0))(jnp.arange(3.0)), [0, 3, 12])
    np.testing.assert_allclose(jax.jit(lambda x: power(x, 3.0))(2.0), 12)
    np.testing.assert_allclose(jax.jit(lambda: power(2.0, 3.0))(), 12)
    np.testing.assert_allclose(jax.grad(lambda rate: jit(lambda x: x * rate, level=0)(2.0))(3.0), 2)


def test_what_runs_long_is_compiled_with_more_care(unset):
    """Within `runs_long` and nowhere else, another program of the same function."""
    if _programs.EMITTERS not in _programs.known_options(1):
        pytest.skip("this version of XLA has no such option")
    made, compile_with = [], eqx.filter_jit

    def filter_jit(function, compiler_options=None):
        made.append(compiler_options)
        return compile_with(function)

    unset.setattr(_programs.eqx, "filter_jit", filter_jit)
    double = jit(lambda x: 2 * x, level=1)
    for long in (False, True, False):
        with runs_long(long):
            assert double(3.0) == 6
    double(4.0)
    quick, careful = [options for options in made if options]
    assert set(quick) - set(careful) == {_programs.EMITTERS}


def test_the_trial_and_the_paths_that_count_are_one_program(key, caplog):
    """As the most expensive part of an estimate, it is compiled once."""
    flow = rf.StochasticFlow(rf.ItoSDE(Pull(1.5), lambda t, z: jnp.ones((1, 1))), rf.Normal(jnp.ones(1)))
    with jax.log_compiles():
        flow.estimate(np.zeros((3, 1)), key=key)
    compiled = [text for text in caplog.messages if text.startswith("Compiling jit(weigh)")]
    assert len(compiled) == 1


@pytest.mark.skipif(not memory_maps(), reason="this system does not tell")
def test_programs_are_dropped_before_there_are_too_many():
    """A search over sizes, in a process of its own, with a limit that is soon reached."""
    script = textwrap.dedent("""
        import jax.numpy as jnp, numpy as np
        from roughflow import _programs
        from roughflow._programs import memory_maps

        step = _programs.jit(lambda x: jnp.sin(x) + jnp.cumsum(x))
        step(np.ones(1))
        first = memory_maps()
        _programs.EVERY, _programs.LIMIT = 4, first + 300
        _programs._Held.limit = _programs.LIMIT
        print(max(memory_maps() - first + 0 * len(step(np.ones(rows))) for rows in range(2, 62)))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # Sixty programs would take more than 700.
    assert 200 < int(done.stdout) < 450


@pytest.mark.skipif(not memory_maps(), reason="this system does not tell")
def test_programs_are_not_dropped_while_one_is_traced(monkeypatch):
    """Nor is every call held up by maps that cannot be freed."""
    dropped = []
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(1))
    monkeypatch.setattr(_programs._Held, "limit", 1)
    monkeypatch.setattr(_programs, "LIMIT", 1)
    monkeypatch.setattr(_programs._Held, "fresh", _programs.EVERY)
    jax.eval_shape(lambda: _programs.drop_programs())
    assert not dropped
    _programs.drop_programs()
    assert len(dropped) == 1
    monkeypatch.setattr(_programs._Held, "fresh", _programs.EVERY)
    _programs.drop_programs()
    assert len(dropped) == 1
