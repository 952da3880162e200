"""Normal distributions of states each tied to the next one alone, with block-tridiagonal precisions."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array


class Chain(eqx.Module):
    """The factor L of a precision LLᵀ: blocks on its diagonal, lower triangular, and those below it."""

    diagonal: Array  # (n, d, d)
    below: Array  # (n, d, d), the last of them zero

    @staticmethod
    def of(diagonal: Array, below: Array) -> "Chain":
        """From the blocks of the precision, `(n, d, d)` each; NaN if it is not positive definite."""

        def state(carried: Array, blocks: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            own, next_ = blocks
            factor = cholesky(own - carried)
            tie = solve_lower(factor, next_.T).T
            return tie @ tie.T, (factor, tie)

        return Chain(*jax.lax.scan(state, jnp.zeros_like(diagonal[0]), (diagonal, below))[1])

    def half_log_det(self) -> Array:
        """log det L, in parts `(n,)` that belong to each state."""
        return jnp.sum(jnp.log(jnp.diagonal(self.diagonal, axis1=1, axis2=2)), axis=-1)

    def forward(self, right: Array) -> Array:
        """L⁻¹ times `right` `(n, d, k)`."""

        def state(carried: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, tie, own = now
            solved = solve_lower(factor, own - carried)
            return tie @ solved, solved

        return jax.lax.scan(state, jnp.zeros_like(right[0]), (self.diagonal, self.below, right))[1]

    def backward(self, right: Array) -> Array:
        """L⁻ᵀ times `right` `(n, d, k)`: draws of the distribution, from standard normal numbers."""

        def state(later: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, tie, own = now
            solved = _solve_upper(factor, own - tie.T @ later)
            return solved, solved

        return jax.lax.scan(
            state, jnp.zeros_like(right[0]), (self.diagonal, self.below, right), reverse=True
        )[1]

    def memory(self) -> Array:
        """How many states away correlations have fallen to 1 %, about: as in a stationary chain."""
        ties = jnp.mean(jnp.sum(self.below**2, axis=2), axis=0)
        own = jnp.mean(jnp.sum(self.diagonal**2, axis=2), axis=0)
        return 2 * jnp.log(0.01) / jnp.log(jnp.clip(jnp.max(ties / own), 1e-4, 0.9999))

    def variances(self) -> Array:
        """The covariance matrix `(n, d, d)` of each state."""
        unit = jnp.eye(self.diagonal.shape[-1], dtype=self.diagonal.dtype)

        def state(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            factor, tie = now
            half = _solve_upper(factor, unit)
            own = half @ (unit + tie.T @ later @ tie) @ half.T
            return own, own

        return jax.lax.scan(state, jnp.zeros_like(unit), (self.diagonal, self.below), reverse=True)[1]


def cholesky(matrix: Array, *, semidefinite: bool = False) -> Array:
    """Of a small matrix, written out; NaN if it is not positive definite, unless zero pivots are allowed."""
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


def _solve_upper(lower: Array, right: Array) -> Array:
    rows: list[Array] = []
    for i in reversed(range(len(lower))):
        rest = right[i]
        for j, row in zip(reversed(range(i + 1, len(lower))), rows, strict=True):
            rest = rest - lower[j, i] * row
        rows.append(rest / lower[i, i])
    return jnp.stack(rows[::-1])
