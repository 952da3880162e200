"""The default estimator, which applies to each point the cheapest method that is accurate enough."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key
from .._functions import fixed_functions
from .._programs import jit
from ..flow import AbstractStochasticFlow, ExactDivergence, some_points, unresolved_in_time
from ..sde import kinks, noise_matrix
from ._draws import Sobol
from ._estimate import (
    COARSE,
    FEW_PATHS,
    METHODS,
    AbstractEstimator,
    Accuracy,
    Estimate,
    blank_parts,
    weights_error,
)
from ._grid import applies as grid_applies, estimate as grid_estimate
from ._modes import PRIOR_SHARE, Laplace, constant
from ._particles import PARTICLES, RUNS, particle_parts
from ._paths import (
    GROWTH,
    Level,
    Parts,
    Points,
    PullBack,
    checked_points,
    coarser,
    estimate_of,
    exact,
    forward_draws,
    in_rounds,
    is_inside_jit,
    mixtures,
)
from ._proposals import AbstractProposal, Mixture, Prior

DEFAULT_TOLERANCE = 0.05  # target of the total error in nats, if the user gives no tolerance
# Total error in nats below which no other method is tried, if the user gives no tolerance.
ACCEPTED_ERROR = 0.1
FIRST_PATHS = 256  # number of paths in the first round
PATHS_BEYOND_GRID = 32  # around modes, for densities below about 1e-7 of the maximum
# Maximum number of paths in a round, of all points together, if the user gives no tolerance.
PATHS_PER_ROUND = {"cpu": 2**19, "gpu": 2**22}
# If many points in three or more dimensions need more paths, paths around modes are better.
MAX_PATHS_WITHOUT_GRID = 2**12
# If at most this share of the points is left and the user gives no tolerance, no other method is compiled.
FEW_LEFT = 0.01
MAX_PATHS_AROUND_MODES = 2**10  # if the user gives no tolerance
# Number of effective runs of particles below which a single run determines the result.
FEW_RUNS = 2.0
FIXED_BUDGET_PATHS = 256  # number of paths inside jit
FEW_STARTS = 4  # number of starts of a mode search at points where the density is almost zero
# Number of points, by dimension, above which a grid is cheaper than paths.
GRID_POINTS, GRID_POINTS_ON_GPU = {1: 64, 2: 256}, {1: 4096, 2: 16384}
GRID_WORK = 4e8  # maximum work of a grid, ten to thirty seconds on a CPU
# Effective fraction of the paths around modes below which other bundles of paths may have been missed.
EVEN_SHARE = 0.25
# Points are far in the tail if the squared norm of the most likely path exceeds that of a d-dimensional
# standard normal variable with less than this probability.
FAR_TAIL = 1e-5
PROBES = 4  # number of draws of a random divergence, if there is no noise
PROBED_POINTS = 8  # points at which the time dependence of the coefficients is checked
CONTRACTION_PATHS, CONTRACTION_STEPS = 64, 32
# Expansion factor per dimension of backward solves above which prior draws may miss paths.
MAX_EXPANSION = 20.0
MAX_UNRESOLVED = 0.05  # in nats; tolerated change of log p due to unresolved time dependence
MAX_GAP = 3.0  # in standard errors; tolerated difference between two methods


class Ladder(AbstractEstimator):
    """The default estimator. It draws paths from the prior until the total error is small enough, and uses
    other methods for points that need them.

    Each method is applied only to the points for which the earlier ones were not accurate enough:

    1. **Paths** drawn from the distribution of the driver with scrambled Sobol' numbers: 256 per point, then
       four times as many, and so on until the total error is below the tolerance (0.05 by default), or until
       a round would need more than 2¹⁹ paths for all points together (2²² on a GPU). If many points in three
       or more dimensions need more than 4,096, step 3 follows instead. All paths are solved with half of the
       driver's functions and steps, and some also with all of them; the difference corrects the value and
       bounds the remaining error. If the remaining error is too large, all paths are solved with all
       functions and steps. If no tolerance is given, an error of 0.1 is accepted in the end. If at most one
       point in a hundred is then left, no other method is used, and points with poor weights are flagged.
    2. In one and two dimensions, a **grid** (`rf.density.Grid`). It comes first if there are many points,
       because its cost does not depend on their number, or if the SDE contracts strongly, because prior draws
       may then miss paths.
    3. Paths from the learned proposal of the flow, if it has one, and then paths **around the most likely
       paths** to x (`rf.Laplace`). If the weights are poor, **particles** start from these paths and are
       moved towards the distribution of the path given x (Del Moral, Doucet & Jasra 2006).

    `Estimate.method` says which step produced each value. Inside `jit` and `grad`, where values are unknown,
    256 paths are used for each point, from step 1 or, if fewer than a quarter of them are effective, from
    step 3.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    # An explosive SDE, in which several bundles of paths lead to x:
    sde = rf.ItoSDE(lambda t, z: 2 * z**3, lambda t, z: 0.5 * jnp.eye(1))
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
            return _inside_jit(flow.without_errors(), x, key, accuracy)
        climb = Climb(np.asarray(x).reshape(-1, x.shape[-1]), key, accuracy)
        with fixed_functions():
            climb.run(flow)
        return estimate_of(climb.parts, x.shape[:-1], x.dtype)


def _inside_jit(flow: AbstractStochasticFlow, x: Array, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
    """The estimate from a fixed number of paths. They are drawn from the prior or, for points with poor
    weights, from the learned proposal or around modes."""
    learned, contracts = _learned(flow), _contraction(constant(flow)) > MAX_EXPANSION
    proposal, method = (Laplace(), "modes") if learned is None else (learned, "learned")
    ask = lambda *given: PullBack(FIXED_BUDGET_PATHS, given[0]).traced(flow, x, key, accuracy, given[1])
    first = ask(Prior(Sobol()), "paths")
    even = EVEN_SHARE * FIXED_BUDGET_PATHS
    poor = ~(first.effective_paths >= even) | contracts

    def other() -> Estimate:
        found = ask(proposal, method)
        uneven = found.effective_paths < jnp.where(contracts, even, 2 * FEW_PATHS)
        found = eqx.tree_at(lambda e: e.steep, found, uneven | ~(found.total_error < COARSE))
        return jax.tree.map(lambda a, b: jnp.where(poor, a, b), found, first)

    return jax.lax.cond(jnp.any(poor), other, lambda: first)


def _without_noise(flow: AbstractStochasticFlow, x: Any, key: PRNGKeyArray) -> Estimate:
    """The estimate for a flow without noise: one pull-back, which is exact up to the solver error, or a few
    if the divergence is random."""
    probes = 1 if isinstance(exact(flow).divergence, ExactDivergence) else PROBES
    every = [PullBack(1).estimate(flow, x, key=k, accuracy=Accuracy()) for k in jax.random.split(key, probes)]
    values, one = jnp.stack([each.log_prob for each in every]), every[0]
    error = weights_error(values) if probes > 1 else jnp.zeros_like(one.log_prob)
    parts = lambda e: (e.log_prob, e.standard_error, e.truncation_error, e.solver_error, e.rung)
    solver, rung = 0.5 * one.truncation_error, jnp.full_like(one.rung, METHODS.index("exact"))
    return eqx.tree_at(parts, one, (values.mean(axis=0), error, jnp.zeros_like(error), solver, rung))


class Climb:
    """The best estimates so far of log p at points x `(N, d)`, as fields of an `Estimate`; `poor` marks
    points whose weights are too uneven to be reliable."""

    def __init__(self, x: np.ndarray, key: PRNGKeyArray, accuracy: Accuracy):
        self.x, self.key, self.accuracy = x, key, accuracy
        self.aim = accuracy.tolerance or DEFAULT_TOLERANCE
        self.accepted = accuracy.tolerance or ACCEPTED_ERROR
        blank = blank_parts((len(x),), float, "paths")
        self.parts = {name: part.copy() for name, part in blank.items()}
        self.parts["standard_error"][:] = np.inf
        self.poor = np.ones(len(x), bool)

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
        if which.size and not contracts:
            which = self.from_prior(flow, which)
            if not given and which.size <= FEW_LEFT * len(self.x):
                which = which[:0]
        if fits and which.size:
            which = self.grid(flow, which)
        if which.size:
            self.near(Points(flow, self.x, self.key), which)
        self.parts["steep"] = self.parts["steep"] | self.poor
        self.parts["jump"] = np.full(len(self.x), any(switch.kind == "jump" for switch in switches))
        self.parts["fast"] = np.full(len(self.x), fast)
        if given:
            self.parts["unmet"] = total_error(self.parts) > self.accepted

    def put(self, which: np.ndarray, new: Parts, poor: np.ndarray, method: str) -> None:
        """Record the results of a method for the points `which`. A new result replaces the old one unless the
        old one is at least as reliable and has a smaller error. If both are reliable but differ, the point is
        flagged as steep."""
        new = {**blank_parts(which.shape, float, method), **new}
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

    def left(self, which: np.ndarray) -> np.ndarray:
        """The points among `which` that need another method."""
        return which[self.poor[which] | ~(total_error(self.parts)[which] <= self.accepted)]

    def grid(self, flow: AbstractStochasticFlow, which: np.ndarray) -> np.ndarray:
        """Solve the Fokker–Planck equation on a grid for the points `which`, and return those that the grid
        does not resolve."""
        found = grid_estimate(flow, self.x[which], self.aim, max_work=GRID_WORK)
        value, error = (np.asarray(part, float) for part in found)
        parts = {"log_prob": np.where(np.isnan(value), -np.inf, value), "solver_error": error}
        self.put(which, parts, ~(error <= self.accepted), "grid")
        return self.left(which)

    def from_prior(self, flow: AbstractStochasticFlow, which: np.ndarray) -> np.ndarray:
        """Use paths from the prior with half of the flow's functions and steps, and with all of them where
        the truncation error is too large. Return the points that need another method."""
        self.paths(Points(coarser(flow), self.x, self.key), which, None, "paths")
        # More paths do not reduce truncation and solver errors.
        error = self.parts["truncation_error"][which]
        mostly = (error > 0.5 * self.aim) & (error > self.parts["standard_error"][which])
        if (fine := which[mostly & np.isfinite(error) & ~self.poor[which]]).size:
            self.paths(Points(flow, self.x, self.key), fine, None, "paths")
        return self.left(which)

    def near(self, points: Points, which: np.ndarray) -> None:
        """Use paths from the learned proposal, and then paths around the most likely ones."""
        if (learned := _learned(points.flow)) is not None:
            mixture = mixtures(learned, points, which)
            assert mixture is not None
            self.paths(points, which, mixture.with_prior(PRIOR_SHARE), "learned")
            which = self.left(which)
        if which.size:
            self.around_modes(points, which)

    def around_modes(self, points: Points, which: np.ndarray) -> None:
        """Use paths around the most likely ones, once with the driver's functions and once with twice as
        many, each with its own modes. For points with poor weights, use particles that start from these
        paths.

        If backward solves expand, weights depend strongly on the coefficients of the added functions. With
        random coefficients instead of those from the modes, the weights for two bundles of paths in the plane
        change by 2 to 10 times p(x).
        """
        max_paths = self.accuracy.max_paths
        if self.accuracy.tolerance is None:
            max_paths = min(max_paths, MAX_PATHS_AROUND_MODES)
        around = [mixtures(Laplace(fine=np.float32(fine)), points, which) for fine in range(2)]
        coarse, parts = (
            self.weighed(points, which, mixture, max_paths, level)
            for mixture, level in zip(around, points.levels[:2], strict=True)
        )
        poor = coarse["poor"] | parts.pop("poor")
        with np.errstate(invalid="ignore"):
            change = np.abs(parts["log_prob"] - coarse["log_prob"])
        parts["truncation_error"] = np.where(np.isnan(change), np.inf, change)
        self.put(which, parts, poor | ~(change < COARSE), "modes")
        still = self.poor[which]
        if still.any() and self.accuracy.max_paths >= RUNS * PARTICLES:
            moved = particle_parts(points, which[still], jax.tree.map(lambda a: a[still], around[1]))
            # Even if the weights around modes are poor, their change shows the truncation error.
            moved["truncation_error"] = parts["truncation_error"][still]
            self.put(which[still], moved, moved["effective_paths"] < FEW_RUNS, "particles")
        assert around[1] is not None
        self.flag_far(points, which, around[1])

    def beyond_grid(self, points: Points, which: np.ndarray) -> None:
        """Use a few paths around modes, for points at which the density is almost zero and which no path from
        the prior would reach."""
        mixture, self.aim = mixtures(Laplace(num_starts=FEW_STARTS), points, which), self.accepted
        assert mixture is not None
        self.paths(points, which, mixture, "modes", PATHS_BEYOND_GRID)
        self.flag_far(points, which, mixture)

    def flag_far(self, points: Points, which: np.ndarray, mixture: Mixture) -> None:
        """Flag points far in the tail of a nonlinear SDE. Even the most likely path to such a point is so
        improbable that no forward draw resembles it, so draws cannot show other, equally improbable paths.

        For dZ₁ = dB₁, dZ₂ = 60 max(|Z₁| − 2.2, 0)² dt + 0.3 dB₂ from N(0, 0.1² I), the value at (0, 2) is too
        low by 0.8 to 1.2 with error bars of 0.4 to 0.7, because the search finds only the direct paths.
        """
        likely = np.argmax(mixture.log_share, axis=1)
        centre = np.take_along_axis(np.asarray(mixture.centre), likely[:, None, None], axis=1)[:, 0]
        chance = scipy.special.gammaincc(0.5 * mixture.dimension, 0.5 * np.sum(centre**2, axis=1))
        far = (chance < FAR_TAIL) & (self.parts["rung"][which] != METHODS.index("grid"))
        if far.any() and not forward_draws(points).is_linear:
            self.parts["steep"][which] |= far

    def paths(
        self,
        points: Points,
        which: np.ndarray,
        mixture: Mixture | None,
        name: str,
        max_paths: int | None = None,
    ) -> None:
        """Use paths from the prior or from a mixture. If `max_paths` is given, a rough error bar suffices,
        and paths are solved for one sign of the added coefficients only."""
        levels = points.levels if max_paths is None else points.levels[:2]
        parts = self.weighed(points, which, mixture, max_paths or self.accuracy.max_paths, *levels)
        poor, self.poor[which] = parts.pop("poor"), True
        self.put(which, parts, poor, name)

    def weighed(
        self, points: Points, which: np.ndarray, mixture: Mixture | None, max_paths: int, *levels: Level
    ) -> Parts:
        """Add paths until the error is small enough, the weights turn out to be poor, or the maximum number
        is reached. Return fields of an `Estimate`, and a mask of the points with poor weights."""
        first = min(FIRST_PATHS, max_paths)

        def ends(parts: Parts, total: int) -> np.ndarray:
            error, effective = parts["standard_error"], parts["effective_paths"]
            both = error + parts["truncation_error"]
            poor = (effective < 2 * FEW_PATHS) | ~(both < COARSE)
            if len(levels) == 1:
                # For paths around modes this is not sufficient: for two bundles of curved paths, the error
                # was 0.5 although the error bar was 0.05.
                poor |= effective < EVEN_SHARE * total
            parts["poor"] = poor
            met = ((both <= self.aim) | (error <= 0.5 * self.aim)) & ~poor
            needed = total * (error / self.accepted) ** 2
            limit = self.limit(max_paths, needed[~met])
            hopeless = needed > limit
            return met | hopeless | (GROWTH * total > limit)

        return in_rounds(
            points, which, mixture, Sobol(), *levels, first=first, max_paths=max_paths, ends=ends
        )

    def limit(self, max_paths: int, needed: np.ndarray) -> int:
        """The maximum number of paths per point, if some points need the given numbers. By default it is
        larger if these points are few, because compiling another method would take as long as more paths."""
        if self.accuracy.tolerance is not None:
            return max_paths
        has_grid = self.x.shape[1] <= max(GRID_POINTS)
        if not has_grid and np.sum(needed > MAX_PATHS_WITHOUT_GRID) > FEW_LEFT * len(self.x):
            return min(max_paths, MAX_PATHS_WITHOUT_GRID)
        device = "cpu" if jax.default_backend() == "cpu" else "gpu"
        return min(max_paths, PATHS_PER_ROUND[device] // max(len(needed), 1))


def total_error(parts: Parts) -> np.ndarray:
    return parts["standard_error"] + parts["truncation_error"] + parts["solver_error"]


@partial(jit, level=1)
def _contraction(flow: AbstractStochasticFlow) -> Array:
    """The contraction factor of the drift per dimension, exp(−∫ div μ dt / d): the value that one simulated
    path in ten exceeds.

    Backward solves expand by the same factor and move away from the places to which paths contract. Paths
    from these places to x are rare among prior draws but have large weights. In a double well, for example,
    most prior draws that reach a point on the slope come from the ridge, but paths from the well contribute
    as much probability.
    """
    noise = np.random.default_rng(0).normal(size=(CONTRACTION_STEPS, CONTRACTION_PATHS, flow.noise_dimension))
    start = some_points(flow.base, flow.dimension, CONTRACTION_PATHS)
    length = jnp.asarray(flow.t1 / CONTRACTION_STEPS, start.dtype)

    def step(z: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        t, noise = given
        drift = lambda z: flow.sde.drift(t, z)
        kick = jax.vmap(lambda z, n: noise_matrix(flow.sde.noise(t, z)) @ n)(z, noise)
        new = z + length * jax.vmap(drift)(z) + jnp.sqrt(length) * kick
        divergence = jax.vmap(lambda z: jnp.trace(jax.jacfwd(drift)(z)))(z)
        fine = jnp.all(jnp.isfinite(new), axis=1) & jnp.isfinite(divergence)
        return jnp.where(fine[:, None], new, z), jnp.where(fine, divergence, 0)

    times = length * jnp.arange(CONTRACTION_STEPS, dtype=start.dtype)
    divergences = jax.lax.scan(step, start, (times, jnp.asarray(noise, start.dtype)))[1]
    total = length * jnp.sum(divergences, axis=0)
    return jnp.exp(-jnp.quantile(total, 0.1) / flow.dimension)


def _learned(flow: AbstractStochasticFlow) -> AbstractProposal | None:
    """The proposal that was trained with the flow, or None."""
    learned = flow.proposal
    return learned if isinstance(learned, AbstractProposal) and not isinstance(learned, Prior) else None
