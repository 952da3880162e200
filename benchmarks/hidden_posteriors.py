"""Posterior means of models with hidden states, compared with inference-gym and with NumPyro's NUTS.

Run `python -m benchmarks.hidden_posteriors FOLDER [small volatility lorenz] [--draws N] [--nuts SECONDS]`.
FOLDER must contain the files sp500_closing_prices.py, stochastic_volatility_sp500[_small].py and
convection_lorenz_bridge_unknown_scales.py of inference-gym, and its convection_lorenz_bridge.py as
lorenz_data.py.

Hidden states are integrated out: the parameters are drawn from a t distribution around the maximum and
weighted by the posterior, where each draw has its own particles. NUTS (with `--nuts`, the seconds of CPU time
for each parametrisation) draws parameters and states of the same model, with the states as they are (centred)
or as functions of the noise (non-centred).

On both sides, the number of effective samples of a parameter is its posterior variance divided by the squared
Monte Carlo error of its mean: for weights w that sum to one, the error is (Σ w² (x − mean)²)^½; for a chain,
it includes the autocorrelation (Geyer's estimate in NumPyro). Times are CPU seconds.
"""

import argparse
import functools
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
WARM_UP, BLOCK = 500, 100  # steps of NUTS: adaptation, and draws between checks of the time
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
    log_density: Callable, start: jax.Array, scale: jax.Array, count: int, key: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `(count, p)` and their weights. `log_density(z, keys)` takes `BATCH` draws."""
    key_draw, key_value = jax.random.split(key)
    white = jax.random.t(key_draw, FREEDOM, (count, len(start)))
    z = start + WIDTH * white @ scale.T
    keys = jax.random.split(key_value, count)
    value = jnp.concatenate(
        [log_density(z[i : i + BATCH], keys[i : i + BATCH]) for i in range(0, count, BATCH)]
    )
    value -= jnp.sum(jax.scipy.stats.t.logpdf(white, FREEDOM), axis=1)
    weight = np.exp(np.asarray(value - jnp.nanmax(value)))
    weight = np.where(np.isfinite(weight), weight, 0)
    return np.asarray(z), weight / weight.sum()


def sampled(
    log_density: Callable, start: jax.Array, scale: jax.Array, count: int
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Draws and weights, after a quarter as many draws to adapt the proposal; and the times at which sampling
    began and ended."""
    key_pilot, key_draw = jax.random.split(KEY)
    log_density = eqx.filter_jit(jax.vmap(log_density))
    z, weight = weighted(log_density, start, scale, count // 4, key_pilot)
    scale = jnp.linalg.cholesky(jnp.asarray(np.cov(z.T, aweights=weight)))
    begin = time.process_time()
    return *weighted(log_density, jnp.asarray(weight @ z), scale, count, key_draw), begin, time.process_time()


def report(name: str, mean: float, deviation: float, size: float, truth: Any, about: str) -> None:
    """Print a posterior mean and the ground truth, and their difference in units of the combined Monte Carlo
    error."""
    error = deviation / size**0.5
    expected, known = (
        float(getattr(truth, f"IDENTITY_{about}_{part}")) for part in ("MEAN", "MEAN_STANDARD_ERROR")
    )
    distance = (mean - expected) / np.hypot(error, known)
    shown = f"{mean:9.5f} ± {error:.5f}, truth {expected:9.5f} ± {known:.5f}"
    print(f"  {name:<12} {shown}: {distance:+.1f} errors, {size:.0f} effective", flush=True)


def _report_weighted(
    parameters: dict[str, tuple[np.ndarray, str]], weight: np.ndarray, truth: Any, before: float, spent: float
) -> None:
    """Print posterior means, and effective samples per second with and without the seconds `before`
    sampling."""
    least = np.inf
    for name, (draws, about) in parameters.items():
        mean = weight @ draws
        variance, error = weight @ (draws - mean) ** 2, weight**2 @ (draws - mean) ** 2
        least = min(least, variance / error)
        report(name, mean, variance**0.5, variance / error, truth, about)
    _speed(least, len(weight), before, spent)


def _speed(least: float, count: int, before: float, spent: float) -> None:
    print(f"  at least {least:.0f} effective of {count}:", end=" ")
    print(f"{least / spent:.2f} per second of sampling ({spent:.0f} s),", end=" ")
    print(f"{least / (before + spent):.2f} with compilation and adaptation ({before:.0f} s)", flush=True)


def volatility(folder: Path, small: bool, count: int, nuts: float) -> None:
    """Stochastic volatility of daily changes of the S&P 500."""
    prices = _module(folder / "sp500_closing_prices.py").CLOSING_PRICES
    truth = _module(folder / f"stochastic_volatility_sp500{'_small' * small}.py")
    returns = np.diff(prices)[-100 if small else 0 :]
    returns = returns - returns.mean()
    times = np.arange(len(returns)) * 1.0
    print(f"stochastic volatility, {len(returns)} values", flush=True)
    begin = time.process_time()
    sees = lambda t, x: Centred(jnp.exp(x / 2))
    guess = rf.OrnsteinUhlenbeck(0.05, float(np.log(returns.var())), 0.3)
    fit = rf.fit_sde(guess, times, returns, observe=sees, initial="stationary", key=KEY, num_starts=1)
    posterior = fit.posterior(volatility_prior)
    log_density = lambda z, key: posterior(z)
    z, weight, made, end = sampled(log_density, posterior.start, posterior.scale, count)
    found = {name: np.asarray(part, float) for name, part in posterior.constrain(z).items()}
    persistence = np.exp(-found["kappa"])
    noise = found["sigma"] * np.sqrt((1 - persistence**2) / (2 * found["kappa"]))
    parameters = {
        "persistence": (persistence, "PERSISTENCE_OF_VOLATILITY"),
        "mean": (found["mu"], "MEAN_LOG_VOLATILITY"),
        "noise": (noise, "WHITE_NOISE_SHOCK_SCALE"),
    }
    _report_weighted(parameters, weight, truth, made - begin, end - made)
    abouts = {name: about for name, (_, about) in parameters.items()}
    _nuts(_volatility_model, (jnp.asarray(returns),), abouts, truth, nuts)


def lorenz(folder: Path, count: int, nuts: float) -> None:
    """Lorenz's equations with one component seen, and a gap; scales unknown."""
    data, truth = (
        _module(folder / "lorenz_data.py"),
        _module(folder / "convection_lorenz_bridge_unknown_scales.py"),
    )
    values, step = np.asarray(data.OBSERVED_VALUES, float), data.STEP_SIZE
    times = step * np.arange(len(values))
    print("stochastic Lorenz bridge", flush=True)
    begin = time.process_time()
    domains = {name: rf.series.Domain(lower=0.0) for name in ("innovation_scale", "scale")}
    observation = Observation(observe=SeesFirst(jnp.asarray(1.0)), initial=Centred(jnp.ones(3)), steps=1)
    sde, effort = Lorenz(jnp.asarray(0.5)), rf.transition.Effort(1, 256, 1)
    series = panel(times, values, partial=True)
    setup = Setup(sde, series, observation, rf.transition.Unchanged(), KEY, True, effort)
    own = {name: domain for name, domain in domains.items() if name == "innovation_scale"}
    likelihood = setup.likelihood(Parameters.of(sde, own), np.zeros(1), domains)
    parameters, of_sde = likelihood.parameters, likelihood.of_sde

    def log_density(z: jax.Array, key: jax.Array) -> jax.Array:
        series = eqx.tree_at(lambda s: s.key, of_sde, key)
        return series(parameters.sde(parameters.from_free(z))) + jnp.sum(norm(z, -1.0, 1.0))

    start, scale = jnp.array([-1.0, 0.0]), jnp.diag(jnp.array([1.0, 0.3]))
    z, weight, made, end = sampled(log_density, start, scale, count)
    found = np.exp(z)
    abouts = {"innovation": "INNOVATION_SCALE", "observation": "OBSERVATION_SCALE"}
    drawn = {name: (found[:, i], about) for i, (name, about) in enumerate(abouts.items())}
    _report_weighted(drawn, weight, truth, made - begin, end - made)
    chosen = np.random.default_rng(0).choice(count, 32, p=weight)
    path = np.array([likelihood.smoothed(z[i])[0] for i in chosen])
    _report_states(path, 32**0.5, truth)
    _nuts(_lorenz_model, (jnp.asarray(values), step), abouts, truth, nuts)


def _report_states(path: np.ndarray, root: float, truth: Any) -> None:
    wide = np.reshape(truth.IDENTITY_LATENTS_STANDARD_DEVIATION, (-1, 3))
    known = np.reshape(truth.IDENTITY_LATENTS_MEAN_STANDARD_ERROR, (-1, 3))
    error = np.hypot(path.std(axis=0, ddof=1) / root, known)
    gap = path.mean(axis=0) - np.reshape(truth.IDENTITY_LATENTS_MEAN, (-1, 3))
    inside, mean, most = (
        np.mean(np.abs(gap) < 3 * error),
        np.sqrt(np.mean((gap / wide) ** 2)),
        np.max(np.abs(gap / wide)),
    )
    print(f"  states: {inside:.1%} of {gap.size} means within 3 errors;", end=" ")
    print(f"{mean:.3f} posterior deviations on average, at most {most:.3f}", flush=True)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _volatility_model(returns: Any, centred: bool) -> None:
    import numpyro
    from numpyro import distributions as dist

    share = numpyro.sample("share", dist.Beta(20.0, 1.5))
    persistence = numpyro.deterministic("persistence", 2 * share - 1)
    mean = numpyro.sample("mean", dist.Cauchy(0.0, 5.0))
    noise = numpyro.sample("noise", dist.HalfCauchy(2.0))
    wide = 1 / jnp.sqrt(1 - persistence**2)
    if centred:
        # In units of the data, so that the starting points, which are near zero, have a plausible volatility.
        log_variance = jnp.log(jnp.var(returns))
        h = log_variance + _free("h", returns.shape)
        before = jnp.concatenate([mean[None], mean + persistence * (h[:-1] - mean)])
        scales = noise * jnp.ones(returns.shape).at[0].set(wide)
        numpyro.factor("steps", jnp.sum(norm(h, before, scales)))
    else:
        white = numpyro.sample("white", dist.Normal(0, 1).expand(returns.shape).to_event(1))
        step = lambda h, e: (persistence * h + e,) * 2
        first = white[0] * wide
        h = mean + noise * jnp.concatenate([first[None], jax.lax.scan(step, first, white[1:])[1]])
    numpyro.sample("returns", dist.Normal(0.0, jnp.exp(h / 2)), obs=returns)


def _lorenz_model(values: Any, size: float, centred: bool) -> None:
    import numpyro
    from numpyro import distributions as dist

    innovation = numpyro.sample("innovation", dist.LogNormal(-1.0, 1.0))
    observation = numpyro.sample("observation", dist.LogNormal(-1.0, 1.0))
    sde, root = Lorenz(innovation), jnp.sqrt(size) * innovation
    ahead = lambda z: z + size * sde.drift(0.0, z)
    if centred:
        path = _free("path", (len(values), 3))
        numpyro.factor("first", jnp.sum(norm(path[0])))
        numpyro.factor("steps", jnp.sum(norm(path[1:], jax.vmap(ahead)(path[:-1]), root)))
    else:
        white = numpyro.sample("white", dist.Normal(0, 1).expand((len(values), 3)).to_event(2))
        step = lambda z, e: (ahead(z) + root * e,) * 2
        path = jnp.concatenate([white[:1], jax.lax.scan(step, white[0], white[1:])[1]])
    seen = jnp.isfinite(values)
    with numpyro.handlers.mask(mask=seen):
        numpyro.sample("values", dist.Normal(path[:, 0], observation), obs=jnp.where(seen, values, 0.0))


def _free(name: str, shape: tuple[int, ...]) -> Any:
    """A state with a flat prior."""
    import numpyro
    from numpyro import distributions as dist

    flat = dist.ImproperUniform(dist.constraints.real, (), event_shape=shape)
    return numpyro.sample(name, flat)


def _nuts(model: Callable, data: tuple, abouts: dict[str, str], truth: Any, seconds: float) -> None:
    """Posterior means by NumPyro's NUTS sampler, and its effective samples per second."""
    if seconds and importlib.util.find_spec("numpyro"):
        for centred in (True, False):
            print(f"  NUTS, {'centred' if centred else 'non-centred'}", flush=True)
            _nuts_run(functools.partial(model, *data, centred), abouts, truth, seconds)


def _nuts_run(model: Callable, abouts: dict[str, str], truth: Any, seconds: float) -> None:
    from numpyro import diagnostics, infer

    begin = time.process_time()
    kernel = infer.NUTS(model)
    state = kernel.init(KEY, WARM_UP, None, (), {})
    finish = kernel.postprocess_fn((), {})

    def step(state: Any, _) -> tuple[Any, Any]:
        state = kernel.sample(state, (), {})
        values = finish(state.z)
        return state, ({name: values[name] for name in abouts}, state.num_steps, state.diverging)

    # MCMC.run would compile anew for each block.
    block = jax.jit(lambda state: jax.lax.scan(step, state, length=BLOCK))
    for _ in range(WARM_UP // BLOCK):
        state = jax.block_until_ready(block(state))[0]
    made = time.process_time()
    found = []
    while time.process_time() - made < seconds:
        state, drawn = jax.block_until_ready(block(state))
        found.append(drawn)
    spent = time.process_time() - made
    draws, steps, diverged = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    least = np.inf
    for name, about in abouts.items():
        size = float(diagnostics.effective_sample_size(draws[name][None]))
        least = min(least, size)
        report(name, float(draws[name].mean()), float(draws[name].std()), size, truth, about)
    print(f"  {steps.mean():.0f} gradients per draw, {diverged.mean():.1%} divergent", flush=True)
    _speed(least, len(steps), made - begin, spent)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", default=["small", "volatility", "lorenz"])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--nuts", type=float, default=0.0)
    chosen = parser.parse_args()
    for part in chosen.parts:
        if part == "lorenz":
            lorenz(chosen.folder, chosen.draws, chosen.nuts)
        else:
            volatility(chosen.folder, part == "small", chosen.draws, chosen.nuts)


if __name__ == "__main__":
    main()
