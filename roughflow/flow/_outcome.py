"""What became of a solve: failure is a value, with a reason, until somebody asks to raise it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._checks import NonFiniteError, OutOfStepsError, is_traced
from ..driver import Path
from ..sde import AbstractSDE

FINE, ESCAPED, NON_FINITE, OUT_OF_STEPS = range(4)


class Outcome(eqx.Module):
    """The end of a solve of a batch.

    - `z`: the final states `(B, d)`; of a sample in trouble, its last good state.
    - `log_change`: ∫ div over the solve `(B,)`, with the sign of the direction.
    - `status`: `(B,)` of FINE, ESCAPED (left for infinity in finite time), NON_FINITE (the model
      returned NaN or infinity), OUT_OF_STEPS.
    - `time`: `(B,)`, in fractions of the horizon: when a sample got into trouble.
    """

    z: Array
    log_change: Array
    status: Array
    time: Array

    @property
    def escaped(self) -> Array:
        return self.status == ESCAPED


def start_of(z: Array) -> Outcome:
    """A solve that has not moved yet."""
    zeros = jnp.zeros(z.shape[:1], z.dtype)
    return Outcome(z, zeros, jnp.full(z.shape[:1], FINE), zeros)


def raise_failures(outcome: Outcome, sde: AbstractSDE, path: Path) -> Outcome:
    """Raise for a model that is not finite or a solver out of steps; escapes pass.

    With values at hand the message names the culprit, drift or diffusion, and the time. Under a
    `jit` it is a run-time error that says how to find out.
    """
    status = outcome.status
    if is_traced(status):
        checks = ((OUT_OF_STEPS, _steps_message()), (NON_FINITE, _traced_message()))
        z = outcome.z
        for code, message in checks:
            z = eqx.error_if(z, status == code, message)
        return eqx.tree_at(lambda o: o.z, outcome, z)
    if bool(jnp.any(status == OUT_OF_STEPS)):
        raise OutOfStepsError(_steps_message())
    if bool(jnp.any(status == NON_FINITE)):
        raise NonFiniteError(_describe(outcome, sde, path))
    return outcome


def _steps_message() -> str:
    return (
        "the adaptive solve ran out of steps: raise max_steps, loosen rtol and atol, set per_sample=True "
        "if many samples escape, or choose a stiff solver such as diffrax.Kvaerno5()"
    )


def _traced_message() -> str:
    return (
        "drift or diffusion, or a derivative of one, is not finite along the path: "
        "call outside jax.jit to see which, when and where"
    )


def _describe(outcome: Outcome, sde: AbstractSDE, path: Path) -> str:
    """Name the part that is not finite, at the first sample that met it."""
    i = int(jnp.argmax(outcome.status == NON_FINITE))
    horizon = path.t1[i] if path.t1.ndim else path.t1
    t, z = outcome.time[i] * horizon, outcome.z[i]
    where = f"at t = {float(t):.4g}, z = {[float(f'{v:.6g}') for v in z]}"
    drift, sigma = sde.drift(t, z), sde.noise(t, z)
    for name, value in (("drift", drift), ("diffusion", sigma)):
        if not all(bool(jnp.all(jnp.isfinite(a))) for a in jax.tree.leaves(value)):
            return f"{name} returned a value that is not finite {where}"
    return f"drift or diffusion, or a derivative of one, stopped being finite near {where[3:]}"
