"""The calculus under the theorem: rough paths on a grid, their lifts and distances."""

from ._lifts import brownian_lift as brownian_lift, lift as lift
from ._rough_path import RoughPath as RoughPath
