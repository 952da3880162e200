"""The interface of integrators, and methods to differentiate a solve."""

import abc

import equinox as eqx
from jaxtyping import Array

from .._checks import check_fields, check_positive
from ..driver import AbstractDriver
from ._field import Field
from ._outcome import Outcome


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
