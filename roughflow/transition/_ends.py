"""The random ODE of one transition: its end point as a function of the coefficients of the path.

The density of a transition contains nested derivatives. Outer derivatives use forward mode (`forwards`): for
four parameters, they compile in half the time and run in a third of the time of reverse mode, because the few
parameters are pushed forward together.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from .._checks import check_count
from ..driver import Legendre
from ..sde import AbstractSDE, noise_dimension
from ._coordinates import AbstractCoordinates, InCoordinates

NEAR_BOUNDARY = 1e-3  # relative distance from a boundary at which its drift is evaluated
WIDTH = 0.05  # step of finite differences, in standard deviations of a transition
MARGIN = 0.8  # fraction of the tolerance to which Monte Carlo errors are reduced
MAX_DOUBLINGS = 4  # maximum number of doublings of the number of paths at a time
CURVATURE_PATHS = 16  # number of antithetic pairs of paths that measure the nonlinearity of a transition


class Effort(eqx.Module):
    """The computational effort per transition.

    **Arguments:**

    - `num_functions`: number of functions of the driver.
    - `num_paths`: number of paths, which are drawn in antithetic pairs.
    - `num_steps`: number of steps of the classical Runge–Kutta method.

    ```python
    import roughflow as rf

    rf.transition.Effort(num_functions=4, num_paths=16, num_steps=8).more()
    ```
    """

    num_functions: int = eqx.field(static=True, default=2)
    num_paths: int = eqx.field(static=True, default=8)
    num_steps: int = eqx.field(static=True, default=3)

    def __check_init__(self):
        for name in ("num_functions", "num_paths", "num_steps"):
            check_count(name, getattr(self, name))
        if self.num_paths % 2:
            raise ValueError(f"num_paths must be even, as paths are drawn in pairs; got {self.num_paths}")

    @staticmethod
    def for_stiffness(rate: float | None) -> "Effort":
        """The effort for a drift whose derivative times dt is `rate`; None if the rate is unknown."""
        if rate is None:
            return Effort(4, 8, 8)
        # About two steps per function, because fewer do not resolve polynomials of high degree near the ends.
        for limit, effort in ((0.5, Effort(2, 8, 3)), (4.0, Effort(4, 8, 8)), (12.0, Effort(8, 16, 16))):
            if rate < limit:
                return effort
        return Effort(16, 32, min(96, max(32, int(2 * rate))))

    def grid(self) -> tuple[float, np.ndarray]:
        """The length of a step on [0, 1], and the times of all stages."""
        h = 1 / self.num_steps
        return h, (np.arange(self.num_steps)[:, None] * h + h * np.array([0, 0.5, 0.5, 1])).ravel()

    def described(self) -> str:
        return f"{self.num_functions} functions, {self.num_paths} paths, {self.num_steps} steps"

    def more(self) -> "Effort":
        """Twice the functions, paths and steps, to measure the error."""
        return Effort(2 * self.num_functions, 2 * self.num_paths, 2 * self.num_steps)

    def finer(self) -> "Effort":
        """Twice the functions and steps, for the same number of paths."""
        return Effort(2 * self.num_functions, self.num_paths, 2 * self.num_steps)

    def raised(self, drawn: float, moved: float, tolerance: float) -> "Effort":
        """Raise the effort to reduce the larger of two errors: the Monte Carlo error `drawn`, which decreases
        with the root of the number of paths, or the change under refinement."""
        if moved > drawn:
            return self.finer()
        # The factor is a power of two, so that fits of different series share compiled programs.
        doublings = min(math.ceil(2 * math.log2(drawn / (MARGIN * tolerance))), MAX_DOUBLINGS)
        return Effort(self.num_functions, 2**doublings * self.num_paths, self.num_steps)


class Transition(eqx.Module):
    """A transition from `start` at `time` to `end` a time `dt` later, in coordinates."""

    start: Array  # (d,)
    end: Array  # (d,)
    time: Array
    dt: Array


class Averaged(eqx.Module):
    """The effect on the drift of the part of a path that n functions omit, at each stage of a solve, as its
    value and its derivative at one point.

    B − Bₙ is small, varies fast, and vanishes at both ends. Its average effect is a change of the drift by ½
    V(s) Σⱼ [σⱼ, [σⱼ, μ̃]], where V is the variance of B − Bₙ. This is exact to first order in V if the noise
    is commutative. Without this term the error is of order 1/n.
    """

    place: Array  # (M, d)
    value: Array  # (M, d)
    slope: Array  # (M, d, d)


class Ends(eqx.Module):
    """The end point of the random ODE as a function of the coefficients ω `(n m,)` of its path, in
    coordinates."""

    sde: AbstractSDE
    coordinates: AbstractCoordinates
    step: Transition
    effort: Effort
    averaged: Averaged | None

    def __call__(self, omega: Array) -> Array:
        return self._solve(omega)[0]

    def stages(self, omega: Array) -> Array:
        """The states `(M, d)` at all stages of a solve."""
        return self._solve(omega)[1]

    def _solve(self, omega: Array) -> tuple[Array, Array]:
        dt, kind = self.step.dt, self.step.start.dtype
        h, times = self.effort.grid()
        driver = Legendre(self.effort.num_functions)
        slopes = driver.slope(jnp.asarray(times, kind), jnp.reshape(omega, (1, driver.num_functions, -1)))

        def stage(carry: tuple[Array, Array, Array], now: tuple):
            y, last, total = carry
            s, slope, (part, weight, final), averaged = now
            place = y + part * last
            drift, noise = self.fields(self.step.time + s * dt, place)
            velocity = drift * dt + jnp.sqrt(dt) * (noise @ slope)
            if averaged is not None:
                velocity = velocity + averaged.value + averaged.slope @ (place - averaged.place)
            total = total + weight * velocity
            return (y + final * total, velocity, (1 - final) * total), place

        # The classical Runge–Kutta method: for each stage, the factor on the previous velocity, the weight of
        # the stage, and whether it ends a step. All stages of all steps form one loop, so that the field is
        # compiled once.
        table = [[0, h / 6, 0], [h / 2, h / 3, 0], [h / 2, h / 3, 0], [h, h / 6, 1]]
        table = jnp.asarray(np.tile(table, (self.effort.num_steps, 1)), kind)
        zero = jnp.zeros_like(self.step.start)
        stages = (jnp.asarray(times, kind), slopes, table, self.averaged)
        (end, _, _), places = jax.lax.scan(stage, (self.step.start, zero, zero), stages)
        return end, places

    def fields(self, t: Array, y: Array) -> tuple[Array, Array]:
        """The Stratonovich drift `(d,)` and the noise `(d, m)` in coordinates."""
        return InCoordinates(self.sde, self.coordinates).fields(t, y)


def average(ends: Ends, states: Array) -> Averaged:
    """The effect of the omitted functions on the drift, at the states `(M, d)` of the stages."""
    kind, dt = states.dtype, ends.step.dt
    _, times = ends.effort.grid()
    times = jnp.asarray(times, kind)
    left = times - jnp.sum(Legendre(ends.effort.num_functions).integrals(times) ** 2, axis=-1)

    def change(s: Array, variance: Array, y: Array) -> Array:
        return 0.5 * variance * dt**2 * _double_brackets(ends, ends.step.time + s * dt, y)

    def expand(s: Array, variance: Array, y: Array) -> tuple[Array, Array]:
        # Finite differences are used, because a further derivative would take as long to compile as
        # everything else.
        noise = ends.fields(ends.step.time + s * dt, y)[1]
        width = jax.lax.stop_gradient(jnp.sqrt(dt * jnp.sum(noise**2, axis=1)))
        width = WIDTH * jnp.where(width > 0, width, jnp.abs(y) + 1)
        moves = jnp.concatenate([jnp.diag(width), -jnp.diag(width), jnp.zeros_like(y)[None]])
        values = jax.vmap(lambda move: change(s, variance, y + move))(moves)
        ahead, behind = values[: y.size], values[y.size : -1]
        return values[-1], ((ahead - behind) / (2 * width[:, None])).T

    return Averaged(states, *jax.vmap(expand)(times, left, states))


def _double_brackets(ends: Ends, t: Array, y: Array) -> Array:
    """Σⱼ [σⱼ, [σⱼ, μ̃]] with [σ, μ] = Dμ σ − Dσ μ."""
    fields = jax.jit(lambda y: ends.fields(t, y))  # traced once

    def one(j: int) -> Array:
        noise = lambda y: fields(y)[1][:, j]

        def inner(y: Array) -> Array:
            (drift, _), (along, _) = jax.jvp(fields, (y,), (noise(y),))
            return along - jax.jvp(noise, (y,), (drift,))[1]

        bracket, along = jax.jvp(inner, (y,), (noise(y),))
        return along - jax.jvp(noise, (y,), (bracket,))[1]

    return sum((one(j) for j in range(jax.eval_shape(fields, y)[1].shape[1])), jnp.zeros_like(y))


def stiffness(sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition) -> Array:
    """dt times the largest row sum of the derivative of the drift in coordinates, at the start of a
    transition and one standard deviation of each noise away from it."""
    start = coordinates.from_state(step.start)
    inner = Transition(start, step.end, step.time, step.dt)
    fields = Ends(sde, coordinates, inner, Effort(), None).fields
    moves = jnp.sqrt(step.dt) * fields(step.time, start)[1].T
    places = start[None] + jnp.concatenate([jnp.zeros_like(start)[None], moves, -moves])
    slopes = jax.vmap(jax.jacfwd(lambda y: fields(step.time, y)[0]))(places)
    rates = jnp.max(jnp.sum(jnp.abs(slopes), axis=2), axis=1)
    inside = jax.vmap(coordinates.is_inside)(places)
    return step.dt * jnp.max(jnp.where(inside, rates, 0))


def boundary_share(sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition) -> Array:
    """The approximate contribution of paths that touch an attainable boundary to the density of a transition.

    With constant noise σ, paths to the reflected end point have weight e^{−2yy′/(σ²dt)}, where y and y′ are
    the distances of start and end from the boundary. The boundary is attainable if the drift near it is less
    than ½σ²/y (Feller 1952).
    """
    start, end = coordinates.from_state(step.start), coordinates.from_state(step.end)
    inner = Transition(start, end, step.time, step.dt)
    fields = Ends(sde, coordinates, inner, Effort(), None).fields
    spread = jnp.sum(fields(step.time, start)[1] ** 2, axis=1)
    total = jnp.zeros_like(step.dt)
    for i, pair in enumerate(np.broadcast_to(np.array(coordinates.ends), (start.size, 2))):
        for boundary, side in zip(pair, (1, -1), strict=True):
            if np.isfinite(boundary):
                before, after = side * (start[i] - boundary), side * (end[i] - boundary)
                near = NEAR_BOUNDARY * jnp.minimum(before, after)
                drift, noise = fields(step.time, start.at[i].set(boundary + side * near))
                reached = side * drift[i] * near < 0.5 * jnp.sum(noise[i] ** 2)
                total += jnp.where(reached, jnp.exp(-2 * before * after / (spread[i] * step.dt)), 0)
    return total


def curvature(sde: AbstractSDE, coordinates: AbstractCoordinates, step: Transition) -> Array:
    """The nonlinearity of the end of a transition as a function of its path; dimensionless.

    If h(ω) is the end point along ω, it is the root mean square of h(ω) − 2h(ω/2) + h(0) relative to that of
    h(ω) − h(0), for the worst component. It is zero for a linear SDE over any time. It is large if the most
    likely path does not represent all paths, as for a nonlinear or multistable drift or noncommutative noise,
    and infinite if a path leaves the state space.
    """
    effort = Effort()
    start = coordinates.from_state(step.start)
    ends = Ends(sde, coordinates, Transition(start, start, step.time, step.dt), effort, None)
    size = effort.num_functions * noise_dimension(sde, start.size)
    paths = np.random.default_rng(0).normal(size=(CURVATURE_PATHS, size))
    paths = jnp.asarray(np.concatenate([paths, -paths]), start.dtype)
    middle, far, near = ends(jnp.zeros_like(paths[0])), jax.vmap(ends)(paths), jax.vmap(ends)(0.5 * paths)
    bend = jnp.mean((far - 2 * near + middle[None]) ** 2, axis=0)
    spread = jnp.mean((far - middle[None]) ** 2, axis=0)
    share = jnp.sqrt(jnp.max(jnp.where(bend > 0, bend / spread, jnp.where(jnp.isnan(bend), jnp.inf, 0))))
    return jax.lax.stop_gradient(jnp.where(jnp.isnan(share), jnp.inf, share))


def linear(function: Callable[[Array], Any], at: Array) -> tuple[Any, Any]:
    """The value of a function at a point `(p,)`, and its derivative, with an additional last axis of size
    p."""
    pushed = lambda direction: jax.jvp(function, (at,), (direction,))
    return jax.vmap(pushed, out_axes=(None, -1))(jnp.eye(at.size, dtype=at.dtype))


@eqx.filter_custom_jvp
def forwards(tree: Any, *, function: Callable[[Any], Any]) -> Any:
    """The result of `function(tree)`. Its derivatives of all orders, with respect to the floats that are
    differentiated, are computed in forward mode; reverse mode then needs only one product with a matrix."""
    return function(tree)


@forwards.def_jvp
def _forwards_jvp(primals: tuple, tangents: tuple, *, function: Callable[[Any], Any]) -> tuple[Any, Any]:
    (tree,), (direction,) = primals, tangents
    moves = jax.tree.map(lambda part: part is not None, direction, is_leaf=lambda part: part is None)
    value, slopes = forwards(tree, function=_Linear(function, moves))
    along = ravel_pytree(direction)[0]
    return value, jax.tree.map(lambda slope: slope @ along, slopes)


class _Linear(eqx.Module):
    """The value of a function, and its derivative with respect to the floats that are differentiated."""

    function: Callable[[Any], Any]
    moves: Any  # a tree of bools

    def __call__(self, tree: Any) -> tuple[Any, Any]:
        moving, still = eqx.partition(tree, self.moves)
        at, unravel = ravel_pytree(moving)
        return linear(lambda x: self.function(eqx.combine(unravel(x), still)), at)
