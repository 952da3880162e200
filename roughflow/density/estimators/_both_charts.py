"""Two charts of the ways to reach x at once: what one cannot see the other does."""

import math
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._linear import log_abs_det
from ...flow import Normal, StochasticFlow, Whitened
from ..proposals import SPARE, AbstractProposal, Laplace, Mixture, normal_numbers
from ..surface import Cloud, Latent, Target, constant, end_along, find_end
from ._chart import Weights
from ._endpoint import EndpointDistribution
from ._importance import AbstractImportanceEstimator
from ._pull_back import log_joint, tried

SEARCHED = 3  # paths of a group that a search bends to x; one more is drawn and pulled back
MOST = 16  # dimensions up to which a search for an end is cheap enough
WIDER = 0.4  # by how much the variance is larger, over √(number of coefficients)
SAME = 0.1  # standard deviations within which two roots are one: two solvers found them


class BothCharts(AbstractImportanceEstimator):
    """Paths that a search bends to x, and others pulled back from it, weighed as draws from one distribution.

    `rf.Endpoint` and `rf.PullBack` parametrise the same surface Φ(ξ) = x, ξ = (whitened start, path). A draw
    δ from q_δ and the search for its end give one ξ, with the density q_δ |det DΦ Rᵀ| on the surface where
    the search leads to ξ and not to another root; a draw ω from q_ω gives one with q_ω |det ∂Φ/∂start|.
    Of the draws the share a is of the first kind, and each has the weight of the balance heuristic (Veach &
    Guibas 1995),

        φ(ξ) / (a q_δ(δ) |det DΦ Rᵀ| 1{the search from δ leads to ξ} + (1 − a) q_ω(ω) |det ∂Φ/∂start|),

    whose mean is p(x). Where backward solves escape, the first kind is better by far; roots that its search
    leaves out are left to the second, so that nothing is missed. A weight here is the mean of those of three
    paths of the first kind and one of the second. It is for tolerances, which are met outside a `jit`: its
    weights have no derivatives.
    """

    num_paths: int = eqx.field(static=True, default=64)
    proposal: AbstractProposal = Laplace()
    searches: ClassVar[bool] = False
    shows_failures: ClassVar[bool] = False

    @staticmethod
    def suits(flow: StochasticFlow) -> bool:
        """Whether there is noise, a start can be whitened by its mean and spread, and a search is cheap."""
        plain = isinstance(flow.base, Normal) or not isinstance(flow.base, Whitened)
        return plain and flow.noise_dimension > 0 and flow.dimension <= MOST

    def check(self, flow: StochasticFlow) -> None:
        assert self.suits(flow)

    def start_points(self, x: Array) -> None:
        del x

    def prepare(
        self, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None
    ) -> Mixture:
        distribution = self.proposal.distribution(Latent(flow), target.x, keys, cloud)
        return tried(flow, target.x, distribution, keys)

    @property
    def num_tried(self) -> int:
        return 0  # `prepare` does it, with paths that are pulled back

    def decide(self, flow: StochasticFlow, distribution: Mixture, trial: Weights) -> Mixture:
        del flow, trial
        return distribution

    def settled(self, distribution: Mixture) -> Mixture:
        return distribution

    def weigh(
        self, flow: StochasticFlow, target: Target, distribution: Mixture, noise: Array, keys: PRNGKeyArray
    ) -> Weights:
        del noise  # for one path, where a group of them is drawn
        latent, target, mixture = constant((Latent(flow), target, distribution))
        size = latent.size + SPARE
        draw = lambda key: normal_numbers(key, jnp.arange(1 + SEARCHED), size, target.x.dtype)
        log_weights, omega, joint = _weigh(latent, target, mixture, jax.vmap(jax.vmap(draw))(keys))
        # The path that stands for a group is the one with the most weight.
        best = jnp.argmax(log_weights, axis=2)[..., None]
        take = lambda a: jnp.take_along_axis(a, jnp.expand_dims(best, range(3, a.ndim)), axis=2)[:, :, 0]
        mean = jax.nn.logsumexp(log_weights, axis=2) - math.log(1 + SEARCHED)
        return Weights(mean, take(omega), take(joint), None)

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del distribution
        return log_joint(flow, target.x, paths, keys)


class _Group(NamedTuple):
    """Paths on the surface: their ξ, which of them there are, and which are the ones that the search leads
    to; log φ(ξ), and the log-volumes of the two charts there. `(B, K, G, ...)` all."""

    xi: Array
    there: Array
    found: Array
    log_prior: Array
    by_search: Array
    by_path: Array


def _weigh(latent: Latent, target: Target, mixture: Mixture, noise: Array) -> tuple[Array, Array, Array]:
    """Log-weights `(B, K, G)` of groups of paths, the paths' ω, and log p(x, ω); the first of a group is
    drawn and pulled back, the others are searched for."""
    batch, count, each, _ = noise.shape
    best = jnp.argmax(mixture.log_share, axis=1)[:, None]
    middle = jnp.take_along_axis(mixture.centre, best[..., None], axis=1)
    directions = jnp.take_along_axis(mixture.normal, best[..., None, None], axis=1)[:, 0]
    # The path in the middle is pulled back as well: those searched for are around it.
    omega = jnp.concatenate([middle, mixture.sample(noise[:, :, 0])], axis=1)
    pulled, lost = latent.pull_back(target.x, omega)
    middle, pulled, lost = pulled[:, 0], pulled[:, 1:], lost[:, 1:]
    pulled = jnp.where(lost[..., None], middle[:, None], pulled)
    scale = jnp.full(batch, (1 + WIDER / latent.path_size**0.5) ** 0.5, middle.dtype)
    none = jnp.zeros(batch, bool)
    around = EndpointDistribution(middle, directions, none, none, scale, 0 * scale)

    split = lambda a: jnp.reshape(a, (batch, count, -1, *a.shape[2:]))
    flat = lambda a: jnp.reshape(a, (batch, -1, *a.shape[3:]))
    drawn = split(around.sample(flat(noise[:, :, 1:])))
    group = _on_surface(latent, target, around, pulled, lost, drawn)
    omega = group.xi[..., latent.start_size :]
    log_free = split(around.log_prob(around.free(flat(group.xi))))
    log_path = split(mixture.log_prob(flat(omega)))
    searched = jnp.where(group.found, log_free + group.by_search + math.log(SEARCHED / each), -jnp.inf)
    density = jnp.logaddexp(searched, log_path + group.by_path - math.log(each))
    log_weights, joint = group.log_prior - density, group.log_prior - group.by_path
    return jnp.where(group.there, log_weights, -jnp.inf), omega, jnp.where(group.there, joint, -jnp.inf)


def _on_surface(
    latent: Latent, target: Target, around: EndpointDistribution, pulled: Array, lost: Array, delta: Array
) -> _Group:
    """The paths that were pulled back, ξ `(B, K, D)`, and those that the search finds from δ
    `(B, K, G − 1, D)`."""
    batch, count, size = pulled.shape
    d = latent.start_size
    flat = lambda a: jnp.reshape(a, (batch * count, *a.shape[2:]))
    target, directions, middle = jax.tree.map(
        lambda a: jnp.repeat(a, count, axis=0), (target, around.directions, around.centre)
    )
    start = jnp.broadcast_to(jnp.eye(d, size, dtype=pulled.dtype)[None], directions.shape)
    both = jnp.concatenate([directions, start], axis=1)

    def look(given: tuple[Array, Array]) -> _Group:
        """One path of each group: no more are solved together than there are groups."""
        delta, is_pulled = flat(given[0]), given[1]
        r, found = find_end(latent, target, directions, delta, middle)
        xi = jnp.where(is_pulled, flat(pulled), delta + jnp.einsum("bij,bi->bj", directions, r))
        there = jnp.where(is_pulled, ~flat(lost), found)
        xi = jnp.where(there[:, None], xi, middle)
        gap = jnp.linalg.norm(r - jnp.einsum("bij,bj->bi", directions, xi), axis=-1)
        columns = end_along(latent, target, both, xi)
        volumes = log_abs_det(columns[..., :d]), log_abs_det(columns[..., d:])
        done = _Group(xi, there, found & (gap < SAME), latent.log_prior(xi), *volumes)
        return jax.tree.map(lambda a: jnp.reshape(a, (batch, count, *a.shape[1:])), done)

    deltas = jnp.concatenate([around.free(pulled)[None], jnp.moveaxis(delta, 2, 0)])
    done = jax.lax.map(look, (deltas, jnp.arange(len(deltas)) == 0))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 2), done)
