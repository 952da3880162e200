"""SDEs by their names, one class each; and an SDE from functions and a dictionary."""

from ._distributions import (
    AbstractDistribution as AbstractDistribution,
    Normal as Normal,
    Transformed as Transformed,
)
from ._fractional import FractionalOrnsteinUhlenbeck as FractionalOrnsteinUhlenbeck
from ._functions import ParametricSDE as ParametricSDE
from ._linear import (
    BrownianMotion as BrownianMotion,
    GeometricBrownianMotion as GeometricBrownianMotion,
    OrnsteinUhlenbeck as OrnsteinUhlenbeck,
)
from ._named import (
    AbstractNamedSDE as AbstractNamedSDE,
    exact_transition as exact_transition,
    expansion as expansion,
)
from ._rates import (
    CKLS as CKLS,
    ConstantElasticity as ConstantElasticity,
    CoxIngersollRoss as CoxIngersollRoss,
    Jacobi as Jacobi,
)
from ._systems import (
    DoubleWell as DoubleWell,
    FitzHughNagumo as FitzHughNagumo,
    Heston as Heston,
    LotkaVolterra as LotkaVolterra,
)
