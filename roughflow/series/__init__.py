"""Stage 10, time series: transition densities, maximum likelihood, standard errors, posteriors.

`_observed` checks the data and `_parameters` maps the parameters to an unconstrained vector. `_transition`
computes transition densities and `_likelihood` the likelihood of a fully observed series. The folder `hidden`
computes likelihoods of partially observed series with the Kalman filter, a grid or particles. `_varying`
integrates out the parameters that vary between series. `_fit_sde` maximises the likelihood with `_search`.
`_fitted` is the result, with residuals and forecasts from `_simulation`.
"""

from ._fit_sde import fit_sde as fit_sde, series_likelihood as series_likelihood
from ._fitted import FittedSDE as FittedSDE
from ._likelihood import (
    SeriesLikelihood as SeriesLikelihood,
    SeriesPosterior as SeriesPosterior,
)
from ._observed import Observed as Observed, panel as panel
from ._parameters import Domain as Domain
from ._simulation import Residuals as Residuals
from ._transition import (
    transition_estimate as transition_estimate,
    transition_log_prob as transition_log_prob,
)
from ._varying import LogNormal as LogNormal
from .hidden._likelihood import HiddenSeries as HiddenSeries
from .hidden._state_space import Estimated as Estimated, Inputs as Inputs
from .models import (
    CKLS as CKLS,
    SIR as SIR,
    AbstractNamedSDE as AbstractNamedSDE,
    BrownianMotion as BrownianMotion,
    Compartments as Compartments,
    ConstantElasticity as ConstantElasticity,
    Counts as Counts,
    CoxIngersollRoss as CoxIngersollRoss,
    DoubleWell as DoubleWell,
    FitzHughNagumo as FitzHughNagumo,
    FractionalOrnsteinUhlenbeck as FractionalOrnsteinUhlenbeck,
    GeometricBrownianMotion as GeometricBrownianMotion,
    Heston as Heston,
    Jacobi as Jacobi,
    LotkaVolterra as LotkaVolterra,
    OrnsteinUhlenbeck as OrnsteinUhlenbeck,
    ParametricSDE as ParametricSDE,
    StochasticVolatility as StochasticVolatility,
)
