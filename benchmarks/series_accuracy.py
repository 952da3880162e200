"""Errors of transition densities, for `benchmarks.series`, compared with four other methods.

Every transition starts from one point and ends at points within 2.5 standard deviations of the mean. Each end
point is repeated many times with its own random numbers. Pedersen's simulated likelihood has as many paths as
fit into a given time, and the number of small steps with the smallest error, which is unknown in practice.
Times are CPU times, which other programs hardly affect.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.series_peers import BLOCK, euler, local_linear, milstein, pedersen
from benchmarks.timing import verdict

SPANS = {"1/250": 1 / 250, "1/12": 1 / 12, "1/2": 1 / 2, "1": 1.0}
PLACES = np.linspace(-2.5, 2.5, 11)
TIMES = 20  # repetitions of each end point
LIMITS = {"1/250": 5e-4, "1/12": 5e-4, "1": 5e-3}
FASTER = 20.0
STEPS = (2, 4, 8, 16, 32)  # numbers of small steps of Pedersen's method
BUDGETS = (1, 6, 36)  # multiples of our time
ROUNDS = 3
ERRORS: Columns = (
    ("SDE and dt", 13),
    ("roughflow", 10),
    ("in x itself", 11),
    ("Euler", 9),
    ("Milstein", 9),
    ("local linear", 12),
)
RACE: Columns = (
    ("SDE and dt", 13),
    ("ms", 6),
    ("mean error", 10),
    *((f"Pedersen x {budget}", 13) for budget in BUDGETS),
    ("M, paths of last", 16),
    ("ratio", 7),
)


@dataclass(frozen=True)
class Case:
    """An SDE, a starting point, and end points given by the mean and standard deviations of a transition."""

    sde: rf.series.AbstractNamedSDE
    start: np.ndarray  # (d,)
    places: Callable[[float], np.ndarray]  # end points (k, d) for a time step
    positive: bool


def ou_places(sde: rf.OrnsteinUhlenbeck, start: np.ndarray, dt: float) -> np.ndarray:
    """End points along the columns of a square root of the covariance."""
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
    """End points on the logarithmic scale."""
    mu, sigma = float(sde.mu), float(sde.sigma)
    return start * np.exp((mu - 0.5 * sigma**2) * dt + PLACES[:, None] * sigma * np.sqrt(dt))


def case(sde: rf.series.AbstractNamedSDE, start: list[float], places: Callable, positive: bool) -> Case:
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
    """Print two tables row by row, then yield the verdicts."""
    problems = {
        (name, label): Problem.of(one, dt)
        for name, one in cases().items()
        for label, dt in SPANS.items()
        if not only or label in only
    }
    print("Largest error of the log-density within 2.5 standard deviations, nats\n")
    print_header(ERRORS)
    worst = {where: problem.largest(", ".join(where)) for where, problem in problems.items()}
    print(f"\nOur mean error, {TIMES * len(PLACES)} transitions per axis; Pedersen's in the same time and")
    print("more; how many times longer it needs for our error ('>' if not reached)\n")
    print_header(RACE)
    ratios = {where: race(", ".join(where), problem) for where, problem in problems.items()}
    print()
    yield from verdicts(worst, ratios)


@dataclass(frozen=True)
class Problem:
    """A case with one time step and repeated end points."""

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

    def pedersen(self, num_steps: int, num_blocks: int) -> Array:
        numbers = jnp.asarray(num_steps), jnp.asarray(num_blocks)
        settings = self.case.sde, self.x0, self.x1, jnp.asarray(self.dt), jax.random.key(1), *numbers
        return jax.block_until_ready(pedersen(*settings, self.case.positive))

    def error(self, value: Array) -> np.ndarray:
        return np.asarray(value) - self.truth

    def mean_error(self, value: Array) -> float:
        return float(np.mean(np.minimum(np.abs(self.error(value)), 20.0)))

    def largest(self, label: str) -> float:
        """Print the largest error of each method (without coordinates only if the SDE has some), and return
        ours."""
        arguments = self.case.sde, self.x0, self.x1, jnp.asarray(self.dt)
        values = [self.ours(), None, euler(*arguments), None, None]
        if self.case.positive:
            values[1] = self.ours(coordinates=rf.transition.Unchanged())
        if self.case.start.size == 1:
            values[3:] = [milstein(*arguments), local_linear(*arguments)]
        found = [None if value is None else np.abs(self.error(value)).max() for value in values]
        print_row(ERRORS, label, *("" if value is None else f"{value:.1e}" for value in found))
        return found[0]


def race(label: str, problem: Problem) -> float:
    """Print a row, and return a lower bound on how many times longer Pedersen's method needs for our mean
    error."""
    seconds, error = warm(problem.ours), problem.mean_error(problem.ours())
    tried: list[Try] = []
    for budget in BUDGETS:
        tried.append(best(problem, budget * seconds))
        if tried[-1].error <= error:
            break
    reached = tried[-1].error <= error
    ratio = time_to(tried, error) / seconds
    found = [f"{one.error:.1e}" for one in tried] + [""] * (len(BUDGETS) - len(tried))
    work = f"{tried[-1].num_steps}, {BLOCK * tried[-1].num_blocks}"
    last = f"{'' if reached else '> '}{ratio:.3g}"
    print_row(RACE, label, f"{1e3 * seconds:.1f}", f"{error:.1e}", *found, work, last)
    return ratio


@dataclass(frozen=True)
class Try:
    """A run of Pedersen's method: small steps, blocks of paths, seconds and mean error."""

    num_steps: int
    num_blocks: int
    seconds: float
    error: float


def best(problem: Problem, budget: float) -> Try:
    """The run with the best number of steps among those that take about `budget` seconds, with as many paths
    as fit."""
    tries = []
    for steps in STEPS:
        blocks = max(1, round(budget / warm(partial(problem.pedersen, steps, 1))))
        start = time.process_time()
        value = problem.pedersen(steps, blocks)
        tries.append(Try(steps, blocks, time.process_time() - start, problem.mean_error(value)))
    return min(tries, key=lambda one: one.error)


def time_to(tried: list[Try], error: float) -> float:
    """Seconds for an error, interpolated between the last two runs on a logarithmic scale; those of the last
    run if the error is not reached."""
    last = tried[-1]
    if last.error > error or len(tried) == 1:
        return last.seconds
    before = tried[-2]
    part = np.log(before.error / error) / np.log(before.error / last.error)
    return float(before.seconds * (last.seconds / before.seconds) ** part)


def warm(call: Callable[[], object]) -> float:
    """Median CPU seconds."""
    call()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return float(np.median(seconds))


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
    shown = f"{ratios[slowest]:.3g} times or more, least on {', '.join(slowest)}"
    claim = f"at equal mean error at least {FASTER:g} times faster than Pedersen's"
    yield verdict(ratios[slowest] >= FASTER, claim, shown)
