"""What every proposal offers: a distribution of the path's coefficients for each x."""

import abc

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

from ..surface import Cloud, Latent
from ._draws import AbstractDraws
from ._mixture import Mixture


class AbstractProposal(eqx.Module):
    """Chooses where to draw the paths that may lead to x; `rf.Prior` is one.

    A proposal says whether it looks at forward draws of the flow (`wants_cloud`), and whether its
    distribution is the exact one on some SDEs (`may_be_exact`): an estimator then looks at a few weights
    first, and only if they differ makes the distribution wider and gives the prior a share.
    """

    draws: eqx.AbstractVar[AbstractDraws]
    wants_cloud: eqx.AbstractClassVar[bool]
    may_be_exact: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def distribution(self, latent: Latent, x: Array, keys: PRNGKeyArray, cloud: Cloud | None) -> Mixture:
        """The distribution for each point of x `(B, d)`, with one key per point."""
