"""How often the total error bar covers the truth: `python -m benchmarks.coverage [--paths 16 64 256]`.

About 1000 random cases in float64: SDEs of four families, their numbers drawn at random, at points drawn from
each flow's own samples. For each number of paths and each family: the share of estimates within two bars of
the truth, the share flagged as `suspect`, and the median bar. The bar of a normal error would cover 95 %.

Linear SDEs and geometric Brownian motion have their distribution on the truncated driver in closed form: Z_T,
or its logarithm, is an affine map of normal numbers, and the map is read off the flow. Neural SDEs, with
noise that depends on the state, have a long run (`benchmarks.long_run`), whose error is part of the bar;
points where it is above 0.1, those of one flow that contracts strongly, are left out. Long runs are kept;
`--fresh` makes them anew.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from scipy import stats

import roughflow as rf
from benchmarks.density import Columns, print_header, print_row
from benchmarks.hard_problems import Reference, exact
from benchmarks.kept import kept_arrays, kept_file
from benchmarks.long_run import PullBackChart, long_run
from benchmarks.problems import LogNormalBase

PATHS = (16, 64, 256)
BARS, LOW, HIGH = 2.0, 0.92, 0.99
FLOOR = 1e-4  # what an ODE solver may leave where bars are zero
DRAWS, UNKNOWN = 2**13, 0.1  # of a long run, and the standard error from which it is no reference
COLUMNS: Columns = (
    ("paths and family", 22),
    ("cases", 6),
    ("in 2 bars", 9),
    ("flagged", 8),
    ("in 2 bars or flagged", 20),
    ("median bar", 10),
)


@dataclass(frozen=True)
class Case:
    """A flow, and some of its points with their references."""

    flow: rf.StochasticFlow
    x: np.ndarray
    truth: Reference


@dataclass(frozen=True)
class Result:
    """Over all cases of a family, (cases,) each."""

    bars: np.ndarray
    flagged: np.ndarray
    total_error: np.ndarray


class Linear(eqx.Module):
    """The drift Az + b."""

    matrix: Array
    offset: Array

    def __call__(self, t: Array, z: Array) -> Array:
        return self.matrix @ z + self.offset


class Scaled(eqx.Module):
    """A network times a number, as an array: flows that differ in it share a program."""

    network: rf.MLP
    scale: Array

    def __call__(self, t: Array, z: Array) -> Array:
        return self.scale * self.network(t, z)


class StateNoise(eqx.Module):
    """λ(I + M(z)), M a network's matrix with entries between −½ and ½."""

    network: rf.MLP
    scale: Array

    def __call__(self, t: Array, z: Array) -> Array:
        entries = 0.5 * jnp.tanh(self.network(t, z))
        return self.scale * (jnp.eye(z.size, dtype=z.dtype) + jnp.reshape(entries, (z.size, z.size)))


class Rate(eqx.Module):
    """Drift rz of geometric Brownian motion, or, as a column, its noise."""

    rate: Array
    column: bool = eqx.field(static=True)

    def __call__(self, t: Array, z: Array) -> Array:
        return self.rate * (z[:, None] if self.column else z)


def linear(key: PRNGKeyArray) -> rf.StochasticFlow:
    """A 2-D drift matrix that grows, decays or turns, and a full noise matrix."""
    keys = jax.random.split(key, 5)
    drift = Linear(1.5 * jax.random.normal(keys[0], (2, 2)), jax.random.normal(keys[1], (2,)))
    noise = rf.ConstantDiffusion(0.7 * jax.random.normal(keys[2], (2, 2)) + 0.3 * jnp.eye(2))
    base = rf.Normal(jax.random.normal(keys[3], (2,)), jnp.exp(0.5 * jax.random.normal(keys[4], (2,))))
    return rf.StochasticFlow(rf.ItoSDE(drift, noise), base)


def neural(dimension: int, key: PRNGKeyArray) -> rf.StochasticFlow:
    """Small networks; the drift is of size 0.9 to 8, the noise of size 0.3 to 2.7."""
    keys = jax.random.split(key, 4)
    size, noise = jnp.exp(jax.random.uniform(keys[0], (2,), minval=jnp.log(0.3), maxval=1.0))
    drift = Scaled(rf.MLP(dimension, dimension, 8, 2, key=keys[1]), 3 * size)
    diffusion = StateNoise(rf.MLP(dimension, dimension**2, 8, 1, key=keys[2]), noise)
    base = rf.Normal(jax.random.normal(keys[3], (dimension,)), 0.7)
    return rf.StochasticFlow(rf.ItoSDE(drift, diffusion), base)


def geometric(key: PRNGKeyArray) -> rf.StochasticFlow:
    numbers = jax.random.normal(key, (2, 1))
    sde = rf.ItoSDE(Rate(numbers[0], False), Rate(0.5 * jnp.exp(0.5 * numbers[1]), True))
    return rf.StochasticFlow(sde, LogNormalBase(jnp.zeros(1), 0.5 * jnp.ones(1)))


def normal_density(flow: rf.StochasticFlow, x: np.ndarray, log: bool) -> Reference:
    """log p where Z_T, or log Z_T, is an affine map of the normal numbers that make start and path."""
    d, shape = flow.dimension, (flow.driver.num_functions, flow.noise_dimension)
    take = jnp.log if log else lambda z: z

    def end(xi: Array) -> Array:
        path = flow.driver.path(jnp.reshape(xi[d:], shape), flow.t1)
        return take(flow.push_forward(flow.base.from_normal(xi[:d]), path)[0])

    zero = jnp.zeros(d + shape[0] * shape[1])
    mean, rows = np.asarray(end(zero)), np.asarray(jax.jacfwd(end)(zero))
    y = np.log(x) if log else x
    value = stats.multivariate_normal.logpdf(y, mean, rows @ rows.T)
    return exact(np.atleast_1d(value - (y.sum(axis=1) if log else 0)))


def simulated_density(flow: rf.StochasticFlow, x: np.ndarray) -> Reference:
    found = long_run(PullBackChart(flow), x, draws=DRAWS, key=jax.random.key(0))
    return Reference(found.log_prob, found.standard_error)


FLOWS, POINTS = 10, 25  # of a family, and of a flow
Family = tuple[Callable[[PRNGKeyArray], rf.StochasticFlow], Callable[..., Reference]]
FAMILIES: Mapping[str, Family] = {
    "linear": (linear, partial(normal_density, log=False)),
    "neural-1": (partial(neural, 1), simulated_density),
    "neural-2": (partial(neural, 2), simulated_density),
    "geometric": (geometric, partial(normal_density, log=True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", nargs="+", type=int, default=PATHS, metavar="K")
    parser.add_argument(
        "--only", nargs="+", choices=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES)
    )
    parser.add_argument("--fresh", action="store_true", help="compute long references anew")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    chosen = [name for name in FAMILIES if name in (options.only or FAMILIES)]
    cases = {name: make_cases(name, options.fresh) for name in chosen}
    print_header(COLUMNS)
    totals = {}
    for paths in options.paths:
        print(f"{paths} paths")
        results = {name: examine(cases[name], rf.Tempered(num_paths=paths)) for name in chosen}
        for name, result in results.items():
            print_result(f"  {name}", result)
        totals[paths] = pooled(results.values())
        print_result("  all", totals[paths])
    print()
    print("\n".join(verdicts(totals)), flush=True)


def make_cases(name: str, fresh: bool) -> list[Case]:
    make, refer = FAMILIES[name]
    cases = []
    for key in jax.random.split(jax.random.key(list(FAMILIES).index(name)), FLOWS):
        key_flow, key_x = jax.random.split(key)
        flow = make(key_flow)
        x = np.asarray(flow.sample(key=key_x, shape=(POINTS,)))
        file = kept_file("coverage", name, DRAWS, x, eqx.filter((flow.sde, flow.base), eqx.is_array))
        truth = kept_arrays(file, lambda flow=flow, x=x: list(astuple(refer(flow, x))), fresh=fresh)
        known = truth[1] < UNKNOWN
        if known.any():
            cases.append(Case(flow, x[known], Reference(*(part[known] for part in truth))))
    return cases


def examine(cases: list[Case], estimator: rf.AbstractEstimator) -> Result:
    """Estimates for all cases of a family, each flow with a key of its own."""
    parts = []
    for i, case in enumerate(cases):
        found = case.flow.estimate(case.x, key=jax.random.key(i), estimator=estimator)
        total = np.asarray(found.total_error)
        bar = np.hypot(total, case.truth.error) + FLOOR
        bars = np.abs(np.asarray(found.log_prob) - case.truth.value) / bar
        parts.append(Result(bars, np.asarray(found.suspect), total))
    return pooled(parts)


def pooled(results: Iterable[Result]) -> Result:
    columns = zip(*(astuple(result) for result in results), strict=True)
    return Result(*(np.concatenate(column) for column in columns))


def print_result(label: str, result: Result) -> None:
    print_row(
        COLUMNS,
        label,
        f"{result.bars.size}",
        f"{np.mean(result.bars <= BARS):.1%}",
        f"{result.flagged.mean():.1%}",
        f"{np.mean((result.bars <= BARS) | result.flagged):.1%}",
        f"{np.median(result.total_error):.2g}",
    )


def verdicts(totals: Mapping[int, Result]) -> Iterator[str]:
    """Where a linear SDE leaves no Monte Carlo error there is nothing to be covered."""
    for paths, result in totals.items():
        noisy = result.total_error > FLOOR
        share = np.mean(result.bars[noisy] <= BARS)
        word = "holds" if LOW <= share <= HIGH else "FALLS SHORT"
        claim = f"{paths} paths: within {BARS:g} bars in {LOW:.0%} to {HIGH:.0%}"
        yield f"{word}: {claim} of the {noisy.sum()} cases with a bar above {FLOOR:g}: {share:.1%}"


if __name__ == "__main__":
    main()
