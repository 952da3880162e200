"""The outcome of a solve. A failure is recorded with its reason, and raised as an error on request."""

import contextlib
import enum

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import NonFiniteError, OutOfStepsError, is_traced
from ..driver import Path
from ..faq import see
from ..sde import AbstractSDE


class Status(enum.IntEnum):
    """Why the solve of a sample ended: the codes in `rf.flow.Outcome.status`, each with a `message`.

    - `FINE`: the sample reached the end.
    - `ESCAPED`: the sample diverged to infinity in finite time. This is a valid result: the density is zero.
    - `NON_FINITE`: drift or diffusion returned NaN or infinity. Raised as `rf.NonFiniteError`.
    - `OUT_OF_STEPS`: an adaptive solve ran out of steps. Raised as `rf.OutOfStepsError`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: z**3, rf.sde.NoDiffusion())  # from z = 2 it is at infinity by t = 1/8
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    outcome = flow.solve(jnp.array([[0.1], [2.0]]), flow.sample_path(key=jax.random.key(0)), reverse=False)
    [rf.flow.Status(code).name for code in outcome.status.tolist()]  # ["FINE", "ESCAPED"]
    ```
    """

    FINE = 0
    ESCAPED = 1
    NON_FINITE = 2
    OUT_OF_STEPS = 3

    @property
    def message(self) -> str:
        """What happened and what to do, in one line."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.FINE: "the solve reached its end",
    Status.ESCAPED: "the sample diverged in finite time: its density is zero",
    Status.NON_FINITE: (
        "drift or diffusion, or a derivative of either, is not finite along the path: "
        "call log_prob_given_path outside jax.jit to see which, when and where" + see("model-not-finite")
    ),
    Status.OUT_OF_STEPS: (
        "the adaptive solve ran out of steps: raise max_steps, loosen rtol and atol, set per_sample=True "
        "if many samples escape, or choose a stiff solver such as diffrax.Kvaerno5()" + see("out-of-steps")
    ),
}
_ERRORS = {Status.OUT_OF_STEPS: OutOfStepsError, Status.NON_FINITE: NonFiniteError}


class Outcome(eqx.Module):
    """The result of solving a batch.

    - `z`: the final states `(B, d)`; for a sample with an error, its last valid state.
    - `log_change`: `(B,)`, the integral of the divergence along the solve, from its first time to its last.
    - `status`: `(B,)`, why each solve ended, a code of `rf.flow.Status`.
    - `time`: `(B,)`, time of the error, as a fraction of the horizon.
    """

    z: Array
    log_change: Array
    status: Array
    time: Array

    @property
    def has_escaped(self) -> Array:
        return self.status == Status.ESCAPED


def start_of(z: Array) -> Outcome:
    """The initial outcome, before the first step."""
    zeros = jnp.zeros(z.shape[:1], z.dtype)
    return Outcome(z, zeros, jnp.full(z.shape[:1], Status.FINE), zeros)


def failed(outcome: Outcome) -> Array:
    """A mask of the samples that have no result; an escape is a result."""
    return (outcome.status == Status.NON_FINITE) | (outcome.status == Status.OUT_OF_STEPS)


def raise_failures(outcome: Outcome, status: Array, sde: AbstractSDE, path: Path) -> Outcome:
    """Raise an error if a model has values that are not finite or a solver ran out of steps. Escapes raise no
    error.

    Outside of `jit`, the message says whether drift or diffusion is not finite, and at which time. Under
    `jit`, the error is raised at run time, and its message says how to find this out.
    """
    if is_traced(status):
        z = outcome.z
        for code in _ERRORS:
            z = eqx.error_if(z, status == code, code.message)
        return eqx.tree_at(lambda o: o.z, outcome, z)
    codes = np.asarray(status)
    if np.any(codes == Status.OUT_OF_STEPS):
        raise OutOfStepsError(Status.OUT_OF_STEPS.message)
    if np.any(codes == Status.NON_FINITE):
        raise NonFiniteError(_describe(outcome, codes, sde, path))
    return outcome


@contextlib.contextmanager
def one_line_errors():
    """A context manager for calls of jitted solves inside the library, which replaces long run-time errors by
    short ones."""
    try:
        yield
    except eqx.EquinoxRuntimeError as error:
        for code, kind in _ERRORS.items():
            if code.message in str(error):
                raise kind(code.message) from None
        raise


def _describe(outcome: Outcome, codes: np.ndarray, sde: AbstractSDE, path: Path) -> str:
    """Name the coefficient that is not finite, at the first affected sample."""
    i = np.unravel_index(np.argmax(codes == Status.NON_FINITE), codes.shape)
    time, z, t1 = (np.asarray(jax.lax.stop_gradient(a)) for a in (outcome.time, outcome.z, path.t1))
    time, z, horizon = time[i], z[i], float(np.broadcast_to(t1, codes.shape)[i])
    # An adaptive solve determines the time only up to a fraction of a step, so earlier and later times are
    # tried.
    offsets = np.concatenate([[0.0], *([s, -s] for s in 10.0 ** np.arange(-7, -0.5, 0.5))])
    for offset in offsets:
        t = horizon * np.clip(time + offset, 0, 1).astype(z.dtype)
        for name, part in (("drift", sde.drift), ("diffusion", sde.noise)):
            values = jax.tree.leaves(eqx.filter(part(jnp.asarray(t), jnp.asarray(z)), eqx.is_array))
            if not all(bool(jnp.all(jnp.isfinite(a))) for a in values):
                return f"{name} returned a value that is not finite {_place(t, z)}{see('model-not-finite')}"
    place = _place(horizon * time, z)
    return (
        f"drift or diffusion, or a derivative of either, stopped being finite "
        f"{place}{see('model-not-finite')}"
    )


def _place(t: np.ndarray, z: np.ndarray) -> str:
    return f"at t = {float(t):.4g}, z = [{', '.join(f'{v:.6g}' for v in z)}]"
