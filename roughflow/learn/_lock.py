"""A file that one run at a time may hold."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None


@contextlib.contextmanager
def held(path: str | os.PathLike, refusal: str) -> Iterator[None]:
    """Hold `path` for the length of the block, by a hidden file beside it; where another run holds it, raise
    a `ValueError` that says `refusal`. A run that is killed lets go of it."""
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock")
    if fcntl is None:
        yield
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = _opened(lock, refusal)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _opened(lock: Path, refusal: str) -> int:
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
        # Whoever held it before has removed it: what was opened may be a file that is there no more.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        os.close(handle)
