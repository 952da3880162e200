"""Stage 4, from p(x | path) to p(x): estimators with error bars."""

from ..flow import set_default_estimator
from ._endpoint import Endpoint as Endpoint
from ._estimate import Estimate as Estimate
from ._pull_back import PullBack as PullBack

set_default_estimator(Endpoint())
