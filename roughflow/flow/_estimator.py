"""The seam between flows and what estimates their density: a stage below cannot name one above."""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray


class AbstractEstimator(eqx.Module):
    """Estimates log p(x) of a flow; `rf.Endpoint` and `rf.PullBack` are two."""

    @abc.abstractmethod
    def estimate(self, flow: Any, x: Array, *, key: PRNGKeyArray) -> Any:
        """An `rf.Estimate` for `x` of shape `(..., d)`."""


_default: list[AbstractEstimator] = []


def set_default_estimator(estimator: AbstractEstimator) -> None:
    """What `StochasticFlow.estimate` uses when told nothing; the density stage calls this once."""
    _default[:] = [estimator]


def default_estimator() -> AbstractEstimator:
    return _default[0]
