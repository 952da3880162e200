"""Maxima of a likelihood, and where a profile of it has fallen by some amount."""

from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

Total = Callable[[np.ndarray], tuple[float, np.ndarray]]

ROUNDS, ITERATIONS = 6, 40
NEAR = 0.02  # standard errors from the maximum, at which a search ends
GRADIENT = 1e-3
RIDGE, TINY = 1e-6, 1e-12  # the least eigenvalue in units of the diagonal, and the least of these
SINGULAR = 1e-7  # least eigenvalue, relative to the largest, of an information that is not singular
LOST = 1e-3  # nats, to which a profile follows the others' maximum
FURTHER = 10.0  # Wald's distance, how far an interval is looked for


def check_level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return level


def is_regular(information: np.ndarray) -> bool:
    """Whether a matrix is positive definite, and by more than rounding."""
    if not np.isfinite(information).all() or not (np.diag(information) > 0).all():
        return False
    scale = np.sqrt(np.diag(information))
    values = np.linalg.eigvalsh(information / np.outer(scale, scale))
    return bool(values[0] > SINGULAR * values[-1])


def climb(total: Total, start: np.ndarray, information: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The maximum near `start` of a function that comes with its gradient, by BFGS in rounds.

    Each begins with an information matrix of the place it is at, better than what BFGS has gathered on its
    way; weights of a network are not found without.
    """

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = total(free)
        return -value, -slope

    free = start
    for _ in range(ROUNDS):
        inverse, slope = _inverse(information(free)), total(free)[1]
        if slope @ inverse @ slope < NEAR**2:
            break
        options = {"gtol": GRADIENT, "maxiter": ITERATIONS, "hess_inv0": inverse}
        free = optimize.minimize(loss, free, jac=True, method="BFGS", options=options).x
    return free


def _inverse(information: np.ndarray) -> np.ndarray:
    """A positive definite one, of a matrix that may be singular or worse."""
    scale = np.sqrt(np.maximum(np.abs(np.diag(information)), TINY))
    values, vectors = np.linalg.eigh(information / np.outer(scale, scale))
    inverse = (vectors / np.maximum(np.abs(values), RIDGE)) @ vectors.T / np.outer(scale, scale)
    return 0.5 * (inverse + inverse.T)


def profile_interval(
    total: Total, free: np.ndarray, information: np.ndarray, place: int, level: float
) -> tuple[float, float]:
    """Where the log-likelihood, maximal in all other parameters, has fallen by half of χ²'s quantile: a
    confidence interval of a free parameter (Venzon & Moolgavkar 1988). Infinite on a side where it does not
    fall so far."""
    top = total(free)[0]
    others = np.arange(len(free)) != place
    inverse = np.linalg.inv(information)
    follow = inverse[others, place] / inverse[place, place]  # how the others move with it
    error = float(np.sqrt(inverse[place, place]))
    edge = float(np.sqrt(stats.chi2.ppf(level, 1)))
    inner = information[np.ix_(others, others)]

    def beyond(distance: float) -> float:
        """The signed root of twice the fall, less the edge's, at some distance in standard errors."""
        at = free.copy()
        at[place] += distance * error
        at[others] += distance * error * follow

        def rest(values: np.ndarray) -> tuple[float, np.ndarray]:
            point = at.copy()
            point[others] = values
            value, slope = total(point)
            return value, slope[others]

        best = rest(climb(rest, at[others], lambda _: inner))[0] if others.any() else total(at)[0]
        return float(np.sqrt(max(2 * (top - best), 0.0))) - edge

    ends = [_root(beyond, side * edge) for side in (-1.0, 1.0)]
    return free[place] + ends[0] * error, free[place] + ends[1] * error


def _root(beyond: Callable[[float], float], start: float) -> float:
    """The zero of a function that grows away from 0, near `start`."""
    inside, outside = 0.0, start
    while beyond(outside) < 0:
        inside, outside = outside, 1.5 * outside
        if abs(outside) > FURTHER * abs(start):
            return float(np.copysign(np.inf, start))
    return float(optimize.brentq(beyond, inside, outside, xtol=LOST))  # pyright: ignore[reportArgumentType]
