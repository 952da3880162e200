"""The surface of all ways to reach x: the map Φ, its likeliest points, and solving for an end."""

from ._cloud import Cloud as Cloud
from ._end import (
    end_along as end_along,
    find_end as find_end,
    solve_end as solve_end,
    solve_near as solve_near,
)
from ._latent import Latent as Latent, Target as Target, constant as constant
from ._modes import (
    Modes as Modes,
    end_and_jacobian as end_and_jacobian,
    find_modes as find_modes,
    normal_space as normal_space,
)
from ._part_of_a_batch import for_some as for_some, in_blocks as in_blocks
from ._turned import Turned as Turned
