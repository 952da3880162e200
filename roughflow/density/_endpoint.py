"""p(x) as an integral over the ways to reach x, with forward solves only."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_positive
from ..flow import StochasticFlow
from ._estimator import AbstractImportanceEstimator
from ._latent import Latent
from ._mode import Mode, find_mode, solve_gram

NEWTON_STEPS = 8


class Endpoint(AbstractImportanceEstimator):
    """Paths drawn around the likeliest one, each bent so that it ends at x. The default.

    Write Z_T = Φ(ξ) with ξ standard normal in R^D: the whitened start and all path coefficients. At the
    point ξ* of least energy with Φ(ξ*) = x, and J = DΦ(ξ*), split R^D into the row space of J, of
    dimension d, and its complement. Draw δ in the complement from the tangent Gaussian q, and solve for
    the r in Rᵈ that brings the end back to x:

        Φ(ξ* + δ + Jᵀ r) = x,      p(x) = E [ φ(ξ) √det(J Jᵀ) / (|det DΦ(ξ) Jᵀ| q(δ)) ].

    On a linear SDE all weights are equal; elsewhere tens of paths do what takes the plain mean over
    paths many thousands, and no backward solve can escape. Any number of noises will do, even none. It
    costs d + 1 solves a Newton step, so in high dimension use `rf.PullBack`. Paths are assumed to reach x
    in one way for each δ.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.Endpoint(num_paths=64))
    estimate.log_prob, estimate.standard_error
    ```
    """

    num_paths: int = eqx.field(static=True, default=64)

    def __check_init__(self):
        check_positive("num_paths", self.num_paths)

    def log_weights(self, flow: StochasticFlow, x: Array, keys: PRNGKeyArray) -> Array:
        latent = Latent(flow)
        # A constant of the estimator: derivatives see Φ through the solution r alone.
        mode = _constant(find_mode(_constant(latent), _constant(x)))
        repeat = lambda a: jnp.repeat(a, self.num_paths, axis=0)
        mode, points = jax.tree.map(repeat, mode), repeat(x)
        noise = jax.vmap(lambda key: jax.random.normal(key, (self.num_paths, latent.size), x.dtype))(keys)
        noise = jnp.reshape(noise, (-1, latent.size))
        along = solve_gram(mode.jacobian, jnp.einsum("bij,bj->bi", mode.jacobian, noise))
        delta = noise - jnp.einsum("bij,bi->bj", mode.jacobian, along)
        weights = _log_weights(latent, points, mode, delta)
        return jnp.reshape(weights, (x.shape[0], self.num_paths)).T


def _log_weights(latent: Latent, x: Array, mode: Mode, delta: Array) -> Array:
    """One log-weight a row: `x` `(B, d)`, `delta` `(B, D)` in the complement of the row space."""
    d = x.shape[1]
    anchor, rows = mode.xi + delta, mode.jacobian

    def at(r: Array) -> Array:
        return anchor + jnp.einsum("bij,bi->bj", rows, r)

    def end_and_matrix(r: Array) -> tuple[Array, Array, Array]:
        """Φ, its d × d derivative in r, and who escaped."""
        end, tangent, escaped = jax.linearize(lambda s: latent.end(at(s)), r, has_aux=True)
        columns = [tangent(jnp.broadcast_to(e, r.shape)) for e in jnp.eye(d, dtype=x.dtype)]
        return end, jnp.stack(columns, axis=-1), escaped

    def newton(_, r: Array) -> Array:
        end, matrix, escaped = end_and_matrix(r)
        change = _solve(matrix, x - end)
        change = jnp.where(jnp.isfinite(change), change, 0)
        return jnp.where(escaped[:, None], 0.5 * r, r + change)

    # The search is a constant; one more step, differentiated with the matrix held fixed, gives the
    # derivative of its solution (implicit function theorem).
    fixed = jax.lax.stop_gradient
    r = fixed(jax.lax.fori_loop(0, NEWTON_STEPS, newton, jnp.zeros_like(x)))
    r = r + _solve(fixed(end_and_matrix(r)[1]), x - latent.end(at(r))[0])
    end, matrix, escaped = end_and_matrix(r)
    miss = jnp.max(jnp.abs(_solve(matrix, x - end)), axis=-1) / (1 + jnp.max(jnp.abs(r), axis=-1))
    solved = fixed(~escaped & (miss < 100 * jnp.finfo(x.dtype).eps ** 0.75))
    log_det = jnp.linalg.slogdet(matrix)[1]
    log_gram = jnp.linalg.slogdet(jnp.einsum("bij,bkj->bik", rows, rows))[1]
    log_proposal = -0.5 * jnp.sum(delta**2, -1) - 0.5 * (latent.size - d) * jnp.log(2 * jnp.pi)
    value = latent.log_prior(at(r)) - log_det + 0.5 * log_gram - log_proposal
    return jnp.where(solved & jnp.isfinite(value), value, -jnp.inf)


def _constant(tree):
    """A pytree, functions among its leaves, that derivatives do not see."""
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_array(a) else a, tree)


def _solve(matrix: Array, right: Array) -> Array:
    return jnp.linalg.solve(matrix, right[..., None])[..., 0]
