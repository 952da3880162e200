"""Extrapolation over the number of functions of the driver."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_positive
from ..flow import AbstractEstimator, StochasticFlow
from ._endpoint import Endpoint
from ._estimate import Estimate, from_log_weights, log_mean, relative_weights, standard_error
from ._estimator import AbstractImportanceEstimator, finer_log_weights
from ._sampler import Sampler


class Richardson(AbstractEstimator):
    """log p with n and with 2n functions along shared paths, extrapolated: if the driver's error is c/nᵖ,

        log p ≈ log p⁽²ⁿ⁾ + (log p⁽²ⁿ⁾ − log p⁽ⁿ⁾)/(2ᵖ − 1).

    **Arguments:** `estimator`, the one to extrapolate; `order`, p: 1 for noise that depends on the state, 3
    for additive noise with `rf.KarhunenLoeve`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimator = rf.Richardson(rf.Endpoint(num_paths=16), order=3)
    flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=estimator).log_prob
    ```
    """

    estimator: AbstractImportanceEstimator = Endpoint()
    order: float = eqx.field(static=True, default=1)

    def __check_init__(self):
        check_positive("order", self.order)

    def estimate(
        self,
        flow: StochasticFlow,
        x: Array,
        *,
        key: PRNGKeyArray,
        tolerance: float | None = None,
        max_paths: int = 2**16,
        truncation: bool = False,
    ) -> Estimate:
        del max_paths
        if tolerance is not None:
            raise ValueError("Richardson takes no tolerance: set num_paths of its estimator")
        sampler = Sampler(self.estimator, flow, x, key)
        coarse = sampler.all_log_weights().T
        first = np.zeros(len(sampler.keys), int)
        fine = finer_log_weights(self.estimator, flow, x, key, sampler, first).T
        share = 1 / (2**self.order - 1)
        change = log_mean(fine) - log_mean(coarse)
        terms = (1 + share) * relative_weights(fine, sampler.group)
        terms = terms - share * relative_weights(coarse, sampler.group)
        estimate = from_log_weights(fine, sampler.group, sampler.law.fell_back)
        estimate = eqx.tree_at(
            lambda e: (e.log_prob, e.standard_error),
            estimate,
            (log_mean(fine) + share * change, standard_error(terms)),
        )
        if truncation:
            # What the extrapolation moved: what is left is smaller.
            estimate = eqx.tree_at(
                lambda e: e.truncation_error, estimate, share * jnp.abs(change), is_leaf=lambda a: a is None
            )
        return jax.tree.map(lambda a: jnp.reshape(a, sampler.batch), estimate)
