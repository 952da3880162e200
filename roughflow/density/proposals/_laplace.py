"""Paths around the likeliest ones."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_count
from ..surface import Cloud, Latent, Modes, Target, constant, find_modes
from ._draws import AbstractDraws, Independent
from ._mixture import Mixture
from ._proposal import AbstractProposal

MODES = 8  # kept for a point, at most
FLOOR = 0.05  # of the largest share: a mode's tangent Gaussian may be far from its true mass


class Laplace(AbstractProposal):
    """Draw paths from tangent Gaussians at the likeliest paths that end at x, all of them that are found.

    Near ξ*, a point of least energy with Φ(ξ*) = x, the surface Φ = x is flat and ξ given x is normal there:
    ξ* + (I − JᵀJJᵀ⁻¹J) ε. On a linear SDE that is the exact distribution. Elsewhere paths may come in several
    bundles: the search starts from those of a few thousand forward draws of the flow that end nearest to x,
    equal ends are merged, and each is given its share. Unless the weights of a few paths drawn first are all
    equal, one path in three or so is drawn from the prior, so that a bundle that was missed shows, and
    weights stay bounded. Where no path to x is found the prior takes over, and `Estimate.fell_back` says so.

    **Arguments:**

    - `num_starts`: from how many points the search starts.
    - `draws`: `rf.Independent()`, `rf.Antithetic()` or `rf.Sobol()`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimator = rf.PullBack(num_paths=16, proposal=rf.Laplace())
    flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=estimator).standard_error  # 0, to rounding
    ```
    """

    num_starts: int = eqx.field(static=True, default=12)
    draws: AbstractDraws = Independent()
    wants_cloud: ClassVar[bool] = True
    may_be_exact: ClassVar[bool] = True

    def __check_init__(self):
        check_count("num_starts", self.num_starts)

    def distribution(self, latent: Latent, x: Array, keys: PRNGKeyArray, cloud: Cloud | None) -> Mixture:
        del keys
        assert cloud is not None
        # A constant of the estimator: derivatives see the weights, not where paths are drawn.
        latent, x = constant((latent, x))
        near = constant(cloud.nearest(x, self.num_starts - 1))
        begin = jnp.concatenate([jnp.zeros((len(x), 1, latent.size), x.dtype), near], axis=1)
        modes = find_modes(latent.quiet(), Target(x, None), begin).best(MODES)
        return constant(_tangents(modes, latent.start_size))


def _tangents(modes: Modes, start: int) -> Mixture:
    """The tangent Gaussians of the modes, seen along the start; what is not a mode has no share."""
    found = jnp.isfinite(modes.score)
    log_share = jnp.where(found, -modes.score, -jnp.inf)
    top = jnp.max(log_share, axis=1, keepdims=True)
    missed = ~jnp.isfinite(top[:, 0])
    floored = jnp.maximum(log_share, jnp.where(jnp.isfinite(top), top, 0) + jnp.log(FLOOR))
    log_share = jax.nn.log_softmax(jnp.where(found | missed[:, None], floored, -jnp.inf), axis=1)
    frame = jnp.eye(modes.directions.shape[2], modes.directions.shape[3], dtype=modes.directions.dtype)
    return Mixture(
        jnp.where(found[..., None], modes.xi[..., start:], 0),
        jnp.ones_like(modes.xi[..., start:]),
        jnp.where(found[..., None, None], modes.directions, frame[None, None]),
        log_share,
        jnp.where(missed, 1.0, 0.0).astype(modes.xi.dtype),
        missed,
        jnp.zeros_like(missed),
    )
