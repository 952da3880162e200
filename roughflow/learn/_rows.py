"""The data of a fit: rows of an array or of a table on disk, or a distribution to draw from."""

from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_finite
from ..faq import see
from ._batches import Batches
from ._objective import AbstractStatefulObjective
from ._parquet import ParquetTable


@runtime_checkable
class DataSource(Protocol):
    """A distribution that gives fresh data in each step, such as those of `rf.datasets`."""

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array: ...


@runtime_checkable
class KnownEntropy(DataSource, Protocol):
    """A distribution whose entropy is known: no model has a smaller expected negative log-likelihood."""

    @property
    def entropy(self) -> float: ...


class Drawn(eqx.Module):
    """Batches that were drawn on the host for the next steps, `(steps, size, dimension)`."""

    rows: Array


Data = Array | DataSource | Batches | None


def draw(
    data: Array | DataSource | Drawn | None, size: int, key: PRNGKeyArray, place: int | Array = 0
) -> Array | None:
    """A batch: rows drawn with replacement, or all if there are no more; of batches drawn before, that at
    `place`."""
    if data is None:
        return None
    if isinstance(data, Drawn):
        return data.rows[place]
    if isinstance(data, DataSource):
        return data.sample(key=key, shape=(size,))
    return data if len(data) <= size else data[jax.random.randint(key, (size,), 0, len(data))]


def split(
    data: Array | np.ndarray | DataSource | Batches | None,
    validation: float | Array | np.ndarray,
    objective: AbstractStatefulObjective,
    key: PRNGKeyArray,
) -> tuple[Data, Array | None]:
    """Data to train on and, if asked for, data to validate on."""
    if (data is not None) != objective.uses_data:
        need = "needs data" if objective.uses_data else "takes no data"
        raise ValueError(f"{type(objective).__name__} {need}: call fit(model, data, ...) accordingly")
    if isinstance(data, ParquetTable) and isinstance(validation, float | int):
        rest, aside = data.split(validation, key=key)
        return rest, _rows("validation", aside) if len(aside) else None
    if data is None or isinstance(data, DataSource | Batches):
        if isinstance(validation, float | int):
            if validation:
                raise ValueError("a share to validate on must come from an array: give validation data")
            return data, None
        return data, _rows("validation", validation)
    rows = _rows("data", data)
    if not isinstance(validation, float | int):
        return rows, _rows("validation", validation)
    if not 0 <= validation < 1:
        told = f"validation must be a share of the data between 0 and 1, got {validation}"
        raise ValueError(told + see("budgets-and-validation"))
    aside = round(validation * len(rows))
    if aside in (0, len(rows)):
        return rows, None
    order = jax.random.permutation(key, len(rows))
    return rows[order[aside:]], rows[order[:aside]]


def _rows(name: str, data: Array | np.ndarray) -> Array:
    data = jnp.asarray(data, float)
    if data.ndim != 2 or not data.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {data.shape}")
    check_finite(name, data)
    return data
