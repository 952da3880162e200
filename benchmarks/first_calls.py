"""The cost of a first call: `python -m benchmarks.first_calls`.

Each call runs in its own process, first without a compilation cache, and then with the JAX compilation cache
that the first process has written. The columns are wall-clock seconds, CPU seconds (both with imports), and
the number of compiled programs. CPU seconds and programs hardly depend on other programs on the machine.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import format_table, verdict

ROWS = "import jax, numpy as np, roughflow as rf; rows = np.random.default_rng(0).normal(size=(1000, 2))"
FIT = "key=jax.random.key(0), steps=2, progress=False, flow=rf.tables.FlowOptions(likelihood_steps={})"
CALLS = {
    "roughflow --help": "from roughflow.cli import main; main(['--help'])",
    "import of all": "import roughflow; roughflow.fit",
    "fit_density, 2 steps of regression": f"{ROWS}; rf.fit_density(rows, {FIT.format(0)})",
    "fit_density, 2 steps of each stage": f"{ROWS}; rf.fit_density(rows, {FIT.format(2)})",
    "estimate": (
        f"{ROWS}; flow = rf.neural_flow(2, key=jax.random.key(0)); "
        "flow.estimate(rows[0], key=jax.random.key(1))"
    ),
    "sample_chain": (
        f"{ROWS}; sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2); "
        "rf.sample_chain(sde, np.zeros(2), key=jax.random.key(0), num_steps=1000, dt=0.1)"
    ),
}
LIMITS_S = {name: 0.5 if name == "roughflow --help" else 5 for name in CALLS}


def main() -> None:
    rows, first = [], {}
    for name, code in CALLS.items():
        with tempfile.TemporaryDirectory() as folder:
            first[name], again = measured(code, Path(folder)), measured(code, Path(folder))
        numbers = [*first[name], *again[:2]]
        rows.append([name, *(f"{x:.2f}" if isinstance(x, float) else str(x) for x in numbers)])
    print(format_table(["first call", "s", "CPU s", "programs", "again: s", "CPU s"], rows))
    for name, limit in LIMITS_S.items():
        seconds = first[name][0]
        print(verdict(seconds < limit, f"{name} in less than {limit:g} s", f"{seconds:.2f} s"))


def measured(code: str, folder: Path) -> tuple[float, float, int]:
    """Wall-clock and CPU seconds of a process, and the number of programs in `folder` when it has
    finished."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code]
    # Bytecode is cached, as in any installation of the library.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, env=environment | settings, stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, processors, sum(1 for _ in folder.glob("*-cache"))


if __name__ == "__main__":
    main()
