"""Paths around the likeliest one."""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count
from ._draws import AbstractDraws, Independent
from ._latent import Latent, Target, constant
from ._linear import log_abs_det, solve
from ._mode import find_mode
from ._proposal import SPARE, AbstractLaw, AbstractProposal, Rows, along, free_part, log_normal, spread

FREEDOM = SPARE - 1  # degrees of freedom of the wide law
PRIOR_SHARE = 0.25  # of the wide law


class Laplace(AbstractProposal):
    """Draw paths from the tangent Gaussian at the likeliest path that ends at x.

    Near ξ*, the point of least energy with Φ(ξ*) = x, the surface Φ = x is flat and ξ given x is
    normal there: ξ* + (I − JᵀJJᵀ⁻¹J) ε. On a linear SDE that is the exact law. Where the Pareto shape of
    the weights (`Estimate.pareto_k`) shows that the tails are too thin, the paths are drawn afresh
    from a wide law, three parts Student's with five degrees of freedom and one part the prior, so
    that weights have a finite variance. Where no path to x is found the prior takes over, and
    `Estimate.fell_back` says so.

    **Arguments:**

    - `starts`: from how many points the search for ξ* starts; the best end is kept.
    - `draws`: `rf.Independent()`, `rf.Antithetic()` or `rf.Sobol()`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimator = rf.PullBack(num_paths=16, proposal=rf.Laplace())
    flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=estimator).standard_error  # 0, to rounding
    ```
    """

    starts: int = eqx.field(static=True, default=4)
    draws: AbstractDraws = Independent()
    widens: ClassVar[bool] = True

    def __check_init__(self):
        check_count("starts", self.starts)

    def law(self, latent: Latent, target: Target, keys: PRNGKeyArray, rows: Rows) -> "TangentLaw":
        # A constant of the estimator: derivatives see the weights, not where paths are drawn.
        mode = constant(find_mode(constant(latent).quiet(), constant(target), keys, self.starts))
        return TangentLaw(mode.xi, mode.rows, constant(rows(mode)), ~mode.found, jnp.zeros_like(mode.found))


class TangentLaw(AbstractLaw):
    """t = (I − NᵀN) ε at `centre`, seen along the rows: δ = ξ* + t − RᵀR(ξ* + t). N spans the normal space.

    As a map from the complement of N to that of R it changes volume by |det NRᵀ|.
    """

    centre: Array  # (B, D)
    normal: Array  # N, (B, d, D)
    rows: Array  # R, (B, d, D)
    fell_back: Array
    wide: Array  # (B,)

    @property
    def _prior_share(self) -> Array:
        share = jnp.where(self.wide, PRIOR_SHARE, 0.0)
        return jnp.where(self.fell_back, 1.0, share)[:, None].astype(self.centre.dtype)

    @property
    def _free(self) -> int:
        return self.rows.shape[2] - self.rows.shape[1]

    def sample(self, noise: Array) -> Array:
        noise, spare = noise[..., :-SPARE], noise[..., -SPARE:]
        stretch = jnp.sqrt(FREEDOM / jnp.sum(spare[..., 1:] ** 2, axis=-1))
        stretch = jnp.where(self.wide[:, None], stretch, 1)
        tangent = self.centre[:, None] + stretch[..., None] * free_part(self.normal, noise)
        from_prior = jax.scipy.special.ndtr(spare[..., 0]) < self._prior_share
        return free_part(self.rows, jnp.where(from_prior[..., None], noise, tangent))

    def log_prob(self, delta: Array) -> Array:
        tangent, log_volume = self._tangent(delta)
        squares, free = jnp.sum(tangent**2, axis=-1), self._free
        student = (
            math.lgamma((FREEDOM + free) / 2)
            - math.lgamma(FREEDOM / 2)
            - 0.5 * free * math.log(FREEDOM * math.pi)
            - 0.5 * (FREEDOM + free) * jnp.log1p(squares / FREEDOM)
        )
        around = jnp.where(self.wide[:, None], student, log_normal(squares, free)) - log_volume[:, None]
        prior = log_normal(jnp.sum(delta**2, axis=-1), free)
        share = self._prior_share
        return jnp.logaddexp(jnp.log1p(-share) + around, jnp.log(share) + prior)

    def guess(self, delta: Array) -> Array:
        start = jnp.broadcast_to(self.centre[:, None], delta.shape)
        start = jnp.where(self.fell_back[:, None, None], start, start + self._tangent(delta)[0])
        return delta + spread(self.rows, along(self.rows, start))

    def widen(self, where: Array) -> "TangentLaw":
        return eqx.tree_at(lambda law: law.wide, self, self.wide | where)

    def _tangent(self, delta: Array) -> tuple[Array, Array]:
        """The t that is seen as δ, and log |det NRᵀ|."""
        offset = delta - free_part(self.rows, self.centre[:, None])
        angles = jnp.einsum("bij,bkj->bik", self.normal, self.rows)
        turn = solve(angles, jnp.swapaxes(along(self.normal, offset), 1, 2))
        return offset - spread(self.rows, jnp.swapaxes(turn, 1, 2)), log_abs_det(angles)
