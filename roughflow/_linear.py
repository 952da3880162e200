"""Batches of small linear systems, solved by operations on the whole batch.

LAPACK is not used: it loops over matrices, which is slow for a hundred thousand 2 × 2 matrices. Moreover, two
of its batched calls that run concurrently on a CPU can deadlock (jaxlib 0.10: each blocks in
`ParallelBatchMap` until the thread pool it runs on has a free thread).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Sums over at most this many columns, rows or directions are unrolled, because XLA fuses separate arrays
# better than one stacked array on a CPU. For more terms, one batched product keeps the program small.
UNROLL = 8
# Systems up to this size are unrolled; for larger ones a loop is as fast and compiles faster.
SMALL = 3


def solve(matrix: Array, right: Array) -> Array:
    """A⁻¹R for A = `matrix` `(B, d, d)` and R = `right` `(B, d, k)`; infinite or NaN where A is singular."""
    if matrix.shape[-1] <= SMALL:
        return _eliminate(matrix, right)[0]
    # Derivatives come from the linear equation (implicit function theorem), not from the steps of the
    # elimination.
    return jax.lax.custom_linear_solve(
        lambda x: jnp.einsum("bij,bjk->bik", matrix, x),
        right,
        lambda _, b: _sweep(matrix, b)[0],
        lambda _, b: _sweep(jnp.swapaxes(matrix, 1, 2), b)[0],
    )


def log_abs_det(matrix: Array) -> Array:
    """log |det A| of each matrix, `(B,)`."""
    if matrix.shape[-1] <= SMALL:
        return _eliminate(matrix, matrix[..., :0])[1]
    return _log_abs_det(matrix)


def orthonormal(matrix: Array) -> tuple[Array, Array]:
    """Orthonormal directions `(B, d, D)` that span the rows of the matrix, and, for each row, the norm of its
    component orthogonal to the previous rows, `(B, d)`. Gram–Schmidt orthogonalisation is applied twice."""

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        directions, sizes = state
        direction = matrix[:, i]
        for _ in range(2):
            direction = direction - jnp.einsum(
                "bij,bi->bj", directions, jnp.einsum("bij,bj->bi", directions, direction)
            )
        size = jnp.sqrt(jnp.sum(direction**2, axis=-1))
        return directions.at[:, i].set(direction / size[:, None]), sizes.at[:, i].set(size)

    blank = jnp.zeros_like(matrix), jnp.zeros_like(matrix[..., 0])
    return jax.lax.fori_loop(0, matrix.shape[1], step, blank)


@jax.custom_jvp
def _log_abs_det(matrix: Array) -> Array:
    return _sweep(matrix, matrix[..., :0])[1]


@_log_abs_det.defjvp
def _log_abs_det_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # d log |det A| = tr A⁻¹ dA
    change = solve(primals[0], tangents[0])
    return _log_abs_det(primals[0]), jnp.trace(change, axis1=1, axis2=2)


def _sweep(matrix: Array, right: Array) -> tuple[Array, Array]:
    """A⁻¹R and log |det A|, by Gauss–Jordan elimination with partial pivoting in a loop."""
    d = matrix.shape[-1]
    place = jnp.arange(d)[None, :, None]

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        table, log_det = state
        column = jnp.where(jnp.arange(d)[None] >= i, jnp.abs(table[:, :, i]), -1)
        table = _swap(table, i, jnp.argmax(column, axis=1)[:, None, None], place)
        row = table[:, i][:, None]
        pivot = table[:, i, i][:, None, None]
        factor = jnp.where(place == i, 0, table[:, :, i][..., None] / pivot)
        return table - factor * row, log_det + jnp.log(jnp.abs(pivot[:, 0, 0]))

    start = jnp.concatenate([matrix, right], axis=2), jnp.zeros(matrix.shape[:1], matrix.dtype)
    table, log_det = jax.lax.fori_loop(0, d, step, start)
    return table[:, :, d:] / jnp.diagonal(table, axis1=1, axis2=2)[..., None], log_det


def _eliminate(matrix: Array, right: Array) -> tuple[Array, Array]:
    """A⁻¹R, by operations linear in R, and log |det A|, by Gaussian elimination with partial pivoting.

    Rows are separate arrays, because gather operations would be slower to compile and to run.
    """
    d = matrix.shape[-1]
    rows = [(matrix[:, i], right[:, i]) for i in range(d)]
    log_det = jnp.zeros(matrix.shape[:1], matrix.dtype)
    for i in range(d):
        for k in range(i + 1, d):
            larger = (jnp.abs(rows[k][0][:, i]) > jnp.abs(rows[i][0][:, i]))[:, None]
            pick = lambda new, old, larger=larger: jnp.where(larger, new, old)
            rows[i], rows[k] = jax.tree.map(pick, rows[k], rows[i]), jax.tree.map(pick, rows[i], rows[k])
        pivot = rows[i][0][:, i : i + 1]
        log_det = log_det + jnp.log(jnp.abs(pivot[:, 0]))
        for k in range(i + 1, d):
            factor = rows[k][0][:, i : i + 1] / pivot
            rows[k] = jax.tree.map(lambda row, top, factor=factor: row - factor * top, rows[k], rows[i])
    solved: list[Array] = []
    for i in reversed(range(d)):
        row, rest = rows[i]
        for j, found in zip(range(i + 1, d), reversed(solved), strict=True):
            rest = rest - row[:, j : j + 1] * found
        solved.append(rest / row[:, i : i + 1])
    return jnp.stack(solved[::-1], axis=1), log_det


def _swap(table: Array, i: int | Array, best: Array, place: Array) -> Array:
    """Exchange rows i and `best` of each table."""
    chosen = jnp.take_along_axis(table, best, axis=1)
    return jnp.where(place == i, chosen, jnp.where(place == best, table[:, i][:, None], table))


def cholesky(matrix: Array, *, semidefinite: bool = False) -> Array:
    """The lower Cholesky factor of a small matrix, by unrolled operations; NaN if the matrix is not positive
    definite. If `semidefinite` is True, zero pivots are allowed."""
    columns: list[Array] = []
    rest = matrix
    for j in range(len(matrix)):
        pivot = jnp.where(rest[j, j] > 0, rest[j, j], jnp.inf) if semidefinite else rest[j, j]
        column = jnp.where(jnp.arange(len(matrix)) >= j, rest[:, j], 0) / jnp.sqrt(pivot)
        rest = rest - column[:, None] * column[None, :]
        columns.append(column)
    return jnp.stack(columns, axis=1)


def solve_lower(lower: Array, right: Array) -> Array:
    """L⁻¹ times `right`, a vector or a matrix, for a small lower triangular L."""
    rows: list[Array] = []
    for i in range(len(lower)):
        rest = right[i]
        for j, row in enumerate(rows):
            rest = rest - lower[i, j] * row
        rows.append(rest / lower[i, i])
    return jnp.stack(rows)


def solve_upper(lower: Array, right: Array) -> Array:
    """L⁻ᵀ times `right`, for a small lower triangular L."""
    rows: list[Array] = []
    for i in reversed(range(len(lower))):
        rest = right[i]
        for j, row in zip(reversed(range(i + 1, len(lower))), rows, strict=True):
            rest = rest - lower[j, i] * row
        rows.append(rest / lower[i, i])
    return jnp.stack(rows[::-1])
