"""The data of a fit: rows of an array, batches drawn on the host, or a distribution to draw from."""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, check_finite, check_number
from ..density import StochasticFlow
from ._objective import AbstractStatefulObjective
from ._split import check_share, copies_of, hold_out


@runtime_checkable
class DataSource(Protocol):
    """A distribution that gives fresh data in each step, such as those of `rf.datasets`."""

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array: ...


@runtime_checkable
class KnownEntropy(DataSource, Protocol):
    """A distribution whose entropy is known: no model has a smaller expected negative log-likelihood."""

    @property
    def entropy(self) -> float: ...


@runtime_checkable
class Batches(Protocol):
    """Rows drawn on the host, one batch at a time."""

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray: ...


@runtime_checkable
class SplittableBatches(Batches, Protocol):
    """Batches that can set rows aside for validation, such as `rf.ParquetTable`."""

    def split(self, share: float, *, key: PRNGKeyArray) -> tuple["Batches", np.ndarray]: ...


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
    """Data to train on and, if asked for, data to validate on: copies of a row are on one side."""
    if (data is not None) != objective.uses_data:
        need = "needs data" if objective.uses_data else "takes no data"
        raise ValueError(f"{type(objective).__name__} {need}: call fit(model, data, ...) accordingly")
    if np.ndim(validation) == 0:
        check_number("validation", validation, least=0, below=1)
        validation = float(validation)  # pyright: ignore[reportArgumentType]
    if isinstance(data, SplittableBatches) and isinstance(validation, float | int):
        rest, aside = data.split(validation, key=key)
        return rest, _rows("validation", aside) if len(aside) else None
    if data is None or isinstance(data, DataSource | Batches):
        if isinstance(validation, float | int):
            check_share(validation)
            if validation:
                raise ValueError("a share to validate on must come from an array: give validation data")
            return data, None
        return data, _rows("validation", validation)
    rows = _rows("data", data)
    if not isinstance(validation, float | int):
        return rows, _rows("validation", validation)
    train, aside = hold_out(copies_of(np.asarray(rows)), validation, key)
    return rows[train], rows[aside] if len(aside) else None


def rng_of(key: PRNGKeyArray, *numbers: int) -> np.random.Generator:
    """A NumPy generator seeded by a key and, for example, the number of a step."""
    return np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), *numbers])


def _rows(name: str, data: Array | np.ndarray) -> Array:
    data = jnp.asarray(as_real(name, data), float)
    if data.ndim != 2 or not data.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {data.shape}")
    check_finite(name, data)
    return data


def check_columns(model: Any, train: Data, held_out: Array | None) -> None:
    """Refuse rows of another dimension than the flow that is fitted to them."""
    if not isinstance(model, StochasticFlow):
        return
    for name, rows in {"data": train, "validation": held_out}.items():
        if isinstance(rows, jax.Array) and rows.shape[1] != model.dimension:
            raise ValueError(
                f"{name} must have shape (rows, {model.dimension}) for this flow, got {rows.shape}"
            )
