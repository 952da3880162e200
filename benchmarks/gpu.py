"""One training step on a GPU, compared with PyTorch: `python -m benchmarks.gpu [--skip-compile]`.

The workload is W1, the paper's model, with batches of 1000 points (with errors against a float64 reference)
and of 100,000 points. The entries are roughflow with the grid that suits the model and with the default grid,
PyTorch with a hand-written field, eager and compiled, and torchdiffeq as in FFJORD. Then a model is fitted to
10,000 rows of the banana data, and log-densities of 10,000 points are estimated. Without a GPU, the benchmark
stops with a message. It needs JAX with CUDA: `pip install "jax[cuda12]"`.
"""

import argparse
import os
import time
import warnings
from dataclasses import replace

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves GPU memory for PyTorch

import jax
import numpy as np
import torch

import roughflow as rf
from benchmarks.ours import density, library_model, make_entry, suited_steps
from benchmarks.peers_torch import torch_entries
from benchmarks.speed import check
from benchmarks.timing import Entry, first_call, format_table, interleave, summary, verdict
from benchmarks.workloads import BATCH, Workload, make_workload

LARGE, LIMIT_MS, ROUNDS = 100_000, 40.0, 10
HAND, FFJORD = "torch RK4 x 20, hand-fused", "torchdiffeq dopri5 adjoint, exact (FFJORD)"
HEADER = ["entry", "ms", "quartiles", "ratio", "first s", "max error", "gradient error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--skip-compile", action="store_true", help="omit the torch.compile variants")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        print("no GPU that both JAX and PyTorch can use: nothing to measure")
        return
    warnings.filterwarnings("ignore")  # deprecation warnings of other packages would interrupt the tables
    torch.set_default_device("cuda")
    small = make_workload("W1")
    rows, _ = table(small, not options.skip_compile, errors=True)
    print(f"{jax.devices()[0].device_kind}, float32\n\nW1, batch {BATCH}\n{rows}", flush=True)
    rows, median = table(enlarged(small), not options.skip_compile, errors=False)
    claim = f"W1 at batch {LARGE:,} in at most {LIMIT_MS:.0f} ms"
    print(
        f"\nW1, batch {LARGE:,}\n{rows}\n\n{verdict(median < LIMIT_MS, claim, f'{median:.1f} ms')}\n",
        flush=True,
    )
    fit_and_estimate()


def enlarged(workload: Workload) -> Workload:
    """The same points repeated, each with its own path."""
    times = LARGE // BATCH
    noise = np.random.default_rng(1).standard_normal((LARGE, *workload.noise.shape[1:]))
    probe, x = (np.tile(a, (times, 1)) for a in (workload.probe, workload.x))
    return replace(workload, x=x, noise=noise.astype(np.float32), probe=probe)


def entries_of(workload: Workload, compiled: bool) -> dict[str, Entry]:
    grids = {
        "suited grid": rf.FixedGrid(steps=suited_steps(make_workload("W1"))),
        "default grid": rf.FixedGrid(),
    }
    ours = {
        f"roughflow, its networks, {name}": make_entry(workload, density(workload, library_model, grid))
        for name, grid in grids.items()
    }
    wanted = {HAND, f"{HAND} [compiled]", FFJORD}
    peers = {name: e for name, e in torch_entries(workload, compiled).items() if name in wanted}
    return ours | {name: replace(e, step=finished(e.step)) for name, e in peers.items()}


def finished(step):
    """Wait for the GPU, because PyTorch returns before the computation has finished."""

    def call() -> None:
        step()
        torch.cuda.synchronize()

    return call


def table(workload: Workload, compiled: bool, errors: bool) -> tuple[str, float]:
    """The table, and the median milliseconds of its first entry."""
    entries, checks = entries_of(workload, compiled), {}
    for name, entry in entries.items():
        try:
            seconds = first_call(entry.step, entry.limit_s)
            found = check(*entry.evaluate(), workload, False) if errors else ["", ""]
            checks[name] = [f"{seconds:.1f}", *found]
        except Exception as error:  # an error in one package must not stop the others
            print(f"{name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    times = interleave({name: entries[name].step for name in checks}, ROUNDS)
    first = next(iter(times))
    rows = [[name, *summary(times[name], times[first]), *checks[name]] for name in checks]
    return format_table(HEADER, rows), 1e3 * float(np.median(times[first]))


def fit_and_estimate() -> None:
    """Fit a model to 10,000 rows of the banana data in 2,000 steps, and estimate the log-density of each
    row."""
    x = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(10_000,))
    for name in ("fit_density, 2,000 steps of regression", "again, compiled"):
        start = time.perf_counter()
        result = rf.fit_density(
            x,
            key=jax.random.key(1),
            steps=2000,
            noise=0.5,
            progress=False,
            flow=rf.tables.FlowOptions(likelihood_steps=0),
        )
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    for name in ("estimate of 10,000 points, 64 paths", "again, compiled"):
        start = time.perf_counter()
        estimate = jax.block_until_ready(result.model.estimate(x, key=jax.random.key(2)))
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"mean log-density {float(estimate.log_prob.mean()):.3f}")


if __name__ == "__main__":
    main()
