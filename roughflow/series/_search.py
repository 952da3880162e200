"""The maximum of a likelihood."""

from collections.abc import Callable

import numpy as np
import scipy

Total = Callable[[np.ndarray], tuple[float, np.ndarray]]

ROUNDS, ITERATIONS = 6, 40
NEAR = 0.02  # standard errors from the maximum, at which a search ends
GRADIENT = 1e-3
RIDGE, TINY = 1e-6, 1e-12  # the least eigenvalue in units of the diagonal, and the least of these
SINGULAR = 1e-7  # least eigenvalue, relative to the largest, of an information that is not singular


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
        free = scipy.optimize.minimize(loss, free, jac=True, method="BFGS", options=options).x
    return free


def _inverse(information: np.ndarray) -> np.ndarray:
    """A positive definite one, of a matrix that may be singular or worse."""
    scale = np.sqrt(np.maximum(np.abs(np.diag(information)), TINY))
    values, vectors = np.linalg.eigh(information / np.outer(scale, scale))
    inverse = (vectors / np.maximum(np.abs(values), RIDGE)) @ vectors.T / np.outer(scale, scale)
    return 0.5 * (inverse + inverse.T)
