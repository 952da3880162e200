"""Stage 8, observed series: transition densities, maximum likelihood, standard errors, posteriors.

From transitions (`_transition`) to the likelihood of a series (`_series_likelihood`),
of one with errors (`_measured_likelihood`, on `_hidden_states`) or with memory (`_whole_likelihood`); its
maximum (`_fit_sde`, `_search`), and what comes of that (`_fitted`, `_profile`, `_residuals`, `_forecast`,
`_posterior`).
"""

from ._fit_sde import fit_sde as fit_sde
from ._fitted import FittedSDE as FittedSDE
from ._parameters import Domain as Domain
from ._posterior import SeriesPosterior as SeriesPosterior
from ._residuals import Residuals as Residuals
from ._series_likelihood import SeriesLikelihood as SeriesLikelihood, series_likelihood as series_likelihood
from ._transition import (
    transition_estimate as transition_estimate,
    transition_log_prob as transition_log_prob,
)
from .models import (
    CKLS as CKLS,
    AbstractNamedSDE as AbstractNamedSDE,
    BrownianMotion as BrownianMotion,
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
    ParametricSDE as ParametricSDE,
)
