"""The interface of integrators, and how a solve is differentiated."""

import abc

import equinox as eqx
from jaxtyping import Array

from .._checks import check_fields, check_positive
from ..driver import AbstractDriver
from ._field import Field
from ._outcome import Outcome


class AbstractGradient(eqx.Module):
    """A way to differentiate a solve. Every parameter, starting point and path coefficient gets one."""


class Backpropagation(AbstractGradient):
    """Through the steps taken, with checkpoints: the exact gradient of the numerical solution.

    The default. A fixed grid keeps states and velocities, which grow with the number of steps,
    and recomputes everything inside a step; an adaptive solve keeps a logarithmic number of states.

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(gradient=rf.flow.Backpropagation())
    ```
    """


class ConstantMemory(AbstractGradient):
    """Memory that does not grow with the number of steps.

    A fixed grid turns reversible (McCallum & Foster 2024): two copies of the state step over one another
    so that every step can be undone exactly, at twice the evaluations, and the gradient is again that
    of the numerical solution. An adaptive solve integrates the continuous adjoint equation backwards;
    its gradient is as accurate as its tolerances. Forward mode (`jax.jvp`, `jax.jacfwd`) is not available.

    **Arguments:** `coupling`, in (0, 1]: how strongly the two copies are held together, used by fixed grids.
    Smaller is more stable forwards, but undoing N steps multiplies rounding errors by coupling^(−N).

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(steps=1000, gradient=rf.flow.ConstantMemory())
    ```
    """

    coupling: float = eqx.field(static=True, default=0.999)

    def __check_init__(self):
        if not 0 < self.coupling <= 1:
            raise ValueError(f"coupling must lie in (0, 1], got {self.coupling}")


# How many times its own size, in spreads of the process, a state may travel per horizon (`Field.guarded`).
ESCAPE_RATE = 1e5


class AbstractIntegrator(eqx.Module):
    """Solves the random ODE of a batch as one system: `rf.FixedGrid` and `rf.Adaptive` do.

    One of your own calls the field as `field.guarded`, which tells samples in trouble apart, and returns an
    `rf.flow.Outcome`. Its `escape_rate` is a static field.
    """

    gradient: eqx.AbstractVar[AbstractGradient]
    escape_rate: eqx.AbstractVar[float]

    def __check_init__(self):
        check_fields(self)
        check_positive("escape_rate", self.escape_rate)

    @property
    def forward_mode(self) -> bool:
        """Whether `jax.jvp` goes through a solve; `jax.vjp` always does."""
        return not isinstance(self.gradient, ConstantMemory)

    @abc.abstractmethod
    def integrate(self, field: Field, z: Array, fraction: Array | None, *, reverse: bool) -> Outcome:
        """From s = 0 to `fraction` of the horizon, or back from there to 0 if `reverse`.

        `fraction` is None for the whole horizon, a scalar, or `(B,)` when samples stop at different
        times.
        """

    @abc.abstractmethod
    def finer(self, driver: AbstractDriver, noise_dimension: int) -> "AbstractIntegrator":
        """This integrator with half the step, or a tighter tolerance, to see the error of its own."""
