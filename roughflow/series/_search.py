"""The maximum of a likelihood, found in the same way whatever the units of its parameters."""

from collections.abc import Callable

import numpy as np
import scipy

from .._checks import check_number

Total = Callable[[np.ndarray], tuple[float, np.ndarray]]
Information = Callable[[np.ndarray], np.ndarray]

ROUNDS, ITERATIONS = 6, 40  # of BFGS
NEAR = 0.02  # standard errors from the maximum, at which BFGS ends
GRADIENT = 1e-2  # per standard error, at which a round of BFGS ends
RIDGE = 1e-6  # least eigenvalue of an information, in units of its diagonal, that a search uses
FARTHEST = 30.0  # free parameters, that one round of BFGS may move by
FLAT = 3.0  # largest standard error of a free parameter that a search uses
SINGULAR = 1e-7  # least eigenvalue, relative to the largest, of an information that is not singular
NEWTON_STEPS = 20
DECREMENT = 1e-14  # nats left to gain, at which Newton's method ends
MOVED = 0.05  # standard errors, beyond which Newton's method needs another information
SAME_POINT = 1e-7  # standard errors, within which it is that of the maximum
UNCERTAIN = 0.25  # standard error of a free parameter that may be on its boundary
TOWARDS = 10.0  # how far a free parameter is moved to be on its boundary
FAR_BELOW = 5.0  # nats, at which the maximum is not on a boundary nor near one
LOSS = 1e-3  # nats that the likelihood may fall by there, if that is where the maximum is


def check_level(level: float) -> float:
    check_number("level", level, above=0, below=1)
    return level


def is_regular(information: np.ndarray) -> bool:
    """Whether a matrix is positive definite, and by more than rounding, in units of its diagonal."""
    if not np.isfinite(information).all() or not (np.diag(information) > 0).all():
        return False
    scale = np.sqrt(np.diag(information))
    values = np.linalg.eigvalsh(information / np.outer(scale, scale))
    return bool(values[0] > SINGULAR * values[-1])


def conditional_errors(information: np.ndarray) -> np.ndarray:
    """The standard error of each parameter if all others were known; `FLAT` at most."""
    curve = np.diag(information)
    return 1 / np.sqrt(np.where(np.isfinite(curve), np.maximum(np.abs(curve), FLAT**-2), FLAT**-2))


def climb(total: Total, start: np.ndarray, information: Information) -> np.ndarray:
    """The maximum near `start` of a function that comes with its gradient, by BFGS in rounds.

    Each round works in the coordinates in which the information where it begins is the identity: better than
    what BFGS has gathered on its way, and the same in all units.
    """
    free = start
    for _ in range(ROUNDS):
        root = _inverse_root(information(free))
        if np.linalg.norm(total(free)[1] @ root) < NEAR:
            break
        free = free + root @ _bfgs(total, free, root)
    return free


def _bfgs(total: Total, free: np.ndarray, root: np.ndarray) -> np.ndarray:
    def loss(move: np.ndarray) -> tuple[float, np.ndarray]:
        step = root @ move
        if np.abs(step).max() > FARTHEST:
            return np.inf, np.zeros(len(move))
        value, slope = total(free + step)
        return -value, -slope @ root

    options = {"gtol": GRADIENT, "maxiter": ITERATIONS}
    return scipy.optimize.minimize(loss, np.zeros(len(free)), jac=True, method="BFGS", options=options).x


def _inverse_root(information: np.ndarray) -> np.ndarray:
    """R with RRᵀ positive definite and close to the inverse of a matrix that may be singular or worse."""
    scale = conditional_errors(information)
    values, vectors = np.linalg.eigh(np.nan_to_num(information) * np.outer(scale, scale))
    return scale[:, None] * vectors / np.sqrt(np.maximum(np.abs(values), RIDGE))


def polish(
    total: Total, free: np.ndarray, information: Information, interior: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method from near the maximum, in the parameters of the mask `interior`; the maximum, and the
    information there."""
    value, slope = total(free)
    matrix, moved, last = information(free), 0.0, np.inf
    for _ in range(NEWTON_STEPS):
        inner = matrix[np.ix_(interior, interior)]
        if not is_regular(inner):
            break
        step = np.zeros(len(free))
        step[interior] = np.linalg.solve(inner, slope[interior])
        gain = 0.5 * slope @ step
        if gain < DECREMENT or gain > 0.5 * last:  # there, or as near as the gradient is known
            break
        new, new_slope = total(free + step)
        if not new > value - 1e-3:
            break
        free, value, slope = free + step, new, new_slope
        moved, last = moved + np.sqrt(2 * gain), gain
        if moved > MOVED:
            matrix, moved, last = information(free), 0.0, np.inf
    return free, information(free) if moved > SAME_POINT else matrix


def restricted(total: Total, at: np.ndarray, mask: np.ndarray) -> Total:
    """A function of the parameters in a mask, with all others as they are in `at`."""

    def rest(values: np.ndarray) -> tuple[float, np.ndarray]:
        point = at.copy()
        point[mask] = values
        value, slope = total(point)
        return value, slope[mask]

    return rest


def falls_at_boundary(
    total: Total, free: np.ndarray, information: np.ndarray, sides: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By how many nats the likelihood falls if a parameter is put on a boundary of its domain and all others
    are maximised again, `(2, p)` for the lower and the upper end, `sides` saying which domains have one; and
    the point with those parameters there that lose nothing by it.

    A free parameter is infinite on its boundary, and uncertain near it: only those are tried.
    """
    falls = np.full((2, len(free)), np.inf)
    uncertain = conditional_errors(information) > UNCERTAIN
    for end, i in zip(*np.nonzero(sides & uncertain), strict=True):
        moved = free.copy()
        moved[i] += (-TOWARDS, TOWARDS)[end]
        top, others = total(free)[0], np.arange(len(free)) != i
        value, slope = total(moved)
        inner = information[np.ix_(others, others)]
        root = _inverse_root(inner)
        falls[end, i] = top - value - 0.5 * np.sum((slope[others] @ root) ** 2)  # after a step of Newton's
        if not falls[end, i] < FAR_BELOW:
            continue
        rest = restricted(total, moved, others)
        moved[others] = climb(rest, moved[others], lambda _, inner=inner: inner)
        falls[end, i] = top - total(moved)[0]
        if falls[end, i] < LOSS:
            free = moved
    return falls, free
