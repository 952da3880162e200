"""The default estimator: the cheapest method that reaches the requested accuracy, point by point."""

from functools import partial
from typing import Any

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
from ._modes import Cloud, Laplace, TwoLevels, constant, refined_driver
from ._particles import particle_parts
from ._paths import (
    CLOUD_KEY,
    GROWTH,
    Level,
    Parts,
    Points,
    PullBack,
    Rounds,
    checked_points,
    coarser,
    draw,
    estimate_of,
    exact,
    grown,
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
# for a neural SDE, and 1 for an SDE where log p was off by .07 and the mean change of 32 paths was small.
MAX_STEP_CHANGE = 0.05


class Ladder(AbstractEstimator):
    """Paths from the prior until the total error is small enough; only points that need it get more. The
    default.

    In the pull-back form each path has exactly one start (`rf.PullBack`), so no way to x can be missed that
    paths are drawn near. Point by point:

    1. **Paths** from the driver's own distribution, scrambled Sobol' numbers: 256, then four times as many,
       until the total error is below the tolerance (0.05 by default), at most 16,384 or, for a few points,
       65,536. They are solved with half the driver's functions and steps, and some with all of them too: the
       difference corrects the value, and bounds the error that is left. Where that is too large, or finer
       steps change single paths, functions and steps are doubled. If no tolerance is given, an error of 0.1
       is accepted in the end.
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
        climb = Climb(np.asarray(x).reshape(-1, x.shape[-1]), key, accuracy)
        with fixed_functions():
            climb.run(flow)
        return estimate_of(climb.parts, x.shape[:-1], x.dtype)


def _without_noise(flow: AbstractStochasticFlow, x: Any, key: PRNGKeyArray) -> Estimate:
    """One pull-back, which is exact but for the solver's steps and a random divergence."""
    estimate = PullBack(1).estimate(flow, x, key=key, accuracy=Accuracy())
    zero, exact = jnp.zeros_like(estimate.log_prob), jnp.zeros_like(estimate.rung)
    parts = lambda e: (e.standard_error, e.truncation_error, e.solver_error, e.rung)
    return eqx.tree_at(parts, estimate, (zero, zero, 0.5 * estimate.truncation_error, exact))


class Climb:
    """The best that is known of log p at points x `(N, d)`, parts of an `Estimate`; where weights are `poor`,
    so that they say little; and where steps are too `rough` for weights to mean anything."""

    def __init__(self, x: np.ndarray, key: PRNGKeyArray, accuracy: Accuracy):
        self.x, self.key, self.accuracy = x, key, accuracy
        self.aim = accuracy.tolerance or DEFAULT_TOLERANCE
        self.accepted = accuracy.tolerance or ACCEPTED_ERROR
        self.parts: Parts = {}
        self.poor, self.rough = np.ones(len(x), bool), np.zeros(len(x), bool)

    def run(self, flow: AbstractStochasticFlow) -> None:
        which, given = np.arange(len(self.x)), self.accuracy.tolerance is not None
        switches = kinks(flow.sde, flow.dimension, t1=flow.t1)
        fits = grid_applies(flow) is None and not switches
        fast = unresolved_in_time(flow, jnp.asarray(self.x[:PROBED_POINTS])) > MAX_UNRESOLVED
        many = GRID_POINTS if jax.default_backend() == "cpu" else GRID_POINTS_ON_GPU
        contracts = bool(_contraction(flow) > MAX_EXPANSION)
        if fits and (contracts or len(which) >= many[flow.dimension]):
            which, fits = self.grid(flow, which), False
            if 0 < which.size < len(self.x) and not given:
                self.beyond_grid(Points(coarser(flow), self.x, self.key), which)
                which = which[:0]
        self.climb(flow, which, contracts)
        # By default good weights need no grid, which takes seconds, even if their error is above the aim.
        still = np.flatnonzero(self.poor | given & (total_error(self.parts) > self.accepted))
        if fits and still.size:
            self.grid(flow, still)
        self.parts["jump"] = np.full(len(self.x), any(switch.kind == "jump" for switch in switches))
        self.parts["fast"] = np.full(len(self.x), fast)
        if given:
            self.parts["unmet"] = total_error(self.parts) > self.accepted

    def climb(self, flow: AbstractStochasticFlow, which: np.ndarray, contracts: bool) -> None:
        """Paths for these points with half of the flow's functions and steps, then with all and, where those
        are too few, twice as many. Points that need another method get it with those of the flow or more."""
        first, others = (which[:0], which) if contracts else (which, which[:0])
        levels = [] if contracts else [coarser(flow)]
        for number in range(1 + MAX_DOUBLINGS):
            levels.append(flow if not number else doubled(levels[-1]))
        for number, level in enumerate(levels):
            if not (first.size or others.size):
                break
            points = Points(level, self.x, self.key)
            others = np.union1d(others, self.paths(points, first, None, "paths"))
            if number or contracts:
                learned = _learned(flow)
                if others.size and learned is not None:
                    mixture = mixtures(learned, points, others)
                    mixture = None if mixture is None else mixture.with_prior(LEARNED_SHARE)
                    others = self.paths(points, others, mixture, "learned")
                if others.size:
                    self.around_modes(points, others)
                others = others[:0]
            # More paths do not reduce what functions leave out and steps miss.
            first = np.setdiff1d(self.coarse(), others)

    def coarse(self) -> np.ndarray:
        """The points that need more functions or steps."""
        error = self.parts["truncation_error"]
        mostly = (error > 0.5 * self.aim) & (error > self.parts["standard_error"]) & np.isfinite(error)
        return np.flatnonzero(mostly & ~self.poor | self.rough)

    def put(self, which: np.ndarray, new: Parts, poor: np.ndarray, method: str) -> None:
        """What a method found of the points `which`. It stands unless what was known is as good and surer;
        where both are good and differ, the point is flagged as steep."""
        blank = {"steep": np.zeros(len(which), bool), "solver_error": np.zeros(len(which))}
        new = {**blank, **new, "rung": np.full(len(which), METHODS.index(method))}
        for name, part in new.items():
            if name not in self.parts:
                blank = np.inf if name == "standard_error" else 0
                self.parts[name] = np.full(len(self.poor), blank, part.dtype)
        old = {name: part[which] for name, part in self.parts.items()}
        known, surer = ~self.poor[which], total_error(old) < total_error(new)
        takes = np.where(known, ~poor & ~surer, ~(poor & surer))
        with np.errstate(invalid="ignore"):
            apart = np.abs(old["log_prob"] - new["log_prob"])
        wide = MAX_GAP * np.hypot(total_error(old), total_error(new))
        for name, part in new.items():
            self.parts[name][which] = np.where(takes, part, old[name])
        self.parts["steep"][which] |= known & ~poor & (apart > wide)
        self.poor[which] &= poor

    def grid(self, flow: AbstractStochasticFlow, which: np.ndarray) -> np.ndarray:
        """The Fokker–Planck equation for the points `which`; returns those that it does not resolve."""
        found = grid_estimate(flow, self.x[which], self.aim, max_work=GRID_WORK[flow.dimension])
        value, error = (np.asarray(part, float) for part in found)
        size, zero = len(which), np.zeros(len(which))
        parts = {
            **{"log_prob": np.where(np.isnan(value), -np.inf, value), "solver_error": error},
            **{"standard_error": zero, "truncation_error": zero, "effective_paths": np.full(size, np.inf)},
            **dict.fromkeys(("num_paths", "escaped"), np.zeros(size, int)),
            "pareto_k": np.full(size, np.nan),
        }
        unmet = ~(error <= self.accepted)
        self.put(which, parts, unmet, "grid")
        return which[unmet]

    def beyond_grid(self, points: Points, which: np.ndarray) -> None:
        """A few paths around modes, where there is next to no density: none from the prior would count."""
        mixture, self.aim = mixtures(Laplace(num_starts=FEW_STARTS), points, which), self.accepted
        self.paths(points, which, mixture, "modes", FIRST_AROUND_MODES)

    def paths(
        self, points: Points, which: np.ndarray, mixture: Mixture | None, name: str, most: int | None = None
    ) -> np.ndarray:
        """Paths from the prior or a mixture; returns the points that need another method."""
        if not which.size:
            return which
        levels, most = points.levels, most or self.accuracy.max_paths
        checks = (levels.finer, levels.mirrored)
        parts = self.weighed(Rounds(points, which, Sobol(), mixture, most, levels.own, checks))
        poor, rough = parts.pop("poor"), parts.pop("rough")
        self.poor[which] = True
        self.put(which, parts, poor, name)
        self.rough[which] = rough
        return which[~rough & (poor | (parts["standard_error"] > self.accepted))]

    def weighed(self, rounds: Rounds) -> Parts:
        """Add paths until the error is small enough, the weights turn out to be poor, or the maximum number
        is reached. Parts of an `Estimate`, and where weights are `poor` and steps `rough`."""
        around, most = rounds.mixture is not None, rounds.most
        first = min(FIRST_AROUND_MODES if around else FIRST_PATHS, most)

        def ends(parts: Parts, total: int) -> np.ndarray:
            change = rounds.step_change()
            parts["rough"] = rough = change > MAX_STEP_CHANGE
            parts["truncation_error"] = parts["truncation_error"] + np.where(rough, change, 0)
            error, effective = parts["standard_error"], parts["effective_paths"]
            both = error + parts["truncation_error"]
            # Tangent Gaussians have tails that many bundles of paths hide in.
            heavy = parts["pareto_k"] > (HEAVY_AROUND_MODES if around else HEAVY)
            poor = (effective < 2 * FEW_PATHS) | heavy | ~(both < COARSE) | rough
            if not rounds.checks:
                # Around modes: two bundles of curved paths were off by .5 with a bar of .05 and k below ½.
                poor |= effective < EVEN_SHARE * total
            parts["poor"] = poor
            met = ((both <= self.aim) | (error <= 0.5 * self.aim)) & ~poor
            limit = self.limit(most, int(np.sum(~met)))
            hopeless = (effective < EVEN_SHARE * total) & (total > FIRST_AROUND_MODES)
            hopeless &= total * (error / self.accepted) ** 2 > limit
            return met | rough | hopeless | (GROWTH * total > limit)

        return grown(rounds, first, True, ends)

    def limit(self, most: int, count: int) -> int:
        """The maximum number of paths for each of the points left: by default more if those are few, because
        another method takes as long to compile."""
        if self.accuracy.tolerance is not None:
            return most
        device = "cpu" if jax.default_backend() == "cpu" else "gpu"
        return min(most, max(MAX_PATHS_PER_RUNG, PATHS_OF_FEW[device] // max(count, 1)))

    def around_modes(self, points: Points, which: np.ndarray) -> None:
        """Paths around the most likely ones, with the driver's functions and with twice as many, each around
        its own modes. Then particles for points with poor weights."""
        levels, both = points.levels, mixtures(TwoLevels(), points, which)
        most = self.accuracy.max_paths
        if self.accuracy.tolerance is None:
            most = min(most, MAX_PATHS_AROUND_MODES)
        two = [jax.tree.map(lambda a, i=i: a[:, i], both) for i in range(2)]
        coarse, parts = (
            self.weighed(Rounds(points, which, Sobol(), mixture, most, level))
            for mixture, level in zip(two, (levels.own, levels.finer), strict=True)
        )
        poor = coarse["poor"] | parts.pop("poor")
        del parts["rough"]
        with np.errstate(invalid="ignore"):
            change = np.abs(parts["log_prob"] - coarse["log_prob"])
        parts["truncation_error"] = np.where(np.isnan(change), np.inf, change)
        steep = two[1].steepness > MAX_EXPANSION
        parts["steep"] = steep & (parts["effective_paths"] < EVEN_SHARE * parts["num_paths"])
        self.put(which, parts, poor, "modes")
        still = self.poor[which]
        if still.any() and most > FIRST_AROUND_MODES:
            moved = particle_parts(points, which[still], jax.tree.map(lambda a: a[still], two[1]))
            # What paths around the modes show of it, in spite of their weights.
            moved |= {"truncation_error": parts["truncation_error"][still], "steep": steep[still]}
            self.put(which[still], moved, moved["effective_paths"] < FEW_RUNS, "particles")


def doubled(flow: AbstractStochasticFlow) -> AbstractStochasticFlow:
    """With twice the driver's functions, if it can be refined, and steps half as long."""
    refined, flow = refined_driver(flow), flow.with_finer_steps()
    return flow if refined is None else flow.with_driver(refined)


def total_error(parts: Parts) -> np.ndarray:
    return parts["standard_error"] + parts["truncation_error"] + parts["solver_error"]


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


def _learned(flow: AbstractStochasticFlow) -> AbstractProposal | None:
    """The proposal that was trained with the flow."""
    learned = flow.proposal
    return learned if isinstance(learned, AbstractProposal) and not isinstance(learned, Prior) else None


def _fixed_budget(flow: AbstractStochasticFlow, x: Array, key: PRNGKeyArray, errors: bool) -> Estimate:
    """The first rungs inside `jit`, where values are unknown: a fixed number of paths per point, from the
    prior or, where a quarter of them have uneven weights, from the next proposal."""
    flow, flat = flow.without_errors(), jnp.reshape(x, (-1, x.shape[-1]))
    keys = key if key.ndim else point_keys(key, jnp.arange(len(flat)))
    fixed, points = constant((flow, flat))
    places = jnp.broadcast_to(jnp.arange(FIXED_BUDGET_PATHS), (len(flat), FIXED_BUDGET_PATHS))
    pilot = places[:, :FIRST_AROUND_MODES]
    weights, _ = draw(Level(fixed), points, keys, None, Sobol(), pilot, FIXED_BUDGET_PATHS)
    poor = _poor(weights) | (_contraction(fixed) > MAX_EXPANSION)
    mixture = _mixture_where(poor, fixed, points, keys)
    estimate = traced_estimate(flow, flat, keys, mixture, Sobol(), places, errors, corrected=True)
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
        like, width = jax.eval_shape(find, x), flow.driver.num_functions * flow.noise_dimension
        zeros = jnp.zeros((len(x), width), x.dtype)
        blank = Mixture.of(zeros, zeros + 1, flow.dimension)
        blank = jax.tree.map(lambda a, b: jnp.broadcast_to(a, b.shape), blank, like)
        mixture = update_where(poor, find, x, blank, 64)
    return constant(eqx.tree_at(lambda m: m.prior, mixture, jnp.where(poor, mixture.prior, 1)))
