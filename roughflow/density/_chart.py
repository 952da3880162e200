"""Coordinates on the surface Φ(ξ) = x, over which p(x) is an integral."""

import abc

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

from ..flow import AbstractEstimator, StochasticFlow
from ._latent import Latent, Target
from ._mode import Mode
from ._proposal import AbstractLaw, AbstractProposal


class AbstractChart(AbstractEstimator):
    """p(x) = E w(δ), δ drawn from a proposal; w(δ) = f(δ)/q(δ), and f integrates to p(x).

    An estimator says which d coordinates of ξ it solves for, given the others δ, and what f(δ) is.
    """

    num_paths: eqx.AbstractVar[int]
    proposal: eqx.AbstractVar[AbstractProposal]

    @abc.abstractmethod
    def check(self, flow: StochasticFlow) -> None:
        """Refuse a flow this estimator cannot do."""

    @abc.abstractmethod
    def starts(self, x: Array) -> Array | None:
        """Fixed starting points, of the shape of x; None if they are drawn from the base."""

    @abc.abstractmethod
    def rows(self, latent: Latent, target: Target, mode: Mode | None) -> Array:
        """Orthonormal directions `(B, d, D)` to solve along; `mode` if the proposal knows it."""

    @abc.abstractmethod
    def verify(self, law: AbstractLaw) -> AbstractLaw:
        """Refuse a law that shows there is no density to estimate."""

    @abc.abstractmethod
    def log_joint(
        self,
        flow: StochasticFlow,
        latent: Latent,
        target: Target,
        rows: Array,
        delta: Array,
        guess: Array,
        keys: PRNGKeyArray,
    ) -> Array:
        """log f(δ), one a row; −inf for a path that does not reach x. `guess` has the free part δ."""
