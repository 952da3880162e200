"""Two-dimensional distributions with known densities: data to fit, and the truth to compare with.

They have the shapes and scales common in papers on normalizing flows, but all densities are exact, so that
the excess loss of a model over the truth can be computed.

```python
import jax
from roughflow.datasets import DISTRIBUTIONS

distribution = DISTRIBUTIONS["two-spirals"]
data = distribution.sample(key=jax.random.key(0), shape=(1000,))  # (1000, 2)
-distribution.log_prob(data).mean()  # the truth's loss on these data
distribution.entropy  # its expected loss, 2.5406 nats: no model's is lower
```
"""

from ._distributions import (
    DISTRIBUTIONS as DISTRIBUTIONS,
    AbstractDistribution as AbstractDistribution,
    AbstractSmoothDistribution as AbstractSmoothDistribution,
    Banana as Banana,
    Checkerboard as Checkerboard,
    EightGaussians as EightGaussians,
    Moons as Moons,
    Pinwheel as Pinwheel,
    Rings as Rings,
    Star as Star,
    SwissRoll as SwissRoll,
    TwoSpirals as TwoSpirals,
    Window as Window,
)
