"""A flow to start from, when all that is known is the dimension."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key, check_number
from .._keys import split
from ..density import StochasticFlow
from ..flow import LATE, ExactDivergence, FixedGrid, HutchinsonDivergence, Normal
from ..sde import (
    Activation,
    ConstantDiffusion,
    FullDiffusion,
    ItoSDE,
    NoDiffusion,
    RestoringDrift,
    VelocityNetwork,
    silu,
    tanh,
)

FULL = 2  # dimensions in which the noise depends on the state; the cost of that grows with the square
MANY = 17  # dimensions from which the divergence is estimated
GRID = 16  # steps for a velocity, which is fastest near the end


def neural_flow(
    dimension: int,
    width: int = 64,
    depth: int = 3,
    activation: Activation = tanh,
    *,
    time_dependent: bool = False,
    noise: float = 0.5,
    key: PRNGKeyArray,
) -> StochasticFlow:
    """A neural SDE from a standard normal base that is, before training, that normal distribution.

    The drift is `rf.RestoringDrift`. The noise is `rf.FullDiffusion` in two dimensions, otherwise
    a trainable constant matrix. From 17 dimensions on the divergence is Hutchinson's.

    **Arguments:** `dimension`; `width` and `depth` of the drift's network; `activation` and `time_dependent`
    of all networks; `noise`, the size λ of the noise, 0 for a continuous normalizing flow.

    ```python
    import jax
    import roughflow as rf

    flow = rf.neural_flow(2, noise=0.5, width=16, depth=2, key=jax.random.key(0))
    ```
    """
    check_count("dimension", dimension)
    check_number("noise", noise, least=0)
    key_drift, key_noise = split(check_key(key))
    drift = RestoringDrift(
        dimension, noise, width, depth, activation, time_dependent=time_dependent, key=key_drift
    )
    if noise == 0:
        diffusion = NoDiffusion()
    elif dimension == FULL:
        diffusion = FullDiffusion(
            dimension, width, 1, activation, time_dependent=time_dependent, scale=noise, key=key_noise
        )
        diffusion = eqx.tree_at(lambda d: d.network.weights[-1], diffusion, replace_fn=_nothing)
    else:
        diffusion = ConstantDiffusion(jnp.asarray(noise * np.eye(dimension), float))
    divergence = HutchinsonDivergence() if dimension >= MANY else ExactDivergence()
    base = Normal(jnp.asarray(np.zeros(dimension), float))
    return StochasticFlow(ItoSDE(drift, diffusion), base, divergence=divergence)


def _nothing(weights: Array) -> Array:
    return jnp.asarray(np.zeros(weights.shape, weights.dtype))


def velocity_flow(
    dimension: int,
    width: int = 128,
    depth: int = 3,
    activation: Activation = silu,
    *,
    num_features: int = 64,
    context: int = 0,
    key: PRNGKeyArray,
) -> StochasticFlow:
    """A flow without noise for `rf.Interpolant` to train: an `rf.VelocityNetwork` from a normal base.

    **Arguments:** those of `rf.VelocityNetwork`. With a `context` the flow has that many dimensions more.

    ```python
    import jax
    import roughflow as rf

    flow = rf.velocity_flow(2, width=16, depth=2, key=jax.random.key(0))
    ```
    """
    velocity = VelocityNetwork(
        dimension, width, depth, activation, num_features=num_features, context=context, key=key
    )
    base = Normal(jnp.asarray(np.zeros(dimension + context), float))
    integrator = FixedGrid(steps=GRID, late=LATE)
    return StochasticFlow(ItoSDE(velocity, NoDiffusion()), base, integrator=integrator)
