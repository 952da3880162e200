"""Lower and upper bounds on log p(x), for training."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, check_count, check_fields, check_key
from .._programs import jit
from ..flow import AbstractStochasticFlow, one_line_errors
from ._estimate import log_mean
from ._modes import Laplace
from ._paths import Level, PullBack, checked_points, explain_failure, mixture_of, point_keys, solve_keys
from ._proposals import AbstractProposal, log_standard


class LowerBound(eqx.Module):
    """The K-path lower bound: E log (1/K) Σₖ wₖ ≤ log p(x), which tightens as K grows (Burda et al. 2016).

    With `rf.PullBack(1)` this is the bound of Hodgkinson et al. (2020), E log p(x | path).

    **Arguments:** `estimator`, whose `num_paths` is K and from whose proposal the paths are drawn. If the
    proposal is an `rf.Amortised`, the gradient of the bound trains it too.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    bound = rf.density.LowerBound(rf.PullBack(num_paths=8))
    bound(flow, jnp.zeros((5, 1)), key=jax.random.key(0)).shape  # (5,)
    ```
    """

    estimator: PullBack = PullBack(num_paths=8)

    def __check_init__(self):
        check_fields(self)

    def __call__(self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """An unbiased estimate of the bound at each x of shape `(..., d)`."""
        weights = self.log_weights(flow, x, key=key)
        return log_mean(jnp.moveaxis(weights, -1, 0))

    def log_weights(self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray) -> Array:
        """log w₁, …, log w_K at each x, shape `(..., K)`; the bound is the logarithm of their mean."""
        x = checked_points(flow, x)
        flat, count = jnp.reshape(x, (-1, x.shape[-1])), self.estimator.num_paths
        self.estimator.proposal.draws.check(count)
        # In a fit on several devices, `key` already contains one key per point.
        keys = key if key.ndim else point_keys(check_key(key), jnp.arange(len(flat)))
        places = jnp.broadcast_to(jnp.arange(count), (len(flat), count))
        try:
            with one_line_errors():
                weights = _log_weights(self.estimator, flow, flat, keys, places, count)
        except NonFiniteError:
            explain_failure(flow, flat)
            raise
        return jnp.reshape(weights, (*x.shape[:-1], count))


@jit
def _log_weights(estimator: PullBack, flow, x: Array, keys: PRNGKeyArray, places: Array, most: int) -> Array:
    return estimator.log_weights(flow, x, keys, places, most)


class UpperBound(eqx.Module):
    """An upper bound on the mean of log p over samples Z of the flow:

        E log p(Z) ≤ E log 1/(K+1) (w₀ + w₁ + … + w_K),      wₖ = p(Z | ωₖ) φ(ωₖ)/q(ωₖ | Z),

    where ω₀ is the path that generated Z, and ω₁, …, ω_K are drawn from the proposal q (Sobolev & Vetrov
    2019; for the prior as q, Yin & Zhou 2018). The bound tightens as K grows. It holds for every q, because
    ω₀ is a draw from the distribution of the path given Z, and is tighter if q is closer to that
    distribution: for K = 0 it exceeds E log p(Z) by the mean of KL(p(ω | Z) ‖ q(ω | Z)). Every path has at
    most one start from which it reaches Z; a path without such a start has weight zero.

    **Arguments:** `num_paths`, the number K of paths from the proposal, which may be 0; `proposal`:
    `rf.Laplace()` (default), an `rf.Amortised(...)`, which is trained if the bound is minimised, or
    `rf.Prior()`, which gives the loosest bound.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    z, bound = rf.density.UpperBound(num_paths=16)(flow, key=jax.random.key(0), shape=(100,))
    jnp.mean(bound)  # at least E log p(Z), up to sampling error
    ```
    """

    num_paths: int = eqx.field(static=True, default=16)
    proposal: AbstractProposal = Laplace()

    def __check_init__(self):
        check_count("num_paths", self.num_paths, least=0)
        check_fields(self)

    def __call__(
        self, flow: AbstractStochasticFlow, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """Samples Z `(*shape, d)`, and the value of the bound at each of them `(*shape)`. Both are
        differentiable.

        A sample that escapes is set to infinity, and its value to −inf.
        """
        with one_line_errors():
            z, value = _upper(flow, self.proposal, check_key(key), math.prod(shape), self.num_paths)
        return jnp.reshape(z, (*shape, flow.dimension)), jnp.reshape(value, shape)


@jit
def _upper(
    flow: AbstractStochasticFlow, proposal: AbstractProposal, key: PRNGKeyArray, count: int, fresh: int
) -> tuple[Array, Array]:
    key_own, key_path, key_solve, key_cloud = jax.random.split(key, 4)
    z, given, path = flow.sample_and_log_prob_given_path(key=key_own, shape=(count,))
    has_escaped = ~jnp.all(jnp.isfinite(z), axis=-1)
    # For a sample that escaped, there is no finite point at which to evaluate the bound.
    place = jnp.where(has_escaped[:, None], 0, z)
    mixture = mixture_of(proposal, flow, place, key_cloud)
    density = log_standard if mixture is None else mixture.log_prob
    own = jnp.reshape(path.coefficients, (count, 1, -1))
    weights = given[:, None] + log_standard(own) - density(own)
    if fresh:
        size = own.shape[-1] if mixture is None else mixture.num_normals
        noise = jax.random.normal(key_path, (count, fresh, size), z.dtype)
        omega = noise if mixture is None else mixture.sample(noise)
        places = jnp.broadcast_to(jnp.arange(fresh), (count, fresh))
        solves = solve_keys(flow, jax.random.split(key_solve, count), places)
        rest = Level(flow).solved(place, omega, None, solves) + log_standard(omega)
        # Far from the centre, the vector field may overflow to NaN before the sample counts as escaped; such
        # a path has no start either.
        rest = jnp.where(jnp.isnan(rest), -jnp.inf, rest) - density(omega)
        weights = jnp.concatenate([weights, rest], axis=1)
    return z, jnp.where(has_escaped, -jnp.inf, log_mean(weights.T))
