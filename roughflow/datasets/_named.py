"""All of them by name."""

from collections.abc import Mapping
from types import MappingProxyType

from ._banana import Banana
from ._checkerboard import Checkerboard
from ._distribution import AbstractDistribution
from ._eight_gaussians import EightGaussians
from ._moons import Moons
from ._pinwheel import Pinwheel
from ._rings import Rings
from ._star import Star
from ._swiss_roll import SwissRoll
from ._two_spirals import TwoSpirals

DISTRIBUTIONS: Mapping[str, AbstractDistribution] = MappingProxyType(
    {
        "banana": Banana(),
        "star": Star(),
        "moons": Moons(),
        "eight-gaussians": EightGaussians(),
        "checkerboard": Checkerboard(),
        "two-spirals": TwoSpirals(),
        "pinwheel": Pinwheel(),
        "rings": Rings(),
        "swiss-roll": SwissRoll(),
    }
)
"""The nine distributions by name."""
