"""Training steps of roughflow and of other packages: `python -m benchmarks.speed [--only W1] [--rounds 10]`.

All entries of a workload, in JAX or PyTorch, run in turn in this process, on the same cores and from the same
weights (float32). Errors are relative to a float64 reference; "to first" is the relative distance between the
gradient of an entry and that of the first entry. This needs torch, torchdiffeq, torchsde, zuko, diffrax and
optax.
"""

import argparse
import warnings
from functools import cache
from importlib.metadata import version

import jax
import numpy as np

from benchmarks.ours import roughflow_entries, seconds_per_step
from benchmarks.peers_jax import jax_entries
from benchmarks.peers_torch import THREADS, torch_entries
from benchmarks.reference import reference
from benchmarks.timing import first_call, format_table, interleave, summary
from benchmarks.workloads import BATCH, Workload, make_workload

WRONG = 0.1  # a relative gradient error that no scheme, step size or probe explains
HEADER = ["entry", "ms", "quartiles", "ratio", "first s", "max error", "gradient error", "to first"]


def main() -> None:
    options = parse_arguments()
    # Only the entry that names the devices uses more than one.
    jax.config.update("jax_num_cpu_devices", THREADS)
    warnings.filterwarnings("ignore")  # deprecation warnings of other packages would interrupt the tables
    packages = ("jax", "diffrax", "torch", "torchdiffeq", "torchsde", "zuko")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    print(f"one process, torch on {THREADS} threads, float32, batch {BATCH}")
    for name in options.only or ["W0", "W1", "W2"]:
        print(f"\n{name}\n{report(make_workload(name), options)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="timed calls per entry")
    parser.add_argument("--only", action="append", choices=["W0", "W1", "W2"])
    parser.add_argument("--skip-compile", action="store_true", help="omit the torch.compile variants")
    parser.add_argument("--against", help="name of the entry that ratios refer to")
    return parser.parse_args()


def report(workload: Workload, options: argparse.Namespace) -> str:
    entries = (
        roughflow_entries(workload)
        | jax_entries(workload)
        | torch_entries(workload, compiled=not options.skip_compile)
    )
    checks, failures = {}, {}
    first_gradient = None
    for name, entry in entries.items():
        try:
            seconds = first_call(entry.step, entry.limit_s)
            values, gradient = entry.evaluate()
            first_gradient = gradient if first_gradient is None else first_gradient
            errors = check(values, gradient, workload, entry.hutchinson)
            checks[name] = [f"{seconds:.1f}", *errors, f"{distance(gradient, first_gradient):.0e}"]
        except Exception as error:  # an error in one package must not stop the others
            failures[name] = one_line(error)
    times = interleave({name: entries[name].step for name in checks}, options.rounds)
    baseline = times[options.against if options.against in times else next(iter(times))]
    rows = [[name, *summary(times[name], baseline), *checks[name]] for name in checks]
    lines = [format_table(HEADER, rows)]
    lines += [f"{name}: failed: {reason}" for name, reason in failures.items()]
    if workload.is_density:
        lines.append(f"a step of rf.fit, which chooses its grid: {1000 * seconds_per_step(workload):.0f} ms")
    return "\n".join(lines)


def check(values: np.ndarray, gradient: np.ndarray, workload: Workload, hutchinson: bool) -> list[str]:
    """The largest error of the per-sample values, and the relative error of the gradient."""
    true_values, true_gradient = cached_reference(workload.name, hutchinson)
    error = distance(gradient, true_gradient)
    if not error < WRONG:
        raise ValueError(f"wrong gradient, relative error {error:.1e}")
    return [f"{np.abs(values - true_values).max():.0e}", f"{error:.0e}"]


def distance(gradient: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(gradient - other) / np.linalg.norm(other))


@cache
def cached_reference(name: str, hutchinson: bool) -> tuple[np.ndarray, np.ndarray]:
    return reference(make_workload(name), hutchinson)


def one_line(error: Exception, width: int = 160) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:width]


if __name__ == "__main__":
    main()
