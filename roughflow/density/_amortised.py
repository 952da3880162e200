"""Paths from a network that has learned where to look."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key
from ..flow import StochasticFlow
from ..sde import MLP
from ._draws import AbstractDraws, Independent
from ._latent import Latent, Target, constant
from ._linear import log_abs_det, solve
from ._proposal import AbstractLaw, AbstractProposal, Rows, along, free_part, log_normal, spread


class Amortised(AbstractProposal):
    """Draw ξ, the whitened start and the path's coefficients, from N(m, diag s²), m and s by a network
    of x and of the flow's end time.

    Untrained it is the prior. Train it with the model: the K-path bound (`rf.LowerBound`) is largest
    when the proposal is the law of the path given x (Burda et al. 2016), and gradients reach the network.

    Coefficients it was not made for, those of a driver with more functions, it draws from the prior.

    **Arguments:** `flow`, for its sizes; `width` and `depth` of the network; `draws`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    proposal = rf.Amortised(flow, width=16, depth=1, key=jax.random.key(0))
    flow.log_prob(jnp.zeros(1), key=jax.random.key(1), estimator=rf.PullBack(100, proposal))
    ```
    """

    network: MLP
    sizes: tuple[int, int, int] = eqx.field(static=True)  # d, n, m
    draws: AbstractDraws
    widens: ClassVar[bool] = False

    def __init__(
        self,
        flow: StochasticFlow,
        width: int = 32,
        depth: int = 2,
        draws: AbstractDraws | None = None,
        *,
        key: PRNGKeyArray,
    ):
        self.sizes = (flow.dimension, flow.driver.num_functions, flow.noise_dim)
        size = flow.dimension + flow.driver.num_functions * flow.noise_dim
        self.network = MLP(
            flow.dimension, 2 * size, width, depth, time_dependent=True, scale=0.0, key=check_key(key)
        )
        self.draws = Independent() if draws is None else draws

    def law(self, latent: Latent, target: Target, keys: PRNGKeyArray, rows: Rows) -> "DiagonalLaw":
        del keys
        flow, (d, n, m) = latent.flow, self.sizes
        if (flow.dimension, flow.noise_dim) != (d, m) or flow.driver.num_functions < n:
            raise ValueError(
                f"the proposal was made for {d} dimensions, {n} functions and {m} noises, the flow has "
                f"{flow.dimension}, {flow.driver.num_functions} and {flow.noise_dim}: make one with "
                "rf.Amortised(flow, key=key)"
            )
        out = jax.vmap(lambda x: self.network(jnp.asarray(flow.t1, x.dtype), x))(target.x)
        # With a fixed start its part of ξ is not there to be proposed.
        parts = [part[:, d - latent.start_size :] for part in jnp.split(out, 2, axis=1)]
        mean, log_scale = (jnp.pad(part, ((0, 0), (0, latent.size - part.shape[1]))) for part in parts)
        return DiagonalLaw(mean, log_scale, constant(rows(None)), jnp.zeros(len(mean), bool))


class DiagonalLaw(AbstractLaw):
    """N(m, S²) of all of ξ, S diagonal, seen on the complement of the rows R.

    There its covariance is (I − RᵀR) S² (I − RᵀR), with determinant det S² det(R S⁻² Rᵀ) and inverse
    S⁻² − S⁻²Rᵀ(R S⁻² Rᵀ)⁻¹R S⁻².
    """

    mean: Array  # (B, D)
    log_scale: Array  # (B, D)
    rows: Array
    fell_back: Array

    def sample(self, noise: Array) -> Array:
        noise = noise[..., : self.mean.shape[1]]
        return free_part(self.rows, self.mean[:, None] + jnp.exp(self.log_scale)[:, None] * noise)

    def log_prob(self, delta: Array) -> Array:
        offset = delta - free_part(self.rows, self.mean[:, None])
        precision = jnp.exp(-2 * self.log_scale)
        gram = jnp.einsum("bij,bj,bkj->bik", self.rows, precision, self.rows)
        weighted = offset * precision[:, None]
        cross = jnp.swapaxes(along(self.rows, weighted), 1, 2)
        squares = jnp.sum(offset * weighted, axis=-1)
        squares = squares - jnp.sum(cross * solve(gram, cross), axis=1)
        log_det = 2 * jnp.sum(self.log_scale, axis=-1) + log_abs_det(gram)
        return log_normal(squares, self.rows.shape[2] - self.rows.shape[1]) - 0.5 * log_det[:, None]

    def guess(self, delta: Array) -> Array:
        return delta + spread(self.rows, along(self.rows, self.mean[:, None]))

    def widen(self, where: Array) -> "DiagonalLaw":
        del where
        return self
