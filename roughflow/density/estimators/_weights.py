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
from ..surface import Cloud, Latent, Target, constant, in_blocks
from ._chart import AbstractChart, AbstractImprovingChart, Weights

PAIRS = 2**17  # of a point and a path that are solved together
NUMBERS = 2**26  # that a chunk's directions and components may take up
MOST = 2**14  # points in a chunk
MODES = 64  # paths that finding a law counts as
# Programs are compiled for chunks of one size for up to SMALL points, of another beyond, and go through the
# points that are there in blocks of so many, and of so many pairs, at most. On a GPU small blocks do not pay.
SMALL, SMALL_BLOCK = 256, (32, 2**9)
LARGE, LARGE_BLOCK = 2048, (1024, 2**14)
# What keys are folded with, beside places of paths.
SEARCH, PILOT, RUN, PARTICLES, FRESH = (2**32 - i for i in range(1, 6))
FEW = 16  # paths on which a solver's error is seen: of four the mean of exp(Δ) is mostly chance


class Weighed(NamedTuple):
    """What became of the paths of B points: log-weights `(B, K)`, as they were at first (`plain`) and
    with those improved that the law said would be `poor`; and, where that was looked at, the change of
    log p(x) when the solver's steps are halved, and what a random divergence adds, `(B,)` both."""

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
    """An estimator at work on the rows of `x`: its law is found once, paths are drawn as often as asked.

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
        self.keys = _split(check_key(key), len(self.target.x))
        self.group = estimator.proposal.draws.group(estimator.num_paths)
        cloud = None
        if estimator.proposal.wants_cloud and start is None:
            cloud = self._run(_cloud, flow, key, x.dtype)
        ask = (estimator, flow, self.target, self.keys, cloud)
        laws = [self._run(_law, *ask, chunk) for chunk in self._chunks(np.arange(self.size), MODES)]
        try:
            # Of the points in their order, and then of some once more.
            self.law = estimator.settled(_joined(laws))
        except ValueError:
            self._find_not_finite()
            raise

    @property
    def missed(self) -> Array:
        """Where no likely path was found."""
        return cut(self.law.missed, self.size)

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
        rows = np.repeat(points, parts)
        places = np.repeat(first, parts) + np.tile(np.arange(parts) * each, len(points))
        jobs = self._chunks(np.arange(len(rows)), each)
        done = _joined([self._weighed(rows, places, job, each, checked, again) for job in jobs])
        done = cut(done, len(rows))
        if parts == 1:
            return done
        weights = [jnp.reshape(a, (len(points), parts * each))[:, :count] for a in done[:2]]
        return Weighed(*weights, *jax.tree.map(lambda a: a[::parts], done[2:]))

    def _weighed(
        self, rows: np.ndarray, places: np.ndarray, job: "_Chunk", count: int, checked: bool, again: bool
    ) -> Weighed:
        chunk, first = job.of(rows), places[job.rows]
        setting = (self.estimator, self.flow, self.coarse, self.target, self.law, self.keys)
        drawn = self._run(_weights, *setting, chunk, first, count, self.group)
        plain, errors = drawn.log_weights, (None, None)
        # Two drivers are compared path by path.
        if isinstance(self.estimator, AbstractImprovingChart) and self.coarse is None:
            if again:
                poor, everywhere = _poor_after_all(drawn.poor, plain, self.law.poor, chunk.rows)
                drawn = drawn._replace(poor=poor)
                self.law = eqx.tree_at(lambda law: law.poor, self.law, everywhere)
            drawn = self._improved(drawn, chunk, first)
        if checked:
            setting = (self.estimator, self.flow, self.target, self.law)
            errors = self._run(_errors, *setting, chunk, drawn.few)
        return Weighed(drawn.log_weights, plain, drawn.poor, *errors)

    def _improved(self, drawn: _Drawn, chunk: "_Chunk", places: np.ndarray) -> _Drawn:
        """Better weights where they are poor: of all if it is not known where, as inside a jit."""
        if is_traced(drawn.poor):
            which = _Chunk(np.arange(len(chunk.rows)), None, 1)
        else:
            poor = np.flatnonzero(np.asarray(drawn.poor)[: chunk.known])
            if not poor.size:
                return drawn
            if self.straight:
                which = _Chunk(np.resize(poor, 2 ** math.ceil(math.log2(len(poor)))), None, 1)
            else:
                (which,) = self._chunks(poor, drawn.log_weights.shape[1])
        setting = (self.estimator, self.flow, self.target, self.law, self.keys)
        return self._run(_improve, *setting, chunk.rows, places, drawn, which)

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

    def padded(self, rows):
        """Rows as many as a program is compiled for, some of them twice; as they are inside a jit."""
        count = len(jax.tree.leaves(rows)[0])
        if self.straight:
            return rows
        size = SMALL if count <= SMALL else max(LARGE, 2 ** math.ceil(math.log2(count)))
        places = np.resize(np.arange(count), size)
        return jax.tree.map(lambda a: a[places] if is_traced(a) else np.asarray(a)[places], rows)

    def _chunks(self, items: np.ndarray, each: int) -> list["_Chunk"]:
        """Items that take `each` paths, in chunks that fit in memory."""
        most = 2 ** int(math.log2(max(1, min(MOST, self.pairs // each))))
        if self.straight:
            return [_Chunk(part, None, 1) for part in _parts(items, most)]
        small = len(items) <= SMALL and jax.default_backend() == "cpu"
        size = min(SMALL, most) if small else most
        rows, pairs = SMALL_BLOCK if small else LARGE_BLOCK
        block = min(size, rows, 2 ** int(math.log2(max(1, pairs // each))))
        parts = _parts(items, size)
        return [_Chunk(np.resize(part, size), np.asarray(len(part)), block) for part in parts]


class _Chunk(eqx.Module):
    """Places to work on: the first `count` of them, which the others repeat; all of them if it is None."""

    rows: np.ndarray
    count: np.ndarray | None
    block: int = eqx.field(static=True)

    @property
    def known(self) -> int:
        return len(self.rows) if self.count is None else int(self.count)

    def of(self, items: np.ndarray) -> "_Chunk":
        return _Chunk(items[self.rows], self.count, self.block)

    def map(self, function, rows):
        return in_blocks(function, rows, self.count, self.block)


def cut(tree, count: int):
    """The first `count` rows, without a program to compile where there are values."""
    return jax.tree.map(lambda a: a[:count] if is_traced(a) else jax.device_put(np.asarray(a)[:count]), tree)


@partial(jit, level=0)
def _split(key: PRNGKeyArray, count: int) -> PRNGKeyArray:
    return jax.random.split(key, count)


@partial(jit, level=1)
def _cloud(flow: StochasticFlow, key: PRNGKeyArray, dtype) -> Cloud:
    latent = constant(Latent(flow)).quiet()
    places = jnp.arange(Cloud.size(latent))
    return Cloud.of(latent, normal_numbers(jax.random.fold_in(key, SEARCH), places, latent.size, dtype))


@partial(jit, level=1)
def _law(estimator, flow, target: Target, keys: PRNGKeyArray, cloud: Cloud | None, chunk: _Chunk):
    def law(rows):
        target, keys = rows
        return estimator.prepare(flow, target, _folded(keys, PILOT), cloud)

    return chunk.map(law, _take((target, keys), chunk.rows))


@partial(jit, level=1)
def _weights(estimator, flow, coarse, target, law, keys, chunk: _Chunk, first, count, group) -> _Drawn:
    def weights(rows) -> _Drawn:
        target, keys, law, first = rows
        places = first[:, None] + jnp.arange(count)[None]
        latent = Latent(flow, fixed_start=target.start is not None)
        noise = _noise(estimator.proposal.draws, latent, coarse, keys, places, group, target.x.dtype)
        own = jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(key, i))(at))
        weights = estimator.weigh(flow, target, law, noise, own(_folded(keys, RUN), places))
        improves = isinstance(estimator, AbstractImprovingChart)
        poor = law.poor if improves else jnp.zeros(len(target.x), bool)
        return _Drawn(weights.log_weights, poor, _few(constant(weights)))

    return chunk.map(weights, (*_take((target, keys, law), chunk.rows), first))


@partial(jit, level=0)
def _poor_after_all(poor: Array, log_weights: Array, everywhere: Array, rows) -> tuple[Array, Array]:
    """Where weights are poor, or turned out to be: of these rows, and of all."""
    poor = poor | unreliable(log_weights.T)
    return poor, everywhere.at[rows].max(poor)


# Not quick: particles are moved for seconds, and a program that runs a tenth longer would show.
@jit
def _improve(estimator, flow, target, law, keys, rows, first, drawn: _Drawn, which: _Chunk) -> _Drawn:
    def improve(rows) -> _Drawn:
        target, keys, law, first, drawn = rows
        fold = lambda key, at: jax.random.fold_in(jax.random.fold_in(key, PARTICLES), at)
        weights = estimator.improve(
            flow, target, law, jax.vmap(fold)(keys, first), drawn.log_weights.shape[1]
        )
        new = _Drawn(weights.log_weights, drawn.poor, _few(constant(weights)))
        choose = lambda new, old: jnp.where(jnp.expand_dims(drawn.poor, range(1, new.ndim)), new, old)
        return jax.tree.map(choose, new, drawn)

    some = (*_take((target, keys, law), rows[which.rows]), *_take((first, drawn), which.rows))
    return jax.tree.map(lambda old, new: old.at[which.rows].set(new), drawn, which.map(improve, some))


@partial(jit, level=1)
def _errors(estimator, flow, target, law, chunk: _Chunk, few: Weights) -> tuple[Array, Array | None]:
    """The solver's error, and that of a random divergence, seen on a few paths of each point.

    Halving the steps moves log p(x, path) by Δ. A point's log p moves by log E exp(Δ) over paths that are
    drawn by weight; its few Δ's own spread is allowed for.
    """
    quiet = constant(flow.without_errors())

    def errors(rows) -> tuple[Array, Array | None]:
        target, law, few = rows
        finer = estimator.log_joint(quiet.with_finer_steps(), target, law, few.paths, few.keys)
        solver = _mean_and_spread(finer - few.joint)
        if few.keys is None:
            return solver, None
        # log E exp(log p + e) exceeds log p by half the variance of e, for normal errors e.
        other = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(few.keys)
        change = estimator.log_joint(quiet, target, law, few.paths, other) - few.joint
        return solver, 0.25 * jnp.mean(change**2, axis=1)

    return chunk.map(errors, (*constant(_take((target, law), chunk.rows)), few))


def _few(weights: Weights) -> Weights:
    """Of the paths of each point those few that stand for all."""
    places = _by_weight(weights.log_weights, min(FEW, weights.log_weights.shape[1]))
    take = lambda a: jnp.take_along_axis(a, jnp.expand_dims(places, range(2, a.ndim)), axis=1)
    return jax.tree.map(take, weights)


def _mean_and_spread(change: Array) -> Array:
    """|log mean exp| over the second axis, and the mean's standard error; infinite where it is not a
    number."""
    spread = jnp.std(change, axis=1) / max(1, change.shape[1] - 1) ** 0.5
    size = jnp.abs(jax.nn.logsumexp(change, axis=1) - jnp.log(change.shape[1])) + spread
    return jnp.where(jnp.isfinite(size), size, jnp.inf)


def _by_weight(log_weights: Array, count: int) -> Array:
    """Places `(B, count)` of paths at even steps of the summed weight: those that matter, each about as often
    as it does."""
    share = jax.nn.softmax(jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights), axis=1)
    level = (jnp.arange(count) + 0.5) / count
    below = jnp.cumsum(share, axis=1)[:, None] < level[None, :, None].astype(share.dtype)
    return jnp.minimum(jnp.sum(below, axis=2), log_weights.shape[1] - 1)


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


def _take(tree, rows):
    return jax.tree.map(lambda a: a[rows], tree)


def _parts(items: np.ndarray, size: int) -> list[np.ndarray]:
    return [items[i : i + size] for i in range(0, len(items), size)]
