"""Other methods for transition densities, in JAX. Each takes a batch of transitions of an Itô SDE.

The methods are Euler's normal density; the density of Milstein's scheme (Elerian 1998); local linearisation
of the SDE with constant noise (Shoji & Ozaki 1998); and the mean of Euler's density of the last small step
over simulated paths (Pedersen 1995). Points have shape `(N, d)`, or `(N, 1)` if a method is limited to one
dimension.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from scipy import optimize

import roughflow as rf
from roughflow.sde import AbstractItoSDE

FLOOR = 1e-10  # lower limit of Euler paths of a positive state
BLOCK = 256  # number of Pedersen's paths computed at a time


@eqx.filter_jit
def euler(sde: AbstractItoSDE, x0: Array, x1: Array, dt: Array | float) -> Array:
    """A normal density with drift and noise evaluated at x₀."""
    return jax.vmap(lambda a, b: _euler(sde, a, b, dt))(x0, x1)


def _euler(sde: AbstractItoSDE, x0: Array, x1: Array, dt: Array | float) -> Array:
    sigma = sde.diffusion(jnp.zeros(()), x0)
    mean = x0 + sde.drift(jnp.zeros(()), x0) * dt
    if x0.size == 1:
        return jax.scipy.stats.norm.logpdf(x1[0], mean[0], jnp.abs(sigma[0, 0]) * jnp.sqrt(dt))
    return jax.scipy.stats.multivariate_normal.logpdf(x1, mean, sigma @ sigma.T * dt)


@eqx.filter_jit
def milstein(sde: AbstractItoSDE, x0: Array, x1: Array, dt: Array | float) -> Array:
    """The density of x₁ = a (Z + 1/(σ'√dt))² + b with Z normal; −inf if x₁ is out of reach. Euler's density
    if σ' = 0."""

    def one(x0: Array, x1: Array) -> Array:
        noise = lambda x: sde.diffusion(jnp.zeros(()), x)[0, 0]
        sigma, slope = noise(x0), jax.grad(noise)(x0)[0]
        flat = slope == 0
        slope = jnp.where(flat, 1.0, slope)
        a = 0.5 * sigma * slope * dt
        b = x0[0] + (sde.drift(jnp.zeros(()), x0)[0] - 0.5 * sigma * slope) * dt - 0.5 * sigma / slope
        square = (x1[0] - b) / a
        root, centre = jnp.sqrt(jnp.maximum(square, 0)), 1 / (jnp.abs(slope) * jnp.sqrt(dt))
        normal = jax.scipy.stats.norm.logpdf
        both = jnp.logaddexp(normal(root - centre), normal(root + centre))
        bent = jnp.where(square > 0, both - jnp.log(2 * jnp.abs(a) * root), -jnp.inf)
        return jnp.where(flat, _euler(sde, x0, x1, dt), bent)

    return jax.vmap(one)(x0, x1)


@eqx.filter_jit
def local_linear(sde: rf.series.AbstractNamedSDE, x0: Array, x1: Array, dt: Array | float) -> Array:
    """A drift that is linear in state and time, in the coordinates of the SDE, in which its noise is
    constant."""
    coordinates = sde.coordinates

    def drift(y: Array) -> Array:
        x = coordinates.to_state(y)
        sigma = sde.diffusion(jnp.zeros(()), x)[:, 0]
        pull = lambda x: jax.jvp(coordinates.from_state, (x,), (sigma,))[1]
        return coordinates.pull_back(x, sde.drift(jnp.zeros(()), x)) + 0.5 * jax.jvp(pull, (x,), (sigma,))[1]

    def one(x0: Array, x1: Array) -> Array:
        y0, y1 = coordinates.from_state(x0), coordinates.from_state(x1)
        noise = coordinates.pull_back(x0, sde.diffusion(jnp.zeros(()), x0)[:, 0])[0]
        value = lambda y: drift(y[None])[0]
        slope, bend = jax.grad(value)(y0[0]), jax.grad(jax.grad(value))(y0[0])
        rate = jnp.where(jnp.abs(slope) < 1e-8, 1e-8, slope)
        grown = jnp.expm1(rate * dt)
        mean = y0[0] + value(y0[0]) * grown / rate + 0.5 * noise**2 * bend * (grown - rate * dt) / rate**2
        deviation = jnp.abs(noise) * jnp.sqrt(jnp.expm1(2 * rate * dt) / (2 * rate))
        return jax.scipy.stats.norm.logpdf(y1[0], mean, deviation) + coordinates.log_volume(x1)

    return jax.vmap(one)(x0, x1)


@eqx.filter_jit
def pedersen(
    sde: AbstractItoSDE,
    x0: Array,
    x1: Array,
    dt: Array | float,
    key: PRNGKeyArray,
    num_steps: Array,
    num_blocks: Array,
    positive: bool,
) -> Array:
    """The mean of Euler's density of the last of `num_steps` small steps, over `num_blocks` times `BLOCK`
    paths of each transition. Both numbers may change without recompilation."""
    h = dt / num_steps
    inside = (lambda x: jnp.maximum(x, FLOOR)) if positive else (lambda x: x)
    zero = jnp.zeros(())

    def move(x: Array, noise: Array) -> Array:
        return inside(x + sde.drift(zero, x) * h + jnp.sqrt(h) * (sde.diffusion(zero, x) @ noise))

    def block(j: Array, total: Array) -> Array:
        def step(i: Array, x: Array) -> Array:
            noise = jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, j), i), x.shape, x.dtype)
            return jax.vmap(jax.vmap(move))(x, noise)

        start = jnp.broadcast_to(x0[:, None], (len(x0), BLOCK, x0.shape[1]))
        last = jax.lax.fori_loop(0, num_steps - 1, step, start)
        each = jax.vmap(jax.vmap(lambda a, b: _euler(sde, a, b, h), in_axes=(0, None)))(last, x1)
        return jnp.logaddexp(total, jax.nn.logsumexp(each, axis=1))

    total = jax.lax.fori_loop(0, num_blocks, block, jnp.full(len(x0), -jnp.inf))
    return total - jnp.log(BLOCK * num_blocks)


def euler_cir(x: np.ndarray, dt: float, start: np.ndarray) -> np.ndarray:
    """κ, μ and σ of a CIR process by maximum likelihood with Euler's density."""
    found = optimize.minimize(
        lambda free: tuple(np.asarray(part) for part in _euler_loss(jnp.asarray(free), jnp.asarray(x), dt)),
        np.log(start),
        jac=True,
        method="BFGS",
    )
    return np.exp(found.x)


@jax.jit
def _euler_loss(free: Array, x: Array, dt: float) -> tuple[Array, Array]:
    def loss(free: Array) -> Array:
        kappa, mu, sigma = jnp.exp(free)
        return -jnp.sum(euler(rf.CoxIngersollRoss(kappa, mu, sigma), x[:-1, None], x[1:, None], dt))

    return jax.value_and_grad(loss)(free)
