"""Weights of paths, each by one solve backwards from x, and what they say about log p(x)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_real, check_count, check_finite, check_key, check_vector, is_traced
from .._linear import solve
from .._programs import jit
from ..driver import KarhunenLoeve, Legendre
from ..faq import see
from ..flow import (
    AbstractStochasticFlow,
    CountedGrid,
    ExactDivergence,
    FixedGrid,
    HutchinsonDivergence,
    one_line_errors,
)
from ..sde import ExactCorrection
from ._draws import AbstractDraws
from ._estimate import AbstractEstimator, Accuracy, Estimate, effective_paths, pareto_k, weights_error
from ._modes import Cloud, constant, refined_driver
from ._proposals import AbstractProposal, Mixture, Prior, log_standard

MAX_EXACT_DIMENSION = 64  # for exact divergences in place of random probes
PATHS_PER_ROW = 16  # of one point
ROWS = {"cpu": (4096,), "gpu": (64, 512, 16384)}  # per program call
SOLVES_PER_BLOCK = {"cpu": 2**9, "gpu": 2**15}  # integrated as one state
MAX_NUMBERS = 2**26  # floating-point numbers per program call
GROWTH = 4  # factor between the numbers of paths of two rounds
CLOUD_KEY = 2**31 + 1  # folded into the key of forward draws
CHECKED_SHARE = 16  # one path in so many is also solved at a finer level,
FEW_CHECKED = 32  # and at least so many
SUMMARISED = 1024  # points per program call, on a GPU
Parts = dict[str, np.ndarray]  # of an `Estimate`


def log_joint(flow: AbstractStochasticFlow, x: Array, omega: Array, keys: PRNGKeyArray | None) -> Array:
    """log p(x | ω) φ(ω) `(B, K)` for x `(B, d)` and ω `(B, K, W)`; −inf where the backward solve escapes."""
    return log_given(flow, x, coefficients_of(flow, omega), keys) + log_standard(omega)


def log_given(
    flow: AbstractStochasticFlow, x: Array, coefficients: Array, keys: PRNGKeyArray | None
) -> Array:
    path = flow.driver.path(coefficients, flow.t1)
    return flow.log_prob_given_path(x[:, None], path, key=keys)


def coefficients_of(flow: AbstractStochasticFlow, omega: Array) -> Array:
    return jnp.reshape(omega, (*omega.shape[:-1], flow.driver.num_functions, flow.noise_dimension))


def solve_keys(flow: AbstractStochasticFlow, keys: PRNGKeyArray, places: Array) -> PRNGKeyArray | None:
    """Keys `(B, K)` for solves with a random divergence, from one key for each point and the places of paths
    `(B, K)`; none if it is exact."""
    if isinstance(flow.divergence, ExactDivergence) and isinstance(flow.correction, ExactCorrection):
        return None
    own = jax.vmap(lambda key: jax.random.fold_in(key, 2**31))(keys)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(own, places)


def exact(flow: AbstractStochasticFlow) -> AbstractStochasticFlow:
    """With the exact divergence where a density is worth it: probes are for training."""
    if isinstance(flow.divergence, HutchinsonDivergence) and flow.dimension <= MAX_EXACT_DIMENSION:
        return eqx.tree_at(lambda f: f.divergence, flow, ExactDivergence())
    return flow


class Level(NamedTuple):
    """How finely weights are solved: the flow, a factor on the coefficients of functions that are added to
    the driver, and the number of steps of a fixed grid. Both numbers are arguments of a program, so that one
    serves all levels; but it has no derivatives backwards. Without `fine` the flow is solved as it is.
    """

    flow: AbstractStochasticFlow
    fine: Any = None
    each: Any = None

    def solved(self, x: Array, omega: Array, more: Array, keys: PRNGKeyArray | None) -> Array:
        """log p(x | ω) `(B, K)`; `more` are the coefficients of the functions that are added."""
        flow, coefficients = self.flow, coefficients_of(self.flow, omega)
        if self.fine is None:
            return log_given(flow, x, coefficients, keys)
        refined = refined_driver(flow)
        if refined is not None:
            more = coefficients_of(flow, more) * jnp.asarray(self.fine, more.dtype)
            coefficients = flow.driver.refine(coefficients, more)
            flow = flow.with_driver(refined)
        if isinstance(flow.integrator, FixedGrid):
            counted = CountedGrid.of(flow.integrator, self.each)
            flow = eqx.tree_at(lambda f: f.integrator, flow, counted)
        return log_given(flow, x, coefficients, keys)


class Levels:
    """The levels of a flow: its `own`; `stepped`, with steps half as long; and `finer`, with twice the
    driver's functions as well, if it can be refined, with their coefficients or, `mirrored`, minus those."""

    def __init__(self, flow: AbstractStochasticFlow):
        self.flow = exact(flow).without_errors()
        grid, refined = flow.integrator, refined_driver(flow)
        pieces = (flow.driver if refined is None else refined).jumps.size + 1
        each = 0
        if isinstance(grid, FixedGrid):
            each = max(1, math.ceil(grid.count(flow.driver, flow.noise_dimension) / pieces))
        finer = self.flow if each else self.flow.with_finer_steps()
        level = lambda fine: Level(finer, np.float32(fine), np.int32(2 * each))
        self.own = Level(self.flow, np.float32(0), np.int32(each))
        self.stepped, self.finer, self.mirrored = level(0), level(1), level(-1)


def coarser(flow: AbstractStochasticFlow) -> AbstractStochasticFlow:
    """The flow with half the driver's functions and half the steps, so that its finer level is the flow.

    Most of log p is the same there, at a quarter of the time; the difference needs few paths (multilevel
    Monte Carlo, Giles 2008).
    """
    driver, grid = flow.driver, flow.integrator
    if isinstance(grid, FixedGrid):
        steps = -(-grid.count(driver, flow.noise_dimension) // 2)
        flow = eqx.tree_at(lambda f: f.integrator, flow, grid.with_steps(steps))
    if isinstance(driver, KarhunenLoeve | Legendre):
        flow = flow.with_driver(type(driver)(-(-driver.num_functions // 2)))
    return flow


def draw(
    level: Level,
    x: Array,
    keys: PRNGKeyArray,
    mixture: Mixture | None,
    draws: AbstractDraws,
    places: Array,
    most: int,
) -> tuple[Array, Array | None]:
    """Log-weights `(B, K)` of the paths at `places` `(B, K)` of each point's sequence, and what components
    have of the mixture's density, `(B, K, M + 1)`. To be part of a program."""
    flow = level.flow
    size = flow.driver.num_functions * flow.noise_dimension
    first = size if mixture is None else mixture.num_normals
    # Numbers of the refinement come last, where a sequence is least even, and where there are none too.
    number = lambda key, at: draws.normal(key, at, most, first + size, x.dtype)
    noise, more = jnp.split(jax.vmap(number)(keys, places), [first], axis=-1)
    solves = solve_keys(flow, keys, places)
    if mixture is None:
        return level.solved(x, noise, more, solves), None
    omega = mixture.sample(noise)
    components = mixture.log_components(omega)
    density = jax.nn.logsumexp(components, axis=-1)
    # A mixture may have the coefficients of the refinement too.
    own, added = jnp.split(omega, [size], axis=-1)
    solved = level.solved(x, own, added if added.size else more, solves)
    weights = solved + log_standard(omega) - density
    return weights, jnp.exp(components - density[..., None])


def update_where(chosen: Array, function, batch: Any, old: Any, block: int) -> Any:
    """`old`, with the entries that are `chosen` replaced by `function(batch)`.

    `batch` and `old` are pytrees with one entry of the leading axis per point. The chosen ones are gathered
    `block` at a time, in a loop on the device that ends with the last of them: which they are need not be
    known when the program is compiled, so the same work is done inside a `jit` and outside.
    """
    size = len(chosen)
    if block >= size:
        keep = lambda new, old: jnp.where(jnp.expand_dims(chosen, range(1, new.ndim)), new, old)
        return jax.tree.map(keep, function(batch), old)
    order = jnp.concatenate([jnp.argsort(~chosen), jnp.zeros(block, int)])
    count = jnp.sum(chosen)

    def step(i: Array, new: Any) -> Any:
        places = jax.lax.dynamic_slice_in_dim(order, i * block, block)
        result = function(jax.tree.map(lambda a: a[places], batch))
        # Entries beyond the last chosen one are written to no place.
        target = jnp.where(i * block + jnp.arange(block) < count, places, size)
        return jax.tree.map(lambda a, b: a.at[target].set(b, mode="drop"), new, result)

    return jax.lax.fori_loop(0, -(-count // block), step, old)


class Points:
    """Points x, outside a `jit`: rows of programs that all points and rounds share.

    Random numbers belong to the key and to a point's place in x: neither the rows that are solved together
    nor what fills them up changes them.
    """

    def __init__(self, flow: AbstractStochasticFlow, x: np.ndarray, key: PRNGKeyArray):
        self.levels, self.x, self.key = Levels(flow), x, key
        self.size = flow.driver.num_functions * flow.noise_dimension

    def run(self, program, points: np.ndarray, others: Any, columns: int = PATHS_PER_ROW) -> Any:
        """`program(x, key, places, others, here, block)` for these points, a chunk of rows at a time.

        `others` have one entry for each of the points, `here` says which rows count, and `block` of them are
        solved together."""
        each = sum(np.size(leaf[0]) for leaf in jax.tree.leaves(others)) + columns * (
            len(self.x[0]) + self.size
        )
        device = "cpu" if jax.default_backend() == "cpu" else "gpu"
        rows = max(1, min(ROWS[device][-1], MAX_NUMBERS // each))
        # A few sizes, so that few points take little time on a GPU, and others do not need other programs.
        rows = next((size for size in ROWS[device] if len(points) <= size < rows), rows)
        block, parts = max(1, min(rows, SOLVES_PER_BLOCK[device] // columns)), []
        for begin in range(0, len(points), rows):
            some = slice(begin, begin + rows)
            count = len(points[some])
            fill, here = np.resize(np.arange(count), rows), np.arange(rows) < count
            own = jax.tree.map(lambda a, some=some, fill=fill: np.asarray(a)[some][fill], others)
            places = points[some][fill].astype(np.uint32)
            with one_line_errors():
                done = program(self.x[places], self.key, places, own, here, block)
            parts.append(jax.tree.map(lambda a, count=count: np.asarray(a)[:count], done))
        return jax.tree.map(lambda *a: np.concatenate(a), *parts)


def point_keys(key: PRNGKeyArray, places: Array) -> PRNGKeyArray:
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(places)


@partial(jit, level=1)
def _weigh(level: Level, draws: AbstractDraws, most: int, x, key, places, others, here, block: int):
    """Log-weights of rows of paths, and the components' shares of the density they are drawn from."""

    def some(given):
        x, place, (mixture, at) = given
        return draw(level, x, point_keys(key, place), mixture, draws, at, most)

    mixture, at = others
    blank = jnp.zeros(at.shape, x.dtype)
    shares = None if mixture is None else jnp.zeros((*at.shape, mixture.log_share.shape[1] + 1), x.dtype)
    return update_where(here, some, (x, places, others), (blank, shares), block)


class Rounds:
    """Weights of paths for some points, drawn from the prior or a mixture, round by round.

    `coarse` `(P, K)` are those at the flow's own level, `fine` `(P, K′)` of the first K′ paths the means over
    the levels `checks`, `stepped` `(P, K″)` of the first row with finer steps only, if there are checks, and
    `shares` `(P, K, M + 1)` those of the mixture's components in its density.

    What added functions change along a path is mostly odd in their coefficients. So the mean over both signs
    varies less: by .031 of p(x) where one sign has .081 and p(x | path) itself .76 (a neural SDE with noise
    .9), .003 beside .032 in the README's example (antithetic coupling, Giles & Szpruch 2014).
    """

    def __init__(
        self,
        points: Points,
        which: np.ndarray,
        draws: AbstractDraws,
        mixture: Mixture | None,
        most: int,
        level: Level,
        checks: tuple[Level, ...] = (),
    ):
        self.points, self.which, self.draws, self.mixture, self.most = points, which, draws, mixture, most
        self.level, self.checks, self.columns = level, checks, min(PATHS_PER_ROW, most)
        self.coarse = self.fine = self.stepped = np.zeros((len(which), 0), points.x.dtype)
        self.shares: np.ndarray | None = None if mixture is None else np.zeros((len(which), 0, 0))

    def grow(self, total: int) -> None:
        """Draw up to `total` paths per point, and solve some of them, at least a row, at the finer level."""
        now, had = self.coarse.shape[1], self.fine.shape[1]
        new, shares = self._weights(self.level, now, total)
        self.coarse = np.concatenate([self.coarse, new], axis=1)
        if self.shares is not None and shares is not None:
            self.shares = shares if not now else np.concatenate([self.shares, shares], axis=1)
        wanted = checked_paths(total)
        if self.checks and wanted > had:
            fine = [self._weights(level, had, wanted)[0] for level in self.checks]
            mean = np.logaddexp.reduce(fine) - np.log(len(fine)).astype(self.fine.dtype)
            self.fine = np.concatenate([self.fine, mean], axis=1)
        if len(self.checks) > 1 and not now:
            self.stepped = self._weights(self.points.levels.stepped, 0, self.columns)[0]

    def keep(self, some: np.ndarray) -> None:
        """Continue with a subset of the points."""

        def take(a: Any) -> Any:
            return None if a is None else a[some]

        for name in ("which", "coarse", "fine", "stepped", "shares"):
            setattr(self, name, take(getattr(self, name)))
        self.mixture = jax.tree.map(take, self.mixture)

    def step_change(self) -> np.ndarray:
        """Root mean square of what finer steps change of log p(x | path), `(P,)`; one at most, and times the
        eighth root of p(x | path)/p(x) where that is less than one: badly solved paths of 1 % of p(x) matter,
        those that lead nowhere near the base do not."""
        if not self.stepped.size:
            return np.zeros(len(self.which))
        shift = np.logaddexp.reduce(self.coarse, axis=1, keepdims=True) - np.log(self.coarse.shape[1])
        old, new = self.coarse[:, : self.stepped.shape[1]], self.stepped
        with np.errstate(invalid="ignore"):
            change = np.minimum(np.nan_to_num(np.abs(new - old)), 1)
            share = np.exp(0.125 * np.minimum(np.nan_to_num(np.maximum(new, old) - shift, nan=-np.inf), 0))
        return np.sqrt(np.mean((change * share) ** 2, axis=1))

    def parts(self, corrected: bool) -> Parts:
        """Parts of an `Estimate` from the weights so far."""
        means = None if self.mixture is None else self.mixture.shares()
        parts = (self.coarse, self.fine, self.shares, means)
        if jax.default_backend() == "cpu":
            double = (None if part is None else part.astype(float) for part in parts)
            return summary(self.draws, *double, corrected=corrected)
        found, size = [], len(self.which)
        for begin in range(0, size, SUMMARISED):
            count = min(SUMMARISED, size - begin)
            fill = begin + np.arange(SUMMARISED) % count
            done = _summary(self.draws, corrected, jax.tree.map(lambda a, fill=fill: a[fill], parts))
            found.append(jax.tree.map(lambda a, count=count: np.asarray(a)[:count], done))
        parts = jax.tree.map(lambda *a: np.concatenate(a), *found)
        return {name: a.astype(float) if a.dtype.kind == "f" else a for name, a in parts.items()}

    def _weights(self, level: Level, first: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Of the paths at places from `first` to `stop`, in rows of `columns`."""
        starts = np.arange(first, stop, self.columns)
        rows = np.repeat(np.arange(len(self.which)), len(starts))
        places = np.tile(starts, len(self.which))[:, None] + np.arange(self.columns)
        mixture = jax.tree.map(lambda a: np.asarray(a)[rows], self.mixture)
        program = partial(_weigh, level, self.draws, self.most)
        given = (mixture, np.minimum(places, self.most - 1).astype(np.int32))
        weights, shares = self.points.run(program, self.which[rows], given, self.columns)
        if np.isnan(weights).any():
            explain_failure(self.points.levels.flow, self.points.x)
        joined = lambda a: a.reshape(len(self.which), -1, *a.shape[2:])[:, : stop - first]
        return joined(weights), None if shares is None else joined(shares)


def grown(rounds: Rounds, total: int, corrected: bool, ends: Callable[[Parts, int], np.ndarray]) -> Parts:
    """Parts of an `Estimate` in the order of the points: four times as many paths each time, until
    `ends(parts, total)` says that those of a point are enough."""
    order, done = rounds.which, []
    while len(rounds.which):
        rounds.grow(total)
        parts = rounds.parts(corrected)
        enough = ends(parts, total)
        done.append((rounds.which[enough], {name: part[enough] for name, part in parts.items()}))
        rounds.keep(~enough)
        total *= GROWTH
    places = np.argsort(np.concatenate([which for which, _ in done]))[np.argsort(np.argsort(order))]
    return {name: np.concatenate([parts[name] for _, parts in done])[places] for name in done[0][1]}


@partial(jit, level=1)
def _summary(draws: AbstractDraws, corrected: bool, parts: Any) -> dict[str, Array]:
    return summary(draws, *parts, corrected=corrected, xp=jnp)


def checked_paths(total: int) -> int:
    """Number of paths that are also solved at a finer level."""
    return min(total, max(FEW_CHECKED, total // CHECKED_SHARE))


def explain_failure(flow: AbstractStochasticFlow, x: Any) -> None:
    """Solve outside a jit, where an error can say which part of the model is not finite, and where."""
    flow = eqx.tree_at(lambda f: f.raises, flow, True)
    paths = flow.sample_path(key=jax.random.key(0), shape=(64, 1))
    key = jax.random.key(1)
    flow.pull_back(jnp.asarray(x[:64]), paths, key=key)
    flow.push_forward(flow.base.sample(key=key, shape=(64,)), paths, key=key)


def summary(
    draws: AbstractDraws, coarse: Any, fine: Any, shares: Any, means: Any, *, corrected: bool, xp: Any = np
) -> dict[str, Any]:
    """Parts of an `Estimate` from weights as `Rounds` has them: `(P, K)`, `(P, K′)`, `(P, K, M + 1)`; `means`
    `(P, M + 1)` are those of the shares.

    The finer level changes log p by Δ. The remaining error is Δ if the error falls as 1/n, and zero if
    it falls fast. `corrected` adds 3Δ/2 to log p, the middle, with error Δ/2, for draws with as many terms
    for any K; without it the error is 2Δ.
    """
    still = jax.lax.stop_gradient if xp is jnp else lambda a: a  # only the mean weight has derivatives
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = still(xp.max(coarse, axis=1))
        shift = xp.where(xp.isfinite(top), top, 0)
        weights = xp.exp(coarse - shift[:, None]).T
        some = xp.any(weights > 0, axis=0)
        unit = still(xp.where(some, xp.mean(weights, axis=0), 1))
        relative = weights / unit[None]
        own = relative if shares is None else _regressed(relative, shares, means, still, xp)
        terms = draws.terms(own)
        base = xp.where(some, xp.mean(terms, axis=0), 1)
        terms, mean, change = still(terms), still(base), xp.zeros_like(unit)
        variance = weights_error(terms / mean[None], xp) ** 2
        # The logarithm of a mean is low by half its variance.
        bias = 0.5 * xp.minimum(xp.var(terms / mean[None], axis=0) / max(len(terms) - 1, 1), 1)
        if fine.shape[1]:
            finer = xp.exp(xp.minimum(fine - shift[:, None], 80)).T / unit[None]
            differences = draws.terms(still(finer - relative[: fine.shape[1]]))
            total = mean + xp.mean(differences, axis=0)
            # Where so few paths say that nothing is left, the finer ones alone do.
            total = xp.where(total > 0, total, still(xp.mean(finer, axis=0)))
            change = xp.log(total / mean)
            if corrected:  # both have as many independent terms
                variance = weights_error((terms + 1.5 * differences) / total[None], xp) ** 2
        value = xp.log(base * unit) + shift + (1.5 * still(change) if corrected else 0)
        return {
            "log_prob": xp.where(some, value + still(bias), -xp.inf),
            "standard_error": xp.where(some, xp.sqrt(variance), xp.inf),
            "truncation_error": xp.where(some, xp.abs(change) * (0.5 if corrected else 2), xp.inf),
            "effective_paths": effective_paths(still(weights), xp),
            "num_paths": xp.full(unit.shape, coarse.shape[1]),
            "escaped": xp.sum(xp.isneginf(coarse), axis=1),
            "pareto_k": pareto_k(still(weights), xp),
        }


def _regressed(weights: Any, shares: Any, means: Any, still: Any, xp: Any) -> Any:
    """Weights `(K, P)` less their regression on what each component has of the density they were drawn from,
    whose mean is known (Owen & Zhou 2000).

    Not where there are more than a quarter as many components as paths, or where the rest has no positive
    mean.
    """
    offset = xp.moveaxis(shares, 1, 0) - means[None]  # (K, P, M + 1)
    centred = offset - xp.mean(offset, axis=0)[None]
    gram = xp.einsum("kpi,kpj->pij", centred, centred)
    ridge = 100 * xp.finfo(gram.dtype).eps * xp.trace(gram, axis1=1, axis2=2) + 1e-30
    right = xp.einsum("kpi,kp->pi", centred, still(weights))
    gram = gram + ridge[:, None, None] * xp.eye(gram.shape[1], dtype=gram.dtype)[None]
    solved = np.linalg.solve if xp is np else solve
    slope = solved(gram, right[..., None])[..., 0]
    live = xp.sum(means > 0, axis=1)
    rest = weights - xp.einsum("kpi,pi->kp", offset, slope)
    mean = xp.mean(rest, axis=0)
    good = (live <= len(weights) / 4) & still(mean > 0)
    # So many coefficients were fitted.
    wider = xp.sqrt(len(weights) / xp.maximum(len(weights) - live, 1))
    return xp.where(good[None], mean[None] + (rest - mean[None]) * wider[None], weights)


class PullBack(AbstractEstimator):
    """p(x) = E p(x | path) (Hodgkinson et al. 2020), over paths ω drawn from a proposal q:

        p(x) = E [ p(x | ω) φ(ω) / q(ω) ],

    each weight by one solve backwards from x: each path has exactly one start, so no path to x
    is missed. Unbiased for p(x), for any noise, and cheap per path. If p(x | ω) is concentrated, the weights
    of paths from `rf.Prior()`, the default, are uneven, and paths whose backward solve diverges are lost:
    check `effective_paths`. `rf.Laplace()` draws paths around the most likely ones.

    The value is that for the given driver and steps; `truncation_error` is twice the change when both are
    doubled.
    With `rf.HutchinsonDivergence`, taken exactly here in up to 64 dimensions, log p(x | ω) is unbiased, and
    p(x | ω) is not: `Estimate.divergence_error` says how much that may be.

    **Arguments:** `num_paths`, the number of paths per point, or of the first round if a `tolerance` is set;
    `proposal`, `rf.Prior()`, `rf.Laplace()` or an `rf.Amortised(...)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.PullBack(num_paths=1000))
    estimate.log_prob, estimate.standard_error
    ```
    """

    num_paths: int = eqx.field(
        static=True, converter=lambda count: check_count("num_paths", count), default=1000
    )
    proposal: AbstractProposal = Prior()

    def estimate(
        self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy
    ) -> Estimate:
        x = checked_points(flow, x)
        self.proposal.draws.check(self.num_paths)
        if is_inside_jit(self, flow, x, key):
            return self._traced(flow, x, key, accuracy)
        points = Points(flow, np.asarray(x).reshape(-1, x.shape[-1]), check_key(key))
        which, tolerance, most = np.arange(len(points.x)), accuracy.tolerance or np.inf, self.num_paths
        if accuracy.tolerance is not None:
            most = max(most, accuracy.max_paths)
        mixture, levels = mixtures(self.proposal, points, which), points.levels
        rounds = Rounds(points, which, self.proposal.draws, mixture, most, levels.own, (levels.finer,))
        unmet = lambda parts: parts["standard_error"] + parts["truncation_error"] > tolerance
        parts = grown(rounds, self.num_paths, False, lambda a, total: ~unmet(a) | (GROWTH * total > most))
        return estimate_of({**parts, "unmet": unmet(parts)}, x.shape[:-1], x.dtype)

    def log_weights(
        self, flow: AbstractStochasticFlow, x: Array, keys: PRNGKeyArray, places: Array, most: int
    ) -> Array:
        """Log-weights `(B, K)` of the paths at `places` `(B, K)` of each point's sequence, all below `most`,
        with derivatives; one key for each point of x `(B, d)`. To be part of a program."""
        mixture = mixture_of(self.proposal, exact(flow), x, keys[0])
        return draw(Level(exact(flow)), x, keys, mixture, self.proposal.draws, places, most)[0]

    def _traced(self, flow, x: Array, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        refuse_tolerance(accuracy)
        flow, flat, count = exact(flow), jnp.reshape(x, (-1, x.shape[-1])), self.num_paths
        keys = key if key.ndim else point_keys(key, jnp.arange(len(flat)))
        places = jnp.broadcast_to(jnp.arange(count), (len(flat), count))
        mixture = mixture_of(self.proposal, flow, flat, keys[0])
        ask = (keys, mixture, self.proposal.draws, places)
        estimate = traced_estimate(flow, flat, *ask, accuracy.errors)
        return jax.tree.map(lambda a: jnp.reshape(a, x.shape[:-1]), estimate)


def traced_estimate(
    flow: AbstractStochasticFlow,
    x: Array,
    keys: PRNGKeyArray,
    mixture: Mixture | None,
    draws: AbstractDraws,
    places: Array,
    errors: bool,
    corrected: bool = False,
) -> Estimate:
    """The estimate from the paths at `places` `(B, K)`, inside a compiled program. Error bars have no
    derivatives, and cost nothing if they are not used."""
    count, some = places.shape[1], places[:, : checked_paths(places.shape[1])]
    weights, shares = draw(Level(flow), x, keys, mixture, draws, places, count)
    finer, (x, keys, mixture) = Levels(constant(flow)).finer, constant((x, keys, mixture))
    fine = weights[:, :0]
    if errors or corrected:
        fine, _ = draw(finer, x, keys, mixture, draws, some, count)
    means = None if mixture is None else mixture.shares(jnp)
    parts = summary(draws, weights, fine, shares, means, corrected=corrected, xp=jnp)
    return Estimate.of(parts.pop("log_prob"), "paths", **constant(parts))


def mixture_of(proposal: AbstractProposal, flow, x: Array, key: PRNGKeyArray) -> Mixture | None:
    """The proposal's distribution, as part of a program."""
    cloud = Cloud.of(flow, jax.random.fold_in(key, CLOUD_KEY), x.dtype) if proposal.wants_cloud else None
    return proposal.distribution(flow, x, cloud)


def mixtures(proposal: AbstractProposal, points: Points, which: np.ndarray) -> Mixture | None:
    """The same for these points, outside a `jit`."""
    if isinstance(proposal, Prior):
        return None
    flow, cloud = points.levels.flow, None
    if proposal.wants_cloud:
        cloud = _cloud(flow, points.key, points.x.dtype)
    program = lambda *given: _distribution(proposal, flow, cloud, *given)
    return points.run(program, which, ())


@partial(jit, level=1)
def _cloud(flow: AbstractStochasticFlow, key: PRNGKeyArray, dtype) -> Cloud:
    return Cloud.of(flow, jax.random.fold_in(key, CLOUD_KEY), dtype)


@partial(jit, level=1)
def _distribution(proposal, flow, cloud, x, key, places, others, here, block: int) -> Mixture:
    del key, places, others
    like = jax.eval_shape(lambda: proposal.distribution(flow, x, cloud))
    blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return update_where(here, lambda x: proposal.distribution(flow, x, cloud), x, blank, block)


def checked_points(flow: AbstractStochasticFlow, x: Any) -> Any:
    """The points, as an array of the flow's precision."""
    base = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
    x = as_real("x", x)
    x = x if is_traced(x) else np.asarray(x)
    x = x.astype(jnp.result_type(x, base))
    check_vector("x", x, flow.dimension)
    check_finite("x", x)
    if not x.size:
        raise ValueError(f"x holds no points, its shape is {x.shape}")
    return x


def is_inside_jit(*given: Any) -> bool:
    return is_traced(jnp.asarray(0.0)) or any(map(is_traced, jax.tree.leaves(given)))


def refuse_tolerance(accuracy: Accuracy) -> None:
    if accuracy.tolerance is not None:
        told = "tolerance needs values to look at: inside jit or grad set num_paths instead"
        raise ValueError(told + see("inside-jit"))


def estimate_of(parts: Parts, batch: tuple[int, ...], dtype) -> Estimate:
    """The estimate with these parts, `(N,)` each, in the shape of x."""
    typed = lambda a: a.astype(dtype) if a.dtype.kind == "f" else a
    given = {name: jax.device_put(typed(part.reshape(batch))) for name, part in parts.items()}
    return Estimate.of(given.pop("log_prob"), "paths", **given)
