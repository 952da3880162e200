"""What likelihoods and fits cost, for `benchmarks.series`: each measured in a new process."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping

import jax
import numpy as np

import roughflow as rf
from benchmarks.estimate_speed import peak_memory
from benchmarks.series_coverage import LENGTH, MONTH, START, cir_series
from benchmarks.timing import first_call, interleave, verdict
from roughflow.series._likelihood import Likelihood
from roughflow.series._observed import Observed
from roughflow.series._parameters import Parameters
from roughflow.series._transition import choose_effort

MANY, ROUNDS = 5000, 5
WARM, FIRST, MEMORY, FIT = 2.0, 10.0, 2048.0, 30.0  # seconds, seconds, MiB, seconds


def speed() -> Iterator[str]:
    """Yields what was measured, then what was asked for."""
    likelihood, fit = in_new_process("likelihood"), in_new_process("fit")
    yield f"log-likelihood and scores of {MANY} CIR transitions, dt = 1/12"
    yield f"  first call {likelihood['first']:.1f} s, warm {likelihood['warm']:.3f} s"
    yield f"  peak memory {likelihood['memory']:.0f} MiB"
    yield f"fit of {LENGTH} CIR values as it comes, exact=False"
    yield f"  in a new process {fit['first']:.1f} s, of another series then {fit['second']:.1f} s\n"
    for claim, value, limit in (
        (f"a warm likelihood with scores takes less than {WARM:g} s", likelihood["warm"], WARM),
        (f"its first call less than {FIRST:g} s", likelihood["first"], FIRST),
        (f"and less than {MEMORY:g} MiB", likelihood["memory"], MEMORY),
        (f"a whole fit takes less than {FIT:g} s", fit["first"], FIT),
    ):
        yield verdict(value <= limit, claim, f"{value:.2f}")


def in_new_process(what: str) -> Mapping[str, float]:
    command = [sys.executable, "-m", "benchmarks.series_speed", what]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def likelihood_times() -> dict[str, float]:
    sde = rf.CoxIngersollRoss(*START.tolist())
    observed = Observed.of(MONTH * np.arange(MANY + 1), cir_series(0, MANY + 1), sde.coordinates)
    steps, parameters = observed.transitions(), Parameters.of(sde, sde.domains)
    effort = choose_effort(sde, sde.coordinates, steps)
    likelihood = Likelihood(parameters, steps, jax.random.key(0), effort, None)
    call = lambda: likelihood.scores(np.log(START))
    return {"first": first_call(call), "warm": float(np.median(interleave({"": call}, ROUNDS)[""]))}


def fit_times() -> dict[str, float]:
    sde, times = rf.CoxIngersollRoss(*START.tolist()), MONTH * np.arange(LENGTH)
    fit = lambda seed: rf.fit_sde(sde, times, cir_series(seed), key=jax.random.key(seed), exact=False)
    return {"first": first_call(lambda: fit(0).summary()), "second": first_call(lambda: fit(1).summary())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("likelihood", "fit"), help="printed as JSON")
    jax.config.update("jax_enable_x64", True)
    metrics = likelihood_times() if parser.parse_args().what == "likelihood" else fit_times()
    print(json.dumps(metrics | {"memory": peak_memory() * 1e6 / 2**20}))


if __name__ == "__main__":
    main()
