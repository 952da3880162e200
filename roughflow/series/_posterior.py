"""The posterior of an SDE's parameters, given a series, as a log-density without bounds."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key
from ..sde import AbstractSDE
from ._parameters import Parameters
from ._series_likelihood import SeriesLikelihood


class SeriesPosterior(eqx.Module):
    """The posterior of the parameters of an SDE on Rᵖ: what `FittedSDE.posterior` returns.

    Called with z of shape `(p,)` it is the log-likelihood, plus the log prior, plus the Jacobian of the map
    from z to the parameters in their domains. `constrain` is that map; `names` and `dimension` say what z is
    made of. `start` is the z of the fit, and `scale` a root of its covariance: with it as the noise of
    `rf.overdamped_langevin` a sampler needs no warm-up.

    ```python
    import jax, numpy as np
    import roughflow as rf

    times, x = np.arange(60) / 12, np.cumsum(np.sin(np.arange(60) ** 2))
    result = rf.fit_sde(rf.BrownianMotion(0.0, 1.0), times, x, key=jax.random.key(0))
    posterior = result.posterior(log_prior=lambda sde: -0.5 * sde.mu**2)
    sde = rf.overdamped_langevin(posterior, posterior.dimension, scale=posterior.scale)
    starts = posterior.starts(4, key=jax.random.key(1))
    chain = rf.sample_chain(rf.AdjustedSampler(sde, 0.8), starts, key=jax.random.key(2), num_steps=100)
    posterior.constrain(chain.samples)["sigma"].mean()
    ```
    """

    parameters: Parameters
    likelihood: SeriesLikelihood
    log_prior: Callable[[AbstractSDE], Array] | None
    penalty: Array  # (p,), precisions of a normal prior
    start: Array  # (p,)
    scale: Array  # (p, p), lower triangular

    @property
    def names(self) -> tuple[str, ...]:
        return self.parameters.names

    @property
    def dimension(self) -> int:
        return len(self.names)

    def __call__(self, z: Array) -> Array:
        sde = self.parameters.sde(self.parameters.from_free(z))
        value = self.likelihood(sde) + self.parameters.log_slope(z) - 0.5 * jnp.sum(self.penalty * z**2)
        return value if self.log_prior is None else value + self.log_prior(sde)

    def starts(self, num_chains: int, *, key: PRNGKeyArray) -> Array:
        """Places `(num_chains, p)` around that of the fit, as far from it as its standard errors say."""
        noise = jax.random.normal(check_key(key), (check_count("num_chains", num_chains), self.dimension))
        return self.start[None] + noise @ self.scale.T

    def constrain(self, z: Array) -> dict[str, Array]:
        """The parameters by name, for z of shape `(..., p)`."""
        values = self.parameters.from_free(jnp.asarray(z))
        return {name: values[..., i] for i, name in enumerate(self.names)}
