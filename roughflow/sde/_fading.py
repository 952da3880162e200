"""Noise that fades towards the end."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from .._checks import check_callable, check_number, check_positive
from ._noise import Noise


class FadingDiffusion(eqx.Module):
    """σ(t, z) = (1 − t/T)^p Σ(t, z): noise that is gone at time T.

    With p ≥ ½ it is what `rf.TransportSDE` can add to a velocity up to T: the score there grows as
    1/(1 − t/T), and σσᵀ times it stays finite. With p = ½ the pull of the score lasts to the end; with p = 1
    it fades too, and σ is smooth in time, so that a solver of high order keeps its order.

    **Arguments:** `diffusion` Σ, `(t, z) -> (d, m)`, of any form; `t1`, T; `power`, p.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    diffusion = rf.FadingDiffusion(rf.FullDiffusion(2, width=8, key=jax.random.key(0)))
    diffusion(0.75, jnp.zeros(2))  # half of what it is at time 0
    ```
    """

    diffusion: Callable[[Array, Array], Noise]
    t1: float
    power: float = eqx.field(static=True)

    def __init__(self, diffusion: Callable[[Array, Array], Noise], t1: float = 1.0, power: float = 0.5):
        check_positive("t1", t1)
        check_callable("diffusion", diffusion, "(t, z) -> (d, m)")
        check_number("power", power)
        self.diffusion = diffusion
        self.t1 = t1
        self.power = float(power)

    def __check_init__(self):
        if not self.power >= 0.5:
            raise ValueError(f"power must be at least 0.5, for a drift that is finite, got {self.power}")

    def __call__(self, t: Array, z: Array) -> Noise:
        sigma, factor = self.diffusion(t, z), self.faded(t, z, self.power)
        if isinstance(sigma, lx.DiagonalLinearOperator):
            return lx.DiagonalLinearOperator(factor * lx.diagonal(sigma))
        return sigma * factor if isinstance(sigma, lx.AbstractLinearOperator) else factor * sigma

    def faded(self, t: Array, z: Array, power: float) -> Array:
        """(1 − t/T)^power, in the precision of z."""
        left = remaining(t, self.t1, z)
        if power in (0.0, 1.0):
            return left if power else jnp.ones_like(left)
        # At zero a root has no derivative: it gets none, not an infinite one that times zero is NaN.
        return jnp.where(left > 0, jnp.where(left > 0, left, 1) ** power, 0)


def remaining(t: Array, t1: float | Array, z: Array) -> Array:
    """1 − t/T, in the precision of z; not below zero, where rounding might take it."""
    return jnp.maximum(1 - jnp.asarray(t, z.dtype) / t1, 0)
