"""The default: the cheapest way to the accuracy asked for, point by point."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key
from .._programs import jit
from ..flow import AbstractStochasticFlow, some_points, unresolved_in_time
from ..sde import kinks, noise_matrix
from ._draws import Sobol
from ._estimate import FEW_PATHS, HEAVY, METHODS, AbstractEstimator, Accuracy, Estimate, effective_paths
from ._grid import applies as grid_applies, estimate as grid_estimate
from ._modes import Cloud, Laplace, constant
from ._particles import MAX_EXPANSION, Particles, moved, particle_parts
from ._paths import (
    CLOUD_KEY,
    GROWTH,
    Level,
    Points,
    PullBack,
    Rounds,
    checked_points,
    draw,
    exact,
    gathered,
    is_inside_jit,
    mean_and_spread,
    mixtures,
    point_keys,
    refuse_tolerance,
    solve_keys,
    traced_estimate,
    update_where,
)
from ._proposals import AbstractProposal, Mixture, Prior

DEFAULT_TOLERANCE = 0.02  # total error, nats
FIRST_PATHS = 64  # in the first round
MAX_PATHS_PER_RUNG = 2**12  # if the user gives no tolerance
FIXED_BUDGET_PATHS = 256  # inside jit
# Number of points, by dimension, above which a grid is cheaper than paths.
GRID_POINTS, GRID_POINTS_ON_GPU = {1: 64, 2: 256}, {1: 4096, 2: 16384}
GRID_WORK = {1: 4e8, 2: 2e8}  # by dimension: about ten seconds of a CPU, after which a grid gives up
EVEN_SHARE = 0.25  # effective fraction of paths above which another proposal is not worth trying
LEARNED_SHARE = 0.2  # of the prior, next to a learned proposal
MAX_DOUBLINGS = 2  # of the driver's functions or the steps, where their error dominates
HEAVY_AROUND_MODES = 0.5  # Pareto k of the weights around modes above which particles are used
PROBED_POINTS = 8  # at which the time dependence of the coefficients is checked
CONTRACTION_PATHS, CONTRACTION_STEPS = 64, 32
MAX_UNRESOLVED = 0.05  # nats by which unresolved time dependence may change log p
MAX_GAP = 3.0  # standard errors between two rungs


class Ladder(AbstractEstimator):
    """Rounds of paths until the total error is small enough; only points that need it get more. The default.

    In the pull-back form each path has exactly one start (`rf.PullBack`), so no way to x can be missed that
    paths are drawn near. Point by point:

    1. **Paths** from the driver's own distribution, scrambled Sobol' numbers: 64, then four times as many,
       until the total error is below the tolerance (0.02 by default). One path in four is solved with twice
       the driver's functions too: the difference corrects the value, and bounds what is still left out.
    2. Where weights are poor, or too many paths would be needed, paths are drawn from the proposal that the
       flow has learned, if it has, and then **around the likeliest paths** to x (`rf.Laplace`).
       In one and two dimensions a **grid** (`rf.density.Grid`) computes what is still not known well enough.
       If there are many points it comes before everything: it costs the same for any number of them. If the
       SDE contracts strongly it comes first too, because prior draws may then miss paths, and without it the
       likeliest paths come first.
    3. Where these weights are poor too, **particles** are moved from there to the distribution of the path
       given x, through q^(1−β) (p(x | ω) φ(ω))^β with β from 0 to 1, reweighted, resampled and moved at each
       β (Del Moral, Doucet & Jasra 2006).

    `Estimate.method` says which step gave a value. Inside `jit` and `grad`, where nothing can be looked at,
    every point has 256 paths of the first kind or, where weights are poor, of the second.

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
        tolerance, most = accuracy.tolerance, accuracy.max_paths
        if tolerance is None:
            tolerance, most = DEFAULT_TOLERANCE, min(most, MAX_PATHS_PER_RUNG)
        flat = np.asarray(x).reshape(-1, x.shape[-1])
        record, which = Record(len(flat)), np.arange(len(flat))
        switches = kinks(flow.sde, flow.dimension, t1=flow.t1)
        fits = grid_applies(flow) is None and not switches
        fast = unresolved_in_time(flow, jnp.asarray(flat[:PROBED_POINTS])) > MAX_UNRESOLVED
        many = GRID_POINTS if jax.default_backend() == "cpu" else GRID_POINTS_ON_GPU
        contracts = bool(_contraction(flow) > MAX_EXPANSION)
        if fits and (contracts or len(flat) >= many[flow.dimension]):
            which, fits = _grid(flow, flat, which, tolerance, record), False
        for doubling in range(1 + MAX_DOUBLINGS):
            if which.size:
                points = Points(flow, flat, key)
                _climb(points, which, tolerance, most, record, fits and not doubling, contracts)
            # More paths do not reduce what functions leave out or steps miss.
            truncated, unsolved = (
                record.mostly(part, 0.5 * tolerance) for part in ("truncation_error", "solver_error")
            )
            which = np.union1d(truncated, unsolved)
            if not which.size:
                break
            flow = flow.with_driver(flow.driver.refined()) if truncated.size else flow
            flow = flow.with_finer_steps() if unsolved.size else flow
        record.parts["jump"] = np.full(len(flat), any(switch.kind == "jump" for switch in switches))
        record.parts["fast"] = np.full(len(flat), fast)
        if accuracy.tolerance is not None:
            record.parts["unmet"] = record.total_error() > tolerance
        return gathered([(np.arange(len(flat)), record.parts)], "paths", x.shape[:-1], x.dtype)


def _without_noise(flow: AbstractStochasticFlow, x: Any, key: PRNGKeyArray) -> Estimate:
    """One pull-back, which is exact but for the solver's steps and a random divergence."""
    estimate = PullBack(1).estimate(flow, x, key=key, accuracy=Accuracy())
    zero = jnp.zeros_like(estimate.log_prob)
    parts = lambda e: (e.standard_error, e.truncation_error, e.rung)
    return eqx.tree_at(parts, estimate, (zero, zero, jnp.zeros_like(estimate.rung)))


class Record:
    """The best that is known of every point: parts of an `Estimate`, arrays of NumPy; and where weights are
    `poor`, so that they say little."""

    def __init__(self, size: int):
        self.parts: dict[str, np.ndarray] = {}
        self.poor = np.ones(size, bool)

    def put(self, which: np.ndarray, new: dict[str, np.ndarray], poor: np.ndarray, method: str) -> None:
        """What a rung found of the points `which`. It stands unless what was known is as good and surer;
        where both are good and differ, that is told."""
        new = {**new, "rung": np.full(len(which), METHODS.index(method))}
        new.setdefault("steep", np.zeros(len(which), bool))
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

    def mostly(self, part: str, tolerance: float) -> np.ndarray:
        """The points with weights that are not poor and an error that consists mostly of this part."""
        error = self.parts[part]
        mostly = (error > tolerance) & (error > self.parts["standard_error"])
        return np.flatnonzero(mostly & np.isfinite(error) & ~self.poor)

    def total_error(self) -> np.ndarray:
        return _total(self.parts)


def _total(parts: dict[str, np.ndarray]) -> np.ndarray:
    return parts["standard_error"] + parts["truncation_error"] + parts["solver_error"]


def _grid(
    flow: AbstractStochasticFlow, x: np.ndarray, which: np.ndarray, tolerance: float, record: Record
) -> np.ndarray:
    """The Fokker–Planck equation for the points `which`; returns those that it leaves to others."""
    found = grid_estimate(flow, x[which], tolerance, max_work=GRID_WORK[flow.dimension])
    value, error = (np.asarray(part, float) for part in found)
    size, zero = len(which), np.zeros(len(which))
    parts = {
        **{"log_prob": np.where(np.isnan(value), -np.inf, value), "solver_error": error},
        **{"standard_error": zero, "truncation_error": zero, "effective_paths": np.full(size, np.inf)},
        **dict.fromkeys(("num_paths", "escaped"), np.zeros(size, int)),
        "pareto_k": np.full(size, np.nan),
    }
    met = error <= tolerance
    record.put(which, parts, ~met, "grid")
    return which[~met]


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


def _climb(
    points: Points,
    which: np.ndarray,
    tolerance: float,
    most: int,
    record: Record,
    fits: bool,
    contracts: bool,
) -> None:
    """Rung by rung, with the points that need the next one. `fits` says whether a grid is one, `contracts`
    that prior draws are not."""
    flow = points.levels.flow
    if not contracts:
        which = _rounds(Rounds(points, which, Sobol(), None, most), tolerance, most, record, "paths")
    if which.size and (learned := _learned(flow)) is not None:
        mixture = mixtures(learned, points, which)
        mixture = None if mixture is None else mixture.with_prior(LEARNED_SHARE)
        which = _rounds(Rounds(points, which, Sobol(), mixture, most), tolerance, most, record, "learned")
    if not which.size:
        return
    mixture = mixtures(Laplace(), points, which)
    assert mixture is not None
    _around_modes(points, which, mixture, tolerance, most, record)
    unmet = which[record.poor[which] | (record.total_error()[which] > tolerance)]
    if fits and unmet.size:
        _grid(flow, points.x, unmet, tolerance, record)
    still = record.poor[which]
    if still.any():
        _particles(points, which[still], jax.tree.map(lambda a: a[still], mixture), record)


def _learned(flow: AbstractStochasticFlow) -> AbstractProposal | None:
    """The proposal that was trained with the flow."""
    learned = flow.proposal
    return learned if isinstance(learned, AbstractProposal) and not isinstance(learned, Prior) else None


def _around_modes(
    points: Points, which: np.ndarray, mixture: Mixture, tolerance: float, most: int, record: Record
) -> None:
    """Paths around the likeliest ones, and as many with twice the functions around their own: where backward
    solves spread, what was added at random would be all that is seen."""
    flow, finer, found = points.levels.flow, None, []
    if points.levels.refined is not None:
        finer = Points(flow.with_driver(points.levels.refined), points.x, points.key)
    for some in (points,) if finer is None else (points, finer):
        own = Record(len(points.x))
        around = mixture if some is points else mixtures(Laplace(), some, which)
        _rounds(Rounds(some, which, Sobol(), around, most, coupled=False), tolerance, most, own, "modes")
        found.append(own)
    coarse, fine = found[0], found[-1]
    parts = {name: part[which] for name, part in fine.parts.items()}
    with np.errstate(invalid="ignore"):
        change = np.abs(parts["log_prob"] - coarse.parts["log_prob"][which])
    parts["truncation_error"] = np.where(np.isnan(change), np.inf, change)
    record.put(which, parts, fine.poor[which] | coarse.poor[which], "modes")


def _rounds(rounds: Rounds, tolerance: float, most: int, record: Record, name: str) -> np.ndarray:
    """More and more paths, until the error is small enough, the weights show that they will not do, or there
    are `most`. Returns the points that need another rung."""
    needs_more, total = np.zeros(len(record.poor), bool), min(FIRST_PATHS, most)
    record.poor[rounds.which] = True
    while len(rounds.which):
        rounds.grow(total)
        parts = rounds.parts(corrected=True)
        error = parts["standard_error"]
        few = parts["effective_paths"] < (2 * FEW_PATHS if total > FIRST_PATHS else 0.4 * FEW_PATHS)
        # Tangent Gaussians have tails that many bundles of paths hide in.
        heavy = HEAVY if rounds.mixture is None else HEAVY_AROUND_MODES
        poor = few | (parts["pareto_k"] > heavy) | ~np.isfinite(error)
        met = (error + parts["truncation_error"] <= tolerance) | (error <= 0.5 * tolerance)
        uneven = parts["effective_paths"] < EVEN_SHARE * total
        # Sobol' numbers are better than that, but not always.
        hopeless = uneven & (total * (error / tolerance) ** 2 > 4 * most)
        ends = (met & ~poor) | few | (hopeless & (total > FIRST_PATHS)) | (GROWTH * total > most)
        which, done = rounds.finished(ends, parts)
        record.put(which, done, poor[ends], name)
        needs_more[which] = (poor | (uneven & ~met))[ends]
        rounds.keep(~ends)
        total *= GROWTH
    return np.flatnonzero(needs_more)


def _particles(points: Points, which: np.ndarray, mixture: Mixture, record: Record) -> None:
    """The last rung, for points with poor weights."""
    levels = points.levels
    found = points.run(partial(_move, levels.flow), which, mixture)
    at = lambda level: points.run(partial(_solve_at, level), which, found.omega)
    own, finer = at(levels.own), at(levels.finer_steps)
    with np.errstate(invalid="ignore"):
        parts = particle_parts(found.log_weights)
        parts["solver_error"] = mean_and_spread(finer - own, np)
    # As paths around the modes saw it, in spite of their weights.
    parts["truncation_error"] = record.parts["truncation_error"][which]
    parts["steep"] = np.asarray(mixture.steepness) > MAX_EXPANSION
    poor = parts["effective_paths"] < FEW_PATHS
    record.put(which, parts, poor, "particles")


@partial(jit, level=1)
def _move(flow: AbstractStochasticFlow, x, key, places, mixture: Mixture, here, block: int) -> Particles:
    del block
    return moved(flow, x, mixture, point_keys(key, places), here)


@partial(jit, level=1)
def _solve_at(level: Level, x, key, places, omega: Array, here, block: int) -> Array:
    """log p(x | ω) `(B, K)` at given paths, with the flow's own functions."""

    def some(given):
        x, place, omega = given
        index = jnp.broadcast_to(jnp.arange(omega.shape[1]), omega.shape[:2])
        keys = solve_keys(level.flow, point_keys(key, place), index)
        return level.solved(x, omega, jnp.zeros_like(omega), keys)

    return update_where(here, some, (x, places, omega), jnp.zeros(omega.shape[:2], x.dtype), block)


def _fixed_budget(flow: AbstractStochasticFlow, x: Array, key: PRNGKeyArray, errors: bool) -> Estimate:
    """The first rungs inside `jit`, where values are unknown: a fixed number of paths per point, from the
    prior or, where a quarter of them have uneven weights, from the next proposal."""
    flow, flat = flow.without_errors(), jnp.reshape(x, (-1, x.shape[-1]))
    keys = key if key.ndim else point_keys(key, jnp.arange(len(flat)))
    fixed, points = constant((flow, flat))
    places = jnp.broadcast_to(jnp.arange(FIXED_BUDGET_PATHS), (len(flat), FIXED_BUDGET_PATHS))
    first = draw(Level(fixed), points, keys, None, Sobol(), places[:, :FIRST_PATHS], FIXED_BUDGET_PATHS)
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
    """The learned proposal, or that around the modes, of points that are `poor`; of others the prior."""
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
