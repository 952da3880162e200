"""Starting values of a search: the Euler scheme of an SDE as a regression."""

from typing import Any

import numpy as np

from .._observed import panel

SLOWEST, FASTEST = 0.1, 3.0  # rates of mean reversion, over the whole series and over one step
MAX_ELASTICITY = 1.5


class Increments:
    """Values `x` `(N, d)`, the increments `dx` that follow them, and their spans `dt` `(N,)`."""

    def __init__(self, times: Any, values: Any):
        series = panel(times, values)
        self.x = np.concatenate([one.values[:-1] for one in series])
        self.dx = np.concatenate([np.diff(one.values, axis=0) for one in series])
        self.dt = np.concatenate([np.diff(one.times) for one in series])

    def column(self, i: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The values, increments and spans of one component, `(N,)` each."""
        return self.x[:, i], self.dx[:, i], self.dt

    def positive(self, i: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same for a positive component. A value that measurement noise has made negative counts as a
        hundredth of the median."""
        x, dx, dt = self.column(i)
        return np.maximum(x, 0.01 * np.median(np.abs(x))), dx, dt

    def residual_sizes(self, dx: np.ndarray, drift: np.ndarray) -> np.ndarray:
        """|dx − drift dt| / √dt: the size of the noise in each increment."""
        return np.abs(dx - drift * self.dt) / np.sqrt(self.dt)


def regression(dx: np.ndarray, dt: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    """The coefficients of a drift that is a sum of `terms`, each increment weighted by its span; for
    increments `(N, d)` a column of coefficients for each component."""
    root = np.sqrt(dt)
    return np.linalg.lstsq(np.stack(terms, axis=1) * root[:, None], (dx.T / root).T)[0]


def mean_reversion(x: np.ndarray, dx: np.ndarray, dt: np.ndarray) -> tuple[float, float]:
    """κ and μ of a drift κ(μ − x)."""
    constant, slope = regression(dx, dt, np.ones_like(x), x)
    kappa = float(np.clip(-slope, SLOWEST / dt.sum(), FASTEST / np.median(dt)))
    return kappa, float(np.clip(constant / kappa, *np.quantile(x, [0.05, 0.95])))


def elasticity(x: np.ndarray, size: np.ndarray) -> float:
    """γ of noise of a size in proportion to x^γ: the slope of its logarithm."""
    log_size = np.log(np.maximum(size, 1e-3 * size.mean()))
    return float(np.clip(np.polyfit(np.log(x), log_size, 1)[0], 0.0, MAX_ELASTICITY))


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
