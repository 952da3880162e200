"""Named SDEs, and SDEs from functions with a dictionary of parameters."""

from ._distributions import (
    AbstractDistribution as AbstractDistribution,
    Counts as Counts,
    Normal as Normal,
    Transformed as Transformed,
    linear_step as linear_step,
)
from ._named import (
    CKLS as CKLS,
    SIR as SIR,
    BrownianMotion as BrownianMotion,
    Compartments as Compartments,
    ConstantElasticity as ConstantElasticity,
    CoxIngersollRoss as CoxIngersollRoss,
    DoubleWell as DoubleWell,
    FitzHughNagumo as FitzHughNagumo,
    FractionalOrnsteinUhlenbeck as FractionalOrnsteinUhlenbeck,
    GeometricBrownianMotion as GeometricBrownianMotion,
    Heston as Heston,
    Jacobi as Jacobi,
    LotkaVolterra as LotkaVolterra,
    OrnsteinUhlenbeck as OrnsteinUhlenbeck,
    StochasticVolatility as StochasticVolatility,
)
from ._parametric import (
    AbstractNamedSDE as AbstractNamedSDE,
    ParametricSDE as ParametricSDE,
    exact_transition as exact_transition,
    expansion as expansion,
)
