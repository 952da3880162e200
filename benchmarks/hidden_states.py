"""Simulated series with hidden states.

`python -m benchmarks.hidden_states likelihood NAME`: the log-likelihood of a simulated series, compared with
a bootstrap particle filter in NumPy. NAME is `lotka`, `lotka-gaps` (30 % of the cells missing), `neuron` or
`epidemic`.

`coverage NAME FIRST COUNT SECONDS`: how often 95 % intervals of parameters and hidden states cover the truth,
in fits of the simulated series FIRST, FIRST + 1, … NAME is `heston`, `volatility`, `neuron` or `lotka`.

`linear SEED`: estimates of a linear SDE by the Kalman filter and by particles, compared with an independent
Kalman filter in NumPy.

`speed LENGTH`: seconds of the log-likelihood and its gradient for a long series.
"""

import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg, stats

import roughflow as rf

KEY = jax.random.key(0)
ANIMALS = rf.LotkaVolterra(*(0.5, 0.03, 0.8, 0.03, 0.2, 0.2))
NEURON = rf.FitzHughNagumo(*(0.1, 0.0, 1.5, 0.8, 0.3, 0.3))
PRICE = rf.Heston(*(0.05, 10.0, 0.04, 0.7, -0.6))
EPIDEMIC = rf.series.SIR(*(0.6, 0.25, 2000.0))
VOLATILITY = rf.series.StochasticVolatility(*(0.05, 20.0, -3.0, 4.0, -0.5))


class Start(eqx.Module):
    """A normal distribution of the state or of its logarithm."""

    mean: jax.Array
    deviation: jax.Array
    log: bool = eqx.field(static=True)

    def log_prob(self, x: jax.Array) -> jax.Array:
        y = jnp.log(x) if self.log else x
        return jax.scipy.stats.norm.logpdf(y, self.mean, self.deviation) - (jnp.log(x) if self.log else 0)

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        mean, deviation = np.asarray(self.mean), np.asarray(self.deviation)
        y = mean + deviation * rng.normal(size=(count, len(mean)))
        return np.exp(y) if self.log else y


@dataclasses.dataclass(frozen=True)
class Problem:
    """An SDE, the times of its values, and the options of `rf.fit_sde`."""

    sde: Any
    times: np.ndarray
    start: Start
    options: dict[str, Any]
    kind: str  # kind of values: counts, noisy, or hidden (one exact and one hidden column)
    noise: float = 0.0
    missing: float = 0.0
    substeps: int = 20

    def stepped(self, x: np.ndarray, dt: float, rng: np.random.Generator) -> np.ndarray:
        """Many states `(K, d)` after small steps over a total time dt."""
        h = dt / self.substeps
        for _ in range(self.substeps):
            x = _STEPS[type(self.sde).__name__](self.sde, x, h, rng.normal(size=x.shape))
        return x

    def observed(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "hidden":
            return np.column_stack([x[:, 0], np.full(len(x), np.nan)])
        if self.kind == "noisy":
            return np.column_stack([x[:, 0] + self.noise * rng.normal(size=len(x)), np.full(len(x), np.nan)])
        y = rng.poisson(x[:, 1:] if self.sde is EPIDEMIC else x).astype(float)
        y[rng.random(y.shape) < self.missing] = np.nan
        return y

    def simulated(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        x = [self.start.sample(rng, 1)]
        if isinstance(self.options.get("initial"), str):  # stationary after a year
            early = np.random.default_rng((seed, 1))
            for _ in range(252):
                x = [self.stepped(x[0], 1 / 252, early)]
        for dt in np.diff(self.times):
            x.append(self.stepped(x[-1], dt, rng))
        states = np.concatenate(x)
        return self.observed(states, rng), states

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The log-density of one value given each of many states."""
        total = np.zeros(len(x))
        if self.kind == "noisy":
            return stats.norm.logpdf(y[0], x[:, 0], self.noise)
        rate = x[:, 1:] if self.sde is EPIDEMIC else x
        for i in np.flatnonzero(np.isfinite(y)):
            total += stats.poisson.logpmf(y[i], rate[:, i])
        return total

    def bootstrap(self, y: np.ndarray, count: int, seed: int) -> float:
        """The log-likelihood by a bootstrap particle filter (Gordon, Salmond & Smith 1993)."""
        rng, total = np.random.default_rng(seed), 0.0
        x = self.start.sample(rng, count)
        for k, value in enumerate(y):
            if k:
                x = self.stepped(x, self.times[k] - self.times[k - 1], rng)
            weight = self.log_prob(x, value)
            top = weight.max()
            share = np.exp(weight - top)
            total += top + np.log(share.mean())
            points = (np.arange(count) + rng.uniform()) / count * share.sum()
            x = x[np.minimum(np.searchsorted(np.cumsum(share), points), count - 1)]
        return total


def _fields(sde: Any) -> list[float]:
    return [float(leaf) for leaf in jax.tree.leaves(sde)]


def _lotka(sde: Any, x: np.ndarray, h: float, e: np.ndarray) -> np.ndarray:
    alpha, beta, gamma, delta, one, two = _fields(sde)
    a, b = x.T
    rise = (alpha - beta * b - one**2 / 2) * h + one * np.sqrt(h) * e[:, 0]
    return np.exp(
        np.log(x) + np.column_stack([rise, (delta * a - gamma - two**2 / 2) * h + two * np.sqrt(h) * e[:, 1]])
    )


def _neuron(sde: Any, x: np.ndarray, h: float, e: np.ndarray) -> np.ndarray:
    epsilon, s, gamma, beta, one, two = _fields(sde)
    a, b = x.T
    drift = np.column_stack([(a - a * a * a - b + s) / epsilon, gamma * a - b + beta])
    return x + h * drift + np.sqrt(h) * e * [one, two]


def _epidemic(sde: Any, x: np.ndarray, h: float, e: np.ndarray) -> np.ndarray:
    beta, gamma = _fields(sde)
    infections, recoveries = beta * x[:, 0] * x[:, 1] / sde.population, gamma * x[:, 1]
    infected = h * infections + np.sqrt(h * infections) * e[:, 0]
    recovered = h * recoveries + np.sqrt(h * recoveries) * e[:, 1]
    return np.maximum(x + np.column_stack([-infected, infected - recovered]), 1e-9)


def _heston(sde: Any, x: np.ndarray, h: float, e: np.ndarray) -> np.ndarray:
    mu, kappa, theta, sigma, rho = _fields(sde)
    v, w = x[:, 1], np.sqrt(h) * e
    price = x[:, 0] * np.exp((mu - v / 2) * h + np.sqrt(v) * w[:, 0])
    shock = rho * w[:, 0] + np.sqrt(1 - rho**2) * w[:, 1]
    later = v + kappa * (theta - v) * h + sigma * np.sqrt(v) * shock + 0.25 * sigma**2 * (shock**2 - h)
    return np.column_stack([price, np.maximum(later, 1e-9)])


def _volatility(sde: Any, x: np.ndarray, h: float, e: np.ndarray) -> np.ndarray:
    mu, kappa, theta, sigma, rho = _fields(sde)
    v, w = np.exp(x[:, 1]), np.sqrt(h) * e
    price = x[:, 0] * np.exp((mu - v / 2) * h + np.sqrt(v) * w[:, 0])
    shock = rho * w[:, 0] + np.sqrt(1 - rho**2) * w[:, 1]
    return np.column_stack([price, x[:, 1] + kappa * (theta - x[:, 1]) * h + sigma * shock])


_STEPS: dict[str, Callable] = {
    "LotkaVolterra": _lotka,
    "FitzHughNagumo": _neuron,
    "SIR": _epidemic,
    "Heston": _heston,
    "StochasticVolatility": _volatility,
}


def start(mean: list[float], deviation: list[float], log: bool = False) -> Start:
    return Start(jnp.asarray(mean), jnp.asarray(deviation), log)


def problem(name: str, fits: bool) -> Problem:
    """A problem by name, for fits or for a log-likelihood."""
    if name.startswith("lotka"):
        first = start([np.log(25), np.log(15)], [0.3, 0.3], log=True)
        sde = ANIMALS
        times = 0.5 * np.arange(80 if fits else 40)
        missing = 0.3 if name == "lotka-gaps" else 0.0
        return Problem(
            sde,
            times,
            first,
            {"observe": rf.series.Counts((0, 1)), "initial": first},
            "counts",
            missing=missing,
        )
    if name == "neuron":
        first = start([-0.8, -0.4], [0.3, 0.3])
        sde, times = NEURON, 0.1 * np.arange(60)
        if fits:  # the recovery is determined up to a shift, which moves s
            return Problem(sde, 0.05 * np.arange(500), first, {"fixed": ["s"]}, "hidden", substeps=50)
        noise = np.full((len(times), 2), 0.2)
        return Problem(
            sde, times, first, {"initial": first, "measurement_noise": noise}, "noisy", 0.2, 0.0, 25
        )
    if name == "epidemic":
        begin = np.array([1980.0, 20.0])
        first = start([1980.0, 20.0], [0.0, 0.0])
        options = {"observe": rf.series.Counts((1,)), "initial": begin}
        return Problem(EPIDEMIC, 1.0 * np.arange(36), first, options, "counts")
    days = np.arange(1000) / 252
    if name == "heston":
        first = start([0.0, np.log(0.04)], [1e-9, 0.3], log=True)
        sde = PRICE
        return Problem(sde, days, first, {"initial": "stationary"}, "hidden")
    first = start([0.0, -3.0], [1e-9, 0.5], log=False)
    first = Start(jnp.asarray([1.0, -3.0]), first.deviation, False)
    sde = VOLATILITY
    return Problem(sde, days, first, {"initial": "stationary"}, "hidden")


def likelihood(name: str, particles: str = "100000", runs: str = "8") -> None:
    """Print our log-likelihood and its error, and that of an independent particle filter with 20 and 40 steps
    between values."""
    one = problem(name, fits=False)
    y, _ = one.simulated(0)
    begin = time.perf_counter()
    ours: Any = rf.series_likelihood(one.sde, one.times, y, key=KEY, **one.options)
    value, error = ours.with_error(one.sde)
    seconds = time.perf_counter() - begin
    print(f"{name}: {value:.3f} ± {error:.3f}, {seconds:.0f} s, {ours.described()}", flush=True)
    for factor in (1, 2):
        other = dataclasses.replace(one, substeps=factor * one.substeps)
        found = [other.bootstrap(y, int(particles), seed) for seed in range(int(runs))]
        spread = np.std(found, ddof=1) / np.sqrt(len(found))
        mean = np.logaddexp.reduce(found) - np.log(len(found))
        print(f"  particles, {other.substeps} steps: {mean:.3f} ± {spread:.3f}", flush=True)


def _fitted(one: Problem, y: np.ndarray, options: dict[str, Any], steps: int | None) -> Any:
    """A fit, or the reason why there is none."""
    try:
        result = rf.fit_sde(one.sde, one.times, y, steps=steps, **options)
        result.confint()  # may fail
        return result
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def coverage(name: str, first: str, count: str, seconds: str) -> None:
    """Print one line per series, and the fraction of intervals that cover the truth."""
    one, begin = problem(name, fits=True), time.perf_counter()
    names = [field.name for field in dataclasses.fields(one.sde)]
    truth = [
        x for name, x in zip(names, _fields(one.sde), strict=True) if name not in one.options.get("fixed", ())
    ]
    covered, bands, z, euler = [], [], [], []
    for seed in range(int(first), int(first) + int(count)):
        if time.perf_counter() - begin > float(seconds):
            break
        y, states = one.simulated(seed)
        effort = rf.transition.Effort(1, 32, 1)
        options: dict[str, Any] = {"key": KEY, "num_starts": 1, "effort": effort, **one.options}
        result = _fitted(one, y, options, None)
        # For every eighth series, also the likelihood by Euler's method.
        plain = "" if seed % 8 else _fitted(one, y, options, 1)
        if isinstance(result, str):
            print(f"{name} {seed} failed: {result}", flush=True)
            continue
        intervals = np.array(list(result.confint().values()))
        covered.append((intervals[:, 0] <= truth) & (truth <= intervals[:, 1]))
        errors = np.array(list(result.standard_errors.values()))
        z.append((result.estimates - truth) / errors)
        euler.append(errors + np.nan if isinstance(plain, str) else (plain.estimates - truth) / errors)
        mean, deviation = result.smoothed
        hidden = deviation[:, -1] > 0
        inside = np.abs(states - mean)[hidden] <= 1.96 * deviation[hidden]
        bands.append(inside[:, deviation[hidden][0] > 0].mean())
        spent = time.perf_counter() - begin
        shown = f"{result.log_likelihood:.2f} ± {result.likelihood_error:.2g}; {result.warning}"
        print(
            f"{name} {seed} {spent:.0f} s covered {covered[-1].astype(int)} {bands[-1]:.3f} {shown}",
            flush=True,
        )
        print("  z", np.round(z[-1], 2), "euler", np.round(euler[-1], 2), flush=True)
    covered, z, euler = np.array(covered), np.array(z), np.array(euler)
    print(f"{name} {first}: {len(covered)} series, bands {np.mean(bands):.3f}")
    print(f"  parameters {covered.mean(axis=0)}")
    print(
        f"  bias in standard errors {np.nanmedian(z, axis=0)}, Euler {np.nanmedian(euler, axis=0)}",
        flush=True,
    )


def linear(seed: str = "0") -> None:
    """Print the differences between estimates of a linear SDE with a hidden component, missing cells, an
    input and known errors, in standard errors. Particles are used for the same SDE with a term that is
    negligible but not linear. The maximum in NumPy is one Newton step from the estimates."""
    true, rng = np.array([2.0, 0.6, 0.5, 0.8, 0.3, 1.0]), np.random.default_rng(int(seed))
    times = np.cumsum(rng.uniform(0.1, 0.5, 200))
    u, errors = np.sin(times), rng.uniform(0.03, 0.1, (200, 2))

    def steps(p: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        fast, slow, level, gain, *noise = p
        rate, spread = np.array([[-fast, fast], [0, -slow]]), np.diag(np.square(noise))
        found = []
        for dt, now in zip(np.diff(times), u, strict=False):
            constant = np.array([[0], [slow * level + gain * now]])
            mean = linalg.expm(dt * np.block([[rate, constant], [np.zeros((1, 3))]]))
            pair = linalg.expm(dt * np.block([[rate, spread], [np.zeros((2, 2)), -rate.T]]))
            found.append((mean[:2, :2], mean[:2, 2], pair[:2, 2:] @ mean[:2, :2].T))
        return found

    x = [np.full(2, true[2])]
    for grow, shift, spread in steps(true):
        x.append(grow @ x[-1] + shift + np.linalg.cholesky(spread) @ rng.normal(size=2))
    y = np.where(rng.uniform(size=(200, 2)) < [0.15, 2], np.nan, x + errors * rng.normal(size=(200, 2)))

    def log_likelihood(p: np.ndarray) -> float:
        mean, wide, total = np.full(2, 0.5), np.eye(2), 0.0
        for i, step in enumerate([(np.eye(2), 0.0, 0.0), *steps(p)]):
            mean, wide = step[0] @ mean + step[1], step[0] @ wide @ step[0].T + step[2]
            if np.isfinite(y[i, 0]):
                variance, gap = wide[0, 0] + errors[i, 0] ** 2, y[i, 0] - mean[0]
                total -= 0.5 * (np.log(2 * np.pi * variance) + gap**2 / variance)
                mean, wide = mean + wide[0] * gap / variance, wide - np.outer(wide[0], wide[0]) / variance
        return total

    names = ("k", "l", "m", "n", "s", "t")
    options = {
        "measurement_noise": errors, "inputs": (times, u), "num_starts": 1,
        "initial": rf.MultivariateNormal(np.full(2, 0.5), np.eye(2)),
        "domains": {name: rf.series.Domain(lower=0.0) for name in "klst"},
    }  # fmt: skip
    for how, bend in (("Kalman filter", 0.0), ("particles", 1e-7)):
        drift = lambda t, x, p, u, bend=bend: jnp.stack(
            [p["k"] * (x[1] - x[0]) + bend * jnp.sin(x[0]), p["l"] * (p["m"] - x[1]) + p["n"] * u[0]]
        )
        noise = lambda t, x, p, u: jnp.diag(jnp.stack([p["s"], p["t"]]))
        sde = rf.ParametricSDE(drift, noise, dict(zip(names, true.tolist(), strict=True)))
        result = rf.fit_sde(sde, times, y, key=KEY, **options)
        at, scale = result.estimates, 1e-3 * np.sqrt(np.diag(result.covariance))
        unit = np.diag(scale)
        value = lambda *moves, at=at: log_likelihood(at + sum(moves))
        slope = np.array([value(a) - value(-a) for a in unit]) / 2
        bends = [[value(a, b) + value(-a, -b) - value(a, -b) - value(-a, b) for b in unit] for a in unit]
        away = 1e-3 * np.linalg.solve(np.array(bends) / 4, slope)
        print(f"{how}: {result.likelihood.described()}, warning: {result.warning}")
        print(f"  log-likelihood {result.log_likelihood - log_likelihood(at):+.2e}")
        print(
            f"  estimates, in standard errors: {', '.join(f'{one:.1e}' for one in np.abs(away))}", flush=True
        )


def speed(length: str) -> None:
    """Time the likelihood of stochastic volatility for a long series of prices."""
    sde, n = VOLATILITY, int(length)
    begin = Start(jnp.asarray([1.0, -3.0]), jnp.asarray([1e-9, 0.5]), False)
    one = Problem(sde, np.arange(n) / 252, begin, {"initial": "stationary"}, "hidden", substeps=5)
    y, _ = one.simulated(0)
    for steps in (1, None):
        made = time.perf_counter()
        ours: Any = rf.series_likelihood(sde, one.times, y, key=KEY, steps=steps, **one.options)
        made = time.perf_counter() - made
        value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(ours))
        jax.block_until_ready(value_and_grad(sde))
        at = time.perf_counter(), time.process_time()
        jax.block_until_ready(value_and_grad(sde))
        wall, cpu = time.perf_counter() - at[0], time.process_time() - at[1]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{n} values, steps={steps}: {ours.described()}")
        print(
            f"  built in {made:.0f} s, value and gradient {wall:.2f} s ({cpu:.2f} s CPU), {memory:.2f} GiB",
            flush=True,
        )


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    parts: dict[str, Callable] = {
        "likelihood": likelihood, "coverage": coverage, "linear": linear, "speed": speed
    }  # fmt: skip
    parts[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
