"""The weights of paths, each computed by one solve backwards from x, and estimates of log p(x) from these
weights."""

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
from ._draws import AbstractDraws, Sobol
from ._estimate import (
    METHODS,
    AbstractEstimator,
    Accuracy,
    Estimate,
    effective_paths,
    weights_error,
)
from ._modes import PRIOR_SHARE, Cloud, constant, refined_driver, with_added
from ._proposals import AbstractProposal, Mixture, Prior, log_standard

# Maximum dimension for exact divergences instead of random probes, if there is no noise.
MAX_EXACT_DIMENSION = 64
PATHS_PER_ROW = 16  # number of paths of one point in a row of a program
ROWS = {"cpu": (4096,), "gpu": (2048, 16384)}  # numbers of rows per program call
SOLVES_PER_BLOCK = {"cpu": 2**9, "gpu": 2**15}  # number of solves that are integrated as one state
MAX_NUMBERS = 2**26  # floating-point numbers per program call
GROWTH = 4  # factor between the numbers of paths of consecutive rounds
CLOUD_KEY = 2**31 + 1  # folded into the key to obtain the key of the forward draws
CHECKED_SHARE = 16  # one path in this many is also solved at a finer level,
FEW_CHECKED = 32  # and at least this many
Parts = dict[str, np.ndarray]  # of an `Estimate`


def solve_keys(flow: AbstractStochasticFlow, keys: PRNGKeyArray, indices: Array) -> PRNGKeyArray | None:
    """Keys `(B, K)` for solves with a random divergence, from one key per point and the indices of paths `(B,
    K)`; None if the divergence is exact."""
    if isinstance(flow.divergence, ExactDivergence) and isinstance(flow.correction, ExactCorrection):
        return None
    own = jax.vmap(lambda key: jax.random.fold_in(key, 2**31))(keys)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(own, indices)


def exact(flow: AbstractStochasticFlow) -> AbstractStochasticFlow:
    """The flow with the exact divergence, because random probes bias a mean of p(x | ω). Without noise there
    is no mean, so a flow in many dimensions keeps random probes."""
    few = flow.noise_dimension or flow.dimension <= MAX_EXACT_DIMENSION
    if isinstance(flow.divergence, HutchinsonDivergence) and few:
        return eqx.tree_at(lambda f: f.divergence, flow, ExactDivergence())
    return flow


class Level(NamedTuple):
    """The resolution at which weights are solved: the flow, a factor `fine` for the coefficients of functions
    added to the driver, and the number of steps `each` of a fixed grid. Both numbers are arguments of a
    compiled program, so that one program serves all levels. This program does not support reverse-mode
    differentiation. If `fine` is None, the flow is solved unchanged.
    """

    flow: AbstractStochasticFlow
    fine: Any = None
    each: Any = None

    def solved(self, x: Array, omega: Array, more: Any, keys: PRNGKeyArray | None) -> Array:
        """log p(x | ω) `(B, K)` for x `(B, d)` and ω `(B, K, W)`, −inf if the solve escapes. `more` contains
        the coefficients of the added functions."""
        flow, coefficients = with_added(self.flow, omega, more, self.fine)
        if self.fine is not None and isinstance(flow.integrator, FixedGrid):
            counted = CountedGrid.of(flow.integrator, self.each)
            flow = eqx.tree_at(lambda f: f.integrator, flow, counted)
        path = flow.driver.path(coefficients, flow.t1)
        return flow.log_prob_given_path(x[:, None], path, key=keys)


def levels(flow: AbstractStochasticFlow) -> tuple[Level, Level, Level]:
    """Three levels: the flow itself; the finer level, with twice as many steps and, if the driver can be
    refined, functions; and the finer level with the opposite sign of the added coefficients."""
    flow = exact(flow).without_errors()
    grid, refined = flow.integrator, refined_driver(flow)
    pieces = (flow.driver if refined is None else refined).jumps.size + 1
    each = 0
    if isinstance(grid, FixedGrid):
        each = max(1, math.ceil(grid.count(flow.driver, flow.noise_dimension) / pieces))
    finer = flow if each else flow.with_finer_steps()
    level = lambda fine: Level(finer, np.float32(fine), np.int32(2 * each))
    return Level(flow, np.float32(0), np.int32(each)), level(1), level(-1)


def coarser(flow: AbstractStochasticFlow) -> AbstractStochasticFlow:
    """The flow with half the driver's functions and half the steps, so that its finer level is the flow.

    A path takes a quarter of the time at the coarser level and gives nearly the same weight. Therefore many
    paths are solved at the coarser level only, and a few at both levels, to estimate the difference
    (multilevel Monte Carlo, Giles 2008).
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
    indices: Array,
    max_paths: int,
) -> tuple[Array, Array | None]:
    """Log-weights `(B, K)` of paths, and the ratio of the prior's density to that of the mixture. `indices`
    `(B, K)` are the indices of the paths in the random sequence of each point, all below `max_paths`. For use
    inside a compiled program."""
    size = level.flow.driver.num_functions * level.flow.noise_dimension
    first = size if mixture is None else mixture.num_normals
    # The numbers of the added functions come last, where a Sobol' sequence is distributed least evenly; they
    # are drawn even if not used.
    number = lambda key, at: draws.normal(key, at, max_paths, first + size, x.dtype)
    noise, more = jnp.split(jax.vmap(number)(keys, indices), [first], axis=-1)
    solves = solve_keys(level.flow, keys, indices)
    if mixture is None:
        return level.solved(x, noise, more, solves), None
    omega = mixture.sample(noise)
    # A mixture may include the coefficients of the added functions.
    own, added = jnp.split(omega, [size], axis=-1)
    solved = level.solved(x, own, added if added.size else more, solves)
    ratio = log_standard(omega) - mixture.log_prob(omega)
    return solved + ratio, jnp.exp(ratio)


def in_blocks(function: Callable, batch: Any, count: Array, block: int) -> Any:
    """Apply `function` to the first `count` entries of the leading axis of `batch`, `block` entries at a
    time; the results of the others are zero. The length of the axis is a multiple of `block`."""
    some = lambda begin: jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, begin, block), batch)
    size, like = len(jax.tree.leaves(batch)[0]), jax.eval_shape(lambda: function(some(0)))
    blank = jax.tree.map(lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype), like)

    def step(i: Array, done: Any) -> Any:
        put = lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, i * block, 0)
        return jax.tree.map(put, done, function(some(i * block)))

    return jax.lax.fori_loop(0, -(-count // block), step, blank)


class Points:
    """Points x, used outside of `jit`. Each point is a row of a compiled program, which all points and rounds
    share.

    Random numbers depend only on the key and on the index of a point in x, not on which rows are solved
    together or on padding.
    """

    def __init__(self, flow: AbstractStochasticFlow, x: np.ndarray, key: PRNGKeyArray):
        self.levels, self.x, self.key = levels(flow), x, key
        self.flow = self.levels[0].flow
        self.size = flow.driver.num_functions * flow.noise_dimension

    def run(self, function: Callable, points: np.ndarray, others: Any, columns: int = PATHS_PER_ROW) -> Any:
        """Apply `function(x, keys, others)` to the points with indices `points`, each in one row of a
        program. A row has `columns` paths, and as many rows as fit into a block are solved together.

        Each of `others` has one entry per point."""
        each = sum(np.size(leaf[0]) for leaf in jax.tree.leaves(others)) + columns * (
            len(self.x[0]) + self.size
        )
        device = "cpu" if jax.default_backend() == "cpu" else "gpu"
        # An exact divergence has one tangent per dimension, so fewer solves in many dimensions fill a block.
        solves = SOLVES_PER_BLOCK[device] // max(columns, len(self.x[0]))
        block = max(1, min(solves, MAX_NUMBERS // each))
        # Programs come in a few sizes only, so that a few points take little time on a GPU, and a new number
        # of points does not need a new program.
        sizes = [-(-size // block) * block for size in ROWS[device] if size * each <= MAX_NUMBERS] or [block]
        rows, parts = next((size for size in sizes if len(points) <= size), sizes[-1]), []
        for begin in range(0, len(points), rows):
            some = slice(begin, begin + rows)
            count = len(points[some])
            fill = np.resize(np.arange(count), rows)
            own = jax.tree.map(lambda a, some=some, fill=fill: np.asarray(a)[some][fill], others)
            indices = points[some][fill].astype(np.uint32)
            with one_line_errors():
                done = _run(function, self.x[indices], self.key, indices, own, np.int32(count), block)
            parts.append(jax.tree.map(lambda a, count=count: np.asarray(a)[:count], done))
        return jax.tree.map(lambda *a: np.concatenate(a), *parts)


def point_keys(key: PRNGKeyArray, indices: Array) -> PRNGKeyArray:
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(indices)


@partial(jit, level=1)
def _run(function: Callable, x, key: PRNGKeyArray, indices, others: Any, count, block: int) -> Any:
    some = lambda batch: function(batch[0], point_keys(key, batch[1]), batch[2])
    return in_blocks(some, (x, indices, others), count, block)


class Weigh(eqx.Module):
    """Log-weights of rows of paths, for use inside a compiled program."""

    level: Level
    draws: AbstractDraws
    max_paths: int = eqx.field(static=True)

    def __call__(self, x: Array, keys: PRNGKeyArray, others: tuple[Mixture | None, Array]) -> Any:
        return draw(self.level, x, keys, others[0], self.draws, others[1], self.max_paths)


def weights_of(
    points: Points,
    which: np.ndarray,
    mixture: Mixture | None,
    draws: AbstractDraws,
    max_paths: int,
    level: Level,
    at: range,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The results of `draw`, `(P, K)`, for the points `which` and the paths at positions `at` in their
    sequences."""
    columns = min(PATHS_PER_ROW, max_paths)
    starts = np.arange(at.start, at.stop, columns)
    rows = np.repeat(np.arange(len(which)), len(starts))
    indices = np.tile(starts, len(which))[:, None] + np.arange(columns)
    mixture = jax.tree.map(lambda a: np.asarray(a)[rows], mixture)
    given = (mixture, np.minimum(indices, max_paths - 1).astype(np.int32))
    found = points.run(Weigh(level, draws, max_paths), which[rows], given, columns)
    if np.isnan(found[0]).any():
        explain_failure(points.flow, points.x)
    return jax.tree.map(lambda a: a.reshape(len(which), -1)[:, : len(at)], found)


def in_rounds(
    points: Points,
    which: np.ndarray,
    mixture: Mixture | None,
    draws: AbstractDraws,
    own: Level,
    *checks: Level,
    first: int,
    max_paths: int,
    ends: Callable[[Parts, int], np.ndarray],
    corrected: bool = True,
) -> Parts:
    """Fields of an `Estimate` for the points `which`, from paths drawn from the prior or from a mixture. For
    each point, the number of paths starts at `first` and is multiplied by four until `ends(parts, total)` is
    True. Some paths are also solved at the levels `checks`; the mean over these levels corrects the value or
    bounds its error.

    The change of a weight due to added functions is mostly an odd function of their coefficients, so the mean
    over both signs varies less (antithetic coupling, Giles & Szpruch 2014). For a neural SDE with noise 0.9,
    the standard deviation of this mean relative to p(x) is 0.031, compared with 0.081 for one sign and 0.76
    for p(x | path). In the README's example it is 0.003, compared with 0.032.
    """
    where, total, found = np.arange(len(which)), first, {}
    fine = np.zeros((len(which), 0), points.x.dtype)
    coarse, control = fine, None if mixture is None else fine
    while where.size:
        given, checked = (points, which[where], mixture, draws, max_paths), checked_paths(total)
        new = weights_of(*given, own, range(coarse.shape[1], total))
        coarse, control = jax.tree.map(lambda a, b: np.concatenate([a, b], axis=1), (coarse, control), new)
        if checks and checked > fine.shape[1]:
            new = [weights_of(*given, level, range(fine.shape[1], checked))[0] for level in checks]
            mean = np.logaddexp.reduce(new) - np.log(len(new)).astype(coarse.dtype)
            fine = np.concatenate([fine, mean], axis=1)
        double = jax.tree.map(lambda a: a.astype(float), (coarse, fine, control))
        parts = summary(draws, *double, corrected=corrected)
        enough = ends(parts, total)
        for name, part in parts.items():
            found.setdefault(name, np.zeros(len(which), part.dtype))[where[enough]] = part[enough]
        still = where, coarse, fine, control, mixture
        where, coarse, fine, control, mixture = jax.tree.map(lambda a, here=~enough: a[here], still)
        total *= GROWTH
    return found


def checked_paths(total: int) -> int:
    """The number of paths out of `total` that are also solved at a finer level."""
    return min(total, max(FEW_CHECKED, total // CHECKED_SHARE))


def explain_failure(flow: AbstractStochasticFlow, x: Any) -> None:
    """Solve outside a jit, where an error message can say which part of the model is not finite, and
    where."""
    flow = eqx.tree_at(lambda f: f.raises, flow, True)
    paths = flow.sample_path(key=jax.random.key(0), shape=(64, 1))
    key = jax.random.key(1)
    flow.pull_back(jnp.asarray(x[:64]), paths, key=key)
    flow.push_forward(flow.base.sample(key=key, shape=(64,)), paths, key=key)


def summary(
    draws: AbstractDraws, coarse: Any, fine: Any, control: Any = None, *, corrected: bool, xp: Any = np
) -> dict[str, Any]:
    """Fields of an `Estimate` from log-weights `(P, K)`, and log-weights `(P, K′)` of the first K′ paths at a
    finer level.

    `control` `(P, K)` is the ratio of the prior's density to the density from which paths are drawn. Its mean
    is one, so it is used as a control variate: weights minus their regression on `control` have the same mean
    and, for a tangent Gaussian and a linear SDE, no variance (Owen & Zhou 2000).

    The finer level changes log p by Δ. The error that remains at the finer level is Δ if the error decreases
    as 1/n, and zero if it decreases much faster. With `corrected`, 3Δ/2 is added to log p, halfway between
    the two cases, and the error is Δ/2; this requires draws whose number of terms does not depend on K.
    Otherwise the error is 2Δ.
    """
    still = jax.lax.stop_gradient if xp is jnp else lambda a: a  # only the mean weight is differentiated
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = still(xp.max(coarse, axis=1))
        shift = xp.where(xp.isfinite(top), top, 0)
        weights = xp.exp(coarse - shift[:, None]).T
        some = xp.any(weights > 0, axis=0)
        unit = still(xp.where(some, xp.mean(weights, axis=0), 1))
        relative = weights / unit[None]
        rest = relative if control is None else _regressed(relative, control.T, still, xp)
        base = xp.where(some, xp.mean(rest, axis=0), 1)
        relative, change = still(relative), xp.zeros_like(unit)
        terms = draws.terms(still(rest / base[None]))
        # On average, the logarithm of a mean is too low by half its variance.
        bias = 0.5 * xp.minimum(xp.var(terms, axis=0) / max(len(terms) - 1, 1), 1)
        if fine.shape[1]:
            finer = xp.exp(xp.minimum(fine - shift[:, None], 80)).T / unit[None]
            differences = draws.terms(still(finer - relative[: fine.shape[1]]))
            total = 1 + xp.mean(differences, axis=0) / still(base)
            # If the corrected mean is not positive, because there are too few finer paths, their own mean is
            # used.
            total = xp.where(total > 0, total, still(xp.mean(finer, axis=0) / base))
            change = xp.log(total)
            if corrected:  # both have the same number of independent terms
                terms = (terms + 1.5 * differences / still(base)[None]) / total[None]
        value = xp.log(base * unit) + shift + (1.5 * still(change) if corrected else 0)
        return {
            "log_prob": xp.where(some, value + still(bias), -xp.inf),
            "standard_error": xp.where(some, weights_error(terms, xp), xp.inf),
            "truncation_error": xp.where(some, xp.abs(change) * (0.5 if corrected else 2), xp.inf),
            "effective_paths": effective_paths(still(weights), xp),
            "num_paths": xp.full(unit.shape, coarse.shape[1]),
            "escaped": xp.sum(xp.isneginf(coarse), axis=1),
        }


def _regressed(weights: Any, control: Any, still: Any, xp: Any) -> Any:
    """Weights `(K, P)` minus their regression on a control variate with mean one, unless the mean would not
    be positive."""
    centred = control - xp.mean(control, axis=0)[None]
    slope = xp.sum(centred * still(weights), axis=0) / xp.maximum(xp.sum(centred**2, axis=0), 1e-30)
    rest = weights - slope[None] * (control - 1)
    return xp.where((still(xp.mean(rest, axis=0)) > 0)[None], rest, weights)


class PullBack(AbstractEstimator):
    """Estimate p(x) = E p(x | path) (Hodgkinson et al. 2020) from paths ω that are drawn from a proposal q:

        p(x) = E [ p(x | ω) φ(ω) / q(ω) ],

    Each weight needs one solve backwards from x, to the only start from which the path leads to x. The
    estimate of p(x) is unbiased for any noise, and cheap per path. A path whose backward solve diverges has
    weight zero. If p(x | ω) is concentrated on a few paths, draws from `rf.Prior()`, the default, have uneven
    weights: check `effective_paths`. `rf.Laplace()` draws paths around the most likely ones.

    The value is not corrected for the finite numbers of driver functions and solver steps; `truncation_error`
    is twice the change of log p when both are doubled. The exact divergence is used even if the flow has
    another one, because random probes would bias p(x | ω).

    **Arguments:** `num_paths`, the number of paths per point (in the first round, if a `tolerance` is set);
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
            return self.traced(flow, x, key, accuracy)
        points = Points(flow, np.asarray(x).reshape(-1, x.shape[-1]), check_key(key))
        which, tolerance, max_paths = np.arange(len(points.x)), accuracy.tolerance or np.inf, self.num_paths
        if accuracy.tolerance is not None:
            max_paths = max(max_paths, accuracy.max_paths)
        unmet = lambda parts: parts["standard_error"] + parts["truncation_error"] > tolerance
        parts = in_rounds(
            points,
            which,
            mixtures(self.proposal, points, which),
            self.proposal.draws,
            *points.levels[:2],
            first=self.num_paths,
            max_paths=max_paths,
            ends=lambda parts, total: ~unmet(parts) | (GROWTH * total > max_paths),
            corrected=False,
        )
        return estimate_of({**parts, "unmet": unmet(parts)}, x.shape[:-1], x.dtype)

    def log_weights(
        self, flow: AbstractStochasticFlow, x: Array, keys: PRNGKeyArray, indices: Array, max_paths: int
    ) -> Array:
        """Differentiable log-weights `(B, K)` for x `(B, d)`, with one key per point. `indices`
        `(B, K)` are the indices of the paths in the sequence of each point, all below `max_paths`. For use
        inside a compiled program."""
        mixture = mixture_of(self.proposal, exact(flow), x, keys[0])
        return draw(Level(exact(flow)), x, keys, mixture, self.proposal.draws, indices, max_paths)[0]

    def traced(
        self, flow, x: Array, key: PRNGKeyArray, accuracy: Accuracy, method: str | None = None
    ) -> Estimate:
        """The estimate inside a compiled program, where values are unknown. Error bars are not
        differentiable, and cost nothing if they are not used. If the name of a `method` is given, the value
        is corrected for the truncation of the driver."""
        if accuracy.tolerance is not None:
            message = (
                "tolerance cannot be used inside jit or grad, where values are unknown: set num_paths instead"
            )
            raise ValueError(message + see("inside-jit"))
        flow, flat, count = exact(flow), jnp.reshape(x, (-1, x.shape[-1])), self.num_paths
        keys = key if key.ndim else point_keys(key, jnp.arange(len(flat)))
        indices = jnp.broadcast_to(jnp.arange(count), (len(flat), count))
        mixture, draws = mixture_of(self.proposal, flow, flat, keys[0]), self.proposal.draws
        if method is not None:
            draws = Sobol()
            mixture = None if mixture is None else mixture.with_prior(PRIOR_SHARE)
        weights, control = draw(Level(flow), flat, keys, mixture, draws, indices, count)
        fine = weights[:, :0]
        if accuracy.errors or method:
            still, finer = constant((flat, keys, mixture)), levels(constant(flow))[1]
            some = indices[:, : checked_paths(count)]
            fine, _ = draw(finer, still[0], still[1], still[2], draws, some, count)
        parts = summary(draws, weights, fine, control, corrected=method is not None, xp=jnp)
        estimate = Estimate.of(parts.pop("log_prob"), "paths", **constant(parts))
        if method is not None and mixture is not None:
            rung = jnp.where(mixture.prior < 1, METHODS.index(method), estimate.rung)
            estimate = eqx.tree_at(lambda e: e.rung, estimate, rung)
        return jax.tree.map(lambda a: jnp.reshape(a, x.shape[:-1]), estimate)


def mixture_of(proposal: AbstractProposal, flow, x: Array, key: PRNGKeyArray) -> Mixture | None:
    """The proposal's distribution of paths, for use inside a compiled program."""
    cloud = Cloud.of(flow, jax.random.fold_in(key, CLOUD_KEY), x.dtype) if proposal.wants_cloud else None
    return proposal.distribution(flow, x, cloud)


def mixtures(proposal: AbstractProposal, points: Points, which: np.ndarray) -> Mixture | None:
    """The proposal's distribution of paths for the points `which`, outside a `jit`."""
    if isinstance(proposal, Prior):
        return None
    flow = points.flow
    cloud = forward_draws(points) if proposal.wants_cloud else None
    return points.run(Propose(proposal, flow, cloud), which, ())


def forward_draws(points: Points) -> Cloud:
    return _cloud(points.flow, points.key, points.x.dtype)


@partial(jit, level=1)
def _cloud(flow: AbstractStochasticFlow, key: PRNGKeyArray, dtype) -> Cloud:
    return Cloud.of(flow, jax.random.fold_in(key, CLOUD_KEY), dtype)


class Propose(eqx.Module):
    """The proposal's distribution of paths for rows of points, for use inside a compiled program."""

    proposal: AbstractProposal
    flow: AbstractStochasticFlow
    cloud: Cloud | None

    def __call__(self, x: Array, keys: PRNGKeyArray, others: tuple) -> Mixture | None:
        del keys, others
        return self.proposal.distribution(self.flow, x, self.cloud)


def checked_points(flow: AbstractStochasticFlow, x: Any) -> Any:
    """The points as an array in the precision of the flow."""
    base = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
    x = as_real("x", x)
    x = x if is_traced(x) else np.asarray(x)
    x = x.astype(jnp.result_type(x, base))
    check_vector("x", x, flow.dimension)
    check_finite("x", x)
    if not x.size:
        raise ValueError(f"x contains no points: its shape is {x.shape}")
    return x


def is_inside_jit(*given: Any) -> bool:
    return is_traced(jnp.asarray(0.0)) or any(map(is_traced, jax.tree.leaves(given)))


def estimate_of(parts: Parts, batch: tuple[int, ...], dtype) -> Estimate:
    """The estimate with the given fields, `(N,)` each, reshaped to the batch shape of x."""
    typed = lambda a: a.astype(dtype) if a.dtype.kind == "f" else a
    given = {name: jax.device_put(typed(part.reshape(batch))) for name, part in parts.items()}
    return Estimate.of(given.pop("log_prob"), "paths", **given)
