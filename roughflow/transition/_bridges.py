"""The density of x₁ given x₀, from paths between them.

With a fixed start, the flow of the random ODE has no density given its path. But it has one given all but d
of the coefficients of the path. With h(ω) the end point along ω, φ the normal density and R any d orthonormal
directions,

    p(x₁ | x₀) = ∫ φ(ω) δ(h(ω) − x₁) dω = E_v [ φ(ω) / (φ(v) |det Dh(ω) R|) ],   ω = c + v + R r,

where v is standard normal in the complement of R, and r solves h(c + v + R r) = x₁. Any centre c and any R
are valid. If c is the most likely path to x₁ and the rows of Dh(c) span R, then all weights are equal for a
linear SDE, and nearly equal for other SDEs over a short time. Both come from a few Gauss–Newton iterations: ω
← Jᵀ(JJᵀ)⁻¹(x₁ − h(ω) + Jω).

The result is smooth in the parameters of the SDE, because the random numbers v are the same for all of them;
its derivatives are exact.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._linear import log_abs_det, solve
from ..sde import AbstractSDE
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Ends, Transition, average, linear

# Iterations to the most likely path, and the fraction of the remaining distance that each covers: full steps
# may end elsewhere.
CLIMB = (1 / 4, 1 / 3, 1 / 2, 1, 1, 1, 1)
NEWTON = 4  # iterations back to x₁, from a path close to the most likely one
LEAST = 0.1  # smallest precision of the draws, relative to that of all paths
FOUND = 1e-5  # acceptable distance from x₁, in its standard deviations; times 1e4 in float32


class Bridges(eqx.Module):
    """Weighted paths from start to end of one transition; the second half is antithetic to the first."""

    log_weights: Array  # (K,)
    found: Array  # (K,)

    def log_mean(self) -> tuple[Array, Array]:
        """The logarithm of the mean weight, and its standard error, which includes an allowance for paths
        that were not found.

        Half of the variance of the mean is added, to correct the bias of the logarithm.
        """
        weights = jnp.where(self.found, self.log_weights, -jnp.inf)
        top = jax.lax.stop_gradient(jnp.max(weights))
        top = jnp.where(jnp.isfinite(top), top, 0)
        pairs = jnp.mean(jnp.reshape(jnp.exp(weights - top), (2, -1)), axis=0)
        mean = jnp.mean(pairs)
        variance = jnp.sum((pairs / mean - 1) ** 2) / (pairs.size * max(pairs.size - 1, 1))
        error = jnp.sqrt(variance) - jnp.log(jnp.mean(self.found))
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
        return top + jnp.log(mean) + 0.5 * variance, jax.lax.stop_gradient(error)

    def effective(self) -> Array:
        """Effective number of paths, (Σw)²/Σw²."""
        weights = jax.lax.stop_gradient(jnp.where(self.found, self.log_weights, -jnp.inf))
        top = jnp.max(weights)
        share = jnp.exp(weights - jnp.where(jnp.isfinite(top), top, 0))
        square = jnp.sum(share**2)
        return jnp.where(square > 0, jnp.sum(share) ** 2 / jnp.where(square > 0, square, 1), 0)


class Chart(eqx.Module):
    """The distribution of the paths of a transition: around `centre`, along all directions but those of
    `rows`."""

    centre: Array  # (n m,)
    rows: Array  # (d, n m), orthonormal
    factor: Array  # (n m, n m), lower triangular: a square root of the precision of the draws

    def draw(self, noise: Array) -> Array:
        """Draws v `(K, n m)` orthogonal to the rows, from standard normal numbers."""
        spread = solve(self.factor.T[None], noise.T[None])[0].T
        return spread - (spread @ self.rows.T) @ self.rows

    def log_prob(self, v: Array) -> Array:
        """The log-density of a draw, without the constant of standard normal numbers."""
        return jnp.sum(jnp.log(jnp.diag(self.factor))) - 0.5 * jnp.sum((v @ self.factor) ** 2)


def bridges(
    sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition, noise: Array, effort: Effort
) -> Bridges:
    """Paths for one transition from standard normal numbers `(K, n m)`."""
    # Any chart and any expansion point are valid, so they need not be differentiated.
    still = Ends(_held(sde), _held(coordinates), _held(step), effort, None)
    chart = _held(_chart(still, still.step.end, noise.shape[-1]))
    plain = Ends(sde, coordinates, step, effort, None)
    ends = Ends(sde, coordinates, step, effort, average(plain, _held(still.stages(chart.centre))))
    return jax.vmap(lambda v: _weigh(ends, step.end, chart, v))(chart.draw(noise))


def _held(tree: Any) -> Any:
    """Not differentiated."""
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, tree)


def _chart(end_of: Callable[[Array], Array], end: Array, size: int) -> Chart:
    """A normal distribution around the most likely path to the end, with the width given by its second
    derivatives."""

    def climb(omega: Array, part: Array) -> tuple[Array, Array]:
        value, slope = linear(end_of, omega)
        gap = part * (end - value) + slope @ omega
        return slope.T @ _solved(slope @ slope.T, gap), slope

    centre, slopes = jax.lax.scan(climb, jnp.zeros(size, end.dtype), jnp.asarray(CLIMB, end.dtype))
    slope = slopes[-1]
    # On the surface h = end, −½|ω|² decreases from its maximum as −½ vᵀ(I − λ·D²h)v, where centre = Jᵀλ.
    multiplier = _solved(slope @ slope.T, slope @ centre)
    bend = jax.jacfwd(jax.jacfwd(lambda omega: multiplier @ end_of(omega)))(centre)
    rows = _orthonormal(slope)
    across = jnp.eye(size, dtype=end.dtype) - rows.T @ rows
    return Chart(centre, rows, _cholesky(jnp.eye(size, dtype=end.dtype) - across @ bend @ across))


def _weigh(end_of: Callable[[Array], Array], end: Array, chart: Chart, v: Array) -> Bridges:
    """Solve for the path of centre + v + rowsᵀ r that ends at `end`, and compute its weight."""
    path = lambda r: chart.centre + v + r @ chart.rows

    def newton(r: Array, _) -> tuple[Array, tuple[Array, Array]]:
        value, slope = linear(lambda r: end_of(path(r)), r)
        return r + _solved(slope, end - value), (r, slope)

    # The second-last iteration has converged, including its derivatives: each iteration squares their errors.
    last, (r, slope) = jax.lax.scan(newton, jnp.zeros_like(end), None, length=NEWTON)
    gap, r, slope = last - r[-1], r[-1], slope[-1]
    omega = path(r)
    log_weight = -0.5 * (omega @ omega) - 0.5 * end.size * jnp.log(2 * jnp.pi) - chart.log_prob(v)
    near = FOUND if end.dtype == jnp.float64 else 1e4 * FOUND
    return Bridges(log_weight - log_abs_det(slope[None])[0], jnp.max(jnp.abs(gap)) < near)


def _solved(matrix: Array, right: Array) -> Array:
    return solve(matrix[None], right[None, :, None])[0, :, 0]


def _orthonormal(rows: Array) -> Array:
    """Differentiable Gram–Schmidt orthogonalisation, for few rows that are far from parallel."""
    done: list[Array] = []
    for row in rows:
        for other in done:
            row = row - (row @ other) * other
        done.append(row / jnp.linalg.norm(row))
    return jnp.stack(done)


def _cholesky(matrix: Array) -> Array:
    """The Cholesky factor of a symmetric matrix, with pivots bounded below by `LEAST`."""
    size = len(matrix)
    place = jnp.arange(size)

    def column(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, factor = state
        pivot = jnp.maximum(rest[j, j], LEAST)
        new = jnp.where(place > j, rest[:, j] / jnp.sqrt(pivot), 0).at[j].set(jnp.sqrt(pivot))
        return rest - jnp.outer(new, new), factor.at[:, j].set(new)

    return jax.lax.fori_loop(0, size, column, (matrix, jnp.zeros_like(matrix)))[1]
