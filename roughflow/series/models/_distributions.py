"""Distributions of X(t + dt) given X(t), where they are known."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from ...transition import AbstractCoordinates
from .._bessel import log_bessel_ie
from .._chain import cholesky, solve_lower


class AbstractDistribution(eqx.Module):
    """The distribution of a state `(d,)`."""

    @abc.abstractmethod
    def log_prob(self, x: Array) -> Array:
        """The log-density at a state `(d,)`."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Array:
        """A draw `(d,)`."""

    @abc.abstractmethod
    def cdf(self, x: Array) -> np.ndarray:
        """P(X ≤ x) `(N,)` for d = 1, by NumPy: of a batch of distributions, and x of shape `(N, 1)`."""


class Normal(AbstractDistribution):
    """N(mean, covariance)."""

    mean: Array  # (d,)
    covariance: Array  # (d, d)

    def log_prob(self, x: Array) -> Array:
        factor = cholesky(self.covariance)
        white = solve_lower(factor, x - self.mean)
        return jnp.sum(jax.scipy.stats.norm.logpdf(white) - jnp.log(jnp.diag(factor)))

    def sample(self, key: PRNGKeyArray) -> Array:
        root = cholesky(self.covariance, semidefinite=True)
        return self.mean + root @ jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def cdf(self, x: Array) -> np.ndarray:
        mean, variance = np.asarray(self.mean)[..., 0], np.asarray(self.covariance)[..., 0, 0]
        return scipy.stats.norm.cdf(np.asarray(x)[..., 0], mean, np.sqrt(variance))


class Transformed(AbstractDistribution):
    """That of a state whose coordinates are normal."""

    coordinates: AbstractCoordinates
    normal: Normal

    def log_prob(self, x: Array) -> Array:
        return self.normal.log_prob(self.coordinates.from_state(x)) + self.coordinates.log_volume(x)

    def sample(self, key: PRNGKeyArray) -> Array:
        """NaN for coordinates that are those of no state."""
        y = self.normal.sample(key)
        return jnp.where(self.coordinates.is_inside(y), self.coordinates.to_state(y), jnp.nan)

    def cdf(self, x: Array) -> np.ndarray:
        """For coordinates that rise with the state."""
        return self.normal.cdf(jax.vmap(self.coordinates.from_state)(x))


class NoncentralChiSquare(AbstractDistribution):
    """That of `scale` times a noncentral χ² with `df` degrees of freedom, any positive number."""

    scale: Array
    df: Array
    noncentrality: Array

    def log_prob(self, x: Array) -> Array:
        order, v = 0.5 * self.df - 1, 0.5 * x[0] / self.scale
        near, far = jnp.sqrt(0.5 * self.noncentrality), jnp.sqrt(v)
        bessel = log_bessel_ie(order, 2 * near * far)
        return bessel - (near - far) ** 2 + order * jnp.log(far / near) - jnp.log(2 * self.scale)

    def sample(self, key: PRNGKeyArray) -> Array:
        """A gamma variable whose shape is half of the degrees of freedom plus a Poisson number."""
        key_count, key_gamma = jax.random.split(key)
        count = jax.random.poisson(key_count, 0.5 * self.noncentrality)
        return 2 * self.scale * jax.random.gamma(key_gamma, 0.5 * self.df + count)[None]

    def cdf(self, x: Array) -> np.ndarray:
        scale, df, noncentrality = (np.asarray(a) for a in (self.scale, self.df, self.noncentrality))
        return scipy.stats.ncx2.cdf(np.asarray(x)[..., 0] / scale, df, noncentrality)


class Beta(AbstractDistribution):
    """The beta distribution with a mean and a variance."""

    mean: Array
    variance: Array

    def _shapes(self) -> tuple[Array, Array]:
        total = self.mean * (1 - self.mean) / self.variance - 1
        return self.mean * total, (1 - self.mean) * total

    def log_prob(self, x: Array) -> Array:
        return jax.scipy.stats.beta.logpdf(x[0], *self._shapes())

    def sample(self, key: PRNGKeyArray) -> Array:
        drawn = jax.random.beta(key, *self._shapes())
        limits = jnp.finfo(drawn.dtype)
        return jnp.clip(drawn, limits.tiny, 1 - limits.epsneg)[None]

    def cdf(self, x: Array) -> np.ndarray:
        return scipy.stats.beta.cdf(np.asarray(x)[..., 0], *map(np.asarray, self._shapes()))
