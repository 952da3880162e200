"""What every proposal offers: a distribution of the path's coefficients for each x."""

import abc

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_fields
from ..surface import Cloud, Latent
from ._draws import AbstractDraws
from ._mixture import Mixture


class AbstractProposal(eqx.Module):
    """Chooses where to draw the paths that may lead to x; `rf.Prior` is one.

    A proposal says whether it looks at forward draws of the flow (`wants_cloud`), and whether its
    distribution is the exact one on some SDEs (`may_be_exact`): an estimator then looks at a few weights
    first, and only if they differ makes the distribution wider and gives the prior a share.

    ```python
    from typing import ClassVar
    import jax, jax.numpy as jnp
    import roughflow as rf

    class Wider(rf.AbstractProposal):
        # twice the spread of the prior, whatever x is
        draws: rf.AbstractDraws = rf.Independent()
        wants_cloud: ClassVar[bool] = False
        may_be_exact: ClassVar[bool] = False

        def distribution(self, latent, x, keys, cloud):
            zeros = jnp.zeros((len(x), latent.path_size), x.dtype)
            return rf.Mixture.of(zeros, zeros + 2, latent.flow.dimension)

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
    estimator = rf.PullBack(1000, proposal=Wider())
    flow.log_prob(jnp.zeros((3, 1)), key=jax.random.key(0), estimator=estimator)
    ```
    """

    draws: eqx.AbstractVar[AbstractDraws]
    wants_cloud: eqx.AbstractClassVar[bool]
    may_be_exact: eqx.AbstractClassVar[bool]

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def distribution(self, latent: Latent, x: Array, keys: PRNGKeyArray, cloud: Cloud | None) -> Mixture:
        """The distribution for each point of x `(B, d)`, with one key per point."""
