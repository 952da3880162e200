"""One step of an explicit Runge–Kutta method on the random ODE of a batch."""

from typing import NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ._field import KEPT, Field
from ._outcome import Status

Span = tuple[Array, Array]


class RK4(diffrax.AbstractERK):
    """The classical fourth-order method, as a diffrax solver without an error estimate.

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(rf.RK4(), steps=20)
    ```
    """

    tableau = diffrax.ButcherTableau(
        c=np.array([0.5, 0.5, 1.0]),
        b_sol=np.array([1 / 6, 1 / 3, 1 / 3, 1 / 6]),
        b_error=np.array([0.0, 0.0, 0.0, 0.0]),
        a_lower=(np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])),
    )
    interpolation_cls = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms: object) -> int:
        del terms
        return 4


class RK6(diffrax.AbstractERK):
    """A sixth-order method of seven stages (Butcher 1964): for smooth models and few steps.

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(rf.RK6(), steps=8)
    ```
    """

    tableau = diffrax.ButcherTableau(
        c=np.array([1 / 3, 2 / 3, 1 / 3, 1 / 2, 1 / 2, 1]),
        b_sol=np.array([11 / 120, 0, 27 / 40, 27 / 40, -4 / 15, -4 / 15, 11 / 120]),
        b_error=np.zeros(7),
        a_lower=(
            np.array([1 / 3]),
            np.array([0, 2 / 3]),
            np.array([1 / 12, 1 / 3, -1 / 12]),
            np.array([-1 / 16, 9 / 8, -3 / 16, -3 / 8]),
            np.array([0, 9 / 8, -3 / 8, -3 / 4, 1 / 2]),
            np.array([9 / 44, -9 / 11, 63 / 44, 18 / 11, 0, -16 / 11]),
        ),
    )
    interpolation_cls = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms: object) -> int:
        del terms
        return 6


class Step(NamedTuple):
    """The increments a step makes, and, per sample, what first went wrong in it, when and where."""

    change: Array  # (B, d)
    log_change: Array  # (B,)
    status: Array  # (B,)
    time: Array  # (B,)
    culprit: Array  # (B, d)


def runge_kutta(field: Field, span: Span, z: Array, method: diffrax.AbstractERK) -> Step:
    """One step from `z` over `span`, forwards or backwards in time."""
    start, stop = span
    h = stop - start
    matrix, weights, nodes = _tableau(method, z.dtype)
    jumps = field.path.driver.jumps.size > 0

    # The stages are a loop, not written out: the program compiles several times faster, and the
    # backward pass holds the activations of one stage at a time, which stay in cache.
    def stage(carry: tuple[Array, Step], row: tuple[Array, Array, Array, Array]):
        velocities, step = carry
        i, coefficients, weight, node = row
        s = start + h * node
        # On a path with corners the slope is read strictly inside the step.
        slope_at = start + h * jnp.clip(node, 0.01, 0.99) if jumps else None
        y = checkpoint_name(z + _scale(h, jnp.tensordot(coefficients, velocities, 1)), KEPT[0])
        velocity, divergence, now = field.guarded(s, y, z, slope_at=slope_at)
        first = (step.status == Status.FINE) & (now != Status.FINE)
        step = Step(
            step.change + _scale(h * weight, velocity),
            step.log_change + _scale(h * weight, divergence),
            jnp.where(first, now, step.status),
            jax.lax.stop_gradient(jnp.where(first, s, step.time)),
            jax.lax.stop_gradient(jnp.where(first[:, None], y, step.culprit)),
        )
        return (velocities.at[i].set(velocity), step), None

    zeros = jnp.zeros_like(z[:, 0])
    nothing = Step(jnp.zeros_like(z), zeros, jnp.full(z.shape[:1], Status.FINE), zeros, z)
    velocities = jnp.zeros((nodes.size, *z.shape), z.dtype)
    policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
    (_, step), _ = jax.lax.scan(
        jax.checkpoint(stage, policy=policy, prevent_cse=False),
        (velocities, nothing),
        (jnp.arange(nodes.size), matrix, weights, nodes),
    )
    return step


def _tableau(method: diffrax.AbstractERK, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """The Butcher tableau as arrays, without stages that serve error control alone."""
    tableau = method.tableau
    assert isinstance(tableau, diffrax.ButcherTableau)
    stages = int(np.flatnonzero(tableau.b_sol)[-1]) + 1
    matrix = np.zeros((stages, stages))
    for i, row in enumerate(tableau.a_lower[: stages - 1]):
        matrix[i + 1, : i + 1] = row
    nodes = np.concatenate([[0.0], tableau.c])[:stages]
    return (
        jnp.asarray(matrix, dtype),
        jnp.asarray(tableau.b_sol[:stages], dtype),
        jnp.asarray(nodes, dtype),
    )


def order_of(method: diffrax.AbstractERK) -> int:
    order = method.order(diffrax.ODETerm(lambda t, y, args: y))
    assert order is not None
    return order


def _scale(h: Array, value: Array) -> Array:
    """h·value, h a scalar or one number per sample."""
    return (h[:, None] if h.ndim < value.ndim and h.ndim else h) * value
