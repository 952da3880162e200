"""Chunks of points that fit in memory, of few sizes: another number of points compiles nothing anew."""

import math

import equinox as eqx
import jax
import numpy as np

from ..._checks import is_traced
from ..surface import in_blocks

MOST = 2**14  # points in a chunk
# Programs are compiled for chunks of one size for up to SMALL points, of another beyond, and go through the
# points that are there in blocks of so many points, and of so many pairs of a point and a path, at most. On a
# GPU small blocks do not pay.
SMALL, SMALL_BLOCK = 256, (32, 2**9)
LARGE, LARGE_BLOCK, GPU_BLOCK = 2048, (256, 2**13), (1024, 2**16)


class Chunk(eqx.Module):
    """Indices to work on: the first `count` of them, which the others repeat; all of them if it is None.
    `ordered` says that they count up from zero."""

    indices: np.ndarray
    count: np.ndarray | None
    block: tuple[int, int] = eqx.field(static=True)
    ordered: bool = eqx.field(static=True, default=False)

    @staticmethod
    def whole(indices: np.ndarray) -> "Chunk":
        """All of the indices at once."""
        return Chunk(indices, None, (1, 1), np.array_equal(indices, np.arange(len(indices))))

    @property
    def known(self) -> int:
        return len(self.indices) if self.count is None else int(self.count)

    def of(self, items: np.ndarray) -> "Chunk":
        if self.count is None:
            return Chunk.whole(items[self.indices])
        return Chunk(items[self.indices], self.count, self.block)

    def take(self, batch):
        """The entries of a batch at the indices. All of them are left where they are: they may be split
        between devices, and a look at single places would bring them together on each."""
        every = lambda a: self.ordered and len(a) == len(self.indices)
        return jax.tree.map(lambda a: a if every(a) else a[self.indices], batch)

    def map(self, function, batch, each: int):
        """A function of the batch, that works on `each` paths per point."""
        points, pairs = self.block
        block = min(len(self.indices), points, 2 ** int(math.log2(max(1, pairs // each))))
        return in_blocks(function, batch, self.count, block)


def chunks(items: np.ndarray, fitting: int, straight: bool) -> list[Chunk]:
    """Items in chunks of no more than are `fitting` in memory; those that are `straight` are not filled
    up."""
    most = 2 ** int(math.log2(max(1, min(MOST, fitting))))
    if straight:
        return [Chunk.whole(part) for part in _parts(items, most)]
    on_cpu = jax.default_backend() == "cpu"
    small = len(items) <= SMALL and on_cpu
    size = min(SMALL, most) if small else most
    block = SMALL_BLOCK if small else LARGE_BLOCK if on_cpu else GPU_BLOCK
    return [Chunk(np.resize(part, size), np.asarray(len(part)), block) for part in _parts(items, size)]


def padded(batch):
    """As many entries as a program is compiled for, some of them twice."""
    count = len(jax.tree.leaves(batch)[0])
    size = SMALL if count <= SMALL else max(LARGE, 2 ** math.ceil(math.log2(count)))
    places = np.resize(np.arange(count), size)
    return jax.tree.map(lambda a: a[places] if is_traced(a) else np.asarray(a)[places], batch)


def cut(batch, count: int):
    """The first `count` entries, without a program to compile where there are values."""
    return jax.tree.map(lambda a: a[:count] if is_traced(a) else jax.device_put(np.asarray(a)[:count]), batch)


def _parts(items: np.ndarray, size: int) -> list[np.ndarray]:
    return [items[i : i + size] for i in range(0, len(items), size)]
