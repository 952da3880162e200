"""Compiled programs: another number needs no other program, and there are never too many of them."""

import contextlib
import threading
import time
from collections import OrderedDict
from pathlib import Path

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import roughflow as rf
from roughflow import _programs
from roughflow._programs import jit

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
    x, drift = jnp.ones((3, 2)), rf.sde.RestoringDrift(2, 0.5, width=3, depth=1, key=key)

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


def test_options_that_are_unknown_or_set_by_the_user_are_left_out(unset):
    unset.setattr(_programs, "EMITTERS", "xla_no_such_option")
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


def test_all_rounds_of_paths_are_one_program(key, caplog):
    """As the most expensive part of an estimate, it is compiled once."""
    flow = rf.StochasticFlow(rf.ItoSDE(Pull(1.5), lambda t, z: jnp.ones((1, 1))), rf.Normal(jnp.ones(1)))
    with jax.log_compiles():
        estimate = flow.estimate(np.zeros((3, 1)), key=key, estimator=rf.PullBack(16), tolerance=0.1)
    assert np.all(estimate.num_paths > 64)
    compiled = [text for text in caplog.messages if text.startswith("Compiling jit(_run)")]
    assert len(compiled) == 1


def linear(a, b=0.5):
    """An SDE written again for each parameter."""
    return rf.ItoSDE(
        lambda t, z: a * jnp.stack([z[1], -z[0]]), lambda t, z: jnp.array([[b, 0.0], [0.1 * z[0], b]])
    )


def flow_of(sde, dimension=2):
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(dimension)))


X = np.array([[0.3, -0.2], [1.0, 0.5], [0.0, 0.1]])


@pytest.mark.parametrize("calculus", ["Itô", pytest.param("Stratonovich", marks=pytest.mark.slow)])
def test_functions_written_again_reuse_programs(key, calculus):
    """And the results are those of the functions as they are, up to rounding."""

    def results(a, convert=lambda f: f):
        sde = linear(a)
        kind = rf.ItoSDE if calculus == "Itô" else rf.StratonovichSDE
        sde = kind(convert(sde.drift), convert(sde.diffusion))
        flow = flow_of(sde)
        yield flow.sample(key=key, shape=(3,))
        yield flow.log_prob_given_path(X, flow.sample_path(key=key))
        yield rf.simulate(sde, X, key=key, steps=3)

    list(results(1.0))
    with no_new_program():
        again = list(results(1.25))
    for ours, plain in zip(again, results(1.25, jax.tree_util.Partial), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-14)


def test_estimates_with_functions_written_again_reuse_programs(key):
    value = lambda a: flow_of(linear(a)).estimate(X, key=key, estimator=rf.PullBack(8)).log_prob
    value(1.0)
    with no_new_program():
        assert not np.allclose(value(1.5), value(1.0))


@pytest.mark.slow  # with `make test`, paths and estimates do
def test_transitions_with_functions_written_again_reuse_programs(key):
    def value(a):
        effort = rf.transition.Effort(2, 2, 2)
        return rf.transition_estimate(linear(a), X[:2], X[1:], 0.1, key=key, effort=effort).log_prob

    value(1.0)
    with no_new_program():
        assert not np.allclose(value(1.5), value(1.0))


def test_derivatives_in_what_functions_close_over(key):
    path = flow_of(linear(1.0)).sample_path(key=key)
    value = lambda a: jnp.sum(flow_of(linear(a)).log_prob_given_path(X, path))
    slope = jax.grad(value)(1.0)
    with no_new_program():
        other = jax.grad(value)(1.3)
    central = lambda a: (value(a + 1e-5) - value(a - 1e-5)) / 2e-5
    np.testing.assert_allclose([slope, other], [central(1.0), central(1.3)], rtol=1e-7)
    np.testing.assert_allclose(jax.jit(jax.grad(value))(1.3), other, rtol=1e-12)


@jit
def applied(function, *arguments):
    return function(*arguments)


def power(a):
    return lambda x: x**a


def branch(a):
    return lambda x: a * x if a > 1 else x + a


def custom(a):
    """A value and a rule for its derivative that both close over a number."""

    @jax.custom_jvp
    def function(x):
        return a * x

    function.defjvp(lambda primals, tangents: (function(*primals), 10 * a * tangents[0]))
    return lambda x: function(x)


def loop(a):
    return lambda x: jax.lax.fori_loop(0, 3, lambda i, y: a * y, x)


def softplus(a):
    return lambda x: jax.nn.softplus(a * x) + jax.nn.relu(x - a)


def matrix(a):
    weights = a * np.arange(4.0).reshape(2, 2)
    return lambda x: weights @ jnp.stack([x, x])


def operator(a):
    return lambda x: lx.DiagonalLinearOperator(a * jnp.stack([x, x]))


MADE = [(make, (0.7, 1.3)) for make in (power, branch, custom, loop, softplus, matrix, operator)]
MADE += [(power, numbers) for numbers in ((2.0, 3.0), (1.0, 2.0), (0.5, 0.5))]  # JAX has x² and √x


@pytest.mark.parametrize(("make", "numbers"), MADE)
def test_opened_functions_are_the_functions(make, numbers):
    """Whatever operations are in them, and whichever were compiled before."""
    for a in numbers:
        expected, tangent = jax.jvp(make(a), (1.7,), (1.0,))
        value, slope = jax.jvp(lambda x, a=a: applied(make(a), x), (1.7,), (1.0,))
        for ours, plain in zip(
            jax.tree.leaves((value, slope)), jax.tree.leaves((expected, tangent)), strict=True
        ):
            np.testing.assert_allclose(ours, plain, rtol=1e-14)


@pytest.mark.parametrize("make", [power, branch, softplus, matrix, operator])
def test_other_numbers_in_a_function_need_no_other_program(make):
    applied(make(1.2), 1.0)
    with no_new_program():
        applied(make(1.4), 2.0)


def test_whole_numbers_and_shapes_in_a_function_are_part_of_the_program():
    for n in (2, 3):
        assert applied(lambda x, n=n: x[n], jnp.arange(5.0)) == n
        assert applied(lambda x, n=n: x**n, jnp.asarray(2.0)) == 2**n
        assert applied(lambda x, n=n: jnp.sum(jnp.ones(n) * x), jnp.asarray(1.0)) == n


def test_a_function_is_traced_again_when_what_it_refers_to_has_changed():
    state, function = {"a": 1.0}, lambda x: state["a"] * x
    assert applied(function, 2.0) == 2
    state["a"] = 3.0
    assert applied(function, 2.0) == 6
    number = 1.0

    def closure(x):
        return number * x

    assert applied(closure, 2.0) == 2
    number = 4.0
    assert applied(closure, 2.0) == 8


def test_types_of_numbers_in_functions_stay():
    x = jnp.ones(2, jnp.float32)
    for number, dtype in ((2.0, jnp.float32), (np.float64(2), jnp.float64), (np.float32(2), jnp.float32)):
        assert applied(lambda x, number=number: number * x, x).dtype == dtype
        assert applied(lambda x, number=number: number * x, x.astype(float)).dtype == jnp.float64


def test_functions_of_other_things_than_arrays_stay_as_they_are():
    assert applied(lambda name, x: x + len(name), "abc", jnp.asarray(1.0)) == 4
    assert applied(lambda pair, x: pair["a"] * x, {"a": 2.0}, jnp.asarray(3.0)) == 6


def test_an_error_in_a_users_function_is_raised_as_it_is():
    def broken(x):
        raise KeyError("a user's mistake")

    with pytest.raises(KeyError, match="a user's mistake"):
        applied(broken, 1.0)


def test_numbers_of_functions_are_not_trained(key):
    flow = flow_of(linear(1.0))
    flow.log_prob_given_path(X, flow.sample_path(key=key))
    assert len(jax.tree.leaves(eqx.filter(flow.sde, eqx.is_array))) == 0


def test_the_number_of_programs_is_bounded(monkeypatch):
    """Dropped ones give back their memory maps."""
    maps = lambda: (
        Path("/proc/self/maps").read_bytes().count(b"\n") if Path("/proc/self/maps").exists() else 0
    )
    step = jit(lambda x: jnp.sin(x) + jnp.cumsum(x))
    monkeypatch.setattr(_programs, "_programs", OrderedDict())
    monkeypatch.setattr(_programs, "MAX_PROGRAMS", 4)
    used = []
    for rows in range(1, 25):
        step(np.ones(rows))
        used.append(maps())
    assert len(_programs._programs) == 4
    assert used[-1] - used[3] <= used[3] - used[0] + 20
    with no_new_program():
        step(np.ones(24))
    with pytest.raises(AssertionError), no_new_program():
        step(np.ones(1))


def test_a_message_in_interactive_use_alone(monkeypatch, capsys):
    monkeypatch.setattr(_programs, "MESSAGE_AFTER", 0.0)
    slow = lambda: jit(lambda x: time.sleep(0.05) or x + 1)
    threads = threading.active_count()
    slow()(1.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_programs, "_is_interactive", lambda: True)
    for _ in range(2):
        slow()(1.0)
    assert capsys.readouterr().err == "roughflow: compiling …\n"
    assert threading.active_count() == threads


def test_the_process_is_left_alone():
    """No listener, no cleared caches, no environment changed, no threads bound to cores."""
    package = Path(rf.__file__).parent
    for word in ("clear_caches", "jax.monitoring", "sched_setaffinity"):
        assert [path.name for path in package.rglob("*.py") if word in path.read_text()] == []
