"""Posterior means of models with hidden states, compared with the ground truth of inference-gym.

Run `python -m benchmarks.hidden_posteriors FOLDER [small volatility lorenz] [--draws N] [--nuts SECONDS]`.
FOLDER must contain the files sp500_closing_prices.py, stochastic_volatility_sp500[_small].py and
convection_lorenz_bridge_unknown_scales.py of that package, and its convection_lorenz_bridge.py as
lorenz_data.py.
Draws come from a t distribution around the maximum and are weighted by the posterior. If NumPyro is
installed, its NUTS sampler draws parameters and states of the same models.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf
from roughflow.series._observed import panel
from roughflow.series._parameters import Parameters
from roughflow.series.hidden._likelihood import Observation, Setup

KEY = jax.random.key(0)
FREEDOM, WIDTH = 5.0, 1.2  # degrees of freedom and width of the proposal
BATCH = 8  # number of likelihoods computed at a time
norm = jax.scipy.stats.norm.logpdf


class Centred(eqx.Module):
    """Normal with mean zero."""

    deviation: jax.Array
    mean: jax.Array | float = 0.0

    def log_prob(self, y: jax.Array) -> jax.Array:
        return norm(y, self.mean, self.deviation)


class Lorenz(rf.sde.AbstractItoSDE):
    """Lorenz's equations with additive noise."""

    innovation_scale: jax.Array
    dimension = 3

    def drift(self, t: Any, z: jax.Array) -> jax.Array:
        x, y, w = z
        return jnp.stack([10 * (y - x), x * (28 - w) - y, x * y - 8 / 3 * w])

    def diffusion(self, t: Any, z: jax.Array) -> jax.Array:
        return self.innovation_scale * jnp.eye(3)


class SeesFirst(eqx.Module):
    """The first component with normal errors."""

    scale: jax.Array

    def __call__(self, t: jax.Array, x: jax.Array) -> Centred:
        return Centred(self.scale, x[:1])


def volatility_prior(sde: rf.OrnsteinUhlenbeck) -> jax.Array:
    """The prior of the persistence φ = exp(−κ), the mean and the noise per step, as a density of κ, μ and
    σ."""
    persistence = jnp.exp(-sde.kappa)
    per_step = jnp.sqrt((1 - persistence**2) / (2 * sde.kappa))
    noise = sde.sigma * per_step
    found = 19 * jnp.log((1 + persistence) / 2) + 0.5 * jnp.log((1 - persistence) / 2)
    return found - jnp.log1p((sde.mu / 5) ** 2) - jnp.log1p((noise / 2) ** 2) - sde.kappa + jnp.log(per_step)


def weighted(
    log_density: Callable, start: jax.Array, scale: jax.Array, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `(count, p)` and their weights."""
    dimension = len(start)
    white = jax.random.t(KEY, FREEDOM, (count, dimension))
    z = start + WIDTH * white @ scale.T
    proposal = jnp.sum(jax.scipy.stats.t.logpdf(white, FREEDOM), axis=1)
    value = jax.lax.map(eqx.filter_checkpoint(log_density), z, batch_size=BATCH)
    weight = np.exp(np.asarray(value - proposal - jnp.nanmax(value - proposal)))
    weight = np.where(np.isfinite(weight), weight, 0)
    return np.asarray(z), weight / weight.sum()


def _speed(name: str, size: float, count: int, made: float, spent: float) -> None:
    rate = size / (spent - made)
    shown = f"{size:.0f} effective draws of {count}, fit {made:.0f} s, {spent:.0f} s in all"
    print(f"{name}: {shown}, {rate:.2f} per second", flush=True)


def report(name: str, draws: np.ndarray, weight: np.ndarray, truth: Any, about: str) -> None:
    """Print the posterior mean and the ground truth, and their difference in units of the combined Monte
    Carlo error."""
    mean = weight @ draws
    error = np.sqrt(weight**2 @ (draws - mean) ** 2)
    expected, known = (
        float(getattr(truth, f"IDENTITY_{about}_{part}")) for part in ("MEAN", "MEAN_STANDARD_ERROR")
    )
    distance = (mean - expected) / np.hypot(error, known)
    shown = f"{mean:9.5f} ± {error:.5f}, truth {expected:9.5f} ± {known:.5f}"
    print(f"  {name:<18} {shown}: {distance:+.1f} errors", flush=True)


def volatility(folder: Path, small: bool, count: int, nuts: float) -> None:
    """Stochastic volatility of daily changes of the S&P 500."""
    prices = _module(folder / "sp500_closing_prices.py").CLOSING_PRICES
    truth = _module(folder / f"stochastic_volatility_sp500{'_small' * small}.py")
    returns = np.diff(prices)[-100 if small else 0 :]
    returns = returns - returns.mean()
    times = np.arange(len(returns)) * 1.0
    begin = time.perf_counter()
    sees = lambda t, x: Centred(jnp.exp(x / 2))
    guess = rf.OrnsteinUhlenbeck(0.05, float(np.log(returns.var())), 0.3)
    fit = rf.fit_sde(guess, times, returns, observe=sees, initial="stationary", key=KEY, num_starts=1)
    posterior = fit.posterior(volatility_prior)
    made = time.perf_counter() - begin
    z, weight = weighted(eqx.filter_jit(posterior), posterior.start, posterior.scale, count)
    spent = time.perf_counter() - begin
    size = 1 / np.sum(weight**2)
    _speed(f"volatility, {len(returns)} values", size, count, made, spent)
    found = {name: np.asarray(part, float) for name, part in posterior.constrain(z).items()}
    persistence = np.exp(-found["kappa"])
    noise = found["sigma"] * np.sqrt((1 - persistence**2) / (2 * found["kappa"]))
    report("persistence", persistence, weight, truth, "PERSISTENCE_OF_VOLATILITY")
    report("mean", found["mu"], weight, truth, "MEAN_LOG_VOLATILITY")
    report("noise", noise, weight, truth, "WHITE_NOISE_SHOCK_SCALE")
    if nuts and importlib.util.find_spec("numpyro"):
        _nuts(_volatility_model, (jnp.asarray(returns),), ("persistence", "mean", "noise"), nuts)


def lorenz(folder: Path, count: int, nuts: float) -> None:
    """Lorenz's equations with one component seen, and a gap; scales unknown."""
    data, truth = (
        _module(folder / "lorenz_data.py"),
        _module(folder / "convection_lorenz_bridge_unknown_scales.py"),
    )
    values, step = np.asarray(data.OBSERVED_VALUES, float), data.STEP_SIZE
    times = step * np.arange(len(values))
    begin = time.perf_counter()
    domains = {name: rf.series.Domain(lower=0.0) for name in ("innovation_scale", "scale")}
    observation = Observation(observe=SeesFirst(jnp.asarray(1.0)), initial=Centred(jnp.ones(3)), steps=1)
    sde, effort = Lorenz(jnp.asarray(0.5)), rf.transition.Effort(1, 256, 1)
    series = panel(times, values, partial=True)
    setup = Setup(sde, series, observation, rf.transition.Unchanged(), KEY, True, effort)
    own = {name: domain for name, domain in domains.items() if name == "innovation_scale"}
    likelihood = setup.likelihood(Parameters.of(sde, own), np.zeros(1), domains)
    parameters, of_sde = likelihood.parameters, likelihood.of_sde

    def log_density(z: jax.Array) -> jax.Array:
        return of_sde(parameters.sde(parameters.from_free(z))) + jnp.sum(norm(z, -1.0, 1.0))

    compiled = eqx.filter_jit(log_density)
    start, scale = jnp.array([-1.0, 0.0]), jnp.diag(jnp.array([1.0, 0.3]))
    z, weight = weighted(compiled, start, scale, count // 4)
    made = time.perf_counter() - begin
    scale = jnp.linalg.cholesky(jnp.asarray(np.cov(z.T, aweights=weight)))
    z, weight = weighted(compiled, jnp.asarray(weight @ z), scale, count)
    spent = time.perf_counter() - begin
    size = 1 / np.sum(weight**2)
    _speed("lorenz", size, count, made, spent)
    found = np.exp(z)
    report("innovation", found[:, 0], weight, truth, "INNOVATION_SCALE")
    report("observation", found[:, 1], weight, truth, "OBSERVATION_SCALE")
    chosen = np.random.default_rng(0).choice(count, 32, p=weight)
    path = np.array([likelihood.smoothed(z[i])[0] for i in chosen])
    wide = np.reshape(truth.IDENTITY_LATENTS_STANDARD_DEVIATION, (-1, 3))
    error = np.hypot(
        path.std(axis=0, ddof=1) / 32**0.5, np.reshape(truth.IDENTITY_LATENTS_MEAN_STANDARD_ERROR, (-1, 3))
    )
    gap = path.mean(axis=0) - np.reshape(truth.IDENTITY_LATENTS_MEAN, (-1, 3))
    inside, root, most = (
        np.mean(np.abs(gap) < 3 * error),
        np.sqrt(np.mean((gap / wide) ** 2)),
        np.abs(gap / wide),
    )
    print(f"  states: {inside:.1%} of {gap.size} within 3 errors;", end=" ")
    print(f"{root:.3f} posterior deviations on average, at most {most.max():.3f}", flush=True)
    if nuts and importlib.util.find_spec("numpyro"):
        _nuts(_lorenz_model, (jnp.asarray(values), step), ("innovation", "observation"), nuts)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _volatility_model(returns: Any) -> None:
    import numpyro
    from numpyro import distributions as dist

    share = numpyro.sample("share", dist.Beta(20.0, 1.5))
    persistence = numpyro.deterministic("persistence", 2 * share - 1)
    mean = numpyro.sample("mean", dist.Cauchy(0.0, 5.0))
    noise = numpyro.sample("noise", dist.HalfCauchy(2.0))
    white = numpyro.sample("white", dist.Normal(0, 1).expand(returns.shape).to_event(1))
    first = white[0] / jnp.sqrt(1 - persistence**2)
    step = lambda h, e: (persistence * h + e, persistence * h + e)
    rest = jax.lax.scan(step, first, white[1:])[1]
    h = mean + noise * jnp.concatenate([first[None], rest])
    numpyro.sample("returns", dist.Normal(0.0, jnp.exp(h / 2)), obs=returns)


def _lorenz_model(values: Any, size: float) -> None:
    import numpyro
    from numpyro import distributions as dist

    innovation = numpyro.sample("innovation", dist.LogNormal(-1.0, 1.0))
    observation = numpyro.sample("observation", dist.LogNormal(-1.0, 1.0))
    white = numpyro.sample("white", dist.Normal(0, 1).expand((len(values), 3)).to_event(2))
    sde = Lorenz(innovation)
    step = lambda z, e: (z + size * sde.drift(0.0, z) + jnp.sqrt(size) * innovation * e,) * 2
    path = jnp.concatenate([white[:1], jax.lax.scan(step, white[0], white[1:])[1]])
    seen = jnp.isfinite(values)
    with numpyro.handlers.mask(mask=seen):
        numpyro.sample("values", dist.Normal(path[:, 0], observation), obs=jnp.where(seen, values, 0.0))


def _nuts(model: Callable, data: tuple, names: tuple[str, ...], seconds: float) -> None:
    """Effective samples per second of NumPyro's NUTS sampler, after warm-up."""
    from numpyro import diagnostics, infer

    kernel = infer.NUTS(model)
    mcmc = infer.MCMC(kernel, num_warmup=300, num_samples=100, progress_bar=False)
    begin = time.perf_counter()
    mcmc.warmup(KEY, *data)
    warm, found = time.perf_counter() - begin, []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        mcmc.run(KEY if not found else mcmc.post_warmup_state.rng_key, *data)
        mcmc.post_warmup_state = mcmc.last_state
        found.append({name: np.asarray(mcmc.get_samples()[name]) for name in names})
    spent = time.perf_counter() - begin
    for name in names:
        draws = np.concatenate([part[name] for part in found])
        size = float(diagnostics.effective_sample_size(draws[None]))
        shown = f"{draws.mean():.5f}, {size:.0f} effective of {len(draws)}, warm-up {warm:.0f} s"
        print(f"  NUTS {name:<14} {shown}, {size / spent:.2f} per second", flush=True)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", default=["small", "volatility", "lorenz"])
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--nuts", type=float, default=0.0)
    chosen = parser.parse_args()
    for part in chosen.parts:
        if part == "lorenz":
            lorenz(chosen.folder, chosen.draws, chosen.nuts)
        else:
            volatility(chosen.folder, part == "small", chosen.draws, chosen.nuts)


if __name__ == "__main__":
    main()
