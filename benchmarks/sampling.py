"""Gradients per effective sample: `python -m benchmarks.sampling [--only cauchy banana ...]`.

Four samplers are compared for each target: the sampler of `rf.tune_sampler`; MALA with σ = I and the best dt
of a grid (the search for it is not counted); MALA with the constant σ of `rf.warm_up`; and the NUTS of
BlackJAX after window adaptation. Effective samples are the bulk and tail values of ArviZ for the worst
coordinate. The first two samplers start at the final state of the tuning, the others at the final state of
their own warm-up. "even after" is the number of effective samples after which the gradients for tuning are
repaid, compared with MALA with σ = I. This needs ArviZ and BlackJAX.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import roughflow as rf

from .timing import format_table

warnings.simplefilter("ignore", FutureWarning)  # ArviZ warns of a future version
import arviz  # noqa: E402

CHAINS, STEPS = 16, 4000
GRID = np.geomspace(1e-4, 100, 19)  # candidate dt of MALA
PILOT, LONG = 10_000, 40_000  # steps of MALA to choose dt, and to measure
WARM_UP = 2000  # steps
NUTS_ADAPT, NUTS_DRAWS = 1000, 1000


def funnel(z: Array) -> Array:
    """Neal's funnel in ten dimensions: v ~ N(0, 9), x | v ~ N(0, eᵛ I)."""
    v, x = z[0], z[1:]
    return -(v**2) / 18 - 0.5 * jnp.sum(x**2) * jnp.exp(-v) - 0.5 * x.size * v


def eight_schools(z: Array) -> Array:
    """The eight schools of Rubin (1981), non-centred: z = (μ, log τ, eight standardised effects)."""
    y = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    spread = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    mu, log_tau, effects = z[0], z[1], z[2:]
    prior = -(mu**2) / 50 - jnp.log1p((jnp.exp(log_tau) / 5) ** 2) + log_tau - 0.5 * jnp.sum(effects**2)
    return prior - 0.5 * jnp.sum(((y - mu - jnp.exp(log_tau) * effects) / spread) ** 2)


@dataclass(frozen=True)
class Target:
    log_density: Callable[[Array], Array]
    dimension: int
    budget: int  # gradients for tuning


TARGETS = {
    "cauchy": Target(lambda z: -jnp.log1p(z[0] ** 2), 1, 100_000),
    "banana": Target(lambda z: -0.5 * z[0] ** 2 - 0.25 * (z[1] + z[0] ** 2) ** 2, 2, 100_000),
    "funnel": Target(funnel, 10, 500_000),
    "gaussian": Target(lambda z: -0.5 * jnp.sum(jnp.geomspace(1, 1000, 10) * z**2), 10, 100_000),
    "eight schools": Target(eight_schools, 10, 100_000),
}
HEADER = ["", "bulk", "tail", "R-hat", "acceptance", "gradients", "tuning", "s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.only:
        compare(name, TARGETS[name], jax.random.key(arguments.seed))


def compare(name: str, target: Target, key) -> None:
    keys = jax.random.split(key, 4)
    start = jax.random.normal(keys[0], (64, target.dimension))
    began = time.perf_counter()
    tuned = rf.tune_sampler(
        target.log_density, start, key=keys[1], num_gradients=target.budget, progress=False
    )
    places = tuned.z[:CHAINS]
    chain = rf.sample_chain(tuned.sampler, places, key=keys[2], num_steps=STEPS)
    rows = {"tuned": measure(chain, chain.num_gradients * CHAINS, tuned.num_gradients, began)}
    began = time.perf_counter()
    chain = mala(target, places, keys[2])
    rows["MALA"] = measure(chain, chain.num_gradients * CHAINS, 0, began)
    began = time.perf_counter()
    sampler, warm = rf.warm_up(target.log_density, start, key=keys[1], num_steps=WARM_UP)
    chain = rf.sample_chain(sampler, warm[:CHAINS], key=keys[2], num_steps=LONG)
    rows["MALA, warmed up"] = measure(chain, chain.num_gradients * CHAINS, WARM_UP * len(start), began)
    began = time.perf_counter()
    rows["NUTS"] = measure(*nuts(target, start[:CHAINS], keys[3]), began)
    print(f"\n{name}: gradients per effective sample")
    print(format_table(HEADER, [[entry, *row.cells] for entry, row in rows.items()]))
    ours, best = rows["tuned"], rows["MALA"]
    saved = min(best.bulk - ours.bulk, best.tail - ours.tail)
    even = f"even after {tuned.num_gradients / saved:.0f} effective samples" if saved > 0 else "never even"
    print(
        f"MALA / tuned: {best.bulk / ours.bulk:.1f} bulk, {best.tail / ours.tail:.1f} tail; "
        f"NUTS / tuned: {rows['NUTS'].bulk / ours.bulk:.1f}, {rows['NUTS'].tail / ours.tail:.1f}; "
        f"{even}",
        flush=True,
    )


@dataclass(frozen=True)
class Row:
    bulk: float
    tail: float
    cells: list[str]


def measure(chain: rf.mcmc.Chain, gradients: int, tuning: int, began: float) -> Row:
    data = arviz.convert_to_dataset({"z": np.asarray(chain.samples)})
    cost = [gradients / float(arviz.ess(data, method=kind)["z"].min()) for kind in ("bulk", "tail")]
    rhat = float(arviz.rhat(data)["z"].max())
    seconds = time.perf_counter() - began
    cells = [f"{cost[0]:.1f}", f"{cost[1]:.1f}", f"{rhat:.3f}", f"{float(np.mean(chain.acceptance)):.2f}"]
    return Row(*cost, [*cells, str(gradients), str(tuning), f"{seconds:.0f}"])


def mala(target: Target, places: Array, key) -> rf.mcmc.Chain:
    """Run MALA with the dt that has the most effective samples of the worst coordinate in a pilot run."""
    sde = rf.overdamped_langevin(target.log_density, target.dimension)

    def run(dt: float, steps: int) -> rf.mcmc.Chain:
        return rf.sample_chain(rf.AdjustedSampler(sde, jnp.asarray(dt)), places, key=key, num_steps=steps)

    def worst(dt: float) -> float:
        data = arviz.convert_to_dataset({"z": np.asarray(run(dt, PILOT).samples)})
        effective = min(float(arviz.ess(data, method=kind)["z"].min()) for kind in ("bulk", "tail"))
        # Chains that disagree have almost no effective samples; then the smallest R-hat decides.
        return effective / float(arviz.rhat(data)["z"].max()) ** 4

    return run(max(GRID, key=worst), LONG)


def nuts(target: Target, start: Array, key) -> tuple[rf.mcmc.Chain, int, int]:
    """The draws, and the numbers of gradients for the draws and for the adaptation."""
    key_adapt, key_draw = jax.random.split(key)
    adaptation = blackjax.window_adaptation(blackjax.nuts, target.log_density)

    @jax.jit
    def one(key_adapt, key_draw, z):
        (state, parameters), info = adaptation.run(key_adapt, z, NUTS_ADAPT)
        kernel = blackjax.nuts(target.log_density, **parameters)

        def step(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps, info.acceptance_rate)

        _, (places, count, accepted) = jax.lax.scan(step, state, jax.random.split(key_draw, NUTS_DRAWS))
        return places, jnp.sum(count), jnp.sum(info.info.num_integration_steps), jnp.mean(accepted)

    keys = jax.random.split(key_adapt, len(start)), jax.random.split(key_draw, len(start))
    places, count, adapting, accepted = jax.vmap(one)(*keys, start)
    taken = int(np.sum(np.asarray(count, np.int64)))
    return (
        rf.mcmc.Chain(places, accepted, taken // len(start)),
        taken,
        int(np.sum(np.asarray(adapting, np.int64))),
    )


if __name__ == "__main__":
    main()
