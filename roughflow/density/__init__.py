"""Stage 5, from p(x | path) to p(x): flows with densities, estimators, proposals, error bars."""

from ._bounds import LowerBound as LowerBound, Unbiased as Unbiased, UpperBound as UpperBound
from ._draws import AbstractDraws as AbstractDraws, Independent as Independent, Sobol as Sobol
from ._estimate import (
    METHODS as METHODS,
    AbstractEstimator as AbstractEstimator,
    Accuracy as Accuracy,
    Estimate as Estimate,
    Warnings as Warnings,
    effective_paths as effective_paths,
    log_mean as log_mean,
    weights_error as weights_error,
)
from ._flow import StochasticFlow as StochasticFlow
from ._grid import Grid as Grid
from ._ladder import Ladder as Ladder
from ._modes import Laplace as Laplace
from ._particles import systematic as systematic
from ._paths import PullBack as PullBack
from ._proposals import (
    AbstractProposal as AbstractProposal,
    Amortised as Amortised,
    Mixture as Mixture,
    Prior as Prior,
)
