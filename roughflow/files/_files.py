"""Atomic writes, archives, locks, and delayed interrupts."""

import contextlib
import errno
import io
import json
import os
import signal
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._checks import check_input_file, check_path
from ..faq import see


class Interrupt:
    """While active, the first Ctrl-C (SIGINT or SIGTERM) only sets `wanted`; the second one interrupts."""

    def __init__(self):
        self.wanted = False
        self.pressed = signal.SIGINT
        self._before: dict = {}

    def __enter__(self) -> "Interrupt":
        # Only the main thread can handle signals.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number, frame) -> None:
        del frame
        self.wanted, self.pressed = True, number
        signal.signal(number, self._before[number])


class Held(Interrupt):
    """While active, the first Ctrl-C is delayed until the end, so that files are complete."""

    def __exit__(self, *_) -> None:
        super().__exit__()
        if self.wanted:
            signal.raise_signal(self.pressed)


# Archives are not compressed; numbers hardly compress.
MAX_EXPANSION = 100
MIN_UNPACKED_BYTES = 2**20  # size that any archive may unpack to
# Exceptions of zipfile, json and NumPy for invalid bytes.
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    KeyError,
    ValueError,
    EOFError,
    OSError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary file next to `path`, which replaces it atomically when the block ends without an error.

    After an error, a kill or a full disk the old file is unchanged. Folders are created as needed; for a
    link, its target is replaced.

    ```python
    import roughflow as rf

    with rf.files.whole_file("notes.txt") as draft:
        draft.write_text("all of it, or none")
    ```
    """
    path = Path(os.path.realpath(check_path("path", path)))
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{path} is {kind}, not a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because moves are atomic only within a file system; with the same extension, which
    # may determine the format.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        # Temporary files are private; the final file gets the user's default permissions.
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_archive(
    path: str | os.PathLike, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a zip file with `header.json` and each array as an `.npy` file."""
    with Held(), whole_file(path) as draft, zipfile.ZipFile(draft, "w") as archive:
        archive.writestr("header.json", json.dumps(header, indent=1))
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, np.asarray(array), allow_pickle=False)
            archive.writestr(f"{name}.npy", buffer.getvalue())


def read_archive(path: str | os.PathLike, kind: str, version: int) -> tuple[dict, dict[str, np.ndarray]]:
    """The header and arrays of a file of this `kind`. Nothing in the file is executed."""
    check_input_file(check_path("path", path))
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(archive, os.path.getsize(path))
            header = json.loads(archive.read("header.json"))
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            read = lambda name: np.load(io.BytesIO(archive.read(name)), allow_pickle=False)
            arrays = {name.removesuffix(".npy"): read(name) for name in names}
    except RecursionError:
        message = f"{path} is damaged: it is nested too deeply"
        raise ValueError(message + see("loading")) from None
    except UNREADABLE as error:
        message = f"{path} is not a roughflow {kind}, or is damaged ({error})"
        raise ValueError(message + see("loading")) from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise ValueError(f"{path} is not a roughflow {kind}{see('loading')}")
    if not isinstance(header.get("version"), int) or header["version"] > version:
        raise ValueError(
            f"{path} was written by a later roughflow (format {header.get('version')}, this one reads up to "
            f"{version}): upgrade to read it{see('loading')}"
        )
    return header, arrays


def _check_size(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse a file that would unpack to far more than its size; zipfile checks the size of each part."""
    unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > MAX_EXPANSION * size + MIN_UNPACKED_BYTES:
        raise ValueError(f"{size} bytes that unpack to {unpacked}")


try:
    import fcntl
except ImportError:  # on Windows, without locks
    fcntl = None


@contextlib.contextmanager
def file_lock(path: str | os.PathLike, refusal: str) -> Iterator[None]:
    """Lock `path` for the length of the block, with a hidden file beside it. Raises a `ValueError` with the
    message `refusal` where another run holds the lock. A run that is killed releases it."""
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock")
    if fcntl is None:
        yield
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = _open_lock(lock, refusal)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _open_lock(lock: Path, refusal: str) -> int:
    assert fcntl is not None
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ValueError(refusal) from None
        except OSError:  # a file system without locks
            return handle
        # The previous holder removes the lock file, so the opened file may no longer be the one on disk.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        os.close(handle)
