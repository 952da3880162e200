"""Files that are there whole or not at all."""

import contextlib
import errno
import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._checks import check_input_file, check_path
from ..faq import see
from ._interrupt import Held

# Archives are written as they are, not compressed; whoever does that later, numbers do not shrink by more.
EXPANDS = 100
SLACK = 2**20  # bytes that any archive may unpack to
# What zipfile, json and NumPy raise at bytes that are not theirs.
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
    """A draft to write to, beside `path`, that is moved there in one step when the block ends well.

    Whoever is stopped on the way, by an error, a kill or a full disk, leaves the old file as it was.
    Folders are made as needed; of a link, what it leads to is replaced.

    ```python
    import roughflow as rf

    with rf.whole_file("notes.txt") as draft:
        draft.write_text("all of it, or none")
    ```
    """
    path = Path(os.path.realpath(check_path("path", path)))
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{path} is {kind}, not a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, for a move is one step only within a file system; with the same ending, that may
    # say the format.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        # A draft is for its owner only; the file is as open as any other the user makes.
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
        told = f"{path} is damaged: its parts lie too deep within one another"
        raise ValueError(told + see("loading")) from None
    except UNREADABLE as error:
        told = f"{path} is not a roughflow {kind}, or is damaged ({error})"
        raise ValueError(told + see("loading")) from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise ValueError(f"{path} is not a roughflow {kind}{see('loading')}")
    if not isinstance(header.get("version"), int) or header["version"] > version:
        raise ValueError(
            f"{path} was written by a later roughflow (format {header.get('version')}, this one reads up to "
            f"{version}): upgrade to read it{see('loading')}"
        )
    return header, arrays


def _check_size(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse a file that would fill the memory with next to nothing; zipfile holds each part to its size."""
    unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > EXPANDS * size + SLACK:
        raise ValueError(f"{size} bytes that unpack to {unpacked}")
