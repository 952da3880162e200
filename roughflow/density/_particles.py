"""Particles that are moved from a mixture to p(path | x) (Del Moral, Doucet & Jasra 2006)."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ._draws import Independent, normal_draws, normal_quantile, random_bits, uniform_draws
from ._paths import Level, Parts, Points, solve_keys, summary
from ._proposals import Mixture, log_standard

RUNS = 8  # number of independent runs per point; their spread gives the error
PARTICLES = 256  # number of particles per run
MAX_TEMPERATURES = 12
EFFECTIVE_FRACTION = 0.5  # effective fraction of the particles after each step of β
MOVES = 6  # number of moves at each β
TARGET_ACCEPTANCE = 0.25
HALVINGS = 24  # number of bisections that determine the next β
# If the paths to x lie on curved surfaces, all runs miss the same regions, which moves do not reach, and the
# error is larger than the spread of the runs.
ERROR_INFLATION = 1.5


def particle_parts(points: Points, which: np.ndarray, mixture: Mixture) -> Parts:
    """Fields of an `Estimate` for the points `which`, from particles that start from a mixture and are solved
    at the finer level."""
    log_weights = points.run(Runs(points.levels[1]), which, mixture, RUNS * PARTICLES).astype(float)
    return parts_of(log_weights)


def parts_of(log_weights: np.ndarray) -> Parts:
    """Fields of an `Estimate` from independent estimates of p(x), given by their logarithms `(B, RUNS)`."""
    parts = summary(Independent(), log_weights, log_weights[:, :0], corrected=True)
    error, count = ERROR_INFLATION * parts["standard_error"], np.full(len(log_weights), RUNS * PARTICLES)
    return {**parts, "standard_error": error, "num_paths": count, "escaped": 0 * count}


class Runs(eqx.Module):
    """The logarithms `(B, RUNS)` of independent estimates of p(x) for rows of points, for use inside a
    compiled program."""

    level: Level

    def __call__(self, x: Array, keys: PRNGKeyArray, mixture: Mixture) -> Array:
        flow = self.level.flow
        size = flow.driver.num_functions * flow.noise_dimension
        run = jnp.tile(jnp.arange(RUNS), len(x))
        x, keys, mixture = jax.tree.map(lambda a: jnp.repeat(a, RUNS, axis=0), (x, keys, mixture))
        keys = jax.vmap(jax.random.fold_in)(keys, run)
        draw = lambda key: normal_draws(key, jnp.arange(PARTICLES), mixture.num_normals, x.dtype)
        solves = solve_keys(flow, keys, jnp.broadcast_to(jnp.arange(PARTICLES), (len(x), PARTICLES)))

        def joint(omega: Array) -> Array:
            own, more = jnp.split(omega, [size], axis=-1)
            value = self.level.solved(x, own, more, solves) + log_standard(omega)
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        found = tempered(joint, mixture.log_prob, mixture.sample(jax.vmap(draw)(keys)), keys)
        return jnp.reshape(found, (-1, RUNS))


class _State(NamedTuple):
    omega: Array  # (B, P, W)
    joint: Array  # log p(x, ω), (B, P)
    proposed: Array  # log q(ω), (B, P)
    beta: Array  # (B,)
    log_mean: Array  # (B,)
    length: Array  # length of a move, (B,)
    number: Array  # index of the temperature


def tempered(
    joint: Callable[[Array], Array], log_proposal: Callable[[Array], Array], omega: Array, keys: PRNGKeyArray
) -> Array:
    """log ∫ exp(joint) `(B,)`, from particles ω `(B, P, W)` that were drawn from the proposal q.

    The particles pass through the densities q^(1−β) exp(β joint), with β from 0 to 1. Each step of β is so
    short that half of the particles stay effective; then they are resampled and moved. Apart from the choice
    of β, the product of the mean weights is unbiased.
    """
    zero, unknown = jnp.zeros(len(omega), omega.dtype), jnp.full(omega.shape[:2], -jnp.inf, omega.dtype)
    length = zero + 2.4 / max(omega.shape[2], 1) ** 0.5
    start = _State(omega, unknown, unknown, zero, zero, length, jnp.asarray(0))

    def step(now: _State) -> _State:
        key = jax.vmap(lambda key: jax.random.fold_in(key, now.number))(keys)
        now = _moved(joint, log_proposal, now, key)
        ratio = jnp.where(jnp.isneginf(now.joint), -jnp.inf, now.joint - now.proposed)
        last = now.number == MAX_TEMPERATURES - 1
        beta = jnp.where(last, 1, _next_beta(ratio, now.beta)).astype(omega.dtype)
        log_weights = _times(beta - now.beta, ratio)
        log_mean = now.log_mean + jax.nn.logsumexp(log_weights, axis=1) - jnp.log(omega.shape[1])
        # If all particles are lost, the estimate of p(x) is zero.
        beta = jnp.where(jnp.isfinite(log_mean), beta, 1)
        bits = jax.vmap(lambda key: random_bits(key, jnp.arange(1), 1)[0, 0])(key)
        share = jax.nn.softmax(log_weights, axis=1)
        indices = jax.vmap(systematic)(share, uniform_draws(bits, share.dtype))
        at, value, proposed = (_take(a, indices) for a in (now.omega, now.joint, now.proposed))
        log_mean = jnp.where(now.beta >= 1, now.log_mean, log_mean)
        return _State(at, value, proposed, beta, log_mean, now.length, now.number + 1)

    going = lambda now: jnp.any(now.beta < 1) & (now.number < MAX_TEMPERATURES)
    return jax.lax.while_loop(going, step, start).log_mean


def _next_beta(ratio: Array, beta: Array) -> Array:
    """The largest β′ ≤ 1 at which `EFFECTIVE_FRACTION` of the particles stay effective, by bisection."""
    # Only particles that have not escaped count, because the others have no weight at any β.
    alive = jnp.maximum(jnp.sum(jnp.isfinite(ratio), axis=1), 1)

    def enough(new: Array) -> Array:
        share = jax.nn.softmax(_times(new - beta, ratio), axis=1)
        return ~(jnp.sum(share**2, axis=1) * alive > 1 / EFFECTIVE_FRACTION)

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (ends[0] + ends[1])
        good = enough(middle)
        return jnp.where(good, middle, ends[0]), jnp.where(good, ends[1], middle)

    one = jnp.ones_like(beta)
    low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (beta, one))
    return jnp.where(enough(one), 1, jnp.maximum(low, beta + 1e-6))


def _moved(joint, log_proposal, now: _State, keys: PRNGKeyArray) -> _State:
    """Metropolis–Hastings moves along differences between other particles (ter Braak 2006). They leave
    q^(1−β) exp(β joint) invariant. At the first temperature, particles are not moved, and only their
    densities are computed, so that one program handles both cases."""
    first, count = now.number == 0, now.joint.shape[1]

    def move(i: Array, state: _State) -> _State:
        draw = lambda key: random_bits(jax.random.fold_in(key, 1 + i), jnp.arange(count), 3)
        bits = jax.vmap(draw)(keys)
        # All particles of a point use the same two shifts; if these are equal, no particle moves.
        shift = 1 + (bits[:, :2, 0] % (count - 1)).astype(int)
        indices = (jnp.arange(count)[None, :, None] + shift[:, None]) % count
        along = _take(state.omega, indices[..., 0]) - _take(state.omega, indices[..., 1])
        noise = 1 + 0.5 * normal_quantile(bits[..., 1], state.omega.dtype)
        kick = (state.length[:, None] * noise / 2**0.5)[..., None] * along
        omega = state.omega + jnp.where(first, 0, kick)
        value, proposed = joint(omega), log_proposal(omega)
        energy = lambda joint, log_q: _times(now.beta, joint) + (1 - now.beta[:, None]) * log_q
        change = energy(value, proposed) - energy(state.joint, state.proposed)
        accept = first | (jnp.log(uniform_draws(bits[..., 2], change.dtype)) < change)
        keep = lambda new, old: jnp.where(jnp.expand_dims(accept, range(2, new.ndim)), new, old)
        # Moves become longer if too many are accepted, and shorter if too few are.
        rate = jnp.mean(jnp.exp(jnp.minimum(jnp.nan_to_num(change, nan=-jnp.inf), 0)), axis=1)
        longer = jnp.clip(state.length * jnp.exp(1.5 * (rate - TARGET_ACCEPTANCE)), 1e-4, 10.0)
        return state._replace(
            omega=keep(omega, state.omega),
            joint=keep(value, state.joint),
            proposed=keep(proposed, state.proposed),
            length=jnp.where(first, state.length, longer),
        )

    return jax.lax.fori_loop(0, jnp.where(first, 1, MOVES), move, now)


def systematic(share: Array, uniform: Array, count: int | None = None) -> Array:
    """Systematic resampling: increasing indices `(count,)`, by default as many as there are shares. Each
    index occurs in proportion to its share, on average over `uniform` in (0, 1) (Carpenter, Clifford &
    Fearnhead 1999)."""
    count = len(share) if count is None else count
    upper = jnp.cumsum(jnp.where(jnp.isfinite(share), share, 1))
    indices = jnp.searchsorted(upper / upper[-1], (jnp.arange(count) + uniform) / count, side="right")
    return jnp.minimum(indices, len(share) - 1)


def _take(values: Array, indices: Array) -> Array:
    return jnp.take_along_axis(values, jnp.expand_dims(indices, range(2, values.ndim)), axis=1)


def _times(beta: Array, log_weights: Array) -> Array:
    """β log w, with 0 · −inf = −inf, so that a weight of zero stays zero."""
    fine = jnp.isfinite(log_weights)
    return jnp.where(fine, beta[:, None] * jnp.where(fine, log_weights, 0), -jnp.inf)
