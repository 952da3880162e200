"""Store results that take minutes, such as trained models and references, in the temporary directory.

The name of a file depends on everything that determines its content, so new settings give a new file.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import roughflow as rf

FOLDER = Path(tempfile.gettempdir()) / "roughflow-benchmarks"


def kept_file(kind: str, *what: Any) -> Path:
    """The file for `what`: text, numbers, arrays, or pytrees of arrays."""
    digest = hashlib.sha256(kind.encode())
    for leaf in jax.tree.leaves(what):
        if eqx.is_array(leaf) or isinstance(leaf, np.ndarray):
            leaf = np.asarray(leaf)
            digest.update(f"{leaf.shape} {leaf.dtype}".encode())
            digest.update(leaf.tobytes())
        elif not callable(leaf):
            digest.update(f"{leaf!r};".encode())
    return FOLDER / f"{kind}-{digest.hexdigest()[:16]}.npz"


def kept_arrays(file: Path, make: Callable[[], list[np.ndarray]], *, fresh: bool = False) -> list[np.ndarray]:
    """The arrays in a file. If the file does not exist, compute them and write it."""
    if fresh or not file.exists():
        FOLDER.mkdir(exist_ok=True)
        arrays = make()
        with rf.files.whole_file(file) as draft, draft.open("wb") as stream:
            np.savez(stream, *arrays)
    with np.load(file) as stored:
        return [stored[f"arr_{i}"] for i in range(len(stored.files))]


def kept_tree(file: Path, like: Any, make: Callable[[], Any], *, fresh: bool = False) -> Any:
    """A pytree with the structure of `like`, of which the file stores the arrays."""
    parts = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
    arrays = kept_arrays(file, lambda: parts(make()), fresh=fresh)
    shapes = [leaf.shape for leaf in parts(like)]
    if [array.shape for array in arrays] != shapes:
        if fresh:
            raise ValueError(f"the computed arrays do not have the expected shapes {shapes}")
        return kept_tree(file, like, make, fresh=True)
    dynamic, static = eqx.partition(like, eqx.is_array)
    leaves = [jax.numpy.asarray(array) for array in arrays]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(dynamic), leaves), static)
