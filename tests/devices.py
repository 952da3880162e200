"""Fits one after another, as a program: `python devices.py OUT SETTINGS [PORT PROCESS]`. Run by
test_devices.py with simulated devices, and as one of two processes."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np


def main(out, settings, port=None, process=None):
    settings = json.loads(settings)
    jax.config.update("jax_enable_x64", True)
    if port is not None:
        jax.distributed.initialize(f"localhost:{port}", 2, int(process), heartbeat_timeout_seconds=20)
    found = {}
    for run in settings:
        if run.pop("cut", False):
            threading.Thread(target=press, args=(Path(run["checkpoint"]),), daemon=True).start()
        name = run.pop("name")
        found[name] = numbers_of(**run)
    if hasattr(os, "SCHED_BATCH"):
        threads = map(int, os.listdir("/proc/self/task"))
        found["policies"] = np.array([os.sched_getscheduler(thread) for thread in threads])
    else:
        found["policies"] = np.zeros(1, int)
    np.savez(out, **found)


def numbers_of(*, likelihood=False, **run):
    """Parameters and losses of a small fit. The validation rows and, on four devices, the batches have an
    uneven number of rows."""
    from fits import grouped

    import roughflow as rf

    key = jax.random.key(0)
    if likelihood:
        objective, flow = rf.MaximumLikelihood(2, rf.Prior()), rf.neural_flow(2, 8, 1, key=key)
        flow = eqx.tree_at(lambda flow: flow.integrator, flow, rf.FixedGrid(steps=2))
    else:
        objective, flow = rf.Interpolant(), rf.train.velocity_flow(2, 8, 1, key=key)
    fitted = rf.fit(
        flow,
        jax.random.normal(key, (300, 2)) ** 3,
        key=key,
        objective=objective,
        validation=0.0 if likelihood else 0.09,
        progress=False,
        **grouped(run | {"batch_size": 30, "validate_every": 5, "average": 0.9}),
    )
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(fitted.model) if hasattr(leaf, "dtype")]
    return np.concatenate([*leaves, fitted.history.loss])


def press(checkpoint):
    """Ctrl-C, as soon as there is something to go on from."""
    while not checkpoint.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(*sys.argv[1:])
