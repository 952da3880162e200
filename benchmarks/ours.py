"""roughflow's own entries. This is the one file to fill in when the library changes."""

from benchmarks.timing import Entry
from benchmarks.workloads import Workload


def roughflow_entries(workload: Workload) -> dict[str, Entry]:
    """Entries for W0, W1 and W2 (see `workloads.py`), by name; the first one is the baseline.

    `peers_jax.make_entry(workload, objective)` turns a function from the list of weights to the
    per-sample values (log p, or |Z_T|^2 for W2) into an entry: jit, gradient, Adagrad, timing.
    """
    return {}
