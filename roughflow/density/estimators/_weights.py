"""Weights of paths for a set of points: in chunks that fit in memory, with numbers that do not depend on
the chunks."""

import math
from functools import partial
from typing import NamedTuple

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
from ._few import few_of, mean_and_spread

PAIRS = 2**17  # of a point and a path that are solved together
NUMBERS = 2**26  # that a chunk's directions and components may take up
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
        x: Array,
        key: PRNGKeyArray,
        coarse: AbstractDriver | None = None,
    ):
        base = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
        x = jnp.asarray(x)
        x = x.astype(jnp.result_type(x, base))
        check_vector("x", x, flow.dimension)
        check_finite("x", x)
        if not x.size:
            raise ValueError(f"x holds no points, its shape is {x.shape}")
        estimator.check(flow)
        start = estimator.start_points(x)
        self.batch = x.shape[:-1]
        flat = lambda a: jnp.reshape(a, (-1, flow.dimension))
        self.estimator, self.flow, self.coarse = estimator, flow, coarse
        self.target = jax.tree.map(flat, Target(x, start))
        # Random numbers belong to a point's place in x, so that chunks do not change them.
        self.size = math.prod(self.batch)
        self.keys = jax.random.split(check_key(key), self.size)
        self.group = estimator.proposal.draws.group(estimator.num_paths)
        latent = Latent(flow, fixed_start=start is not None)
        self.pairs = max(1, min(PAIRS, NUMBERS // max(1, max(flow.dimension, 8) * latent.size)))
        cloud = None
        if estimator.proposal.wants_cloud and start is None:
            cloud = self._run(_cloud, flow, key, x.dtype)
        chunks = _chunks(np.arange(self.size), max(1, self.pairs // 64))
        ask = (estimator, flow, self.target, self.keys)
        parts = [self._run(_prepare, *ask, self._padded(chunk), cloud) for chunk in chunks]
        # Chunks are padded: where the distribution of each point has come to lie.
        sizes = [len(self._padded(chunk)) for chunk in chunks]
        begins = np.cumsum([0, *sizes[:-1]])
        self.places = np.concatenate([b + np.arange(len(c)) for b, c in zip(begins, chunks, strict=True)])
        try:
            self.distribution = estimator.settled(_joined(parts))
        except ValueError:
            self._find_not_finite()
            raise

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
        jobs = _chunks(np.arange(len(each_point)), max(1, self.pairs // each))
        done = _joined([self._weighed(each_point[job], places[job], each, checked, again) for job in jobs])
        if parts == 1:
            return done
        weights = [jnp.reshape(a, (len(points), parts * each))[:, :count] for a in done[:2]]
        return Weighed(*weights, *jax.tree.map(lambda a: a[::parts], done[2:]))

    def _weighed(
        self, points: np.ndarray, places: np.ndarray, count: int, checked: bool, again: bool
    ) -> Weighed:
        padded, first = self._padded(points), self._padded(places)
        entries = self.places[padded]
        setting = (self.estimator, self.flow, self.coarse, self.target, self.distribution, self.keys)
        drawn = self._run(_weights, *setting, padded, entries, first, count, self.group)
        plain, errors = drawn.log_weights, (None, None)
        # Two drivers are compared path by path.
        if isinstance(self.estimator, AbstractImprovingChart) and self.coarse is None:
            if again:
                drawn = drawn._replace(poor=_poor_after_all(drawn.poor, plain))
                poor = self.distribution.poor.at[entries].max(drawn.poor)
                self.distribution = eqx.tree_at(lambda d: d.poor, self.distribution, poor)
            drawn = self._improved(drawn, padded, first, len(points))
        if checked:
            setting = (self.estimator, self.flow, self.target, self.distribution)
            errors = self._run(_errors, *setting, padded, entries, drawn.few)
        return _take(Weighed(drawn.log_weights, plain, drawn.poor, *errors), slice(len(points)))

    def _improved(self, drawn: _Drawn, points: np.ndarray, places: np.ndarray, count: int) -> _Drawn:
        """Better weights where they are poor, of the first `count` points: of all if it is not known where,
        as inside a jit."""
        setting = (self.estimator, self.flow, self.target, self.distribution, self.keys)
        if is_traced(drawn.poor):
            return self._run(_improve, *setting, points, self.places[points], places, drawn)
        poor = np.flatnonzero(np.asarray(drawn.poor)[:count])
        if not poor.size:
            return drawn
        some = self._padded(poor)
        at = (points[some], self.places[points[some]], places[some])
        better = self._run(_improve, *setting, *at, _take(drawn, some))
        put = lambda old, new: old.at[poor].set(new[: len(poor)])
        return jax.tree.map(put, drawn, better)

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

    def _padded(self, indices: np.ndarray) -> np.ndarray:
        """The indices, repeated up to a power of two: few shapes, so few compilations."""
        if is_traced(self.target.x):
            return indices  # inside a jit this is compiled in any case
        return np.resize(indices, 2 ** math.ceil(math.log2(len(indices))))


@partial(jit, level=1)
def _cloud(flow: StochasticFlow, key: PRNGKeyArray, dtype) -> Cloud:
    latent = constant(Latent(flow)).quiet()
    places = jnp.arange(Cloud.size(latent))
    return Cloud.of(latent, normal_numbers(jax.random.fold_in(key, SEARCH), places, latent.size, dtype))


@partial(jit, level=1)
def _prepare(
    estimator, flow: StochasticFlow, target: Target, keys: PRNGKeyArray, points, cloud: Cloud | None
):
    target, keys = _take((target, keys), points)
    return estimator.prepare(flow, target, _folded(keys, PILOT), cloud)


@partial(jit, level=1)
def _weights(
    estimator, flow, coarse, target, distribution, keys, points, entries, first, count: int, group: int
) -> _Drawn:
    (target, keys), distribution = _take((target, keys), points), _take(distribution, entries)
    places = first[:, None] + jnp.arange(count)[None]
    latent = Latent(flow, fixed_start=target.start is not None)
    noise = _noise(estimator.proposal.draws, latent, coarse, keys, places, group, target.x.dtype)
    own = jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(key, i))(at))
    weights = estimator.weigh(flow, target, distribution, noise, own(_folded(keys, RUN), places))
    improves = isinstance(estimator, AbstractImprovingChart)
    poor = distribution.poor if improves else jnp.zeros(len(target.x), bool)
    return _Drawn(weights.log_weights, poor, few_of(constant(weights)))


@partial(jit, level=0)
def _poor_after_all(poor: Array, log_weights: Array) -> Array:
    return poor | unreliable(log_weights.T)


# Not quick: particles are moved for seconds, and a program that runs a tenth longer would show.
@jit
def _improve(estimator, flow, target, distribution, keys, points, entries, first, drawn: _Drawn) -> _Drawn:
    (target, keys), distribution = _take((target, keys), points), _take(distribution, entries)
    run = jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, PARTICLES), at))(keys, first)
    weights = estimator.improve(flow, target, distribution, run, drawn.log_weights.shape[1])
    new = _Drawn(weights.log_weights, drawn.poor, few_of(constant(weights)))
    choose = lambda new, old: jnp.where(jnp.expand_dims(drawn.poor, range(1, new.ndim)), new, old)
    return jax.tree.map(choose, new, drawn)


@partial(jit, level=1)
def _errors(
    estimator, flow, target, distribution, points, entries, few: Weights
) -> tuple[Array, Array | None]:
    """The solver's error, and that of a random divergence, seen on a few paths of each point.

    Halving the steps moves log p(x, path) by Δ. A point's log p moves by log E exp(Δ) over paths that are
    drawn by weight; its few Δ's own spread is allowed for.
    """
    target, distribution = _take(target, points), _take(distribution, entries)
    flow, target, distribution = constant((flow.without_errors(), target, distribution))
    finer = estimator.log_joint(flow.with_finer_steps(), target, distribution, few.paths, few.keys)
    solver = mean_and_spread(finer - few.joint)
    if few.keys is None:
        return solver, None
    # log E exp(log p + e) exceeds log p by half the variance of e, for normal errors e.
    other = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(few.keys)
    change = estimator.log_joint(flow, target, distribution, few.paths, other) - few.joint
    return solver, 0.25 * jnp.mean(change**2, axis=1)


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


def _chunks(items: np.ndarray, size: int) -> list[np.ndarray]:
    return [items[i : i + size] for i in range(0, len(items), size)]
