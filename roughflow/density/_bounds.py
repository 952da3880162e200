"""Bounds on log p(x) that training can push on: one from below, one from above."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key
from ..flow import StochasticFlow, one_line_errors
from ._endpoint import Endpoint, endpoint_rows
from ._estimate import log_mean
from ._estimator import AbstractImportanceEstimator
from ._latent import Latent, Target, constant
from ._prior import Prior, PriorLaw
from ._proposal import free_part
from ._pull_back import PullBack
from ._sampler import Sampler


class LowerBound(eqx.Module):
    """The K-path bound: E log (1/K) Σₖ wₖ ≤ log p(x), tighter as K grows (Burda et al. 2016).

    With `rf.PullBack(1)` it is the bound of Hodgkinson et al. (2020), E log p(x | path).

    **Arguments:** `estimator`, whose `num_paths` is K and whose proposal draws the paths; an
    `rf.Amortised` proposal in it is trained by the same gradient.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    bound = rf.LowerBound(rf.PullBack(num_paths=8))
    bound(flow, jnp.zeros((5, 1)), key=jax.random.key(0)).shape  # (5,)
    ```
    """

    estimator: AbstractImportanceEstimator = PullBack(num_paths=8)

    def __call__(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """One draw of the bound at each x of shape `(..., d)`."""
        weights = self.log_weights(flow, x, key=key)
        return log_mean(jnp.moveaxis(weights, -1, 0))

    def log_weights(self, flow: StochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """log w₁, …, log w_K at each x, shape `(..., K)`; the bound is the logarithm of their mean."""
        sampler = Sampler(self.estimator, flow, x, key)
        weights = sampler.all_log_weights()
        return jnp.reshape(weights, (*sampler.batch, weights.shape[-1]))


class UpperBound(eqx.Module):
    """The semi-implicit bound on the mean of log p over the flow's own samples, in endpoint form:

        E log p(Z) ≤ E log 1/(K+1) (p(Z | c₀) + p(Z | c₁) + … + p(Z | c_K)),

    c₀ what made the sample Z and c₁, …, c_K drawn afresh (Yin & Zhou 2018), tighter as K grows. The condition
    c is the start and the path but for its endpoint B(T), which the sample fixes: what is left to chance
    is far less than with `rf.PullBackUpperBound`, and no solve goes backwards. It takes as many noises as
    dimensions.

    **Arguments:** `fresh`, the number K; it may be 0.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    z, bound = rf.UpperBound(fresh=16)(flow, key=jax.random.key(0), shape=(100,))
    jnp.mean(bound)  # not below E log p(Z), but for chance
    ```
    """

    fresh: int = eqx.field(static=True, default=16)

    def __check_init__(self):
        _check_fresh(self.fresh)

    def __call__(
        self, flow: StochasticFlow, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """Samples Z `(*shape, d)` and the bound's value at each, `shape`; gradients pass through both."""
        Endpoint(proposal=Prior()).check(flow)
        with one_line_errors():
            z, value = _endpoint_bound(flow, check_key(key), math.prod(shape), self.fresh)
        return jnp.reshape(z, (*shape, flow.dimension)), jnp.reshape(value, shape)


@eqx.filter_jit
def _endpoint_bound(flow: StochasticFlow, key: PRNGKeyArray, count: int, fresh: int) -> tuple[Array, Array]:
    latent = Latent(flow, fixed_start=True)
    key_start, key_path = jax.random.split(key)
    # The first row of each is what makes the sample.
    start = flow.base.sample(key=key_start, shape=(1 + fresh, count))
    omega = jax.random.normal(key_path, (1 + fresh, count, latent.size), start.dtype)
    z, escaped = latent.end(omega[0], start[0])
    # One chart for all, chosen without regard to the sample.
    somewhere = flow.base.sample(key=jax.random.key(0), shape=(1,)).astype(start.dtype)
    rows = constant(endpoint_rows(latent, Target(somewhere, somewhere)))
    flat = lambda a: jnp.reshape(a, (-1, a.shape[-1]))
    rows = jnp.broadcast_to(rows, ((1 + fresh) * count, *rows.shape[1:]))
    delta = flat(omega)[:, None]
    delta = free_part(rows, delta)
    guess = jnp.where((jnp.arange(len(rows)) < count)[:, None], flat(omega), delta[:, 0])
    target = Target(jnp.tile(z, (1 + fresh, 1)), flat(start))
    log_joint = Endpoint().log_joint(flow, latent, target, rows, delta[:, 0], guess, key)
    given = log_joint - PriorLaw(rows, jnp.zeros(len(rows), bool)).log_prob(delta)[:, 0]
    value = _log_mean_of_found(jnp.reshape(given, (1 + fresh, count)))
    return jnp.where(escaped[:, None], jnp.inf, z), jnp.where(escaped, -jnp.inf, value)


def _log_mean_of_found(given: Array) -> Array:
    """log of the mean over the conditions from which a path to the sample was found.

    Counted as zero, a path that was not found would lower an upper bound, and training would learn to hide
    paths. Left out, it does not, as long as those not found are on average no likelier than the others.
    """
    found = jnp.sum(jnp.isfinite(given), axis=0)
    return log_mean(given) + jnp.log(given.shape[0] / jnp.maximum(found, 1))


class PullBackUpperBound(eqx.Module):
    """The semi-implicit bound of `rf.UpperBound` with the whole path as the condition.

    Given the whole path a sample is known but for its start, so the bound is loose unless the noise is
    weak, and a flow that is trained on it gives its noise up: use `rf.UpperBound` where it can be used.

    **Arguments:** `fresh`, the number K of paths drawn afresh; it may be 0.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    z, bound = rf.PullBackUpperBound(fresh=16)(flow, key=jax.random.key(0), shape=(100,))
    ```
    """

    fresh: int = eqx.field(static=True, default=16)

    def __check_init__(self):
        _check_fresh(self.fresh)

    def __call__(
        self, flow: StochasticFlow, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """Samples Z `(*shape, d)` and the bound's value at each, `shape`; gradients pass through both."""
        key_own, key_path, key_solve = jax.random.split(check_key(key), 3)
        z, own, _ = flow.sample_and_log_prob_given_path(key=key_own, shape=shape)
        if not self.fresh:
            return z, own
        paths = flow.sample_path(key=key_path, shape=(self.fresh, *shape))
        # A sample that escaped has no finite place to ask about.
        escaped = jnp.isneginf(own)
        place = jnp.where(escaped[..., None], 0, z)
        given = flow.log_prob_given_path(place[None], paths, key=key_solve)
        value = log_mean(jnp.concatenate([own[None], given]))
        return z, jnp.where(escaped, -jnp.inf, value)


def _check_fresh(fresh: int) -> None:
    if fresh:
        check_count("fresh", fresh)
