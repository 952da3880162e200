"""Extrapolation over the number of functions of the driver."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_positive
from ...flow import AbstractEstimator, Accuracy, Estimate, StochasticFlow
from .._estimate import from_log_weights, log_mean, relative_weights, standard_error
from ..proposals import Laplace
from ._importance import AbstractImportanceEstimator, finer_log_weights, in_shape
from ._pull_back import PullBack
from ._weights import EstimatorRun


class Richardson(AbstractEstimator):
    """log p with n and with 2n functions along shared paths, extrapolated: if the driver's error is c/nᵖ,

        log p ≈ log p⁽²ⁿ⁾ + (log p⁽²ⁿ⁾ − log p⁽ⁿ⁾)/(2ᵖ − 1).

    **Arguments:** `estimator`, the one to extrapolate; `order`, p: 1 for noise that depends on the state, 3
    for additive noise with `rf.KarhunenLoeve`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimator = rf.Richardson(rf.PullBack(16, rf.Laplace()), order=3)
    flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=estimator).log_prob
    ```
    """

    estimator: AbstractImportanceEstimator = PullBack(num_paths=64, proposal=Laplace())
    order: float = eqx.field(static=True, default=1)

    def __check_init__(self):
        check_positive("order", self.order)

    def estimate(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        if accuracy.tolerance is not None:
            raise ValueError("Richardson takes no tolerance: set num_paths of its estimator")
        run = EstimatorRun(self.estimator, flow, x, key)
        coarse = run.all_log_weights().T
        fine = finer_log_weights(self.estimator, flow, x, key).T
        share = 1 / (2**self.order - 1)
        change = log_mean(fine) - log_mean(coarse)
        terms = (1 + share) * relative_weights(fine, run.group)
        terms = terms - share * relative_weights(coarse, run.group)
        terms = jax.lax.stop_gradient(terms)
        missed, searches = run.missed, self.estimator.searches
        estimate = from_log_weights(fine, run.group, missed, searched=searches)
        estimate = dataclasses.replace(
            estimate,
            log_prob=log_mean(fine) + share * change,
            standard_error=standard_error(terms),
            # What the extrapolation moved: what is left is smaller.
            truncation_error=share * jnp.abs(change) if accuracy.truncation else None,
        )
        return in_shape(estimate, run.batch)
