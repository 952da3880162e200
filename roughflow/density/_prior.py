"""Paths as the driver draws them."""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._draws import AbstractDraws, Independent
from ._latent import Latent, Target, constant
from ._proposal import AbstractLaw, AbstractProposal, Rows, free_part, log_normal


class Prior(AbstractProposal):
    """Draw paths from their own law, whatever x is. `draws` may be `rf.Independent()` (the default),
    `rf.Antithetic()` or `rf.Sobol()`.

    ```python
    import roughflow as rf

    estimator = rf.PullBack(num_paths=1024, proposal=rf.Prior(rf.Sobol()))
    ```
    """

    draws: AbstractDraws = Independent()
    widens: ClassVar[bool] = False

    def law(self, latent: Latent, target: Target, keys: PRNGKeyArray, rows: Rows) -> "PriorLaw":
        del latent, keys
        return PriorLaw(constant(rows(None)), jnp.zeros(len(target.x), bool))


class PriorLaw(AbstractLaw):
    rows: Array
    fell_back: Array

    def sample(self, noise: Array) -> Array:
        return free_part(self.rows, noise[..., : self.rows.shape[-1]])

    def log_prob(self, delta: Array) -> Array:
        return log_normal(jnp.sum(delta**2, axis=-1), self.rows.shape[2] - self.rows.shape[1])

    def guess(self, delta: Array) -> Array:
        return delta

    def widen(self, where: Array) -> "PriorLaw":
        del where
        return self
