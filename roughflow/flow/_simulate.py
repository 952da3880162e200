"""Simulation of an SDE on a fine grid: samples and trajectories without densities."""

import math
from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

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
from ..sde import (
    AbstractSDE,
    AbstractStratonovichSDE,
    check_sde,
    noise_dimension,
    noise_matrix,
)
from ._schemes import AbstractScheme, Davie, EulerMaruyama, StratonovichHeun


def simulate(
    sde: AbstractSDE,
    z0: Array,
    *,
    key: PRNGKeyArray | None = None,
    t0: float = 0.0,
    t1: float = 1.0,
    steps: int = 1000,
    scheme: AbstractScheme | None = None,
    increments: Array | None = None,
    path: RoughPath | None = None,
    trajectory: bool = False,
    saveat: ArrayLike | None = None,
) -> Array:
    """Simulate dZ = μ dt + σ dB from `z0` at time `t0` to time `t1` in `steps` equal steps.

    **Arguments:**

    - `sde`: an Itô or Stratonovich SDE; the scheme converts the drift if necessary.
    - `z0`: shape `(..., d)`, one start per sample.
    - `scheme`: `rf.flow.EulerMaruyama()`, the default for an Itô SDE; `rf.flow.StratonovichHeun()`, the
      default for a Stratonovich one; `rf.flow.StratonovichMidpoint()`; `rf.flow.Milstein()` for commutative
      noise; `rf.flow.Davie()` for any noise, with Lévy areas; `rf.flow.LinearlyImplicitEuler()` for stiff
      drifts.
    - `increments`: Brownian increments of shape `(..., steps, m)` to use instead of a `key`.
    - `path`: a rough path of batch shape `(...)` for `rf.flow.Davie()`, instead of a `key`; its times replace
      `t1` and `steps`. A Stratonovich SDE requires a geometric path, an Itô SDE the Itô lift.
    - `trajectory`: return the whole trajectory, shape `(..., steps + 1, d)`, instead of Z at t1. Time is the
      second-last axis, as in `rf.sample_chain`.
    - `saveat`: increasing output times between `t0` and `t1`, shape `(k,)`; Z is returned at these times,
      shape `(..., k, d)`. An output time inside a step splits this step.

    The result is differentiable; each step is recomputed in the backward pass.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), t1=5.0, steps=500)
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), t1=5.0, saveat=[1.0, 2.5])
    z.shape  # (100, 2, 2)
    ```
    """
    check_sde(sde)
    check_number("t0", t0)
    check_number("t1", t1, above=t0)
    check_flag("trajectory", trajectory)
    if scheme is not None:
        check_instance("scheme", scheme, AbstractScheme, "a scheme such as rf.flow.EulerMaruyama()")
    z0 = jnp.asarray(as_real("z0", z0))
    z0 = z0 if jnp.issubdtype(z0.dtype, jnp.floating) else z0.astype(float)
    if not z0.ndim:
        raise ValueError("z0 must have shape (..., d), got ()")
    check_finite("z0", z0)
    columns = noise_dimension(sde, z0.shape[-1], f"z0 has dimension {z0.shape[-1]}")
    batch, times, saved = z0.shape[:-1], None, None
    if saveat is not None:
        if path is not None or increments is not None or isinstance(scheme, Davie) or trajectory:
            raise ValueError("saveat cannot be combined with increments, path, trajectory or rf.flow.Davie()")
        times, saved = _output_grid(saveat, t0, t1, check_count("steps", steps))
        steps = len(times) - 1
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
        lengths = np.full(steps, (t1 - t0) / steps) if times is None else np.diff(times)
        noise = _drawn(sde, scheme, check_key(key), (*batch, steps, columns), lengths, z0.dtype)
    if scheme is None:
        scheme = StratonovichHeun() if isinstance(sde, AbstractStratonovichSDE) else EulerMaruyama()
    if z0.size and not is_traced(z0):
        scheme.check(sde, jnp.reshape(z0, (-1, z0.shape[-1]))[0])
    count = noise[0].shape[len(batch)]
    times = t0 + (t1 - t0) / count * np.arange(count + 1) if times is None else times
    # Differences are taken before rounding, which would change them far from time zero.
    lengths = jnp.diff(times) if isinstance(times, jax.Array) else np.diff(times)
    times, lengths = jnp.asarray(times, z0.dtype)[:-1], jnp.asarray(lengths, z0.dtype)
    noise = jax.tree.map(lambda a: jnp.moveaxis(jnp.asarray(a, z0.dtype), len(batch), 0), noise)
    z = _simulate(sde, z0, times, lengths, scheme, noise, trajectory or saved is not None)
    return z if saved is None else z[..., saved, :]


def _output_grid(saveat: ArrayLike, t0: float, t1: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The times of the steps, which include the output times, and the indices of the output times."""
    # This uses double precision, because in single precision the last time could be rounded to a time after
    # t1.
    saveat = np.asarray(as_real("saveat", saveat), float)
    check_finite("saveat", saveat)
    if saveat.ndim != 1 or not saveat.size or np.any(np.diff(saveat) <= 0):
        raise ValueError(f"saveat must contain increasing times, shape (k,), got shape {saveat.shape}")
    if saveat[0] < t0 or saveat[-1] > t1:
        raise ValueError(
            f"saveat must lie between t0={t0:g} and t1={t1:g}, got {saveat[0]:g} to {saveat[-1]:g}"
        )
    times = np.union1d(np.linspace(t0, t1, steps + 1), saveat)
    return times, np.searchsorted(times, saveat)


def _drawn(
    sde: AbstractSDE,
    scheme: AbstractScheme | None,
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    lengths: np.ndarray,
    dtype: np.dtype,
) -> tuple[Array, ...]:
    """Brownian increments `(..., steps, m)` over steps of the given lengths, and areas if the scheme needs
    them."""
    *batch, steps, columns = shape
    if isinstance(scheme, Davie):
        options = {"noise_dimension": columns, "shape": tuple(batch), "t1": float(np.sum(lengths))}
        rough = brownian_lift(steps, key=key, num_functions=scheme.num_functions, **options)
        rough = rough if isinstance(sde, AbstractStratonovichSDE) else rough.ito()
        return rough.increments, rough.areas
    # Normal variables are drawn with time as the first axis.
    normal = jax.random.normal(key, (steps, *batch, columns), dtype)
    size = np.sqrt(lengths).reshape(steps, *[1] * (normal.ndim - 1))
    return (jnp.moveaxis(jnp.asarray(size, dtype) * normal, 0, -2),)


def _check_path(
    sde: AbstractSDE, path: RoughPath, scheme: AbstractScheme | None, expected: tuple
) -> AbstractScheme:
    check_instance("path", path, RoughPath, "an rf.rough.RoughPath, such as the result of rf.rough.lift")
    if scheme is not None and not isinstance(scheme, Davie):
        raise ValueError(f"a rough path requires scheme=rf.flow.Davie(), not {type(scheme).__name__}")
    shape = path.increments.shape
    if (*shape[:-2], *shape[-1:]) != (*expected[:-2], *expected[-1:]):
        raise ValueError(f"path must have increments of shape {expected}, got {shape}")
    if isinstance(sde, AbstractStratonovichSDE) != path.geometric:
        remedy = "rf.to_stratonovich(sde), or for Brownian motion path.ito()"
        remedy = remedy if path.geometric else "rf.to_ito(sde), or path.stratonovich()"
        kind = "a geometric rough path" if path.geometric else "the Itô lift"
        message = f"{kind} does not match {type(sde).__name__}: use {remedy}"
        raise ValueError(message + see("other-drivers"))
    return scheme or Davie()


@jit
def _simulate(
    sde: AbstractSDE,
    z0: Array,
    times: Array,
    lengths: Array,
    scheme: AbstractScheme,
    noise: tuple[Array, ...],
    trajectory: bool,
) -> Array:
    """Scan over the steps, which begin at `times` and have these `lengths`; `noise` has increments
    `(steps, ..., m)` and possibly areas."""
    steps = noise[0].shape[0]
    batch = z0.shape[:-1]
    z0 = jnp.reshape(z0, (-1, z0.shape[-1]))
    flat = lambda a: jnp.reshape(a, (steps, z0.shape[0], *a.shape[1 + len(batch) :]))

    def step(z: Array, inputs: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array | None]:
        t, dt, noise = inputs
        advance: Callable = lambda y, parts: scheme.step(sde, t, dt, y, *parts)
        z = jax.vmap(advance)(z, noise)
        return z, z if trajectory else None

    inputs = (times, lengths, jax.tree.map(flat, noise))
    last, states = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), z0, inputs)
    if not trajectory:
        return jnp.reshape(last, (*batch, -1))
    whole = jnp.swapaxes(jnp.concatenate([z0[None], states]), 0, 1)
    return jnp.reshape(whole, (*batch, steps + 1, z0.shape[-1]))


def to_diffrax(sde: AbstractSDE, control: diffrax.AbstractPath) -> diffrax.MultiTerm:
    """The SDE as terms for `diffrax.diffeqsolve`, driven by `control`: a path with values of shape `(m,)`,
    for example a `diffrax.VirtualBrownianTree`.

    The calculus depends on the solver: use an Itô solver (`diffrax.Euler`) for an Itô SDE and a Stratonovich
    solver (`diffrax.Heun`) for a Stratonovich SDE, or convert the SDE first.

    ```python
    import diffrax, jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    brownian = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-3, shape=(2,), key=jax.random.key(0))
    terms = rf.to_diffrax(sde, brownian)
    diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, dt0=0.01, y0=jnp.zeros(2)).ys  # shape (1, 2)
    ```
    """
    check_sde(sde)
    return diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, z, args: sde.drift(jnp.asarray(t), z)),
        diffrax.ControlTerm(lambda t, z, args: noise_matrix(sde.noise(jnp.asarray(t), z)), control),
    )
