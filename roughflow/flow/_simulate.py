"""Plain simulation of an SDE on a fine grid: samples and trajectories, no densities."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key, check_positive, is_traced
from .._programs import jit
from ..faq import see
from ..sde import AbstractSDE, AbstractStratonovichSDE, noise_dimension
from ._schemes import AbstractScheme, EulerMaruyama, StratonovichHeun


def simulate(
    sde: AbstractSDE,
    z0: Array,
    *,
    key: PRNGKeyArray | None = None,
    t1: float = 1.0,
    steps: int = 1000,
    scheme: AbstractScheme | None = None,
    increments: Array | None = None,
    trajectory: bool = False,
) -> Array:
    """Simulate dZ = μ dt + σ dB from `z0` to `t1` on `steps` equal steps.

    **Arguments:**

    - `sde`: in either calculus; every scheme converts the drift it needs.
    - `z0`: shape `(..., d)`, one start per sample.
    - `scheme`: `rf.EulerMaruyama()`, the default for an Itô SDE; `rf.StratonovichHeun()`, the default for a
      Stratonovich one; `rf.StratonovichMidpoint()`; `rf.Milstein()` for commutative noise;
      `rf.LinearlyImplicitEuler()` for stiff drifts.
    - `increments`: Brownian increments of shape `(..., steps, m)` to use instead of a `key`.
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
    check_positive("t1", t1)
    z0 = jnp.asarray(z0)
    z0 = z0 if jnp.issubdtype(z0.dtype, jnp.floating) else z0.astype(float)
    if not z0.ndim:
        raise ValueError("z0 must have shape (..., d), got ()")
    columns = noise_dimension(sde, z0.shape[-1], "z0")
    if increments is None:
        if key is None:
            raise TypeError("simulate needs key=jax.random.key(seed), or increments" + see("keys"))
        check_positive("steps", steps)
        shape = (steps, *z0.shape[:-1], columns)
        increments = jnp.sqrt(t1 / steps) * jax.random.normal(check_key(key), shape, z0.dtype)
    else:
        increments = jnp.asarray(increments)
        if (*increments.shape[:-2], *increments.shape[-1:]) != (*z0.shape[:-1], columns):
            expected = (*z0.shape[:-1], "steps", columns)
            raise ValueError(f"increments must have shape {expected}, got {increments.shape}")
        increments = jnp.moveaxis(increments, -2, 0)
    if scheme is None:
        scheme = StratonovichHeun() if isinstance(sde, AbstractStratonovichSDE) else EulerMaruyama()
    if z0.size and not is_traced(z0):
        scheme.check(sde, jnp.reshape(z0, (-1, z0.shape[-1]))[0])
    return _simulate(sde, z0, t1, scheme, increments, trajectory)


@jit
def _simulate(
    sde: AbstractSDE,
    z0: Array,
    t1: float | Array,
    scheme: AbstractScheme,
    increments: Array,
    trajectory: bool,
) -> Array:
    """`increments` are `(steps, ..., m)` here, as the scan reads them."""
    steps = increments.shape[0]
    dt = jnp.asarray(t1 / steps, z0.dtype)
    batch = z0.shape[:-1]
    z0 = jnp.reshape(z0, (-1, z0.shape[-1]))
    increments = jnp.reshape(increments, (steps, z0.shape[0], -1))

    def step(z: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array | None]:
        t, increment = inputs
        advance: Callable = lambda y, b: scheme.step(sde, t, dt, y, b)
        z = jax.vmap(advance)(z, increment)
        return z, z if trajectory else None

    times = dt * jnp.arange(steps)
    last, states = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), z0, (times, increments))
    if not trajectory:
        return jnp.reshape(last, (*batch, -1))
    whole = jnp.swapaxes(jnp.concatenate([z0[None], states]), 0, 1)
    return jnp.reshape(whole, (*batch, steps + 1, z0.shape[-1]))
