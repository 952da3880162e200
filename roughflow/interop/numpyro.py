"""NumPyro models as targets, and flows as NumPyro distributions."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PRNGKeyArray
from numpyro.infer.util import initialize_model, unconstrain_fn

import roughflow as rf

from .._checks import check_callable, check_instance, check_key


class ModelTarget(eqx.Module):
    """The posterior of a NumPyro model on Rᵈ; see `target_from_model`.

    Called with z of shape `(d,)`, it returns log p(data, z) including the Jacobian of the transforms, so its
    integral is the evidence. `constrain` and `unconstrain` convert between z and the values of the model;
    `names` and `dimension` describe z; `start` is a starting point.
    """

    potential: Callable[[dict], Array] = eqx.field(static=True)
    transform: Callable[[dict], dict] = eqx.field(static=True)
    inverse: Callable[[dict], dict] = eqx.field(static=True)
    unravel: Callable[[Array], dict] = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    start: Array

    @property
    def dimension(self) -> int:
        return self.start.shape[0]

    def __call__(self, z: Array) -> Array:
        return -self.potential(self.unravel(z))

    def constrain(self, z: Array) -> dict[str, Array]:
        """The values of the model, including deterministic sites, for z of shape `(..., d)`."""
        function = lambda y: self.transform(self.unravel(y))
        for _ in range(jnp.ndim(z) - 1):
            function = jax.vmap(function)
        return function(jnp.asarray(z))

    def unconstrain(self, values: Mapping[str, Array]) -> Array:
        """z of shape `(d,)` for values of the model's sites."""
        return ravel_pytree(self.inverse({name: jnp.asarray(values[name]) for name in self.names}))[0]


def target_from_model(
    model: Callable, *args: Any, key: PRNGKeyArray, model_kwargs: Mapping[str, Any] | None = None
) -> ModelTarget:
    """The log-density of a NumPyro model, given its data, on unconstrained space.

    **Arguments:** `model`, followed by its positional arguments; `model_kwargs`, its keyword arguments;
    `key`, for the search for a point of finite density.

    ```python
    import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    import roughflow as rf
    from roughflow.interop.numpyro import target_from_model

    def model(y):
        mean, scale = numpyro.sample("mean", dist.Normal(0, 5)), numpyro.sample("scale", dist.HalfNormal(5))
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    target = target_from_model(model, jnp.array([1.0, 2.0, 4.0]), key=jax.random.key(0))
    sde = rf.overdamped_langevin(target, target.dimension, scale=0.5)
    chain = rf.sample_chain(rf.AdjustedSampler(sde, 0.5), target.start, key=jax.random.key(1), num_steps=100)
    target.constrain(chain.samples)["scale"].shape  # (100,)
    ```
    """
    check_callable("model", model, "of NumPyro")
    check_key(key)
    kwargs = dict(model_kwargs or {})
    info = initialize_model(key, model, model_args=args, model_kwargs=kwargs)
    first: dict = info.param_info.z
    start, unravel = ravel_pytree(first)
    if not start.size:
        raise ValueError("the model has no continuous latent sites")
    inverse = lambda values: unconstrain_fn(model, args, kwargs, values)
    return ModelTarget(
        info.potential_fn,
        info.postprocess_fn,
        inverse,
        unravel,
        tuple(sorted(first)),
        jnp.asarray(start, float),
    )


class FlowDistribution(dist.Distribution):
    """A flow as a NumPyro distribution over Rᵈ, for use in a model (as a learned prior) or as a guide.

    With noise, `log_prob` is an estimate. The paths of the estimate depend only on `key`, so NUTS and other
    methods work with one smooth function, which differs from the density of the flow by the error of the
    estimate.

    **Arguments:** `flow`; `key`; `estimator`, by default `rf.PullBack` with 16 paths from the flow's learned
    proposal, or from `rf.Laplace()`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow.interop.numpyro import FlowDistribution

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    FlowDistribution(flow, key=jax.random.key(0)).log_prob(jnp.zeros(2))
    ```
    """

    support = dist.constraints.real_vector  # pyright: ignore
    arg_constraints = {}  # noqa: RUF012  (NumPyro's way)
    reparametrized_params = []  # noqa: RUF012
    pytree_data_fields = ("flow", "key", "estimator")

    def __init__(
        self,
        flow: rf.StochasticFlow,
        *,
        key: PRNGKeyArray,
        estimator: rf.density.AbstractEstimator | None = None,
        validate_args: bool | None = None,
    ):
        check_instance("flow", flow, rf.StochasticFlow, "an rf.StochasticFlow")
        if estimator is not None:
            check_instance("estimator", estimator, rf.density.AbstractEstimator, "one such as rf.PullBack(8)")
        self.flow = flow
        self.key = check_key(key)
        self.estimator = estimator or _estimator(flow)
        super().__init__(batch_shape=(), event_shape=(flow.dimension,), validate_args=validate_args)

    def sample(self, key: Any, sample_shape=()):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.flow.sample(key=_typed(key), shape=tuple(sample_shape))

    def log_prob(self, value: Any, intermediates=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        del intermediates
        flow = self.flow.without_errors()  # NumPyro may evaluate any point
        return flow.log_prob(value, key=_typed(self.key), estimator=self.estimator)


def _estimator(flow: rf.StochasticFlow) -> rf.density.AbstractEstimator:
    """A smooth estimator, with a fixed number of paths."""
    if not flow.noise_dimension:
        return rf.PullBack(1)
    return rf.PullBack(16, rf.Laplace() if flow.proposal is None else flow.proposal)


def _typed(key: PRNGKeyArray) -> PRNGKeyArray:
    """Convert a legacy key, as NumPyro passes it, to a typed key."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
