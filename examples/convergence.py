"""Convergence of the density given a path as the path is resolved more finely.

One fine Brownian path is projected onto n functions of a driver. By the theorem of Hodgkinson et al. (2020),
log p_t(x | path) and its gradient with respect to the parameters then converge as n grows, uniformly in t.
Between grid points, the projection differs from the path by O(n^(-1/2)), so this is the rate of the largest
error over t. At the end time, where every projection is exact, the error decreases faster if the noise is
commutative; otherwise the projection also lacks Lévy areas. The SDE is understood in the Stratonovich sense,
as for every limit of smooth paths. Run with `make figures`.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array
from matplotlib.axes import Axes

import roughflow as rf

FIGURE = Path(__file__).parents[1] / "figures" / "convergence.png"
DRIVERS = {"Karhunen-Loève": rf.KarhunenLoeve, "piecewise linear": rf.PiecewiseLinear}
NOISES = {"commutative noise": 0.0, "non-commutative noise": 0.8}
SIZES = (4, 8, 16, 32, 64)
HORIZON = 1.5
TIMES = HORIZON * np.arange(1, 18) / 17  # because 17 is odd, only the last time is a grid point
POINT = np.array([0.6, -0.4])
PARAMETERS = np.array([0.5, 1.0, 0.5, 0.4])


class Drift(eqx.Module):
    parameters: Array

    def __call__(self, t: Array, z: Array) -> Array:
        rate, frequency, _, _ = self.parameters
        x, y = z
        return jnp.stack([rate * x - x**3 / (1 + x**2) - y, x + jnp.sin(frequency * y)])


class Diffusion(eqx.Module):
    """Each noise component acts on its own coordinate, so the noise is commutative. If `twist` is not zero,
    it also acts on the other coordinate."""

    parameters: Array
    twist: Array

    def __call__(self, t: Array, z: Array) -> Array:
        _, _, a, b = self.parameters
        x, y = z
        own = jnp.stack([a * (1 + 0.5 * jnp.sin(x)), b * (1 + 0.5 * jnp.cos(y))])
        other = self.twist * jnp.stack([jnp.sin(y), jnp.cos(x)])
        return jnp.stack([jnp.stack([own[0], other[0]]), jnp.stack([other[1], own[1]])])


@eqx.filter_jit
def value_and_gradient(twist: Array, paths: rf.driver.Path) -> tuple[Array, Array]:
    """Return log p_t(x | path), `(..., times)`, and its gradient, `(..., times, parameters)`."""
    # The new axis is for the times; one sample of the batch stops at each time.
    paths = rf.driver.Path(paths.driver, paths.coefficients[..., None, :, :], HORIZON)

    def log_prob(parameters: Array) -> tuple[Array, Array]:
        sde = rf.StratonovichSDE(Drift(parameters), Diffusion(parameters, twist))
        integrator = rf.FixedGrid(rf.flow.RK4())
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), HORIZON, integrator=integrator)
        value = flow.log_prob_given_path(jnp.asarray(POINT), paths, t1=jnp.asarray(TIMES))
        return value, value

    gradient, value = jax.jacfwd(log_prob, has_aux=True)(jnp.asarray(PARAMETERS))
    return value, gradient


def projections(driver: type, sizes: tuple[int, ...], fine: rf.driver.Path) -> rf.driver.Path:
    """Project the fine paths onto each number of functions; the coefficients are `(sizes, paths, n, m)`.

    All projections are expressed in the largest family, which contains the smaller ones, so one solve
    suffices.
    """
    largest = driver(max(sizes))
    paths = [largest.project(driver(n).project(fine)) for n in sizes]
    return largest.path(jnp.stack([path.coefficients for path in paths]), HORIZON)


def errors(twist: float, sizes: tuple[int, ...], num_paths: int, resolution: int) -> dict:
    """Return {driver: (errors of log p, errors of its gradient)}, each `(sizes, paths, times)`."""
    fine = rf.PiecewiseLinear(resolution).sample(
        key=jax.random.key(0), noise_dimension=2, shape=(num_paths,), t1=HORIZON
    )
    true_value, true_gradient = value_and_gradient(jnp.asarray(twist), fine)
    found = {}
    for name, driver in DRIVERS.items():
        value, gradient = value_and_gradient(jnp.asarray(twist), projections(driver, sizes, fine))
        found[name] = (
            np.abs(value - true_value[None]),
            np.linalg.norm(gradient - true_gradient[None], axis=-1),
        )
    return found


def medians(error: np.ndarray) -> dict[str, np.ndarray]:
    """Return, for each size, the medians over paths of the largest error over time and of the error at the
    last time."""
    return {"sup over t": np.median(error.max(axis=-1), axis=-1), "at T": np.median(error[..., -1], axis=-1)}


def slope(sizes: tuple[int, ...], error: np.ndarray) -> float:
    return float(np.polyfit(np.log(sizes), np.log(error), 1)[0])


def draw(results: dict) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(9, 7), sharex=True, sharey="row", layout="constrained")
    styles = {"Karhunen-Loève": ("#0072b2", "o"), "piecewise linear": ("#d55e00", "s")}
    for column, (noise, found) in zip(grid.T, results.items(), strict=True):
        column[0].set_title(noise)
        for row, axes in enumerate(column):
            for name, pair in found.items():
                color, marker = styles[name]
                for (when, error), line in zip(medians(pair[row]).items(), ("-", "--"), strict=True):
                    axes.loglog(SIZES, error, line, color=color, marker=marker, label=f"{name}, {when}")
            largest, last = medians(found["piecewise linear"][row]).values()
            draw_guide(axes, 1.6 * largest[0], -0.5, "-", "slope −½")
            if NOISES[noise] == 0:
                draw_guide(axes, 1.6 * last[0], -1.0, "--", "slope −1")
            axes.set_xticks(SIZES, [str(n) for n in SIZES])
            axes.minorticks_off()
    for axes in grid[1]:
        axes.set_xlabel("number of functions $n$")
    grid[0, 0].set_ylabel(r"median error of $\log p_t(x\,|\,\mathrm{path})$")
    grid[1, 0].set_ylabel(r"median error of $\nabla_\theta \log p_t(x\,|\,\mathrm{path})$")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def draw_guide(axes: Axes, start: float, power: float, line: str, label: str) -> None:
    guide = start * (np.array(SIZES) / SIZES[0]) ** power
    axes.loglog(SIZES, guide, line, color="0.6", linewidth=1, label=label, zorder=0)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    results = {name: errors(twist, SIZES, num_paths=40, resolution=2048) for name, twist in NOISES.items()}
    for noise, found in results.items():
        print(f"\n{noise}: median error for n = {', '.join(map(str, SIZES))}; fitted slope")
        for name, pair in found.items():
            for what, error in zip(("log p", "gradient"), pair, strict=True):
                for when, median in medians(error).items():
                    row = " ".join(f"{value:8.4f}" for value in median)
                    print(f"  {name:17}{what:9}{when:11}{row}   {slope(SIZES, median):5.2f}")
    draw(results)
    print(f"\nwrote {FIGURE}")


if __name__ == "__main__":
    main()
