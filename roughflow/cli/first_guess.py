"""Where a fit of a named SDE begins: Euler's scheme as a regression."""

from collections.abc import Callable

import numpy as np

import roughflow as rf

KINDS: dict[str, Callable[..., rf.AbstractNamedSDE]] = {
    "brownian": rf.BrownianMotion,
    "gbm": rf.GeometricBrownianMotion,
    "vasicek": rf.OrnsteinUhlenbeck,
    "cir": rf.CoxIngersollRoss,
    "ckls": rf.CKLS,
    "cev": rf.ConstantElasticity,
    "jacobi": rf.Jacobi,
    "double-well": rf.DoubleWell,
}
SLOWEST, FASTEST = 0.1, 3.0  # rates of return, over the whole series and over one step
MOST = 1.5  # elasticity


def first_guess(name: str, times: np.ndarray, values: np.ndarray) -> rf.AbstractNamedSDE:
    """The named SDE with parameters from the moments of the series' increments, to start a search from."""
    x, dx, dt = values[:-1], np.diff(values), np.diff(times)
    drift, parameters = _drift(name, x, dx, dt)
    size = np.abs(dx - drift * dt) / np.sqrt(dt)  # of the noise
    if name in ("ckls", "cev"):
        # The slope of its logarithm; increments of nothing at all would have none.
        log_size = np.log(np.maximum(size, 1e-3 * size.mean()))
        gamma = float(np.clip(np.polyfit(np.log(x), log_size, 1)[0], 0.0, MOST))
        return KINDS[name](*parameters, _root_mean_square(size / x**gamma), gamma)
    shapes = {"gbm": lambda: x, "cir": lambda: np.sqrt(x), "jacobi": lambda: np.sqrt(x * (1 - x))}
    shape = shapes[name]() if name in shapes else 1.0
    return KINDS[name](*parameters, _root_mean_square(size / shape))


def _drift(name: str, x: np.ndarray, dx: np.ndarray, dt: np.ndarray) -> tuple[np.ndarray, tuple]:
    """The drift at x, and its parameters."""
    if name == "brownian":
        mu = dx.sum() / dt.sum()
        return np.full_like(x, mu), (mu,)
    if name in ("gbm", "cev"):
        mu = np.sum(dx / x) / dt.sum()
        return mu * x, (mu,)
    if name == "double-well":
        a, b = _regression(dx, dt, x, -(x**3))
        b = max(b, SLOWEST / (np.mean(x**2) * dt.sum()))
        return a * x - b * x**3, (a, b)
    constant, slope = _regression(dx, dt, np.ones_like(x), x)
    kappa = np.clip(-slope, SLOWEST / dt.sum(), FASTEST / np.median(dt))
    mu = np.clip(constant / kappa, *np.quantile(x, [0.05, 0.95]))
    return kappa * (mu - x), (kappa, mu)


def _regression(dx: np.ndarray, dt: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    """The coefficients of a drift, each increment weighted by its span."""
    root = np.sqrt(dt)
    return np.linalg.lstsq(np.stack(terms, axis=1) * root[:, None], dx / root)[0]


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
