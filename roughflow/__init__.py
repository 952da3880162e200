"""roughflow: densities for stochastic differential equations."""

from .sde import (  # noqa: I001  (pipeline order)
    AbstractSDE as AbstractSDE,
    AbstractItoSDE as AbstractItoSDE,
    AbstractStratonovichSDE as AbstractStratonovichSDE,
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
    RestoringDrift as RestoringDrift,
    LocalDiffusion as LocalDiffusion,
    FadingDiffusion as FadingDiffusion,
    VelocityNetwork as VelocityNetwork,
    AbstractTransport as AbstractTransport,
    NormalTransport as NormalTransport,
    LearnedTransport as LearnedTransport,
    GivenTransport as GivenTransport,
    TransportSDE as TransportSDE,
    targeted_sde as targeted_sde,
    TargetedSDE as TargetedSDE,
    SkewNetwork as SkewNetwork,
    overdamped_langevin as overdamped_langevin,
    underdamped_langevin as underdamped_langevin,
    sghmc as sghmc,
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
    neural_flow as neural_flow,
    velocity_flow as velocity_flow,
    with_noise as with_noise,
    Normal as Normal,
    Estimate as Estimate,
    Accuracy as Accuracy,
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
    default_estimator as default_estimator,
    Tempered as Tempered,
    PullBack as PullBack,
    Endpoint as Endpoint,
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
)
from .learn import (
    fit as fit,
    Fitted as Fitted,
    History as History,
    AbstractObjective as AbstractObjective,
    AbstractStatefulObjective as AbstractStatefulObjective,
    Marginals as Marginals,
    MaximumLikelihood as MaximumLikelihood,
    Interpolant as Interpolant,
    ReverseKL as ReverseKL,
    evidence_bound as evidence_bound,
    EvidenceBound as EvidenceBound,
    stationarity as stationarity,
    confinement as confinement,
    staying_sde as staying_sde,
    Standardised as Standardised,
    standardisation as standardisation,
    fit_density as fit_density,
    save as save,
    load as load,
    whole_file as whole_file,
)
from .mcmc import (
    AbstractSampler as AbstractSampler,
    UnadjustedSampler as UnadjustedSampler,
    AdjustedSampler as AdjustedSampler,
    FlowSampler as FlowSampler,
    LinearlyImplicitEuler as LinearlyImplicitEuler,
    Minibatch as Minibatch,
    SamplerState as SamplerState,
    Chain as Chain,
    sample_chain as sample_chain,
    warm_up as warm_up,
    tune_sampler as tune_sampler,
    Tuned as Tuned,
)
from . import datasets as datasets
from ._checks import NonFiniteError as NonFiniteError, OutOfStepsError as OutOfStepsError


def __getattr__(name: str):
    """`rf.plots` is imported when it is first asked for: it needs matplotlib."""
    if name == "plots":
        import importlib

        return importlib.import_module(".plots", __name__)
    raise AttributeError(f"module 'roughflow' has no attribute {name!r}")


__version__ = "0.1.0"
