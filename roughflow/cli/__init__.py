"""The command line: `roughflow --help` is a tour of it."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .process import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED, TERMINATED, Refused, Terminated

# Modules of commands that are not called like their command.
MODULES = {"demo": "figures", "reproduce": "figures"}


def program() -> int:
    """`main` as a program of its own: what is pressed while Python puts its things away is of no use."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what goes wrong is told in one line, never a traceback."""
    if sys.stdout is None:  # closed by whoever started the program
        return _tell(Refused("standard output is closed: leave it open, or send it to a file"), BAD_INPUT)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough. Python flushes stdout once more as it ends: into nothing.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as pressed:
        print("roughflow: interrupted", file=sys.stderr)
        return TERMINATED if isinstance(pressed, Terminated) else INTERRUPTED
    # The library refuses an argument by a ValueError and reports a failed solve by a RuntimeError.
    except (Refused, ValueError, OSError) as error:
        return _tell(error, BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        return _tell(error, FAILED)


def _run(argv: list[str]) -> int:
    # Imported within `main`, which knows what to do with Ctrl-C.
    from .arguments import parse
    from .process import keep_programs, starting, stoppable

    try:
        arguments = parse(argv)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    keep_programs()
    from .files import look_at_input

    look_at_input(arguments)
    # Imported now, for JAX takes its time: --help, a mistyped option and a bad table do not wait for it.
    with starting():
        importlib.import_module("roughflow.train")
        command = _command(arguments.command)
    _check_devices(arguments)
    with stoppable():
        return command(arguments)


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """The function that runs a command."""
    module = importlib.import_module(f".{MODULES.get(name, name)}", __name__)
    return getattr(module, name)


def _check_devices(arguments: argparse.Namespace) -> None:
    """Refuse to start where JAX has no device. One of several processes meets the others first."""
    from roughflow.train import check_backend

    from .devices import devices_of_cpu

    devices_of_cpu(getattr(arguments, "devices", None))
    if getattr(arguments, "join", None) is not None:
        return
    try:
        check_backend()
    except RuntimeError as error:
        raise Refused(str(error)) from None


def _tell(error: BaseException, code: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"roughflow: error: {lines[0]}", file=sys.stderr)
    return code
