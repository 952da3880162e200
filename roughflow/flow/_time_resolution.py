"""Coefficients that change in time faster than the solver's steps, or than the driver's functions."""

import functools
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._programs import jit
from ..sde import AbstractSDE, depends_on, noise_matrix
from ._base import some_points
from ._fixed_grid import FixedGrid
from ._flow import AbstractStochasticFlow, centre_and_scale

TIMES = 512  # random times, one in each of as many equal intervals
POINTS = 8
MAX_SHARE = 0.99  # of the variance that may be unseen


def unresolved_in_time(flow: AbstractStochasticFlow, points: Array) -> float:
    """How far coefficients that depend on time move log p by what solver and driver do not see, in nats.

    The solver sees coefficients at its nodes. Between them they are interpolated, by the polynomial through
    the nodes of a step, and compared with their values at random times: a pulse of 1/500 of the horizon is
    found. A shift of δ standard deviations counts δ nats, and a share ε of the variance that is not seen
    counts −½ log(1 − ε). What the driver's functions leave out of the variance of ∫ σ(t) dB counts likewise.
    It is 0 for coefficients that do not depend on time.

    **Arguments:** `points`, shape `(k, d)`: where coefficients are evaluated, at the first eight.
    """
    sde, z = flow.sde, jnp.asarray(points)[:POINTS]
    if not depends_on(lambda t: (sde.drift(t, z[0]), sde.noise(t, z[0])), jnp.zeros((), z.dtype)):
        return 0.0
    nodes, times, weights = _nodes(flow)
    return float(_unresolved(flow, z, *(jnp.asarray(a, z.dtype) for a in (nodes, times, weights))))


def _nodes(flow: AbstractStochasticFlow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The solver's nodes `(N, k)`, step by step, random times `(N, r)` in each step, all in units of the
    horizon, and weights `(N, r, k)` that interpolate between nodes."""
    grid = flow.integrator if isinstance(flow.integrator, FixedGrid) else FixedGrid(steps=16)
    path = flow.driver.path(jnp.zeros((flow.driver.num_functions, flow.noise_dimension)))
    edges = np.asarray(grid.grid(path, None), float)
    tableau: Any = grid.method.tableau
    assert isinstance(tableau, diffrax.ButcherTableau)
    inner = np.unique(np.round(np.concatenate([[0.0, 1.0], tableau.c]), 12))
    each = -(-TIMES // (len(edges) - 1))
    share = (np.arange(each) + np.random.default_rng(0).uniform(size=(len(edges) - 1, each))) / each
    place = lambda inside: edges[:-1, None] + np.diff(edges)[:, None] * inside
    # Lagrange's polynomials through the nodes of a step.
    gaps = share[..., None, None] - inner[None, None, None, :]
    same = np.eye(len(inner), dtype=bool)
    factors = gaps / np.where(same, 1.0, inner[:, None] - inner[None, :])
    weights = np.prod(np.where(same, 1.0, factors), axis=-1)
    return place(inner[None]), place(share), weights


@functools.partial(jit, level=0)
def _unresolved(flow: AbstractStochasticFlow, z: Array, nodes: Array, times: Array, weights: Array) -> Array:
    horizon = jnp.asarray(flow.t1, z.dtype)
    base = jnp.var(some_points(flow.base, flow.dimension), axis=0).astype(z.dtype)
    _, _, scale = centre_and_scale(flow.sde, flow.base, flow.dimension, horizon, z.dtype)
    lengths = jnp.broadcast_to((nodes[:, -1:] - nodes[:, :1]) / times.shape[1], times.shape) * horizon

    def one(point: Array) -> Array:
        coefficients = jax.vmap(jax.vmap(lambda s: _coefficients(flow.sde, s * horizon, point)))
        (drift, sigma), (seen_drift, seen_sigma) = coefficients(times), coefficients(nodes)
        between = lambda seen: jnp.einsum("srk,sk...->sr...", weights, seen)
        square = lambda sigma: jnp.sum(sigma**2, axis=-1)
        total = lambda values: jnp.einsum("sr,srd->d", lengths, values)
        shift = total(drift - between(seen_drift))
        change = total(square(sigma) - square(between(seen_sigma)))
        variance = base + total(square(sigma))
        variance = jnp.where(variance > 0, variance, scale**2)
        share = (jnp.abs(change) + _variance_lost(flow, times, lengths, sigma)) / variance
        nats = jnp.abs(shift) / jnp.sqrt(variance) - 0.5 * jnp.log1p(-jnp.minimum(share, MAX_SHARE))
        return jnp.max(nats)

    return jnp.max(jax.vmap(one)(z))


def _coefficients(sde: AbstractSDE, t: Array, z: Array) -> tuple[Array, Array]:
    return sde.drift(t, z), noise_matrix(sde.noise(t, z))


def _variance_lost(flow: AbstractStochasticFlow, times: Array, lengths: Array, sigma: Array) -> Array:
    """By how much the variance `(d,)` of ∫ σ(t) dB on paths of the driver falls short, beyond what it does
    for the mean of σ."""
    functions = jnp.eye(flow.driver.num_functions, dtype=sigma.dtype)[..., None]
    path = flow.driver.path(functions, flow.t1)
    slopes = jax.vmap(jax.vmap(lambda s: path.unit_slope(s)[:, 0]))(times) / flow.t1  # (N, r, n)
    mean = jnp.einsum("sr,srdm->dm", lengths, sigma) / jnp.sum(lengths)
    rest = sigma - mean[None, None]
    project = lambda part: jnp.einsum("sr,srn,srdm->ndm", lengths, slopes, part)
    constant, varying = project(jnp.broadcast_to(mean, sigma.shape)), project(rest)
    true = jnp.einsum("sr,srdm->d", lengths, rest**2)
    return jnp.abs(true - jnp.sum(varying**2, axis=(0, 2)) - 2 * jnp.sum(constant * varying, axis=(0, 2)))
