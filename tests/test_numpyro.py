"""The doors to NumPyro, ArviZ and BlackJAX."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from scipy import stats

import roughflow as rf

numpyro = pytest.importorskip("numpyro")
blackjax = pytest.importorskip("blackjax")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its successor when it is imported
    pytest.importorskip("roughflow.interop.arviz")

import numpyro.distributions as dist  # noqa: E402
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO  # noqa: E402

from roughflow.interop.arviz import BEFORE_1, arviz, to_arviz  # noqa: E402
from roughflow.interop.blackjax import as_blackjax  # noqa: E402
from roughflow.interop.numpyro import FlowDistribution, target_from_model  # noqa: E402

DATA = jnp.array([1.0, 2.0, 4.0])


def location_scale(y):
    scale = numpyro.sample("scale", dist.HalfNormal(5.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    numpyro.deterministic("sum", mean + scale)
    numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def test_a_model_is_its_joint_density_with_the_jacobian_and_goes_back(key):
    target = target_from_model(location_scale, DATA, key=key)
    assert target.dimension == 2
    z = target.unconstrain({"mean": 1.3, "scale": 0.7})
    values = target.constrain(z)
    np.testing.assert_allclose([values["mean"], values["scale"], values["sum"]], [1.3, 0.7, 2.0], rtol=1e-6)
    truth = stats.norm.logpdf(1.3, 0, 5) + stats.halfnorm.logpdf(0.7, 0, 5) + np.log(0.7)
    truth += stats.norm.logpdf(DATA, 1.3, 0.7).sum()
    np.testing.assert_allclose(target(z), truth, rtol=1e-6)
    batch = target.constrain(jnp.stack([z, z + 1])[None])
    assert batch["scale"].shape == (1, 2)
    np.testing.assert_allclose(batch["scale"][0, 0], 0.7, rtol=1e-6)


def test_a_model_without_latent_sites_is_refused(key):
    def empty(y):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"no continuous latent site"):
        target_from_model(empty, DATA, key=key)


def linear_flow(rate=1.0):
    """dZ = −aZ dt from N(1, 1): exp(−a) N(1, 1)."""
    return rf.StochasticFlow(rf.ItoSDE(lambda t, z: -rate * z, rf.sde.NoDiffusion()), rf.Normal(jnp.ones(2)))


def test_a_flow_is_a_distribution(key):
    distribution = FlowDistribution(linear_flow(), key=key, estimator=rf.PullBack(4))
    x = jnp.array([[0.1, 0.4], [1.0, -2.0]])
    truth = stats.norm.logpdf(x, np.exp(-1), np.exp(-1)).sum(axis=1)
    np.testing.assert_allclose(jax.jit(distribution.log_prob)(x), truth, atol=1e-4)
    assert distribution.event_shape == (2,)
    samples = distribution.sample(jax.random.PRNGKey(0), (2000,))
    np.testing.assert_allclose(samples.mean(axis=0), np.exp(-1), atol=0.1)


@pytest.mark.slow
def test_a_flow_as_prior_under_nuts(key):
    """exp(−1) N(1, 1) observed with noise ½: the posterior is known."""
    y = jnp.array([1.0, -1.0])

    def model():
        z = numpyro.sample("z", FlowDistribution(linear_flow(), key=key))
        numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0))
    prior, noise = np.exp(-2), 0.25
    mean = (np.exp(-1) / prior + np.asarray(y) / noise) / (1 / prior + 1 / noise)
    draws = np.asarray(mcmc.get_samples()["z"])
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.06)
    np.testing.assert_allclose(draws.std(axis=0), (1 / prior + 1 / noise) ** -0.5, rtol=0.1)


def test_a_flow_as_guide_under_svi(key):
    """The flow of one learned rate a from N(1, 1) to a target N(e^{−½}, e^{−½}): a is ½."""

    def model():
        scale = np.exp(-0.5) * jnp.ones(2)
        numpyro.sample("z", dist.Normal(scale, scale).to_event(1))

    def guide():
        rate = numpyro.param("rate", 0.0)
        numpyro.sample("z", FlowDistribution(linear_flow(rate), key=key))

    svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO(num_particles=16))
    result = svi.run(jax.random.PRNGKey(0), 150, progress_bar=False)
    np.testing.assert_allclose(result.params["rate"], 0.5, atol=0.05)


@pytest.fixture(scope="module")
def gaussian_chain():
    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    starts = 2 * jax.random.normal(jax.random.key(3), (4, 2))
    return rf.sample_chain(
        rf.AdjustedSampler(sde, 1.5), starts, key=jax.random.key(1), num_steps=4000, burn_in=100
    )


def test_arviz_reads_a_chain(gaussian_chain):
    data = to_arviz(gaussian_chain, names=["x", "y"])
    rhat, effective = arviz.rhat(data), arviz.ess(data)
    for name in ("x", "y"):
        assert float(rhat[name]) < 1.01
        assert float(effective[name]) > 1000
    drawn = arviz.plot_trace(data)
    assert not BEFORE_1 or drawn.shape == (2, 2)
    assert to_arviz(gaussian_chain).posterior["z"].shape == (4, 4000, 2)
    named = to_arviz(gaussian_chain, constrain=lambda z: {"norm": jnp.linalg.norm(z, axis=-1)})
    assert named.posterior["norm"].shape == (4, 4000)
    with pytest.raises(ValueError, match=r"^names must be one for each of 2 coordinates, got 3 "):
        to_arviz(gaussian_chain, names="xyz")


@pytest.mark.slow
@pytest.mark.skipif(not BEFORE_1, reason="ArviZ makes no note of the day")
def test_arviz_is_imported_by_two_processes_at_once(tmp_path):
    """The other process moves the draft of ArviZ's note of the day first."""
    moved_before = """
import pathlib
replace = pathlib.Path.replace
def twice(draft, file):
    replace(draft, file)
    return replace(draft, file)
pathlib.Path.replace = twice
from roughflow.interop.arviz import arviz
print(arviz.ess.__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", moved_before]
    fonts = {"MPLCONFIGDIR": matplotlib.get_cachedir()}  # not looked for anew
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | fonts
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout == "ess\n", run.stderr
    assert (tmp_path / "arviz" / "daily_warning").exists()  # so its cache is there, and the note was made


def test_blackjax_runs_a_sampler_to_the_same_distribution(key):
    sampler = rf.AdjustedSampler(rf.overdamped_langevin(lambda z: -0.5 * z @ z / 4, 1), dt=4.0)
    state, (states, infos) = blackjax.util.run_inference_algorithm(
        key, as_blackjax(sampler), num_steps=20_000, initial_position=jnp.zeros(1)
    )
    assert state.position.shape == (1,)
    np.testing.assert_allclose(np.std(states.position), 2.0, rtol=0.05)
    assert 0.5 < float(infos.acceptance_rate.mean()) < 1
