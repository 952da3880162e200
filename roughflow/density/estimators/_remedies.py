"""Particles for points whose weights are poor: paths pulled back from x, or bent so that they end there."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ...flow import FEW_PATHS, UNFOUND, ExactDivergence, HutchinsonDivergence, StochasticFlow
from .._estimate import effective_paths
from ..proposals import SPARE, Mixture, normal_numbers
from ..surface import Latent, Target, Turned, constant, for_some
from ._chart import AbstractRemedy, Improved, Weights
from ._endpoint import log_joint_at_end, log_joint_near
from ._particles import Particles, temper
from ._pull_back import are_equal, log_joint, random_solves, solve_keys

EXACT = 64  # dimensions up to which a density is worth its exact divergence
PARTICLES = 256  # at least
RUNS = 4  # of particles, at most, where one leaves few effective paths
# Particles that are moved together. Those that are searched for wait for the last of them, which on a CPU
# costs more than small blocks do.
BLOCK, SEARCHED = 2**13, 2**8
# Factor by which a backward solve spreads, in the base's units: beyond, paths to x fill slabs so thin that
# particles do not find from one to the next.
STEEP = 20.0
UPHILL = 10.0  # and beyond this bent ones are better
# Bundles that the search for modes missed are left to the prior, and to components that are wider than those,
# by so much over √(number of coefficients).
WIDER, PRIOR_SHARE = 2.0, 0.5
MOST = 16  # dimensions up to which a search for an end is cheap enough
SAME = 0.01  # nats within which two roots are one
MISSED = 0.02  # of p(x): what other roots may hold before they count
AFAR = 2.0  # standard deviations from which they are searched for
LOOK, TRIAL = 2**32 - 1, 2**32 - 2  # what keys are folded with, for that and for a trial


class PulledParticles(AbstractRemedy):
    """To each path belongs one start, so nothing is searched for. Where backward solves spread, particles
    miss paths: that is told."""

    def together(self) -> int:
        return BLOCK

    def at(self, distribution: Mixture) -> Array:
        return distribution.poor

    def improve(
        self, flow: StochasticFlow, target: Target, distribution: Mixture, keys: PRNGKeyArray, count: int
    ) -> Improved:
        flow = exact(flow)
        particles = _moved(self, (flow, target, distribution), distribution, keys, count)
        solves = solve_keys(flow, keys, count)
        return Improved(_weights(self, (flow, target, distribution), particles, solves), _steep(distribution))

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del distribution
        return log_joint(exact(flow), target.x, paths, keys)


class BentParticles(AbstractRemedy):
    """Where backward solves spread, forward ones contract: there particles are bent to end at x.

    In the coordinates (r, u) of ξ, r from the endpoint B(T) of the noise (`Turned`), a particle is u, and r
    the root of Φ(r, u) = x. The log-density of u and x is log φ(r, u) − log |det ∂Φ/∂r|. In one dimension,
    with noise of one sign, there is one root, and a bracket finds it. Else a search may find none, or there
    are several: where many are not found, or a search from elsewhere finds others that matter, that is told.
    """

    def together(self) -> int:
        return SEARCHED if jax.default_backend() == "cpu" else BLOCK

    @staticmethod
    def suits(flow: StochasticFlow) -> bool:
        """Whether there are as many noises as dimensions, and few enough for a search."""
        return flow.noise_dimension == flow.dimension <= MOST and not random_solves(exact(flow))

    def at(self, distribution: Mixture) -> Array:
        return distribution.poor & uphill(distribution)

    def improve(
        self, flow: StochasticFlow, target: Target, distribution: Mixture, keys: PRNGKeyArray, count: int
    ) -> Improved:
        given = (flow, target, distribution)
        mixture, unfound = self._tried(constant(given), keys, count)
        # Where searches fail the particles are in doubt: worth the time only if those pulled back are, too.
        gives_up = unfound & ~_steep(distribution)
        mixture = eqx.tree_at(lambda d: d.poor, mixture, mixture.poor & ~gives_up)
        particles = _moved(self, given, mixture, keys, count)
        doubt = unfound | _others_matter(constant(given), particles, keys)
        weights = _weights(self, given, particles, None)
        log_weights = jnp.where(gives_up[:, None], jnp.nan, weights.log_weights)
        return Improved(weights._replace(log_weights=log_weights), doubt)

    def _tried(
        self, given: tuple[StochasticFlow, Target, Mixture], keys: PRNGKeyArray, count: int
    ) -> tuple[Mixture, Array]:
        """What the particles start from, and where a search fails too often. Wide, with a large share of the
        prior, unless a few weights of the tangent Gaussians are all equal, as on a linear SDE."""
        flow, target, distribution = given
        latent, dtype = Latent(flow), target.x.dtype
        narrow = distribution.seen_along(Turned(latent, dtype).turn)
        narrow = eqx.tree_at(lambda d: d.poor, narrow, self.at(distribution))
        share = jnp.maximum(narrow.prior, PRIOR_SHARE)
        scale = (1 + WIDER / latent.path_size**0.5) * narrow.scale
        wide = eqx.tree_at(lambda d: (d.scale, d.prior), narrow, (scale, share))
        omega = wide.sample(_noise(keys, TRIAL, count, latent.size + SPARE, dtype))
        joint = self.log_joint(flow.without_errors(), target, distribution, omega, None)
        even = are_equal(joint, narrow.log_components(omega)) & ~narrow.missed
        choose = lambda a, b: jnp.where(jnp.expand_dims(even, range(1, a.ndim)), a, b)
        # In one dimension a bracket without a root says that there is none.
        lost = jnp.mean(jnp.isneginf(joint), axis=1) > UNFOUND
        return jax.tree.map(choose, narrow, wide), lost & (flow.dimension > 1)

    def log_joint(
        self,
        flow: StochasticFlow,
        target: Target,
        distribution: Mixture,
        paths: Array,
        keys: PRNGKeyArray | None,
    ) -> Array:
        del keys
        latent = Latent(flow)
        directions, delta = _free(latent, paths)
        middle, on_line = constant(distribution).middle, flow.dimension == 1
        return log_joint_at_end(latent, target, directions, delta, middle, on_line)


def _free(latent: Latent, u: Array) -> tuple[Array, Array]:
    """The directions `(B, d, D)` that r moves ξ in, and the rest of ξ, `(B, K, D)`, for u `(B, K, W)`."""
    turned, d = Turned(latent, u.dtype), latent.flow.dimension
    directions = jnp.broadcast_to(turned.directions, (len(u), d, latent.size))
    return directions, turned.back(jnp.concatenate([jnp.zeros((*u.shape[:2], d), u.dtype), u], axis=-1))


def _others_matter(
    given: tuple[StochasticFlow, Target, Mixture], particles: Particles, keys: PRNGKeyArray
) -> Array:
    """Where p(x) may be larger than particles say, `(B,)`: a search from afar leads to other roots."""
    flow, target, _ = given
    latent, count = Latent(flow).quiet(), particles.joint.shape[1]
    directions, delta = _free(latent, particles.omega)
    afar = AFAR * _noise(keys, LOOK, count, flow.dimension, target.x.dtype)
    other = log_joint_near(latent, target, directions, delta, afar)
    # Where the value is the same, so is the root.
    ratio = jnp.where(jnp.abs(other - particles.joint) > SAME, other - particles.joint, -jnp.inf)
    ratio = jnp.exp(jnp.minimum(ratio, 10))
    return jnp.mean(jnp.where(jnp.isfinite(particles.joint), ratio, 0), axis=1) > MISSED


def _noise(keys: PRNGKeyArray, fold: int, count: int, size: int, dtype) -> Array:
    draw = lambda key: normal_numbers(jax.random.fold_in(key, fold), jnp.arange(count), size, dtype)
    return jax.vmap(draw)(keys)


def exact(flow: StochasticFlow) -> StochasticFlow:
    """With the exact divergence where a density is worth it: probes are for training."""
    if isinstance(flow.divergence, HutchinsonDivergence) and flow.dimension <= EXACT:
        return eqx.tree_at(lambda f: f.divergence, flow, ExactDivergence())
    return flow


def uphill(distribution: Mixture) -> Array:
    """Where bent paths are better than those pulled back."""
    return distribution.missed | ((distribution.steepness > UPHILL) & (distribution.prior > 0))


def _steep(distribution: Mixture) -> Array:
    return distribution.poor & (distribution.steepness > STEEP)


def _weights(remedy: AbstractRemedy, given, particles: Particles, solves: PRNGKeyArray | None) -> Weights:
    joint = _known(given[:2], remedy, given[2], particles.omega, solves, particles.joint)
    return Weights(particles.weights(joint), particles.omega, joint, solves)


@eqx.filter_custom_jvp
def _known(
    given: tuple[StochasticFlow, Target],
    remedy: AbstractRemedy,
    distribution: Mixture,
    omega: Array,
    keys: PRNGKeyArray | None,
    value: Array,
) -> Array:
    """log p(x, ω), whose value is known already: a solve is needed only for its derivative."""
    del given, remedy, distribution, omega, keys
    return value


@_known.def_jvp
def _known_jvp(primals, tangents):
    (given, remedy, distribution, omega, keys, value), (moved, *_) = primals, tangents
    joint = lambda given: remedy.log_joint(*given, distribution, omega, keys)
    return value, eqx.filter_jvp(joint, (given,), (moved,))[1]


def _moved(
    remedy: PulledParticles | BentParticles,
    given: tuple[StochasticFlow, Target, Mixture],
    mixture: Mixture,
    keys: PRNGKeyArray,
    count: int,
) -> Particles:
    """Particles from `mixture`, for the points that it calls poor; for the others nothing. Where a run leaves
    few effective paths it is averaged with others."""
    flow, target, distribution = constant(given)
    quiet, total = flow.without_errors(), count * -(-PARTICLES // count)

    def move(some: tuple) -> Particles:
        target, distribution, mixture, keys, run = some
        size = mixture.normal.shape[-1] + SPARE
        noise = jax.vmap(lambda key: normal_numbers(key, jnp.arange(total), size, target.x.dtype))(run)
        solves = solve_keys(quiet, keys, total)

        def joint(at: Array) -> Array:
            value = remedy.log_joint(quiet, target, distribution, at, solves)
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        return temper(joint, mixture, mixture.sample(noise), run, count)

    def another(i: Array, now: Particles) -> Particles:
        few = effective_paths(now.log_weights.T) < min(2 * FEW_PATHS, 0.99 * count)
        chosen = mixture.poor & (few | (i == 0))
        run = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
        batch = (target, distribution, constant(mixture), keys, run)
        new = now.pooled(for_some(chosen, move, batch, now, max(1, remedy.together() // total)), i)
        pick = lambda a, b: jnp.where(jnp.expand_dims(chosen, range(1, a.ndim)), a, b)
        return jax.tree.map(pick, new, now)

    size, dtype = len(target.x), target.x.dtype
    blank = Particles(
        jnp.zeros((size, count, mixture.centre.shape[-1]), dtype), *(jnp.zeros((size, count), dtype),) * 2
    )
    return constant(jax.lax.fori_loop(0, RUNS, another, blank))
