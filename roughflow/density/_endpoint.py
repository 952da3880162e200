"""p(x) as an integral over the ways to reach x, with forward solves only."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._checks import check_count, is_traced
from ..flow import StochasticFlow
from ._estimator import AbstractImportanceEstimator
from ._laplace import Laplace
from ._latent import Latent, Target, constant
from ._linear import log_abs_det
from ._mode import Mode, end_and_jacobian, normal_space
from ._newton import solve_end
from ._proposal import AbstractLaw, AbstractProposal

SINGULAR = (
    "the noise does not move the end in every direction, so Endpoint cannot solve for it; use rf.PullBack, "
    "with a law for the start"
)


class Endpoint(AbstractImportanceEstimator):
    """Paths drawn around the likeliest one, each bent so that it ends at x. The default.

    Write Z_T = Φ(ξ) with ξ standard normal in R^D: the whitened start and all path coefficients. Split
    R^D along d orthonormal rows R. Draw the part δ of ξ orthogonal to them from the proposal q, and
    solve for the r in Rᵈ that brings the end to x:

        Φ(δ + Rᵀ r) = x,      p(x) = E [ φ(ξ) / (|det DΦ(ξ) Rᵀ| q(δ)) ],   ξ = δ + Rᵀ r.

    With `rf.Laplace()`, the default, R spans the rows of DΦ at the likeliest path: on a linear SDE all
    weights are equal, elsewhere tens of paths do what takes the plain mean over paths many thousands,
    and any number of noises will do. With `rf.Prior()` or `rf.Amortised(...)` R is the endpoint B(T) of
    the path, in the directions that move the end most, which takes as many noises as dimensions.

    No backward solve can escape. It costs d + 1 solves a Newton step, so in high dimension use
    `rf.PullBack`. For each δ one way to reach x is counted; a model that folds space so that there are
    several is estimated low (`Estimate.escaped` counts the paths for which none was found).

    **Arguments:**

    - `num_paths`: how many paths a point.
    - `proposal`: `rf.Laplace()`, `rf.Prior()` or an `rf.Amortised(...)`.
    - `start`: a point z₀ of shape `(d,)`, or one for each x, `(..., d)`. The law of the flow's base is
      then not used: what is estimated is the transition density from z₀.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.Endpoint(num_paths=64))
    estimate.log_prob, estimate.standard_error
    flow.log_prob(jnp.zeros(1), key=jax.random.key(0), estimator=rf.Endpoint(start=jnp.ones(1)))
    ```
    """

    num_paths: int = eqx.field(static=True)
    proposal: AbstractProposal
    start: Array | None

    def __init__(
        self,
        num_paths: int = 64,
        proposal: AbstractProposal | None = None,
        start: ArrayLike | None = None,
    ):
        self.num_paths = check_count("num_paths", num_paths)
        self.proposal = Laplace() if proposal is None else proposal
        self.start = None if start is None else jnp.asarray(start, float)

    def starts(self, x: Array) -> Array | None:
        if self.start is None:
            return None
        shape = self.start.shape
        if not shape or shape[-1] != x.shape[-1]:
            raise ValueError(f"start must have shape (..., {x.shape[-1]}) to match the flow, got {shape}")
        return jnp.broadcast_to(self.start.astype(x.dtype), x.shape)

    def rows(self, latent: Latent, target: Target, mode: Mode | None) -> Array:
        if mode is not None:
            return jnp.where(mode.reached[:, None, None], mode.rows, jnp.nan)
        return jnp.broadcast_to(
            endpoint_rows(latent, target), (len(target.x), latent.flow.dimension, latent.size)
        )

    def check(self, flow: StochasticFlow) -> None:
        d, m = flow.dimension, flow.noise_dim
        if m < d and not isinstance(self.proposal, Laplace):
            raise ValueError(
                f"Endpoint with {type(self.proposal).__name__} needs at least as many noises as dimensions, "
                f"got a {d} x {m} diffusion; use rf.PullBack, or Endpoint with rf.Laplace"
            )

    def verify(self, law: AbstractLaw) -> AbstractLaw:
        degenerate = jnp.any(jnp.isnan(law.rows))
        if is_traced(degenerate):
            rows = eqx.error_if(law.rows, degenerate, SINGULAR)
            return eqx.tree_at(lambda a: a.rows, law, rows)
        if bool(degenerate):
            raise ValueError(SINGULAR)
        return law

    def log_joint(
        self,
        flow: StochasticFlow,
        latent: Latent,
        target: Target,
        rows: Array,
        delta: Array,
        guess: Array,
        keys: PRNGKeyArray,
    ) -> Array:
        del flow, keys
        xi, matrix, solved = solve_end(latent, target, rows, delta, guess)
        value = latent.log_prior(xi) - log_abs_det(matrix)
        return jnp.where(solved & jnp.isfinite(value), value, -jnp.inf)


def endpoint_rows(latent: Latent, target: Target) -> Array:
    """Orthonormal rows `(1, d, D)`: the endpoint B(T), in the directions that move Z_T most.

    B(T) is the combination g = (∫eₖ)ₖ of the coefficients; of its m components the row space of
    ∂Φ/∂B(T) at the middle path is taken. Any choice is valid, so one serves for all x.
    """
    flow = latent.flow
    dtype = target.x.dtype
    weights = flow.driver.integrals(jnp.ones((), dtype))
    weights = weights / jnp.linalg.norm(weights)
    middle = jnp.zeros((1, latent.size), dtype)
    start = None if target.start is None else target.start[:1]
    jacobian = end_and_jacobian(constant(latent), middle, start)[1][0]
    blocks = jnp.reshape(jacobian[:, latent.start_size :], (flow.dimension, -1, flow.noise_dim))
    push = jnp.einsum("ikj,k->ij", blocks, weights)
    rows, _, reached = normal_space(push[None])
    rows = jnp.einsum("k,ij->ikj", weights, jnp.where(reached[0], rows[0], jnp.nan))
    rows = jnp.reshape(rows, (flow.dimension, -1))
    return jnp.pad(rows, ((0, 0), (latent.start_size, 0)))[None]
