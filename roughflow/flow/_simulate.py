"""Plain simulation of an SDE on a fine grid: samples and trajectories, no densities."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    as_real,
    check_count,
    check_finite,
    check_flag,
    check_instance,
    check_key,
    check_memory,
    check_number,
    is_traced,
)
from .._programs import jit
from ..faq import see
from ..rough import RoughPath, brownian_lift
from ..sde import AbstractSDE, AbstractStratonovichSDE, check_sde, noise_dimension
from ._schemes import AbstractScheme, Davie, EulerMaruyama, StratonovichHeun


def simulate(
    sde: AbstractSDE,
    z0: Array,
    *,
    key: PRNGKeyArray | None = None,
    t1: float = 1.0,
    steps: int = 1000,
    scheme: AbstractScheme | None = None,
    increments: Array | None = None,
    path: RoughPath | None = None,
    trajectory: bool = False,
) -> Array:
    """Simulate dZ = μ dt + σ dB from `z0` to `t1` on `steps` equal steps.

    **Arguments:**

    - `sde`: in either calculus; every scheme converts the drift it needs.
    - `z0`: shape `(..., d)`, one start per sample.
    - `scheme`: `rf.EulerMaruyama()`, the default for an Itô SDE; `rf.StratonovichHeun()`, the default for a
      Stratonovich one; `rf.StratonovichMidpoint()`; `rf.Milstein()` for commutative noise;
      `rf.Davie()` for any, with Lévy areas; `rf.LinearlyImplicitEuler()` for stiff drifts.
    - `increments`: Brownian increments of shape `(..., steps, m)` to use instead of a `key`.
    - `path`: a rough path of batch shape `(...)` to follow by `rf.Davie()` instead of a `key`; its times take
      the place of `t1` and `steps`. A Stratonovich SDE takes a geometric one, an Itô SDE the Itô lift.
    - `trajectory`: return the whole trajectory, shape `(..., steps + 1, d)`, instead of Z at t1. Time is the
      axis before the last, as it is in the chains of `rf.sample_chain`.

    Differentiable, with each step recomputed in the backward pass.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), t1=5.0, steps=500)
    ```
    """
    check_sde(sde)
    check_number("t1", t1, above=0)
    check_flag("trajectory", trajectory)
    if scheme is not None:
        check_instance("scheme", scheme, AbstractScheme, "a scheme such as rf.EulerMaruyama()")
    z0 = jnp.asarray(as_real("z0", z0))
    z0 = z0 if jnp.issubdtype(z0.dtype, jnp.floating) else z0.astype(float)
    if not z0.ndim:
        raise ValueError("z0 must have shape (..., d), got ()")
    check_finite("z0", z0)
    columns = noise_dimension(sde, z0.shape[-1], f"z0 has dimension {z0.shape[-1]}")
    batch, times = z0.shape[:-1], None
    if path is not None:
        scheme = _check_path(sde, path, scheme, (*batch, "steps", columns))
        times, noise = path.times, (path.increments, path.areas)
    elif increments is not None:
        noise = (jnp.asarray(as_real("increments", increments)),)
        if (*noise[0].shape[:-2], *noise[0].shape[-1:]) != (*batch, columns):
            expected = (*batch, "steps", columns)
            raise ValueError(f"increments must have shape {expected}, got {noise[0].shape}")
    elif key is None:
        raise TypeError("simulate needs key=jax.random.key(seed), increments, or a path" + see("keys"))
    else:
        check_memory(f"steps={steps}", check_count("steps", steps) * math.prod(batch) * max(columns, 1))
        noise = _drawn(sde, scheme, check_key(key), (*batch, steps, columns), t1, z0.dtype)
    if scheme is None:
        scheme = StratonovichHeun() if isinstance(sde, AbstractStratonovichSDE) else EulerMaruyama()
    if z0.size and not is_traced(z0):
        scheme.check(sde, jnp.reshape(z0, (-1, z0.shape[-1]))[0])
    count = noise[0].shape[len(batch)]
    times = jnp.asarray(t1 / count, z0.dtype) * jnp.arange(count + 1) if times is None else times
    noise = jax.tree.map(lambda a: jnp.moveaxis(jnp.asarray(a, z0.dtype), len(batch), 0), noise)
    return _simulate(sde, z0, times, scheme, noise, trajectory)


def _drawn(
    sde: AbstractSDE,
    scheme: AbstractScheme | None,
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    t1: float,
    dtype: np.dtype,
) -> tuple[Array, ...]:
    """Brownian increments `(..., steps, m)` and, for a scheme that needs them, areas."""
    *batch, steps, columns = shape
    if isinstance(scheme, Davie):
        options = {"noise_dimension": columns, "shape": tuple(batch), "t1": t1}
        rough = brownian_lift(steps, key=key, num_functions=scheme.num_functions, **options)
        rough = rough if isinstance(sde, AbstractStratonovichSDE) else rough.ito()
        return rough.increments, rough.areas
    # Drawn with time first.
    normal = jax.random.normal(key, (steps, *batch, columns), dtype)
    return (jnp.sqrt(t1 / steps) * jnp.moveaxis(normal, 0, -2),)


def _check_path(
    sde: AbstractSDE, path: RoughPath, scheme: AbstractScheme | None, expected: tuple
) -> AbstractScheme:
    check_instance("path", path, RoughPath, "an rf.RoughPath, as rf.lift makes it of a smooth path")
    if scheme is not None and not isinstance(scheme, Davie):
        raise ValueError(f"a rough path is followed by rf.Davie(), not by {type(scheme).__name__}")
    shape = path.increments.shape
    if (*shape[:-2], *shape[-1:]) != (*expected[:-2], *expected[-1:]):
        raise ValueError(f"path must have increments of shape {expected}, got {shape}")
    if isinstance(sde, AbstractStratonovichSDE) != path.geometric:
        remedy = "rf.to_stratonovich(sde), or for Brownian motion path.ito()"
        remedy = remedy if path.geometric else "rf.to_ito(sde), or path.stratonovich()"
        kind = "a geometric rough path" if path.geometric else "the Itô lift"
        told = f"{kind} gives {type(sde).__name__} another meaning: give {remedy}"
        raise ValueError(told + see("other-drivers"))
    return scheme or Davie()


@jit
def _simulate(
    sde: AbstractSDE,
    z0: Array,
    times: Array,
    scheme: AbstractScheme,
    noise: tuple[Array, ...],
    trajectory: bool,
) -> Array:
    """`noise` has increments `(steps, ..., m)` here, as the scan reads them, and maybe areas."""
    steps = noise[0].shape[0]
    batch = z0.shape[:-1]
    z0 = jnp.reshape(z0, (-1, z0.shape[-1]))
    flat = lambda a: jnp.reshape(a, (steps, z0.shape[0], *a.shape[1 + len(batch) :]))

    def step(z: Array, inputs: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array | None]:
        t, dt, noise = inputs
        advance: Callable = lambda y, parts: scheme.step(sde, t, dt, y, *parts)
        z = jax.vmap(advance)(z, noise)
        return z, z if trajectory else None

    inputs = (times[:-1], jnp.diff(times), jax.tree.map(flat, noise))
    last, states = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), z0, inputs)
    if not trajectory:
        return jnp.reshape(last, (*batch, -1))
    whole = jnp.swapaxes(jnp.concatenate([z0[None], states]), 0, 1)
    return jnp.reshape(whole, (*batch, steps + 1, z0.shape[-1]))
