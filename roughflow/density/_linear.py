"""Many small linear systems at once.

LAPACK is called matrix by matrix; for a hundred thousand 2 × 2 matrices elimination written out over the
batch is far faster.
"""

import jax.numpy as jnp
from jaxtyping import Array

from ..sde import UNROLL


def solve(matrix: Array, right: Array) -> Array:
    """A⁻¹B for `matrix` `(B, d, d)` and `right` `(B, d, k)`; infinite or NaN where A is singular."""
    if matrix.shape[-1] > UNROLL:
        return jnp.linalg.solve(matrix, right)
    return _eliminate(matrix, right)[0]


def log_abs_det(matrix: Array) -> Array:
    """log |det A|, `(B,)`."""
    if matrix.shape[-1] > UNROLL:
        return jnp.linalg.slogdet(matrix)[1]
    return _eliminate(matrix, matrix[..., :0])[1]


def _eliminate(matrix: Array, right: Array) -> tuple[Array, Array]:
    """Gauss's elimination with partial pivoting: A⁻¹B, by operations linear in B, and log |det A|."""
    d = matrix.shape[-1]
    place = jnp.arange(d)[None, :, None]
    log_det = jnp.zeros(matrix.shape[:1], matrix.dtype)
    for i in range(d):
        best = i + jnp.argmax(jnp.abs(matrix[:, i:, i]), axis=1)[:, None, None]
        matrix, right = (_swap(table, i, best, place) for table in (matrix, right))
        pivot = matrix[:, i : i + 1, i : i + 1]
        log_det = log_det + jnp.log(jnp.abs(pivot[:, 0, 0]))
        factor = jnp.where(place > i, matrix[:, :, i : i + 1] / pivot, 0)
        matrix, right = (table - factor * table[:, i : i + 1] for table in (matrix, right))
    rows: list[Array] = []
    for i in reversed(range(d)):
        rest = right[:, i]
        for j, row in zip(range(i + 1, d), reversed(rows), strict=True):
            rest = rest - matrix[:, i, j : j + 1] * row
        rows.append(rest / matrix[:, i, i : i + 1])
    return jnp.stack(rows[::-1], axis=1), log_det


def _swap(table: Array, i: int, best: Array, place: Array) -> Array:
    """Rows i and `best` of each table exchanged."""
    chosen = jnp.take_along_axis(table, best, axis=1)
    return jnp.where(place == i, chosen, jnp.where(place == best, table[:, i : i + 1], table))
