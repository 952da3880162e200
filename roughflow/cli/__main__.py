"""`python -m roughflow.cli`, the same as `roughflow`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
