"""`roughflow sample`: new rows from a model."""

import argparse
import sys

import jax
import numpy as np

from .model import columns_of, read_model
from .output import check_writable, write_csv, write_npy
from .refused import Refused


def sample(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out is not None:
        check_writable(out, force=arguments.force, inputs=[arguments.model])
        if out.suffix.lower() not in (".csv", ".npy"):
            raise Refused(f"{out}: the name of the samples ends in .csv or .npy")
    model = read_model(arguments.model)
    if model.context:
        given = ", ".join(columns_of(model)[-model.context :])
        raise Refused(
            f"{arguments.model} is a density given {given}: draw in Python, model.sample(given=...)"
        )
    rows = np.asarray(model.sample(key=jax.random.key(arguments.seed), shape=(arguments.count,)))
    escaped = int(np.sum(~np.isfinite(rows).all(axis=1)))
    if escaped:
        print(f"roughflow: warning: {escaped} of {len(rows)} samples escaped to infinity", file=sys.stderr)
    if out is not None and out.suffix.lower() == ".npy":
        write_npy(out, rows)
    else:
        write_csv(out, columns_of(model), list(rows.T))
    return 0
