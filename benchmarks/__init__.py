"""Speed of roughflow beside its peers; run with `python -m benchmarks.speed`."""

import os

# OpenMP threads that spin at barriers make PyTorch up to 50 times slower as soon as anything else
# wants a core. Sleeping ones are fair to it; this must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
