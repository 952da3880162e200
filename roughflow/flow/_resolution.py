"""The number of steps that a flow needs, and a test for coefficients that vary faster in time than the
steps."""

import functools
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, check_count, check_instance, check_key, check_positive, check_vector
from .._programs import jit
from ..driver import Path
from ..sde import AbstractSDE, depends_on, noise_matrix
from ._base_distribution import some_points
from ._fixed_grid import CountedGrid, FixedGrid
from ._flow import AbstractStochasticFlow, centre_and_scale

# Acceptable discretisation error of log p(x | path), in nats. Without noise this is the only error; with
# noise the Monte Carlo and truncation errors are far larger.
STILL_TOLERANCE, NOISY_TOLERANCE = 1e-5, 5e-4
MIN_STEPS, MAX_STEPS = 2, 64  # in total, or between two jumps of the slope of the path
MAX_POINTS = 256  # maximum number of points at which the error is measured


def tune_steps(
    flow: AbstractStochasticFlow,
    x: Array,
    *,
    key: PRNGKeyArray,
    tolerance: float | None = None,
    min_steps: int = MIN_STEPS,
) -> AbstractStochasticFlow:
    """The flow with the smallest number of steps of its `rf.FixedGrid` for which log p(x | path) has
    converged.

    Converged means that the root mean square change of this value when the number of steps is doubled, over
    points x with one path each, is below the tolerance. A flow changes during training, so call this function
    again from time to time. The flow is returned unchanged if 64 steps are not enough or if its integrator is
    not an `rf.FixedGrid`.

    **Arguments:**

    - `x`: points `(k, d)`, of which up to 256 are used.
    - `tolerance`: in nats; by default 1e-5 without noise, where the discretisation error is the only one, and
      5e-4 otherwise.
    - `min_steps`: initial number of steps.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    flow = rf.StochasticFlow(rf.ItoSDE(rf.MLP(2, 2, key=key), rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    rf.flow.tune_steps(flow, jax.random.normal(key, (100, 2)), key=key).integrator.steps
    ```
    """
    check_instance("flow", flow, AbstractStochasticFlow, "an rf.StochasticFlow")
    check_vector("x", as_real("x", x), flow.dimension)
    check_count("min_steps", min_steps)
    steps = sufficient_steps(flow, jnp.asarray(x), key, tolerance, min_steps)
    return flow if steps is None else with_steps(flow, steps)


def sufficient_steps(
    flow: AbstractStochasticFlow, x: Array, key: PRNGKeyArray, tolerance: float | None, min_steps: int
) -> int | None:
    """The smallest sufficient number of steps; None if MAX_STEPS are not enough."""
    grid = flow.integrator
    if not isinstance(grid, FixedGrid):
        return None
    tolerance = (
        (NOISY_TOLERANCE if flow.noise_dimension else STILL_TOLERANCE) if tolerance is None else tolerance
    )
    check_positive("tolerance", tolerance)
    key_path, key_solve = jax.random.split(check_key(key))
    x = x[:MAX_POINTS]
    path = flow.sample_path(key=key_path, shape=x.shape[:1])
    pieces = flow.driver.jumps.size + 1
    value = lambda each: np.asarray(_values(flow, jnp.asarray(each), x, path, key_solve))
    each, coarse = max(1, -(-min_steps // pieces)), None
    while each <= MAX_STEPS:
        coarse = value(each) if coarse is None else coarse
        fine = value(2 * each)
        if _change(coarse, fine) <= tolerance:
            between = range(max(-(-min_steps // pieces), each // 2 + 1), each)
            fewer = (count for count in between if _change(value(count), fine) <= tolerance)
            return pieces * next(fewer, each)
        each, coarse = 2 * each, fine
    return None


def with_steps(flow: AbstractStochasticFlow, steps: int) -> AbstractStochasticFlow:
    """The flow with another number of steps of its fixed grid."""
    assert isinstance(flow.integrator, FixedGrid)
    return eqx.tree_at(lambda flow: flow.integrator, flow, flow.integrator.with_steps(steps))


def _change(coarse: np.ndarray, fine: np.ndarray) -> float:
    """The root mean square difference, clipped at one nat. A point with a finite value in only one of the
    arrays counts as a difference of one nat. Points with no finite value are ignored; if these are the
    majority, the result is infinite."""
    lost = ~np.isfinite(coarse), ~np.isfinite(fine)
    if np.mean(lost[0] & lost[1]) > 0.5:
        return np.inf
    with np.errstate(invalid="ignore"):
        change = np.where(lost[0] & lost[1], 0.0, np.abs(coarse - fine))
    return float(np.sqrt(np.mean(np.where(change < 1, change, 1.0) ** 2)))


@jit
def _values(flow: AbstractStochasticFlow, each: Array, x: Array, path: Path, key: PRNGKeyArray) -> Array:
    grid = flow.integrator
    assert isinstance(grid, FixedGrid)
    flow = eqx.tree_at(lambda flow: flow.integrator, flow.without_errors(), CountedGrid.of(grid, each))
    return flow.log_prob_given_path(x, path, key=key)


NUM_TIMES = 512  # number of random times, one in each of NUM_TIMES equal intervals
TIME_POINTS = 8  # number of points at which coefficients are evaluated
MAX_SHARE = 0.99  # maximum fraction of variance that may be missed


def unresolved_in_time(flow: AbstractStochasticFlow, points: Array) -> float:
    """An estimate of the error of log p, in nats, due to time-dependent coefficients that the solver and the
    driver do not resolve.

    The solver evaluates the coefficients only at its nodes. The polynomial through the nodes of a step is
    compared with the coefficients at random times, which detects a pulse as short as 1/500 of the horizon. A
    shift of δ standard deviations counts as δ nats, and a missed fraction ε of the variance as −½ log(1 − ε).
    The same holds for the variance of ∫ σ(t) dB that the functions of the driver miss. The result is 0 for
    coefficients that do not depend on time.

    The coefficients are evaluated at the first eight of the `points`, which have shape `(k, d)`.
    """
    sde, z = flow.sde, jnp.asarray(points)[:TIME_POINTS]
    if not depends_on(lambda t: (sde.drift(t, z[0]), sde.noise(t, z[0])), jnp.zeros((), z.dtype)):
        return 0.0
    nodes, times, weights = _nodes(flow)
    return float(_unresolved(flow, z, *(jnp.asarray(a, z.dtype) for a in (nodes, times, weights))))


def _nodes(flow: AbstractStochasticFlow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nodes of the solver in each step, `(N, k)`, and random times in each step, `(N, r)`, both in units
    of the horizon; and weights `(N, r, k)` that interpolate between the nodes."""
    grid = flow.integrator if isinstance(flow.integrator, FixedGrid) else FixedGrid(steps=16)
    path = flow.driver.path(jnp.zeros((flow.driver.num_functions, flow.noise_dimension)))
    edges = np.asarray(grid.grid(path, None), float)
    tableau: Any = grid.solver.tableau
    assert isinstance(tableau, diffrax.ButcherTableau)
    inner = np.unique(np.round(np.concatenate([[0.0, 1.0], tableau.c]), 12))
    each = -(-NUM_TIMES // (len(edges) - 1))
    share = (np.arange(each) + np.random.default_rng(0).uniform(size=(len(edges) - 1, each))) / each
    place = lambda inside: edges[:-1, None] + np.diff(edges)[:, None] * inside
    # Lagrange polynomials through the nodes of a step.
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
    """The variance `(d,)` of ∫ σ(t) dB that paths of the driver lack, beyond what they would lack if σ were
    constant at its mean over time."""
    functions = jnp.eye(flow.driver.num_functions, dtype=sigma.dtype)[..., None]
    path = flow.driver.path(functions, flow.t1)
    slopes = jax.vmap(jax.vmap(lambda s: path.unit_slope(s)[:, 0]))(times) / flow.t1  # (N, r, n)
    mean = jnp.einsum("sr,srdm->dm", lengths, sigma) / jnp.sum(lengths)
    rest = sigma - mean[None, None]
    project = lambda part: jnp.einsum("sr,srn,srdm->ndm", lengths, slopes, part)
    constant, varying = project(jnp.broadcast_to(mean, sigma.shape)), project(rest)
    true = jnp.einsum("sr,srdm->d", lengths, rest**2)
    return jnp.abs(true - jnp.sum(varying**2, axis=(0, 2)) - 2 * jnp.sum(constant * varying, axis=(0, 2)))
