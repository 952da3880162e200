"""Weights of paths for a set of points: in chunks that fit in memory, with numbers that do not depend on
the chunks."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ..._checks import NonFiniteError, as_real, check_finite, check_key, check_vector, is_traced
from ..._programs import runs_long
from ...driver import AbstractDriver
from ...flow import StochasticFlow, one_line_errors
from ..surface import Target, constant
from ._chart import AbstractChart, AbstractImprovingChart, AbstractRemedy, Weights
from ._chunks import Chunk, chunks, cut, padded
from ._run_programs import (
    SEARCH_PATHS,
    Drawn,
    decide,
    drawn_of,
    forward_draws,
    improve,
    keys_of_points,
    look_at_errors,
    points_of,
    prepare,
    weigh,
)

PAIRS = 2**17  # of a point and a path that are solved together
NUMBERS = 2**26  # that a chunk's directions and components may take up
LONG = 128  # points whose work takes longer than to compile it well
MANY = 4  # times the paths of the trial: up to so many are drawn in parts as large as the trial


class Weighed(NamedTuple):
    """What became of the paths of B points: log-weights `(B, K)`, as they were at first (`plain`) and
    with those improved that the distribution said would be poor; the place of the `remedy` that did it,
    -1 for none, and where paths may be missed (`doubt`); and, where that was looked at, the change of
    log p(x) when the solver's steps are halved, and what a random divergence adds, `(B,)` all."""

    log_weights: Array
    plain: Array
    remedy: Array
    doubt: Array
    solver_error: Array | None
    divergence_error: Array | None

    @property
    def poor(self) -> Array:
        return self.remedy >= 0


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
        x = as_real("x", x)
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
        # As `Latent.size`: to make one compiles programs.
        size = flow.driver.num_functions * flow.noise_dimension + (flow.dimension if start is None else 0)
        self.pairs = max(1, min(PAIRS, NUMBERS // max(1, max(flow.dimension, 8) * size)))
        # Inside a jit the number of points is compiled in, and derivatives are better off without loops.
        known = not is_traced(jnp.asarray(0.0))
        self.straight = not known or any(map(is_traced, jax.tree.leaves((estimator, flow, x, key))))
        flat = lambda a: jnp.reshape(a, (-1, flow.dimension))
        self.target = self.padded(jax.tree.map(flat, Target(x, start)))
        # Random numbers belong to a point's place in x: neither chunks nor what fills them up change them.
        # Points that are part of a batch, in a fit on several devices, come with keys of their own.
        self.key = check_key(key, many=self.straight)
        self.keys, self.trial_keys = keys_of_points(self.key, len(self.target.x))
        self.group = estimator.proposal.draws.group(estimator.num_paths)
        # Of the points in their order, and then of some once more.
        self.distribution = self._found()
        if estimator.num_tried:
            self.distribution = _joined([self._decided(chunk) for chunk in self._every_chunk()])
        try:
            self.distribution = estimator.settled(self.distribution)
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
        drawn = drawn_of(self._drawn(chunk, first, count))
        plain, errors = drawn.log_weights, (None, None)
        # Two drivers are compared path by path.
        remedies = ()
        if isinstance(self.estimator, AbstractImprovingChart) and self.coarse is None:
            remedies = self.estimator.remedies(self.flow)
        at, poor = points_of(remedies, self.distribution, plain if again else None, chunk.indices)
        if remedies:
            self.distribution = eqx.tree_at(lambda d: d.poor, self.distribution, poor)
        for place, remedy in enumerate(remedies):
            drawn = self._improved(remedy, place, at[place], drawn, chunk, first)
        if checked:
            errors = self._errors(self.estimator, drawn, chunk)
            for place, remedy in enumerate(remedies[1:], 1):
                errors = self._other_errors(remedy, place, drawn, chunk, errors)
        return Weighed(drawn.log_weights, plain, drawn.remedy, drawn.doubt, *errors)

    def _found(self):
        """What the trial's paths are drawn from, or all of them if there is none."""
        cloud = None
        if self.estimator.proposal.wants_cloud and self.target.start is None:
            cloud = self._run(forward_draws, self.flow, self.key, self.target.x.dtype)
        ask = (self.estimator, self.flow, self.target, self.trial_keys, cloud)
        return _joined([self._run(prepare, *ask, chunk) for chunk in self._every_chunk()])

    def _decided(self, chunk: Chunk):
        """What paths are drawn from, by what a few look like that do not count."""
        flow, target = self.flow, self.target
        if self.straight or self.estimator.shows_failures:
            flow = flow.without_errors()
        if self.straight:
            flow, target = constant((flow, target))
        first = np.zeros(len(chunk.indices), int)
        setting = (self.coarse, target, self.distribution, self.trial_keys, chunk)
        trial = self._run(weigh, self.estimator, flow, *setting, first, self.estimator.num_tried, self.group)
        return self._run(decide, self.estimator, flow, self.distribution, trial, chunk)

    def _drawn(self, chunk: Chunk, first: np.ndarray, count: int) -> list[Weights]:
        """Paths and their weights; as many at once as in the trial if they are not MANY times more: one
        program serves both.

        A program that may raise takes longer to compile, and JAX's cache on disk does not keep it: so first
        without errors, and again to raise where a weight is not a number."""
        tried = self.estimator.num_tried
        shared = tried and count % tried == 0 and count <= MANY * tried and not self.straight
        each = tried if shared else count
        setting = (self.coarse, self.target, self.distribution, self.keys, chunk)
        draw = lambda flow: [
            self._run(weigh, self.estimator, flow, *setting, first + place, each, self.group)
            for place in range(0, count, each)
        ]
        if self.straight or not self.estimator.shows_failures:
            return draw(self.flow)
        drawn = draw(self.flow.without_errors())
        fine = not any(is_traced(part.log_weights) or np.isnan(part.log_weights).any() for part in drawn)
        return drawn if fine else draw(self.flow)

    def _improved(
        self,
        remedy: AbstractRemedy,
        place: int,
        where: Array,
        drawn: Drawn,
        chunk: Chunk,
        places: np.ndarray,
    ) -> Drawn:
        """Better weights `where` they are poor: of all if it is not known where, as inside a jit."""
        if is_traced(where):
            which = Chunk.whole(np.arange(len(chunk.indices)))
        else:
            poor = np.flatnonzero(np.asarray(where)[: chunk.known])
            if not poor.size:
                return drawn
            if self.straight:
                which = Chunk.whole(np.resize(poor, 2 ** math.ceil(math.log2(len(poor)))))
            else:
                (which,) = self._chunks(poor, drawn.log_weights.shape[1])
        setting = (remedy, self.flow, self.target, self.distribution, self.keys)
        return self._run(improve, *setting, chunk.indices, places, drawn, where, place, which)

    def _errors(self, chart: AbstractChart | AbstractRemedy, drawn: Drawn, chunk: Chunk):
        return self._run(look_at_errors, chart, self.flow, self.target, self.distribution, chunk, drawn.few)

    def _other_errors(self, remedy: AbstractRemedy, place: int, drawn: Drawn, chunk: Chunk, errors):
        """The errors, with those of paths in other coordinates in their place."""
        if not is_traced(drawn.remedy) and not np.any(np.asarray(drawn.remedy) == place):
            return errors
        where, other = drawn.remedy == place, self._errors(remedy, drawn, chunk)
        return jax.tree.map(lambda new, old: jnp.where(where, new, old), other, errors)

    def _run(self, function, *arguments):
        """Call a jitted function; its errors are one line, and name the part of the model to blame."""
        try:
            with one_line_errors(), runs_long(self.size >= LONG):
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

    def _every_chunk(self) -> list[Chunk]:
        return self._chunks(np.arange(self.size), SEARCH_PATHS)

    def _chunks(self, items: np.ndarray, each: int) -> list[Chunk]:
        return chunks(items, self.pairs // each, self.straight)


def _joined(parts: list):
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
