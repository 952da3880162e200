"""Explicit Runge–Kutta on a fixed grid: the fast way, and the default."""

import math
from functools import partial
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_count, check_positive, shown
from ..driver import AbstractDriver, Path
from ..faq import see
from ._blocks import block_by_block
from ._field import Field
from ._gradient import AbstractGradient, Backpropagation, ConstantMemory
from ._integrator import ESCAPE_RATE, AbstractIntegrator
from ._outcome import Outcome, Status, start_of
from ._reversible import reversible_scan
from ._runge_kutta import Span, order_of, runge_kutta

LATE = 2.0  # for what is fastest at the end: steps that shrink towards it


class FixedGrid(AbstractIntegrator):
    """A fixed number of steps of an explicit Runge–Kutta method over the horizon.

    **Arguments:**

    - `method`: any explicit diffrax solver of order 2 or more, such as `diffrax.Heun()`,
      `diffrax.Midpoint()`, `rf.RK4()`, `diffrax.Dopri5()` (the default), `diffrax.Tsit5()`, `rf.RK6()`.
      Euler's method is refused: on a random path it converges to another equation, the Itô equation
      with the Stratonovich drift.
    - `steps`: how many over the horizon; by default what resolves the driver's fastest wave. A
      piecewise linear path gets at least one step a piece, and no step crosses a jump of its slope.
      Whether they also resolve the model, a stiff or long-running one say, `rf.fit` looks at if nothing is
      said here, and an estimate reports it (`solver_error`).
    - `gradient`: `rf.Backpropagation()` or `rf.ConstantMemory()`.
    - `escape_rate`: a sample that would travel this many times its distance from the centre of the base,
      plus as many spreads of the process, in one horizon counts as having escaped to infinity.
    - `late`: the times of the steps are s = 1 − (1 − u)ᵃ for even u, a = `late`: 1 for steps of one length, 2
      for ones that shrink to nothing towards the end, where a velocity learned from data is fastest and noise
      that fades as √(1 − s) has no derivative: methods of high order come to 3/2 there for a = 1, to 3 for 2.

    ```python
    import diffrax
    import roughflow as rf

    integrator = rf.FixedGrid(diffrax.Tsit5(), steps=32, gradient=rf.ConstantMemory())
    ```
    """

    method: diffrax.AbstractERK
    steps: int | None = eqx.field(static=True)
    gradient: AbstractGradient
    escape_rate: float = eqx.field(static=True)
    late: float = eqx.field(static=True, default=1.0)

    def __init__(
        self,
        method: diffrax.AbstractERK | None = None,
        steps: int | None = None,
        gradient: AbstractGradient | None = None,
        escape_rate: float = ESCAPE_RATE,
        late: float = 1.0,
    ):
        method = diffrax.Dopri5() if method is None else method
        if isinstance(method, diffrax.Euler):
            raise ValueError(
                "Euler's method converges to the wrong equation on a random path; use a method of order "
                "2 or more, or rf.simulate with rf.EulerMaruyama()" + see("refused-methods")
            )
        if not isinstance(method, diffrax.AbstractERK):
            raise TypeError(
                f"method must be an explicit Runge-Kutta method, got {shown(method)}; "
                "use rf.Adaptive for any other diffrax solver" + see("refused-methods")
            )
        self.method = method
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
            return reversible_scan((field, z), spans, self.method, self.gradient.coupling)
        outcome, _ = jax.lax.scan(
            lambda now, span: (sticky_step(field, now, span, self.method), None),
            start_of(z),
            spans,
        )
        return outcome

    def finer(self, driver: AbstractDriver, noise_dimension: int) -> "FixedGrid":
        return self.with_steps(2 * self.count(driver, noise_dimension))

    def with_steps(self, steps: int) -> "FixedGrid":
        """The same with so many steps."""
        return FixedGrid(self.method, steps, self.gradient, self.escape_rate, self.late)

    def count(self, driver: AbstractDriver, noise_dimension: int) -> int:
        """How many steps are taken: as many in each piece of the path."""
        steps = self.steps or default_steps(order_of(self.method), driver, noise_dimension)
        pieces = driver.jumps.size + 1
        return pieces * math.ceil(steps / pieces)

    def grid(self, path: Path, fraction: Array | None) -> Array:
        """The times of the steps, `(N + 1,)`, or `(N + 1, B)` if samples stop at their own times."""
        knots = np.concatenate([[0.0], path.driver.jumps, [1.0]])
        pieces = knots.size - 1
        each = self.count(path.driver, path.noise_dimension) // pieces
        times = self.time(np.arange(each * pieces + 1), each, knots, np)
        if fraction is None:
            return jnp.asarray(times)
        if pieces == 1:
            return jnp.tensordot(jnp.asarray(times, fraction.dtype), fraction, 0)
        # Knots stay where they are; a sample that has arrived takes steps of no length.
        times = jnp.asarray(times, fraction.dtype)
        return jnp.minimum(jnp.expand_dims(times, range(1, 1 + fraction.ndim)), fraction[None])

    def time(self, place: Any, each: Any, knots: np.ndarray, xp: Any = jnp) -> Any:
        """When the step at a place begins, if there are `each` between two knots: even in u, where
        1 − s = (1 − u)^late; the knots themselves to the last bit. `xp` is the module whose arrays these
        are."""
        even = 1 - (1 - knots) ** (1 / self.late)
        piece = xp.minimum(place // each, knots.size - 2)
        inner = place - each * piece
        u = xp.asarray(even)[piece] + xp.asarray(np.diff(even))[piece] * (inner / each)
        between = xp.where(inner == each, xp.asarray(knots)[piece + 1], 1 - (1 - u) ** self.late)
        return xp.where(inner == 0, xp.asarray(knots)[piece], between)


class CountedGrid(AbstractIntegrator):
    """A fixed grid with a number of steps that is not known when it is compiled: one program for all. It has
    no derivatives backwards."""

    grid: FixedGrid
    each: Array  # steps between two jumps of the path's slope
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
            return sticky_step(field, now, (start, stop), self.grid.method)

        return jax.lax.fori_loop(0, total, step, start_of(z))

    def finer(self, driver: AbstractDriver, noise_dimension: int) -> AbstractIntegrator:
        raise NotImplementedError("a grid to look at errors with has none of its own")


def default_steps(order: int, driver: AbstractDriver, noise_dimension: int) -> int:
    """Enough for the fastest wave of a smooth driver, fewer for methods of higher order.

    Without noise there are no waves to follow, and half the least number will do.
    """
    per_wave, least = {2: (16, 64), 3: (6, 24), 4: (4, 16)}.get(order, (1.3, 8))
    if not noise_dimension:
        return least // 2
    waves = 1 if driver.jumps.size else driver.num_functions
    return max(least, math.ceil(per_wave * waves))


def sticky_step(field: Field, now: Outcome, span: Span, method: diffrax.AbstractERK) -> Outcome:
    """Advance the samples that are fine; one that got into trouble stays where it last was fine.

    One whose model is not finite moves to the point where that shows, for the message.
    """
    step = runge_kutta(field, span, now.z, method)
    was_fine = now.status == Status.FINE
    fine = was_fine & (step.status == Status.FINE)
    broke = was_fine & (step.status == Status.NON_FINITE)
    return Outcome(
        jnp.where(fine[:, None], now.z + step.change, jnp.where(broke[:, None], step.culprit, now.z)),
        jnp.where(fine, now.log_change + step.log_change, now.log_change),
        jnp.where(was_fine, step.status, now.status),
        jnp.where(was_fine, step.time, now.time),
    )
