"""Posteriors of NumPyro models by Langevin chains: `python examples/posteriors.py [NAME]`.

The script prints ArviZ's summary and a lower bound on the log evidence. For models other than eight_schools,
the data are read from `--data FILE.json`.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import roughflow as rf
from roughflow.interop.numpyro import ModelTarget, target_from_model

warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its successor
import arviz  # noqa: E402

from roughflow.interop.arviz import to_arviz  # noqa: E402

SCHOOLS = {"y": [28, 8, -3, 7, -1, 1, 18, 12], "sigma": [15, 10, 16, 11, 9, 11, 10, 18]}  # Rubin (1981)
CHAINS, STEPS = 16, 20_000


def eight_schools(y, sigma):
    """Rubin's eight schools, in the non-centred parametrisation."""
    mu: Any = numpyro.sample("mu", dist.Normal(0, 5))
    tau: Any = numpyro.sample("tau", dist.HalfCauchy(5))
    trans: Any = numpyro.sample("theta_trans", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    theta = numpyro.deterministic("theta", mu + tau * trans)
    numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def kidscore_interaction(kid_score, mom_hs, mom_iq, **_):
    """Test scores of children given their mothers' schooling and IQ (Gelman & Hill 2007)."""
    beta: Any = numpyro.sample("beta", dist.ImproperUniform(dist.constraints.real_vector, (), (4,)))
    sigma: Any = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    mean = beta[0] + beta[1] * mom_hs + beta[2] * mom_iq + beta[3] * mom_hs * mom_iq
    numpyro.sample("kid_score", dist.Normal(mean, sigma), obs=kid_score)


def nes(partyid7, real_ideo, race_adj, age_discrete, educ1, gender, income, **_):
    """Party identification in the American National Election Study (Gelman & Hill 2007)."""
    ages = [age_discrete == age for age in (2, 3, 4)]
    columns = jnp.stack([jnp.ones_like(income), real_ideo, race_adj, *ages, educ1, gender, income], axis=1)
    beta: Any = numpyro.sample("beta", dist.ImproperUniform(dist.constraints.real_vector, (), (9,)))
    sigma: Any = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
    numpyro.sample("partyid7", dist.Normal(columns @ beta, sigma), obs=partyid7)


MODELS = {"eight_schools": eight_schools, "kidscore_interaction": kidscore_interaction, "nes": nes}


def posterior(target: ModelTarget, *, key) -> rf.mcmc.Chain:
    """Return MALA chains, run after a warm-up."""
    keys = jax.random.split(key, 3)
    start = target.start + 0.1 * jax.random.normal(keys[0], (CHAINS, target.dimension))
    sampler, z = rf.warm_up(target, start, key=keys[1], num_steps=4000)
    chain = rf.sample_chain(sampler, z, key=keys[2], num_steps=STEPS, thin=10)
    print(
        f"acceptance {chain.acceptance.mean():.2f}, {chain.num_gradients} gradients per chain, {CHAINS} "
        "chains"
    )
    return chain


def evidence(target: ModelTarget, chain: rf.mcmc.Chain, *, key) -> rf.train.EvidenceBound:
    """Return a lower bound on the log evidence, from an SDE that leaves the posterior invariant and starts
    from the normal distribution with the mean and covariance of the chains."""
    draws = jnp.reshape(chain.samples, (-1, target.dimension))
    centre, root = jnp.mean(draws, axis=0), jnp.linalg.cholesky(jnp.cov(draws.T))
    volume = jnp.sum(jnp.log(jnp.diagonal(root)))
    white = lambda u: target(centre + root @ u) + volume
    sde = rf.overdamped_langevin(white, target.dimension)
    base = rf.Normal(jnp.zeros(target.dimension))
    flow = rf.StochasticFlow(sde, base, t1=1.5, integrator=rf.FixedGrid(steps=16))
    return rf.train.evidence_bound(flow, white, key=key, num_samples=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", choices=MODELS, default="eight_schools")
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.data is None and arguments.name != "eight_schools":
        parser.error(f"{arguments.name} needs --data, a JSON file of columns")
    data = SCHOOLS if arguments.data is None else json.loads(arguments.data.read_text(encoding="utf-8"))
    arrays = {key: jnp.asarray(value, float) for key, value in data.items() if isinstance(value, list)}
    keys = jax.random.split(jax.random.key(0), 3)
    target = target_from_model(MODELS[arguments.name], key=keys[0], model_kwargs=arrays)
    chain = posterior(target, key=keys[1])
    print(arviz.summary(to_arviz(chain, constrain=target.constrain)))
    bound = evidence(target, chain, key=keys[2])
    # The flat priors of kidscore_interaction and nes are taken to have density 1.
    print(f"log evidence: at least {bound.value:.2f} ± {bound.standard_error:.2f}")


if __name__ == "__main__":
    main()
