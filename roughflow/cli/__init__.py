"""The command line; `roughflow --help` lists its commands."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .startup import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED, TERMINATED, Refused, Terminated

# Modules of commands whose name differs from the command.
MODULES = {"demo": "figures", "reproduce": "figures", "impute": "sample"}


def program() -> int:
    """Entry point of the program: `main`, after which signals are ignored while Python shuts down."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are reported in one line, without a traceback."""
    if sys.stdout is None:  # closed by the parent process
        return _report_error(
            Refused("standard output is closed: open it, or redirect it to a file"), BAD_INPUT
        )
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout again at exit, so redirect it to the null device.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as pressed:
        print("roughflow: interrupted", file=sys.stderr)
        return TERMINATED if isinstance(pressed, Terminated) else INTERRUPTED
    # The library raises ValueError for invalid arguments and RuntimeError for failed solves.
    except (Refused, ValueError, OSError) as error:
        return _report_error(error, BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        return _report_error(error, FAILED)


def _run(argv: list[str]) -> int:
    # Imported inside `main`, which handles Ctrl-C.
    from .arguments import parse
    from .startup import keep_programs, starting, stoppable

    try:
        arguments = parse(argv)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    keep_programs()
    from .files import look_at_input

    look_at_input(arguments)
    # JAX is imported late, because it is slow to import; --help and errors in options or tables appear at
    # once.
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
    """Raise an error if JAX finds no device. With --join this is not checked, because the processes must
    connect first."""
    from roughflow.train import check_backend

    from .startup import devices_of_cpu

    devices_of_cpu(getattr(arguments, "devices", None))
    if getattr(arguments, "join", None) is not None:
        return
    try:
        check_backend()
    except RuntimeError as error:
        raise Refused(str(error)) from None


def _report_error(error: BaseException, code: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"roughflow: error: {lines[0]}", file=sys.stderr)
    return code
