"""Files that are written whole, or not at all."""

import contextlib
import csv
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from .refused import Refused


def check_writable(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place to write to before any work is done for it."""
    if path.is_dir():
        raise Refused(f"{path} is a folder: name a file in it")
    if any(path.resolve() == source.resolve() for source in inputs):
        raise Refused(f"{path} is what is read from: name another file to write to")
    if path.exists() and not force:
        raise Refused(f"{path} exists: --force overwrites it, or name another file")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise Refused(f"cannot write {path}: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK):
        raise Refused(f"cannot write {path}: no permission to write in {folder}")


def write_csv(path: Path | None, header: Sequence[str], columns: Sequence[np.ndarray]) -> None:
    """Columns of equal length as CSV, to a file, or to standard output if there is none."""

    def write(file: IO) -> None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        # As text, NumPy's numbers are the shortest that read back the same, in their own precision.
        writer.writerows(zip(*(map(str, column) for column in columns), strict=True))

    if path is None:
        write(sys.stdout)
        return
    with _draft(path) as draft, open(draft, "w", newline="", encoding="utf-8") as file:
        write(file)


def write_npy(path: Path, array: np.ndarray) -> None:
    with _draft(path) as draft, open(draft, "wb") as file:
        np.save(file, array, allow_pickle=False)


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[str]:
    """A file beside `path` that is moved there in the end: whoever is stopped on the way leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        yield draft
        # A draft is for its owner only; the file is as open as any other the user makes.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(draft, 0o666 & ~mask)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
