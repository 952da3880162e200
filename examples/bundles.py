"""Two bundles of paths to one point, and estimates of the density there.

The SDE is dZ₁ = dB₁, dZ₂ = 3Z₁² dt + 0.3 dB₂, started near the origin. To end at (0, 3), the first coordinate
must move far to the left or far to the right and come back: these are two bundles of paths, of equal weight.
The left panel shows paths that end near (0, 3). The right panel shows the error of log p along x₁ = 0, for
the default estimator and for one that finds only one bundle. Run with `make figures`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import roughflow as rf

FIGURE = Path(__file__).parents[1] / "figures" / "bundles.png"
HIGH = np.linspace(0.5, 5.0, 10)
COLOURS = ("#0072b2", "#d55e00")  # distinguishable for colour-blind readers and in greyscale
START = 0.1


def flow():
    drift = lambda t, z: jnp.stack([jnp.zeros_like(z[0]), 3 * z[0] ** 2])
    sde = rf.ItoSDE(drift, lambda t, z: jnp.diag(jnp.array([1.0, 0.3])))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2), START))


def paths_to(model, x, *, key, draws=2**17, count=60):
    """Return the times, and Z₁ along the `count` simulated paths that end nearest to x, `(times, count)`."""
    times = np.linspace(0.02, 1, 60)
    key_start, key_path = jax.random.split(key)
    start = model.base.sample(key=key_start, shape=(draws,))
    path = model.sample_path(key=key_path, shape=(draws,))
    end, _ = model.push_forward(start, path)
    near = jnp.argsort(jnp.sum((end - x[None]) ** 2, axis=1))[:count]
    path = model.driver.path(path.coefficients[near])
    states = [model.push_forward(start[near], path, t1=float(t))[0][:, 0] for t in times]
    return np.append(0, times), np.stack([start[near, 0], *states])


def truth(high, functions=6, draws=200_000, seed=0):
    """Return log p(0, high), averaged over draws of Z₁: given Z₁, a bridge that ends at 0, Z₂ is normal."""
    rng = np.random.default_rng(seed)
    t = (np.arange(200) + 0.5) / 200
    # The condition Z₁(1) = Z₁(0) + B₁(1) = 0 determines B₁(1) and makes the distribution of Z₁(0) a little
    # narrower.
    start = rng.normal(0, START / np.sqrt(1 + START**2), draws)
    waves = np.sqrt(2) * np.sin(np.pi * np.outer(np.arange(1, functions), t))
    waves /= np.pi * np.arange(1, functions)[:, None]
    first = start[:, None] * (1 - t) + rng.normal(size=(draws, functions - 1)) @ waves
    area = 3 * np.mean(first**2, axis=1)
    spread = START**2 + 0.3**2
    given = np.exp(-((high[:, None] - area) ** 2) / (2 * spread)) / np.sqrt(2 * np.pi * spread)
    return np.log(np.mean(given, axis=1)) - 0.5 * np.log(2 * np.pi * (1 + START**2))


def main():
    key = jax.random.key(0)
    model = flow()
    x = jnp.stack([jnp.zeros(HIGH.size), jnp.asarray(HIGH)], axis=1)
    default = model.estimate(x, key=key)
    exact = truth(HIGH)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    times, first = paths_to(model, jnp.array([0.0, 3.0]), key=key)
    sides = first.mean(axis=0) > 0
    for side, colour, label in zip((True, False), COLOURS, ("to the right", "to the left"), strict=True):
        lines = left.plot(times, first[:, sides == side], color=colour, lw=0.7, alpha=0.6)
        lines[0].set_label(label)
    left.set(xlabel="time", ylabel="$Z_1$", title="Paths that end near (0, 3)", xlim=(0, 1))
    left.set_ylim(top=2.6)
    left.legend(frameon=False, loc="upper left", ncols=2)
    right.axhline(0, color="black", lw=0.8)
    right.axhline(-np.log(2), color=COLOURS[1], ls="--", label="one bundle only: half the density")
    right.errorbar(
        HIGH, default.log_prob - exact, 2 * default.total_error, fmt="o", ms=4, capsize=2,
        color=COLOURS[0], label="default estimator",
    )  # fmt: skip
    right.set(xlabel="$x_2$", ylabel="error of log p(0, $x_2$)", title="Estimates ± two total errors")
    # Room for the legend below the error bars.
    right.set_ylim(bottom=right.get_ylim()[0] - 0.6)
    right.legend(frameon=False, loc="lower left")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=160)
    errors = np.round(default.log_prob - exact, 2)
    print(f"errors of the default estimator: {errors}; {default.warning or 'no warning'}")
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
