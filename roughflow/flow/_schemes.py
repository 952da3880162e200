"""Numerical schemes for an SDE: one step of each."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._checks import check_count
from .._linear import solve
from ..faq import see
from ..sde import (
    AbstractSDE,
    AbstractStratonovichSDE,
    ExactCorrection,
    apply_noise,
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
