"""A table that grows beside the file it will be: a run that was cut short goes on with what is done."""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import roughflow as rf
from roughflow.faq import see

from .checkpoint import remove, rows_of
from .output import table_bytes
from .refused import Refused

NOTED = ("chunks", "rows", "size", "digest")


class KeptRows:
    """Chunks of a table that is made from another one, chunk by chunk, and from other files.

    Beside the rows the checkpoint notes how many bytes of them are whole, and a digest of all that was read
    for them: whoever goes on reads the same again, and knows by the digest that it is the same.
    """

    def __init__(self, out: Path, checkpoint: Path, header: Sequence[str], sources: Sequence[Path]):
        self.out, self.checkpoint, self.header = out, checkpoint, header
        self.chunks, self.rows, self.size, self.digest = 0, 0, 0, ""
        self._digest = hashlib.sha256()
        for source in sources:
            self._digest.update(source.read_bytes())
        self._read: deque[str] = deque()  # digests, of chunks that were read and not yet written

    def reading(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """The chunks that are not done yet."""
        seen = self._seen(chunks)
        for _ in range(self.chunks):
            next(seen, None)
        if self.chunks and self._last() != self.digest:
            told = f"{self.checkpoint} belongs to another run: the table or the model has changed"
            raise Refused(f"{told}; --resume takes the same, --force starts afresh{see('checkpoints')}")
        return seen

    def resume(self) -> dict[str, Any]:
        """Go on from the checkpoint; what was told with it."""
        notes = json.loads(self.checkpoint.read_text(encoding="utf-8"))
        self.chunks, self.rows, self.size, self.digest = (notes[name] for name in NOTED)
        return notes["told"]

    def add(self, columns: Sequence[np.ndarray], told: dict[str, Any]) -> None:
        """One more chunk, and what is to be known of all of them when the run goes on."""
        rows = rows_of(self.checkpoint)
        rows.parent.mkdir(parents=True, exist_ok=True)
        with rows.open("r+b" if self.chunks else "wb") as file:
            # What another run left of a chunk that it did not finish goes.
            file.truncate(self.size)
            file.seek(self.size)
            file.write(table_bytes(self.out, columns, None if self.chunks else self.header))
            file.flush()
            os.fsync(file.fileno())
            self.size = file.tell()
        self.chunks += 1
        self.rows += len(columns[0])
        self.digest = self._read.popleft()
        with rf.whole_file(self.checkpoint) as draft:
            notes = {name: getattr(self, name) for name in NOTED}
            draft.write_text(json.dumps(notes | {"told": told}), encoding="utf-8")

    def finish(self) -> None:
        """The table is whole."""
        with rf.whole_file(self.out) as draft:
            shutil.move(rows_of(self.checkpoint), draft)
        remove(self.checkpoint)

    def _seen(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for rows in chunks:
            self._digest.update(np.ascontiguousarray(rows).tobytes())
            self._read.append(self._digest.hexdigest())
            yield rows

    def _last(self) -> str | None:
        last = self._read[-1] if self._read else None
        self._read.clear()
        return last
