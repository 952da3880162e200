"""Stage 2, drivers: distributions over smooth random paths, and paths as data."""

from ._driver import (
    AbstractDriver as AbstractDriver,
    Path as Path,
)
from ._expansions import (
    GaussianDriver as GaussianDriver,
    KarhunenLoeve as KarhunenLoeve,
    Legendre as Legendre,
    PiecewiseLinear as PiecewiseLinear,
)
from ._fractional import (
    FractionalBrownian as FractionalBrownian,
    FractionalLegendre as FractionalLegendre,
    fractional_noise as fractional_noise,
    stationary_noise as stationary_noise,
)
