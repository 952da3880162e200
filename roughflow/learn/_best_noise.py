"""How much noise to add to a fitted flow."""

import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..density import StochasticFlow
from ._with_noise import with_noise

WORTHWHILE = 0.002  # nats that noise must gain
NOISES, ROWS = (0.25, 0.5, 1.0), 500  # sizes of noise to choose from, and the rows to choose by


def best_noise(flow: StochasticFlow, rows: Array, key: PRNGKeyArray) -> float:
    """The size of noise with the highest likelihood; what is not clearly better than none, or better by next
    to nothing, is not worth its paths."""
    rows = rows[:ROWS]
    plain = flow.log_prob(rows, key=key)
    best, gain = 0.0, WORTHWHILE
    for size in NOISES:
        gains = np.asarray(with_noise(flow, size).log_prob(rows, key=key) - plain)
        if gains.mean() > max(gain, 2 * gains.std() / len(gains) ** 0.5):
            best, gain = size, float(gains.mean())
    return best
