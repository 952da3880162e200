"""The process: exit codes, signals, settings that precede the import of JAX, devices (`--devices`), and
several cooperating processes (`--join`). JAX is imported inside functions, so that checks of the input run
without it."""

import atexit
import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from roughflow.faq import see


class Refused(Exception):
    """Invalid input. The message says what is wrong and what to do."""


FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
TERMINATED = 128 + 15  # as a shell reports SIGTERM
BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which batch systems send. It ends a command in the same way as Ctrl-C."""


CACHE_DAYS = 30  # number of days for which an unused compiled program is kept
CACHE_MEGABYTES = 500  # maximum size of the cache; the oldest programs are deleted first
# By default JAX caches only programs that took a second to compile, but a command needs a hundred small ones.
CACHE_ALL_PROGRAMS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """A context that shows on a terminal that the program is starting. Ctrl-C ends the program immediately,
    because an exception raised while JAX is imported might be lost."""
    shown = sys.stderr.isatty()
    if shown:
        print("starting …", end="", file=sys.stderr, flush=True)
    try:
        with _handled(signal.SIGINT, _leave):
            yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def stoppable() -> contextlib.AbstractContextManager[None]:
    """A context in which SIGTERM raises `Terminated`, so that output is completed or removed."""
    return _handled(signal.SIGTERM, _stop)


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Callable[..., None]) -> Iterator[None]:
    """A context in which `handler` handles a signal. It has no effect outside the main thread, which alone
    may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _stop(*_) -> None:
    raise Terminated


def _leave(*_) -> None:
    os.write(2, b"roughflow: interrupted\n")
    os._exit(INTERRUPTED)


def keep_programs() -> None:
    """Let JAX cache compiled programs in the user's cache folder, so that a second run starts faster.

    JAX reads its settings from the environment when it is imported. JAX_COMPILATION_CACHE_DIR sets another
    folder, and JAX_ENABLE_COMPILATION_CACHE=false disables the cache.
    """
    if "jax" in sys.modules or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _drop_old(folder)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        for name, value in CACHE_ALL_PROGRAMS.items():
            os.environ.setdefault(name, value)


def cache_folder() -> Path:
    """The cache folder of this platform for this type of processor: compiled programs are machine code, and a
    home folder may be shared between machines."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "darwin":
        usual = home / "Library" / "Caches"
    elif sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        usual = home / ".cache"
    named = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG convention a relative path is invalid.
    root = Path(named) if os.path.isabs(named) else usual
    return root / "roughflow" / "programs" / hashlib.sha256(_processor().encode()).hexdigest()[:8]


def _processor() -> str:
    """A description of the processor; machines share compiled programs only if it is the same."""
    model = f"{platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return model
    features = {line for line in lines if line.lower().startswith(("flags", "features"))}
    return " ".join([model, *sorted(features)])


def _drop_old(folder: Path) -> None:
    """Delete compiled programs older than a month, and the oldest ones if the cache is too large."""
    files = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have deleted it
            files.append((file.stat().st_mtime, file.stat().st_size, file))
    room = CACHE_MEGABYTES * 1e6
    for modified, size, file in sorted(files, reverse=True):
        room -= size
        if room < 0 or time.time() - modified > CACHE_DAYS * 86400:
            with contextlib.suppress(OSError):
                file.unlink()


MAX_CPU_DEVICES = 256  # maximum number of devices of one CPU
HEARTBEAT_TIMEOUT = 20  # seconds without a heartbeat after which a process is considered dead
# If one process dies, JAX may end the others at once, from a thread outside Python. For each process, a small
# watchdog process waits until it ends, and prints an error if it did not end normally.
WATCHDOG = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if not sys.stdin.read():
    print(sys.argv[1], file=sys.stderr)
"""
PROCESS_ENDED = (
    "roughflow: error: another process of this run ended, so this process ended too: restart all processes "
    "with --resume" + see("several-devices")
)


def devices_of_cpu(count: int | None) -> None:
    """Split the CPU into this number of devices, unless `count` is None or JAX has already started. A number
    that is too large is rejected later.

    A single device hardly uses a second core, because the operations of a step are too small to be split.
    """
    if count is None:
        return
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", min(count, MAX_CPU_DEVICES))


@contextlib.contextmanager
def joined(process: tuple[str, int, int] | str | None) -> Iterator[None]:
    """A context in which this process is connected to the other processes of the run; `process` is None if
    there are none."""
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
        # The other processes may have ended already.
        bad_input = isinstance(error, Refused | ValueError | OSError)
        atexit.register(_end_process, BAD_INPUT if bad_input else FAILED)
        raise
    finally:
        watchdog.communicate("in good order")


def together() -> None:
    """Wait for the other processes, if there are any."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("roughflow")


def _meet(process: tuple[str, int, int] | str) -> None:
    import jax

    names = ("coordinator_address", "process_id", "num_processes")
    where = {} if isinstance(process, str) else dict(zip(names, process, strict=True))
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)  # pyright: ignore
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        remedy = "pass HOST:PORT,I,N, or start roughflow with srun or mpirun"
        raise Refused(
            f"--join cannot find the other processes ({reason}): {remedy}{see('several-devices')}"
        ) from None


def _end_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
