"""Weights of paths for a set of points: in chunks that fit in memory, with numbers that do not depend on
the chunks."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, check_finite, check_key, check_vector, is_traced
from ..driver import AbstractDriver
from ..flow import StochasticFlow, one_line_errors
from ._chart import AbstractChart
from ._latent import Latent, Target
from ._proposal import SPARE, AbstractLaw

PAIRS = 2**17  # of a point and a path that are solved together
NUMBERS = 2**26  # that the directions to solve along may take up in a chunk


class Sampler:
    """An estimator at work on the rows of `x`: its law is found once, paths are drawn as often as asked.

    With `coarse`, the flow's driver is the refinement of that one, and paths share their coefficients
    with those that a sampler of the coarse flow draws from the same key.
    """

    def __init__(
        self,
        estimator: AbstractChart,
        flow: StochasticFlow,
        x: Array,
        key: PRNGKeyArray,
        coarse: AbstractDriver | None = None,
    ):
        x = jnp.asarray(x)
        check_vector("x", x, flow.dimension)
        check_finite("x", x)
        if not x.size:
            raise ValueError(f"x holds no points, its shape is {x.shape}")
        estimator.check(flow)
        start = estimator.starts(x)
        self.batch = x.shape[:-1]
        flat = lambda a: jnp.reshape(a, (-1, flow.dimension))
        self.estimator, self.flow, self.coarse = estimator, flow, coarse
        base = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
        to_dtype = lambda a: flat(a).astype(jnp.result_type(x, base))
        self.target = jax.tree.map(to_dtype, Target(x, start))
        # Random numbers belong to a point's place in x, so that chunks do not change them.
        self.keys = jax.random.split(check_key(key), math.prod(self.batch))
        self.group = estimator.proposal.draws.group(estimator.num_paths)
        latent = Latent(flow, fixed_start=start is not None)
        self.pairs = max(1, min(PAIRS, NUMBERS // max(1, flow.dimension * latent.size)))
        everyone = np.arange(len(self.keys))
        laws = [self._law(rows) for rows in _chunks(everyone, max(1, self.pairs // 64))]
        try:
            self.law: AbstractLaw = estimator.verify(jax.tree.map(lambda *a: jnp.concatenate(a), *laws))
        except ValueError:
            self._find_not_finite()
            raise

    def widen(self, where: Array) -> None:
        self.law = self.law.widen(where)

    def all_log_weights(self) -> Array:
        """Log-weights `(B, K)` of the first K paths of every point."""
        return self.log_weights(np.arange(len(self.keys)), np.zeros(len(self.keys), int))

    def log_weights(self, points: np.ndarray, first: np.ndarray) -> Array:
        """Log-weights `(len(points), K)` of K paths for some of the points, by place in x; the paths of
        a point are the K from its place `first` on in its sequence of paths."""
        count = self.estimator.num_paths
        each = min(count, self.pairs)
        parts = math.ceil(count / each)
        rows = np.repeat(points, parts)
        places = np.repeat(first, parts) + np.tile(np.arange(parts) * each, len(points))
        jobs = np.arange(len(rows))
        weights = [
            self._weights(rows[job], places[job], each) for job in _chunks(jobs, max(1, self.pairs // each))
        ]
        return jnp.reshape(jnp.concatenate(weights), (len(points), parts * each))[:, :count]

    def _law(self, rows: np.ndarray) -> AbstractLaw:
        padded = self._padded(rows)
        law = self._run(_law, self.estimator, self.flow, _take(self.target, padded), self.keys[padded])
        return jax.tree.map(lambda a: a[: len(rows)], law)

    def _weights(self, rows: np.ndarray, places: np.ndarray, count: int) -> Array:
        padded = self._padded(rows)
        target, law = _take(self.target, padded), _take(self.law, padded)
        first = jnp.asarray(self._padded(places))
        setting = (self.estimator, self.flow, self.coarse)
        weights = self._run(_weights, *setting, target, law, self.keys[padded], first, count, self.group)
        return weights[: len(rows)]

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

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """The rows, repeated up to a power of two: few shapes, so few compilations."""
        if is_traced(self.target.x):
            return rows  # inside a jit this is compiled in any case
        return np.resize(rows, 2 ** math.ceil(math.log2(len(rows))))


@eqx.filter_jit
def _law(estimator: AbstractChart, flow: StochasticFlow, target: Target, keys: PRNGKeyArray) -> AbstractLaw:
    latent = Latent(flow, fixed_start=target.start is not None)
    # Path numbers are folded into a key from 0 on; the search takes the last.
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 1))(keys)
    return estimator.proposal.law(latent, target, keys, lambda mode: estimator.rows(latent, target, mode))


@eqx.filter_jit
def _weights(
    estimator: AbstractChart, flow, coarse, target, law, keys, first, count: int, group: int
) -> Array:
    latent = Latent(flow, fixed_start=target.start is not None)
    places = first[:, None] + jnp.arange(count)[None]
    noise = _noise(estimator.proposal.draws, latent, coarse, keys, places, group, target.x.dtype)
    delta = law.sample(noise)
    flat = lambda a: jnp.reshape(a, (-1, a.shape[-1]))
    own = jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), 1))(at))
    log_joint = estimator.log_joint(
        flow,
        latent,
        target.repeat(count),
        jnp.repeat(law.rows, count, axis=0),
        flat(delta),
        flat(law.guess(delta)),
        jnp.reshape(own(keys, places), (-1,)),
    )
    return jnp.reshape(log_joint, places.shape) - law.log_prob(delta)


def _noise(draws, latent: Latent, coarse: AbstractDriver | None, keys, places, group, dtype) -> Array:
    """Standard normal numbers `(B, K, D + SPARE)`."""
    normal = lambda keys, size: jax.vmap(lambda key, at: draws.normal(key, at, group, size, dtype))(
        keys, places
    )
    if coarse is None:
        return normal(keys, latent.size + SPARE)
    coarser = Latent(latent.flow.with_driver(coarse), fixed_start=latent.fixed_start)
    shared = normal(keys, coarser.size + SPARE)
    fresh = jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 2))(keys)
    more = normal(fresh, coarser.size - coarser.start_size)
    return jnp.concatenate([coarser.refine(shared[..., :-SPARE], more), shared[..., -SPARE:]], axis=-1)


def _take(tree, rows: np.ndarray):
    return jax.tree.map(lambda a: a[rows], tree)


def _chunks(items: np.ndarray, size: int) -> list[np.ndarray]:
    return [items[i : i + size] for i in range(0, len(items), size)]
