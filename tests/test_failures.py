"""What goes wrong is said in one line, or, where it is mathematics, has density zero."""

import re
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from problems import every_integrator, gbm_2d, ou_1d

import roughflow as rf

BASE = rf.Normal(jnp.zeros(2))
DRIFT = lambda t, z: -z
NOISE = lambda t, z: jnp.ones((2, 3))


def refused(error, *parts):
    """Expect an error of one line in which these parts occur, in this order."""
    return pytest.raises(error, match=r"^[^\n]*" + r"[^\n]*".join(map(re.escape, parts)) + r"[^\n]*$")


def test_refused_means_one_line():
    """The helper above does see a second line, and a part that is missing."""
    with refused(ValueError, "one", "line"):
        raise ValueError("in one short line")
    for message in ("one line\nand another", "first\none line", "one", "line one"):
        with pytest.raises(AssertionError), refused(ValueError, "one", "line"):
            raise ValueError(message)


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("drift", "shape"),
    [(lambda t, z: z[:1], "(1,)"), (lambda t, z: jnp.outer(z, z), "(2, 2)"), (lambda t, z: jnp.sum(z), "()")],
    ids=["short", "matrix", "scalar"],
)
def test_wrong_shape_of_drift(drift, shape):
    with refused(ValueError, "drift must return shape (2,)", f"got {shape}"):
        rf.StochasticFlow(rf.ItoSDE(drift, NOISE), BASE)


@pytest.mark.parametrize(
    ("diffusion", "shape"),
    [(lambda t, z: z, "(2,)"), (lambda t, z: jnp.ones((3, 2)), "(3, 2)"), (lambda t, z: z[0], "()")],
    ids=["vector", "transposed", "scalar"],
)
def test_wrong_shape_of_diffusion(diffusion, shape):
    with refused(ValueError, "diffusion must return shape (2, m)", f"got {shape}"):
        rf.StochasticFlow(rf.StratonovichSDE(DRIFT, diffusion), BASE)


def test_an_index_that_is_out_of_range():
    """JAX would take the last coordinate instead."""
    with refused(ValueError, "drift fails for z of shape (2,)", "index 2 is out of bounds"):
        rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z * z[2], NOISE), BASE)
    with refused(ValueError, "diffusion fails for z of shape (2,)", "index 5 is out of bounds"):
        rf.StochasticFlow(rf.ItoSDE(DRIFT, lambda t, z: z[5] * jnp.ones((2, 3))), BASE)


def test_a_drift_without_time():
    with refused(ValueError, "drift fails", "it is called as drift(t, z)"):
        rf.StochasticFlow(rf.ItoSDE(lambda z: -z, NOISE), BASE)


def test_a_base_of_another_dimension_is_named():
    wrong = "base has dimension 3, but drift and diffusion have 2: "
    with refused(ValueError, wrong, "diffusion must return shape (3, m)", "got (2, 3)"):
        rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), rf.Normal(jnp.zeros(3)))
    network = rf.MLP(20, 20, width=3, key=jax.random.key(0))
    for base, sde in (
        (3, rf.ItoSDE(lambda t, z: jnp.stack([z[1], -z[0]]), rf.ConstantDiffusion(jnp.eye(2)))),
        (1, rf.ItoSDE(lambda t, z: jnp.stack([z[1], -z[0]]), NOISE)),
        (2, rf.ItoSDE(network, rf.DiagonalDiffusion(20, width=3, key=jax.random.key(0)))),
    ):
        true = 20 if sde.drift is network else 2
        with refused(ValueError, f"base has dimension {base}, but drift and diffusion have {true}: drift"):
            rf.StochasticFlow(sde, rf.Normal(jnp.zeros(base)))
    with refused(ValueError, "z0 has dimension 3, but drift and diffusion have 2"):
        rf.simulate(rf.ItoSDE(DRIFT, NOISE), jnp.zeros(3), key=jax.random.key(0))


class Wrapped(eqx.Module):
    """A network of Equinox as a diffusion."""

    network: eqx.nn.MLP

    def __call__(self, t, z):
        return jnp.diag(self.network(z))


def test_a_kink_in_the_diffusion_is_found_in_any_network(key):
    """eqx.nn.MLP has relu by default. A drift, and a Stratonovich diffusion, may have it."""
    make = lambda activation: eqx.nn.MLP(2, 2, 3, 1, activation=activation, key=key)
    kinked, drift = make(jax.nn.relu), lambda t, z: make(jax.nn.relu)(z)
    for diffusion, name in (
        (Wrapped(kinked), "relu"),
        (lambda t, z: jnp.diag(kinked(z)), "relu"),
        (Wrapped(make(jax.nn.leaky_relu)), "leaky_relu"),
        (
            lambda t, z: lx.DiagonalLinearOperator(jax.lax.cond(t > 0, jax.nn.hard_tanh, jnp.tanh, z)),
            "hard_tanh",
        ),
    ):
        with refused(ValueError, f"diffusion has the activation {name},", "silently wrong", "softplus"):
            rf.StochasticFlow(rf.ItoSDE(drift, diffusion), BASE)
        rf.StochasticFlow(rf.StratonovichSDE(drift, diffusion), BASE)
    for smooth in (jax.nn.softplus, jax.nn.silu, jax.nn.gelu, jnp.tanh):
        rf.StochasticFlow(rf.ItoSDE(drift, Wrapped(make(smooth))), BASE)


@pytest.mark.parametrize("shape", [(3,), (4, 1), ()])
def test_wrong_shape_of_x(shape, key):
    flow = rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), BASE)
    path = flow.sample_path(key=key)
    with refused(ValueError, "x must have shape (..., 2)", f"got {shape}"):
        flow.log_prob_given_path(jnp.zeros(shape), path)
    with refused(ValueError, "z must have shape (..., 2)", f"got {shape}"):
        flow.push_forward(jnp.zeros(shape), path)


def test_wrong_shape_of_path(key):
    flow = rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), BASE)
    path = rf.KarhunenLoeve(6).sample(key=key, noise_dimension=2, shape=(4,))
    with refused(ValueError, "path", "(..., n, 3)", "(2, 3)", "got (4, 6, 2)"):
        flow.log_prob_given_path(jnp.zeros(2), path)


def test_batches_that_do_not_broadcast(key):
    flow = rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), BASE)
    with refused(ValueError, "(5,)", "(4,)"):
        flow.log_prob_given_path(jnp.zeros((5, 2)), flow.sample_path(key=key, shape=(4,)))


def test_end_time_beyond_the_path(key):
    flow = rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), BASE)
    with refused(ValueError, "t1", "beyond the path's end at 1.0, got 2.0", "sample_path"):
        flow.log_prob_given_path(jnp.zeros(2), flow.sample_path(key=key), t1=2.0)
    with refused(ValueError, "t1", "beyond the path's end"):
        flow.sample(key=key, t1=2.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (jax.random.PRNGKey(0), "old-style uint32 key (jax.random.PRNGKey)"),
        (np.zeros(2, np.uint32), "old-style uint32 key (jax.random.PRNGKey)"),
        (0, "got int"),
        (None, "got NoneType"),
        (jax.random.split(jax.random.key(0), 3), "single key, got an array of keys of shape (3,)"),
    ],
    ids=["PRNGKey", "numpy", "int", "None", "keys"],
)
def test_wrong_key(bad, message, key):
    flow = rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), BASE)
    path = flow.sample_path(key=key)
    calls = [
        lambda: flow.sample(key=bad),
        lambda: flow.sample_path(key=bad),
        lambda: flow.sample_and_log_prob_given_path(key=bad),
        lambda: flow.driver.sample(key=bad),
        lambda: flow.base.sample(key=bad),
        lambda: rf.MLP(2, 2, key=bad),
    ]
    if bad is not None:
        calls += [
            lambda: flow.log_prob_given_path(jnp.zeros(2), path, key=bad),
            lambda: rf.to_stratonovich(flow.sde, key=bad),
        ]
    for call in calls:
        with refused(TypeError, "key", message):
            call()


def test_an_estimate_takes_a_single_key_inside_a_jit_too(key):
    flow, keys = rf.StochasticFlow(rf.ItoSDE(DRIFT, NOISE), BASE), jax.random.split(key, 3)
    estimate = lambda keys: flow.estimate(jnp.zeros((3, 2)), key=keys).log_prob
    with pytest.raises(TypeError, match="key must be a single key, got an array"):
        jax.eval_shape(estimate, keys)


# -------------------------------------------------------------------- a model that is not finite


class Spoilt(eqx.Module):
    """f(t, z), and NaN after t = ½ or before. An array says which, so that all share a compilation."""

    function: Callable = eqx.field(static=True)
    side: jax.Array

    def __call__(self, t, z):
        return jnp.where(self.side * (t - 0.5) > 0, jnp.nan, self.function(t, z))


def decay(t, z):
    return -z


def constant(t, z):
    return jnp.full((1, 1), 0.3, z.dtype)


def broken(part, late, integrator=None, t1=1.0):
    side = {name: float(name == part) * (1 if late else -1) for name in ("drift", "diffusion")}
    drift, diffusion = (
        Spoilt(decay, jnp.asarray(side["drift"])),
        Spoilt(constant, jnp.asarray(side["diffusion"])),
    )
    return rf.StochasticFlow(
        rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(1)), t1, rf.KarhunenLoeve(3), integrator=integrator
    )


@every_integrator
@pytest.mark.parametrize(("direction", "part"), [("forward", "drift"), ("backward", "diffusion")])
def test_nan_from_the_model_names_part_and_time(direction, part, integrator, key):
    late = direction == "forward"
    flow = broken(part, late, integrator)
    path = flow.sample_path(key=key)
    with refused(rf.NonFiniteError, f"{part} returned a value that is not finite at t = ") as caught:
        if late:
            flow.push_forward(jnp.ones((2, 1)), path)
        else:
            flow.log_prob_given_path(jnp.ones((2, 1)), path)
    time = float(re.search(r"t = ([\d.e-]+)", str(caught.value))[1])
    assert abs(time - 0.5) < 0.03


def test_nan_counts_in_the_time_of_the_horizon(key):
    flow = broken("drift", True, t1=2.0)
    with refused(rf.NonFiniteError, "drift returned", "t = 0.") as caught:
        flow.push_forward(jnp.ones(1), flow.sample_path(key=key))
    assert 0.5 < float(re.search(r"t = ([\d.]+)", str(caught.value))[1]) < 0.7


@every_integrator
def test_nan_from_the_model_is_an_error_under_jit_too(integrator, key):
    flow = broken("drift", False, integrator)
    path = flow.sample_path(key=key)
    with pytest.raises(eqx.EquinoxRuntimeError, match="drift or diffusion"):
        eqx.filter_jit(lambda f, x, p: f.log_prob_given_path(x, p))(flow, jnp.ones((2, 1)), path)


def test_nan_from_the_model_is_an_error_under_grad_too(key):
    flow = broken("drift", False)
    path = flow.sample_path(key=key)
    with pytest.raises((rf.NonFiniteError, eqx.EquinoxRuntimeError), match="drift"):
        jax.grad(lambda x: flow.log_prob_given_path(x, path))(jnp.ones(1))


def test_one_broken_sample_is_found_in_a_batch(key):
    """The point named is the one that broke: here where z > 3."""
    drift = lambda t, z: jnp.where(z > 3, jnp.nan, 0.0) * z
    sde = rf.ItoSDE(drift, lambda t, z: 0.01 * jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    with refused(rf.NonFiniteError, "drift returned", "t = 1", "z = [7]"):
        flow.log_prob_given_path(jnp.array([[0.0], [7.0], [1.0]]), flow.sample_path(key=key))


@pytest.mark.parametrize(
    ("integrator", "far"),
    [
        (rf.FixedGrid(steps=16), rf.flow.Status.ESCAPED),
        pytest.param(
            rf.Adaptive(max_steps=16, per_sample=True), rf.flow.Status.OUT_OF_STEPS, marks=pytest.mark.slow
        ),
    ],
    ids=["fixed", "adaptive"],
)
def test_the_outcome_says_why_each_solve_ended(integrator, far, key):
    """dZ = Z³ dt, NaN below −1: near zero it arrives, from 2 it leaves for infinity by t = 1/8."""
    sde = rf.ItoSDE(lambda t, z: jnp.where(z < -1, jnp.nan, z**3), rf.sde.NoDiffusion())
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), integrator=integrator).without_errors()
    outcome = flow.solve(jnp.array([[0.1], [2.0], [-2.0]]), flow.sample_path(key=key), reverse=False)
    told = [rf.flow.Status.FINE, far, rf.flow.Status.NON_FINITE]
    assert [rf.flow.Status(code) for code in outcome.status.tolist()] == told
    inside = jax.jit(lambda z: flow.solve(z, flow.sample_path(key=key), reverse=False).status)
    assert inside(jnp.array([[jnp.nan]])) == rf.flow.Status.NON_FINITE
    assert all(code.message and "\n" not in code.message for code in rf.flow.Status)


def test_data_that_are_nan_are_refused_and_not_taken_for_data_far_away(key):
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base)
    with refused((ValueError, rf.NonFiniteError), "x"):
        flow.log_prob_given_path(jnp.array([jnp.nan]), flow.sample_path(key=key))


@pytest.mark.parametrize("per_sample", [pytest.param(False, marks=pytest.mark.slow), True])
def test_running_out_of_steps_names_the_remedy(per_sample, key):
    problem = gbm_2d()
    integrator = rf.Adaptive(max_steps=3, per_sample=per_sample)
    flow = rf.StochasticFlow(problem.ito, problem.base, integrator=integrator)
    path = flow.sample_path(key=key)
    with refused(rf.OutOfStepsError, "ran out of steps", "max_steps"):
        flow.log_prob_given_path(jnp.ones((2, 2)), path)


@pytest.mark.slow  # with `make test`, NaN is
def test_running_out_of_steps_is_an_error_under_jit_too(key):
    problem = ou_1d()
    flow = rf.StochasticFlow(problem.ito, problem.base, integrator=rf.Adaptive(max_steps=3))
    path = flow.sample_path(key=key)
    with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps"):
        eqx.filter_jit(lambda f, x, p: f.log_prob_given_path(x, p))(flow, jnp.ones(1), path)
