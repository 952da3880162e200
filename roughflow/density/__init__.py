"""Stage 5, from p(x | path) to p(x): the surface of ways to reach x, proposals, estimators, error bars."""

from ._default import default_estimator as default_estimator
from ._estimate import log_mean as log_mean
from .estimators import (
    AbstractImportanceEstimator as AbstractImportanceEstimator,
    Endpoint as Endpoint,
    LowerBound as LowerBound,
    PullBack as PullBack,
    Richardson as Richardson,
    Tempered as Tempered,
    Unbiased as Unbiased,
    UpperBound as UpperBound,
)
from .proposals import (
    AbstractDraws as AbstractDraws,
    AbstractProposal as AbstractProposal,
    Amortised as Amortised,
    Antithetic as Antithetic,
    Independent as Independent,
    Laplace as Laplace,
    Mixture as Mixture,
    Prior as Prior,
    Sobol as Sobol,
)
from .surface import Cloud as Cloud, Latent as Latent
