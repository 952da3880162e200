"""The three workloads, as plain seeded NumPy arrays: every entry starts from the same numbers.

W0  a continuous normalizing flow: log-density of 1000 points, drift 2-64-64-64-2 (tanh), T = 1.
W1  a stochastic flow: the same drift and sigma = [[1, s1], [s2, 1]], (s1, s2) from 2-64-2 (tanh),
    Ito, Brownian motion by its Karhunen-Loeve expansion with n = 6, one path per point.
W2  the Stratonovich SDE dZ = drift dt + sigma o dB: 20 explicit midpoint steps with given
    increments; the loss is the mean of |Z_T|^2.

One training step is the loss, its gradient in all weights, and one Adagrad update.
For W0 and W1 the loss is the mean of -log p(x | path), solved backwards from t = 1 to t = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray

BATCH = 1000
TERMS = 6
STEPS = 20
DRIFT_SIZES = (2, 64, 64, 64, 2)
SIGMA_SIZES = (2, 64, 2)
# Small, so that the field (and the number of adaptive steps) hardly changes during the timing.
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Workload:
    name: str
    weights: list[Array]  # W (in, out) and b (out,) in turn: drift layers, then those of sigma
    x: Array  # (batch, 2): the data, or for W2 the initial values
    noise: Array  # W1: coefficients (batch, n, 2); W2: increments (steps, batch, 2); W0: unused
    probe: Array  # (batch, 2) of +-1, for Hutchinson's estimate of the divergence

    @property
    def is_density(self) -> bool:
        return self.name != "W2"


def make_workload(name: str, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    drift, sigma = network(rng, DRIFT_SIZES), network(rng, SIGMA_SIZES)
    x, probe = banana(rng), rng.choice([-1.0, 1.0], (BATCH, 2))
    coefficients = rng.standard_normal((BATCH, TERMS, 2))
    increments = rng.standard_normal((STEPS, BATCH, 2)) / np.sqrt(STEPS)
    weights, noise = {
        "W0": (drift, np.zeros((BATCH, 0, 2))),
        "W1": (drift + sigma, coefficients),
        "W2": (drift + sigma, increments),
    }[name]
    single = [w.astype(np.float32) for w in weights]
    return Workload(name, single, *(a.astype(np.float32) for a in (x, noise, probe)))


def network(rng: np.random.Generator, sizes: Sequence[int]) -> list[Array]:
    """Glorot weights with gain 1 and small biases.

    The field is about as stiff as a trained one: for solve and adjoint, dopri5 at 1e-5 needs 20 + 20
    evaluations on W0 (26 + 26 after training) and 62 + 98 on W1 (80 + 80).
    """
    weights = []
    for fan_in, fan_out in pairwise(sizes):
        scale = np.sqrt(2 / (fan_in + fan_out))
        weights.append(scale * rng.standard_normal((fan_in, fan_out)))
        weights.append(0.1 * rng.standard_normal(fan_out))
    return weights


def banana(rng: np.random.Generator) -> Array:
    x = rng.standard_normal(BATCH)
    return np.stack([x, -(x**2) + np.sqrt(2) * rng.standard_normal(BATCH)], axis=-1)


def split_layers(weights: Sequence[Any]) -> tuple[list[tuple], list[tuple]]:
    """The (W, b) pairs of the drift and of sigma (empty for W0), for arrays of any library."""
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    depth = len(DRIFT_SIZES) - 1
    return pairs[:depth], pairs[depth:]


def flatten(arrays: Sequence[Any]) -> Array:
    """One float64 vector from a gradient with the structure of `Workload.weights`."""
    return np.concatenate([np.asarray(a, dtype=np.float64).ravel() for a in arrays])
