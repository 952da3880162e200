"""Stage 3, the random ODE as a flow: divergence, integration, conditional density, sampling."""

from ._adaptive import Adaptive as Adaptive
from ._base_distribution import (
    Base as Base,
    MultivariateNormal as MultivariateNormal,
    Normal as Normal,
    Whitened as Whitened,
    dimension_of as dimension_of,
    some_points as some_points,
)
from ._field import (
    AbstractDivergence as AbstractDivergence,
    ExactDivergence as ExactDivergence,
    Field as Field,
    HutchinsonDivergence as HutchinsonDivergence,
    NoDivergence as NoDivergence,
)
from ._fixed_grid import (
    LATE as LATE,
    RK4 as RK4,
    AbstractGradient as AbstractGradient,
    AbstractIntegrator as AbstractIntegrator,
    Backpropagation as Backpropagation,
    ConstantMemory as ConstantMemory,
    CountedGrid as CountedGrid,
    FixedGrid as FixedGrid,
    default_steps as default_steps,
    order_of as order_of,
)
from ._flow import AbstractStochasticFlow as AbstractStochasticFlow
from ._outcome import Outcome as Outcome, Status as Status, one_line_errors as one_line_errors
from ._resolution import (
    MIN_STEPS as MIN_STEPS,
    sufficient_steps as sufficient_steps,
    tune_steps as tune_steps,
    unresolved_in_time as unresolved_in_time,
    with_steps as with_steps,
)
from ._schemes import (
    AbstractScheme as AbstractScheme,
    Davie as Davie,
    EulerMaruyama as EulerMaruyama,
    LinearlyImplicitEuler as LinearlyImplicitEuler,
    Milstein as Milstein,
    StratonovichHeun as StratonovichHeun,
    StratonovichMidpoint as StratonovichMidpoint,
)
from ._simulate import simulate as simulate, to_diffrax as to_diffrax
