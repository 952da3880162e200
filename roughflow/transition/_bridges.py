"""The density of x₁ given x₀, from paths between them.

With a fixed start, the end point of the random ODE has no density given the whole path, but it has a density
given all but d coefficients of the path. Let h(ω) be the end point along ω, φ the normal density and R any d
orthonormal directions. Then

    p(x₁ | x₀) = ∫ φ(ω) δ(h(ω) − x₁) dω = E_v [ φ(ω) / (φ(v) |det Dh(ω) R|) ],   ω = c + v + R r,

where v is standard normal in the complement of R, and r solves h(c + v + R r) = x₁. Any centre c and any R
are valid. If c is the most likely path to x₁ and the rows of Dh(c) span R, then all weights are equal for a
linear SDE, and nearly equal for other SDEs over a short time. Both come from a few Gauss–Newton iterations: ω
← Jᵀ(JJᵀ)⁻¹(x₁ − h(ω) + Jω).

The result is smooth in the parameters of the SDE, because the same random numbers v are used for all
parameters; its derivatives are exact.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import is_traced
from .._linear import log_abs_det, solve
from .._programs import jit
from ..sde import AbstractSDE, noise_dimension
from ._coordinates import AbstractCoordinates
from ._ends import Effort, Ends, Transition, average, linear, stiffness

# Gauss–Newton iterations to the most likely path: the fraction of the remaining distance that each one
# covers. Full steps at the beginning might lead to another path.
CLIMB = (1 / 4, 1 / 3, 1 / 2, 1, 1, 1, 1)
NEWTON = 4  # number of Newton iterations that lead a path near the most likely one back to x₁
LEAST = 0.1  # lower bound on the precision of the draws, relative to that of unconditioned paths
FOUND = 1e-5  # acceptable distance from x₁, in standard deviations of the transition; times 1e4 in float32


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
    """A normal distribution of paths for a transition, around `centre` and in all directions orthogonal to
    `rows`."""

    centre: Array  # (n m,)
    rows: Array  # (d, n m), orthonormal
    factor: Array  # (n m, n m), lower triangular: a square root of the precision of the draws

    def draw(self, noise: Array) -> Array:
        """Draws v `(K, n m)` orthogonal to the rows, computed from standard normal `noise`."""
        spread = solve(self.factor.T[None], noise.T[None])[0].T
        return spread - (spread @ self.rows.T) @ self.rows

    def log_prob(self, v: Array) -> Array:
        """The log-density of a draw, without the normalising constant of the standard normal density."""
        return jnp.sum(jnp.log(jnp.diag(self.factor))) - 0.5 * jnp.sum((v @ self.factor) ** 2)


def bridges(
    sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition, noise: Array, effort: Effort
) -> Bridges:
    """Weighted paths of one transition, computed from standard normal `noise` `(K, n m)`."""
    # The expected weight does not depend on the centre and the directions, so they need not be
    # differentiated.
    still = Ends(_held(sde), _held(coordinates), _held(step), effort, None)
    chart = _held(_chart(still, still.step.end, noise.shape[-1]))
    plain = Ends(sde, coordinates, step, effort, None)
    ends = Ends(sde, coordinates, step, effort, average(plain, _held(still.stages(chart.centre))))
    return jax.vmap(lambda v: _weigh(ends, step.end, chart, v))(chart.draw(noise))


def _held(tree: Any) -> Any:
    """The pytree as a constant for differentiation."""
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, tree)


def _chart(end_of: Callable[[Array], Array], end: Array, size: int) -> Chart:
    """A normal distribution around the most likely path to the end, with the width given by second
    derivatives there."""

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
    """Solve for the r with which the path centre + v + rowsᵀ r ends at `end`, and compute the weight of this
    path."""
    path = lambda r: chart.centre + v + r @ chart.rows

    def newton(r: Array, _) -> tuple[Array, tuple[Array, Array]]:
        value, slope = linear(lambda r: end_of(path(r)), r)
        return r + _solved(slope, end - value), (r, slope)

    # The second-last iteration has converged, and so have its derivatives, because each iteration squares all
    # errors.
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


CHUNK = 2048  # maximum number of transitions that are evaluated together
LOOK = 256  # maximum number of transitions used to measure the stiffness of an SDE


class Weighted(eqx.Module):
    """log p of a transition, estimated by weighted paths, with its standard error, the effective number of
    paths, and the number of paths that were not found."""

    log_prob: Array
    error: Array
    effective: Array
    unfound: Array


def largest_rate(sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition) -> float | None:
    """The longest transition time multiplied by the largest derivative of the drift at starts and ends; None
    if values are traced."""
    if is_traced(many.dt) or any(is_traced(leaf) for leaf in jax.tree.leaves(sde)):
        return None
    chosen = np.unique(np.linspace(0, len(many.dt) - 1, LOOK).astype(int))
    # NumPy selects rows faster than one compiled program per array would.
    rows = lambda a: a[chosen] if is_traced(a) else jnp.asarray(np.asarray(a)[chosen])
    return float(_largest_rate(sde, coordinates, jax.tree.map(rows, many), jnp.max(many.dt)))


@functools.partial(jit, level=0)
def _largest_rate(sde: AbstractSDE, coordinates: AbstractCoordinates, some: Transition, span: Array) -> Array:
    ends = jnp.concatenate([some.start, some.end]), jnp.concatenate([some.time, some.time])
    rate = lambda x, time: stiffness(sde, coordinates, Transition(x, x, time, span))
    return jnp.max(jax.vmap(rate)(*ends))


@functools.partial(jit, level=1)
def log_probs(
    sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition, key: PRNGKeyArray, effort: Effort
) -> Weighted:
    """log p of many transitions, with standard errors and path statistics, `(N,)` each."""
    one = lambda item: transition_value(sde, coordinates, item[0], item[1], effort)
    return in_chunks(one, (many, keys_of(key, many)), len(many.dt), CHUNK)


def keys_of(key: PRNGKeyArray, many: Transition) -> PRNGKeyArray:
    """One key per transition."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(many.dt)))


def transition_value(
    sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition, key: PRNGKeyArray, effort: Effort
) -> Weighted:
    """log p of one transition."""
    columns = noise_dimension(sde, step.start.shape[-1])
    # The coefficients of the first functions do not depend on the number of functions, so finer paths refine
    # coarser ones.
    shape = (effort.num_functions * columns, effort.num_paths // 2)
    noise = jax.random.normal(key, shape, step.start.dtype).T
    inner = Transition(
        coordinates.from_state(step.start), coordinates.from_state(step.end), step.time, step.dt
    )
    drawn = bridges(sde, coordinates, inner, jnp.concatenate([noise, -noise]), effort)
    value, error = drawn.log_mean()
    value = value + coordinates.log_volume(step.end)
    return Weighted(value, error, drawn.effective(), jnp.sum(~drawn.found))


def in_chunks(function: Callable, items: Any, count: int, max_size: int) -> Any:
    """Map a function over `count` items, in chunks of up to `max_size` items. Chunks have equal size, because
    a smaller last chunk would need another compiled program."""
    parts = -(-count // max_size)
    size = -(-count // parts)
    indices = jnp.minimum(jnp.arange(parts * size), count - 1)
    chunks = jax.tree.map(lambda a: jnp.reshape(a[indices], (parts, size, *a.shape[1:])), items)
    done = jax.lax.map(jax.vmap(function), chunks)
    return jax.tree.map(lambda a: jnp.reshape(a, (parts * size, *a.shape[2:]))[:count], done)
