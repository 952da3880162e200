"""One solve of a flow for any batch of points and paths: checks, one leading axis, the integrator."""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    as_real,
    check_finite,
    check_instance,
    check_key,
    check_positive,
    check_vector,
    is_traced,
)
from .._programs import jit
from ..driver import Path
from ..faq import see
from ..sde import with_explicit_parameters
from ._base import some_point
from ._field import Field, draw, signs, split
from ._outcome import Outcome, Status, failed, raise_failures

if TYPE_CHECKING:
    from ._flow import StochasticFlow


def solve(
    flow: "StochasticFlow",
    z: Array,
    path: Path,
    t1: float | Array | None,
    key: PRNGKeyArray | None,
    reverse: bool,
) -> Outcome:
    """From z along the path, up to `t1` where it is given, with what became of each sample."""
    name = "x" if reverse else "z"
    z = jnp.asarray(as_real(name, z))
    _check(flow, name, z, path, t1, key)
    # The one place where batches are formed: everything below sees one leading axis.
    stops = () if t1 is None else jnp.shape(t1)
    batch = jnp.broadcast_shapes(z.shape[:-1], path.batch_shape, stops)
    flat = math.prod(batch)
    dtype = jnp.result_type(z.dtype, path.coefficients.dtype)
    points = jnp.reshape(jnp.broadcast_to(z, (*batch, flow.dimension)), (flat, flow.dimension))
    path = path.reshape(batch, flat)
    fraction = None
    if t1 is not None:
        t1 = jnp.asarray(t1, dtype)
        t1 = jnp.reshape(jnp.broadcast_to(t1, batch), (flat,)) if t1.ndim else t1
        fraction = t1 / path.t1
    key = _one_for_each(key, batch)
    # Inside a jit a NaN in x could not be refused: the solve goes without it, and it comes out a NaN.
    nan = jnp.any(jnp.isnan(points), axis=-1)
    points = jnp.where(nan[:, None], 0, points).astype(dtype)
    outcome = _integrate(flow, points, path, fraction, key, reverse)
    if flow.raises:
        outcome = raise_failures(outcome, flow.sde, path)
    else:
        nan = nan | failed(outcome)
    outcome = Outcome(
        jnp.where(nan[:, None], jnp.nan, outcome.z),
        jnp.where(nan, jnp.nan, outcome.log_change),
        jnp.where(nan & ~failed(outcome), Status.NON_FINITE, outcome.status),
        outcome.time,
    )
    return jax.tree.map(lambda a: jnp.reshape(a, (*batch, *a.shape[1:])), outcome)


def _one_for_each(key: PRNGKeyArray | None, batch: tuple[int, ...]) -> PRNGKeyArray | None:
    """A single key as it is; keys, one for each sample, along one axis."""
    if key is None or not key.ndim:
        return key
    if key.shape != batch:
        raise TypeError(
            f"key must be a single key, got an array of keys of shape {key.shape}; one key for each "
            f"sample would have shape {batch}{see('keys')}"
        )
    return jnp.reshape(key, (math.prod(batch),))


def _check(
    flow: "StochasticFlow",
    name: str,
    z: Array,
    path: Path,
    t1: float | Array | None,
    key: PRNGKeyArray | None,
) -> None:
    """Refuse what cannot be solved, before anything is compiled."""
    check_path_of_driver(path)
    check_vector(name, z, flow.dimension)
    if path.noise_dimension != flow.noise_dimension:
        raise ValueError(
            f"path coefficients must have shape (..., n, {flow.noise_dimension}) to match the "
            f"diffusion's shape {(flow.dimension, flow.noise_dimension)}, got {path.coefficients.shape}"
        )
    if t1 is not None:
        check_positive("t1", t1)
        known = not is_traced(t1) and not is_traced(path.t1)
        if known and np.any(np.asarray(t1) > np.asarray(path.t1) * (1 + 1e-6)):
            raise ValueError(
                f"t1 must not lie beyond the path's end at {path.t1}, got {t1}: draw a longer one, "
                "flow.sample_path(key=key, t1=...)"
            )
    check_finite(name, z)
    check_finite("path coefficients", path.coefficients)
    if key is not None:
        check_key(key, many=True)


def check_path_of_driver(path: Any) -> None:
    wanted = "what flow.sample_path or driver.path make (driver.project turns any diffrax path into one)"
    check_instance("path", path, Path, wanted)


@jit
def _integrate(
    flow: "StochasticFlow",
    z: Array,
    path: Path,
    fraction: Array | None,
    key: PRNGKeyArray | None,
    reverse: bool,
) -> Outcome:
    keys = (None, None) if key is None else split(key)
    batch = z.shape[:1]
    field = Field(
        sde=with_explicit_parameters(flow.sde, jnp.zeros(flow.dimension, z.dtype)),
        correction=flow.correction,
        divergence=flow.divergence,
        path=path,
        signs=signs(flow.sde, flow.correction, keys[0], batch, flow.noise_dimension),
        probes=draw(flow.divergence, keys[1], batch, flow.dimension),
        safe=some_point(flow.base, flow.dimension).astype(z.dtype),
        escape_rate=flow.integrator.escape_rate,
    )
    return flow.integrator.integrate(field, z, fraction, reverse=reverse)
