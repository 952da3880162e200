"""Weights of paths for a set of points: in chunks that fit in memory, with numbers that do not depend on
the chunks."""

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..._checks import NonFiniteError, check_finite, check_key, check_vector, is_traced
from ..._programs import jit
from ...driver import AbstractDriver
from ...flow import StochasticFlow, one_line_errors
from .._estimate import unreliable
from ..proposals import SPARE, normal_numbers
from ..surface import Cloud, Latent, Target, constant
from ._chart import AbstractChart, AbstractImprovingChart, Weights
from ._chunks import Chunk, chunks, cut, padded
from ._looked_at import few_of, mean_and_spread

PAIRS = 2**17  # of a point and a path that are solved together
NUMBERS = 2**26  # that a chunk's directions and components may take up
MODES = 64  # paths that preparing for a point counts as
# What keys are folded with, beside places of paths.
SEARCH, PILOT, RUN, PARTICLES, FRESH = (2**32 - i for i in range(1, 6))


class Weighed(NamedTuple):
    """What became of the paths of B points: log-weights `(B, K)`, as they were at first (`plain`) and
    with those improved that the distribution said would be `poor`; and, where that was looked at, the change
    of log p(x) when the solver's steps are halved, and what a random divergence adds, `(B,)` both."""

    log_weights: Array
    plain: Array
    poor: Array  # (B,)
    solver_error: Array | None
    divergence_error: Array | None


class _Drawn(NamedTuple):
    """Log-weights `(B, K)`, where they should be improved `(B,)`, and the few paths that matter most."""

    log_weights: Array
    poor: Array
    few: Weights


class EstimatorRun:
    """An estimator at work on the points `x`: it prepares once, and draws paths as often as asked.

    With `coarse`, the flow's driver is the refinement of that one, and paths share their coefficients
    with those that a run of the coarse flow draws from the same key.
    """

    def __init__(
        self,
        estimator: AbstractChart,
        flow: StochasticFlow,
        x: Any,
        key: PRNGKeyArray,
        coarse: AbstractDriver | None = None,
    ):
        base = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
        x = x if is_traced(x) else np.asarray(x)
        x = x.astype(jnp.result_type(x, base))
        check_vector("x", x, flow.dimension)
        check_finite("x", x)
        if not x.size:
            raise ValueError(f"x holds no points, its shape is {x.shape}")
        estimator.check(flow)
        start = estimator.start_points(x)
        self.batch = x.shape[:-1]
        self.size = math.prod(self.batch)
        self.estimator, self.flow, self.coarse = estimator, flow, coarse
        latent = Latent(flow, fixed_start=start is not None)
        self.pairs = max(1, min(PAIRS, NUMBERS // max(1, max(flow.dimension, 8) * latent.size)))
        # Inside a jit the number of points is compiled in, and derivatives are better off without loops.
        known = not is_traced(jnp.asarray(0.0))
        self.straight = not known or any(map(is_traced, jax.tree.leaves((estimator, flow, x, key))))
        flat = lambda a: jnp.reshape(a, (-1, flow.dimension))
        self.target = self.padded(jax.tree.map(flat, Target(x, start)))
        # Random numbers belong to a point's place in x: neither chunks nor what fills them up change them.
        # Points that are part of a batch, in a fit on several devices, come with keys of their own.
        key = check_key(key, many=self.straight)
        self.keys = key if key.ndim else _split(key, len(self.target.x))
        self.group = estimator.proposal.draws.group(estimator.num_paths)
        cloud = None
        if estimator.proposal.wants_cloud and start is None:
            cloud = self._run(_cloud, flow, key, x.dtype)
        ask = (estimator, flow, self.target, self.keys, cloud)
        parts = [self._run(_prepare, *ask, chunk) for chunk in self._chunks(np.arange(self.size), MODES)]
        try:
            # Of the points in their order, and then of some once more.
            self.distribution = estimator.settled(_joined(parts))
        except ValueError:
            self._find_not_finite()
            raise

    @property
    def missed(self) -> Array:
        """Where no likely path was found."""
        return cut(self.distribution.missed, self.size)

    def all_log_weights(self) -> Array:
        """Log-weights `(B, K)` of the first K paths of every point."""
        return self.weighed(np.arange(self.size), np.zeros(self.size, int)).log_weights

    def weighed(
        self, points: np.ndarray, first: np.ndarray, checked: bool = False, again: bool = False
    ) -> Weighed:
        """Log-weights `(len(points), K)` of K paths for some of the points, by place in x; the paths of
        a point are the K from its place `first` on in its sequence of paths.

        With `again`, weights that turn out so poor that their estimate would be suspect are improved as well,
        here and whenever this run is asked for more of these points. That chooses by the weights: it
        is for estimates that would have been distrusted, not for what has to be unbiased.
        """
        count = self.estimator.num_paths
        each = min(count, self.pairs)
        parts = math.ceil(count / each)
        each_point = np.repeat(points, parts)
        places = np.repeat(first, parts) + np.tile(np.arange(parts) * each, len(points))
        jobs = self._chunks(np.arange(len(each_point)), each)
        done = _joined([self._weighed(job, each_point, places, each, checked, again) for job in jobs])
        done = cut(done, len(each_point))
        if parts == 1:
            return done
        weights = [jnp.reshape(a, (len(points), parts * each))[:, :count] for a in done[:2]]
        return Weighed(*weights, *jax.tree.map(lambda a: a[::parts], done[2:]))

    def _weighed(
        self, job: Chunk, points: np.ndarray, places: np.ndarray, count: int, checked: bool, again: bool
    ) -> Weighed:
        chunk, first = job.of(points), places[job.indices]
        setting = (self.estimator, self.flow, self.coarse, self.target, self.distribution, self.keys)
        drawn = self._run(_weights, *setting, chunk, first, count, self.group)
        plain, errors = drawn.log_weights, (None, None)
        # Two drivers are compared path by path.
        if isinstance(self.estimator, AbstractImprovingChart) and self.coarse is None:
            if again:
                poor, everywhere = _poor_after_all(drawn.poor, plain, self.distribution.poor, chunk.indices)
                drawn = drawn._replace(poor=poor)
                self.distribution = eqx.tree_at(lambda d: d.poor, self.distribution, everywhere)
            drawn = self._improved(drawn, chunk, first)
        if checked:
            setting = (self.estimator, self.flow, self.target, self.distribution)
            errors = self._run(_errors, *setting, chunk, drawn.few)
        return Weighed(drawn.log_weights, plain, drawn.poor, *errors)

    def _improved(self, drawn: _Drawn, chunk: Chunk, places: np.ndarray) -> _Drawn:
        """Better weights where they are poor: of all if it is not known where, as inside a jit."""
        if is_traced(drawn.poor):
            which = Chunk.whole(np.arange(len(chunk.indices)))
        else:
            poor = np.flatnonzero(np.asarray(drawn.poor)[: chunk.known])
            if not poor.size:
                return drawn
            if self.straight:
                which = Chunk.whole(np.resize(poor, 2 ** math.ceil(math.log2(len(poor)))))
            else:
                (which,) = self._chunks(poor, drawn.log_weights.shape[1])
        setting = (self.estimator, self.flow, self.target, self.distribution, self.keys)
        return self._run(_improve, *setting, chunk.indices, places, drawn, which)

    def _run(self, function, *arguments):
        """Call a jitted function; its errors are one line, and name the part of the model to blame."""
        try:
            with one_line_errors():
                return function(*arguments)
        except NonFiniteError:
            self._find_not_finite()
            raise

    def _find_not_finite(self) -> None:
        """Solve outside a jit, where an error can say which part of the model is not finite, and where."""
        paths = self.flow.sample_path(key=jax.random.key(0), shape=(64, 1))
        key = jax.random.key(1)
        self.flow.pull_back(self.target.x[:64], paths, key=key)
        self.flow.push_forward(self.flow.base.sample(key=key, shape=(64,)), paths, key=key)

    def padded(self, batch):
        """As many entries as a program is compiled for; as they are inside a jit."""
        return batch if self.straight else padded(batch)

    def _chunks(self, items: np.ndarray, each: int) -> list[Chunk]:
        return chunks(items, self.pairs // each, each, self.straight)


@partial(jit, level=0)
def _split(key: PRNGKeyArray, count: int) -> PRNGKeyArray:
    return jax.random.split(key, count)


@partial(jit, level=1)
def _cloud(flow: StochasticFlow, key: PRNGKeyArray, dtype) -> Cloud:
    latent = constant(Latent(flow)).quiet()
    places = jnp.arange(Cloud.size(latent))
    return Cloud.of(latent, normal_numbers(jax.random.fold_in(key, SEARCH), places, latent.size, dtype))


@partial(jit, level=1)
def _prepare(estimator, flow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None, chunk: Chunk):
    def prepare(given):
        target, keys = given
        return estimator.prepare(flow, target, _folded(keys, PILOT), cloud)

    return chunk.map(prepare, chunk.take((target, keys)))


@partial(jit, level=1)
def _weights(estimator, flow, coarse, target, distribution, keys, chunk, first, count, group) -> _Drawn:
    def weights(given) -> _Drawn:
        target, keys, distribution, first = given
        places = first[:, None] + jnp.arange(count)[None]
        latent = Latent(flow, fixed_start=target.start is not None)
        noise = _noise(estimator.proposal.draws, latent, coarse, keys, places, group, target.x.dtype)
        own = jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(key, i))(at))
        weights = estimator.weigh(flow, target, distribution, noise, own(_folded(keys, RUN), places))
        improves = isinstance(estimator, AbstractImprovingChart)
        poor = distribution.poor if improves else jnp.zeros(len(target.x), bool)
        return _Drawn(weights.log_weights, poor, few_of(constant(weights)))

    return chunk.map(weights, (*chunk.take((target, keys, distribution)), first))


@partial(jit, level=0)
def _poor_after_all(poor: Array, log_weights: Array, everywhere: Array, points) -> tuple[Array, Array]:
    """Where weights are poor, or turned out to be: of these points, and of all."""
    poor = poor | unreliable(log_weights.T)
    return poor, everywhere.at[points].max(poor)


# Not quick: particles are moved for seconds, and a program that runs a tenth longer would show.
@jit
def _improve(estimator, flow, target, distribution, keys, points, first, drawn, which: Chunk) -> _Drawn:
    def improve(given) -> _Drawn:
        target, keys, distribution, first, drawn = given
        fold = lambda key, at: jax.random.fold_in(jax.random.fold_in(key, PARTICLES), at)
        weights = estimator.improve(
            flow, target, distribution, jax.vmap(fold)(keys, first), drawn.log_weights.shape[1]
        )
        new = _Drawn(weights.log_weights, drawn.poor, few_of(constant(weights)))
        choose = lambda new, old: jnp.where(jnp.expand_dims(drawn.poor, range(1, new.ndim)), new, old)
        return jax.tree.map(choose, new, drawn)

    at = which.indices
    some = (*_take((target, keys, distribution), points[at]), *_take((first, drawn), at))
    return jax.tree.map(lambda old, new: old.at[at].set(new), drawn, which.map(improve, some))


@partial(jit, level=1)
def _errors(estimator, flow, target, distribution, chunk: Chunk, few: Weights) -> tuple[Array, Array | None]:
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

    return chunk.map(errors, (*constant(chunk.take((target, distribution))), few))


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


def _joined(parts: list):
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _take(tree, indices):
    return jax.tree.map(lambda a: a[indices], tree)
