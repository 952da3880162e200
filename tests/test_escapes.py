"""Solves that leave for infinity: a density of zero, with gradients that stay finite."""

import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import INTEGRATORS

import roughflow as rf


class Scaled(eqx.Module):
    """rate · shape(z), so that there is a parameter to differentiate."""

    rate: jax.Array
    shape: Callable = eqx.field(static=True)

    def __call__(self, t, z):
        return self.rate * self.shape(z)


def cubic(z):
    return z - z**3


def exponential(z):
    return 1 - jnp.exp(z)


def escaping(shape, dimension, integrator, dtype=jnp.float64):
    drift = Scaled(jnp.ones(()), shape)
    diffusion = rf.ConstantDiffusion(0.3 * jnp.eye(dimension))
    flow = rf.StochasticFlow(
        rf.ItoSDE(drift, diffusion),
        rf.Normal(jnp.zeros(dimension)),
        driver=rf.KarhunenLoeve(3),
        integrator=integrator,
    )
    return cast(flow, dtype)


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, tree)


@eqx.filter_jit
def density_and_gradients(flow, x, path, counted):
    """log p per sample, and the gradients of its sum over the samples that count."""

    def total(arguments):
        flow, x, path = arguments
        value = flow.log_prob_given_path(x, path)
        return jnp.sum(jnp.where(counted, value, 0)), value

    (_, value), gradients = eqx.filter_value_and_grad(total, has_aux=True)((flow, x, path))
    return value, gradients


def check_escapes(flow, x, gone, key, atol):
    """Density zero and no gradient for those gone; the rest as if there had been no others."""
    dtype = flow.base.loc.dtype
    x, gone = jnp.asarray(x, dtype), np.array(gone)
    path = cast(flow.sample_path(key=key, shape=x.shape[:1]), dtype)
    value, (d_flow, d_x, d_path) = density_and_gradients(flow, x, path, ~gone)
    assert value.dtype == dtype
    np.testing.assert_array_equal(np.isneginf(value), gone)
    assert np.all(np.isfinite(value[~gone]))
    for leaf in jax.tree.leaves((d_flow, d_x, d_path)):
        assert np.all(np.isfinite(leaf))
    np.testing.assert_array_equal(d_x[gone], 0)
    np.testing.assert_array_equal(d_path.coefficients[gone], 0)

    # The first sample, which stays, takes the places of those gone.
    stays = np.where(gone, 0, np.arange(gone.size))
    without = eqx.tree_at(lambda p: p.coefficients, path, path.coefficients[stays])
    alone, (e_flow, e_x, _) = density_and_gradients(flow, x[stays], without, ~gone)
    np.testing.assert_allclose(value[~gone], alone[~gone], rtol=0, atol=atol)
    np.testing.assert_allclose(d_x[~gone], e_x[~gone], rtol=0, atol=10 * atol)
    for a, b in zip(jax.tree.leaves(d_flow), jax.tree.leaves(e_flow), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=10 * atol)


ESCAPES = {
    "cubic": (cubic, [[0.3], [5.0], [-0.9], [-40.0], [1e6]], [False, True, False, True, True]),
    "cubic 2-D": (cubic, [[0.3, 0.2], [5.0, 0.1], [0.1, -40.0], [-0.2, 0.5]], [False, True, True, False]),
    "exponential": (exponential, [[-1.0], [5.0], [-30.0], [40.0]], [False, True, False, True]),
}


@pytest.mark.parametrize(
    ("name", "gradient", "dtype"),
    [
        pytest.param("cubic", rf.flow.Backpropagation(), "float64", marks=pytest.mark.slow),
        pytest.param("cubic", rf.flow.ConstantMemory(), "float32", marks=pytest.mark.slow),
        pytest.param("cubic 2-D", rf.flow.Backpropagation(), "float32", marks=pytest.mark.slow),
        ("cubic 2-D", rf.flow.ConstantMemory(), "float64"),
        pytest.param("exponential", rf.flow.Backpropagation(), "float64", marks=pytest.mark.slow),
        pytest.param("exponential", rf.flow.Backpropagation(), "float32", marks=pytest.mark.slow),
    ],
    ids=lambda p: type(p).__name__ if isinstance(p, eqx.Module) else p,
)
def test_escapes_on_a_fixed_grid(name, gradient, dtype, key):
    shape, x, gone = ESCAPES[name]
    flow = escaping(shape, len(x[0]), rf.FixedGrid(rf.flow.RK4(), steps=40, gradient=gradient), dtype)
    check_escapes(flow, x, gone, key, 1e-12 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_escapes_from_where_the_model_overflows_at_once(dtype, key):
    """exp(1000) is infinite: no density, and no NaN in anybody's gradient."""
    flow = escaping(exponential, 1, rf.FixedGrid(rf.flow.RK4(), steps=40), dtype)
    x = [[-1.0], [1000.0], [-30.0], [40.0]]
    check_escapes(flow, x, [False, True, False, True], key, 1e-12 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cubic", "float64"),
        pytest.param("cubic 2-D", "float64", marks=pytest.mark.slow),
        pytest.param("exponential", "float32", marks=pytest.mark.slow),
    ],
)
def test_escapes_of_an_adaptive_solve(name, dtype, key):
    """Steps are shared, so the others agree with themselves alone to the tolerance of the solve."""
    shape, x, gone = ESCAPES[name]
    check_escapes(escaping(shape, len(x[0]), rf.Adaptive(), dtype), x, gone, key, 1e-3)


@pytest.mark.parametrize(
    "integrator",
    [INTEGRATORS["fixed"], pytest.param(INTEGRATORS["adaptive"], marks=pytest.mark.slow)],
    ids=["fixed", "adaptive"],
)
def test_escapes_forwards(integrator, key):
    """dz = z³ dt reaches infinity before T = 1 from z = 2, and does not from 0.1."""
    sde = rf.ItoSDE(lambda t, z: z**3, lambda t, z: 0.01 * jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), integrator=integrator)
    path = flow.sample_path(key=key)
    end, change = flow.push_forward(jnp.array([[2.0], [0.1], [-3.0]]), path)
    np.testing.assert_array_equal(np.isinf(end[:, 0]), [True, False, True])
    np.testing.assert_array_equal(np.isinf(change), [True, False, True])
    outcome = flow.solve(jnp.array([[2.0], [0.1]]), path, reverse=False)
    # Without noise the time is 1/(2 z₀²).
    np.testing.assert_allclose(outcome.time[0], 1 / 8, atol=0.03)


def test_samples_that_escape_are_reported(key):
    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: z**3, rf.sde.NoDiffusion()), rf.Normal(jnp.full(1, 9.0)))
    with pytest.warns(UserWarning, match=r"^3 of 3 samples are infinite: unless the SDE diverges, use more"):
        assert np.isinf(flow.sample(key=key, shape=(3,))).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow.without_errors().sample(key=key, shape=(3,))
