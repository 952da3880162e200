"""Hidden variance of Heston's model for 3,523 returns of the S&P 500, by a filter on a grid.

Run `python -m benchmarks.series_hidden SPX.csv [likelihood euler continuous filters]` with the data file of
the package pypomp. `euler` uses one Euler step per day, with the order of updates and the parameters of that
package. For these, an independent filter on 1,400 points of log V gives a log-likelihood of 11850.96, and
11851.25 at the maximum; particle filters give 11848.2 with a standard deviation of 2.2. `continuous` fits the
SDE itself. `filters` compares the error of the log-likelihood and the run time with those of particle filters
and a Gaussian filter, if the packages pypomp, particles and dynamax are installed.
"""

import csv
import dataclasses
import functools
import importlib.util
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
FAILED = 1e4  # nats; methods with a larger error are not plotted
MAXIMUM = (
    3.76e-4,
    3.23e-2,
    1.08e-4,
    2.26e-3,
    -0.738,
)  # parameters at the maximum of the likelihood with one Euler step


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


def likelihoods(times: np.ndarray, values: np.ndarray) -> None:
    """Print the log-likelihood at the published parameters."""
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


def fitted(times: np.ndarray, values: np.ndarray, start: tuple, initial: Any, steps: int | None) -> None:
    """Print the maximum of the likelihood, with `steps` Euler steps per day or in continuous time."""
    domains = {name: rf.series.Domain(lower=0.0) for name in ("kappa", "theta", "xi")}
    domains["rho"] = rf.series.Domain(lower=-1.0, upper=1.0)
    if steps is not None:
        domains["v0"] = rf.series.Domain(lower=0.0)
    began = time.perf_counter()
    result = rf.fit_sde(
        heston(*start), times, values, key=KEY, coordinates=COORDINATES, steps=steps, num_starts=1,
        domains=domains, initial=initial, tolerance=0.3,
        effort=None if steps else rf.transition.Effort(1, 32, 1), fixed=() if steps else ["initial"],
    )  # fmt: skip
    seconds = time.perf_counter() - began
    print(f"maximum {result.log_likelihood:.3f} ± {result.likelihood_error:.2g}, {seconds:.0f} s")
    print(result.summary(), flush=True)


def filters(times: np.ndarray, values: np.ndarray) -> None:
    """Print the error of the log-likelihood at the published parameters, and CPU seconds after
    compilation."""
    sde, initial = heston(*PUBLISHED), AfterOneDay(jnp.asarray(FIRST))
    options: dict[str, Any] = {"key": KEY, "coordinates": COORDINATES, "steps": 1, "initial": initial}
    ours = rf.series_likelihood(sde, times, values, **options)
    with_mesh = lambda mesh: eqx.tree_at(lambda one: one.mesh, ours, mesh)
    reference = float(with_mesh(ours.mesh.finer())(sde))
    print(f"reference {reference:.3f}", flush=True)
    returns, rows = np.diff(values[:, 0]), []
    for size in (24, 32, 48, ours.mesh.size):
        likelihood = with_mesh(dataclasses.replace(ours.mesh, size=size))
        rows.append(_row("roughflow, grid", size, lambda key, one=likelihood: float(one(sde)), 1, reference))
    for size in (100, 1000, 10_000):
        run = lambda key, n=size: float(bootstrap(jnp.asarray(returns), key, n))
        rows.append(_row("bootstrap filter, JAX", size, run, 5, reference))
    for name, run, sizes in _peers(returns):
        for size in sizes:
            rows.append(_row(name, size, lambda key, n=size, run=run: run(n, key), 5, reference))
    _draw(rows)


def _row(name: str, size: int, run: Any, count: int, reference: float) -> tuple[str, float, float]:
    """The method, the CPU seconds of a value and its root mean square error."""
    run(0)  # compiles
    start = time.process_time()
    found = np.array([run(key) for key in range(1, count + 1)])
    seconds = (time.process_time() - start) / count
    error = float(np.sqrt(np.mean((found - reference) ** 2)))
    spread = f"mean {found.mean():.2f}, sd {found.std():.2f}" if count > 1 else f"{found[0]:.3f}"
    print(f"  {name:<24} {size:>7} {seconds:>8.2f} s  error {error:.4f}  {spread}", flush=True)
    return name, seconds, error


def _draw(rows: list[tuple[str, float, float]]) -> None:
    """Plot the error against seconds in series-hidden.png, without methods that fail."""
    import matplotlib.pyplot as plt

    from roughflow import plots

    rows = [row for row in rows if row[2] < FAILED]
    figure, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    colours = (plots.BLUE, plots.GREY, plots.VERMILION, plots.GREEN, plots.PURPLE, plots.SKY)
    for name, colour in zip(dict.fromkeys(row[0] for row in rows), colours, strict=False):
        seconds, error = np.array([row[1:] for row in rows if row[0] == name]).T
        ax.loglog(seconds, error, "o-", color=colour, label=name, markersize=4)
    ax.set(xlabel="CPU seconds", ylabel="error of the log-likelihood, nats")
    ax.legend(frameon=False, fontsize=plots.SMALL)
    plots.save(figure, "series-hidden.png")


@functools.partial(jax.jit, static_argnums=2)
def bootstrap(returns: jax.Array, key: int, size: int) -> jax.Array:
    """The bootstrap filter with systematic resampling after every value."""
    mu, kappa, theta, xi, rho = PUBLISHED

    def step(carry: tuple, item: tuple) -> tuple:
        v, before = carry
        y, key = item
        noise, shift = jax.random.normal(key, (size,)), jax.random.uniform(jax.random.fold_in(key, 1))
        shock = rho * (before - mu + v / 2) / jnp.sqrt(v) + np.sqrt(1 - rho**2) * noise
        v = jnp.maximum(v + kappa * (theta - v) + xi * jnp.sqrt(v) * shock, 1e-32)
        logs = jax.scipy.stats.norm.logpdf(y, mu - v / 2, jnp.sqrt(v))
        total = jax.scipy.special.logsumexp(logs)
        places = jnp.searchsorted(jnp.cumsum(jnp.exp(logs - total)), (jnp.arange(size) + shift) / size)
        return (v[jnp.minimum(places, size - 1)], y), total - jnp.log(size)

    keys = jax.random.split(jax.random.key(key), len(returns))
    return jax.lax.scan(step, (jnp.full(size, FIRST), jnp.zeros(())), (returns, keys))[1].sum()


def _peers(returns: np.ndarray) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Names, log-likelihood estimates as functions of a number of particles and a seed, and numbers of
    particles."""
    found = []
    if importlib.util.find_spec("pypomp"):
        import pypomp

        model = pypomp.models.spx()

        def by_pypomp(size: int, seed: int) -> float:
            model.pfilter(J=size, key=jax.random.key(seed))
            return float(np.ravel(model.theta.logLik)[0])

        found.append(("pypomp", by_pypomp, (100, 1000)))
    if importlib.util.find_spec("dynamax"):
        found.append(("dynamax, extended Kalman", _by_dynamax(returns), (1,)))
        found.append(("dynamax, Gauss–Hermite", _by_dynamax(returns), (3, 9)))
    if importlib.util.find_spec("particles"):
        import particles
        from particles import distributions as dists, state_space_models

        class Variance(state_space_models.StateSpaceModel):
            def PX0(self) -> Any:
                return self.PX(0, FIRST)

            def PX(self, t: int, v: np.ndarray) -> Any:
                (mu, kappa, theta, xi, rho), v = PUBLISHED, np.maximum(v, 1e-32)
                before = returns[t - 1] if t else 0.0
                mean = v + kappa * (theta - v) + xi * rho * (before - mu + v / 2)
                return dists.Normal(mean, xi * np.sqrt(v * (1 - rho**2)))

            def PY(self, t: int, before: Any, v: np.ndarray) -> Any:
                v = np.maximum(v, 1e-32)
                return dists.Normal(PUBLISHED[0] - v / 2, np.sqrt(v))

            def proposal0(self, data: np.ndarray) -> Any:
                return self.proposal(0, FIRST, data)

            def proposal(self, t: int, v: Any, data: np.ndarray) -> Any:
                """The prior in log V, tilted by the curvature of the return's density around its mean."""
                prior = self.PX(t, v)
                mean = np.maximum(prior.loc, 1e-6)
                wide = (prior.scale / mean) ** 2
                share = (data[t] - PUBLISHED[0]) ** 2 / mean
                gain = 1 / (1 / wide + np.maximum(share / 2, 0.05))
                shift = gain * 0.5 * (share - 1)
                return dists.LogNormal(np.log(mean) + np.clip(shift, -1, 1), np.sqrt(gain) * 1.1)

        def by_particles(size: int, seed: int, kind: Any) -> float:
            np.random.seed(seed)  # noqa: NPY002
            start = kind(ssm=Variance(), data=returns)
            run = particles.SMC(fk=start, N=size, resampling="systematic", ESSrmin=0.5)
            run.run()
            return float(run.logLt)

        for name, kind in (
            ("bootstrap", state_space_models.Bootstrap),
            ("guided", state_space_models.GuidedPF),
        ):
            run = functools.partial(by_particles, kind=kind)
            found.append((f"particles, {name}", run, (100, 1000)))
    return found


def _by_dynamax(returns: np.ndarray) -> Any:
    """A Gaussian filter of √V: Gauss–Hermite quadrature with `size` nodes, extended Kalman for one."""
    from dynamax.generalized_gaussian_ssm import inference, models

    mu, kappa, theta, xi, rho = PUBLISHED
    start = np.sqrt(FIRST)

    def moved(z: jax.Array, before: jax.Array) -> jax.Array:
        v = jnp.maximum(z**2, 1e-12)
        shock = rho * xi * (before[0] - mu + v / 2)
        return jnp.sqrt(jnp.maximum(v + kappa * (theta - v) + shock, 1e-12))

    model = models.ParamsGGSSM(
        jnp.array([start]), jnp.array([[xi**2 / 4 * (1 - rho**2)]]), moved,
        jnp.array([[xi**2 / 4 * (1 - rho**2)]]), lambda z, u: mu - z**2 / 2, lambda z, u: jnp.diag(z**2),
    )  # fmt: skip
    earlier = jnp.asarray(returns)[:, None]  # the state moves with yesterday's return

    @functools.partial(jax.jit, static_argnums=0)
    def value(size: int) -> jax.Array:
        integrals = inference.EKFIntegrals() if size == 1 else inference.GHKFIntegrals(size)
        filtered = inference.conditional_moments_gaussian_filter(
            model, integrals, jnp.asarray(returns)[:, None], inputs=earlier
        )
        return filtered.marginal_loglik

    return lambda size, seed: float(value(size))


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    times, values = series(sys.argv[1])
    parts = sys.argv[2:] or ["likelihood", "euler", "continuous", "filters"]
    if "likelihood" in parts:
        likelihoods(times, values)
    first = (3e-4, 0.02, 1.5e-4, 2e-3, -0.5)
    if "euler" in parts:
        fitted(times, values, first, AfterOneDay(jnp.asarray(1e-4)), 1)
    if "filters" in parts:
        filters(times, values)
    if "continuous" in parts:
        fitted(times, values, MAXIMUM, rf.series.Estimated([FIRST]), None)


if __name__ == "__main__":
    main()
