"""Heston's variance behind 3,523 returns of the S&P 500, by a filter on a grid.

`python -m benchmarks.series_hidden SPX.csv` with the file of the package pypomp. One Euler step per day, with
the order of moves and the parameters of that package. An independent filter on 1,400 points of log V has
11850.96 there, and 11851.25 at the maximum; particle filters 11848.2 with a standard deviation of 2.2.
"""

import csv
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf

KEY = jax.random.key(0)
COORDINATES = rf.transition.Columns(rf.transition.Unchanged(), rf.transition.Root())
PUBLISHED = (3.68e-4, 3.14e-2, 1.12e-4, 2.27e-3, -0.738)
FIRST = 7.66e-3**2


class LogHeston(rf.sde.AbstractItoSDE):
    """The logarithm of a price, and its variance."""

    mu: jax.Array
    kappa: jax.Array
    theta: jax.Array
    xi: jax.Array
    rho: jax.Array
    dimension = 2

    def drift(self, t: Any, z: jax.Array) -> jax.Array:
        return jnp.stack([self.mu - z[1] / 2, self.kappa * (self.theta - z[1])])

    def diffusion(self, t: Any, z: jax.Array) -> jax.Array:
        root = jnp.sqrt(z[1])
        mixed = jnp.stack([self.rho, jnp.sqrt(1 - self.rho**2)])
        return jnp.stack([root * jnp.array([1.0, 0.0]), self.xi * root * mixed])


class AfterOneDay(eqx.Module):
    """The variance of the first return: one Euler step, with a return of zero, after a variance `v0`."""

    v0: jax.Array

    def __call__(self, sde: LogHeston) -> Any:
        mean = self.v0 + sde.kappa * (sde.theta - self.v0) + sde.rho * sde.xi * (self.v0 / 2 - sde.mu)
        return Gaussian(mean, sde.xi * jnp.sqrt(self.v0 * (1 - sde.rho**2)))


class Gaussian(eqx.Module):
    mean: jax.Array
    deviation: jax.Array

    def log_prob(self, x: jax.Array) -> jax.Array:
        return jax.scipy.stats.norm.logpdf(x, self.mean, self.deviation)


def series(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Days, and logarithms of prices with a hidden variance."""
    with open(path, encoding="utf-8") as file:
        price = np.log([float(row["Close"]) for row in csv.DictReader(file)])
    return np.arange(len(price)) * 1.0, np.column_stack([price, np.full(len(price), np.nan)])


def heston(*parameters: float) -> LogHeston:
    return LogHeston(*map(jnp.asarray, parameters))  # pyright: ignore[reportArgumentType, reportCallIssue]


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    times, values = series(sys.argv[1])
    sde, initial = heston(*PUBLISHED), AfterOneDay(jnp.asarray(FIRST))
    for steps, name in ((1, "one Euler step per day"), (None, "continuous time")):
        options: dict[str, Any] = {"key": KEY, "coordinates": COORDINATES, "steps": steps}
        likelihood = rf.series_likelihood(sde, times, values, initial=initial, **options)
        value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(likelihood))
        value = float(value_and_grad(sde)[0])
        finer = eqx.tree_at(lambda one: one.mesh, likelihood, likelihood.mesh.finer())
        start = time.perf_counter()
        jax.block_until_ready(value_and_grad(sde))
        seconds = time.perf_counter() - start
        print(f"{name}: {likelihood.described()}")
        print(f"  log-likelihood {value:.3f}, {float(finer(sde)) - value:+.3f} with more nodes")
        print(f"  value and gradient {seconds:.2f} s", flush=True)
    domains = {name: rf.series.Domain(lower=0.0) for name in ("kappa", "theta", "xi", "v0")}
    domains["rho"] = rf.series.Domain(lower=-1.0, upper=1.0)
    start = time.perf_counter()
    result = rf.fit_sde(
        heston(3e-4, 0.02, 1.5e-4, 2e-3, -0.5), times, values, key=KEY, coordinates=COORDINATES, steps=1,
        num_starts=1, domains=domains, initial=AfterOneDay(jnp.asarray(1e-4)), tolerance=0.3,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    print(f"maximum {result.log_likelihood:.3f} ± {result.likelihood_error:.2g}, {seconds:.0f} s")
    print(result.params, flush=True)
    print(result.summary())


if __name__ == "__main__":
    main()
