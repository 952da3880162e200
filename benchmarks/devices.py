"""One fit on one device, on two, and in two processes: the same parameters, and how many steps a second.

Devices are cores: one device is pinned to one, two devices and two processes share two. Runs are repeated,
and the fastest counts: other programs on the machine only ever slow a run down.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS, BATCH, WIDTH = 200, 4096, 128
REPEATS = 3
PORT = 9870


def main():
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(Path(folder), name, *setting) for name, setting in SETTINGS.items()]
    parameters, rate = rows[0][1:]
    print(f"{STEPS} steps of {BATCH} rows, network of width {WIDTH}\n")
    print(f"{'':24} {'steps/s':>8} {'times':>6} {'difference':>11}")
    for name, found, speed in rows:
        apart = np.max(np.abs(found - parameters))
        print(f"{name:24} {speed:8.1f} {speed / rate:6.2f} {apart:11.1e}")


def measured(folder, name, cores, devices, processes):
    """The parameters, and the largest number of steps a second."""
    rates = []
    for i in range(REPEATS):
        outs = [folder / f"{p}.npz" for p in range(processes)]
        started = [start(out, cores[p], devices, p, processes, PORT + i) for p, out in enumerate(outs)]
        if any(process.wait() for process in started):
            raise SystemExit(f"{name} failed")
        found = np.load(outs[0])
        rates.append(STEPS / found["seconds"])
    return name, found["parameters"], max(rates)


SETTINGS = {
    "one device, one core": (["0"], 1, 1),
    "two devices, two cores": (["0,1"], 2, 1),
    "two processes, two cores": (["0,1", "0,1"], 1, 2),
}


def start(out, cores, devices, process, processes, port):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [str(out), str(devices), str(process), str(processes), str(port)]
    command = ["taskset", "-c", cores, sys.executable, "-m", "benchmarks.devices", *arguments]
    return subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": flags})


def run(out, devices, process, processes, port):
    """One process of one run: a fit to compile, and one to time."""
    import jax

    if int(processes) > 1:
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    import roughflow as rf

    key = jax.random.key(0)
    flow = rf.velocity_flow(6, width=WIDTH, depth=3, key=key)
    data = jax.random.normal(key, (10_000, 6)) ** 3
    settings = {"objective": rf.Interpolant(), "batch_size": BATCH, "progress": False, "steps": STEPS}
    fit = lambda: rf.fit(flow, data, key=key, devices=int(devices), **settings)
    fit()
    began = time.perf_counter()
    fitted = fit()
    seconds = time.perf_counter() - began
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(fitted.model) if hasattr(leaf, "dtype")]
    np.savez(out, parameters=np.concatenate(leaves), seconds=seconds)


if __name__ == "__main__":
    run(*sys.argv[1:]) if len(sys.argv) > 1 else main()
