"""Base distributions: the distributions of Z₀."""

import math
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    as_real,
    as_shape,
    check_key,
    check_positive,
    check_vector,
    finite_array,
    is_traced,
    shown,
)
from .._linear import cholesky


@runtime_checkable
class Base(Protocol):
    """The interface of a base distribution; `z` is one point of shape `(d,)`."""

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array: ...

    def log_prob(self, z: Array) -> Array: ...


@runtime_checkable
class Whitened(Base, Protocol):
    """A base with a map from standard normal vectors u of shape `(d,)` to its points.

    Any smooth one-to-one map onto the support of the base is valid; the density is still given by `log_prob`.
    The closer the distribution of the mapped vectors is to the base, the better. A base whose support is a
    subset of Rᵈ needs this map, so that a search for starting points stays inside the support.
    """

    def from_normal(self, u: Array) -> Array: ...


class Normal(eqx.Module):
    """Independent normal distributions with trainable means and scales.

    **Arguments:**

    - `loc`: the means, shape `(d,)`.
    - `scale`: the standard deviations, a number or shape `(d,)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    base = rf.Normal(jnp.zeros(2), 1.0)
    base.sample(key=jax.random.key(0), shape=(100,)).shape  # (100, 2)
    ```
    """

    loc: Array
    log_scale: Array

    def __init__(self, loc: Array, scale: float | Array = 1.0):
        loc = finite_array("loc", loc)
        check_positive("scale", scale)
        if loc.ndim != 1 or jnp.shape(scale) not in ((), loc.shape):
            raise ValueError(
                "loc must have shape (d,), and scale must be a number or have the same shape, "
                f"got {loc.shape} and {jnp.shape(scale)}"
            )
        self.loc = loc
        # The logarithm is trained, so that the scale stays positive. It is computed in NumPy, which needs no
        # compilation.
        xp = jnp if is_traced(scale) else np
        self.log_scale = jnp.asarray(xp.log(xp.broadcast_to(xp.asarray(scale, loc.dtype), loc.shape)))

    def __check_init__(self):
        if not self.loc.ndim or self.loc.shape != self.log_scale.shape:
            raise ValueError(
                "loc and log_scale must have the same shape (d,), "
                f"got {self.loc.shape} and {self.log_scale.shape}"
            )

    @property
    def scale(self) -> Array:
        return jnp.exp(self.log_scale)

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        """Draw points, as an array of shape `(*shape, d)`."""
        shape = as_shape(shape, self.loc.size)
        noise = jax.random.normal(check_key(key), (*shape, self.loc.size), self.loc.dtype)
        lead = range(len(shape))
        return jnp.expand_dims(self.loc, lead) + jnp.expand_dims(self.scale, lead) * noise

    def from_normal(self, u: Array) -> Array:
        return self.loc + self.scale * u

    def log_prob(self, z: Array) -> Array:
        """Log-density at `z` of shape `(..., d)`."""
        z = jnp.asarray(as_real("z", z))
        check_vector("z", z, self.loc.size)
        lead = range(z.ndim - 1)
        residual = (z - jnp.expand_dims(self.loc, lead)) / jnp.expand_dims(self.scale, lead)
        constant = 0.5 * self.loc.size * math.log(2 * math.pi) + jnp.sum(self.log_scale)
        return -0.5 * jnp.sum(residual**2, axis=-1) - constant


class MultivariateNormal(eqx.Module):
    """A normal distribution with trainable mean and covariance LLᵀ, where L is lower triangular.

    **Arguments:**

    - `loc`: the mean, shape `(d,)`.
    - `covariance`: a symmetric, positive definite matrix, shape `(d, d)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    base = rf.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.5], [0.5, 2.0]]))
    base.log_prob(jnp.zeros(2))
    ```
    """

    loc: Array
    lower: Array  # (d, d); only the entries below the diagonal are used
    log_diagonal: Array  # (d,)

    def __init__(self, loc: Array, covariance: Array):
        loc, covariance = finite_array("loc", loc), finite_array("covariance", covariance)
        if loc.ndim != 1 or covariance.shape != 2 * loc.shape:
            raise ValueError(
                f"loc must have shape (d,) and covariance (d, d), got {loc.shape} and {covariance.shape}"
            )
        # Inside jit, a matrix that is not positive definite gives NaN.
        root = cholesky(covariance) if is_traced(covariance) else self._checked_root(np.asarray(covariance))
        self.loc, self.lower = loc, jnp.asarray(jnp.tril(root, -1), loc.dtype)
        self.log_diagonal = jnp.asarray(jnp.log(jnp.diagonal(root)), loc.dtype)

    @staticmethod
    def _checked_root(covariance: np.ndarray) -> np.ndarray:
        if not np.allclose(covariance, covariance.T):
            raise ValueError("covariance must be symmetric")
        try:
            return np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            raise ValueError("covariance must be positive definite") from None

    @property
    def covariance(self) -> Array:
        return self._root @ self._root.T

    @property
    def _root(self) -> Array:
        return jnp.tril(self.lower, -1) + jnp.diag(jnp.exp(self.log_diagonal))

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        """Draw points, as an array of shape `(*shape, d)`."""
        shape = as_shape(shape, self.loc.size)
        noise = jax.random.normal(check_key(key), (*shape, self.loc.size), self.loc.dtype)
        return jnp.expand_dims(self.loc, range(len(shape))) + noise @ self._root.T

    def from_normal(self, u: Array) -> Array:
        return self.loc + self._root @ u

    def log_prob(self, z: Array) -> Array:
        """Log-density at `z` of shape `(..., d)`."""
        z = jnp.asarray(as_real("z", z))
        check_vector("z", z, self.loc.size)
        rows = jnp.reshape(z, (-1, self.loc.size)) - self.loc[None]
        residual = jax.scipy.linalg.solve_triangular(self._root, rows.T, lower=True)
        constant = 0.5 * self.loc.size * math.log(2 * math.pi) + jnp.sum(self.log_diagonal)
        return jnp.reshape(-0.5 * jnp.sum(residual**2, axis=0) - constant, z.shape[:-1])


def dimension_of(base: Base, name: str = "base") -> int:
    """The dimension d of a base, whose points have shape `(d,)`. Raises an error if the object is not a
    base."""
    wanted = f"{name} must have the methods sample(*, key, shape=()) and log_prob(z), got {shown(base)}"
    if not isinstance(base, Base) or isinstance(base, type):
        raise TypeError(wanted)
    key = jax.random.key(0)
    try:
        point, pair = (jax.eval_shape(lambda s=s: base.sample(key=key, shape=s)) for s in ((), (2,)))
    except TypeError as error:
        raise TypeError(f"{wanted}: {error}") from error
    if len(point.shape) != 1:
        raise ValueError(f"{name}.sample must return shape (d,) for shape=(), got {point.shape}")
    if pair.shape != (2, *point.shape):
        wanted = f"shape (2, {point.size}) for shape=(2,)"
        raise ValueError(f"{name}.sample must return {wanted}, got {pair.shape}")
    if (value := jax.eval_shape(base.log_prob, point)).shape:
        raise ValueError(f"{name}.log_prob must return one number for a point (d,), got shape {value.shape}")
    return point.shape[0]


def some_points(base: Base, dimension: int, count: int = 32) -> Array:
    """Starting points `(count, d)`. If the base has `from_normal`, they are computed from constants, so that
    a compiled solve need not draw random numbers."""
    if isinstance(base, Whitened):
        numbers = np.random.default_rng(0).normal(size=(count, dimension))
        return jax.vmap(base.from_normal)(jnp.asarray(numbers))
    return base.sample(key=jax.random.key(0), shape=(count,))


def log_prob_of(base: Base, z: Array) -> Array:
    """The log-density at a batch of points of any shape, `(..., d)`, for a base that supports only single
    points."""
    flat = jax.vmap(base.log_prob)(jnp.reshape(z, (-1, z.shape[-1])))
    return jnp.reshape(flat, z.shape[:-1])
