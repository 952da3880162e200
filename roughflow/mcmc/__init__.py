"""Stage 7, samplers built from targeted diffusions."""

from ._chain import Chain as Chain, sample_chain as sample_chain
from ._flow_sampler import FlowSampler as FlowSampler
from ._minibatch import Minibatch as Minibatch
from ._sampler import (
    AbstractSampler as AbstractSampler,
    AdjustedSampler as AdjustedSampler,
    SamplerInfo as SamplerInfo,
    SamplerState as SamplerState,
    UnadjustedSampler as UnadjustedSampler,
)
from ._tune import Tuned as Tuned, tune_sampler as tune_sampler
from ._warm_up import WarmedUp as WarmedUp, warm_up as warm_up
