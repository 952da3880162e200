"""A chart of the ways to reach x, and weights on it."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray

from ...flow import AbstractEstimator, StochasticFlow
from ..proposals import AbstractProposal
from ..surface import Cloud, Target


class Weights(NamedTuple):
    """Log-weights of paths, the paths in the chart's coordinates, and log_joint there; `keys` of the solves,
    if these are random."""

    log_weights: Array  # (B, K)
    paths: Array  # (B, K, ·)
    joint: Array  # (B, K)
    keys: PRNGKeyArray | None  # (B, K)


class AbstractChart(AbstractEstimator):
    """p(x) = E w, w the weight of a path drawn from a distribution that was chosen for x beforehand.

    A distribution is a pytree with one entry of the leading axis per point. Everything below is traced: it
    works on a batch of points, B of them, with K paths each, and knows no values.
    """

    num_paths: eqx.AbstractVar[int]
    proposal: eqx.AbstractVar[AbstractProposal]
    # What a weight of zero is: a path that a search did not find, or one that escaped.
    searches: eqx.AbstractClassVar[bool]
    # Whether the weight of a path whose solve failed is NaN, so that no program has to raise to tell.
    shows_failures: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def check(self, flow: StochasticFlow) -> None:
        """Refuse a flow this estimator cannot do."""

    @abc.abstractmethod
    def start_points(self, x: Array) -> Array | None:
        """Fixed starting points, of the shape of x; None if they are drawn from the base."""

    @abc.abstractmethod
    def prepare(self, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None) -> Any:
        """The distribution to draw paths from, or those of the trial if there is one."""

    @property
    @abc.abstractmethod
    def num_tried(self) -> int:
        """How many paths are looked at before the distribution is fixed: the trial. There is none if 0."""

    @abc.abstractmethod
    def decide(self, flow: StochasticFlow, distribution: Any, trial: Weights) -> Any:
        """The distribution to draw paths from, by what became of those of the trial."""

    @abc.abstractmethod
    def settled(self, distribution: Any) -> Any:
        """The distribution, known for all points: a last look with values at hand, where there are any."""

    @abc.abstractmethod
    def weigh(
        self, flow: StochasticFlow, target: Target, distribution: Any, noise: Array, keys: PRNGKeyArray
    ) -> Weights:
        """K paths made from standard normal numbers `(B, K, D + SPARE)`; `keys` `(B, K)` for what else
        is random."""

    @abc.abstractmethod
    def log_joint(
        self, flow: StochasticFlow, target: Target, distribution: Any, paths: Array, keys: PRNGKeyArray | None
    ) -> Array:
        """The log-density of paths and x, `(B, F)`, in the chart's coordinates; `keys` `(B, F)` as in
        `Weights`."""


class Improved(NamedTuple):
    """Weights in place of poor ones, and where even these may not see all ways to x."""

    weights: Weights
    doubt: Array  # (B,)


class AbstractRemedy(eqx.Module):
    """Other paths for points whose weights are poor."""

    @abc.abstractmethod
    def at(self, distribution: Any) -> Array:
        """The points it is for, `(B,)`, by the chart's distribution."""

    @abc.abstractmethod
    def improve(
        self, flow: StochasticFlow, target: Target, distribution: Any, keys: PRNGKeyArray, count: int
    ) -> Improved:
        """`count` paths for each of those points, with weights that are NaN where it gave up; anything
        elsewhere."""

    @abc.abstractmethod
    def log_joint(
        self, flow: StochasticFlow, target: Target, distribution: Any, paths: Array, keys: PRNGKeyArray | None
    ) -> Array:
        """As that of a chart, in the coordinates of these paths."""


class AbstractImprovingChart(AbstractChart):
    """A chart with remedies for poor weights. Its distribution says where they are, in a field `poor` `(B,)`:
    decided beforehand, for an estimate that looked at its own weights to choose would be low."""

    @abc.abstractmethod
    def remedies(self, flow: StochasticFlow) -> tuple[AbstractRemedy, ...]:
        """In the order in which each takes over from those before, at its points. The first has the chart's
        own coordinates."""

    @abc.abstractmethod
    def second(self, flow: StochasticFlow) -> AbstractChart | None:
        """A chart that draws from the same distribution, whose weights may be good where these are poor;
        None if there is none for this flow."""
