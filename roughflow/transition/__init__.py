"""Stage 4, short transitions: log p(x₁ | x₀) by the paths that lead from x₀ to x₁.

The random ODE of one transition (`_ends`) in suitable variables (`_coordinates`), weighted paths around the
likeliest one (`_bridges`), and the log-densities of many transitions (`_values`).
"""

from ._bridges import Bridges as Bridges, bridges as bridges
from ._coordinates import (
    AbstractCoordinates as AbstractCoordinates,
    Arc as Arc,
    Columns as Columns,
    Logarithm as Logarithm,
    Root as Root,
    Unchanged as Unchanged,
)
from ._ends import (
    Effort as Effort,
    Ends as Ends,
    Transition as Transition,
    boundary_share as boundary_share,
    stiffness as stiffness,
)
from ._forward import forwards as forwards, linear as linear
from ._values import (
    CHUNK as CHUNK,
    choose_effort as choose_effort,
    in_chunks as in_chunks,
    keys_of as keys_of,
    largest_rate as largest_rate,
    log_probs as log_probs,
    transition_value as transition_value,
    transition_values as transition_values,
)
