"""Stage 4, from p(x | path) to p(x): estimators, proposals, bounds, error bars."""

from ..flow import HutchinsonDivergence, StochasticFlow, set_default_estimator
from ._amortised import Amortised as Amortised
from ._bounds import (
    LowerBound as LowerBound,
    PullBackUpperBound as PullBackUpperBound,
    UpperBound as UpperBound,
)
from ._draws import (
    AbstractDraws as AbstractDraws,
    Antithetic as Antithetic,
    Independent as Independent,
    Sobol as Sobol,
)
from ._endpoint import Endpoint as Endpoint
from ._estimate import Estimate as Estimate, log_mean as log_mean
from ._estimator import AbstractImportanceEstimator as AbstractImportanceEstimator
from ._laplace import Laplace as Laplace
from ._linear import log_abs_det as log_abs_det, solve as solve
from ._prior import Prior as Prior
from ._proposal import AbstractProposal as AbstractProposal
from ._pull_back import PullBack as PullBack
from ._richardson import Richardson as Richardson
from ._unbiased import Unbiased as Unbiased


def _default(flow: StochasticFlow) -> AbstractImportanceEstimator:
    """From the structure of the flow, as `StochasticFlow.estimate` documents."""
    if flow.noise_dim == 0:
        return PullBack(num_paths=1)
    if isinstance(flow.divergence, HutchinsonDivergence):
        return PullBack(num_paths=64, proposal=Laplace())
    return Endpoint()


set_default_estimator(_default)
