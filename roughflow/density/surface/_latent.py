"""The flow as a map of standard normal numbers: Z_T = Φ(ξ), ξ = (whitened start, path coefficients).

Everything random in Z_T is in ξ in R^D, D = d + nm, or nm if the start is given, so p(x) is an integral
over the surface Φ(ξ) = x. All functions take a batch, one ξ for each point.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._checks import check_instance
from ..._linear import log_abs_det
from ...flow import Base, NoDivergence, Normal, StochasticFlow, Whitened
from ...sde import ExactCorrection, with_explicit_parameters


class Target(eqx.Module):
    """Where to end, `x` `(B, d)`, and where from: `start` `(B, d)`, or None for a draw from the base."""

    x: Array
    start: Array | None

    def repeat(self, count: int) -> "Target":
        return jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), self)


class Latent(eqx.Module):
    """The map Φ of a flow, and the density of ξ.

    A base that does not say how to make it from normal numbers is whitened by the mean and spread of
    its own samples; either way its true density takes the place of the normal one.
    """

    flow: StochasticFlow
    affine: tuple[Array, Array] | None
    fixed_start: bool = eqx.field(static=True)

    def __init__(self, flow: StochasticFlow, *, fixed_start: bool = False):
        check_instance("flow", flow, StochasticFlow, "an rf.StochasticFlow")
        self.fixed_start = fixed_start
        self.affine = None if fixed_start else _mean_and_spread(flow.base)
        # The end is all that is wanted of a solve, and it must be a function of ξ alone.
        # Parameters that functions close over are brought to light, for `constant` to find.
        point = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
        sde = with_explicit_parameters(flow.sde, jnp.zeros(point.shape, point.dtype))
        plain = (NoDivergence(), ExactCorrection(), sde)
        self.flow = eqx.tree_at(lambda f: (f.divergence, f.correction, f.sde), flow, plain)

    @property
    def start_size(self) -> int:
        return 0 if self.fixed_start else self.flow.dimension

    @property
    def path_size(self) -> int:
        return self.flow.driver.num_functions * self.flow.noise_dimension

    @property
    def size(self) -> int:
        return self.start_size + self.path_size

    def coefficients(self, xi: Array) -> Array:
        """The path's part of ξ, `(..., n, m)`."""
        shape = (*xi.shape[:-1], self.flow.driver.num_functions, self.flow.noise_dimension)
        return jnp.reshape(xi[..., self.start_size :], shape)

    def end(self, xi: Array, start: Array | None) -> tuple[Array, Array]:
        """Φ(ξ), shape `(B, d)`, and which samples escaped on the way."""
        path = self.flow.driver.path(self.coefficients(xi), self.flow.t1)
        begin = jax.vmap(self._from_normal)(xi[:, : self.start_size]) if start is None else start
        outcome = self.flow.solve(begin, path, reverse=False)
        return outcome.z, outcome.has_escaped

    def quiet(self) -> "Latent":
        """For a search, that may try what no path does: a solve that fails there is a NaN, not an error."""
        return eqx.tree_at(lambda latent: latent.flow, self, self.flow.without_errors())

    def log_prior(self, xi: Array) -> Array:
        """The log-density of ξ, shape `(B,)`."""
        start, path = jnp.split(xi, [self.start_size], axis=1)
        log_path = jnp.sum(jax.scipy.stats.norm.logpdf(path), axis=-1)
        if self.fixed_start:
            return log_path
        # log p₀(z₀) + log |∂z₀/∂u|
        log_base = jax.vmap(lambda u: self.flow.base.log_prob(self._from_normal(u)))(start)
        return log_path + log_base + log_abs_det(jax.vmap(jax.jacfwd(self._from_normal))(start))

    def _from_normal(self, u: Array) -> Array:
        if self.affine is None:
            return self.flow.base.from_normal(u)
        return self.affine[0] + self.affine[1] * u

    def pull_back(self, x: Array, omega: Array) -> tuple[Array, Array]:
        """The ξ `(B, K, D)` with Φ(ξ) = x whose paths are ω `(B, K, W)`, and which of them escape; for a base
        that is whitened by its mean and spread."""
        assert self.affine is not None
        mean, spread = (a[None, None] for a in self.affine)
        shape = (*omega.shape[:2], self.flow.driver.num_functions, self.flow.noise_dimension)
        path = self.flow.driver.path(jnp.reshape(omega, shape), self.flow.t1)
        outcome = self.flow.solve(x[:, None], path, reverse=True)
        return jnp.concatenate([(outcome.z - mean) / spread, omega], axis=-1), outcome.has_escaped

    def refine(self, noise: Array, more: Array) -> Array:
        """Numbers for twice the functions, `(..., d + 2nm)`, that share what this ξ has."""
        start, path = noise[..., : self.start_size], self.coefficients(noise)
        finer = self.flow.driver.refine(path, jnp.reshape(more, path.shape))
        return jnp.concatenate([start, jnp.reshape(finer, (*noise.shape[:-1], -1))], axis=-1)


def _mean_and_spread(base: Base) -> tuple[Array, Array] | None:
    if isinstance(base, Normal):
        return base.loc, base.scale
    if isinstance(base, Whitened):
        return None
    draws = jax.lax.stop_gradient(base.sample(key=jax.random.key(0), shape=(4096,)))
    return jnp.mean(draws, axis=0), jnp.std(draws, axis=0)


def constant(tree):
    """A pytree, functions among its leaves, that derivatives do not see."""
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_array(a) else a, tree)
