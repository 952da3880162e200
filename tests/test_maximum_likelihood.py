"""Maximum likelihood, and what keeps a model where its data are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import grouped

import roughflow as rf


def flow_of(noise, key):
    drift, diffusion = rf.MLP(1, 1, width=8, depth=1, key=key), rf.ConstantDiffusion(noise * jnp.eye(1))
    sde, integrator = rf.ItoSDE(drift, diffusion), rf.FixedGrid(rf.flow.RK4(), steps=6)
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.KarhunenLoeve(2), integrator=integrator)


@pytest.mark.parametrize(
    "proposal", [None, pytest.param(rf.Prior(), marks=pytest.mark.slow)], ids=["learned", "prior"]
)
def test_maximum_likelihood_finds_a_normal_distribution(key, proposal):
    """N(1, 0.7²) from N(0, 1) with noise: the loss comes near the entropy."""
    data = 1 + 0.7 * jax.random.normal(key, (2000, 1))
    # Paths that do not learn where to look take more of them, and more steps.
    paths, steps = (4, 300) if proposal is None else (16, 500)
    settings = {"objective": rf.MaximumLikelihood(paths, proposal), "steps": steps, "batch_size": 32}
    fitted = rf.fit(flow_of(0.5, key), data, key=key, **grouped(settings), progress=False)
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


def test_many_paths_with_an_estimated_divergence_are_refused(key):
    """log mean exp(log w + error) exceeds log mean w: training would make the error large."""
    flow = rf.neural_flow(20, noise=0.5, width=4, depth=1, key=key)
    x = jax.random.normal(key, (3, 20))
    with pytest.raises(ValueError, match="num_paths must be 1 with an estimated divergence"):
        rf.MaximumLikelihood(2)(flow, x, key=key)
    one = rf.MaximumLikelihood(1, rf.Prior())
    assert np.isfinite(jax.jit(lambda x: one(flow, x, key=key)[0])(x))


def test_without_noise_one_path_is_taken(key):
    flow = rf.neural_flow(2, noise=0.0, width=4, depth=1, key=key)
    assert rf.MaximumLikelihood(8).prepare(flow, key=key).bound.estimator.num_paths == 1


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
