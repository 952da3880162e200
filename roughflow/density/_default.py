"""What a flow's density is estimated with when nothing is said: the one place that knows."""

from .._checks import check_count, check_instance
from ..flow import StochasticFlow
from .estimators import AbstractImportanceEstimator, PullBack, Tempered
from .proposals import AbstractProposal


def default_estimator(flow: StochasticFlow, num_paths: int = 64) -> AbstractImportanceEstimator:
    """`rf.Tempered`, with the proposal that the flow has learned, if it has; without noise one pull-back,
    which is exact.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    rf.default_estimator(flow, num_paths=16)
    ```
    """
    check_instance("flow", flow, StochasticFlow, "an rf.StochasticFlow")
    check_count("num_paths", num_paths)
    if flow.noise_dimension == 0:
        return PullBack(num_paths=1)
    if isinstance(flow.proposal, AbstractProposal):
        return Tempered(num_paths, flow.proposal)
    return Tempered(num_paths)
