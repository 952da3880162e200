"""Runs that were cut short, and how to go on with them."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import roughflow as rf
from roughflow.faq import see
from roughflow.files import file_lock
from roughflow.tables import second_file

from .exits import INTERRUPTED
from .refused import Refused

# What may differ when a run goes on: where things are, and how much is said.
FREE = frozenset(
    {"command", "argv", "data", "table", "model", "out", "noise_out", "report", "resume", "force", "quiet"}
    | {"draws", "thin", "devices", "join"}
)


def checkpoint_of(out: Path) -> Path:
    return out.with_name(out.name + ".checkpoint")


def rows_of(checkpoint: Path) -> Path:
    """Where the rows are that a command has written so far."""
    return checkpoint.with_name(checkpoint.name + ".rows")


@contextlib.contextmanager
def alone(arguments: argparse.Namespace) -> Iterator[None]:
    """Refuse to write what another run is at work on; keep notes only of a run that can go on."""
    told = f"another run is at work on {arguments.out}: wait for it, or name another --out{see('two-runs')}"
    checkpoint = checkpoint_of(arguments.out)
    with file_lock(arguments.out, told):
        try:
            yield
        finally:
            if not checkpoint.exists():
                remove(checkpoint)


def check_checkpoint(checkpoint: Path, arguments: argparse.Namespace) -> None:
    """Refuse to start over what was cut short, to go on from nothing, or to go on with other options."""
    if arguments.resume and not checkpoint.exists():
        raise Refused(f"there is no checkpoint {checkpoint} to go on from: leave out --resume to start")
    if checkpoint.exists() and not (arguments.resume or arguments.force):
        raise Refused(
            f"{checkpoint} holds a run that was cut short: --resume goes on from it, --force starts afresh"
            + see("checkpoints")
        )
    notes = _notes(checkpoint)
    if not (arguments.resume and notes.exists()):
        return
    before, now = json.loads(notes.read_text(encoding="utf-8")), _options(arguments)
    for name in now:
        if before.get(name) != now[name]:
            was, given = (_told(name, options.get(name)) for options in (before, now))
            raise Refused(
                f"{checkpoint} holds a run {was}, this one is {given}: --resume takes the same, --force "
                f"starts afresh{see('checkpoints')}"
            )


def begin(checkpoint: Path, arguments: argparse.Namespace) -> None:
    """Note the options of a run that starts afresh."""
    if arguments.resume:
        return
    remove(checkpoint)
    with rf.whole_file(_notes(checkpoint)) as draft:
        draft.write_text(json.dumps(_options(arguments), indent=1), encoding="utf-8")


def remove(checkpoint: Path) -> None:
    for file in (checkpoint, second_file(checkpoint), rows_of(checkpoint), _notes(checkpoint)):
        file.unlink(missing_ok=True)


def stopped(arguments: argparse.Namespace, checkpoint: Path, what: str) -> int:
    again = [word for word in arguments.argv if word != "--resume"]
    tell = f"roughflow: {what}, kept in {checkpoint}; go on with: "
    if checkpoint.exists():
        print(tell + shlex.join(["roughflow", *again, "--resume"]), file=sys.stderr)
    else:
        print(f"roughflow: {what} before there was anything to keep", file=sys.stderr)
    return INTERRUPTED


def _notes(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".options")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that a run depends on, but its data, as JSON has it."""
    options = {name: value for name, value in vars(arguments).items() if name not in FREE}
    return json.loads(json.dumps(options))


def _told(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    if value is None:
        return f"without {option}"
    if name == "target":
        return f"of {value}"
    return f"with {option} {','.join(map(str, value)) if isinstance(value, list) else value}"
