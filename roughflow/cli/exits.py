"""Exit codes."""

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
TERMINATED = 128 + 15  # as a shell reports SIGTERM
BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system sends it: ends a command as Ctrl-C does."""
