"""Which paths to look at: the law that free coordinates are drawn from.

An estimator solves for d of the D coordinates of ξ, the ones along orthonormal `rows` R, so that the path
ends at x. The others, δ = ξ − RᵀRξ, are free, and a proposal is a law for them, x by x.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ._draws import AbstractDraws
from ._latent import Latent, Target
from ._mode import Mode

# Numbers a law may use beyond one for each coordinate.
SPARE = 6
# Orthonormal rows `(B, d, D)` to solve along, given where the mode is, if that is known.
Rows = Callable[[Mode | None], Array]


class AbstractLaw(eqx.Module):
    """A law of δ for each of B points; arrays of δ have shape `(B, K, D)`, each δ orthogonal to its rows."""

    rows: eqx.AbstractVar[Array]  # (B, d, D)
    fell_back: eqx.AbstractVar[Array]  # (B,): where the proposal failed and the prior stands in

    @abc.abstractmethod
    def sample(self, noise: Array) -> Array:
        """δ made from standard normal numbers `(B, K, D + SPARE)`."""

    @abc.abstractmethod
    def log_prob(self, delta: Array) -> Array:
        """Its log-density on the complement of the rows, `(B, K)`."""

    @abc.abstractmethod
    def guess(self, delta: Array) -> Array:
        """A ξ with these free coordinates, to start solving for the others from."""

    @abc.abstractmethod
    def widen(self, where: Array) -> "AbstractLaw":
        """The law with heavier tails at the points where their weights ask for it."""


class AbstractProposal(eqx.Module):
    """Chooses a law for the free coordinates of the paths that reach x; `rf.Prior` is one."""

    draws: eqx.AbstractVar[AbstractDraws]
    widens: eqx.AbstractClassVar[bool]  # whether its law can be widened

    @abc.abstractmethod
    def law(self, latent: Latent, target: Target, keys: PRNGKeyArray, rows: Rows) -> AbstractLaw:
        """The law for each point of the target, with one key a point."""


def free_part(rows: Array, xi: Array) -> Array:
    """ξ − RᵀRξ, for ξ `(B, K, D)`."""
    return xi - spread(rows, along(rows, xi))


def along(rows: Array, xi: Array) -> Array:
    """Rξ, `(B, K, d)`."""
    return jnp.einsum("bij,bkj->bki", rows, xi)


def spread(rows: Array, r: Array) -> Array:
    """Rᵀr, `(B, K, D)`."""
    return jnp.einsum("bij,bki->bkj", rows, r)


def log_normal(squares: Array, size: int) -> Array:
    """The standard normal log-density in `size` dimensions, at |·|² = `squares`."""
    return -0.5 * squares - 0.5 * size * jnp.log(2 * jnp.pi)
