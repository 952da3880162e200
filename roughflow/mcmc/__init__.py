"""Stage 6, samplers built from targeted diffusions."""

from ._adjusted_flow import AdjustedFlow as AdjustedFlow
from ._chain import Chain as Chain, sample_chain as sample_chain
from ._minibatch import Minibatch as Minibatch
from ._sampler import (
    AbstractSampler as AbstractSampler,
    Adjusted as Adjusted,
    SamplerInfo as SamplerInfo,
    SamplerState as SamplerState,
    Unadjusted as Unadjusted,
)
from ._stiff import LinearlyImplicitEuler as LinearlyImplicitEuler
from ._tune import Tuned as Tuned, tune_sampler as tune_sampler
from ._warm_up import warm_up as warm_up
