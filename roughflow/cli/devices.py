"""Devices (`--devices`), and several processes that work together (`--join`)."""

import atexit
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from roughflow.faq import see

from .process import BAD_INPUT, FAILED, Refused

CORES = 256  # of one CPU, at most
SILENT = 20  # seconds without a sign of life after which a process counts as gone
# Where one is gone JAX may end the others at once, from a thread that Python knows nothing of. A small
# process beside each has the last word: it waits for this one to end, and speaks if that was not in order.
WITNESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if not sys.stdin.read():
    print(sys.argv[1], file=sys.stderr)
"""
GONE = (
    "roughflow: error: a process of this run is gone, so that this one ended too: start all of them again, "
    "with --resume" + see("several-devices")
)


def devices_of_cpu(count: int | None) -> None:
    """Make so many devices of a CPU's cores, if a number was said and JAX is not yet at work. Too many are
    refused later: there are no more.

    One device hardly uses a second core: the operations of a step are too small to be shared.
    """
    with contextlib.suppress(RuntimeError):
        if count is not None:
            jax.config.update("jax_num_cpu_devices", min(count, CORES))


@contextlib.contextmanager
def joined(process: tuple[str, int, int] | str | None) -> Iterator[None]:
    """Within the block this is one of several processes; for None, the only one."""
    if process is None:
        yield
        return
    witness = subprocess.Popen([sys.executable, "-ISc", WITNESS, GONE], stdin=subprocess.PIPE, text=True)
    _meet(process)
    try:
        yield
    except BaseException as error:
        # The others may be gone: there is nobody to take leave of.
        bad_input = isinstance(error, Refused | ValueError | OSError)
        atexit.register(_end_process, BAD_INPUT if bad_input else FAILED)
        raise
    finally:
        witness.communicate("in good order")


def together() -> None:
    """Wait for the other processes, if there are any."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("roughflow")


def _meet(process: tuple[str, int, int] | str) -> None:
    names = ("coordinator_address", "process_id", "num_processes")
    where = {} if isinstance(process, str) else dict(zip(names, process, strict=True))
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=SILENT)  # pyright: ignore
    except (ValueError, RuntimeError) as error:
        told = str(error).splitlines()[0]
        remedy = "give HOST:PORT,I,N, or start it by srun or mpirun"
        raise Refused(
            f"--join cannot find the other processes ({told}): {remedy}{see('several-devices')}"
        ) from None


def _end_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
