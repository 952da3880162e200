"""Brownian motion on a grid, joined by straight lines."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import as_real, check_count, is_whole
from ._driver import AbstractDriver


class PiecewiseLinear(AbstractDriver):
    """Ḃ = ωₖ/√Δₖ on the k-th interval: exact on the grid, linear between.

    **Arguments:**

    - `grid`: the number n of equal intervals, or increasing times that start at 0. Only their
      proportions count: the last one falls on the horizon of the path.

    ```python
    import jax
    import roughflow as rf

    path = rf.PiecewiseLinear(64).sample(key=jax.random.key(0), noise_dimension=2)
    path = rf.PiecewiseLinear([0.0, 0.1, 0.3, 1.0]).sample(key=jax.random.key(0))
    ```
    """

    num_functions: int = eqx.field(static=True)
    knots: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, grid: int | Sequence[float] | np.ndarray):
        self.knots = as_knots(grid)
        self.num_functions = len(self.knots) - 1

    def integrals(self, s: Array) -> Array:
        s = jnp.asarray(s)[..., None]
        start, width = (jnp.expand_dims(a, range(s.ndim - 1)) for a in self._pieces(s.dtype))
        return jnp.clip((s - start) / width, 0, 1) * jnp.sqrt(width)

    def slope(self, s: Array, coefficients: Array) -> Array:
        start, width = self._pieces(coefficients.dtype)
        piece = piece_of(start, s)
        if piece.ndim == 0 or coefficients.ndim == 2:
            chosen = jnp.take(coefficients, piece, axis=-2)
        else:
            chosen = jnp.take_along_axis(coefficients, piece[..., None, None], axis=-2)[..., 0, :]
        root = jnp.sqrt(width[piece])
        return chosen / (root[..., None] if root.ndim else root)

    def refined(self) -> "PiecewiseLinear":
        return PiecewiseLinear(halved(self.knots))

    def refine(self, coefficients: Array, more: Array) -> Array:
        # Each interval is halved: the mean of the two slopes is the old one, their difference is new.
        halves = jnp.stack([coefficients + more, coefficients - more], axis=-2) / 2**0.5
        return jnp.reshape(halves, (*more.shape[:-2], 2 * self.num_functions, more.shape[-1]))

    @property
    def jumps(self) -> np.ndarray:
        return np.asarray(self.knots[1:-1])

    def _pieces(self, dtype: np.dtype) -> tuple[Array, Array]:
        knots = np.asarray(self.knots)
        return jnp.asarray(knots[:-1], dtype), jnp.asarray(np.diff(knots), dtype)


def as_knots(grid: int | Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """0 = s₀ < … < sₙ = 1, from a number of equal intervals or times that start at 0."""
    if is_whole(grid):
        return tuple(np.linspace(0.0, 1.0, check_count("grid", grid) + 1).tolist())
    times = np.asarray(as_real("grid", grid), float)
    rising = times.ndim == 1 and times.size > 1 and np.all(np.diff(times) > 0)
    if not rising or times[0] != 0 or not np.isfinite(times[-1]):
        raise ValueError(f"grid must be a positive number or increasing times that start at 0, got {grid}")
    return tuple((times / times[-1]).tolist())


def halved(knots: tuple[float, ...]) -> np.ndarray:
    """The knots and the middles between them."""
    old = np.asarray(knots)
    return np.sort(np.concatenate([old, (old[:-1] + old[1:]) / 2]))


def piece_of(start: Array, s: Array) -> Array:
    """The number of the interval that s lies in, of those that begin at `start`."""
    return jnp.clip(jnp.searchsorted(start, s, side="right") - 1, 0, start.size - 1)
