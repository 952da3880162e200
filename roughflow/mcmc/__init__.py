"""Stage 9, MCMC: samplers built from SDEs with a given stationary density."""

from ._samplers import (
    AbstractSampler as AbstractSampler,
    AdjustedSampler as AdjustedSampler,
    Chain as Chain,
    FlowSampler as FlowSampler,
    Minibatch as Minibatch,
    SamplerInfo as SamplerInfo,
    SamplerState as SamplerState,
    UnadjustedSampler as UnadjustedSampler,
    sample_chain as sample_chain,
)
from ._tune import Tuned as Tuned, WarmedUp as WarmedUp, tune_sampler as tune_sampler, warm_up as warm_up
