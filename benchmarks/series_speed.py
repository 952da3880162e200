"""Run times of likelihoods and fits, for `benchmarks.series`, each measured in a new process.

Each wall-clock time is followed by the CPU time, which other programs affect less.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

import roughflow as rf
from benchmarks.estimate_speed import peak_memory
from benchmarks.series_coverage import LENGTH, MONTH, START, cir_series
from benchmarks.timing import timed, verdict
from roughflow.series._likelihood import Likelihood
from roughflow.series._parameters import Parameters

MANY, ROUNDS = 5000, 5
WARM, FIRST, MEMORY, FIT = 2.0, 10.0, 2048.0, 30.0  # seconds, seconds, MiB, seconds


def speed() -> Iterator[str]:
    """Yield the measurements, then the verdicts."""
    likelihood, fit = in_new_process("likelihood"), in_new_process("fit")
    yield f"log-likelihood and scores of {MANY} CIR transitions, dt = 1/12"
    yield f"  first call {shown(likelihood, 'first')}, warm {shown(likelihood, 'warm')}"
    yield f"  peak memory {likelihood['memory']:.0f} MiB"
    yield f"fit of {LENGTH} CIR values with default settings, exact=False"
    yield f"  in a new process {shown(fit, 'first')}, then of another series {shown(fit, 'second')}\n"
    for claim, value, limit in (
        (f"a warm likelihood with scores takes less than {WARM:g} s", likelihood["warm"], WARM),
        (f"its first call takes less than {FIRST:g} s", likelihood["first"], FIRST),
        (f"it needs less than {MEMORY:g} MiB", likelihood["memory"], MEMORY),
        (f"a whole fit takes less than {FIT:g} s", fit["first"], FIT),
    ):
        yield verdict(value <= limit, claim, f"{value:.2f}")


def shown(metrics: Mapping[str, float], what: str) -> str:
    return f"{metrics[what]:.2f} s (processor {metrics[f'{what} processor']:.2f} s)"


def in_new_process(what: str) -> Mapping[str, float]:
    command = [sys.executable, "-m", "benchmarks.series_speed", what]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def likelihood_times() -> dict[str, float]:
    sde = rf.CoxIngersollRoss(*START.tolist())
    times, x = MONTH * np.arange(MANY + 1), cir_series(0, MANY + 1)
    parameters = Parameters.of(sde, sde.domains)
    of_sde = rf.series_likelihood(sde, times, x, key=jax.random.key(0), exact=False)
    likelihood = Likelihood(parameters=parameters, of_sde=of_sde, penalty=np.zeros(len(START)))
    call = lambda: likelihood.scores(np.log(START))
    first, warm = both("first", call), [both("warm", call) for _ in range(ROUNDS)]
    return first | {name: float(np.median([one[name] for one in warm])) for name in warm[0]}


def fit_times() -> dict[str, float]:
    sde, times = rf.CoxIngersollRoss(*START.tolist()), MONTH * np.arange(LENGTH)
    fit = lambda seed: rf.fit_sde(sde, times, cir_series(seed), key=jax.random.key(seed), exact=False)
    return both("first", lambda: fit(0).summary()) | both("second", lambda: fit(1).summary())


def both(name: str, call: Callable[[], object]) -> dict[str, float]:
    """Wall-clock and CPU seconds of a call."""
    start = time.process_time()
    passed = timed(call)
    return {name: passed, f"{name} processor": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("likelihood", "fit"), help="the measurement to print as JSON")
    jax.config.update("jax_enable_x64", True)
    metrics = likelihood_times() if parser.parse_args().what == "likelihood" else fit_times()
    print(json.dumps(metrics | {"memory": peak_memory() * 1e6 / 2**20}))


if __name__ == "__main__":
    main()
