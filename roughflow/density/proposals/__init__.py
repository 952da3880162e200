"""Which paths to look at: distributions of a path's coefficients given x."""

from ._amortised import Amortised as Amortised
from ._draws import (
    AbstractDraws as AbstractDraws,
    Antithetic as Antithetic,
    Independent as Independent,
    Sobol as Sobol,
    normal_numbers as normal_numbers,
    normal_quantile as normal_quantile,
    random_bits as random_bits,
    uniform_numbers as uniform_numbers,
)
from ._laplace import Laplace as Laplace
from ._mixture import SPARE as SPARE, Mixture as Mixture, uniform_of as uniform_of
from ._prior import Prior as Prior
from ._proposal import AbstractProposal as AbstractProposal
