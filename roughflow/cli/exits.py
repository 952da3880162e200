"""Exit codes."""

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE
