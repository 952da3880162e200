"""Figures: densities, samples, paths, and how a fit or an estimate went.

Each function draws on the axes it is given, or makes its own at the width of a column, and returns them.
Nothing here changes matplotlib's settings. The colours are those of Okabe and Ito, which the colour-blind can
tell apart, and shades of one hue for densities.

```python
from roughflow import plots
from roughflow.datasets import Moons

axes = plots.density(Moons().log_prob, extent=Moons.extent, colour_bar=True)
```
"""

from ._bands import bands as bands
from ._diagnostics import HEAVY_TAIL as HEAVY_TAIL, diagnostics as diagnostics
from ._paths import (
    approximations as approximations,
    sample_paths as sample_paths,
    trajectory as trajectory,
)
from ._plane import density as density, grid as grid, samples as samples
from ._save import save as save
from ._series import fan as fan, fitted_sde as fitted_sde
from ._style import (
    BLUE as BLUE,
    COLUMN as COLUMN,
    DENSITY as DENSITY,
    EMBER as EMBER,
    GREEN as GREEN,
    GREY as GREY,
    NIGHT as NIGHT,
    PURPLE as PURPLE,
    SKY as SKY,
    SMALL as SMALL,
    TEXT as TEXT,
    TIME as TIME,
    VERMILION as VERMILION,
    Window as Window,
)
from ._training import History as History, training as training
