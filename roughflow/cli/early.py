"""What can be seen to be wrong with the input before JAX is imported, which takes seconds."""

import argparse
from pathlib import Path

from .output import check_writable
from .refused import Refused
from .series import read_series
from .table import check_readable, read_table
from .text import STANDARD, is_text


def look_at_input(arguments: argparse.Namespace) -> None:
    """Refuse files that are not there or cannot be read. A table of text, or a series, is read and kept for
    the command: standard input cannot be read again."""
    arguments.table = None
    if arguments.command in ("score", "sample"):
        _check_model(arguments.model)
    if arguments.command in ("score", "estimate", "fit") and arguments.data != STANDARD:
        check_readable(arguments.data)
    if arguments.command == "fit" and arguments.join is None:
        check_writable(arguments.out, force=arguments.force, inputs=[arguments.data])
        if arguments.data == STANDARD or is_text(arguments.data):
            arguments.table = read_table(arguments.data, wanted_columns(arguments))
    if arguments.command == "estimate":
        arguments.table = read_series(arguments.data, arguments.time, arguments.value, arguments.scale)


def wanted_columns(arguments: argparse.Namespace) -> list[str] | None:
    """Those of --columns, --given and --groups; None for all."""
    if arguments.columns is None:
        return None
    group = [] if arguments.groups is None else [arguments.groups]
    return list(dict.fromkeys([*arguments.columns, *(arguments.given or ()), *group]))


def _check_model(path: Path) -> None:
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a model")
    if not path.exists():
        raise Refused(f"there is no file {path}")
    if not path.is_file():
        raise Refused(f"{path} is a device or a pipe, not a file")
