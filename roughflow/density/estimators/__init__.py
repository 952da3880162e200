"""From weights of paths to log p(x): estimators and bounds."""

from ._bounds import LowerBound as LowerBound, UpperBound as UpperBound
from ._endpoint import Endpoint as Endpoint
from ._importance import AbstractImportanceEstimator as AbstractImportanceEstimator
from ._pull_back import PullBack as PullBack
from ._richardson import Richardson as Richardson
from ._tempered import Tempered as Tempered
from ._unbiased import Unbiased as Unbiased
