"""Rows with noise around them, new in each step: few rows are then not learned by heart, and no place near
them is ruled out."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

FAR = 2.0  # the noise of outliers-to-be, in units of the standardised rows


class Smoothed(eqx.Module):
    """A kernel density as data for a fit: rows drawn with replacement, with normal noise of standard
    deviation `width` on all columns but the last `context`. A share of them, `outliers`, has noise of `FAR`,
    wider than the standardised rows themselves."""

    rows: Array  # and zeros after them, up to a power of two: another number of rows compiles nothing
    count: Array
    width: float
    outliers: float
    context: int = eqx.field(static=True)

    def __init__(self, rows: Array, width: float, outliers: float, context: int = 0):
        self.count = jnp.asarray(len(rows))
        self.rows = jnp.pad(rows, ((0, 2 ** math.ceil(math.log2(len(rows))) - len(rows)), (0, 0)))
        self.width, self.outliers, self.context = width, outliers, context

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        key_row, key_noise, key_far = jax.random.split(key, 3)
        rows = self.rows[jax.random.randint(key_row, shape, 0, self.count)]
        own = rows.shape[-1] - self.context
        far = jax.random.bernoulli(key_far, self.outliers, (*shape, 1))
        noise = jnp.where(far, FAR, self.width) * jax.random.normal(key_noise, (*shape, own), rows.dtype)
        return rows.at[..., :own].add(noise)


def smoothed(rows: Array, width: float, outliers: float, context: int) -> Array | Smoothed:
    """The rows with noise, or as they are if there is none."""
    return rows if width == outliers == 0 else Smoothed(rows, width, outliers, context)
