"""`python -m roughflow.cli`, the same as `roughflow`."""

import sys

from . import program

if __name__ == "__main__":
    sys.exit(program())
