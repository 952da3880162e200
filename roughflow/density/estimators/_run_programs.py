"""The programs that a run compiles: one for each of its steps, for any points and paths."""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._programs import jit
from ...driver import AbstractDriver
from ...flow import StochasticFlow
from .._estimate import compared, unreliable
from ..proposals import SPARE, normal_numbers
from ..surface import Cloud, Latent, Target, constant
from ._chart import AbstractChart, AbstractRemedy, Weights
from ._chunks import Chunk
from ._looked_at import few_of, mean_and_spread

SEARCH_PATHS = 64  # paths that the search for a point counts as
VAGUE = 0.5  # an error, in nats, beyond which an estimate confirms nothing
# What keys are folded with, beside places of paths.
SEARCH, PILOT, RUN, PARTICLES, FRESH = (2**32 - i for i in range(1, 6))


class Drawn(NamedTuple):
    """Log-weights `(B, K)`, the few paths that matter most, and of whom they are; as in `Weighed`."""

    log_weights: Array
    few: Weights
    remedy: Array
    doubt: Array


@partial(jit, level=0)
def keys_of_points(key: PRNGKeyArray, count: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """A key for each point, unless they have keys of their own, and another for its trial."""
    keys = key if key.ndim else jax.random.split(key, count)
    return keys, _folded(keys, PILOT)


@partial(jit, level=1)
def forward_draws(flow: StochasticFlow, key: PRNGKeyArray, dtype) -> Cloud:
    latent = constant(Latent(flow)).quiet()
    places = jnp.arange(Cloud.size(latent))
    return Cloud.of(latent, normal_numbers(jax.random.fold_in(key, SEARCH), places, latent.size, dtype))


@partial(jit, level=1)
def prepare(estimator, flow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None, chunk: Chunk):
    return chunk.map(
        lambda given: estimator.prepare(flow, *given, cloud), chunk.take((target, keys)), SEARCH_PATHS
    )


@partial(jit, level=1)
def weigh(estimator, flow, coarse, target, distribution, keys, chunk, first, count, group) -> Weights:
    def weights(given) -> Weights:
        target, keys, distribution, first = given
        places = first[:, None] + jnp.arange(count)[None]
        latent = Latent(flow, fixed_start=target.start is not None)
        noise = _noise(estimator.proposal.draws, latent, coarse, keys, places, group, target.x.dtype)
        own = jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(key, i))(at))
        return estimator.weigh(flow, target, distribution, noise, own(_folded(keys, RUN), places))

    return chunk.map(weights, (*chunk.take((target, keys, distribution)), first), count)


@partial(jit, level=0)
def decide(estimator: AbstractChart, flow, distribution, trial: Weights, chunk: Chunk):
    return chunk.map(
        lambda given: estimator.decide(flow, *given), (chunk.take(distribution), trial), estimator.num_tried
    )


@partial(jit, level=0)
def drawn_of(parts: list[Weights]) -> Drawn:
    weights = jax.tree.map(lambda *a: jnp.concatenate(a, axis=1), *parts)
    sure = jnp.zeros(len(weights.joint), bool)
    return Drawn(weights.log_weights, few_of(constant(weights)), sure - 1, sure)


@partial(jit, level=0)
def points_of(
    remedies: tuple[AbstractRemedy, ...], distribution, log_weights: Array | None, points
) -> tuple[list[Array], Array | None]:
    """Which of these points each remedy is for; and where weights are poor, of all points: also where
    `log_weights`, if given, turned out to be."""
    if not remedies:
        return [], None
    if log_weights is not None:
        poor = distribution.poor.at[points].max(unreliable(log_weights.T))
        distribution = eqx.tree_at(lambda d: d.poor, distribution, poor)
    return [remedy.at(distribution)[points] for remedy in remedies], distribution.poor


@partial(jit, level=1)
def improve(
    remedy, flow, target, distribution, keys, points, first, drawn, where, place: int, which: Chunk
) -> Drawn:
    def of_some(given) -> Drawn:
        target, keys, distribution, first, drawn, where = given
        distribution = eqx.tree_at(lambda d: d.poor, distribution, distribution.poor & where)
        fold = lambda key, at: jax.random.fold_in(jax.random.fold_in(key, PARTICLES), at)
        count = drawn.log_weights.shape[1]
        weights, doubt = remedy.improve(flow, target, distribution, jax.vmap(fold)(keys, first), count)
        mine = jnp.full_like(drawn.remedy, place)
        new = Drawn(weights.log_weights, few_of(constant(weights)), mine, doubt)
        # What another remedy was sure of stays if this one says the same, less surely, or doubts itself: then
        # they should not differ.
        apart, errors = compared(weights.log_weights.T, drawn.log_weights.T)
        sure = (drawn.remedy >= 0) & ~drawn.doubt
        stays = sure & (doubt | ((apart < 1) & (errors[1] < errors[0]) & (errors[0] < VAGUE)))
        gave_up = jnp.any(jnp.isnan(weights.log_weights), axis=1)
        better = where & ~stays & ~gave_up
        choose = lambda new, old: jnp.where(jnp.expand_dims(better, range(1, new.ndim)), new, old)
        chosen = jax.tree.map(choose, new, drawn)
        return chosen._replace(doubt=chosen.doubt | (where & stays & ~gave_up & ~(apart < 3)))

    at = which.indices
    # No particles for those that fill up the chunk.
    where = where[at] if which.count is None else where[at] & (jnp.arange(len(at)) < which.count)
    some = (*_take((target, keys, distribution), points[at]), *_take((first, drawn), at), where)
    return jax.tree.map(
        lambda old, new: old.at[at].set(new), drawn, which.map(of_some, some, drawn.log_weights.shape[1])
    )


@partial(jit, level=1)
def look_at_errors(
    estimator, flow, target, distribution, chunk: Chunk, few: Weights
) -> tuple[Array, Array | None]:
    """The solver's error, and that of a random divergence, seen on a few paths of each point.

    Halving the steps moves log p(x, path) by Δ. A point's log p moves by log E exp(Δ) over paths that are
    drawn by weight; its few Δ's own spread is allowed for.
    """
    quiet = constant(flow.without_errors())

    def errors(given) -> tuple[Array, Array | None]:
        target, distribution, few = given
        finer = estimator.log_joint(quiet.with_finer_steps(), target, distribution, few.paths, few.keys)
        solver = mean_and_spread(finer - few.joint)
        if few.keys is None:
            return solver, None
        # log E exp(log p + e) exceeds log p by half the variance of e, for normal errors e.
        other = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(few.keys)
        change = estimator.log_joint(quiet, target, distribution, few.paths, other) - few.joint
        return solver, 0.25 * jnp.mean(change**2, axis=1)

    return chunk.map(errors, (*constant(chunk.take((target, distribution))), few), few.joint.shape[1])


def _noise(draws, latent: Latent, coarse: AbstractDriver | None, keys, places, group, dtype) -> Array:
    """Standard normal numbers `(B, K, D + SPARE)`."""
    normal = lambda keys, size: jax.vmap(lambda key, at: draws.normal(key, at, group, size, dtype))(
        keys, places
    )
    if coarse is None:
        return normal(keys, latent.size + SPARE)
    coarser = Latent(latent.flow.with_driver(coarse), fixed_start=latent.fixed_start)
    shared = normal(keys, coarser.size + SPARE)
    more = normal(_folded(keys, FRESH), coarser.path_size)
    return jnp.concatenate([coarser.refine(shared[..., :-SPARE], more), shared[..., -SPARE:]], axis=-1)


def _folded(keys: PRNGKeyArray, number: int) -> PRNGKeyArray:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _take(tree, indices):
    return jax.tree.map(lambda a: a[indices], tree)
