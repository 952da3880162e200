"""`roughflow score`: the log density of each row."""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import roughflow as rf
from roughflow.learn import progress_bar

from .model import read_model, read_rows_for
from .output import check_table, write_table

COLUMNS = ("log_prob", "total_error", "effective_paths")
CHUNK = 4096  # rows between two steps of the bar


def score(arguments: argparse.Namespace) -> int:
    inputs = [arguments.model, arguments.data]
    check_table(arguments.out, "the scores", arrays=False, force=arguments.force, inputs=inputs)
    model = read_model(arguments.model)
    table = read_rows_for(model, arguments.data)
    columns = _estimate(model, table.rows, arguments)
    write_table(arguments.out, COLUMNS, [columns])
    values = columns[0]
    error = np.std(values) / len(values) ** 0.5 if np.all(np.isfinite(values)) else np.inf
    print(f"mean log_prob {np.mean(values):.4f} over {len(values)} rows (± {error:.2g})", file=sys.stderr)
    return 0


def _estimate(model: rf.Standardised, rows: np.ndarray, arguments: argparse.Namespace) -> list[np.ndarray]:
    """The columns for all rows; random numbers depend on the seed and on a row's place in the file."""
    paths = arguments.paths
    estimator = None if paths is None else rf.default_estimator(model.flow, paths)
    key = jax.random.key(arguments.seed)
    parts = []
    with progress_bar(len(rows), name="score", unit="row", shown=not arguments.quiet) as bar:
        for i, first in enumerate(range(0, len(rows), CHUNK)):
            x = rows[first : first + CHUNK]
            own = x.shape[1] - model.context
            settings = {"estimator": estimator, "tolerance": arguments.tolerance}
            settings |= {"given": x[:, own:]} if model.context else {}
            parts.append(model.estimate(x[:, :own], key=jax.random.fold_in(key, i), **settings))
            bar.update(len(x))
            bar.set_postfix_str("")
    estimate = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    if estimate.warning:
        print(f"roughflow: warning: {_advice(estimate.warning)}", file=sys.stderr)
    return [np.asarray(getattr(estimate, name)) for name in COLUMNS]


def _advice(warning: str) -> str:
    """The library's warning, with the command line's own names."""
    return warning.replace("num_paths", "--paths").replace("max_paths: raise either", "--tolerance: raise it")
