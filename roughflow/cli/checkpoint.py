"""Runs that were cut short, and how to go on with them."""

import argparse
import shlex
import sys
from pathlib import Path

from .refused import Refused
from .start import INTERRUPTED


def check_checkpoint(checkpoint: Path, arguments: argparse.Namespace) -> None:
    if arguments.resume and not checkpoint.exists():
        raise Refused(f"there is no checkpoint {checkpoint} to go on from: leave out --resume to start")
    if checkpoint.exists() and not (arguments.resume or arguments.force):
        raise Refused(
            f"{checkpoint} holds a run that was cut short: --resume goes on from it, --force starts afresh"
        )


def stopped(arguments: argparse.Namespace, checkpoint: Path, what: str) -> int:
    again = [word for word in arguments.argv if word != "--resume"]
    tell = f"roughflow: {what}, kept in {checkpoint}; go on with: "
    if checkpoint.exists():
        print(tell + shlex.join(["roughflow", *again, "--resume"]), file=sys.stderr)
    else:
        print(f"roughflow: {what} before the first step", file=sys.stderr)
    return INTERRUPTED
