"""Gradients in parameters, points and path coefficients, in every mode and every integrator."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

BACK, CONSTANT = rf.flow.Backpropagation(), rf.flow.ConstantMemory()
TIGHT = {"rtol": 1e-10, "atol": 1e-10, "max_steps": 20_000}
METHODS = {
    "heun": diffrax.Heun(),
    "midpoint": diffrax.Midpoint(),
    "rk4": rf.flow.RK4(),
    "dopri5": diffrax.Dopri5(),
    "tsit5": diffrax.Tsit5(),
}
INTEGRATORS = {
    f"{name}-{mode}": rf.FixedGrid(method, steps=24, gradient=gradient)
    for name, method in METHODS.items()
    for mode, gradient in (("backpropagation", BACK), ("constant-memory", CONSTANT))
} | {
    "adaptive-backpropagation": rf.Adaptive(gradient=BACK, **TIGHT),
    "adaptive-constant-memory": rf.Adaptive(gradient=CONSTANT, **TIGHT),
}
SLOW = {
    "kvaerno5-backpropagation": rf.Adaptive(diffrax.Kvaerno5(), gradient=BACK, **TIGHT),
    "kvaerno5-constant-memory": rf.Adaptive(diffrax.Kvaerno5(), gradient=CONSTANT, **TIGHT),
}
KL, PL = rf.KarhunenLoeve(4), rf.PiecewiseLinear(3)
# In the plane, with `make test`. The other kinds of gradients have their turn on a line, without networks:
# that is less to compile.
QUICK = "rk4-backpropagation-KL"
LINE = {
    "dopri5-constant-memory": (INTEGRATORS["dopri5-constant-memory"], PL),
    "adaptive-backpropagation": (rf.Adaptive(gradient=BACK, **TIGHT | {"max_steps": 256}), KL),
}
CASES = [
    pytest.param(
        integrator, driver, id=f"{name}-{label}", marks=[pytest.mark.slow] * (f"{name}-{label}" != QUICK)
    )
    for name, integrator in (INTEGRATORS | SLOW).items()
    for driver, label in ((KL, "KL"), (PL, "PL"))
]


class Model(eqx.Module):
    """All that is differentiated: a flow with networks and a base, points, coefficients."""

    flow: rf.StochasticFlow
    x: jax.Array
    coefficients: jax.Array

    def loss(self):
        path = self.flow.driver.path(self.coefficients, 0.9)
        log_prob = self.flow.log_prob_given_path(self.x, path)
        return jnp.sum(log_prob * jnp.arange(1.0, 4.0))


@eqx.filter_jit
def loss_and_gradient(model):
    return eqx.filter_value_and_grad(lambda m: m.loss())(model)


@pytest.mark.parametrize(("integrator", "driver"), CASES)
def test_gradients_match_central_differences(integrator, driver, key):
    keys = jax.random.split(key)
    sde = rf.ItoSDE(rf.MLP(2, 2, 4, 1, key=keys[0]), rf.FullDiffusion(2, 4, key=keys[1]))
    base = rf.Normal(jnp.array([0.1, -0.2]), jnp.array([0.8, 1.2]))
    check_gradients(rf.StochasticFlow(sde, base, 0.9, driver, integrator=integrator))


class Curved(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return jnp.tanh(self.rate * z) - t * z


class Waves(eqx.Module):
    rate: jax.Array

    def __call__(self, t, z):
        return (1 + 0.3 * jnp.sin(self.rate * z))[:, None]


@pytest.mark.parametrize(
    "name", ["dopri5-constant-memory", pytest.param("adaptive-backpropagation", marks=pytest.mark.slow)]
)
def test_gradients_on_a_line_match_central_differences(name):
    # With a dtype: a weakly typed number would be traced again after the first step.
    sde = rf.ItoSDE(Curved(jnp.array(0.7, float)), Waves(jnp.array(1.2, float)))
    base = rf.Normal(jnp.array([0.1]), jnp.array([0.8]))
    integrator, driver = LINE[name]
    check_gradients(rf.StochasticFlow(sde, base, 0.9, driver, integrator=integrator))


def check_gradients(flow):
    keys, d = jax.random.split(jax.random.key(21)), flow.dimension
    shape = (3, flow.driver.num_functions, d)
    model = Model(flow, jax.random.normal(keys[0], (3, d)), jax.random.normal(keys[1], shape))
    _, gradient = loss_and_gradient(model)

    # One random direction for each group: a gradient missing from one group cannot hide in another.
    groups = {
        "parameters": lambda m: m.flow.sde,
        "base": lambda m: m.flow.base,
        "points": lambda m: m.x,
        "coefficients": lambda m: m.coefficients,
    }
    for name, part in groups.items():
        dynamic, static = eqx.partition(part(model), eqx.is_inexact_array)
        leaves, tree = jax.tree.flatten(dynamic)
        rng = np.random.default_rng(0)
        direction = [jnp.asarray(rng.standard_normal(leaf.shape)) for leaf in leaves]

        def moved(step, part=part, leaves=leaves, direction=direction, tree=tree, static=static):
            new = tree.unflatten([a + step * v for a, v in zip(leaves, direction, strict=True)])
            return loss_and_gradient(eqx.tree_at(part, model, eqx.combine(new, static)))[0]

        numerical = (moved(1e-5) - moved(-1e-5)) / 2e-5
        got = jax.tree.leaves(eqx.filter(part(gradient), eqx.is_inexact_array))
        analytic = sum(float(jnp.vdot(g, v)) for g, v in zip(got, direction, strict=True))
        np.testing.assert_allclose(analytic, numerical, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_parameters_in_closures_are_seen(key):
    """A drift that closes over a traced weight gets its gradient in every mode."""
    x = jnp.array([[0.3], [-0.4]])
    driver = rf.KarhunenLoeve(3)
    path = driver.sample(key=key)
    modes = [
        rf.FixedGrid(steps=16),
        rf.FixedGrid(steps=16, gradient=CONSTANT),
        rf.Adaptive(gradient=CONSTANT, rtol=1e-8, atol=1e-8),
    ]
    for integrator in modes:

        def loss(weight, integrator=integrator):
            sde = rf.ItoSDE(lambda t, z: -weight * z, lambda t, z: jnp.cos(weight * z)[:, None])
            flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=driver, integrator=integrator)
            return jnp.sum(flow.log_prob_given_path(x, path))

        numerical = (loss(0.7 + 1e-5) - loss(0.7 - 1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(loss)(0.7), numerical, rtol=1e-6)


def test_gradient_through_the_end_time(key):
    """d/dT of log p at x for dZ = −Z dt without noise: log p = log N(x eᵀ) + T."""
    still = rf.ItoSDE(lambda t, z: -z, rf.sde.NoDiffusion())
    flow = rf.StochasticFlow(still, rf.Normal(jnp.zeros(1)), integrator=rf.FixedGrid(steps=40))
    path = flow.sample_path(key=key)

    def log_prob(t1):
        return flow.log_prob_given_path(jnp.array([0.5]), path, t1=t1)

    for slope in (jax.grad(log_prob), jax.jacfwd(log_prob)):
        np.testing.assert_allclose(jax.jit(slope)(0.6), 1 - 0.25 * np.exp(1.2), rtol=1e-8)
