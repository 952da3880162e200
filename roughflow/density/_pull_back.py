"""The paper's estimator: the mean of p(x | path) over paths drawn from their law."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_positive
from ..flow import StochasticFlow
from ._estimator import AbstractImportanceEstimator


class PullBack(AbstractImportanceEstimator):
    """p(x) = E p(x | path), by plain Monte Carlo over `num_paths` paths (Hodgkinson et al. 2020).

    Unbiased for p(x), for any noise, and cheap a path; but where p(x | path) is concentrated its weights
    are very uneven, and paths may be lost whose backward solve escapes. Look at `effective_paths`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.PullBack(num_paths=1000))
    estimate.log_prob, estimate.standard_error
    ```
    """

    num_paths: int = eqx.field(static=True, default=1000)

    def __check_init__(self):
        check_positive("num_paths", self.num_paths)

    def log_weights(self, flow: StochasticFlow, x: Array, keys: PRNGKeyArray) -> Array:
        shape = (self.num_paths, flow.driver.num_functions, flow.noise_dim)
        draw = lambda key: jax.random.normal(key, shape, x.dtype)
        coefficients = jnp.swapaxes(jax.vmap(draw)(keys), 0, 1)
        key = jax.random.fold_in(keys[0], 1)  # for a divergence or correction that draws
        return flow.log_prob_given_path(x, flow.driver.path(coefficients, flow.t1), key=key)
