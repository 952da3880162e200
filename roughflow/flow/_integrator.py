"""What every integrator offers: a batch carried along the random ODE, forwards or backwards."""

import abc

import equinox as eqx
from jaxtyping import Array

from .._checks import check_fields, check_positive
from ..driver import AbstractDriver
from ._field import Field
from ._gradient import AbstractGradient, ConstantMemory
from ._outcome import Outcome

# How many times its own size, in spreads of the process, a state may travel per horizon (`Field.guarded`).
ESCAPE_RATE = 1e5


class AbstractIntegrator(eqx.Module):
    """Solves the random ODE of a batch as one system: `rf.FixedGrid` and `rf.Adaptive` do.

    One of your own calls the field as `field.guarded`, which tells samples in trouble apart, and returns an
    `rf.Outcome`. Its `escape_rate` is a static field.
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
