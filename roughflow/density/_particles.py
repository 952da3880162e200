"""Particles moved from a proposal to p(path | x) (Del Moral, Doucet & Jasra 2006)."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..flow import AbstractStochasticFlow
from ._draws import normal_numbers, normal_quantile, random_bits, uniform_numbers
from ._estimate import FEW_PATHS, effective_paths, weights_error
from ._modes import constant
from ._paths import log_joint, solve_keys, update_where
from ._proposals import Mixture

PARTICLES = 256  # that are moved for a point
RETURNED_PARTICLES = 64  # and the number of groups whose weights are returned
MAX_RUNS = 4  # a run is repeated if it leaves few effective paths
PARTICLES_PER_BLOCK = 2**13
# Particles of one run share what their moves did not reach: between runs, estimates spread so much more than
# the weights of one run say (measured on SDEs whose paths to x lie on curved surfaces).
ERROR_INFLATION = 1.5
# Factor by which a backward solve spreads, in the base's units: beyond, paths to x fill slabs so thin that
# particles do not find from one to the next.
MAX_EXPANSION = 20.0
RUN_KEY = 2**31 + 2  # folded into the keys of runs
MAX_TEMPERATURES = 12
EFFECTIVE_FRACTION = 0.5  # of particles after a step of β
# At each β: a move along a component of the proposal and one along differences of particles.
MOVE_ROUNDS = 3
HALVINGS = 24  # to find β
TARGET_ACCEPTANCE = 0.25


class Particles(eqx.Module):
    """K paths of each of B points, equally likely under the distribution of the path given x, log p(x, ω)
    there, and K independent log-weights whose mean estimates p(x)."""

    omega: Array  # (B, K, W)
    joint: Array  # (B, K)
    log_weights: Array  # (B, K)

    def pooled(self, new: "Particles", runs: Array) -> "Particles":
        """These, of `runs` runs, with those of another: weights are averaged, and paths taken from either as
        often as its part of p(x) says."""
        count = self.log_weights.shape[1]
        before = jnp.log(runs.astype(self.joint.dtype)) + self.log_weights
        total = jnp.logaddexp(before, new.log_weights)
        log_part = jax.nn.logsumexp(new.log_weights, axis=1) - jax.nn.logsumexp(total, axis=1)
        part = jnp.where(jnp.isnan(log_part), 1, jnp.exp(log_part))[:, None]
        place = jnp.arange(count, dtype=part.dtype)[None]
        newer = jnp.floor((place + 1) * part) > jnp.floor(place * part)
        return Particles(
            jnp.where(newer[..., None], new.omega, self.omega),
            jnp.where(newer, new.joint, self.joint),
            total - jnp.log(runs + 1.0).astype(total.dtype),
        )


def moved(
    flow: AbstractStochasticFlow, x: Array, mixture: Mixture, keys: PRNGKeyArray, where: Array
) -> Particles:
    """Particles of the points `where`, one key each, moved from `mixture`; zeros for the others. Where a run
    leaves few effective paths it is averaged with others."""
    flow, x, mixture = constant((flow.without_errors(), x, mixture))
    places = jnp.broadcast_to(jnp.arange(PARTICLES), (len(x), PARTICLES))

    def move(given) -> Particles:
        x, mixture, keys, run, places = given
        draw = lambda key: normal_numbers(key, jnp.arange(PARTICLES), mixture.num_normals, x.dtype)
        solves = solve_keys(flow, keys, places)

        def joint(at: Array) -> Array:
            value = log_joint(flow, x, at, solves)
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        return temper(joint, mixture, mixture.sample(jax.vmap(draw)(run)), run, RETURNED_PARTICLES)

    def another(i: Array, now: Particles) -> Particles:
        few = effective_paths(jnp.exp(now.log_weights - _top(now.log_weights)).T) < 2 * FEW_PATHS
        chosen = where & (few | (i == 0))
        run = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, RUN_KEY), i))(keys)
        batch = (x, mixture, keys, run, places)
        new = now.pooled(update_where(chosen, move, batch, now, max(1, PARTICLES_PER_BLOCK // PARTICLES)), i)
        pick = lambda a, b: jnp.where(jnp.expand_dims(chosen, range(1, a.ndim)), a, b)
        return jax.tree.map(pick, new, now)

    zeros = jnp.zeros((len(x), RETURNED_PARTICLES), x.dtype)
    blank = Particles(jnp.zeros((*zeros.shape, mixture.centre.shape[-1]), x.dtype), zeros, zeros)
    return constant(jax.lax.fori_loop(0, MAX_RUNS, another, blank))


def _top(log_weights: Array) -> Array:
    top = jnp.max(log_weights, axis=1, keepdims=True)
    return jnp.where(jnp.isfinite(top), top, 0)


def particle_parts(log_weights: np.ndarray) -> dict[str, np.ndarray]:
    """Parts of an `Estimate` from the log-weights of particles `(B, K)`.

    Shares of the descendants of K particles are no larger than K times their mean: they have no tail.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = np.max(log_weights, axis=1)
        shift = np.where(np.isfinite(top), top, 0)
        weights = np.exp(log_weights - shift[:, None]).T
        some = np.any(weights > 0, axis=0)
        mean = np.where(some, np.mean(weights, axis=0), 1)
        relative = weights / mean[None]
        error = ERROR_INFLATION * weights_error(relative, np)
        value = np.log(mean) + shift + 0.5 * np.minimum(error**2, 1)
        return {
            "log_prob": np.where(some, value, -np.inf),
            "standard_error": np.where(some, error, np.inf),
            "effective_paths": effective_paths(relative, np),
            "num_paths": np.full(mean.shape, PARTICLES),
            "escaped": np.zeros(mean.shape, int),
            "pareto_k": np.full(mean.shape, np.nan),
        }


class _State(eqx.Module):
    omega: Array
    joint: Array  # log p(x, ω), (B, K)
    proposed: Array  # log q(ω), (B, K)
    root: Array
    share: Array
    beta: Array  # (B,)
    log_mean: Array  # (B,)
    lengths: Array  # of the two kinds of moves, (2, B)
    count: Array


def temper(
    joint: Callable[[Array], Array], mixture: Mixture, omega: Array, keys: PRNGKeyArray, count: int
) -> Particles:
    """Move ω `(B, P, W)`, drawn from `mixture`, to the distribution with the unnormalised log-density
    `joint`; P is a multiple of `count`, the number K of particles to return."""
    batch, size = omega.shape[:2]
    one = jnp.ones(batch, omega.dtype)
    lengths = jnp.stack([0.5 * one, 2.4 / max(omega.shape[2], 1) ** 0.5 * one])
    root = jnp.broadcast_to(jnp.arange(size), (batch, size))
    share = jnp.full((batch, size), 1 / size, omega.dtype)
    unknown = jnp.full_like(share, -jnp.inf)
    start = _State(omega, unknown, unknown, root, share, 0 * one, 0 * one, lengths, jnp.asarray(0))
    folded = lambda number: jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)

    def step(now: _State) -> _State:
        key = folded(now.count)
        now = _moves(joint, mixture, now, key)
        ratio = jnp.where(jnp.isneginf(now.joint), -jnp.inf, now.joint - now.proposed)
        last = now.count == MAX_TEMPERATURES - 1
        beta = jnp.where(last, 1, _next_beta(ratio, now.beta)).astype(omega.dtype)
        log_weights = _times(beta - now.beta, ratio)
        log_mean = now.log_mean + _log_mean(log_weights)
        share = _share(log_weights)
        # A point that has arrived keeps its particles as they are, with their weights; one that has lost all
        # of them is there too.
        dead = ~jnp.isfinite(log_mean)
        arrived = (beta >= 1) | dead
        stay = eqx.tree_at(
            lambda s: (s.share, s.beta, s.log_mean), now, (share, jnp.where(arrived, 1, beta), log_mean)
        )
        places = _resample(share, key, size)
        moved = [_take(a, places) for a in (now.omega, now.joint, now.proposed, now.root)]
        leaves = lambda s: (s.omega, s.joint, s.proposed, s.root, s.share, s.beta, s.log_mean)
        spread = eqx.tree_at(leaves, now, (*moved, jnp.full_like(share, 1 / size), beta, log_mean))
        new = _where(now.beta >= 1, now, _where(arrived, stay, spread))
        return eqx.tree_at(lambda s: s.count, new, now.count + 1)

    going = lambda now: jnp.any(now.beta < 1) & (now.count < MAX_TEMPERATURES)
    end = jax.lax.while_loop(going, step, start)
    some = _resample(end.share, folded(MAX_TEMPERATURES), count)
    return Particles(_take(end.omega, some), _take(end.joint, some), _by_root(end, count))


def _by_root(end: _State, count: int) -> Array:
    """Log-weights `(B, K)` of the first particles, in K groups: each has its descendants' shares of K p(x).

    What descends from different first particles is all but independent, so that the spread of these weights
    is the error of their mean (Chan & Lai 2013; Lee & Whiteley 2018).
    """
    group = end.root // (end.root.shape[1] // count)
    share = jax.vmap(lambda share, at: jax.ops.segment_sum(share, at, count))(end.share, group)
    some = share > 0
    log_share = jnp.log(jnp.where(some, share, 1))
    return jnp.where(some, end.log_mean[:, None] + jnp.log(count) + log_share, -jnp.inf)


def _next_beta(ratio: Array, beta: Array) -> Array:
    """The largest β′ ≤ 1 at which `EFFECTIVE_FRACTION` of the particles stay effective, by bisection."""

    # Of those that have not escaped: a particle with no weight at all is lost at any β.
    alive = jnp.maximum(jnp.sum(jnp.isfinite(ratio), axis=1), 1)

    def effective(new: Array) -> Array:
        return 1 / (alive * jnp.sum(_share(_times(new - beta, ratio)) ** 2, axis=1))

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        good = effective(middle) >= EFFECTIVE_FRACTION
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    one = jnp.ones_like(beta)
    low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (beta, one))
    return jnp.where(effective(one) >= EFFECTIVE_FRACTION, 1, jnp.maximum(low, beta + 1e-6))


def _moves(joint, mixture: Mixture, now: _State, key: PRNGKeyArray) -> _State:
    """Metropolis–Hastings moves that keep q^(1−β) p(x, ω)^β, all particles of a point at once; those of a
    point that has arrived stay.

    The first time round they stay too, and log p(x, ω) is found where they are: one program does both.
    """
    first, still = now.count == 0, now.beta >= 1

    def energy(joint: Array, proposed: Array) -> Array:
        beta = now.beta[:, None]
        return _times(beta[:, 0], joint) + (1 - beta) * proposed

    count, width = now.joint.shape[1], mixture.num_normals

    def move(i: Array, state: _State) -> _State:
        # All of a move's random numbers at once: few things take longer to compile.
        draw = lambda k: random_bits(jax.random.fold_in(k, 1 + i), jnp.arange(count), width + 1)
        bits = jax.vmap(draw)(key)
        noise = normal_quantile(bits[..., :width], state.omega.dtype)
        uniform = uniform_numbers(bits[..., width], state.omega.dtype)
        kind = i % 2
        length = state.lengths[kind]
        along, ratio = mixture.autoregress(state.omega, noise, jnp.sqrt(1 - length**2)[:, None, None])
        across = _along_particles(state.omega, length, bits[:, :2, 0])
        omega = jnp.where(first, state.omega, jnp.where(kind == 0, along, across))
        value, proposed = joint(omega), mixture.log_prob(omega)
        change = energy(value, proposed) - energy(state.joint, state.proposed)
        change = change + jnp.where(kind == 0, ratio, 0)
        accept = ((jnp.log(uniform) < change) & ~still[:, None]) | first
        keep = lambda new, old: jnp.where(jnp.expand_dims(accept, range(2, new.ndim)), new, old)
        # Longer where too many moves are accepted, shorter where too few are.
        rate = jnp.mean(jnp.where(change > 0, 1, jnp.exp(jnp.minimum(change, 0))), axis=1)
        longer = jnp.clip(
            length * jnp.exp(1.5 * (rate - TARGET_ACCEPTANCE)), 1e-4, jnp.where(kind == 0, 0.999, 10.0)
        )
        length = jnp.where(first, length, longer)
        return eqx.tree_at(
            lambda s: (s.omega, s.joint, s.proposed, s.lengths),
            state,
            (
                keep(omega, state.omega),
                keep(value, state.joint),
                keep(proposed, state.proposed),
                state.lengths.at[kind].set(length),
            ),
        )

    return jax.lax.fori_loop(0, jnp.where(first, 1, 2 * MOVE_ROUNDS), move, now)


def _along_particles(omega: Array, length: Array, bits: Array) -> Array:
    """Each particle moved by the difference of two others, which have the covariance that the moves should
    have (ter Braak 2006)."""
    count = omega.shape[1]
    # One random shift for all particles of a point, and another for the other end; the same one is no move.
    shift = 1 + (bits % (count - 1)).astype(int)
    places = (jnp.arange(count)[None, :, None] + shift[:, None]) % count
    one, other = _take(omega, places[..., 0]), _take(omega, places[..., 1])
    return omega + (length / 2**0.5)[:, None, None] * (one - other)


def _resample(share: Array, keys: PRNGKeyArray, count: int) -> Array:
    """Systematic resampling: places `(B, count)`, each as often as its share says, on average over the random
    number that shifts them all. Without it equal shares may end where places are looked for: then rounding
    would choose between two particles, and rather the one with more weight."""
    bits = jax.vmap(lambda key: random_bits(key, jnp.arange(1), 1)[0, 0])(keys)
    level = (jnp.arange(count)[None] + uniform_numbers(bits, share.dtype)[:, None]) / count
    upper = jnp.cumsum(share, axis=1)
    places = jax.vmap(lambda u, v: jnp.searchsorted(u, v, side="right"))(upper / upper[:, -1:], level)
    return jnp.minimum(places, share.shape[1] - 1)


def _take(values: Array, places: Array) -> Array:
    return jnp.take_along_axis(values, jnp.expand_dims(places, range(2, values.ndim)), axis=1)


def _where(chosen: Array, new: _State, old: _State) -> _State:
    """Point by point; what is not one per point is `old`'s."""
    pick = lambda a, b: jnp.where(jnp.expand_dims(chosen, range(1, a.ndim)), a, b)
    leaves = lambda s: (s.omega, s.joint, s.proposed, s.root, s.share, s.beta, s.log_mean)
    return eqx.tree_at(leaves, old, tuple(pick(a, b) for a, b in zip(leaves(new), leaves(old), strict=True)))


def _times(beta: Array, log_weights: Array) -> Array:
    """β log w, with 0 · −inf = −inf: a weight of zero stays one."""
    fine = jnp.isfinite(log_weights)
    return jnp.where(fine, beta[:, None] * jnp.where(fine, log_weights, 0), -jnp.inf)


def _share(log_weights: Array) -> Array:
    top = jnp.max(log_weights, axis=1, keepdims=True)
    weights = jnp.exp(log_weights - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(weights, axis=1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 1 / log_weights.shape[1])


def _log_mean(log_weights: Array) -> Array:
    return jax.nn.logsumexp(log_weights, axis=1) - jnp.log(log_weights.shape[1])
