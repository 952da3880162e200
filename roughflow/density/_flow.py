"""A stochastic normalizing flow: what the random ODE of a path gives, and its density over all paths."""

from jaxtyping import Array, PRNGKeyArray

from .._checks import check_instance
from ..flow import AbstractStochasticFlow
from ._estimate import AbstractEstimator, Accuracy, Estimate
from ._ladder import Ladder


class StochasticFlow(AbstractStochasticFlow):
    __doc__ = AbstractStochasticFlow.__doc__

    def estimate(
        self,
        x: Array,
        *,
        key: PRNGKeyArray,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
        max_paths: int = 2**16,
    ) -> Estimate:
        """log p(x) = log E p(x | path), with error bars: an `rf.Estimate`.

        **Arguments:**

        - `x`: points, shape `(..., d)`.
        - `estimator`: if none is given, `rf.density.Ladder()`, which takes what is cheapest for each point;
          without noise one pull-back, which is exact.
        - `tolerance`: add work to each point until its total error is below this, or `max_paths` are spent;
          `warning` says if they were. By default the aim is 0.02.

        ```python
        import jax, jax.numpy as jnp
        import roughflow as rf

        sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
        estimate = flow.estimate(jnp.zeros((3, 1)), key=jax.random.key(0))
        estimate.log_prob, estimate.total_error, estimate.warning
        ```
        """
        return self._estimate(x, key, estimator, Accuracy(tolerance, max_paths))

    def log_prob(self, x: Array, *, key: PRNGKeyArray, estimator: AbstractEstimator | None = None) -> Array:
        """log p(x), shape `(...)`: the value of `estimate` without its error bars."""
        return self._estimate(x, key, estimator, Accuracy(errors=False)).log_prob

    def _estimate(
        self, x: Array, key: PRNGKeyArray, estimator: AbstractEstimator | None, accuracy: Accuracy
    ) -> Estimate:
        estimator = Ladder() if estimator is None else estimator
        check_instance("estimator", estimator, AbstractEstimator, "an estimator such as rf.PullBack(64)")
        return estimator.estimate(self, x, key=key, accuracy=accuracy)
