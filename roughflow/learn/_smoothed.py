"""Rows with noise around them, new in each step: few rows are then not learned by heart."""

import equinox as eqx
import jax
from jaxtyping import Array, PRNGKeyArray


class Smoothed(eqx.Module):
    """A kernel density as data for a fit: rows drawn with replacement, with normal noise of standard
    deviation `width` on all columns but the last `context`."""

    rows: Array
    width: float
    context: int = eqx.field(static=True, default=0)

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        key_row, key_noise = jax.random.split(key)
        rows = self.rows[jax.random.randint(key_row, shape, 0, len(self.rows))]
        own = rows.shape[-1] - self.context
        noise = self.width * jax.random.normal(key_noise, (*shape, own), rows.dtype)
        return rows.at[..., :own].add(noise)
