"""roughflow: densities for stochastic differential equations."""

from .sde import (  # noqa: I001  (pipeline order)
    AbstractSDE as AbstractSDE,
    ItoSDE as ItoSDE,
    StratonovichSDE as StratonovichSDE,
    to_stratonovich as to_stratonovich,
    to_ito as to_ito,
    AbstractCorrection as AbstractCorrection,
    ExactCorrection as ExactCorrection,
    SampledCorrection as SampledCorrection,
    MLP as MLP,
    FullDiffusion as FullDiffusion,
    DiagonalDiffusion as DiagonalDiffusion,
    ConstantDiffusion as ConstantDiffusion,
    NoDiffusion as NoDiffusion,
    ProportionalDiffusion as ProportionalDiffusion,
)
from .driver import (
    AbstractDriver as AbstractDriver,
    Path as Path,
    KarhunenLoeve as KarhunenLoeve,
    Legendre as Legendre,
    PiecewiseLinear as PiecewiseLinear,
)
from .flow import (
    StochasticFlow as StochasticFlow,
    Normal as Normal,
    AbstractEstimator as AbstractEstimator,
    AbstractDivergence as AbstractDivergence,
    ExactDivergence as ExactDivergence,
    HutchinsonDivergence as HutchinsonDivergence,
    AbstractIntegrator as AbstractIntegrator,
    FixedGrid as FixedGrid,
    Adaptive as Adaptive,
    RK4 as RK4,
    RK6 as RK6,
    Backpropagation as Backpropagation,
    ConstantMemory as ConstantMemory,
    Outcome as Outcome,
    simulate as simulate,
    AbstractScheme as AbstractScheme,
    EulerMaruyama as EulerMaruyama,
    StratonovichHeun as StratonovichHeun,
    StratonovichMidpoint as StratonovichMidpoint,
    Milstein as Milstein,
)
from .density import (
    Estimate as Estimate,
    Endpoint as Endpoint,
    PullBack as PullBack,
    Unbiased as Unbiased,
    Richardson as Richardson,
    AbstractImportanceEstimator as AbstractImportanceEstimator,
    Laplace as Laplace,
    Prior as Prior,
    Amortised as Amortised,
    AbstractProposal as AbstractProposal,
    Independent as Independent,
    Antithetic as Antithetic,
    Sobol as Sobol,
    AbstractDraws as AbstractDraws,
    LowerBound as LowerBound,
    UpperBound as UpperBound,
    PullBackUpperBound as PullBackUpperBound,
)
from ._checks import NonFiniteError as NonFiniteError, OutOfStepsError as OutOfStepsError

__version__ = "0.1.0"
