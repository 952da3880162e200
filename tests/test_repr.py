"""Objects print themselves readably, and on one screen."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

SCREEN = 20  # lines


def estimate_at(log_prob, **others):
    """An estimate with these values, and nothing wrong with it unless told."""
    value = jnp.asarray(log_prob, float)
    fill = lambda number: jnp.full(value.shape, number)
    fields = {"standard_error": fill(0.012), "effective_paths": fill(60.5), "num_paths": fill(64)}
    return rf.Estimate.of(value, "paths", **(fields | others))


def small_flow(key, noise=0.5):
    return rf.neural_flow(2, noise=noise, width=4, depth=1, key=key)


def test_an_estimate_is_a_table_with_its_warning():
    told = repr(estimate_at([-1.23456, -7.0], effective_paths=jnp.array([60.5, 1.5])))
    first, second = told.splitlines()[2:4]
    assert first.split() == ["0", "-1.2346", "0.012", "paths", "(64)"]
    assert second.split()[:3] == ["1", "-7.0000", "0.012"]
    assert second.endswith("few paths")
    assert "1 of 2 suspect" in told
    assert told.splitlines()[-1].startswith("  warning: 1 of 2 estimates rest on fewer than 5")
    assert "warning" not in repr(estimate_at([-1.0]))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (10,), (11,), (3000,), (2, 3), (40, 1, 5)])
def test_an_estimate_of_any_shape_fits_a_screen(shape):
    told = repr(estimate_at(np.zeros(shape)))
    size = int(np.prod(shape))
    assert f"at {size:,} point{'' if size == 1 else 's'}" in told
    assert len(told.splitlines()) <= min(2 + size, 13) + 1
    assert ("…" in told) == (size > 10)
    if shape == (40, 1, 5):
        assert "39, 0, 4" in told


def test_an_estimate_with_numbers_that_are_none():
    told = repr(estimate_at([-np.inf, np.nan, np.inf], unmet=jnp.ones(3, bool)))
    assert told.count("not finite") == 3  # twice as a flag, once in the warning
    assert told.count("unmet") == 3


def test_inside_jit_an_estimate_shows_its_shapes_and_what_is_known_its_numbers():
    known, said = estimate_at([-1.5]), []

    @jax.jit
    def look(estimate):
        said.extend([repr(estimate), repr(known)])
        return estimate.log_prob

    look(known)
    assert "log_prob=f64[1]" in said[0] or "log_prob=f32[1]" in said[0]
    assert said[1] == repr(known)
    assert "ShapeDtypeStruct" in repr(jax.eval_shape(lambda: known))
    assert "None" in repr(jax.tree.map(lambda _: None, known))


def test_a_flow_is_told_as_an_sde(key):
    flow = small_flow(key)
    told = repr(flow)
    title = "StochasticFlow: dZ = μ(t, Z) dt + σ(t, Z) dB, Z(0) ~ Normal(2-D), t in [0, 1]"
    assert told.splitlines()[0] == title
    assert "KarhunenLoeve(num_functions=6), 2-D noise" in told
    assert "FixedGrid(" in told
    size = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(flow, eqx.is_inexact_array)))
    assert told.splitlines()[-1].split() == ["parameters", f"{size:,}"]
    assert "σ" not in repr(small_flow(key, noise=0.0))
    said = []
    eqx.filter_jit(lambda flow: said.append(repr(flow)))(flow)
    assert said == [told]
    assert "weights=" in eqx.tree_pformat(flow)
    assert "?" in repr(eqx.tree_at(lambda f: f.t1, flow, jax.ShapeDtypeStruct((), float)))


def test_sdes_are_told_in_their_notation(key):
    line = lambda sde: repr(sde).splitlines()[0].partition(": ")[2]
    drift, noise = (lambda t, z: -z), (lambda t, z: z[:, None])
    assert line(rf.StratonovichSDE(drift, noise)) == "dZ = μ(t, Z) dt + σ(t, Z) ∘ dB"
    assert line(rf.ItoSDE(drift, rf.ConstantDiffusion(jnp.eye(2)))) == "dZ = μ(t, Z) dt + σ dB"
    assert line(rf.ItoSDE(drift, rf.sde.FadingDiffusion(noise, 2.0))).endswith("+ (1 − t/2)^0.5 Σ(t, Z) dB")
    target = lambda z: -0.5 * z @ z
    assert "∇log p" in line(rf.overdamped_langevin(target, 2))
    assert "Q" in line(rf.underdamped_langevin(target, 2))
    flow = rf.train.velocity_flow(2, width=4, depth=1, num_features=3, key=key)
    transport = rf.sde.NormalTransport(flow.sde.drift, jnp.zeros(2), jnp.ones(2))
    assert line(rf.sde.TransportSDE(transport)) == "dZ = v(t, Z) dt"
    noisy = rf.sde.TransportSDE(transport, rf.sde.FadingDiffusion(rf.ConstantDiffusion(jnp.eye(2))))
    assert line(noisy) == "dZ = [v + ½ div(σσᵀ) + ½ σσᵀ ∇log p] dt + σ dB"
    # The random waves of a velocity are not trained, and the normal distribution's mean and scale are given.
    network = sum(leaf.size for leaf in jax.tree.leaves(flow.sde.drift.network))
    assert f"NormalTransport of VelocityNetwork, {network:,} parameters" in repr(noisy)


def test_a_model_of_a_table_names_its_columns(key):
    flow = small_flow(key, noise=0.0)
    model = rf.tables.Standardised(flow, np.zeros(2), np.eye(2), ("length", "width"))
    assert "length, width" in repr(model)
    knots = np.array([[0.0, 1.0]] * 2)
    bounded = rf.tables.Marginals(knots, knots, knots + 1, np.array([0.0, -np.inf]), np.array([1.0, 3.0]))
    told = repr(dataclasses.replace(model, marginals=bounded))
    assert "0 < length < 1, width < 3" in told
    given = repr(dataclasses.replace(model, num_given=1))
    assert "density of 1 column " in given
    assert ["given", "width"] in [line.split() for line in given.splitlines()]
    assert "x1, x2" in repr(dataclasses.replace(model, columns=()))
    assert len(told.splitlines()) <= SCREEN


def test_a_fit_says_what_became_of_it(key):
    objective = rf.MaximumLikelihood(1)
    loss, looks = np.array([3.0, np.nan, 2.0]), np.array([2.9, 2.5, 2.7])
    history = rf.train.History(loss, {}, np.array([0, 1, 3]), looks, "at step 3 of 50: early")
    fitted = rf.train.Fitted(small_flow(key), objective, history, False)
    told = repr(fitted)
    assert "dZ = " in told
    assert "3 steps" in told
    assert "validation 2.7000, best 2.5000 at step 1" in told
    assert "1 skipped; ended at step 3 of 50: early" in told
    assert len(told.splitlines()) <= 5
    staged = dataclasses.replace(fitted, stages={"regression": history, "likelihood": rf.train.History()})
    assert "likelihood  0 steps" in repr(staged)
    assert repr(dataclasses.replace(fitted, interrupted=True)).startswith("Fitted, interrupted")
    assert repr(dataclasses.replace(fitted, model=object())).splitlines()[1].split() == ["model", "object"]


def test_a_chain_is_summed_up(key):
    samples = np.asarray(jax.random.normal(key, (4, 500, 10))) + np.arange(10)
    samples = jnp.asarray(samples)
    chain = rf.mcmc.Chain(samples, jnp.array([0.5, 0.6, 0.7, 0.8]), 750)
    told = repr(chain).splitlines()
    assert told[0] == (
        "Chain: 4 chains × 500 draws × 10-D, acceptance 0.65 (0.50 to 0.80), 750 gradients each"
    )
    name, mean, spread, rhat = told[4].split()
    assert name == "z[2]"
    np.testing.assert_allclose([float(mean), float(spread)], [2, 1], atol=0.1)
    assert 0.99 < float(rhat) < 1.02
    assert told[-1] == "  … and 2 more"
    assert len(told) <= 11
    apart = rf.mcmc.Chain(samples + 3 * np.arange(4.0)[:, None, None], chain.acceptance, 750)
    assert float(repr(apart).splitlines()[2].split()[-1]) > 2
    single = repr(rf.mcmc.Chain(samples[0, :3], jnp.asarray(1.0), 3))
    assert single.startswith("Chain: 1 chain × 3 draws")
    assert "nan" in single
    assert "inf" in repr(rf.mcmc.Chain(samples.at[0, 0, 0].set(jnp.inf), chain.acceptance, 3))
    assert "ShapeDtypeStruct" in repr(jax.eval_shape(lambda: chain))


def test_rhat_is_that_of_arviz(key):
    arviz = pytest.importorskip("arviz")
    draws = np.cumsum(np.asarray(jax.random.normal(key, (4, 200))), axis=1)
    wide = np.arange(1, 5)[:, None] * np.asarray(jax.random.normal(key, (4, 200)))
    from roughflow.mcmc._samplers import rank_rhat

    for chains in (draws, wide, wide**3):
        np.testing.assert_allclose(rank_rhat(chains), float(arviz.rhat(chains)), rtol=1e-6)
    assert rank_rhat(wide) > 1.1  # chains of one mean and of different widths
