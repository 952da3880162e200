"""The flow as a map of standard normal numbers: Z_T = Φ(ξ), ξ = (whitened start, path coefficients).

Everything random in Z_T is in ξ in R^D, D = d + nm, so p(x) is an integral over the surface Φ(ξ) = x.
All functions take a batch, one ξ a row.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..flow import NoDivergence, Normal, StochasticFlow
from ..sde import ExactCorrection


class Latent(eqx.Module):
    """The map Φ of a flow, and the density of ξ.

    A base that is not `rf.Normal` is whitened by the mean and spread of its own samples, and its true
    density takes the place of the normal one.
    """

    flow: StochasticFlow
    loc: Array
    scale: Array

    def __init__(self, flow: StochasticFlow):
        base = flow.base
        if isinstance(base, Normal):
            self.loc, self.scale = base.loc, base.scale
        else:
            draws = jax.lax.stop_gradient(base.sample(key=jax.random.key(0), shape=(4096,)))
            self.loc, self.scale = jnp.mean(draws, axis=0), jnp.std(draws, axis=0)
        # The end is all that is wanted of a solve, and it must be a function of ξ alone.
        plain = (NoDivergence(), ExactCorrection())
        self.flow = eqx.tree_at(lambda f: (f.divergence, f.correction), flow, plain)

    @property
    def size(self) -> int:
        return self.flow.dimension + self.flow.driver.num_functions * self.flow.noise_dim

    def end(self, xi: Array) -> tuple[Array, Array]:
        """Φ(ξ), shape `(B, d)`, and which samples escaped on the way."""
        flow = self.flow
        shape = (xi.shape[0], flow.driver.num_functions, flow.noise_dim)
        coefficients = jnp.reshape(xi[:, flow.dimension :], shape)
        path = flow.driver.path(coefficients, flow.t1)
        outcome = flow.solve(self._start(xi), path, reverse=False)
        return outcome.z, outcome.escaped

    def log_prior(self, xi: Array) -> Array:
        """The log-density of ξ, shape `(B,)`."""
        d = self.flow.dimension
        normal = jax.scipy.stats.norm.logpdf(xi)
        if isinstance(self.flow.base, Normal):
            return jnp.sum(normal, axis=-1)
        log_base = jax.vmap(self.flow.base.log_prob)(self._start(xi)) + jnp.sum(jnp.log(self.scale))
        return log_base + jnp.sum(normal[:, d:], axis=-1)

    def _start(self, xi: Array) -> Array:
        return self.loc[None] + self.scale[None] * xi[:, : self.flow.dimension]
