"""Adaptive integration with any diffrax solver, including solvers for stiff equations."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._checks import check_count, check_positive
from ..driver import AbstractDriver
from ._field import Field
from ._fixed_grid import ESCAPE_RATE, AbstractGradient, AbstractIntegrator, Backpropagation, ConstantMemory
from ._outcome import Outcome, Status

# The state of an adaptive solve: (z − centre)/scale (B, d), so that tolerances have no units; ∫ div (B,); and
# two clocks (B,), which start when a sample escapes and when its coefficients stop being finite.
State = tuple[Array, Array, tuple[Array, Array]]


class Adaptive(AbstractIntegrator):
    """Adaptive steps, chosen so that the local error of every sample meets the tolerances.

    **Arguments:**

    - `solver`: any diffrax ODE solver; `diffrax.Dopri5()` by default, `diffrax.Kvaerno5()` for stiff models.
    - `rtol`, `atol`: relative and absolute tolerance, in units of the spread of the process around the centre
      of the base.
    - `max_steps`: maximum number of steps before an error is raised.
    - `gradient`: `rf.flow.Backpropagation()` (checkpointed) or `rf.flow.ConstantMemory()` (the continuous
      adjoint).
    - `per_sample`: whether each sample chooses its own steps. By default, samples share their steps, which is
      several times faster, except with implicit solvers, whose linear systems would couple the whole batch.
    - `escape_rate`: as for `rf.FixedGrid`.

    ```python
    import diffrax
    import roughflow as rf

    integrator = rf.Adaptive(diffrax.Kvaerno5(), rtol=1e-8, atol=1e-8)
    ```
    """

    solver: diffrax.AbstractSolver
    rtol: float = eqx.field(static=True)
    atol: float = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)
    gradient: AbstractGradient
    per_sample: bool = eqx.field(static=True)
    escape_rate: float = eqx.field(static=True)

    def __init__(
        self,
        solver: diffrax.AbstractSolver | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        max_steps: int = 4096,
        gradient: AbstractGradient | None = None,
        per_sample: bool | None = None,
        escape_rate: float = ESCAPE_RATE,
    ):
        check_positive("rtol", rtol)
        check_positive("atol", atol)
        check_count("max_steps", max_steps)
        self.solver = diffrax.Dopri5() if solver is None else solver
        self.rtol = rtol
        self.atol = atol
        self.max_steps = max_steps
        self.gradient = Backpropagation() if gradient is None else gradient
        implicit = isinstance(self.solver, diffrax.AbstractImplicitSolver)
        self.per_sample = implicit if per_sample is None else per_sample
        self.escape_rate = escape_rate

    def integrate(self, field: Field, z: Array, fraction: Array | None, *, reverse: bool) -> Outcome:
        ones = jnp.ones((), z.dtype)
        fraction = ones if fraction is None else fraction
        if not self.per_sample:
            return self._solve(field, z, fraction, reverse)
        # Each sample is solved as a batch of one, with its own steps.
        fields, axes = field.split()
        fractions = fraction[:, None] if fraction.ndim else fraction
        outcome = eqx.filter_vmap(self._solve, in_axes=(axes, 0, 0 if fraction.ndim else None, None))(
            fields, z[:, None], fractions, reverse
        )
        return jax.tree.map(lambda a: a[:, 0], outcome)

    def finer(self, driver: AbstractDriver, noise_dimension: int) -> "Adaptive":
        del driver, noise_dimension
        return Adaptive(
            self.solver,
            self.rtol / 16,
            self.atol / 16,
            4 * self.max_steps,
            self.gradient,
            self.per_sample,
            self.escape_rate,
        )

    def _solve(self, field: Field, z: Array, fraction: Array, reverse: bool) -> Outcome:
        zeros = jnp.zeros(z.shape[:1], z.dtype)
        state = ((z - field.centre[None]) / field.scale[None], zeros, (zeros, zeros))
        begin, end = jnp.asarray((1.0, 0.0) if reverse else (0.0, 1.0), z.dtype)
        jumps = field.path.driver.jumps
        jump_times = None
        if jumps.size:
            jump_times = jnp.ravel(jnp.tensordot(jnp.asarray(jumps, z.dtype), 1 / fraction, 0))
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(_rate),
            self.solver,
            begin,
            end,
            None,
            state,
            args=(field, fraction),
            stepsize_controller=self._controller(_batch_norm, jump_times),
            adjoint=self._adjoint(jump_times),
            max_steps=self.max_steps,
            throw=False,
        )
        assert solution.ys is not None
        z, log_change, clocks = jax.tree.map(lambda a: a[0], solution.ys)
        z = field.centre[None] + field.scale[None] * z
        escape_clock, broken_clock = (jax.lax.stop_gradient(clock) for clock in clocks)
        status = jnp.where(broken_clock != 0, Status.NON_FINITE, Status.FINE)
        # Non-finite values after an escape are not errors of the model.
        status = jnp.where(jnp.abs(escape_clock) > jnp.abs(broken_clock), Status.ESCAPED, status)
        done = solution.result == diffrax.RESULTS.successful
        status = jnp.where(done, status, Status.OUT_OF_STEPS)
        time = (end - jnp.where(status == Status.ESCAPED, escape_clock, broken_clock)) * fraction
        return Outcome(z, log_change, status, time)

    def _controller(self, norm, jump_times: Array | None):
        controller = diffrax.PIDController(self.rtol, self.atol, norm=norm)
        if jump_times is None:
            return controller
        return diffrax.ClipStepSizeController(controller, jump_ts=jump_times)

    def _adjoint(self, jump_times: Array | None) -> diffrax.AbstractAdjoint:
        if isinstance(self.gradient, ConstantMemory):
            # Parameter gradients are integrals, not states, so they need no error control.
            controller = self._controller(diffrax.adjoint_rms_seminorm, jump_times)
            return diffrax.BacksolveAdjoint(stepsize_controller=controller)
        return diffrax.RecursiveCheckpointAdjoint()


def _rate(u: ArrayLike, state: State, args: tuple[Field, Array]) -> State:
    """The augmented right-hand side in u = s/fraction."""
    field, fraction = args
    z, _, clocks = state
    z = field.centre[None] + field.scale[None] * z
    velocity, divergence, status = field.guarded(jnp.asarray(u * fraction), z, z)
    column = fraction[:, None] if fraction.ndim else fraction
    escaping = (clocks[0] != 0) | (status == Status.ESCAPED)
    breaking = (clocks[1] != 0) | (status == Status.NON_FINITE)
    ticking = tuple(jnp.where(on, jnp.ones_like(divergence), 0) for on in (escaping, breaking))
    return velocity * column / field.scale[None], divergence * fraction, (ticking[0], ticking[1])


def _batch_norm(error: tuple) -> Array:
    """The error of the worst sample; with a mean over the batch, a few samples could be inaccurate.

    Clocks are excluded because they jump by design. In the backward pass, the root finder of an implicit
    solver passes the state, its adjoint, and the adjoints of parameters and terms; only the first two count.
    """
    if len(error) == 4:
        return jnp.maximum(_batch_norm(error[0]), _batch_norm(error[1]))
    z, log_change, _ = error
    return jnp.maximum(jnp.max(jnp.sqrt(jnp.mean(z**2, axis=-1))), jnp.max(jnp.abs(log_change)))
