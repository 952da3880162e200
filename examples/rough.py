"""Convergence of smooth paths as rough paths, and of solutions, densities and gradients.

Fine paths of Brownian motion, and of fractional Brownian motion with H = 0.4, are projected onto n functions
of each driver. The figure shows how the rough-path distance to the fine path and the errors of the end point,
of log p(x | path) and of its gradient with respect to the parameters decrease with n. All values are medians
over paths. The noise of the SDE is not commutative, so the areas of a path matter. Run with
`python examples/rough.py`.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array
from matplotlib.ticker import LogLocator, NullLocator

import roughflow as rf

FIGURE = Path(__file__).parents[1] / "figures" / "rough.png"
SIZES = (4, 8, 16, 32)
PATHS, FINE, GRID, HURST = 24, 512, 64, 0.4
ALPHA = 0.34  # above ⅓, as the theorem requires, and below H
FAMILIES = {
    "Legendre": (rf.Legendre, rf.PiecewiseLinear(FINE), "#009E73", "-"),
    "Karhunen–Loève": (rf.KarhunenLoeve, rf.PiecewiseLinear(FINE), "#0072B2", "-"),
    "piecewise linear": (rf.PiecewiseLinear, rf.PiecewiseLinear(FINE), "#D55E00", "-"),
    "Legendre, H = 0.4": (
        lambda n: rf.driver.FractionalLegendre(HURST, n),
        rf.FractionalBrownian(HURST, FINE),
        "#009E73",
        "--",
    ),
    "piecewise linear, H = 0.4": (
        lambda n: rf.FractionalBrownian(HURST, n),
        rf.FractionalBrownian(HURST, FINE),
        "#D55E00",
        "--",
    ),
}
TITLES = {
    "distance": f"rough-path distance, α = {ALPHA:g}",
    "solution": "solution at the end",
    "density": "log p(x | path)",
    "gradient": "gradient of log p(x | path)",
}
PARAMETERS = np.array([0.5, 1.0, 0.5, 0.4])


def sde_of(parameters: Array) -> rf.StratonovichSDE:
    rate, frequency, a, b = parameters

    def drift(t: Array, z: Array) -> Array:
        x, y = z
        return jnp.stack([rate * x - x**3 / (1 + x**2) - y, x + jnp.sin(frequency * y)])

    def diffusion(t: Array, z: Array) -> Array:
        x, y = z
        rows = (
            [a * (1 + 0.5 * jnp.sin(x)), 0.8 * jnp.sin(y)],
            [0.8 * jnp.cos(x), b * (1 + 0.5 * jnp.cos(y))],
        )
        return jnp.stack([jnp.stack(row) for row in rows])

    return rf.StratonovichSDE(drift, diffusion)


@eqx.filter_jit
def quantities(path: rf.driver.Path) -> dict[str, Array]:
    """Return the solution at the end, log p(x | path) and its gradient, for each path."""
    point = jnp.array([0.6, -0.4])

    def log_prob_and_end(parameters: Array) -> tuple[Array, tuple[Array, Array]]:
        flow = rf.StochasticFlow(
            sde_of(parameters),
            rf.Normal(jnp.zeros(2)),
            driver=path.driver,
            integrator=rf.FixedGrid(rf.flow.RK4()),
        )
        log_prob = flow.log_prob_given_path(point, path)
        return log_prob, (log_prob, flow.push_forward(point, path)[0])

    gradient, (log_prob, end) = jax.jacfwd(log_prob_and_end, has_aux=True)(jnp.asarray(PARAMETERS))
    return {"solution": end, "density": log_prob[:, None], "gradient": gradient}


def errors(name: str) -> dict[str, np.ndarray]:
    """Return the median over paths of the error of each quantity, for each n."""
    make, fine, _, _ = FAMILIES[name]
    path = fine.sample(key=jax.random.key(0), noise_dimension=2, shape=(PATHS,))
    rough, truth = rf.rough.lift(path, GRID), quantities(path)
    found = {kind: [] for kind in TITLES}
    for n in SIZES:
        approximation = make(n).project(path, resolution=FINE)
        found["distance"].append(np.median(rf.rough.lift(approximation, GRID).distance(rough, ALPHA)))
        for kind, value in quantities(approximation).items():
            found[kind].append(np.median(np.linalg.norm(value - truth[kind], axis=-1)))
    return {kind: np.array(values) for kind, values in found.items()}


def draw(results: dict[str, dict[str, np.ndarray]]) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(8, 6.6), sharex=True, layout="constrained")
    for axes, (kind, title) in zip(grid.flat, TITLES.items(), strict=True):
        for name, found in results.items():
            _, _, color, line = FAMILIES[name]
            marker = "o" if line == "-" else "s"
            axes.loglog(SIZES, found[kind], line, marker=marker, markersize=4, color=color, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xticks(SIZES, [str(n) for n in SIZES])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("number of functions $n$")
    for axes in grid[:, 0]:
        axes.set_ylabel("median error")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    results = {name: errors(name) for name in FAMILIES}
    for kind, title in TITLES.items():
        print(f"\n{title}: median error for n = {', '.join(map(str, SIZES))}; fitted slope")
        for name, found in results.items():
            row = " ".join(f"{value:9.2e}" for value in found[kind])
            slope = np.polyfit(np.log(SIZES), np.log(found[kind]), 1)[0]
            print(f"  {name:26}{row}   {slope:5.2f}")
    draw(results)
    print(f"\nwrote {FIGURE}")


if __name__ == "__main__":
    main()
