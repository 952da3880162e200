"""Benchmarks of roughflow and comparisons with other packages; `python -m benchmarks` lists them."""

import os

# Spinning OpenMP threads make PyTorch up to 50 times slower as soon as another program needs a core. Sleeping
# threads avoid this. The setting must precede the import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
