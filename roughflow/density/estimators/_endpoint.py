"""p(x) as an integral over the ways to reach x, with forward solves only: for fixed starts."""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from ..._checks import check_count, finite_array, is_traced, shown
from ..._linear import log_abs_det
from ...flow import StochasticFlow
from ..proposals import SPARE, AbstractProposal, Laplace, Prior, normal_numbers, uniform_of
from ..surface import (
    Cloud,
    Latent,
    Target,
    constant,
    end_and_jacobian,
    find_modes,
    normal_space,
    solve_end,
    solve_near,
)
from ._chart import Weights
from ._importance import AbstractImportanceEstimator

TRIAL = 16  # paths looked at before the distribution is fixed
UNEVEN = 1.0  # nats by which their weights may differ, or a wider distribution is drawn from
WIDER, PRIOR_SHARE = 1.3, 0.25  # how much wider, and the prior's part in it
SINGULAR = (
    "the noise does not move the end in every direction, so Endpoint cannot solve for it; use rf.PullBack, "
    "with a distribution for the start"
)


class EndpointDistribution(eqx.Module):
    """δ normal around the free part of `centre`, orthogonal to `directions`, and a share of the prior."""

    centre: Array  # (B, D)
    directions: Array  # R, (B, d, D)
    singular: Array  # (B,): where the noise does not move the end in every direction
    missed: Array  # (B,)
    scale: Array  # (B,)
    prior: Array  # (B,)

    def sample(self, noise: Array) -> Array:
        """δ `(B, K, D)`."""
        noise, spare = noise[..., :-SPARE], noise[..., -SPARE:]
        around = self.centre[:, None] + self.scale[:, None, None] * noise
        from_prior = uniform_of(spare) < self.prior[:, None, None]
        return self.free(jnp.where(from_prior, noise, around))

    def log_prob(self, delta: Array) -> Array:
        """Its log-density on the complement of the directions, `(B, K)`."""
        size = self.directions.shape[2] - self.directions.shape[1]
        log_normal = lambda y: -0.5 * jnp.sum(y**2, axis=-1) - 0.5 * size * math.log(2 * math.pi)
        offset = delta - self.free(self.centre[:, None])
        scale, share = self.scale[:, None], self.prior[:, None]
        around = log_normal(offset / scale[..., None]) - size * jnp.log(scale)
        return jnp.logaddexp(jnp.log1p(-share) + around, jnp.log(share) + log_normal(delta))

    def defended(self, where: Array) -> "EndpointDistribution":
        """Wider, and with a share of the prior, at the points `where`."""
        wider = jnp.where(where, WIDER, self.scale), jnp.where(where, PRIOR_SHARE, self.prior)
        return eqx.tree_at(lambda d: (d.scale, d.prior), self, wider)

    def free(self, xi: Array) -> Array:
        """The part of ξ `(B, K, D)` that is orthogonal to the directions."""
        along = jnp.einsum("bij,bkj->bki", self.directions, xi)
        return xi - jnp.einsum("bij,bki->bkj", self.directions, along)


class Endpoint(AbstractImportanceEstimator):
    """Paths drawn around the likeliest one, each bent so that it ends at x: for transition densities.

    Write Z_T = Φ(ξ) with ξ standard normal in R^D: all path coefficients, and the whitened start unless it is
    fixed. Split R^D along d orthonormal directions R. Draw the part δ of ξ orthogonal to them from the
    proposal q, and solve for the r in Rᵈ that brings the end to x:

        Φ(δ + Rᵀ r) = x,      p(x) = E [ φ(ξ) / (|det DΦ(ξ) Rᵀ| q(δ)) ],   ξ = δ + Rᵀ r.

    With `rf.Laplace()`, the default, R spans the rows of DΦ at the likeliest path: on a linear SDE all
    weights are equal, and any number of noises will do. With `rf.Prior()` R is the endpoint B(T) of the path,
    in the directions that move the end most, which takes as many noises as dimensions.

    From a fixed start it is the estimator to use, for there the pull-back does not exist. With a distribution
    for the start prefer the default, `rf.Tempered`: here one root is counted for each δ, so an SDE that folds
    space so that there are several is estimated low, and a path that the search does not find has no weight:
    `Estimate.unfound` counts them, and more than one in twenty are a warning. It costs d + 1 solves per
    Newton step; no backward solve can escape, which is why strongly contracting SDEs are its ground too.

    **Arguments:**

    - `num_paths`: how many paths per point.
    - `proposal`: `rf.Laplace()` or `rf.Prior()`.
    - `start`: a point z₀ of shape `(d,)`, or one for each x, `(..., d)`. The distribution of the flow's base
      is then not used: what is estimated is the transition density from z₀.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.Endpoint(start=jnp.ones(1)))
    estimate.log_prob, estimate.standard_error
    ```
    """

    num_paths: int = eqx.field(static=True)
    proposal: AbstractProposal
    start: Array | None
    searches: ClassVar[bool] = True
    shows_failures: ClassVar[bool] = False

    def __init__(
        self,
        num_paths: int = 64,
        proposal: AbstractProposal | None = None,
        start: ArrayLike | None = None,
    ):
        self.num_paths = check_count("num_paths", num_paths)
        self.proposal = Laplace() if proposal is None else proposal
        self.start = None if start is None else finite_array("start", start)
        if not isinstance(self.proposal, Laplace | Prior):
            told = f"proposal must be rf.Laplace() or rf.Prior() for Endpoint, got {shown(self.proposal)}"
            raise ValueError(f"{told}; rf.PullBack takes any")

    def start_points(self, x: Array) -> Array | None:
        if self.start is None:
            return None
        shape = self.start.shape
        if not shape or shape[-1] != x.shape[-1]:
            raise ValueError(f"start must have shape (..., {x.shape[-1]}) to match the flow, got {shape}")
        return jnp.broadcast_to(self.start.astype(x.dtype), x.shape)

    def check(self, flow: StochasticFlow) -> None:
        d, m = flow.dimension, flow.noise_dimension
        if m < d and isinstance(self.proposal, Prior):
            raise ValueError(
                f"Endpoint with Prior needs at least as many noises as dimensions, got a {d} x {m} "
                "diffusion; use rf.PullBack, or Endpoint with rf.Laplace"
            )

    def prepare(
        self, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None
    ) -> EndpointDistribution:
        latent, target = constant((_latent(flow, target), target))
        if not isinstance(self.proposal, Laplace):
            return constant(_prior_distribution(latent, target))
        return constant(_laplace_distribution(latent, target, keys, cloud, self.proposal.num_starts))

    @property
    def num_tried(self) -> int:
        return TRIAL if isinstance(self.proposal, Laplace) else 0

    def decide(
        self, flow: StochasticFlow, distribution: EndpointDistribution, trial: Weights
    ) -> EndpointDistribution:
        del flow
        weights = trial.log_weights
        uneven = ~(jnp.max(weights, axis=1) - jnp.min(weights, axis=1) < UNEVEN)
        return distribution.defended(uneven & ~distribution.missed)

    def settled(self, distribution: EndpointDistribution) -> EndpointDistribution:
        """Refuse noise that does not move the end in every direction, whatever x is."""
        degenerate = jnp.all(distribution.singular)
        if is_traced(degenerate):
            checked = eqx.error_if(distribution.directions, degenerate, SINGULAR)
            return eqx.tree_at(lambda d: d.directions, distribution, checked)
        if bool(degenerate):
            raise ValueError(SINGULAR)
        return distribution

    def weigh(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: EndpointDistribution,
        noise: Array,
        keys: PRNGKeyArray,
    ) -> Weights:
        del keys
        delta = distribution.sample(noise)
        joint = self.log_joint(flow, target, distribution, delta, None)
        return Weights(joint - distribution.log_prob(delta), delta, joint, None)

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: EndpointDistribution,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del keys
        latent, centre = _latent(flow, target), distribution.centre
        return log_joint_at_end(latent, target, distribution.directions, paths, centre)


def log_joint_at_end(
    latent: Latent, target: Target, directions: Array, delta: Array, centre: Array, on_line: bool = False
) -> Array:
    """log φ(ξ) − log |det DΦ(ξ) Rᵀ| `(B, K)`, ξ = δ + Rᵀr the path of δ `(B, K, D)` that ends at x; −inf
    where none was found. The search starts from `centre` `(B, D)`."""
    count = delta.shape[1]
    target, directions, centre = jax.tree.map(
        lambda a: jnp.repeat(a, count, axis=0), (target, directions, centre)
    )
    flat = jnp.reshape(delta, (-1, delta.shape[2]))
    return _log_joint(latent, *solve_end(latent, target, directions, flat, centre, on_line), delta.shape[:2])


def log_joint_near(latent: Latent, target: Target, directions: Array, delta: Array, r: Array) -> Array:
    """The same for the root that is found from r `(B, K, d)`, if one is."""
    count = delta.shape[1]
    target, directions = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), (target, directions))
    flat = lambda a: jnp.reshape(a, (-1, a.shape[2]))
    near = solve_near(latent, target, directions, flat(delta), flat(r))
    return _log_joint(latent, *near, delta.shape[:2])


def _log_joint(latent: Latent, xi: Array, matrix: Array, solved: Array, shape: tuple[int, ...]) -> Array:
    value = latent.log_prior(xi) - log_abs_det(matrix)
    return jnp.reshape(jnp.where(solved & jnp.isfinite(value), value, -jnp.inf), shape)


def _latent(flow: StochasticFlow, target: Target) -> Latent:
    return Latent(flow, fixed_start=target.start is not None)


def _laplace_distribution(
    latent: Latent, target: Target, keys: PRNGKeyArray, cloud: Cloud | None, starts: int
) -> EndpointDistribution:
    """Around the likeliest way found, along the surface's normal space there."""
    batch = len(target.x)
    middle = jnp.zeros((batch, 1, latent.size), target.x.dtype)
    if cloud is None:
        places = TRIAL + jnp.arange(starts - 1)
        draw = lambda key: normal_numbers(key, places, latent.size, target.x.dtype)
        begin = jax.vmap(draw)(keys)
    else:
        begin = cloud.nearest(target.x, starts - 1)
    modes = find_modes(latent.quiet(), target, jnp.concatenate([middle, begin], axis=1)).best(1)
    found = modes.found
    usable = modes.reached[:, 0] & jnp.all(jnp.isfinite(modes.directions[:, 0]), axis=(1, 2))
    frame = jnp.eye(latent.flow.dimension, latent.size, dtype=middle.dtype)[None]
    directions = jnp.where(usable[:, None, None], modes.directions[:, 0], frame)
    centre = jnp.where(found[:, None], modes.xi[:, 0], 0)
    share = jnp.where(found, 0.0, 1.0).astype(centre.dtype)
    return EndpointDistribution(centre, directions, ~usable, ~found, jnp.ones_like(share), share)


def _prior_distribution(latent: Latent, target: Target) -> EndpointDistribution:
    directions, reached = endpoint_directions(latent, target)
    batch = len(target.x)
    none, one = jnp.zeros(batch, bool), jnp.ones(batch, directions.dtype)
    return EndpointDistribution(
        jnp.zeros((batch, latent.size), directions.dtype),
        jnp.broadcast_to(directions, (batch, *directions.shape)),
        none | ~reached,
        none,
        one,
        0 * one,
    )


def endpoint_directions(latent: Latent, target: Target) -> tuple[Array, Array]:
    """Orthonormal directions `(d, D)`: those of the endpoint B(T) that move Z_T most; and whether it moves in
    all of them.

    B(T) is the combination g = (∫eₖ)ₖ of the coefficients; of its m components the row space of
    ∂Φ/∂B(T) at the middle path is taken. Any choice is valid, so one serves for all x.
    """
    flow = latent.flow
    dtype = target.x.dtype
    weights = flow.driver.integrals(jnp.ones((), dtype))
    weights = weights / jnp.linalg.norm(weights)
    middle = jnp.zeros((1, latent.size), dtype)
    start = None if target.start is None else target.start[:1]
    jacobian = end_and_jacobian(latent, middle, start)[1][0]
    blocks = jnp.reshape(jacobian[:, latent.start_size :], (flow.dimension, -1, flow.noise_dimension))
    push = jnp.einsum("ikj,k->ij", blocks, weights)
    directions, _, reached = normal_space(push[None])
    directions = jnp.where(reached[0], directions[0], jnp.eye(*push.shape, dtype=dtype))
    directions = jnp.reshape(jnp.einsum("k,ij->ikj", weights, directions), (flow.dimension, -1))
    return jnp.pad(directions, ((0, 0), (latent.start_size, 0))), reached[0]
