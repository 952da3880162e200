"""Stage 2, what drives it: distributions over smooth random paths, and paths as data."""

from ._changed import Correlated as Correlated, TimeChanged as TimeChanged
from ._driver import AbstractDriver as AbstractDriver, Path as Path
from ._fractional import FractionalBrownian as FractionalBrownian, FractionalLegendre as FractionalLegendre
from ._karhunen_loeve import KarhunenLoeve as KarhunenLoeve
from ._legendre import Legendre as Legendre
from ._noise import fractional_noise as fractional_noise, stationary_noise as stationary_noise
from ._piecewise_linear import PiecewiseLinear as PiecewiseLinear
from ._polynomials import GaussianDriver as GaussianDriver
