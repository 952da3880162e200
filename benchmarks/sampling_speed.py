"""Steps of `rf.AdjustedSampler` compared with hand-written MALA: `python -m benchmarks.sampling_speed`.

The noise is constant: a number, a diagonal or a full matrix, which preconditions the hand-written MALA with
two products per step. Target, step size, chains and precision (float32) are the same. The hand-written loop
draws for all chains at once and uses only jax.numpy. Times are medians of interleaved runs after compilation;
our runs include the checks of `rf.sample_chain`. Then the drift of a targeted SDE with a diagonal σ(z) is
timed as a function of the dimension.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array

import roughflow as rf

from .timing import format_table, interleave, verdict

CHAINS, ROUNDS = 16, 7
STEPS = {10: 10_000, 100: 2000, 1000: 300}
MOST = 1.5  # maximum time relative to the hand-written loop
DIMENSIONS, POINTS = (100, 1000, 10_000), 64


def main() -> None:
    rows, ratios = [], {}
    for dimension, steps in STEPS.items():
        for kind, scale in noises(dimension).items():
            seconds = interleave(pair(scale, dimension, steps), ROUNDS)
            ours, hand = (1e6 * np.median(seconds[name]) / steps for name in ("ours", "hand"))
            ratios[kind, dimension] = ours / hand
            rows.append([f"{kind}, d = {dimension}", f"{ours:.0f}", f"{hand:.0f}", f"{ours / hand:.2f}"])
    print(f"one step of {CHAINS} chains")
    print(format_table(["constant σ", "ours, µs", "by hand, µs", "ratio"], rows))
    worst = max(ratios, key=lambda name: ratios[name])
    shown = f"{ratios[worst]:.2f} ({worst[0]}, d = {worst[1]})"
    print(verdict(ratios[worst] <= MOST, f"at most {MOST} times MALA by hand", shown))
    seconds = interleave({str(d): drift(d) for d in DIMENSIONS}, 5 * ROUNDS)
    medians = [float(np.median(seconds[str(d)])) for d in DIMENSIONS]
    print(f"\nthe drift with σ = diag(√(1 + z²)) at {POINTS} points")
    cells = [[str(d), f"{1e6 * s:.0f}"] for d, s in zip(DIMENSIONS, medians, strict=True)]
    print(format_table(["d", "µs"], cells))
    growth, most = medians[-1] / medians[0], DIMENSIONS[-1] / DIMENSIONS[0]
    print(
        verdict(
            growth <= most,
            f"at most {most:.0f} times the time in {most:.0f} times the dimensions",
            f"{growth:.0f}",
        )
    )


def log_density(z: Array) -> Array:
    return -0.5 * jnp.sum(z**2 / jnp.linspace(1, 2, z.size))


def noises(dimension: int) -> dict[str, Array]:
    below = jnp.tril(jax.random.normal(jax.random.key(0), (dimension, dimension)))
    return {
        "number": jnp.asarray(1.1),
        "diagonal": jnp.linspace(0.8, 1.2, dimension),
        "full": jnp.eye(dimension) + 0.1 * below / dimension**0.5,
    }


def pair(scale: Array, dimension: int, steps: int) -> dict[str, Callable[[], object]]:
    dt, key = 0.5 * dimension ** (-1 / 3), jax.random.key(1)
    start = jnp.zeros((CHAINS, dimension))
    sampler = rf.AdjustedSampler(rf.overdamped_langevin(log_density, dimension, scale=scale), dt)
    hand = mala(scale, dt, steps)
    return {
        "ours": lambda: jax.block_until_ready(
            rf.sample_chain(sampler, start, key=key, num_steps=steps).samples
        ),
        "hand": lambda: jax.block_until_ready(hand(start, key)),
    }


def mala(scale: Array, dt: float, steps: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    """A function that returns the samples (chains, steps, d) and the acceptance rate of each chain."""
    times = (lambda v: v @ scale.T) if scale.ndim == 2 else (lambda v: v * scale)
    transposed = (lambda v: v @ scale) if scale.ndim == 2 else times
    values = jax.vmap(jax.value_and_grad(log_density))

    def step(state: tuple[Array, Array, Array], key: Array):
        z, value, pull = state
        key_move, key_accept = jax.random.split(key)
        kick = dt**0.5 * jax.random.normal(key_move, z.shape)
        move = dt * pull + kick
        y = z + times(move)
        new_value, slope = values(y)
        new_pull = 0.5 * transposed(slope)
        gap = jnp.sum((move + dt * new_pull) ** 2 - kick**2, axis=1)
        acceptance = jnp.exp(jnp.minimum(new_value - value - 0.5 * gap / dt, 0))
        taken = jax.random.uniform(key_accept, acceptance.shape) < acceptance
        wide = taken[:, None]
        state = (
            jnp.where(wide, y, z),
            jnp.where(taken, new_value, value),
            jnp.where(wide, new_pull, pull),
        )
        return state, (state[0], acceptance)

    @jax.jit
    def run(start: Array, key: Array) -> tuple[Array, Array]:
        value, slope = values(start)
        keys = jax.random.split(key, steps)
        _, (places, acceptance) = jax.lax.scan(step, (start, value, 0.5 * transposed(slope)), keys)
        return jnp.swapaxes(places, 0, 1), jnp.mean(acceptance, axis=0)

    return run


def drift(dimension: int) -> Callable[[], object]:
    sde = rf.targeted_sde(log_density, lambda t, z: lx.DiagonalLinearOperator(jnp.sqrt(1 + z**2)))
    points = jax.random.normal(jax.random.key(2), (POINTS, dimension))
    at = jax.jit(jax.vmap(lambda z: sde.drift(jnp.zeros(()), z)))
    return lambda: jax.block_until_ready(at(points))


if __name__ == "__main__":
    main()
