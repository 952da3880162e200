"""Paths from a network that has learned where to look."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_instance
from ..._linear import UNROLL
from ...flow import StochasticFlow
from ...sde import MLP, Activation, tanh
from ..surface import Cloud, Latent
from ._draws import AbstractDraws, Independent
from ._mixture import Mixture
from ._proposal import AbstractProposal


class Amortised(AbstractProposal):
    """Draw the path's coefficients ω = m + S u, S diagonal, u normal with precision I + GᵀG; m, S and G
    `(d, nm)` by a network of x and of the flow's end time.

    On a linear SDE the distribution of the path given x has this form, S = I: G says how the start that
    belongs to a path moves with it, in units of the base's spread. In more than 8 dimensions G is zero.

    Untrained it is the prior. Train it with the model: the K-path bound (`rf.LowerBound`) is largest
    when the proposal is the distribution of the path given x (Burda et al. 2016), and gradients reach the
    network.

    Coefficients it was not made for, those of a driver with more functions, it draws from the prior.

    **Arguments:** `flow`, for its sizes; `width`, `depth` and `activation` of the network; `draws`.

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
    wants_cloud: ClassVar[bool] = False
    may_be_exact: ClassVar[bool] = False

    def __init__(
        self,
        flow: StochasticFlow,
        width: int = 32,
        depth: int = 2,
        activation: Activation = tanh,
        *,
        draws: AbstractDraws | None = None,
        key: PRNGKeyArray,
    ):
        check_instance("flow", flow, StochasticFlow, "an rf.StochasticFlow")
        self.sizes = (flow.dimension, flow.driver.num_functions, flow.noise_dimension)
        path = flow.driver.num_functions * flow.noise_dimension
        outputs = 2 * (flow.dimension + path) + (flow.dimension * path if flow.dimension <= UNROLL else 0)
        sizes = flow.dimension, outputs
        self.network = MLP(*sizes, width, depth, activation, time_dependent=True, scale=0.0, key=key)
        self.draws = Independent() if draws is None else draws

    def distribution(self, latent: Latent, x: Array, keys: PRNGKeyArray, cloud: Cloud | None) -> Mixture:
        del keys, cloud
        flow, (d, n, m) = latent.flow, self.sizes
        if (flow.dimension, flow.noise_dimension) != (d, m) or flow.driver.num_functions < n:
            raise ValueError(
                f"the proposal was made for {d} dimensions, {n} functions and {m} noises, the flow has "
                f"{flow.dimension}, {flow.driver.num_functions} and {flow.noise_dimension}: make one with "
                "rf.Amortised(flow, key=key)"
            )
        out = jax.vmap(lambda point: self.network(jnp.asarray(flow.t1, point.dtype), point))(x)
        # The network has outputs for the start as well, which the path and x determine.
        mean, log_scale, tilt = jnp.split(out, [d + n * m, 2 * (d + n * m)], axis=1)
        more = ((0, 0), (0, latent.path_size - n * m))
        mean, log_scale = (jnp.pad(part[:, d:], more) for part in (mean, log_scale))
        distribution = Mixture.of(mean, jnp.exp(log_scale), d)
        if not tilt.size:  # many dimensions, or a file from before there was one
            return distribution
        slope = jnp.pad(jnp.reshape(tilt, (-1, d, n * m)), ((0, 0), *more))
        return eqx.tree_at(lambda d: d.normal, distribution, _across(slope)[:, None])


def _across(slope: Array) -> Array:
    """Orthonormal directions `(B, d, d + W)` that span the rows of (I, G), by Gram and Schmidt's way."""
    eye = jnp.eye(slope.shape[1], dtype=slope.dtype)
    table = jnp.concatenate([jnp.broadcast_to(eye, (len(slope), *eye.shape)), slope], axis=2)
    directions: list[Array] = []
    for i in range(slope.shape[1]):
        direction = table[:, i]
        for before in directions:
            direction = direction - jnp.sum(direction * before, axis=1, keepdims=True) * before
        directions.append(direction / jnp.linalg.norm(direction, axis=1, keepdims=True))
    return jnp.stack(directions, axis=1)
