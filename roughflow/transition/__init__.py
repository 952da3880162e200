"""Stage 4, short transitions: log p(x₁ | x₀) from weighted paths between x₀ and x₁.

This stage consists of the random ODE of one transition (`_ends`) in suitable variables (`_coordinates`),
weighted paths around the most likely path and the log-densities of many transitions (`_bridges`), and the
density a short time after a point as the base of a flow (`_short_time`).
"""

from ._bridges import (
    CHUNK as CHUNK,
    Bridges as Bridges,
    Weighted as Weighted,
    bridges as bridges,
    in_chunks as in_chunks,
    keys_of as keys_of,
    largest_rate as largest_rate,
    log_probs as log_probs,
    transition_value as transition_value,
)
from ._coordinates import (
    AbstractCoordinates as AbstractCoordinates,
    Arc as Arc,
    Columns as Columns,
    InCoordinates as InCoordinates,
    Logarithm as Logarithm,
    Root as Root,
    Unchanged as Unchanged,
)
from ._ends import (
    Effort as Effort,
    Ends as Ends,
    Transition as Transition,
    boundary_share as boundary_share,
    curvature as curvature,
    forwards as forwards,
    linear as linear,
    stiffness as stiffness,
)
from ._short_time import ShortTime as ShortTime, short_time as short_time
