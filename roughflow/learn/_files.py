"""Files that are there whole or not at all."""

import contextlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_archive(
    path: str | os.PathLike, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a zip file with `header.json` and each array as an `.npy` file.

    It is written beside its place and moved there in one step, so that whoever is stopped on the way,
    by a kill or a full disk, leaves the old file as it was.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("header.json", json.dumps(header, indent=1))
                for name, array in arrays.items():
                    buffer = io.BytesIO()
                    np.save(buffer, np.asarray(array), allow_pickle=False)
                    archive.writestr(f"{name}.npy", buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def read_archive(path: str | os.PathLike, kind: str, version: int) -> tuple[dict, dict[str, np.ndarray]]:
    """The header and arrays of a file of this `kind`. Nothing in the file is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("header.json"))
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            read = lambda name: np.load(io.BytesIO(archive.read(name)), allow_pickle=False)
            arrays = {name.removesuffix(".npy"): read(name) for name in names}
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a roughflow {kind}, or is damaged ({error})") from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise ValueError(f"{path} is not a roughflow {kind}")
    if not isinstance(header.get("version"), int) or header["version"] > version:
        raise ValueError(
            f"{path} was written by a later roughflow (format {header.get('version')}, this one reads up to "
            f"{version}): upgrade to read it"
        )
    return header, arrays


def _umask() -> int:
    """What a new file may not be: a temporary one is private, this one is like any other."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
