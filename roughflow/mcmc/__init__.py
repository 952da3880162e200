"""Stage 9, MCMC: samplers built from SDEs with a given stationary density."""

from ._kernels import (
    AbstractSampler as AbstractSampler,
    AdjustedSampler as AdjustedSampler,
    FlowSampler as FlowSampler,
    Minibatch as Minibatch,
    SamplerInfo as SamplerInfo,
    SamplerState as SamplerState,
    UnadjustedSampler as UnadjustedSampler,
)
from ._sample_chain import Chain as Chain, sample_chain as sample_chain
from ._tune import Tuned as Tuned, WarmedUp as WarmedUp, tune_sampler as tune_sampler, warm_up as warm_up
