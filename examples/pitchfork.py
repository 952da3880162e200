"""A density that splits: dZ = (a(t) Z − Z³) dt + (0.3 + 0.15 tanh Z) dB, with a(t) rising from −2 to 5.

At first the origin is stable; then it loses stability, and paths settle around one of two branches. The
colour is the density at each time, computed by `rf.density.Grid`; the lines are simulated paths.
Run with `make figures`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import roughflow as rf

FIGURE = Path(__file__).parents[1] / "figures" / "pitchfork.png"
T1, TIMES, STATES, PATHS = 4.0, 100, 300, 28


def drift(t, z):
    return (-2 + 7 * t / T1) * z - z**3


def diffusion(t, z):
    return (0.3 + 0.15 * jnp.tanh(z))[:, None]


def main() -> None:
    sde, base = rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(1), 0.6)
    times = np.linspace(0, T1, TIMES + 1)[1:]
    x = np.linspace(-3, 3, STATES)
    key, key_start, key_paths = jax.random.split(jax.random.key(3), 3)
    density = [np.exp(base.log_prob(x[:, None]))]
    for t1 in times:
        flow = rf.StochasticFlow(sde, base, t1=float(t1))
        estimate = flow.estimate(jnp.asarray(x)[:, None], key=key, estimator=rf.density.Grid())
        density.append(np.exp(estimate.log_prob))
    start = base.sample(key=key_start, shape=(PATHS,))
    paths = rf.simulate(sde, start, key=key_paths, t1=T1, steps=1600, trajectory=True)[..., 0]

    figure = plt.figure(figsize=(12, 4.6))
    axes = figure.add_axes((0, 0, 1, 1))
    shown = np.sqrt(np.stack(density, axis=1))
    axes.imshow(
        shown, extent=(0, T1, -3, 3), origin="lower", aspect="auto", cmap="magma", interpolation="bicubic"
    )
    axes.plot(np.linspace(0, T1, 1601), np.asarray(paths).T, color="white", linewidth=0.5, alpha=0.45)
    axes.set(xlim=(0, T1), ylim=(-2.6, 2.9))
    axes.axis("off")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=130)
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
