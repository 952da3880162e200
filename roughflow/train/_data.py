"""Training data (arrays, batches or distributions), validation splits, folds, and copies of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, check_finite, check_number
from .._programs import jit
from ..density import StochasticFlow
from ..faq import see
from ._objective import AbstractStatefulObjective

NUM_FOLDS = 5
LEAVE_ONE_OUT = 40  # with at most this number of groups, each group is one fold
# A spike is a value that more than this fraction of the rows share and that is more than this many times as
# frequent as the median value.
SPIKE_SHARE, SPIKE_RATIO = 0.05, 5
MAX_CHANCE_TWINS = 0.1  # equal rows are copies if fewer than this number are expected by chance
PAIRED_COLUMNS = 12  # maximum number of repeated columns that are compared pairwise


@dataclass(frozen=True)
class Links:
    """Marks rows that must stay on the same side of a split.

    `labels` has one label per row, shared by linked rows; `copies` has one label per row, shared by equal
    rows. `joined` lists the columns whose values repeat together, as after a join.
    """

    labels: np.ndarray
    copies: np.ndarray
    joined: tuple[int, ...] = ()

    @property
    def distinct(self) -> int:
        """Number of distinct rows."""
        return int(self.copies.max()) + 1

    @staticmethod
    def of(rows: np.ndarray, groups: Any = None) -> "Links":
        """Link rows of one group, copies of a row, and rows that agree in two continuous columns (as after a
        join, where one record is part of many rows)."""
        copies = copies_of(rows)
        keys = [copies] if groups is None else [copies, _group_labels(groups, len(rows))]
        repeated = [j for j, column in enumerate(rows.T) if len(rows) > 1 and _repeats(column)]
        labels = _connected(keys)
        if len(repeated) < 2:
            return Links(labels, copies)
        repeated = repeated[:PAIRED_COLUMNS]
        pairs = [(i, j) for i in repeated for j in repeated if i < j]
        linked = _connected([labels, *(first_seen(row_codes(rows[:, pair])) for pair in pairs)])
        # A many-to-many join would link all rows, so it is ignored.
        if np.bincount(linked).max() > len(rows) / 2 or linked.max() == labels.max():
            return Links(labels, copies)
        return Links(linked, copies, tuple(repeated))

    @property
    def count(self) -> int:
        """Number of sets of linked rows."""
        return int(self.labels.max()) + 1

    def at(self, indices: np.ndarray) -> "Links":
        """The links among a subset of the rows."""
        return Links(first_seen(self.labels[indices]), first_seen(self.copies[indices]), self.joined)


def hold_out(labels: np.ndarray, share: float, key: PRNGKeyArray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the training rows and of the validation rows. A fraction `share` of the sets of linked
    rows is used for validation: at least one set if there are two or more and the fraction is positive."""
    check_share(share)
    count = int(labels.max()) + 1
    aside = min(max(1, round(share * count)), count - 1) if share else 0
    rank = np.empty(count, int)
    rank[np.asarray(_permutation(key, count))] = np.arange(count)
    order = np.argsort(rank[labels], kind="stable")
    first = int(np.sum(rank[labels] < aside))
    return order[first:], order[:first]


def check_share(share: float) -> None:
    if isinstance(share, bool) or not 0 <= share < 1:
        message = f"validation must be a fraction of at least 0 and below 1, got {share}"
        raise ValueError(message + see("budgets-and-validation"))


def folds(labels: np.ndarray, leave_one_out: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """The indices of the training and of the validation rows of each fold. If there are at most
    `leave_one_out` sets of linked rows, each set is one fold."""
    total = int(labels.max()) + 1
    count = total if total <= leave_one_out else NUM_FOLDS
    order = np.random.default_rng(0).permutation(total)
    fold = np.empty(total, int)
    for i, part in enumerate(np.array_split(order, min(count, total))):
        fold[part] = i
    own = fold[labels]
    return [(np.flatnonzero(own != i), np.flatnonzero(own == i)) for i in range(min(count, total))]


def mean_and_error(values: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The mean over rows and its standard error; rows with the same label are treated as dependent."""
    mean, count = float(np.mean(values)), int(labels.max()) + 1 if len(labels) else 0
    if count < 2 or not np.isfinite(mean):
        return mean, float("nan")
    sums = np.bincount(labels, values - mean)
    return mean, float(np.sqrt(count / (count - 1) * np.sum(sums**2)) / len(values))


def row_codes(rows: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each row."""
    words = np.ascontiguousarray(np.asarray(rows, np.float64) + 0.0).view(np.uint64)  # −0 + 0 = 0
    codes = np.full(len(words), 0x9E3779B97F4A7C15, np.uint64)
    for word in words.T:
        codes = (codes ^ word) * np.uint64(0xFF51AFD7ED558CCD)
        codes ^= codes >> np.uint64(32)
    return codes


def first_seen(codes: np.ndarray) -> np.ndarray:
    """Renumber codes 0, 1, … in order of first appearance."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), int)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.ravel()]


def grid_step(values: np.ndarray) -> float:
    """The step of a grid that contains all values, such as integers or rounded numbers; 0 if there is
    none."""
    distinct = np.unique(values)
    gaps = np.unique(np.diff(distinct))
    if not gaps.size:
        return 0.0
    if np.abs(distinct).max() < 2**53 and np.array_equal(distinct, np.round(distinct)):
        return float(np.gcd.reduce(gaps.astype(np.int64)))
    single = np.array_equal(distinct, distinct.astype(np.float32))
    tolerance = (2e-7 if single else 1e-12) * float(np.abs(distinct).max())
    step, finest = float(gaps[0]), max(10 * tolerance, 1e-6 * float(distinct[-1] - distinct[0]))
    while step > finest:  # Euclid's algorithm on all gaps simultaneously
        times = np.round(gaps / step)
        rest = np.abs(gaps - step * times)
        rest = rest[rest > tolerance * (1 + times)]
        if not rest.size:
            return _clean(step, gaps)
        step = float(rest.min())
    return 0.0


def _clean(step: float, gaps: np.ndarray) -> float:
    """The step rounded to a short decimal: 0.1, not 0.10000000000000009."""
    largest = float(gaps[-1])
    exact = largest / round(largest / step)
    return float(f"{exact:.6g}")


def copies_of(rows: np.ndarray) -> np.ndarray:
    """A label for each row, shared by copies of a row."""
    labels = first_seen(row_codes(rows))
    if labels.max() + 1 == len(rows):
        return labels
    unique = len(rows) + np.arange(len(rows))
    return first_seen(np.where(identified(rows, len(rows)), labels, unique))


def identified(rows: np.ndarray, total: int) -> np.ndarray:
    """For each row, whether an equal row among `total` rows would be a copy. Otherwise, as with rounded
    values, it may be equal by chance."""
    return sum(_log_cells(column) for column in rows.T) > np.log(total / MAX_CHANCE_TWINS)


def _log_cells(column: np.ndarray) -> np.ndarray:
    """For each value in a column, −log of the probability of drawing exactly that value, in nats; infinite
    if the column is continuous."""
    _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
    step, cells = grid_step(column), np.inf
    if step or len(counts) == 1:
        quarters = np.quantile(column, [0.25, 0.75])
        cells = 1.0 if len(counts) == 1 else max(1.0, 2 * (quarters[1] - quarters[0]) / step)
    share = counts / len(column)
    spike = (share > SPIKE_SHARE) & (share > SPIKE_RATIO * np.median(share))
    return np.log(np.where(spike, np.minimum(cells, 1 / share), cells))[inverse.ravel()]


def _repeats(column: np.ndarray) -> bool:
    """Whether most values of a continuous column occur more than once."""
    _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
    if np.mean(counts[inverse.ravel()] > 1) < 0.5 or len(counts) == 1:
        return False
    return bool(np.median(_log_cells(column)) > np.log(len(column) / MAX_CHANCE_TWINS))


def _group_labels(groups: Any, count: int) -> np.ndarray:
    labels = np.asarray(groups, dtype=object)
    if labels.shape != (count,):
        message = f"groups must have one label for each of the {count} rows, got shape {labels.shape}"
        raise ValueError(message + see("budgets-and-validation"))
    missing = [i for i, label in enumerate(labels) if label is None or label != label]
    if missing:
        raise ValueError(f"groups has no label in row {missing[0]}: every row needs one")
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels])


def _connected(keys: Sequence[np.ndarray]) -> np.ndarray:
    """A label for each row, shared by rows with a common key, directly or through other rows."""
    if len(keys) == 1:
        return keys[0]
    count, parts, offset = len(keys[0]), [], len(keys[0])
    for key in keys:
        parts.append(offset + key)
        offset += int(key.max()) + 1
    edges = (np.ones(count * len(keys)), (np.tile(np.arange(count), len(keys)), np.concatenate(parts)))
    graph = scipy.sparse.coo_matrix(edges, shape=(offset, offset))
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return first_seen(labels[:count])


@partial(jit, level=1)
def _permutation(key: PRNGKeyArray, count: int) -> Array:
    return jax.random.permutation(key, count)


@runtime_checkable
class DataSource(Protocol):
    """A distribution from which new data are drawn in each step, such as those of `rf.datasets`."""

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array: ...


@runtime_checkable
class KnownEntropy(DataSource, Protocol):
    """A distribution with known entropy, the lowest possible expected negative log-likelihood."""

    @property
    def entropy(self) -> float: ...


@runtime_checkable
class Batches(Protocol):
    """Data from which batches are drawn on the host."""

    def batch(self, size: int, rng: np.random.Generator) -> np.ndarray: ...


@runtime_checkable
class SplittableBatches(Batches, Protocol):
    """Batches that can split off validation rows, such as `rf.tables.ParquetTable`."""

    def split(self, share: float, *, key: PRNGKeyArray) -> tuple["Batches", np.ndarray]: ...


class Drawn(eqx.Module):
    """Batches that the host has drawn for the next steps, `(steps, size, dimension)`."""

    rows: Array


Data = Array | DataSource | Batches | None


def draw(
    data: Array | DataSource | Drawn | None, size: int, key: PRNGKeyArray, index: int | Array = 0
) -> Array | None:
    """A batch of `size` rows drawn with replacement, or all rows of an array with at most `size` rows.
    For `Drawn`, the batch with this index."""
    if data is None:
        return None
    if isinstance(data, Drawn):
        return data.rows[index]
    if isinstance(data, DataSource):
        return data.sample(key=key, shape=(size,))
    return data if len(data) <= size else data[jax.random.randint(key, (size,), 0, len(data))]


def split(
    data: Array | np.ndarray | DataSource | Batches | None,
    validation: float | Array | np.ndarray,
    objective: AbstractStatefulObjective,
    key: PRNGKeyArray,
) -> tuple[Data, Array | None]:
    """Split training and validation data, never with copies of one row on both sides."""
    if (data is not None) != objective.uses_data:
        need = "needs data: fit(model, data)" if objective.uses_data else "takes no data: fit(model)"
        raise ValueError(f"{type(objective).__name__} {need}")
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
                raise ValueError(
                    "a validation fraction requires that data is an array: pass validation data instead"
                )
            return data, None
        return data, _rows("validation", validation)
    rows = _rows("data", data)
    if not isinstance(validation, float | int):
        return rows, _rows("validation", validation)
    train, aside = hold_out(copies_of(np.asarray(rows)), validation, key)
    return rows[train], rows[aside] if len(aside) else None


def rng_of(key: PRNGKeyArray, *numbers: int) -> np.random.Generator:
    """A NumPy generator seeded by a key and, for example, a step number."""
    return np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), *numbers])


def _rows(name: str, data: Array | np.ndarray) -> Array:
    data = jnp.asarray(as_real(name, data), float)
    if data.ndim != 2 or not data.size:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {data.shape}")
    check_finite(name, data)
    return data


def check_columns(model: Any, train: Data, held_out: Array | None) -> None:
    """Reject rows whose dimension differs from that of the flow."""
    if not isinstance(model, StochasticFlow):
        return
    for name, rows in {"data": train, "validation": held_out}.items():
        if isinstance(rows, jax.Array) and rows.shape[1] != model.dimension:
            raise ValueError(
                f"{name} must have shape (rows, {model.dimension}) for this flow, got {rows.shape}"
            )
