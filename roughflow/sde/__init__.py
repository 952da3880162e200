"""Stage 1, SDEs: drift and diffusion, the Itô–Stratonovich correction, networks."""

from ._correction import (
    AbstractCorrection as AbstractCorrection,
    CorrectedDrift as CorrectedDrift,
    ExactCorrection as ExactCorrection,
    SampledCorrection as SampledCorrection,
    checked_correction as checked_correction,
    spread_at as spread_at,
    stratonovich_coefficients as stratonovich_coefficients,
    to_ito as to_ito,
    to_stratonovich as to_stratonovich,
)
from ._kinks import Kink as Kink, check_kinks as check_kinks, kinks as kinks
from ._networks import (
    GIVEN as GIVEN,
    MLP as MLP,
    Activation as Activation,
    ConstantDiffusion as ConstantDiffusion,
    DiagonalDiffusion as DiagonalDiffusion,
    FadingDiffusion as FadingDiffusion,
    FullDiffusion as FullDiffusion,
    LocalDiffusion as LocalDiffusion,
    NoDiffusion as NoDiffusion,
    RestoringDrift as RestoringDrift,
    VelocityNetwork as VelocityNetwork,
    silu as silu,
    tanh as tanh,
)
from ._noise import (
    Noise as Noise,
    apply_noise as apply_noise,
    depends_on as depends_on,
    noise_diagonal as noise_diagonal,
    noise_log_det as noise_log_det,
    noise_matrix as noise_matrix,
    noise_sizes as noise_sizes,
    plain_noise as plain_noise,
    solve_noise as solve_noise,
)
from ._sde import (
    AbstractItoSDE as AbstractItoSDE,
    AbstractSDE as AbstractSDE,
    AbstractStratonovichSDE as AbstractStratonovichSDE,
    Diffusion as Diffusion,
    Drift as Drift,
    ItoSDE as ItoSDE,
    StratonovichSDE as StratonovichSDE,
    check_sde as check_sde,
    noise_dimension as noise_dimension,
    with_explicit_parameters as with_explicit_parameters,
)
from ._targeted import (
    LogDensity as LogDensity,
    Rotation as Rotation,
    Score as Score,
    Skew as Skew,
    SkewNetwork as SkewNetwork,
    TargetedSDE as TargetedSDE,
    WithMomenta as WithMomenta,
    as_target as as_target,
    known_density as known_density,
    overdamped_langevin as overdamped_langevin,
    sghmc as sghmc,
    targeted_sde as targeted_sde,
    underdamped_langevin as underdamped_langevin,
)
from ._transport import (
    AbstractTransport as AbstractTransport,
    GivenTransport as GivenTransport,
    NormalTransport as NormalTransport,
    TransportSDE as TransportSDE,
)
