"""Maximisation of a likelihood, profile-likelihood intervals and likelihood-ratio tests."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from .._checks import check_number
from ..transition import Transition

Total = Callable[[np.ndarray], tuple[float, np.ndarray]]
Information = Callable[[np.ndarray], np.ndarray]

ROUNDS, ITERATIONS = 6, 40  # rounds of BFGS, and iterations per round
BFGS_TOLERANCE = 0.02  # BFGS stops within this many standard errors of the maximum
GRADIENT_TOLERANCE = 1e-2  # a round of BFGS stops when the gradient, per standard error, is smaller
# BFGS stops if a round, or more than PATIENCE consecutive evaluations, gain less than MIN_GAIN nats.
MIN_GAIN, PATIENCE = 1e-4, 6
RIDGE = 1e-6  # searches raise smaller eigenvalues of a scaled information matrix to this value
MAX_BFGS_MOVE = 30.0  # maximum change of free parameters in one round of BFGS
MAX_STANDARD_ERROR = 3.0  # searches replace larger standard errors of free parameters by this value
SINGULAR = 1e-7  # relative eigenvalue below which an information matrix is singular
SHARE = 0.1  # a parameter occurs in a direction if its component of the unit vector is larger
NEWTON_STEPS = 20  # maximum number of Newton steps
DECREMENT = 1e-14  # Newton's method stops if a step would gain fewer nats
REFRESH_DISTANCE = 0.05  # in standard errors; after a longer step Newton's method recomputes the information
SAME_POINT = 1e-7  # in standard errors; a point this close to the maximum has the same information
UNCERTAIN_ERROR = 0.25  # a free parameter with a larger standard error may lie on a boundary
BOUNDARY_MOVE = 10.0  # distance by which a free parameter is moved to its boundary
INTERIOR_DROP = 5.0  # nats; if the drop is larger, the maximum is not near the boundary
MAX_DROP = 1000.0  # nats; if the drop is larger, no change of the other parameters makes up for it
LOSS = 1e-3  # nats; if the drop is smaller, the maximum is on the boundary


def check_level(level: float) -> float:
    check_number("level", level, above=0, below=1)
    return level


def is_regular(information: np.ndarray) -> bool:
    """Whether a matrix, scaled to unit diagonal, is positive definite beyond rounding errors."""
    if not np.isfinite(information).all() or not (np.diag(information) > 0).all():
        return False
    scale = np.sqrt(np.diag(information))
    values = np.linalg.eigvalsh(information / np.outer(scale, scale))
    return bool(values[0] > SINGULAR * values[-1])


def undetermined(information: np.ndarray) -> np.ndarray:
    """Mask of the parameters that occur in directions in which an information matrix is singular up to
    rounding errors."""
    curve = np.diag(information)
    flat = ~np.isfinite(information).any(axis=1) | ~(curve > 0)
    if flat.any() or not np.isfinite(information).all():
        return flat
    scale = np.sqrt(curve)
    values, vectors = np.linalg.eigh(information / np.outer(scale, scale))
    directions = vectors[:, values <= SINGULAR * values[-1]]
    return np.any(np.abs(directions) > SHARE, axis=1)


def conditional_errors(information: np.ndarray) -> np.ndarray:
    """The standard error of each parameter if all others were known, at most `MAX_STANDARD_ERROR`."""
    curve = np.diag(information)
    least = MAX_STANDARD_ERROR**-2
    return 1 / np.sqrt(np.where(np.isfinite(curve), np.maximum(np.abs(curve), least), least))


def climb(
    total: Total,
    start: np.ndarray,
    information: Information,
    rounds: int = ROUNDS,
    iterations: int = ITERATIONS,
) -> np.ndarray:
    """Maximise a function with gradients from `start`, by rounds of BFGS.

    Each round uses coordinates in which the information at its start is the identity. The information is more
    accurate than the Hessian that BFGS accumulates, and makes the search independent of units.
    """
    total = remembered(total)
    free, before = start, -np.inf
    for _ in range(rounds):
        value, slope = total(free)
        if value - before < MIN_GAIN:
            break
        root = _inverse_root(information(free))
        if np.linalg.norm(slope @ root) < BFGS_TOLERANCE:
            break
        free, before = free + root @ _bfgs(total, free, root, iterations), value
    return free


def remembered(function: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    """Cache a function, so that it is evaluated only once at each point."""
    known: dict[bytes, Any] = {}

    def at(free: np.ndarray) -> Any:
        place = np.asarray(free, float).tobytes()
        if place not in known:
            known[place] = function(free)
        return known[place]

    return at


class _StalledError(Exception):
    """The search makes no progress, because of rounding errors or other errors of the function."""


def _bfgs(total: Total, free: np.ndarray, root: np.ndarray, iterations: int) -> np.ndarray:
    best, move_at_best, stale = -np.inf, np.zeros(len(free)), 0

    def loss(move: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best, move_at_best, stale
        step = root @ move
        if np.abs(step).max() > MAX_BFGS_MOVE:
            return np.inf, np.zeros(len(move))
        value, slope = total(free + step)
        stale = 0 if value > best + MIN_GAIN else stale + 1
        if value > best:
            best, move_at_best = value, move.copy()
        if stale > PATIENCE:
            raise _StalledError
        return -value, -slope @ root

    options = {"gtol": GRADIENT_TOLERANCE, "maxiter": iterations}
    with contextlib.suppress(_StalledError):
        scipy.optimize.minimize(loss, np.zeros(len(free)), jac=True, method="BFGS", options=options)
    return move_at_best


def _inverse_root(information: np.ndarray) -> np.ndarray:
    """A matrix R such that RRᵀ is positive definite and close to the inverse of the information, which may be
    indefinite."""
    scale = conditional_errors(information)
    values, vectors = np.linalg.eigh(np.nan_to_num(information) * np.outer(scale, scale))
    return scale[:, None] * vectors / np.sqrt(np.maximum(np.abs(values), RIDGE))


def polish(
    total: Total, free: np.ndarray, information: Information, interior: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method from a point near the maximum, over the parameters in the mask `interior`. Return the
    maximum and the information there."""
    value, slope = total(free)
    matrix, moved, last = information(free), 0.0, np.inf
    for _ in range(NEWTON_STEPS):
        inner = matrix[np.ix_(interior, interior)]
        if not is_regular(inner):
            break
        step = np.zeros(len(free))
        step[interior] = np.linalg.solve(inner, slope[interior])
        gain = 0.5 * slope @ step
        # The maximum is reached, up to errors of the gradient.
        if gain < DECREMENT or gain > 0.5 * last:
            break
        new, new_slope = total(free + step)
        if not new > value - 1e-3:
            break
        if moved + np.sqrt(2 * gain) > REFRESH_DISTANCE:
            matrix, moved, last = information(free + step), 0.0, np.inf
        else:
            moved, last = moved + np.sqrt(2 * gain), gain
        free, value, slope = free + step, new, new_slope
    return free, information(free) if moved > SAME_POINT else matrix


def restricted(total: Total, at: np.ndarray, mask: np.ndarray) -> Total:
    """A function of the parameters in a mask, with all others fixed at their values in `at`."""

    def rest(values: np.ndarray) -> tuple[float, np.ndarray]:
        point = at.copy()
        point[mask] = values
        value, slope = total(point)
        return value, slope[mask]

    return rest


def falls_at_boundary(
    total: Total, free: np.ndarray, information: np.ndarray, sides: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The drop in log-likelihood `(2, p)`, in nats, if a parameter is moved to the lower or upper end of its
    domain and the likelihood is maximised over all others. Also return the point at which every parameter
    with a negligible drop lies on its boundary. `sides` marks the finite ends.

    A free parameter is infinite on its boundary and has a large standard error near it, so only uncertain
    parameters are tried.
    """
    falls = np.full((2, len(free)), np.inf)
    uncertain = conditional_errors(information) > UNCERTAIN_ERROR
    for end, i in zip(*np.nonzero(sides & uncertain), strict=True):
        moved = free.copy()
        moved[i] += (-BOUNDARY_MOVE, BOUNDARY_MOVE)[end]
        top, others = total(free)[0], np.arange(len(free)) != i
        value, slope = total(moved)
        if not top - value < MAX_DROP:
            continue
        inner = information[np.ix_(others, others)]
        root = _inverse_root(inner)
        falls[end, i] = top - value - 0.5 * np.sum((slope[others] @ root) ** 2)  # after one Newton step
        if not falls[end, i] < INTERIOR_DROP:
            continue
        rest = restricted(total, moved, others)
        moved[others] = climb(rest, moved[others], lambda _, inner=inner: inner)
        falls[end, i] = top - total(moved)[0]
        if falls[end, i] < LOSS:
            free = moved
    return falls, free


PROFILE_TOLERANCE = 1e-3  # nats; accuracy of the maximum over the other parameters in a profile
MAX_INTERVAL_DISTANCE = 15.0  # maximum distance of an interval's end, in standard errors
MAX_PROFILE_EXCESS = 0.01  # nats; a profile may exceed the maximum by at most this much


class HigherError(Exception):
    """A profile has found the point `free`, where the likelihood is higher than at the fit."""

    def __init__(self, free: np.ndarray):
        self.free = free


def profile_interval(
    total: Total, free: np.ndarray, information: np.ndarray, falls: np.ndarray, place: int, level: float
) -> tuple[float, float]:
    """Profile-likelihood interval of a free parameter: the points at which the log-likelihood, maximised over
    all other parameters, has dropped by half the χ² quantile (Venzon & Moolgavkar 1988). An end is infinite
    if the drop is too small on that side.

    `falls` `(2, p)` are the drops at the ends of the domains. Parameters on a boundary stay there. For a
    parameter on its boundary, twice the drop is χ² with probability ½, else zero (Chernoff 1954).
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
        follow = inverse[:-1, -1] / inverse[-1, -1]  # change of the others per unit of this parameter
        error = float(np.sqrt(inverse[-1, -1]))
    edge = float(np.sqrt(scipy.stats.chi2.ppf(level, 1)))

    def beyond(distance: float) -> float:
        """The signed root of twice the drop, minus its critical value, at a distance in standard errors."""
        at = free.copy()
        at[place] += distance * error
        at[others] += distance * error * follow
        if others.any():
            at[others] = climb(restricted(total, at, others), at[others], lambda _: inner)
        best = total(at)[0]
        if best > top + MAX_PROFILE_EXCESS:
            raise HigherError(at)
        return float(np.sqrt(max(2 * (top - best), 0.0))) - edge

    ends = [-np.inf, np.inf]
    for i, side in enumerate((-1.0, 1.0)):
        if falls[i, place] > 0.5 * edge**2:
            ends[i] = free[place] + error * _root(beyond, side * max(edge, 1.0))
    return ends[0], ends[1]


def _root(beyond: Callable[[float], float], start: float) -> float:
    """The zero near `start` of a function that increases with the distance from 0."""
    inside, outside = 0.0, start
    while beyond(outside) < 0:
        inside, outside = outside, 1.5 * outside
        if abs(outside) > MAX_INTERVAL_DISTANCE * max(abs(start), 1.0):
            return float(np.copysign(np.inf, start))
    return float(scipy.optimize.brentq(beyond, inside, outside, xtol=PROFILE_TOLERANCE))  # pyright: ignore[reportArgumentType]


SIMULATIONS = 2000  # number of simulated test statistics


def boundary_p_value(statistic: float, more: int, on_boundary: int) -> float:
    """P(LR > statistic) for `more` additional parameters, some of which lie on the boundary of their domain
    under the null hypothesis.

    The estimate of each parameter on the boundary lies there with probability ½, so LR has a mixture of χ²
    distributions with binomial weights (Self & Liang 1987, case 9). This is exact if their estimates are
    uncorrelated.
    """
    tails = [_tail(statistic, more - on_boundary + k) for k in range(on_boundary + 1)]
    weights = [math.comb(on_boundary, k) / 2**on_boundary for k in range(on_boundary + 1)]
    return float(np.dot(weights, tails))


def _tail(statistic: float, degrees: int) -> float:
    """Survival function of a χ² distribution; with zero degrees of freedom the variable is zero."""
    return float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else float(statistic <= 0)


def unit_root_p_value(statistic: float, steps: Transition, mu: float, sigma: float) -> float:
    """P(LR > statistic) for an Ornstein–Uhlenbeck process against Brownian motion with drift μ and noise σ,
    by simulation.

    Without mean reversion, the regression of increments on values has the Dickey–Fuller (1979) distribution
    instead of χ². The statistic is n log(S₀/S₁), where S₀ and S₁ are the residual sums of squares when
    simulated increments are regressed on dt alone and on dt and x dt, with all variables divided by √dt.
    """
    dt = np.asarray(steps.dt)
    starts = np.flatnonzero(np.append(True, np.asarray(steps.start[1:] != steps.end[:-1]).any(axis=1)))
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(SIMULATIONS, len(dt)))
    moves = mu * dt + sigma * np.sqrt(dt) * noise
    before = np.cumsum(moves, axis=1) - moves
    before -= np.repeat(before[:, starts], np.diff(np.append(starts, len(dt))), axis=1)  # start at 0
    root = np.sqrt(dt)
    y = moves / root
    y = y - np.outer(y @ root, root) / (root @ root)
    x = before * root
    x = x - np.outer(x @ root, root) / (root @ root)
    explained = np.sum(x * y, axis=1) ** 2 / (np.sum(x**2, axis=1) * np.sum(y**2, axis=1))
    simulated = -len(dt) * np.log1p(-explained)
    return float((1 + np.sum(simulated >= statistic)) / (1 + SIMULATIONS))
