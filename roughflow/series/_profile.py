"""Intervals by the profile likelihood: where it has fallen by some amount."""

from collections.abc import Callable

import numpy as np
import scipy

from ._search import LOSS, Total, climb, restricted

LOST = 1e-3  # nats, to which a profile follows the others' maximum
FURTHER = 15.0  # standard errors, how far an interval is looked for
ABOVE = 0.01  # nats, by which no point of a profile may lie above the maximum


def profile_interval(
    total: Total, free: np.ndarray, information: np.ndarray, falls: np.ndarray, place: int, level: float
) -> tuple[float, float]:
    """Where the log-likelihood, maximal in all other parameters, has fallen by half of χ²'s quantile: a
    confidence interval of a free parameter (Venzon & Moolgavkar 1988). Infinite on a side where it does not
    fall so far.

    `falls` `(2, p)` says by how much it falls at the ends of the parameters' domains. Parameters on a
    boundary stay there. For one of them twice the fall is χ² with probability ½, else zero (Chernoff 1954).
    """
    top, sides = total(free)[0], np.min(falls, axis=0) < LOSS
    others = (np.arange(len(free)) != place) & ~sides
    inner = information[np.ix_(others, others)]
    if sides[place]:
        follow, error = np.zeros(others.sum()), 1.0
        level = max(2 * level - 1, 0.0)
    else:
        inside = np.append(np.flatnonzero(others), place)
        inverse = np.linalg.inv(information[np.ix_(inside, inside)])
        follow = inverse[:-1, -1] / inverse[-1, -1]  # how the others move with it
        error = float(np.sqrt(inverse[-1, -1]))
    edge = float(np.sqrt(scipy.stats.chi2.ppf(level, 1)))

    def beyond(distance: float) -> float:
        """The signed root of twice the fall, less the edge's, at some distance in standard errors."""
        at = free.copy()
        at[place] += distance * error
        at[others] += distance * error * follow
        rest = restricted(total, at, others)
        best = rest(climb(rest, at[others], lambda _: inner))[0] if others.any() else total(at)[0]
        if best > top + ABOVE:
            raise ValueError(
                f"the fit is not at the maximum: the profile found a log-likelihood {best - top:.2g} nats "
                f"above it, {distance:.2g} standard errors away; fit again with more num_starts"
            )
        return float(np.sqrt(max(2 * (top - best), 0.0))) - edge

    ends = [-np.inf, np.inf]
    for i, side in enumerate((-1.0, 1.0)):
        if falls[i, place] > 0.5 * edge**2:
            ends[i] = free[place] + error * _root(beyond, side * max(edge, 1.0))
    return ends[0], ends[1]


def _root(beyond: Callable[[float], float], start: float) -> float:
    """The zero of a function that grows away from 0, near `start`."""
    inside, outside = 0.0, start
    while beyond(outside) < 0:
        inside, outside = outside, 1.5 * outside
        if abs(outside) > FURTHER * max(abs(start), 1.0):
            return float(np.copysign(np.inf, start))
    return float(scipy.optimize.brentq(beyond, inside, outside, xtol=LOST))  # pyright: ignore[reportArgumentType]
