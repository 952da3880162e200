"""Simulation of an SDE on a fine grid (samples and trajectories without densities), and numerical schemes."""

import abc
import math
from collections.abc import Callable

import diffrax
import equinox as eqx
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
from .._linear import solve
from .._programs import jit
from ..faq import see
from ..rough import RoughPath, brownian_lift
from ..sde import (
    AbstractSDE,
    AbstractStratonovichSDE,
    ExactCorrection,
    apply_noise,
    check_sde,
    noise_dimension,
    noise_matrix,
    noise_sizes,
    stratonovich_coefficients,
    to_ito,
)


class AbstractScheme(eqx.Module):
    """A numerical scheme: one step from z at t over dt, given the Brownian increment."""

    @abc.abstractmethod
    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        """The next state of one sample, shape `(d,)`."""

    def check(self, sde: AbstractSDE, z: Array) -> None:
        """Raise an error if the scheme does not support the SDE, which is evaluated at z, shape `(d,)`."""


class EulerMaruyama(AbstractScheme):
    """Euler–Maruyama: z + μ dt + σ ΔB with the Itô drift μ. Strong order ½, or 1 if the noise is additive.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=rf.flow.EulerMaruyama())
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
    """Heun's method for μ̃ dt + σ ΔB with the Stratonovich drift μ̃.

    Strong order 1 if the noise is commutative (one-dimensional, diagonal or additive), ½ otherwise.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    scheme = rf.flow.StratonovichHeun()
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=scheme)
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        first = _slope(sde, t, dt, z, increment)
        second = _slope(sde, t + dt, dt, z + first, increment)
        return z + 0.5 * (first + second)


class StratonovichMidpoint(AbstractScheme):
    """The midpoint rule for μ̃ dt + σ ΔB; strong orders as for `StratonovichHeun`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    scheme = rf.flow.StratonovichMidpoint()
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=scheme)
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        half = z + 0.5 * _slope(sde, t, dt, z, increment)
        return z + _slope(sde, t + 0.5 * dt, dt, half, increment)


class Milstein(AbstractScheme):
    """Milstein's scheme z + μ̃ dt + σ ΔB + ½ D[σ(·) ΔB] (σ ΔB): strong order 1, for commutative noise.

    It adds Σⱼₖ (Dσⱼ) σₖ ½(ΔBⱼ ΔBₖ − δⱼₖ dt) to Euler–Maruyama; the δ term turns the Itô drift into the
    Stratonovich drift μ̃. Noncommutative noise needs Lévy areas and raises an error.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.diag(1 + z**2))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=rf.flow.Milstein())
    ```
    """

    def check(self, sde: AbstractSDE, z: Array) -> None:
        # The noise is checked at the start and at a generic point, about as far away as the noise reaches.
        _check_commutative(sde, z)
        rows = noise_sizes(sde.noise(jnp.zeros((), z.dtype), z))
        size = jnp.where(rows > 0, rows, jnp.where(z == 0, 1, jnp.abs(z)))
        _check_commutative(sde, z + 0.1 * size * jnp.sqrt(1.0 + jnp.arange(z.size, dtype=z.dtype)))

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        drift, sigma = stratonovich_coefficients(sde, ExactCorrection(), t, z, None)
        kick = apply_noise(sigma, increment)
        _, bend = jax.jvp(lambda y: apply_noise(sde.noise(t, y), increment), (z,), (kick,))
        return z + drift * dt + kick + 0.5 * bend


class Davie(AbstractScheme):
    """Davie's scheme z + μ dt + σ X + Σⱼₖ (Dσₖ) σⱼ 𝕏ʲᵏ along a rough path (X, 𝕏): strong order 1 for any
    noise (Davie 2008).

    The drift is not converted: a Stratonovich SDE requires a geometric rough path, an Itô SDE the Itô lift of
    Brownian motion. For commutative noise it is Milstein's scheme, and areas do not matter. Without a path,
    `rf.simulate` draws Brownian motion by `rf.rough.brownian_lift`, with `num_functions` functions for the
    areas.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.StratonovichSDE(lambda t, z: -z, lambda t, z: jnp.array([[1.0, z[1]], [z[0], 1.0]]))
    z = rf.simulate(sde, jnp.zeros((100, 2)), key=jax.random.key(0), steps=50, scheme=rf.flow.Davie())

    path = rf.FractionalBrownian(0.4, 64).sample(key=jax.random.key(0), noise_dimension=2)
    z = rf.simulate(sde, jnp.zeros(2), path=rf.rough.lift(path, 64))
    ```
    """

    num_functions: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        check_count("num_functions", self.num_functions)

    def step(
        self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array, area: Array | None = None
    ) -> Array:
        if area is None:
            raise TypeError("Davie.step needs the areas of a rough path: pass area, or call rf.simulate")
        sigma, products = _products(sde, t, z)
        return z + sde.drift(t, z) * dt + sigma @ increment + jnp.einsum("jik,jk->i", products, area)


class LinearlyImplicitEuler(AbstractScheme):
    """Linearly implicit Euler: z + (I − ½ dt J)⁻¹ (μ dt + σ ΔB), where J is the derivative of the Itô drift μ
    (Rosenbrock).

    On a Gaussian target it preserves the covariance exactly for any dt, like the trapezoidal rule. A step
    costs d derivatives of the drift and a linear solve.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.overdamped_langevin(lambda z: -0.5 * (z[0] ** 2 + 1e4 * z[1] ** 2), 2)
    sampler = rf.UnadjustedSampler(sde, 0.5, rf.flow.LinearlyImplicitEuler())
    chain = rf.sample_chain(sampler, jnp.zeros(2), key=jax.random.key(0), num_steps=100)
    ```
    """

    def step(self, sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
        sde = to_ito(sde)
        drift, slope = sde.drift(t, z), jax.jacfwd(lambda y: sde.drift(t, y))(z)
        move = drift * dt + apply_noise(sde.noise(t, z), increment)
        matrix = jnp.eye(z.shape[0], dtype=z.dtype) - 0.5 * dt * slope
        return z + solve(matrix[None], move[None, :, None])[0, :, 0]


def _slope(sde: AbstractSDE, t: Array, dt: Array, z: Array, increment: Array) -> Array:
    drift, sigma = stratonovich_coefficients(sde, ExactCorrection(), t, z, None)
    return drift * dt + apply_noise(sigma, increment)


def _products(sde: AbstractSDE, t: Array, z: Array) -> tuple[Array, Array]:
    """σ `(d, m)`, and (Dσₖ σⱼ)ᵢ as `(m, d, m)`, indexed by j, i, k."""
    sigma, tangent = jax.linearize(lambda y: noise_matrix(sde.noise(t, y)), z)
    return sigma, jax.vmap(tangent, in_axes=1)(sigma)


def _check_commutative(sde: AbstractSDE, z: Array) -> None:
    """Raise a `ValueError` if the columns of σ do not commute as vector fields at z: (Dσⱼ) σₖ ≠ (Dσₖ) σⱼ."""
    products = _products(sde, jnp.zeros((), z.dtype), z)[1]
    # Coordinates are compared one by one, because their units may differ.
    gap = jnp.max(jnp.abs(products - jnp.swapaxes(products, 0, 2)), axis=(0, 2))
    if bool(jnp.any(gap > 1e-4 * jnp.max(jnp.abs(products), axis=(0, 2)))):
        raise ValueError(
            "Milstein needs commutative noise, but the columns of this diffusion do not commute; "
            "use rf.flow.Davie(), rf.flow.StratonovichHeun() or rf.flow.EulerMaruyama()"
            + see("refused-methods")
        )


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
