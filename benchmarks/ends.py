"""Densities of the end point of a flow with a fixed start, in one dimension, given all but one direction of
the path; several flows can share the paths."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

import roughflow as rf

NEWTON = 4


def log_prob_along(
    flow: rf.StochasticFlow,
    start: Array,
    x: Array,
    rest: rf.driver.Path,
    direction: Array,
    newton: int = NEWTON,
) -> Array:
    """log p(x | start, path except its component along the unit vector `direction` `(..., n)`), batched.

    Newton's method finds the r with Z_T = x. The density is φ(r)/|∂Z_T/∂r| and is differentiable in all
    parameters of the flow.
    """
    flow = flow.without_errors()
    along = jnp.sum(direction * rest.coefficients[..., 0], axis=-1)
    free = rest.coefficients[..., 0] - direction * along[..., None]

    def end(r: Array) -> Array:
        path = rf.driver.Path(rest.driver, (free + direction * r[..., None])[..., None], rest.t1)
        return flow.push_forward(start[..., None], path)[0][..., 0]

    def with_slope(r: Array) -> tuple[Array, Array]:
        return jax.jvp(end, (r,), (jnp.ones_like(r),))

    def step(r: Array, _: None) -> tuple[Array, None]:
        value, slope = with_slope(r)
        return r - (value - x) / slope, None

    r = jnp.zeros(jnp.broadcast_shapes(start.shape, x.shape, rest.batch_shape), rest.coefficients.dtype)
    r = jax.lax.stop_gradient(jax.lax.scan(step, r, None, length=newton)[0])
    # One more Newton step gives r the derivatives of the implicit function theorem.
    value, slope = with_slope(r)
    r = r - (value - x) / jax.lax.stop_gradient(slope)
    return jax.scipy.stats.norm.logpdf(r) - jnp.log(jnp.abs(with_slope(r)[1]))
