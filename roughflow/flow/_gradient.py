"""How a solve is differentiated in reverse mode: the user's choice, and what it costs."""

import equinox as eqx


class AbstractGradient(eqx.Module):
    """A way to differentiate a solve. Every parameter, starting point and path coefficient gets one."""


class Backpropagation(AbstractGradient):
    """Through the steps taken, with checkpoints: the exact gradient of the numerical solution.

    The default. A fixed grid keeps states and velocities, which grow with the number of steps,
    and recomputes everything inside a step; an adaptive solve keeps a logarithmic number of states.

    ```python
    import roughflow as rf

    integrator = rf.FixedGrid(gradient=rf.Backpropagation())
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

    integrator = rf.FixedGrid(steps=1000, gradient=rf.ConstantMemory())
    ```
    """

    coupling: float = eqx.field(static=True, default=0.999)

    def __check_init__(self):
        if not 0 < self.coupling <= 1:
            raise ValueError(f"coupling must lie in (0, 1], got {self.coupling}")
