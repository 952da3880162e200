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


def main(out, settings, port=None, process=None):
    settings = json.loads(settings)
    jax.config.update("jax_enable_x64", True)
    if port is not None:
        jax.distributed.initialize(f"localhost:{port}", 2, int(process), heartbeat_timeout_seconds=20)
    import numpy as np
    from fits import grouped

    import roughflow as rf

    found = {}
    for run in settings:
        if run.pop("cut", False):
            threading.Thread(target=press, args=(Path(run["checkpoint"]),), daemon=True).start()
        name, count = run.pop("name"), run.pop("devices")
        key, solved = jax.random.key(0), []
        if run.pop("likelihood", False):
            objective, flow = rf.MaximumLikelihood(2, rf.Prior()), rf.neural_flow(2, 8, 1, key=key)
            flow = eqx.tree_at(lambda flow: flow.integrator, flow, told_of(solved))
        else:
            objective, flow = rf.Interpolant(), rf.train.velocity_flow(2, 8, 1, key=key)
        fitted = rf.fit(
            flow,
            jax.random.normal(key, (300, 2)) ** 3,
            key=key,
            objective=objective,
            validation=run.pop("validation", 0.1),
            progress=False,
            # Four devices do not share 30 rows evenly.
            **grouped(run | {"batch_size": 30, "validate_every": 5, "average": 0.9, "devices": count}),
        )
        leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(fitted.model) if hasattr(leaf, "dtype")]
        found[name] = np.concatenate([*leaves, fitted.history.loss])
        found[f"{name} solved"] = np.array(solved)
    if hasattr(os, "SCHED_BATCH"):
        threads = map(int, os.listdir("/proc/self/task"))
        found["policies"] = np.array([os.sched_getscheduler(thread) for thread in threads])
    else:
        found["policies"] = np.zeros(1, int)
    np.savez(out, **found)


def told_of(solved):
    """An integrator that writes down how many paths it solves at a time."""
    import roughflow as rf

    class Told(rf.FixedGrid):
        def integrate(self, field, z, fraction, *, reverse):
            solved.append(len(z))
            return super().integrate(field, z, fraction, reverse=reverse)

    return Told(steps=2)


def press(checkpoint):
    """Ctrl-C, as soon as there is something to go on from."""
    while not checkpoint.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(*sys.argv[1:])
