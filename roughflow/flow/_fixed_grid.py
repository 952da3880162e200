"""The interface of integrators, methods to differentiate a solve, and explicit Runge–Kutta methods on a fixed
grid, the default integrator."""

import abc
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from .._checks import check_count, check_fields, check_positive, shown
from ..driver import AbstractDriver, Path
from ..faq import see
from ._field import KEPT, Field, batches
from ._outcome import Outcome, Status, start_of

Span = tuple[Array, Array]


class AbstractGradient(eqx.Module):
    """A method to differentiate a solve with respect to parameters, starting points and path coefficients."""


class Backpropagation(AbstractGradient):
    """Backpropagation through the steps, with checkpoints: the exact gradient of the numerical solution.

    This is the default. A fixed grid stores the state and velocity of each step and recomputes everything
    inside a step. An adaptive solve stores a logarithmic number of states.

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(gradient=rf.flow.Backpropagation())
    ```
    """


class ConstantMemory(AbstractGradient):
    """Gradients with memory that does not grow with the number of steps.

    A fixed grid becomes reversible (McCallum & Foster 2024): two coupled copies of the state make every step
    exactly invertible, at twice the number of evaluations, and the gradient is again that of the numerical
    solution. An adaptive solve integrates the continuous adjoint equation backwards; the tolerances determine
    the accuracy of its gradient. Forward mode (`jax.jvp`, `jax.jacfwd`) is not supported.

    **Arguments:**

    - `coupling`: strength of the coupling between the two copies on fixed grids, in (0, 1]. Smaller values
      make the forward solve more stable, but undoing N steps multiplies rounding errors by coupling^(−N).

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(steps=1000, gradient=rf.flow.ConstantMemory())
    ```
    """

    coupling: float = eqx.field(static=True, default=0.999)

    def __check_init__(self):
        if not 0 < self.coupling <= 1:
            raise ValueError(f"coupling must lie in (0, 1], got {self.coupling}")


# Distance, in units of the spread of the process, that a state may travel per horizon (`Field.guarded`).
ESCAPE_RATE = 1e5


class AbstractIntegrator(eqx.Module):
    """The interface of integrators, which solve the random ODE of a batch as one system.

    A new integrator calls `field.guarded`, which detects samples with errors, and returns an
    `rf.flow.Outcome`. Its `escape_rate` must be a static field.
    """

    gradient: eqx.AbstractVar[AbstractGradient]
    escape_rate: eqx.AbstractVar[float]

    def __check_init__(self):
        check_fields(self)
        check_positive("escape_rate", self.escape_rate)

    @abc.abstractmethod
    def integrate(self, field: Field, z: Array, fraction: Array | None, *, reverse: bool) -> Outcome:
        """Solve from s = 0 to `fraction` of the horizon, or back from there to 0 if `reverse`.

        `fraction` is None for the whole horizon, a scalar, or `(B,)` if samples stop at different times.
        """

    @abc.abstractmethod
    def finer(self, driver: AbstractDriver, noise_dimension: int) -> "AbstractIntegrator":
        """This integrator with half the step, or a tighter tolerance, to measure its error."""


class RK4(diffrax.AbstractERK):
    """The classical fourth-order Runge–Kutta method, as a diffrax solver without an error estimate.

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(rf.flow.RK4(), steps=20)
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


class Step(NamedTuple):
    """The increments of a step, and the first error of each sample: its kind, time and position."""

    change: Array  # (B, d)
    log_change: Array  # (B,)
    status: Array  # (B,)
    time: Array  # (B,)
    culprit: Array  # (B, d)


def runge_kutta(field: Field, span: Span, z: Array, solver: diffrax.AbstractERK) -> Step:
    """One step from `z` over `span`, forwards or backwards in time."""
    start, stop = span
    h = stop - start
    matrix, weights, nodes = _tableau(solver, z.dtype)
    jumps = field.path.driver.jumps.size > 0

    # The stages form a loop, which compiles several times faster. The backward pass then holds the
    # activations of one stage at a time, which fit in the cache.
    def stage(carry: tuple[Array, Step], row: tuple[Array, Array, Array, Array]):
        velocities, step = carry
        i, coefficients, weight, node = row
        s = start + h * node
        # On a path with kinks the slope is evaluated strictly inside the step.
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


def _tableau(solver: diffrax.AbstractERK, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """The Butcher tableau as arrays, without stages that are needed only for error control."""
    tableau = solver.tableau
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


def order_of(solver: diffrax.AbstractERK) -> int:
    order = solver.order(diffrax.ODETerm(lambda t, y, args: y))
    assert order is not None
    return order


def _scale(h: Array, value: Array) -> Array:
    """h·value, where h is a scalar or one number per sample."""
    return (h[:, None] if h.ndim < value.ndim and h.ndim else h) * value


# The two copies of a reversible solve, each a state (B, d) and the integral of the divergence (B,).
Pair = tuple[tuple[Array, Array], tuple[Array, Array]]


@eqx.filter_custom_vjp
def reversible_scan(
    differentiable: tuple[Field, Array], spans: Span, solver: diffrax.AbstractERK, coupling: float
) -> Outcome:
    """Solve from z₀ over consecutive intervals. The result can be differentiated in reverse mode with respect
    to the field and z₀."""
    return _solve(differentiable, spans, solver, coupling)[0]


def _solve(
    differentiable: tuple[Field, Array], spans: Span, solver: diffrax.AbstractERK, coupling: float
) -> tuple[Outcome, Pair]:
    field, z = differentiable
    start = start_of(z)
    copy = (z, start.log_change)

    def step(carry: tuple[Pair, Outcome], span: Span) -> tuple[tuple[Pair, Outcome], None]:
        pair, outcome = carry
        pair, status, time, culprit = _advance(field, pair, span, solver, coupling)
        first = outcome.status == Status.FINE
        broke = (first & (status == Status.NON_FINITE))[:, None]
        outcome = Outcome(
            jnp.where(broke, culprit, outcome.z),
            outcome.log_change,
            jnp.where(first, status, outcome.status),
            jnp.where(first, time, outcome.time),
        )
        return (pair, outcome), None

    (pair, outcome), _ = jax.lax.scan(step, ((copy, copy), start), spans)
    (z, log_change), _ = pair
    z = jnp.where((outcome.status == Status.NON_FINITE)[:, None], outcome.z, z)
    return Outcome(z, log_change, outcome.status, outcome.time), pair


def _advance(
    field: Field, pair: Pair, span: Span, solver: diffrax.AbstractERK, coupling: float
) -> tuple[Pair, Array, Array, Array]:
    y, w = pair
    there = runge_kutta(field, span, w[0], solver)
    y = jax.tree.map(lambda a, b, c: coupling * a + (1 - coupling) * b + c, y, w, there[:2])
    back = runge_kutta(field, (span[1], span[0]), y[0], solver)
    w = jax.tree.map(jnp.subtract, w, back[:2])
    first = there.status == Status.FINE
    status = jnp.where(first, back.status, there.status)
    time = jnp.where(first, back.time, there.time)
    return (y, w), status, time, jnp.where(first[:, None], back.culprit, there.culprit)


def _undo(field: Field, pair: Pair, span: Span, solver: diffrax.AbstractERK, coupling: float) -> Pair:
    y, w = pair
    back = runge_kutta(field, (span[1], span[0]), y[0], solver)
    w = jax.tree.map(jnp.add, w, back[:2])
    there = runge_kutta(field, span, w[0], solver)
    y = jax.tree.map(lambda a, b, c: (a - (1 - coupling) * b - c) / coupling, y, w, there[:2])
    return y, w


@reversible_scan.def_fwd
def _forward(perturbed, differentiable, spans, solver, coupling):
    del perturbed
    return _solve(differentiable, spans, solver, coupling)


@reversible_scan.def_bwd
def _backward(pair, gradient, perturbed, differentiable, spans, solver, coupling):
    """Undo a step, differentiate it, and continue with the previous one."""
    del perturbed
    field, _ = differentiable
    dynamic, static = eqx.partition(field, eqx.is_inexact_array)
    zero = jax.tree.map(jnp.zeros_like, pair[1])
    d_z = zero[0] if gradient.z is None else gradient.z
    d_log = zero[1] if gradient.log_change is None else gradient.log_change

    def step(carry, span):
        pair, d_pair, d_dynamic = carry
        pair = _undo(field, pair, span, solver, coupling)

        def advance(dynamic, pair):
            return _advance(eqx.combine(dynamic, static), pair, span, solver, coupling)[0]

        _, pull = jax.vjp(advance, dynamic, pair)
        more, d_pair = pull(d_pair)
        return (pair, d_pair, jax.tree.map(jnp.add, d_dynamic, more)), None

    carry = (pair, ((d_z, d_log), zero), jax.tree.map(jnp.zeros_like, dynamic))
    (_, (d_y, d_w), d_dynamic), _ = jax.lax.scan(step, carry, spans, reverse=True)
    return d_dynamic, d_y[0] + d_w[0]


BLOCK_SIZE = 2**12  # samples per block
Solve = Callable[[Field, Array, Array | None], Outcome]


def block_by_block(solve: Solve, field: Field, z: Array, fraction: Array | None) -> Outcome:
    """Return `solve(field, z, fraction)`, where a large batch is solved in equal blocks, one after another.

    The intermediate values of one block fit in the cache of a CPU, which makes the gradient of 10⁵ samples 20
    % faster. Blocks are not used with several devices, which would wait for each other.
    """
    if len(z) <= 2 * BLOCK_SIZE or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return solve(field, z, fraction)
    size = -(-len(z) // -(-len(z) // BLOCK_SIZE))
    fields, axes = field.split(size)
    is_none = lambda axis: axis is None
    own, shared = eqx.partition(fields, jax.tree.map(lambda axis: not is_none(axis), axes, is_leaf=is_none))
    ends = None if fraction is None or not fraction.ndim else batches(fraction, size)

    def block(part: tuple[Field, Array, Array | None]) -> Outcome:
        return solve(eqx.combine(part[0], shared), part[1], fraction if ends is None else part[2])

    outcome = jax.lax.map(block, (own, batches(z, size), ends))
    return jax.tree.map(lambda a: jnp.reshape(a, (-1, *a.shape[2:]))[: len(z)], outcome)


LATE = 2.0  # value of `late` for functions that vary fastest at the end


class FixedGrid(AbstractIntegrator):
    """A fixed number of steps of an explicit Runge–Kutta method.

    **Arguments:**

    - `solver`: any explicit diffrax solver of order 2 or more, such as `diffrax.Heun()`,
      `diffrax.Midpoint()`, `rf.flow.RK4()`, `diffrax.Dopri5()` (the default), `diffrax.Tsit5()`. Euler's
      method raises an error: on a random path it converges to the solution of another equation, the Itô
      equation with the Stratonovich drift.
    - `steps`: number of steps over the horizon; by default enough to resolve the fastest oscillation of the
      driver. A piecewise linear path is solved with at least one step per piece, and no step crosses a jump
      of its slope. The default does not depend on the model and may be too small if the model is stiff: check
      the `solver_error` of an estimate. `rf.fit` adapts the number of steps unless you set it.
    - `gradient`: `rf.flow.Backpropagation()` or `rf.flow.ConstantMemory()`.
    - `escape_rate`: a sample counts as escaped to infinity if, in one horizon, it would travel more than this
      many times the sum of its distance from the centre of the base and the spread of the process.
    - `late`: exponent a in the times s = 1 − (1 − u)ᵃ of the steps, for equally spaced u. If a = 1, all steps
      are equal. If a = 2, they shrink towards the end, where a velocity learned from data varies fastest, and
      where noise that fades as √(1 − s) has no derivative. With such noise, high-order methods drop to order
      3/2 for a = 1, and to order 3 for a = 2.

    ```python
    import diffrax
    import roughflow as rf

    integrator = rf.FixedGrid(diffrax.Tsit5(), steps=32, gradient=rf.flow.ConstantMemory())
    ```
    """

    solver: diffrax.AbstractERK
    steps: int | None = eqx.field(static=True)
    gradient: AbstractGradient
    escape_rate: float = eqx.field(static=True)
    late: float = eqx.field(static=True, default=1.0)

    def __init__(
        self,
        solver: diffrax.AbstractERK | None = None,
        steps: int | None = None,
        gradient: AbstractGradient | None = None,
        escape_rate: float = ESCAPE_RATE,
        late: float = 1.0,
    ):
        solver = diffrax.Dopri5() if solver is None else solver
        if isinstance(solver, diffrax.Euler):
            raise ValueError(
                "Euler's method on a random path converges to the solution of a different equation; use a "
                "method of order 2 or more, or rf.simulate with rf.flow.EulerMaruyama()"
                + see("refused-methods")
            )
        if not isinstance(solver, diffrax.AbstractERK):
            raise TypeError(
                f"solver must be an explicit Runge–Kutta method, got {shown(solver)}; "
                "use rf.Adaptive for any other diffrax solver" + see("refused-methods")
            )
        self.solver = solver
        self.steps = None if steps is None else check_count("steps", steps)
        self.gradient = Backpropagation() if gradient is None else gradient
        self.escape_rate = escape_rate
        check_positive("late", late)
        self.late = float(late)

    def integrate(self, field: Field, z: Array, fraction: Array | None, *, reverse: bool) -> Outcome:
        return block_by_block(partial(self._solve, reverse=reverse), field, z, fraction)

    def _solve(self, field: Field, z: Array, fraction: Array | None, reverse: bool) -> Outcome:
        grid = self.grid(field.path, fraction).astype(z.dtype)
        grid = grid[::-1] if reverse else grid
        spans = (grid[:-1], grid[1:])
        if isinstance(self.gradient, ConstantMemory):
            return reversible_scan((field, z), spans, self.solver, self.gradient.coupling)
        outcome, _ = jax.lax.scan(
            lambda now, span: (sticky_step(field, now, span, self.solver), None),
            start_of(z),
            spans,
        )
        return outcome

    def finer(self, driver: AbstractDriver, noise_dimension: int) -> "FixedGrid":
        return self.with_steps(2 * self.count(driver, noise_dimension))

    def with_steps(self, steps: int) -> "FixedGrid":
        """The same integrator with another number of steps."""
        return FixedGrid(self.solver, steps, self.gradient, self.escape_rate, self.late)

    def count(self, driver: AbstractDriver, noise_dimension: int) -> int:
        """The total number of steps; every piece of the path has the same number."""
        steps = self.steps or default_steps(order_of(self.solver), driver, noise_dimension)
        pieces = driver.jumps.size + 1
        return pieces * math.ceil(steps / pieces)

    def grid(self, path: Path, fraction: Array | None) -> Array:
        """The times of the steps, `(N + 1,)`, or `(N + 1, B)` if samples stop at different times."""
        knots = np.concatenate([[0.0], path.driver.jumps, [1.0]])
        pieces = knots.size - 1
        each = self.count(path.driver, path.noise_dimension) // pieces
        times = self.time(np.arange(each * pieces + 1), each, knots, np)
        if fraction is None:
            return jnp.asarray(times)
        if pieces == 1:
            return jnp.tensordot(jnp.asarray(times, fraction.dtype), fraction, 0)
        # Knots are unchanged; a sample that has reached its end time takes steps of length zero.
        times = jnp.asarray(times, fraction.dtype)
        return jnp.minimum(jnp.expand_dims(times, range(1, 1 + fraction.ndim)), fraction[None])

    def time(self, place: Any, each: Any, knots: np.ndarray, xp: Any = jnp) -> Any:
        """The start time of the step with index `place`, for `each` steps between two knots: equally spaced
        in u, where 1 − s = (1 − u)^late, and exact at the knots. `xp` is the array module, `jax.numpy` or
        `numpy`."""
        even = 1 - (1 - knots) ** (1 / self.late)
        piece = xp.minimum(place // each, knots.size - 2)
        inner = place - each * piece
        u = xp.asarray(even)[piece] + xp.asarray(np.diff(even))[piece] * (inner / each)
        between = xp.where(inner == each, xp.asarray(knots)[piece + 1], 1 - (1 - u) ** self.late)
        return xp.where(inner == 0, xp.asarray(knots)[piece], between)


class CountedGrid(AbstractIntegrator):
    """A fixed grid whose number of steps is an array, so that one compiled program serves any number of
    steps. It does not support reverse-mode differentiation."""

    grid: FixedGrid
    each: Array  # number of steps between two jumps of the slope of the path
    gradient: AbstractGradient
    escape_rate: float = eqx.field(static=True)

    @staticmethod
    def of(grid: FixedGrid, each: Array) -> "CountedGrid":
        return CountedGrid(grid=grid, each=each, gradient=grid.gradient, escape_rate=grid.escape_rate)

    def integrate(self, field: Field, z: Array, fraction: Array | None, *, reverse: bool) -> Outcome:
        assert fraction is None
        knots = np.concatenate([[0.0], field.path.driver.jumps, [1.0]])
        total = self.each * (knots.size - 1)

        def step(i: Array, now: Outcome) -> Outcome:
            places = (total - i, total - i - 1) if reverse else (i, i + 1)
            start, stop = (self.grid.time(place, self.each, knots).astype(z.dtype) for place in places)
            return sticky_step(field, now, (start, stop), self.grid.solver)

        return jax.lax.fori_loop(0, total, step, start_of(z))

    def finer(self, driver: AbstractDriver, noise_dimension: int) -> AbstractIntegrator:
        raise NotImplementedError("a CountedGrid cannot be refined")


def default_steps(order: int, driver: AbstractDriver, noise_dimension: int) -> int:
    """The number of steps needed to resolve the fastest oscillation of a smooth driver; methods of higher
    order need fewer.

    Without noise there are no oscillations, and half the minimum number suffices.
    """
    per_wave, minimum = {2: (16, 64), 3: (6, 24), 4: (4, 16)}.get(order, (1.3, 8))
    if not noise_dimension:
        return minimum // 2
    waves = 1 if driver.jumps.size else driver.num_functions
    return max(minimum, math.ceil(per_wave * waves))


def sticky_step(field: Field, now: Outcome, span: Span, solver: diffrax.AbstractERK) -> Outcome:
    """Advance the valid samples; a sample with an error stays at its last valid state.

    If the model is not finite, the sample moves to the point where that happens, which the error message
    reports.
    """
    step = runge_kutta(field, span, now.z, solver)
    was_fine = now.status == Status.FINE
    fine = was_fine & (step.status == Status.FINE)
    broke = was_fine & (step.status == Status.NON_FINITE)
    return Outcome(
        jnp.where(fine[:, None], now.z + step.change, jnp.where(broke[:, None], step.culprit, now.z)),
        jnp.where(fine, now.log_change + step.log_change, now.log_change),
        jnp.where(was_fine, step.status, now.status),
        jnp.where(was_fine, step.time, now.time),
    )
