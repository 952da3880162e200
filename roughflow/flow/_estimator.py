"""The seam between flows and what estimates their density: a stage below cannot name one above."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, PRNGKeyArray


class AbstractEstimator(eqx.Module):
    """Estimates log p(x) of a flow; `rf.Endpoint` and `rf.PullBack` are two."""

    @abc.abstractmethod
    def estimate(
        self,
        flow: Any,
        x: Array,
        *,
        key: PRNGKeyArray,
        tolerance: float | None = None,
        max_paths: int = 2**16,
        truncation: bool = False,
    ) -> Any:
        """An `rf.Estimate` for `x` of shape `(..., d)`; `StochasticFlow.estimate` has the arguments."""


_default: list[Callable[[Any], AbstractEstimator]] = []


def set_default_estimator(choose: Callable[[Any], AbstractEstimator]) -> None:
    """How `StochasticFlow.estimate` chooses when told nothing; the density stage calls this once."""
    _default[:] = [choose]


def default_estimator(flow: Any) -> AbstractEstimator:
    return _default[0](flow)
