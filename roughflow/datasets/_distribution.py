"""What the distributions have in common."""

import abc
import functools
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, as_shape, check_key

Window = tuple[float, float, float, float]


class AbstractDistribution(eqx.Module):
    """A distribution on the plane with its density. Those here have no parameters: all who name one mean the
    same.

    - `entropy`: −E log p(Z) in nats, the least that the expected negative log-likelihood of a model can be.
    - `extent`: (left, right, bottom, top) of a window that shows the distribution.

    It has what a flow asks of its base, so a flow may also start from one.

    ```python
    import jax
    from roughflow.datasets import Moons

    distribution = Moons()
    x = distribution.sample(key=jax.random.key(0), shape=(100,))  # (100, 2)
    distribution.log_prob(x).shape  # (100,)
    ```
    """

    extent: eqx.AbstractClassVar[Window]

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        """Draw `shape` points, an array of shape `(*shape, 2)`."""
        return self._sample(check_key(key), as_shape(shape, 2))

    def log_prob(self, z: Array) -> Array:
        """Log-density at `z` of shape `(..., 2)`, in the precision of `z`; −inf where the density is zero."""
        z = jnp.asarray(as_real("z", z))
        if z.shape[-1:] != (2,):
            raise ValueError(f"z must have shape (..., 2), got {z.shape}")
        return self._log_prob(z if jnp.issubdtype(z.dtype, jnp.floating) else z.astype(float))

    @property
    @abc.abstractmethod
    def entropy(self) -> float: ...

    @abc.abstractmethod
    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array: ...

    @abc.abstractmethod
    def _log_prob(self, z: Array) -> Array: ...


class AbstractSmoothDistribution(AbstractDistribution):
    """One in the middle of the plane with a smooth density. Its entropy is an integral on a grid."""

    extent: ClassVar[Window] = (-4.0, 4.0, -4.0, 4.0)

    @property
    def entropy(self) -> float:
        return entropy_on_grid(self)


@functools.lru_cache
def entropy_on_grid(distribution: AbstractDistribution) -> float:
    """−∫ p log p by the trapezoidal rule: the finest, the star, is resolved to 2e-5, the rest to 1e-6."""
    side, step = np.linspace(-5, 5, 161, retstep=True)
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    with jax.ensure_compile_time_eval():
        log_prob = np.asarray(jax.jit(distribution.log_prob)(jnp.asarray(grid)), float)
    density = np.exp(log_prob)
    return float(-np.sum(density * np.where(density > 0, log_prob, 0)) * step**2)
