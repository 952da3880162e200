"""Figure 4: an SDE that learns to reach the Cauchy distribution."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import roughflow as rf

from ._run import Run, kolmogorov

STEPS, RATE, BATCH, L1 = 1000, 3e-3, 512, 1e-4
PATHS = 0  # drawn afresh: none is enough here, and with 4 or 16 the fit was lost
SEEDS = 3
WIDTH, DEPTH = 32, 3
SAMPLES, LONG = 20_000, 10_000
WALK = 5000  # steps of the long run
INSIDE = np.linspace(-4, 4, 161)


class Cauchy(eqx.Module):
    """log 1/(1 + x²), the Cauchy distribution but for its constant."""

    def __call__(self, z: jax.Array) -> jax.Array:
        return -jnp.log1p(z[0] ** 2)


def cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 + np.arctan(x) / np.pi


def fig4(run: Run) -> dict:
    """σ learned so that N(0, 1) comes to the Cauchy distribution by time 1, for three seeds.

    The drift is the one that keeps the Cauchy distribution, −σ²x/(1+x²) + σσ′. Hodgkinson et al. (2020) print
    −2σ²x/(1+x²) + ½σ′, which does not: the last panel shows where it goes with the same σ.
    """
    models = {f"seed-{seed}": _train(run, seed) for seed in range(SEEDS)}
    metrics: dict = {}
    samples: dict[str, np.ndarray] = {}
    for name, model in models.items():
        samples[name] = np.asarray(model.sample(key=run.key("draw"), shape=(SAMPLES,)))[:, 0]
        ratio = noise(model, INSIDE) / np.sqrt(1 + INSIDE**2)
        middle = 0.5 * (ratio.max() + ratio.min())
        metrics[name] = {
            "ratio_smallest": float(ratio.min()),
            "ratio_largest": float(ratio.max()),
            "ratio_varies_by": float(ratio.max() / middle - 1),
            "kolmogorov_distance": kolmogorov(samples[name], cdf),
        }
    long = {kind: _long_run(run, models["seed-0"], kind) for kind in ("corrected", "printed")}
    metrics["long_run_kolmogorov_distance"] = {kind: kolmogorov(z, cdf) for kind, z in long.items()}
    return run.finish(_draw(models, samples["seed-0"], long), metrics)


def _train(run: Run, seed: int) -> rf.StochasticFlow:
    file = run.out / f"{run.name}-seed-{seed}.rf"
    if run.resume and file.exists():
        return _flow(rf.load(file))
    checkpoint = file.with_suffix(".checkpoint")
    if not run.resume:
        checkpoint.unlink(missing_ok=True)
    run.say(f"{run.name}: training seed {seed}")
    key_net, key_fit = jax.random.split(run.key(f"seed {seed}"))
    # σ must grow with |x|, which a network of tanh cannot.
    diffusion = rf.DiagonalDiffusion(1, width=WIDTH, depth=DEPTH, activation=jax.nn.softplus, key=key_net)
    fitted = rf.fit(
        _flow(diffusion),
        key=key_fit,
        objective=rf.ReverseKL(Cauchy(), PATHS, batch_size=BATCH, l1=L1),
        steps=run.steps or STEPS,
        learning_rate=RATE,
        frozen=lambda f: f.base,
        checkpoint=checkpoint,
        resume=checkpoint.exists(),
        progress=run.progress,
    )
    if fitted.interrupted:
        raise KeyboardInterrupt
    rf.save(file, fitted.model.sde.diffusion)  # the rest is known
    checkpoint.unlink(missing_ok=True)
    return fitted.model


def _flow(diffusion: rf.DiagonalDiffusion) -> rf.StochasticFlow:
    return rf.StochasticFlow(rf.targeted_sde(Cauchy(), diffusion), rf.Normal(jnp.zeros(1)))


def _long_run(run: Run, model: rf.StochasticFlow, kind: str) -> np.ndarray:
    """Where many paths are after a long time."""
    sigma = lambda z: _noise(model, z)
    slope = lambda z: jax.grad(lambda y: jnp.sum(sigma(y)))(z)
    printed = lambda t, z: -2 * sigma(z) ** 2 * z / (1 + z**2) + 0.5 * slope(z)
    sde = model.sde if kind == "corrected" else rf.ItoSDE(printed, model.sde.diffusion)
    start = jax.random.normal(run.key("long start"), (LONG, 1))
    return np.asarray(rf.simulate(sde, start, key=run.key("long"), t1=10.0, steps=WALK))[:, 0]


def noise(model: rf.StochasticFlow, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.vmap(lambda z: _noise(model, z))(jnp.asarray(x, float)[:, None]))[:, 0]


def _noise(model: rf.StochasticFlow, z: jax.Array) -> jax.Array:
    sigma: Any = model.sde.noise(jnp.zeros(()), z)  # a diagonal operator
    return sigma.diagonal


def _draw(models: dict, samples: np.ndarray, long: dict) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.3), layout="constrained")
    x = np.linspace(-6, 6, 241)
    for (name, model), colour in zip(models.items(), ("#0072B2", "#56B4E9", "#009E73"), strict=True):
        axes[0].plot(x, noise(model, x), color=colour, label=f"learned, {name.replace('-', ' ')}")
    level = np.mean([noise(model, INSIDE) / np.sqrt(1 + INSIDE**2) for model in models.values()])
    axes[0].plot(x, level * np.sqrt(1 + x**2), "--", color="#D55E00", label=f"{level:.2f} √(1 + x²)")
    axes[0].set(xlabel="x", ylabel="σ(x)", ylim=(0, None), title="learned noise")
    width = 0.25
    bins = np.arange(-6, 6 + width, width)
    for ax, values, title in [
        (axes[1], samples, "samples at time 1, seed 0"),
        (axes[2], long["printed"], "drift as printed in the paper, at time 10"),
    ]:
        weight = np.full(len(values), 1 / len(values) / width)  # those outside the window count too
        ax.hist(values, bins=bins, weights=weight, color="#56B4E9", label="SDE")
        ax.plot(x, 1 / np.pi / (1 + x**2), color="#D55E00", label="Cauchy density")
        ax.set(xlabel="x", ylabel="density", xlim=(-6, 6), title=title)
    top = max(ax.get_ylim()[1] for ax in axes[1:])
    for ax in axes[1:]:
        ax.set_ylim(0, top)
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlim(-6, 6)
    return figure
