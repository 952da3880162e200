"""The cost of an estimate: `python -m benchmarks.estimate_speed`.

The first model is a neural SDE fitted to the banana data by maximum likelihood, in float32. Warm calls are
timed for 1000 points with 64 paths each, with the default estimator, with `rf.PullBack(64, rf.Laplace())` and
with the learned proposal of the model, and for 10,000 points with the default estimator. The second model is
an Ornstein–Uhlenbeck flow in float64, in a new process. Two calls are timed without imports: the first call,
and the first call for a second SDE of the same shape whose parameters (Python numbers) differ. Peak memory is
measured in each process. The first model is stored in the temporary directory. The last lines state the
requirements and whether they are met.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import roughflow as rf
from benchmarks.timing import first_call, interleave, timed
from benchmarks.trained import banana_density

POINTS, MANY, PATHS, ROUNDS = 1000, 10_000, 64, 5
RATIO, MINUTE, FIRST, SECOND = 3.0, 60.0, 8.0, 1.0
Figures = Mapping[str, float]


class Restoring(eqx.Module):
    rate: float

    def __call__(self, t: Array, z: Array) -> Array:
        return -self.rate * z


class Constant(eqx.Module):
    scale: float

    def __call__(self, t: Array, z: Array) -> Array:
        return jnp.full((1, 1), self.scale, z.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", choices=list(PARTS), help="run only one part, in this process, and print JSON"
    )
    part = parser.parse_args().part
    if part:
        print(json.dumps(PARTS[part]() | {"memory": peak_memory()}))
        return
    with jax.enable_x64(False):
        banana_density()  # trained here if necessary, not in the process whose memory is measured
    metrics = {name: in_new_process(name) for name in PARTS}
    print("\n".join(report(metrics["fitted"], metrics["first"])))
    print("\nRequirements\n")
    print("\n".join(verdicts(metrics["fitted"], metrics["first"])), flush=True)


def in_new_process(part: str) -> Figures:
    command = [sys.executable, "-m", "benchmarks.estimate_speed", "--part", part]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def fitted_part() -> dict[str, float]:
    """Seconds of warm calls for a fitted flow."""
    model = banana_density()
    x = model.sample(key=jax.random.key(0), shape=(MANY,))
    ways = {
        "default": None,
        "laplace": rf.PullBack(PATHS, rf.Laplace()),
        "learned": rf.PullBack(PATHS, model.flow.proposal),
    }
    calls = {name: partial(estimate, model, x[:POINTS], estimator=way) for name, way in ways.items()}
    seconds = {name: float(np.median(times)) for name, times in interleave(calls, ROUNDS).items()}
    return seconds | {"many": timed(partial(estimate, model, x))}


def first_part() -> dict[str, float]:
    """Seconds of first calls for new SDEs in a new process, without imports."""
    assert rf.StochasticFlow
    jax.config.update("jax_enable_x64", True)
    x = jnp.linspace(-1, 1, 8)[:, None]
    flows = [ornstein_uhlenbeck(rate, scale) for rate, scale in ((2.0, 1.3), (1.5, 0.8))]
    first, second = (first_call(partial(estimate, flow, x)) for flow in flows)
    return {"first": first, "second": second, "warm": timed(partial(estimate, flows[1], x))}


def ornstein_uhlenbeck(rate: float, scale: float) -> rf.StochasticFlow:
    return rf.StochasticFlow(rf.ItoSDE(Restoring(rate), Constant(scale)), rf.Normal(jnp.ones(1), 0.5))


PARTS = {"fitted": fitted_part, "first": first_part}


def report(fitted: Figures, first: Figures) -> Iterator[str]:
    yield f"Fitted flow in the plane, float32, {POINTS} points x {PATHS} paths, seconds of a warm call"
    for name, title in (
        ("default", "default"),
        ("laplace", f"rf.PullBack({PATHS}, rf.Laplace())"),
        ("learned", f"rf.PullBack({PATHS}, the learned proposal)"),
    ):
        yield f"  {title:42} {fitted[name]:8.3f}   {fitted[name] / fitted['laplace']:5.2f} times Laplace"
    yield f"  {f'default, {MANY} points':42} {fitted['many']:8.3f}"
    yield f"  {'peak memory, MB':42} {fitted['memory']:8.0f}"
    yield "Ornstein-Uhlenbeck flow, float64, 8 points, seconds"
    yield f"  {'first call':42} {first['first']:8.3f}"
    yield f"  {'first call, another SDE of the same shape':42} {first['second']:8.3f}"
    yield f"  {'warm call':42} {first['warm']:8.3f}"
    yield f"  {'peak memory, MB':42} {first['memory']:8.0f}"


def verdicts(fitted: Figures, first: Figures) -> Iterator[str]:
    ratio = fitted["default"] / fitted["laplace"]
    for claim, value, limit in (
        (f"the default takes at most {RATIO:g} times PullBack({PATHS}, Laplace())", ratio, RATIO),
        (f"the default takes less than {MINUTE:g} s for {MANY} points", fitted["many"], MINUTE),
        (f"a first call takes less than {FIRST:g} s", first["first"], FIRST),
        (f"a first call on a second SDE of the same shape less than {SECOND:g} s", first["second"], SECOND),
    ):
        yield f"{'holds' if value <= limit else 'FALLS SHORT'}: {claim}: {value:.2f}"


def estimate(model: rf.StochasticFlow | rf.tables.Standardised, x: Array, **settings) -> rf.Estimate:
    return jax.block_until_ready(model.estimate(x, key=jax.random.key(1), **settings))


def peak_memory() -> float:
    """Peak memory of this process, in MB."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    main()
