"""The steps a fit solves with: as many as its model needs, looked at again as it changes."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._keys import split
from ..density import StochasticFlow
from ..flow import LEAST, FixedGrid, suited_steps, with_steps
from ._batches import Batches
from ._objective import AbstractStatefulObjective
from ._parquet import rng_of
from ._rows import Data, draw

ROWS = 256  # looked at
LONG = 200  # steps of training: a shorter fit does not pay for a look, which must be compiled
# Nats by which solving may move log p. On a grid too coarse for it a model learns to feed on the errors: a
# banana was "fitted" 0.6 nats below its entropy.
TOLERANCE = 1e-3
MORE = 1.25  # times as many, at least, where they no longer suffice: each number is a program of its own


@dataclass(frozen=True)
class GridLook:
    """How many steps a model needs to be solved, seen at some rows of the data, or at its own samples, along
    the same paths as it changes."""

    x: Array | None
    key: PRNGKeyArray

    @staticmethod
    def of(
        model: Any, objective: AbstractStatefulObjective, data: Data, steps: int, key: PRNGKeyArray
    ) -> "GridLook | None":
        """For so many steps of training, if the objective solves a model that leaves its grid open."""
        if steps < LONG or not (objective.solves and _is_open(model)):
            return None
        key_rows, key = split(key)
        drawn = isinstance(data, Batches)
        x = data.batch(ROWS, rng_of(key_rows, 0)) if drawn else draw(data, ROWS, key_rows)
        return GridLook(None if x is None else jnp.asarray(x, float), key)

    def needed(self, model: StochasticFlow, now: int | None) -> int | None:
        """How many steps, and no fewer than it has `now`; None for its own."""
        x = model.without_errors().sample(key=self.key, shape=(ROWS,)) if self.x is None else self.x
        least = LEAST if now is None else now
        needed = suited_steps(model, x, self.key, TOLERANCE, least)
        if now is None or needed == now:
            return needed
        # Where no number does, a model has gone astray, and finer steps would not bring it back.
        return now if needed is None else max(needed, math.ceil(MORE * now))


def _is_open(model: Any) -> bool:
    grid = model.integrator if isinstance(model, StochasticFlow) else None
    return isinstance(grid, FixedGrid) and grid.steps is None


def solved_with(model: Any, steps: int | None) -> Any:
    """The model with so many steps; None for its own."""
    return model if steps is None else with_steps(model, steps)


def with_no_fewer(model: Any, steps: int | None) -> Any:
    """The model with so many steps, unless its own are more."""
    if steps is None or steps <= model.integrator.count(model.driver, model.noise_dimension):
        return model
    return with_steps(model, steps)
