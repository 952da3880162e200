"""Stage 2, what drives it: distributions over smooth random paths, and paths as data."""

from ._driver import AbstractDriver as AbstractDriver, Path as Path
from ._karhunen_loeve import KarhunenLoeve as KarhunenLoeve
from ._legendre import Legendre as Legendre
from ._piecewise_linear import PiecewiseLinear as PiecewiseLinear
