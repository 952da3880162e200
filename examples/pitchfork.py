"""A density that splits: dZ = (a(t) Z − Z³) dt + (0.5 + 0.2 tanh Z) dB, with a(t) rising from −2 to 5.

At first the origin is stable; then it loses stability, and paths settle around one of two branches. The
colour is the density, computed at 12 times by `rf.density.Grid` and interpolated between them; the lines are
simulated paths.
Run with `make figures`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.interpolate import PchipInterpolator

import roughflow as rf

FIGURE = Path(__file__).parents[1] / "figures" / "pitchfork.png"
T1, TIMES, STATES, PATHS = 2.0, 12, 300, 28


def drift(t, z):
    return (-2 + 7 * t / T1) * z - z**3


def diffusion(t, z):
    return (0.5 + 0.2 * jnp.tanh(z))[:, None]


def main() -> None:
    sde, base = rf.ItoSDE(drift, diffusion), rf.Normal(jnp.zeros(1), 0.6)
    times = np.linspace(0, T1, TIMES + 1)[1:]
    x = jnp.linspace(-3, 3, STATES)[:, None]
    key, key_start, key_paths = jax.random.split(jax.random.key(3), 3)
    log_density = [np.asarray(base.log_prob(x))]
    for t1 in times:
        flow = rf.StochasticFlow(sde, base, t1=float(t1))
        estimate = flow.estimate(x, key=key, estimator=rf.density.Grid(), tolerance=0.1)
        log_density.append(np.asarray(estimate.log_prob))
    start = base.sample(key=key_start, shape=(PATHS,))
    paths = rf.simulate(sde, start, key=key_paths, t1=T1, steps=1600, trajectory=True)[..., 0]

    figure = plt.figure(figsize=(12, 4.6))
    axes = figure.add_axes((0, 0, 1, 1))
    log_density = np.fmax(np.stack(log_density, axis=1), -12)
    fine = np.linspace(0, T1, 400)
    shown = np.exp(PchipInterpolator(np.append(0, times), log_density, axis=1)(fine) / 2)
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
