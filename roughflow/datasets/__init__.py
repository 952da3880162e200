"""Distributions on the plane whose density is known: data to fit, and the truth to compare with.

They have the shapes and the scale that papers on normalizing flows draw, with one change: every density is
exact, so that the excess of a model over the truth is a number.

```python
import jax
from roughflow.datasets import DISTRIBUTIONS

distribution = DISTRIBUTIONS["two-spirals"]
data = distribution.sample(key=jax.random.key(0), shape=(1000,))  # (1000, 2)
-distribution.log_prob(data).mean()  # the truth's loss on these data
distribution.entropy  # its expected loss, 2.5406 nats: no model's is lower
```
"""

from ._banana import Banana as Banana
from ._checkerboard import Checkerboard as Checkerboard
from ._distribution import (
    AbstractDistribution as AbstractDistribution,
    AbstractSmoothDistribution as AbstractSmoothDistribution,
    Window as Window,
)
from ._eight_gaussians import EightGaussians as EightGaussians
from ._moons import Moons as Moons
from ._named import DISTRIBUTIONS as DISTRIBUTIONS
from ._pinwheel import Pinwheel as Pinwheel
from ._rings import Rings as Rings
from ._star import Star as Star
from ._swiss_roll import SwissRoll as SwissRoll
from ._two_spirals import TwoSpirals as TwoSpirals
