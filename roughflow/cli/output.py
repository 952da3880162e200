"""Files that are written whole, or not at all."""

import csv
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

import roughflow as rf

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
    with rf.whole_file(path) as draft, open(draft, "w", newline="", encoding="utf-8") as file:
        write(file)


def write_npy(path: Path, array: np.ndarray) -> None:
    with rf.whole_file(path) as draft, open(draft, "wb") as file:
        np.save(file, array, allow_pickle=False)
