"""Paths as the driver draws them."""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..surface import Cloud, Latent
from ._draws import AbstractDraws, Independent
from ._mixture import Mixture
from ._proposal import AbstractProposal


class Prior(AbstractProposal):
    """Draw paths from their own distribution, whatever x is. `draws` may be `rf.Independent()` (the default),
    `rf.Antithetic()` or `rf.Sobol()`.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1024, proposal=rf.Prior(rf.Sobol()))
    ```
    """

    draws: AbstractDraws = Independent()
    wants_cloud: ClassVar[bool] = False
    may_be_exact: ClassVar[bool] = False

    def distribution(self, latent: Latent, x: Array, keys: PRNGKeyArray, cloud: Cloud | None) -> Mixture:
        del keys, cloud
        zeros = jnp.zeros((len(x), latent.path_size), x.dtype)
        return Mixture.of(zeros, zeros + 1, latent.flow.dimension)
