"""The default estimator: the cheapest method that reaches the requested accuracy, point by point."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key
from .._functions import fixed_functions
from .._programs import jit
from ..flow import AbstractStochasticFlow, some_points, unresolved_in_time
from ..sde import kinks, noise_matrix
from ._draws import Sobol
from ._estimate import (
    COARSE,
    FEW_PATHS,
    HEAVY,
    METHODS,
    AbstractEstimator,
    Accuracy,
    Estimate,
    effective_paths,
)
from ._grid import applies as grid_applies, estimate as grid_estimate
from ._modes import Cloud, Laplace, Latent, constant, find_modes, refined_driver
from ._particles import particle_parts
from ._paths import (
    CLOUD_KEY,
    GROWTH,
    Level,
    Points,
    PullBack,
    Rounds,
    checked_points,
    coarser,
    draw,
    exact,
    gathered,
    is_inside_jit,
    mixtures,
    point_keys,
    refuse_tolerance,
    traced_estimate,
    update_where,
)
from ._proposals import AbstractProposal, Mixture, Prior

DEFAULT_TOLERANCE = 0.05  # total error, nats: the aim, if the user gives none
ACCEPTED_ERROR = 0.1  # nats: no other method is tried below it, if the user gives no tolerance
FIRST_PATHS = 256  # from the prior
FIRST_AROUND_MODES = 64
MAX_PATHS_PER_RUNG = 2**14
PATHS_OF_FEW = {"cpu": 2**17, "gpu": 2**22}  # of all points, if more than that limit for each
MAX_PATHS_AROUND_MODES = 2**10  # if the user gives no tolerance
FIXED_BUDGET_PATHS = 256  # inside jit
FEW_STARTS = 4  # of a search for modes, where there is next to no density
# Number of points, by dimension, above which a grid is cheaper than paths.
GRID_POINTS, GRID_POINTS_ON_GPU = {1: 64, 2: 256}, {1: 4096, 2: 16384}
GRID_WORK = {1: 4e8, 2: 2e8}  # by dimension: about ten seconds of a CPU, after which a grid gives up
EVEN_SHARE = 0.25  # effective fraction of paths above which more of them are worth it
LEARNED_SHARE = 0.2  # of the prior, next to a learned proposal
MAX_DOUBLINGS = 2  # of the driver's functions and the steps, where their error dominates
PROBED_POINTS = 8  # at which the time dependence of the coefficients is checked
CONTRACTION_PATHS, CONTRACTION_STEPS = 64, 32
# Factor by which backward solves spread, per dimension: beyond, prior draws may miss paths.
MAX_EXPANSION = 20.0
HEAVY_AROUND_MODES = 0.5  # Pareto k of the weights around modes above which they are poor
FEW_RUNS = 2.0  # effective runs of particles below which one of them decides
MAX_UNRESOLVED = 0.05  # nats by which unresolved time dependence may change log p
MAX_GAP = 3.0  # standard errors between two rungs
# Root mean square change of log p(x | path) with finer steps, above which some paths are not resolved: .002
# for a neural SDE, and 1 for one SDE where log p was off by .07 and the mean change of 32 paths was small.
MAX_STEP_CHANGE = 0.05


class Goal(NamedTuple):
    """The total error to reach at each point, the error below which no other method is tried, and the maximum
    numbers of paths from the prior and around modes."""

    error: np.ndarray
    accepted: np.ndarray
    most: tuple[int, int]

    @staticmethod
    def of(accuracy: Accuracy, size: int) -> "Goal":
        most = accuracy.max_paths
        if accuracy.tolerance is not None:
            error = np.full(size, accuracy.tolerance)
            return Goal(error, error, (most, most))
        limits = (most, min(MAX_PATHS_AROUND_MODES, most))
        return Goal(np.full(size, DEFAULT_TOLERANCE), np.full(size, ACCEPTED_ERROR), limits)


class Ladder(AbstractEstimator):
    """Paths from the prior until the total error is small enough; only points that need it get more. The
    default.

    In the pull-back form each path has exactly one start (`rf.PullBack`), so no way to x can be missed that
    paths are drawn near. Point by point:

    1. **Paths** from the driver's own distribution, scrambled Sobol' numbers: 256, then four times as many,
       until the total error is below the tolerance (0.05 by default), at most 16,384. They are solved with
       half the driver's functions and steps, and one in eight with all of them too: the difference corrects
       the value, and bounds the error that is left. Where that is too large, functions and steps are
       doubled. If no tolerance is given, an error of 0.1 is accepted in the end.
    2. Points with poor weights: paths from the proposal that the flow has learned, if it has one, and then
       **around the likeliest paths** to x (`rf.Laplace`).
    3. Points whose weights are still poor: **particles**, moved from there to the distribution of the path
       given x through q^(1−β) (p(x | ω) φ(ω))^β, β from 0 to 1 (Del Moral, Doucet & Jasra 2006).

    In one and two dimensions a **grid** (`rf.density.Grid`) comes first if there are many points, because it
    costs the same for any number of them, or if the SDE contracts strongly, because prior draws may then miss
    paths. Otherwise it comes last, for points whose error is still too large.

    `Estimate.method` says which step gave a value. Inside `jit` and `grad`, where values are unknown, every
    point has 256 paths of the first kind or, where weights are poor, of the second.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: 2 * z**3, lambda t, z: 0.5 * jnp.eye(1))  # explodes: paths come in bundles
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    estimate = flow.estimate(jnp.ones(1), key=jax.random.key(0), estimator=rf.density.Ladder())
    estimate.log_prob, estimate.total_error, estimate.method
    ```
    """

    def estimate(
        self, flow: AbstractStochasticFlow, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy
    ) -> Estimate:
        x, key = checked_points(flow, x), check_key(key)
        if flow.noise_dimension == 0:
            return _without_noise(flow, x, key)
        if is_inside_jit(flow, x, key):
            refuse_tolerance(accuracy)
            return _fixed_budget(exact(flow), x, key, accuracy.errors)
        with fixed_functions():
            parts = _climbed(flow, np.asarray(x).reshape(-1, x.shape[-1]), key, accuracy)
        return gathered([(np.arange(x.size // x.shape[-1]), parts)], "paths", x.shape[:-1], x.dtype)


def _climbed(
    flow: AbstractStochasticFlow, x: np.ndarray, key: PRNGKeyArray, accuracy: Accuracy
) -> dict[str, np.ndarray]:
    """Parts of the estimate at x `(N, d)`."""
    goal, record, which = Goal.of(accuracy, len(x)), Record(len(x)), np.arange(len(x))
    switches = kinks(flow.sde, flow.dimension, t1=flow.t1)
    fits = grid_applies(flow) is None and not switches
    fast = unresolved_in_time(flow, jnp.asarray(x[:PROBED_POINTS])) > MAX_UNRESOLVED
    many = GRID_POINTS if jax.default_backend() == "cpu" else GRID_POINTS_ON_GPU
    from_modes = bool(_contraction(flow) > MAX_EXPANSION)
    if fits and (from_modes or len(x) >= many[flow.dimension]):
        which, fits = _grid(flow, x, which, goal, record), False
        if 0 < which.size < len(x) and accuracy.tolerance is None:
            _beyond_grid(Points(coarser(flow), x, key), which, goal, record)
            which = which[:0]
    first, others = (which[:0], which) if from_modes else (which, which[:0])
    level, is_coarse = (flow, False) if from_modes else (coarser(flow), True)
    for _ in range(2 + MAX_DOUBLINGS - from_modes):
        if not (first.size or others.size):
            break
        points = Points(level, x, key)
        others = np.union1d(others, _from_prior(points, first, goal, record))
        if not is_coarse:
            others = _climb(points, others, goal, record)
        # More paths do not reduce what functions leave out and steps miss.
        first = np.setdiff1d(record.coarse(0.5 * goal.error), others)
        if not is_coarse:
            refined, flow = refined_driver(flow), flow.with_finer_steps()
            flow = flow if refined is None else flow.with_driver(refined)
        level, is_coarse = flow, False
    # By default good weights need no grid, which takes seconds, even if their error is above the aim.
    unmet = (accuracy.tolerance is not None) & (record.total_error() > goal.accepted)
    still = np.flatnonzero(record.poor | unmet)
    if fits and still.size:
        _grid(flow, x, still, goal, record)
    record.parts["jump"] = np.full(len(x), any(switch.kind == "jump" for switch in switches))
    record.parts["fast"] = np.full(len(x), fast)
    if accuracy.tolerance is not None:
        record.parts["unmet"] = record.total_error() > accuracy.tolerance
    return record.parts


def _without_noise(flow: AbstractStochasticFlow, x: Any, key: PRNGKeyArray) -> Estimate:
    """One pull-back, which is exact but for the solver's steps and a random divergence."""
    estimate = PullBack(1).estimate(flow, x, key=key, accuracy=Accuracy())
    zero, exact = jnp.zeros_like(estimate.log_prob), jnp.zeros_like(estimate.rung)
    parts = lambda e: (e.standard_error, e.truncation_error, e.solver_error, e.rung)
    return eqx.tree_at(parts, estimate, (zero, zero, 0.5 * estimate.truncation_error, exact))


class Record:
    """The best that is known of every point: parts of an `Estimate`, arrays of NumPy; where weights are
    `poor`, so that they say little; and where steps are too `rough` for weights to mean anything."""

    def __init__(self, size: int):
        self.parts: dict[str, np.ndarray] = {}
        self.poor, self.rough = np.ones(size, bool), np.zeros(size, bool)

    def put(self, which: np.ndarray, new: dict[str, np.ndarray], poor: np.ndarray, method: str) -> None:
        """What a rung found of the points `which`. It stands unless what was known is as good and surer;
        where both are good and differ, the point is flagged as steep."""
        blank = {"steep": np.zeros(len(which), bool), "solver_error": np.zeros(len(which))}
        new = {**blank, **new, "rung": np.full(len(which), METHODS.index(method))}
        for name, part in new.items():
            if name not in self.parts:
                self.parts[name] = np.zeros(len(self.poor), part.dtype)
                if name == "standard_error":
                    self.parts[name][:] = np.inf
        old = {name: part[which] for name, part in self.parts.items()}
        known = ~self.poor[which]
        surer = _total(old) < _total(new)
        takes = np.where(known, ~poor & ~surer, ~(poor & surer))
        with np.errstate(invalid="ignore"):
            apart = np.abs(old["log_prob"] - new["log_prob"])
        wide = MAX_GAP * np.hypot(_total(old), _total(new))
        for name, part in new.items():
            self.parts[name][which] = np.where(takes, part, old[name])
        self.parts["steep"][which] |= known & ~poor & (apart > wide)
        self.poor[which] &= poor

    def coarse(self, tolerance: np.ndarray) -> np.ndarray:
        """The points that need more functions or steps."""
        error = self.parts["truncation_error"]
        mostly = (error > tolerance) & (error > self.parts["standard_error"])
        return np.flatnonzero(mostly & np.isfinite(error) & ~self.poor | self.rough)

    def total_error(self) -> np.ndarray:
        return _total(self.parts)


def _total(parts: dict[str, np.ndarray]) -> np.ndarray:
    return parts["standard_error"] + parts["truncation_error"] + parts["solver_error"]


def _grid(
    flow: AbstractStochasticFlow, x: np.ndarray, which: np.ndarray, goal: Goal, record: Record
) -> np.ndarray:
    """The Fokker–Planck equation for the points `which`; returns those that it does not resolve."""
    found = grid_estimate(flow, x[which], float(goal.error.min()), max_work=GRID_WORK[flow.dimension])
    value, error = (np.asarray(part, float) for part in found)
    size, zero = len(which), np.zeros(len(which))
    parts = {
        **{"log_prob": np.where(np.isnan(value), -np.inf, value), "solver_error": error},
        **{"standard_error": zero, "truncation_error": zero, "effective_paths": np.full(size, np.inf)},
        **dict.fromkeys(("num_paths", "escaped"), np.zeros(size, int)),
        "pareto_k": np.full(size, np.nan),
    }
    met = error <= goal.accepted[which]
    record.put(which, parts, ~met, "grid")
    return which[~met]


def _beyond_grid(points: Points, which: np.ndarray, goal: Goal, record: Record) -> None:
    """A few paths around modes, where there is next to no density: none from the prior would count."""
    mixture = mixtures(Laplace(num_starts=FEW_STARTS), points, which)
    own, checks = _levels(points)
    rounds = Rounds(points, which, Sobol(), mixture, FIRST_AROUND_MODES, own, checks)
    _rounds(rounds, goal._replace(error=goal.accepted), record, "modes")


def _levels(points: Points) -> tuple[Level, tuple[Level, ...]]:
    """Of the paths, and of the few that are checked."""
    return points.levels.own, (points.levels.finer, points.levels.mirrored)


@partial(jit, level=1)
def _contraction(flow: AbstractStochasticFlow) -> Array:
    """The factor per dimension by which the drift contracts around one simulated path in ten, or more:
    exp(−∫ div μ dt / d).

    Backward solves expand by as much and run away from the places that paths contract to. Paths to x from
    there have large weights, and prior draws that may never show one: in a double well, a point on the slope
    is reached from the ridge by most draws, and from the well by as much of the probability.
    """
    noise = np.random.default_rng(0).normal(size=(CONTRACTION_STEPS, CONTRACTION_PATHS, flow.noise_dimension))
    start = some_points(flow.base, flow.dimension, CONTRACTION_PATHS)
    length = jnp.asarray(flow.t1 / CONTRACTION_STEPS, start.dtype)
    basis = jnp.eye(flow.dimension, dtype=start.dtype)

    def move(z: Array, t: Array, noise: Array) -> tuple[Array, Array]:
        drift, push = jax.linearize(lambda z: flow.sde.drift(t, z), z)
        divergence = jnp.trace(jax.vmap(push)(basis))
        new = z + length * drift + jnp.sqrt(length) * noise_matrix(flow.sde.noise(t, z)) @ noise
        fine = jnp.all(jnp.isfinite(new)) & jnp.isfinite(divergence)
        return jnp.where(fine, new, z), jnp.where(fine, length * divergence, 0)

    def step(state: tuple[Array, Array], given: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        z, change = jax.vmap(move, (0, None, 0))(state[0], *given)
        return (z, state[1] + change), None

    times = length * jnp.arange(CONTRACTION_STEPS, dtype=start.dtype)
    given = (times, jnp.asarray(noise, start.dtype))
    total = jax.lax.scan(step, (start, jnp.zeros(CONTRACTION_PATHS, start.dtype)), given)[0][1]
    return jnp.exp(-jnp.quantile(total, 0.1) / flow.dimension)


def _from_prior(points: Points, which: np.ndarray, goal: Goal, record: Record) -> np.ndarray:
    """Paths from the prior; returns the points that need another rung."""
    return _rounds(
        Rounds(points, which, Sobol(), None, goal.most[0], *_levels(points)), goal, record, "paths"
    )


def _climb(points: Points, which: np.ndarray, goal: Goal, record: Record) -> np.ndarray:
    """Apply the rungs above the first in turn to the points that need them; returns none."""
    levels = points.levels
    if which.size and (learned := _learned(levels.flow)) is not None:
        mixture = mixtures(learned, points, which)
        mixture = None if mixture is None else mixture.with_prior(LEARNED_SHARE)
        rounds = Rounds(points, which, Sobol(), mixture, goal.most[0], *_levels(points))
        which = _rounds(rounds, goal, record, "learned")
    if which.size:
        _around_modes(points, which, goal, record)
    return which[:0]


def _learned(flow: AbstractStochasticFlow) -> AbstractProposal | None:
    """The proposal that was trained with the flow."""
    learned = flow.proposal
    return learned if isinstance(learned, AbstractProposal) and not isinstance(learned, Prior) else None


def _around_modes(points: Points, which: np.ndarray, goal: Goal, record: Record) -> None:
    """Paths around the most likely ones, with the driver's functions and with twice as many, each around its
    own modes: where backward solves spread, random additional coefficients would dominate the weights. Then
    particles for points with poor weights."""
    levels, results = points.levels, []
    cloud = _cloud(levels.flow, points.key, points.x.dtype)
    found = _Found(points.run(partial(_starts, cloud, Laplace().num_starts), which, ()))
    for level in (levels.own, levels.finer):
        found = points.run(partial(_search, level.flow, level.fine), which, found.xi)
        results.append(Record(len(points.x)))
        rounds = Rounds(points, which, Sobol(), found.mixture, goal.most[1], level)
        _rounds(rounds, goal, results[-1], "modes")
    coarse, fine = results
    parts = {name: part[which] for name, part in fine.parts.items()}
    with np.errstate(invalid="ignore"):
        change = np.abs(parts["log_prob"] - coarse.parts["log_prob"][which])
    parts["truncation_error"] = np.where(np.isnan(change), np.inf, change)
    steep = found.steepness > MAX_EXPANSION
    parts["steep"] = steep & (parts["effective_paths"] < EVEN_SHARE * parts["num_paths"])
    record.put(which, parts, fine.poor[which] | coarse.poor[which], "modes")
    still = record.poor[which]
    if still.any() and goal.most[1] > FIRST_AROUND_MODES:
        poor, mixture = which[still], jax.tree.map(lambda a: a[still], found.mixture)
        moved = particle_parts(points, poor, mixture)
        # What paths around the modes show of it, in spite of their weights.
        moved |= {"truncation_error": parts["truncation_error"][still], "steep": steep[still]}
        record.put(poor, moved, moved["effective_paths"] < FEW_RUNS, "particles")


class _Found(NamedTuple):
    """Modes for B points: ξ `(B, S, D)`, the tangent Gaussians, and their steepness."""

    xi: Array
    mixture: Any = None
    steepness: Any = None


@partial(jit, level=1)
def _cloud(flow: AbstractStochasticFlow, key: PRNGKeyArray, dtype: Any) -> Cloud:
    return Cloud.of(flow, jax.random.fold_in(key, CLOUD_KEY), dtype, fine=np.float32(0))


@partial(jit, level=1)
def _starts(cloud: Cloud, count: int, x, key, places, others, here, block: int) -> Array:
    del key, places, others, here, block
    return cloud.starts(x, count)


@partial(jit, level=1)
def _search(flow, fine, x, key, places, begin, here, block: int) -> _Found:
    """Modes from the starts `begin` `(B, S, D)`."""
    del key, places
    latent = constant(Latent(flow, fine))

    def find(given: tuple[Array, Array]) -> _Found:
        x, begin = given
        modes = find_modes(latent, x, begin)
        # A start that was in vain is not tried again.
        best = jnp.take_along_axis(modes.xi, jnp.argmin(modes.score, axis=1)[:, None, None], axis=1)
        xi = jnp.where(jnp.isfinite(modes.score)[..., None], modes.xi, best)
        mixture = modes.tangents(flow.dimension)
        return _Found(xi, mixture, mixture.steepness)

    like = jax.eval_shape(find, (x, begin))
    blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return update_where(here, find, (x, begin), blank, block)


def _rounds(rounds: Rounds, goal: Goal, record: Record, name: str) -> np.ndarray:
    """Add paths until the error is small enough, the weights turn out to be poor, or the maximum number is
    reached. Returns the points that need another rung."""
    first = FIRST_PATHS if rounds.mixture is None else FIRST_AROUND_MODES
    needs_more, total, most = np.zeros(len(record.poor), bool), min(first, rounds.most), rounds.most
    record.poor[rounds.which] = True
    record.rough[rounds.which] = False
    while len(rounds.which):
        rounds.grow(total)
        parts, which = rounds.parts(corrected=True), rounds.which
        error, aim = parts["standard_error"], goal.error[which]
        rough = np.zeros(len(which), bool)
        if rounds.stepped.size:
            change = rounds.step_change()
            rough = change > MAX_STEP_CHANGE
            parts["truncation_error"] = parts["truncation_error"] + np.where(rough, change, 0)
        # Tangent Gaussians have tails that many bundles of paths hide in.
        heavy = HEAVY if rounds.mixture is None else HEAVY_AROUND_MODES
        poor = parts["effective_paths"] < 2 * FEW_PATHS
        poor |= (parts["pareto_k"] > heavy) | ~(error + parts["truncation_error"] < COARSE)
        met = (error + parts["truncation_error"] <= aim) | (error <= 0.5 * aim)
        uneven = parts["effective_paths"] < EVEN_SHARE * total
        poor |= rough
        limit = _limit(most, int(np.sum(~met | poor)), goal)
        hopeless = (
            uneven & (total * (error / goal.accepted[which]) ** 2 > limit) & (total > FIRST_AROUND_MODES)
        )
        ends = (met & ~poor) | rough | hopeless | (GROWTH * total > limit)
        record.put(which[ends], {key: part[ends] for key, part in parts.items()}, poor[ends], name)
        record.rough[which] = rough
        needs_more[which[ends]] = (~rough & (poor | (error > goal.accepted[which])))[ends]
        rounds.keep(~ends)
        total *= GROWTH
    return np.flatnonzero(needs_more)


def _limit(most: int, count: int, goal: Goal) -> int:
    """The maximum number of paths for each of the points left: more by default if those are few, because
    another method takes as long to compile."""
    if goal.error is goal.accepted:
        return most
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    return min(most, max(MAX_PATHS_PER_RUNG, PATHS_OF_FEW[device] // max(count, 1)))


def _fixed_budget(flow: AbstractStochasticFlow, x: Array, key: PRNGKeyArray, errors: bool) -> Estimate:
    """The first rungs inside `jit`, where values are unknown: a fixed number of paths per point, from the
    prior or, where a quarter of them have uneven weights, from the next proposal."""
    flow, flat = flow.without_errors(), jnp.reshape(x, (-1, x.shape[-1]))
    keys = key if key.ndim else point_keys(key, jnp.arange(len(flat)))
    fixed, points = constant((flow, flat))
    places = jnp.broadcast_to(jnp.arange(FIXED_BUDGET_PATHS), (len(flat), FIXED_BUDGET_PATHS))
    first = draw(
        Level(fixed), points, keys, None, Sobol(), places[:, :FIRST_AROUND_MODES], FIXED_BUDGET_PATHS
    )
    poor = _poor(first.log_weights) | (_contraction(fixed) > MAX_EXPANSION)
    mixture = _mixture_where(poor, fixed, points, keys)
    drawn = draw(Level(flow), flat, keys, mixture, Sobol(), places, FIXED_BUDGET_PATHS)
    estimate = traced_estimate(flow, flat, keys, mixture, Sobol(), drawn, errors, corrected=True)
    other = METHODS.index("modes" if _learned(flow) is None else "learned")
    rung = jnp.where(mixture.prior < 1, other, METHODS.index("paths"))
    estimate = eqx.tree_at(lambda e: e.rung, estimate, rung)
    return jax.tree.map(lambda a: jnp.reshape(a, x.shape[:-1]), estimate)


def _poor(log_weights: Array) -> Array:
    """Where weights `(B, K)` are too uneven for more of their kind."""
    top = jnp.max(log_weights, axis=1, keepdims=True)
    weights = jnp.exp(log_weights - jnp.where(jnp.isfinite(top), top, 0))
    return ~(effective_paths(weights.T) > 2 * FEW_PATHS)


def _mixture_where(poor: Array, flow: AbstractStochasticFlow, x: Array, keys: PRNGKeyArray) -> Mixture:
    """The prior; for `poor` points the learned proposal, or that around the modes."""
    if (learned := _learned(flow)) is not None:
        mixture = learned.distribution(flow, x, None)
        assert mixture is not None
        mixture = mixture.with_prior(LEARNED_SHARE)
    else:
        cloud = Cloud.of(flow, jax.random.fold_in(keys[0], CLOUD_KEY), x.dtype)
        find = lambda x: Laplace().distribution(flow, x, cloud)
        blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(find, x))
        frame = jnp.broadcast_to(jnp.eye(*blank.normal.shape[2:], dtype=x.dtype), blank.normal.shape)
        blank = eqx.tree_at(lambda m: (m.normal, m.scale), blank, (frame, jnp.ones_like(blank.scale)))
        mixture = update_where(poor, find, x, blank, 64)
    return constant(eqx.tree_at(lambda m: m.prior, mixture, jnp.where(poor, mixture.prior, 1)))
