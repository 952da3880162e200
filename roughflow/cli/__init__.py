"""The command line: `roughflow --help` is a tour of it."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from .exits import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED, TERMINATED, Terminated
from .refused import Refused


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
    from .start import keep_programs, starting, stoppable

    try:
        arguments = parse(argv)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    keep_programs()
    from .early import look_at_input

    look_at_input(arguments)
    # Imported now, for JAX takes its time: --help, a mistyped option and a bad table do not wait for it.
    with starting():
        from .commands import COMMANDS, check_devices

    check_devices(arguments)
    with stoppable():
        return COMMANDS[arguments.command](arguments)


def _tell(error: BaseException, code: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"roughflow: error: {lines[0]}", file=sys.stderr)
    return code
