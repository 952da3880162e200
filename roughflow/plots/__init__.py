"""Figures: densities, samples, paths, and diagnostics of fits and estimates.

Each function draws on the given axes, or on new axes as wide as one column of a paper, and returns the axes.
The settings of matplotlib are not changed. Lines use the palette of Okabe and Ito, which is safe for
colour-blind readers; densities use shades of one hue.

```python
from roughflow import plots
from roughflow.datasets import Moons

axes = plots.density(Moons().log_prob, extent=Moons.extent, colour_bar=True)
```
"""

from ._figures import (
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
    History as History,
    Window as Window,
    approximations as approximations,
    density as density,
    diagnostics as diagnostics,
    grid as grid,
    sample_paths as sample_paths,
    samples as samples,
    save as save,
    training as training,
    trajectory as trajectory,
)
from ._series import bands as bands, fan as fan, fitted_sde as fitted_sde, states as states
