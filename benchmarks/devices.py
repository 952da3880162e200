"""Fits on one device, on two, and in two processes: difference of the parameters, and steps per second.

The fits use regression, whose steps are short, and maximum likelihood, whose steps solve differential
equations. Devices are cores: one device uses one core, and two devices or two processes use two cores. Two
independent fits, one on each core, show the total speed of both cores. Runs are interleaved, and the fastest
run of each kind counts, because other programs can only slow a run down.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS, WARM_UP = (
    200,
    20,
)  # steps; enough for `rf.fit` to use the program that compiles more slowly and runs faster
REPEATS = 4
PORT = 9870


def main():
    for objective, told in OBJECTIVES.items():
        print(f"\n{STEPS} steps by {objective}, {told}\n")
        print(f"{'':24} {'steps/s':>8} {'times':>6} {'difference':>11}", flush=True)
        rates = {name: [] for name in SETTINGS}
        parameters = {}
        for i in range(REPEATS):
            for name, setting in SETTINGS.items():
                with tempfile.TemporaryDirectory() as folder:
                    parameters[name], rate = measured(Path(folder), name, objective, *setting, PORT + i)
                rates[name].append(rate)
        first = next(iter(SETTINGS))
        for name in SETTINGS:
            apart = np.max(np.abs(parameters[name] - parameters[first]))
            times = max(rates[name]) / max(rates[first])
            print(f"{name:24} {max(rates[name]):8.1f} {times:6.2f} {apart:11.1e}", flush=True)


def measured(folder, name, objective, cores, devices, processes, port):
    """The parameters, and the total number of steps per second of all fits."""
    outs = [folder / f"{p}.npz" for p in range(len(cores))]
    started = [
        start(out, core, objective, devices, p % processes, processes, port)
        for p, (out, core) in enumerate(zip(outs, cores, strict=True))
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"{name} failed")
    found = [np.load(out) for out in outs]
    return found[0]["parameters"], sum(STEPS / each["seconds"] for each in found) / processes


OBJECTIVES = {
    "regression": "4096 rows in 6 dimensions, width 128",
    "likelihood": "256 rows in the plane, width 64, 2 paths each",
}
SETTINGS = {
    "one device, one core": (["0"], 1, 1),
    "two devices, two cores": (["0,1"], 2, 1),
    "two processes, two cores": (["0", "1"], 1, 2),
    "two fits apart": (["0", "1"], 1, 1),
}


def start(out, cores, objective, devices, process, processes, port):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [str(out), objective, str(devices), str(process), str(processes), str(port)]
    command = ["taskset", "-c", cores, sys.executable, "-m", "benchmarks.devices", *arguments]
    return subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": flags})


def run(out, objective, devices, process, processes, port):
    """One process of one run: a few steps for compilation, then a fit that is timed."""
    import jax

    if int(processes) > 1:
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    import equinox as eqx

    import roughflow as rf

    key = jax.random.key(0)
    if objective == "regression":
        flow, rows, by = rf.train.velocity_flow(6, width=128, depth=3, key=key), 4096, rf.Interpolant()
    else:
        flow, rows, by = rf.neural_flow(2, width=64, depth=3, key=key), 256, rf.MaximumLikelihood(2)
        # With a given number of solver steps, nothing is compiled during the timed fit.
        flow = eqx.tree_at(lambda f: f.integrator, flow, rf.FixedGrid(steps=8))
    data = jax.random.normal(key, (10_000, flow.dimension))
    data = data.at[:, 0].add(0.5 * data[:, 1] ** 2)
    training, run = rf.train.TrainingOptions(batch_size=rows), rf.train.RunOptions(devices=int(devices))
    settings = {"objective": by, "progress": False, "training": training, "run": run}
    fit = lambda steps: rf.fit(flow, data, key=key, steps=steps, **settings)
    fit(WARM_UP)
    began = time.perf_counter()
    fitted = fit(STEPS)
    seconds = time.perf_counter() - began
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(fitted.model) if hasattr(leaf, "dtype")]
    np.savez(out, parameters=np.concatenate(leaves), seconds=seconds)


if __name__ == "__main__":
    run(*sys.argv[1:]) if len(sys.argv) > 1 else main()
