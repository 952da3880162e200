"""A stochastic spiral: samples of an SDE, and its density, from the same flow.

An elongated cloud of points is wound up by a rotation that is faster near the centre, while noise pushes
along the orbits more than across them: an Itô SDE with state-dependent, non-diagonal noise. Run with `make
figures`.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import roughflow as rf

FIGURE = Path(__file__).parents[1] / "figures" / "spiral.png"
CELL = 0.1  # width of a grid cell
BLOCK = 3  # number of cells per bin in each direction, to count samples
NUM_PATHS, CHUNK = 256, 16
X_EDGES, Y_EDGES = np.arange(-4.5, 4.55, CELL), np.arange(-3.0, 3.05, CELL)


def drift(t, z):
    """Rotation, faster near the centre."""
    x, y = z
    return 4.0 / (0.5 + x**2 + y**2) * jnp.stack([-y, x])


def diffusion(t, z):
    """Weak noise in every direction, and stronger noise along the orbit."""
    x, y = z
    along = jnp.stack([-y, x]) / jnp.sqrt(0.5 + x**2 + y**2)
    return 0.15 * jnp.eye(2) + 0.25 * jnp.outer(along, along)


def centres(edges):
    return 0.5 * (edges[1:] + edges[:-1])


def density_on_grid(flow, *, key):
    """Return p(x) as the mean over paths of p(x | path); paths are drawn in chunks to limit memory."""
    x, y = centres(X_EDGES), centres(Y_EDGES)
    points = jnp.stack(jnp.meshgrid(x, y, indexing="ij"), axis=-1)[..., None, :]
    total = jnp.full((x.size, y.size), -jnp.inf)
    for chunk_key in jax.random.split(key, NUM_PATHS // CHUNK):
        paths = flow.sample_path(key=chunk_key, shape=(CHUNK,))
        given = flow.log_prob_given_path(points, paths)  # every point on every path of the chunk
        total = jnp.logaddexp(total, jax.nn.logsumexp(given, axis=-1))
    return np.exp(total - np.log(NUM_PATHS))


def disagreement(samples, density):
    """Return the total variation distances of the binned samples and of exact samples from the density."""
    counts, _, _ = np.histogram2d(*np.asarray(samples).T, bins=(X_EDGES[::BLOCK], Y_EDGES[::BLOCK]))
    rows, columns = counts.shape
    expected = density.reshape(rows, BLOCK, columns, BLOCK).sum(axis=(1, 3)) * CELL**2 * len(samples)
    perfect = np.random.default_rng(0).poisson(expected)
    return [0.5 * np.sum(np.abs(c - expected)) / len(samples) for c in (counts, perfect)]


def draw(samples, density, base):
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 3.9), sharex=True, sharey=True, layout="constrained"
    )
    extent = (X_EDGES[0], X_EDGES[-1], Y_EDGES[0], Y_EDGES[-1])
    left.plot(*np.asarray(samples[:10_000]).T, ".", color="#3b0f70", markersize=2.5, alpha=0.5, mew=0)
    left.set_title("10,000 samples of $Z_1$")
    image = right.imshow(density.T, extent=extent, origin="lower", cmap="magma_r", interpolation="bicubic")
    right.set_title(f"density of $Z_1$, averaged over {NUM_PATHS} paths")
    figure.colorbar(image, ax=right, label="$p(x)$", fraction=0.031, pad=0.02)
    x, y = centres(X_EDGES), centres(Y_EDGES)
    start = np.exp(base.log_prob(jnp.stack(jnp.meshgrid(x, y), axis=-1)))
    for axes in (left, right):
        # The ellipse that contains 95 % of a normal distribution, where its density is 5 % of the maximum.
        axes.contour(x, y, start, levels=[0.05 * start.max()], colors="#00796b", linestyles="--")
        axes.set(aspect="equal", xlabel="$x_1$", xlim=extent[:2], ylim=extent[2:])
    left.plot([], [], "--", color="#00796b", label="95 % of $Z_0$")
    left.legend(loc="upper left", frameon=False)
    left.set_ylabel("$x_2$")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def main():
    sde = rf.ItoSDE(drift, diffusion)
    base = rf.Normal(jnp.zeros(2), jnp.array([1.3, 0.35]))
    flow = rf.StochasticFlow(sde, base, t1=1.0)
    key_sample, key_start, key_simulate, key_paths = jax.random.split(jax.random.key(0), 4)

    samples = flow.sample(key=key_sample, shape=(20_000,))
    # The SDE is also simulated with small Euler–Maruyama steps, independently of the flow.
    start = base.sample(key=key_start, shape=(20_000,))
    simulated = rf.simulate(sde, start, key=key_simulate, t1=1.0, steps=500)

    begin = time.perf_counter()
    density = density_on_grid(flow, key=key_paths)
    seconds = time.perf_counter() - begin

    print(f"density at {density.size} points, mean over {NUM_PATHS} paths: {seconds:.1f} s")
    print(f"total mass on the grid: {density.sum() * CELL**2:.4f}")
    for name, points in (("samples of the flow", samples), ("Euler-Maruyama", simulated)):
        found, noise = disagreement(points, density)
        print(f"{name} against density, total variation: {found:.3f} (sampling noise alone: {noise:.3f})")
    draw(samples, density, base)
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
