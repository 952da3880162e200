"""Transition densities against the truth, for `benchmarks.series`, beside four others' methods.

Every transition starts from one point and ends at places within 2.5 standard deviations of where it may; each
place comes many times, with random numbers of its own. Pedersen's simulated likelihood has 4M² paths of M
small steps (Durham & Gallant 2002), so that its bias and its variance fall together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import roughflow as rf
from benchmarks.series_peers import euler, local_linear, milstein, pedersen
from benchmarks.timing import format_table, interleave, timed, verdict

SPANS = {"1/250": 1 / 250, "1/12": 1 / 12, "1/2": 1 / 2, "1": 1.0}
PLACES = np.linspace(-2.5, 2.5, 11)
TIMES = 50  # each place
LIMITS = {"1/250": 5e-4, "1/12": 5e-4, "1": 5e-3}
FASTER = 20.0
ROUNDS = 5
LONGEST = 4.0  # seconds of a call to Pedersen's
HEADER = ["SDE and dt", "roughflow", "in x itself", "Euler", "Milstein", "local linear"]
RACE = ["SDE and dt", "ms", "mean error", "Pedersen M", "paths", "ms", "mean error", "M", "paths", "ratio"]


@dataclass(frozen=True)
class Case:
    """An SDE, a point to start from, and where mean and standard deviations of a transition lead."""

    sde: rf.AbstractNamedSDE
    start: np.ndarray  # (d,)
    places: Callable[[float], np.ndarray]  # (k, d), for a span of time
    positive: bool


def ou_places(sde: rf.OrnsteinUhlenbeck, start: np.ndarray, dt: float) -> np.ndarray:
    """Along the columns of a root of the covariance."""
    kappa, mu, sigma = (np.atleast_1d(np.asarray(part)) for part in (sde.kappa, sde.mu, sde.sigma))
    kappa, sigma = np.atleast_2d(kappa), np.atleast_2d(sigma)
    values, vectors = np.linalg.eig(kappa)
    inverse = np.linalg.inv(vectors)
    decay = (vectors * np.exp(-values * dt)) @ inverse
    sums = values[:, None] + values[None, :]
    inner = inverse @ sigma @ sigma.T @ inverse.T * -np.expm1(-sums * dt) / sums
    root = np.linalg.cholesky(np.real(vectors @ inner @ vectors.T))
    mean = mu + np.real(decay) @ (start - mu)
    return np.concatenate([mean + PLACES[:, None] * column for column in root.T])


def cir_places(sde: rf.CoxIngersollRoss, start: np.ndarray, dt: float) -> np.ndarray:
    kappa, mu, sigma = (float(part) for part in (sde.kappa, sde.mu, sde.sigma))
    decay = np.exp(-kappa * dt)
    variance = sigma**2 / kappa * (start * (decay - decay**2) + 0.5 * mu * (1 - decay) ** 2)
    return mu + (start - mu) * decay + PLACES[:, None] * np.sqrt(variance)


def gbm_places(sde: rf.GeometricBrownianMotion, start: np.ndarray, dt: float) -> np.ndarray:
    """In the logarithm."""
    mu, sigma = float(sde.mu), float(sde.sigma)
    return start * np.exp((mu - 0.5 * sigma**2) * dt + PLACES[:, None] * sigma * np.sqrt(dt))


def case(sde: rf.AbstractNamedSDE, start: list[float], places: Callable, positive: bool) -> Case:
    point = np.array(start)
    return Case(sde, point, partial(places, sde, point), positive)


def cases() -> dict[str, Case]:
    plane = rf.OrnsteinUhlenbeck([[1.0, 0.5], [-0.3, 0.8]], [0.0, 0.0], [[0.4, 0.0], [0.2, 0.3]])
    return {
        "OU": case(rf.OrnsteinUhlenbeck(1.0, 0.5, 0.3), [0.2], ou_places, False),
        "CIR": case(rf.CoxIngersollRoss(3.0, 0.3, 0.2), [0.25], cir_places, True),
        "GBM": case(rf.GeometricBrownianMotion(0.1, 0.3), [1.0], gbm_places, True),
        "2-D OU": case(plane, [0.5, -0.3], ou_places, False),
    }


def accuracy(only: list[str] | None) -> Iterator[str]:
    """Yields two tables, then what was asked for."""
    yield "Largest error of the log-density within 2.5 standard deviations, nats"
    worst, races, rows = {}, {}, []
    for name, one in cases().items():
        for label, dt in SPANS.items():
            if only and label not in only:
                continue
            problem = Problem.of(one, dt)
            worst[name, label] = np.abs(problem.error(problem.ours())).max()
            rows.append([f"{name}, {label}", *problem.largest()])
            races[name, label] = race(problem)
    yield format_table(HEADER, rows)
    count = len(PLACES) * TIMES
    yield f"\nBeside Pedersen's, at equal time and at equal mean error; {count} transitions an axis"
    yield format_table(RACE, [[f"{name}, {label}", *races[name, label].cells()] for name, label in races])
    yield ""
    yield from verdicts(worst, {key: result.ratio for key, result in races.items()})


@dataclass(frozen=True)
class Problem:
    """A case over one span of time, each place many times."""

    case: Case
    dt: float
    x0: Array
    x1: Array
    truth: np.ndarray

    @staticmethod
    def of(case: Case, dt: float) -> "Problem":
        x1 = jnp.asarray(np.tile(case.places(dt), (TIMES, 1)))
        x0 = jnp.broadcast_to(jnp.asarray(case.start), x1.shape)
        truth = np.asarray(rf.transition_log_prob(case.sde, x0, x1, dt, key=jax.random.key(0)))
        return Problem(case, dt, x0, x1, truth)

    def ours(self, **settings) -> Array:
        value = rf.transition_log_prob(
            self.case.sde, self.x0, self.x1, self.dt, key=jax.random.key(0), exact=False, **settings
        )
        return jax.block_until_ready(value)

    def pedersen(self, num_steps: int, num_paths: int) -> Array:
        value = pedersen(
            self.case.sde,
            self.x0,
            self.x1,
            jnp.asarray(self.dt),
            jax.random.key(1),
            num_steps,
            num_paths,
            self.case.positive,
        )
        return jax.block_until_ready(value)

    def error(self, value: Array) -> np.ndarray:
        return np.asarray(value) - self.truth

    def mean_error(self, value: Array) -> float:
        return float(np.mean(np.minimum(np.abs(self.error(value)), 20.0)))

    def largest(self) -> list[str]:
        """The largest error of each method; without coordinates only where an SDE has some."""
        arguments = self.case.sde, self.x0, self.x1, jnp.asarray(self.dt)
        values = [self.ours(), None, euler(*arguments), None, None]
        if self.case.positive:
            values[1] = self.ours(coordinates=rf.Unchanged())
        if self.case.start.size == 1:
            values[3:] = [milstein(*arguments), local_linear(*arguments)]
        return ["" if value is None else f"{np.abs(self.error(value)).max():.1e}" for value in values]


@dataclass(frozen=True)
class Race:
    """Seconds and mean error of ours and of Pedersen's in as much time; then how much work it takes
    Pedersen's to have our error, and how much more time; `reached` says whether it was tried so far."""

    ours: tuple[float, float]
    equal: tuple[int, float, float]
    last: int
    ratio: float
    reached: bool

    def cells(self) -> list[str]:
        (our_s, our_error), (steps, seconds, error) = self.ours, self.equal
        own = [f"{1e3 * our_s:.1f}", f"{our_error:.1e}"]
        same = [f"{steps}", f"{paths(steps)}", f"{1e3 * seconds:.1f}", f"{error:.1e}"]
        mark = "" if self.reached else "> "
        return [*own, *same, f"{mark}{self.last}", f"{mark}{paths(self.last)}", f"{mark}{self.ratio:.3g}"]


def paths(num_steps: int) -> int:
    return 4 * num_steps**2


def race(problem: Problem) -> Race:
    ours = warm(problem.ours), problem.mean_error(problem.ours())
    tried, steps = [], 1
    while True:
        call = partial(problem.pedersen, steps, paths(steps))
        error = problem.mean_error(call())
        tried.append((steps, warm(call), error))
        if error <= ours[1] or 8 * tried[-1][1] > LONGEST:
            break
        steps *= 2
    reached = error <= ours[1]
    return Race(
        ours, at_equal_time(problem, tried, ours[0]), steps, time_to(tried, ours[1]) / ours[0], reached
    )


def at_equal_time(problem: Problem, tried: list, seconds: float) -> tuple[int, float, float]:
    """M, seconds and mean error of Pedersen's in about so many seconds."""
    # Time goes with M³; the cheapest that is measured well says how much.
    known = next((one for one in tried if one[1] > 0.3 * seconds), tried[-1])
    steps = max(1, round(known[0] * (seconds / known[1]) ** (1 / 3)))
    call = partial(problem.pedersen, steps, paths(steps))
    return steps, warm(call), problem.mean_error(call())


def time_to(tried: list, error: float) -> float:
    """Seconds for an error, between the last two tries on a logarithmic scale; those of the last, if it is
    not reached."""
    if tried[-1][2] > error or len(tried) == 1:
        return tried[-1][1]
    (_, s0, e0), (_, s1, e1) = tried[-2:]
    part = np.log(e0 / error) / np.log(e0 / max(e1, 1e-300))
    return float(s0 * (s1 / s0) ** part)


def warm(call: Callable[[], object]) -> float:
    """Median seconds, of few calls if they are long."""
    call()
    first = timed(call)
    return first if first > 1 else float(np.median(interleave({"": call}, ROUNDS)[""]))


def verdicts(
    worst: Mapping[tuple[str, str], float], ratios: Mapping[tuple[str, str], float]
) -> Iterator[str]:
    for label, limit in LIMITS.items():
        found = {name: value for (name, span), value in worst.items() if span == label}
        if found:
            shown = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
            good = all(value <= limit for value in found.values())
            yield verdict(good, f"within {limit:g} nats of the truth at dt = {label}", shown)
    slowest = min(ratios, key=ratios.__getitem__)
    shown = f"{ratios[slowest]:.3g} times on {', '.join(slowest)}, the least"
    claim = f"at equal mean error at least {FASTER:g} times faster than Pedersen's"
    yield verdict(ratios[slowest] >= FASTER, claim, shown)
