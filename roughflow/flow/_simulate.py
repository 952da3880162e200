"""Plain simulation of an SDE on a fine grid: samples and trajectories, no densities."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key, check_positive, is_traced
from .._programs import jit
from ..faq import see
from ..sde import (
    AbstractSDE,
    AbstractStratonovichSDE,
    ExactCorrection,
    apply_noise,
    noise_dimension,
    noise_matrix,
    stratonovich_coefficients,
)


class AbstractScheme(eqx.Module):
    """One step of a simulation: from z at t over dt, with the Brownian increment over it."""

    @abc.abstractmethod
    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        """The next state of one sample, shape `(d,)`."""


class EulerMaruyama(AbstractScheme):
    """z + μ dt + σ ΔB with the Itô drift μ. Strong order ½, or 1 if the noise is additive.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=rf.EulerMaruyama())
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        if isinstance(sde, AbstractStratonovichSDE):
            sigma, correction = ExactCorrection()(lambda y: sde.noise(t, y), z, None)
            drift = sde.drift(t, z) + correction
        else:
            drift, sigma = sde.drift(t, z), sde.noise(t, z)
        return z + drift * dt + apply_noise(sigma, increment)


class StratonovichHeun(AbstractScheme):
    """Heun's method on μ̃ dt + σ ΔB with the Stratonovich drift μ̃.

    Strong order 1 if the noise is commutative (one noise, diagonal, additive), ½ otherwise.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=rf.StratonovichHeun())
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        first = _slope(sde, t, dt, z, increment)
        second = _slope(sde, t + dt, dt, z + first, increment)
        return z + 0.5 * (first + second)


class StratonovichMidpoint(AbstractScheme):
    """The midpoint rule on μ̃ dt + σ ΔB; strong orders as for `StratonovichHeun`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    scheme = rf.StratonovichMidpoint()
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=scheme)
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        half = z + 0.5 * _slope(sde, t, dt, z, increment)
        return z + _slope(sde, t + 0.5 * dt, dt, half, increment)


class Milstein(AbstractScheme):
    """z + μ̃ dt + σ ΔB + ½ D[σ(·) ΔB] (σ ΔB): strong order 1, for commutative noise.

    This is Milstein's scheme, Σⱼₖ (Dσⱼ) σₖ ½(ΔBⱼ ΔBₖ − δⱼₖ dt) added to Euler–Maruyama, in which
    the δ term turns the Itô drift into the Stratonovich drift μ̃. Noise that does not commute needs
    Lévy areas, and is refused.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.diag(1 + z**2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=rf.Milstein())
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        drift, sigma = stratonovich_coefficients(sde, ExactCorrection(), t, z, None)
        kick = apply_noise(sigma, increment)
        _, bend = jax.jvp(lambda y: apply_noise(sde.noise(t, y), increment), (z,), (kick,))
        return z + drift * dt + kick + 0.5 * bend


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
      Stratonovich one; `rf.StratonovichMidpoint()`; `rf.Milstein()` for commutative noise.
    - `increments`: Brownian increments of shape `(steps, ..., m)` to use instead of a `key`.
    - `trajectory`: return the whole trajectory, shape `(steps + 1, ..., d)`, instead of Z at t1.

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
    noise_dim = noise_dimension(sde, z0.shape[-1])
    if increments is None:
        if key is None:
            raise TypeError("simulate needs key=jax.random.key(seed), or increments" + see("keys"))
        check_positive("steps", steps)
        shape = (steps, *z0.shape[:-1], noise_dim)
        increments = jnp.sqrt(t1 / steps) * jax.random.normal(check_key(key), shape, z0.dtype)
    increments = jnp.asarray(increments)
    if increments.shape[1:] != (*z0.shape[:-1], noise_dim):
        expected = ("steps", *z0.shape[:-1], noise_dim)
        raise ValueError(f"increments must have shape {expected}, got {increments.shape}")
    if scheme is None:
        scheme = StratonovichHeun() if isinstance(sde, AbstractStratonovichSDE) else EulerMaruyama()
    if isinstance(scheme, Milstein) and not is_traced(z0):
        # At the start, and at a point in no special position.
        first = jnp.reshape(z0, (-1, z0.shape[-1]))[0]
        _check_commutative(sde, first)
        _check_commutative(sde, first + 0.1 * jnp.sqrt(1.0 + jnp.arange(first.size, dtype=first.dtype)))
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
    return jnp.reshape(jnp.concatenate([z0[None], states]), (steps + 1, *batch, z0.shape[-1]))


def _slope(sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
    drift, sigma = stratonovich_coefficients(sde, ExactCorrection(), t, z, None)
    return drift * dt + apply_noise(sigma, increment)


def _check_commutative(sde: AbstractSDE, z: Array) -> None:
    """Refuse noise whose columns' vector fields do not commute at z: (Dσⱼ) σₖ ≠ (Dσₖ) σⱼ."""
    t = jnp.zeros((), z.dtype)
    sigma, tangent = jax.linearize(lambda y: noise_matrix(sde.noise(t, y)), z)
    products = jax.vmap(tangent, in_axes=1)(sigma)  # [k, i, j]: (Dσⱼ σₖ)ᵢ
    gap = jnp.max(jnp.abs(products - jnp.swapaxes(products, 0, 2)))
    if float(gap) > 1e-4 * (1 + float(jnp.max(jnp.abs(products)))):
        raise ValueError(
            "Milstein needs commutative noise, and this diffusion's columns do not commute; "
            "use rf.StratonovichHeun() or rf.EulerMaruyama()" + see("refused-methods")
        )
