"""Fits of four simulated series for `benchmarks.series`, compared with exact fits or the truth."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np
from scipy.linalg import expm

import roughflow as rf
from benchmarks.timing import format_table, verdict

SAME = 0.05  # nats, maximum difference between log-likelihoods
BARS = 3.0  # maximum distance from the truth, in standard errors
ALIKE = 0.05  # maximum difference between changes of estimates, in standard errors


def fits() -> Iterator[str]:
    """Yield tables, each with its verdicts."""
    yield from plane()
    yield ""
    yield from heston()
    yield ""
    yield from irregular()
    yield ""
    yield from with_errors()


def plane() -> Iterator[str]:
    """Two components with correlated noise."""
    true = rf.OrnsteinUhlenbeck([[1.5, 0.5], [-0.3, 1.0]], [0.2, -0.1], [[0.4, 0.0], [0.2, 0.3]])
    start = rf.OrnsteinUhlenbeck([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [[0.3, 0.0], [0.0, 0.3]])
    times = np.arange(501) / 12
    x = linear_series(true, times, seed=0)
    ours, exact = (fit(start, times, x, exact=exact) for exact in (False, True))
    yield "2-D OU with correlated noise, 500 transitions, dt = 1/12"
    yield beside(dict(zip(ours.names, ours.likelihood.parameters.values(true), strict=True)), ours, exact)
    there = exact.likelihood.value(ours.free)
    gap = abs(ours.log_likelihood - there)
    shown = f"{ours.log_likelihood:.5f} and {there:.5f}, the exact maximum {exact.log_likelihood:.5f}"
    yield verdict(gap <= SAME, f"log-likelihoods at the estimates within {SAME:g} nats", shown)
    far = abs(ours.params["sigma[1,0]"] - 0.2) / ours.standard_errors["sigma[1,0]"]
    claim = f"sigma[1,0] within {BARS:g} standard errors of the truth"
    yield verdict(far <= BARS, claim, f"{ours.params['sigma[1,0]']:.4f}, {far:.1f}")


def heston() -> Iterator[str]:
    """Heston's model with observed price and variance, 1000 weeks."""
    values = {"mu": 0.05, "kappa": 3.0, "theta": 0.1, "sigma": 0.25, "rho": -0.7}
    times = np.arange(1000) / 52
    x = heston_series(times, seed=0, **values)
    ours = fit(rf.Heston(mu=0.0, kappa=2.0, theta=0.15, sigma=0.4, rho=-0.3), times, x, exact=False)
    yield "Heston, 1000 values of price and variance, dt = 1/52"
    yield beside(values, ours)
    far = {n: abs(ours.params[n] - value) / ours.standard_errors[n] for n, value in values.items()}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in far.items())
    good = all(value <= BARS for value in far.values())
    yield verdict(good, f"within {BARS:g} standard errors of the truth", shown)


def irregular() -> Iterator[str]:
    """A finely sampled series, and the same series with half of its values deleted."""
    true, start = rf.OrnsteinUhlenbeck(2.0, 0.5, 0.3), rf.OrnsteinUhlenbeck(1.0, 0.3, 0.5)
    times = np.arange(1001) / 50
    x = linear_series(true, times, seed=0)
    kept = np.sort(np.random.default_rng(0).permutation(np.arange(1, 1001))[:500])
    kept = np.concatenate([[0], kept])
    changes = {}
    rows = []
    for exact in (False, True):
        whole, half = fit(start, times, x, exact=exact), fit(start, times[kept], x[kept], exact=exact)
        changes[exact] = half.estimates - whole.estimates
        bars = np.array(list(half.standard_errors.values()))
        for i, name in enumerate(half.names):
            found = (whole.estimates[i], half.estimates[i], changes[exact][i])
            label = f"{name} {'exact' if exact else 'roughflow'}"
            rows.append([label, *(f"{value:.5f}" for value in found), f"{bars[i]:.5f}"])
    yield "OU, 1001 values, dt = 1/50, and the same series with half of them deleted at random"
    yield format_table(["parameter, method", "all", "half", "change", "std. error of half"], sorted(rows))
    apart = float(np.max(np.abs(changes[False] - changes[True]) / bars))
    claim = f"estimates change like exact ones, within {ALIKE:g} standard errors"
    yield verdict(apart <= ALIKE, claim, f"{apart:.2g}")


def with_errors() -> Iterator[str]:
    """An Ornstein–Uhlenbeck process with measurement errors, compared with the Kalman filter."""
    true, noise = rf.OrnsteinUhlenbeck(2.0, 0.5, 0.3), 0.02
    times = np.arange(501) / 12
    y = linear_series(true, times, seed=1)[:, 0] + noise * np.random.default_rng(2).standard_normal(501)
    options = {"measurement_noise": 0.05, "key": jax.random.key(0), "num_starts": 1}
    ours = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 0.3, 0.5), times, y, exact=False, **options)
    yield "OU with measurement errors, 500 transitions, dt = 1/12"
    yield beside(dict(kappa=2.0, mu=0.5, sigma=0.3, measurement_noise=noise), ours)
    known = kalman(*(ours.params[name] for name in ours.names), times[1], y)
    shown = f"{ours.log_likelihood:.5f} and {known:.5f}"
    good = abs(ours.log_likelihood - known) <= SAME
    yield verdict(good, f"log-likelihood within {SAME:g} nats of the Kalman filter", shown)


def kalman(kappa: float, mu: float, sigma: float, noise: float, dt: float, y: np.ndarray) -> float:
    """The log-likelihood of a series with measurement errors, given only its first value (a flat prior for
    the state)."""
    decay, total = np.exp(-kappa * dt), 0.0
    mean, variance = y[0], noise**2
    for value in y[1:]:
        mean = mu + decay * (mean - mu)
        variance = decay**2 * variance + sigma**2 * (1 - decay**2) / (2 * kappa)
        spread = variance + noise**2
        total -= 0.5 * ((value - mean) ** 2 / spread + np.log(2 * np.pi * spread))
        gain = variance / spread
        mean, variance = mean + gain * (value - mean), (1 - gain) * variance
    return float(total)


def fit(sde: rf.series.AbstractNamedSDE, times: np.ndarray, x: np.ndarray, *, exact: bool) -> rf.FittedSDE:
    return rf.fit_sde(sde, times, x, key=jax.random.key(0), num_starts=1, exact=exact)


def beside(true: Mapping[str, float], ours: rf.FittedSDE, exact: rf.FittedSDE | None = None) -> str:
    """A table of truth, estimates and standard errors."""
    rows = []
    for name, error in ours.standard_errors.items():
        row = [name, f"{true[name]:.4f}", f"{ours.params[name]:.4f}", f"{error:.4f}"]
        if exact:
            row += [f"{exact.params[name]:.4f}", f"{exact.standard_errors[name]:.4f}"]
        rows.append(row)
    header = ["parameter", "truth", "roughflow", "std. error", "exact", "std. error"]
    return format_table(header[: len(rows[0])], rows)


def linear_series(sde: rf.OrnsteinUhlenbeck, times: np.ndarray, seed: int) -> np.ndarray:
    """An exact series at evenly spaced times that starts at the mean."""
    rng = np.random.default_rng(seed)
    mu = np.atleast_1d(np.asarray(sde.mu))
    kappa, sigma = (np.reshape(np.asarray(part), (mu.size, mu.size)) for part in (sde.kappa, sde.sigma))
    dt = times[1] - times[0]
    zero = np.zeros_like(kappa)
    power = expm(np.block([[kappa, sigma @ sigma.T], [zero, -kappa.T]]) * dt)
    decay = power[mu.size :, mu.size :].T
    root = np.linalg.cholesky(decay @ power[: mu.size, mu.size :])
    x = [mu]
    for _ in times[1:]:
        x.append(mu + decay @ (x[-1] - mu) + root @ rng.standard_normal(mu.size))
    return np.array(x)


def heston_series(
    times: np.ndarray, seed: int, mu: float, kappa: float, theta: float, sigma: float, rho: float
) -> np.ndarray:
    """A series by Euler's method in the logarithm of the price, with 200 small steps between values."""
    rng = np.random.default_rng(seed)
    h = (times[1] - times[0]) / 200
    log_price, variance, x = 0.0, theta, [[1.0, theta]]
    for _ in times[1:]:
        for one, other in np.sqrt(h) * rng.standard_normal((200, 2)):
            root = np.sqrt(variance)
            log_price += (mu - 0.5 * variance) * h + root * one
            noise = rho * one + np.sqrt(1 - rho**2) * other
            variance = max(variance + kappa * (theta - variance) * h + sigma * root * noise, 1e-8)
        x.append([np.exp(log_price), variance])
    return np.array(x)
