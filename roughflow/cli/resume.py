"""Interrupted runs: their options, the rows written so far, and how to resume them."""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import roughflow as rf
from roughflow.faq import see
from roughflow.files import file_lock
from roughflow.tables import second_file

from .startup import INTERRUPTED, Refused
from .tables import table_bytes

# Options that may differ when a run is resumed.
UNCOMPARED_OPTIONS = frozenset(
    {"command", "argv", "data", "table", "model", "out", "noise_out", "report", "resume", "force", "quiet"}
    | {"draws", "thin", "devices", "join"}
)


def checkpoint_of(out: Path) -> Path:
    return out.with_name(out.name + ".checkpoint")


def rows_of(checkpoint: Path) -> Path:
    """The path of the file with the rows that a command has written so far."""
    return checkpoint.with_name(checkpoint.name + ".rows")


@contextlib.contextmanager
def alone(arguments: argparse.Namespace) -> Iterator[None]:
    """Raise an error if another run is writing the same file. At the end, delete the records of a run that
    has no checkpoint to resume from."""
    message = f"another run is writing {arguments.out}: wait for it, or choose another --out{see('two-runs')}"
    checkpoint = checkpoint_of(arguments.out)
    with file_lock(arguments.out, message):
        try:
            yield
        finally:
            if not checkpoint.exists():
                remove(checkpoint)


def check_checkpoint(checkpoint: Path, arguments: argparse.Namespace) -> None:
    """Raise an error if the command would overwrite an interrupted run, resume without a checkpoint, or
    resume with other options."""
    if arguments.resume and not checkpoint.exists():
        raise Refused(f"there is no checkpoint {checkpoint} to resume: omit --resume")
    if checkpoint.exists() and not (arguments.resume or arguments.force):
        raise Refused(
            f"{checkpoint} holds an interrupted run: use --resume to continue it, or --force to start again"
            + see("checkpoints")
        )
    notes = _notes(checkpoint)
    if not (arguments.resume and notes.exists()):
        return
    before, now = json.loads(notes.read_text(encoding="utf-8")), _options(arguments)
    for name in now:
        if before.get(name) != now[name]:
            was, given = (_option_text(name, options.get(name)) for options in (before, now))
            raise Refused(
                f"{checkpoint} holds a run {was}, not {given}: use the same options to resume, "
                f"or --force to start again{see('checkpoints')}"
            )


def begin(checkpoint: Path, arguments: argparse.Namespace) -> None:
    """Record the options of a new run."""
    if arguments.resume:
        return
    remove(checkpoint)
    with rf.files.whole_file(_notes(checkpoint)) as draft:
        draft.write_text(json.dumps(_options(arguments), indent=1), encoding="utf-8")


def remove(checkpoint: Path) -> None:
    for file in (checkpoint, second_file(checkpoint), rows_of(checkpoint), _notes(checkpoint)):
        file.unlink(missing_ok=True)


def stopped(arguments: argparse.Namespace, checkpoint: Path, what: str) -> int:
    again = [word for word in arguments.argv if word != "--resume"]
    message = f"roughflow: {what}, saved in {checkpoint}; continue with: "
    if checkpoint.exists():
        print(message + shlex.join(["roughflow", *again, "--resume"]), file=sys.stderr)
    else:
        print(f"roughflow: {what} before anything was saved", file=sys.stderr)
    return INTERRUPTED


def _notes(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".options")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """All options that a run depends on, except its data, as JSON values."""
    options = {name: value for name, value in vars(arguments).items() if name not in UNCOMPARED_OPTIONS}
    return json.loads(json.dumps(options))


def _option_text(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    if value is None:
        return f"without {option}"
    if name == "target":
        return f"of {value}"
    return f"with {option} {','.join(map(str, value)) if isinstance(value, list) else value}"


NOTE_FIELDS = ("chunks", "rows", "size", "digest")


class KeptRows:
    """Writes a table in chunks, so that the run can be resumed. The rows are computed from another table and
    other files.

    The checkpoint records the size in bytes of the complete chunks and a digest of all input. A resumed run
    reads the same input again and compares the digest.
    """

    def __init__(self, out: Path, checkpoint: Path, header: Sequence[str], sources: Sequence[Path]):
        self.out, self.checkpoint, self.header = out, checkpoint, header
        self.chunks, self.rows, self.size, self.digest = 0, 0, 0, ""
        self._digest = hashlib.sha256()
        for source in sources:
            self._digest.update(source.read_bytes())
        self._read: deque[str] = deque()  # digests of chunks that were read but not yet written

    def reading(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Skip the chunks that have been written; return an iterator over the others."""
        seen = self._seen(chunks)
        for _ in range(self.chunks):
            next(seen, None)
        if self.chunks and self._last() != self.digest:
            message = f"{self.checkpoint} belongs to another run: the table or the model has changed"
            raise Refused(
                f"{message}; use the same files to resume, or --force to start again{see('checkpoints')}"
            )
        return seen

    def resume(self) -> dict[str, Any]:
        """Resume from the checkpoint, and return the notes stored in it."""
        notes = json.loads(self.checkpoint.read_text(encoding="utf-8"))
        self.chunks, self.rows, self.size, self.digest = (notes[name] for name in NOTE_FIELDS)
        return notes["extra" if "extra" in notes else "told"]  # "told" was the name before version 0.2

    def add(self, columns: Sequence[np.ndarray], extra: dict[str, Any]) -> None:
        """Write one more chunk, and store the notes `extra` for a resumed run."""
        rows = rows_of(self.checkpoint)
        rows.parent.mkdir(parents=True, exist_ok=True)
        with rows.open("r+b" if self.chunks else "wb") as file:
            # Discard the incomplete chunk of an interrupted run.
            file.truncate(self.size)
            file.seek(self.size)
            file.write(table_bytes(self.out, columns, None if self.chunks else self.header))
            file.flush()
            os.fsync(file.fileno())
            self.size = file.tell()
        self.chunks += 1
        self.rows += len(columns[0])
        self.digest = self._read.popleft()
        with rf.files.whole_file(self.checkpoint) as draft:
            notes = {name: getattr(self, name) for name in NOTE_FIELDS}
            draft.write_text(json.dumps(notes | {"extra": extra}), encoding="utf-8")

    def finish(self) -> None:
        """Move the finished table to the output path and delete the checkpoint."""
        with rf.files.whole_file(self.out) as draft:
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
