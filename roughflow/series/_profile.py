"""Intervals by the profile likelihood: where it has fallen by some amount."""

from collections.abc import Callable

import numpy as np
import scipy

from ._search import Total, climb

LOST = 1e-3  # nats, to which a profile follows the others' maximum
FURTHER = 10.0  # Wald's distance, how far an interval is looked for


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
    edge = float(np.sqrt(scipy.stats.chi2.ppf(level, 1)))
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
    return float(scipy.optimize.brentq(beyond, inside, outside, xtol=LOST))  # pyright: ignore[reportArgumentType]
