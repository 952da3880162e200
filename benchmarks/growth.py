"""Growth of run time with problem size: `python -m benchmarks.growth [--out figures/growth.png]`.

One gradient of log p(x | path) is timed in float32, after compilation, for growing batch size, dimension
(with Hutchinson's divergence), width of the networks and number of steps. One estimate of log p(x) is timed
for a growing number of paths. The slope is that of log time against log size over the upper half of the
sizes, where the fixed cost of a call is negligible; a slope of 1 means linear growth. The matrix products of
a network grow with the square of its width, so the slope for the width is that against width².
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import roughflow as rf
from benchmarks.timing import format_table, timed, verdict

LIMIT, SLACK = 1.0, 0.05  # maximum slope, and allowance for noise
ROUNDS = 3
FIGURE = Path("figures") / "growth.png"


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, its values, and a call to time for each value."""

    sizes: tuple[int, ...]
    call: Callable[[int], Callable[[], object]]
    power: int = 1  # the number of operations is proportional to this power of the size


def flow_of(dimension: int = 2, width: int = 32, steps: int = 2, noise: bool = True) -> rf.StochasticFlow:
    keys = jax.random.split(jax.random.key(0))
    drift = rf.MLP(dimension, dimension, width, 2, key=keys[0])
    sde = rf.ItoSDE(drift, rf.ConstantDiffusion(0.5 * jnp.ones(dimension)) if noise else rf.sde.NoDiffusion())
    divergence = rf.ExactDivergence() if dimension == 2 else rf.HutchinsonDivergence()
    base = rf.Normal(jnp.zeros(dimension))
    return rf.StochasticFlow(sde, base, integrator=rf.FixedGrid(steps=steps), divergence=divergence)


def gradient(flow: rf.StochasticFlow, batch: int) -> Callable[[], object]:
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (batch, flow.dimension))
    path = flow.sample_path(key=keys[1], shape=(batch,))

    @eqx.filter_jit
    def slope(flow):
        loss = lambda flow: -jnp.mean(flow.log_prob_given_path(x, path, key=keys[2]))
        return eqx.filter_grad(loss)(flow)

    return lambda: jax.block_until_ready(slope(flow))


def estimate(paths: int) -> Callable[[], object]:
    flow = flow_of(steps=8)
    x = jax.random.normal(jax.random.key(1), (256, 2))
    way = rf.PullBack(paths, rf.Prior())
    return lambda: jax.block_until_ready(flow.estimate(x, key=jax.random.key(2), estimator=way))


AXES: Mapping[str, Axis] = {
    "batch": Axis((100, 1000, 10_000, 100_000, 1_000_000), lambda n: gradient(flow_of(), n)),
    "dimension": Axis((2, 8, 32, 128, 512), lambda n: gradient(flow_of(n), 1000)),
    "width": Axis((32, 64, 128, 256, 512), lambda n: gradient(flow_of(width=n), 1000), power=2),
    "steps": Axis((4, 16, 64, 256, 1024), lambda n: gradient(flow_of(steps=n), 100)),
    "paths": Axis((16, 64, 256, 1024), estimate),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIGURE)
    out = parser.parse_args().out
    seconds = {name: [measured(axis.call(size)) for size in axis.sizes] for name, axis in AXES.items()}
    for name, axis in AXES.items():
        rows = [
            [f"{size:,}", f"{1e3 * value:.1f}"] for size, value in zip(axis.sizes, seconds[name], strict=True)
        ]
        print(f"{format_table([name, 'ms'], rows)}\n")
    slopes = {name: slope(axis, seconds[name]) for name, axis in AXES.items()}
    for name, value in slopes.items():
        power = f"{name}²" if AXES[name].power == 2 else name
        print(verdict(value <= LIMIT + SLACK, f"time grows no faster than {power}", f"slope {value:.2f}"))
    out.parent.mkdir(exist_ok=True)
    draw(seconds, slopes, out)


def measured(call: Callable[[], object]) -> float:
    """The median seconds of a few calls after compilation, or of one call if calls are long."""
    call()
    first = timed(call)
    return first if first > 5 else float(np.median([first, *(timed(call) for _ in range(ROUNDS - 1))]))


def slope(axis: Axis, seconds: list[float]) -> float:
    upper = slice(len(axis.sizes) // 2, None)
    work = axis.power * np.log(np.array(axis.sizes, float))[upper]
    return float(np.polyfit(work, np.log(np.array(seconds))[upper], 1)[0])


def draw(seconds: Mapping[str, list[float]], slopes: Mapping[str, float], out: Path) -> None:
    figure, places = plt.subplots(1, len(AXES), figsize=(13, 2.8), sharey=True, layout="constrained")
    for ax, (name, axis) in zip(places, AXES.items(), strict=True):
        sizes, values = np.array(axis.sizes, float), np.array(seconds[name])
        ax.loglog(sizes, values, "o-", color="#0072B2", markersize=4)
        ax.loglog(sizes, values[-1] * (sizes / sizes[-1]) ** axis.power, "--", color="#767676", linewidth=1)
        power = "²" if axis.power == 2 else ""
        ax.set_title(f"against {name}{power}: slope {slopes[name]:.2f}", fontsize=9)
        ax.set_xlabel(name)
        ax.set_xticks(
            sizes, [f"$10^{np.log10(size):.0f}$" if size > 1024 else f"{size:.0f}" for size in sizes]
        )
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    places[0].set_ylabel("seconds (dashed: linear growth)")
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
