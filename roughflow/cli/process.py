"""The process: exit codes, signals, and settings made before JAX is imported."""

import contextlib
import hashlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Refused(Exception):
    """Bad input: the message says what is wrong and what to do."""


FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
TERMINATED = 128 + 15  # as a shell reports SIGTERM
BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE


class Terminated(KeyboardInterrupt):
    """SIGTERM, as sent by batch systems; ends a command as Ctrl-C does."""


CACHE_DAYS = 30  # days for which an unused compiled program is kept
CACHE_MEGABYTES = 500  # maximum size of the cache; the oldest programs are deleted first
# By default JAX caches only programs that took a second to compile, but a command needs a hundred small ones.
CACHE_ALL_PROGRAMS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Show on a terminal that the program is starting, until the block ends. Ctrl-C ends it immediately: an
    exception raised while JAX is imported might be lost."""
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
    """A context in which `handler` handles a signal. Only the main thread may set handlers."""
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
    """A description of the processor: programs of different descriptions are not exchanged."""
    model = f"{platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return model
    features = {line for line in lines if line.lower().startswith(("flags", "features"))}
    return " ".join([model, *sorted(features)])


def _drop_old(folder: Path) -> None:
    """Delete programs older than a month, and the oldest ones if the cache is too large."""
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
