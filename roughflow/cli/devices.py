"""Devices (`--devices`), and several cooperating processes (`--join`)."""

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

MAX_CPU_DEVICES = 256  # maximum number of devices of one CPU
HEARTBEAT_TIMEOUT = 20  # seconds without a heartbeat after which a process is considered dead
# If one process dies, JAX may end the others at once, from a thread outside of Python. A small watchdog
# process next to each waits for it to end, and prints an error if it ended irregularly.
WATCHDOG = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if not sys.stdin.read():
    print(sys.argv[1], file=sys.stderr)
"""
PROCESS_ENDED = (
    "roughflow: error: another process of this run ended, so this one did too: restart all of them with "
    "--resume" + see("several-devices")
)


def devices_of_cpu(count: int | None) -> None:
    """Split a CPU into several devices, if a number was given and JAX has not started yet. Numbers that are
    too large are refused later.

    A single device hardly uses a second core, because the operations of a step are too small to be shared.
    """
    with contextlib.suppress(RuntimeError):
        if count is not None:
            jax.config.update("jax_num_cpu_devices", min(count, MAX_CPU_DEVICES))


@contextlib.contextmanager
def joined(process: tuple[str, int, int] | str | None) -> Iterator[None]:
    """A context in which this is one of several processes; None for a single process."""
    if process is None:
        yield
        return
    watchdog = subprocess.Popen(
        [sys.executable, "-ISc", WATCHDOG, PROCESS_ENDED], stdin=subprocess.PIPE, text=True
    )
    _meet(process)
    try:
        yield
    except BaseException as error:
        # The others may have ended: nobody to disconnect from.
        bad_input = isinstance(error, Refused | ValueError | OSError)
        atexit.register(_end_process, BAD_INPUT if bad_input else FAILED)
        raise
    finally:
        watchdog.communicate("in good order")


def together() -> None:
    """Wait for the other processes, if there are any."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("roughflow")


def _meet(process: tuple[str, int, int] | str) -> None:
    names = ("coordinator_address", "process_id", "num_processes")
    where = {} if isinstance(process, str) else dict(zip(names, process, strict=True))
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)  # pyright: ignore
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        remedy = "pass HOST:PORT,I,N, or start it with srun or mpirun"
        raise Refused(
            f"--join cannot find the other processes ({reason}): {remedy}{see('several-devices')}"
        ) from None


def _end_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
