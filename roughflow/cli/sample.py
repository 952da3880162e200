"""`roughflow sample` and `roughflow impute`: draw rows, or the missing cells of rows, from a model."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import roughflow as rf
from roughflow.faq import see

from .files import check_table, chunks_for, columns_of, read_model
from .startup import Refused
from .tables import is_array, write_npy, write_table

CHUNK_ROWS = 2**16  # rows drawn at a time, to limit memory


def sample(arguments: argparse.Namespace) -> int:
    out = arguments.out
    check_table(out, "the samples", arrays=True, force=arguments.force, inputs=[arguments.model])
    model = read_model(arguments.model)
    if model.num_given:
        given = ", ".join(columns_of(model)[-model.num_given :])
        raise Refused(
            f"{arguments.model} is conditional on {given}: draw from it in Python with "
            "model.sample(given=...)"
        )
    escaped = 0

    def blocks() -> Iterator[np.ndarray]:
        nonlocal escaped
        for rows in _blocks(model, arguments.count, jax.random.key(arguments.seed)):
            if rows.dtype != object:
                escaped += int(np.sum(~np.isfinite(rows).all(axis=1)))
            yield rows

    if is_array(out):
        _check_numbers(model, out)
        write_npy(out, (arguments.count, model.num_columns), blocks())
    else:
        write_table(out, columns_of(model), (list(rows.T) for rows in blocks()))
    if escaped:
        message = f"{escaped} of {arguments.count} samples escaped to infinity{see('escaped-samples')}"
        print(f"roughflow: warning: {message}", file=sys.stderr)
    return 0


def _check_numbers(model: Any, out: Path | None) -> None:
    texts = isinstance(model, rf.tables.MixedDensity) and any(
        isinstance(label, str) for levels in model.encoding.levels for label in levels
    )
    if texts:
        raise Refused(
            f"{out}: an .npy file contains only numbers, but the model has text columns: choose a .csv file"
        )


def impute(arguments: argparse.Namespace) -> int:
    inputs = [arguments.model, arguments.data]
    check_table(arguments.out, "the rows", arrays=False, force=arguments.force, inputs=inputs)
    model = read_model(arguments.model)
    if not isinstance(model, rf.tables.MixedDensity):
        raise Refused(
            f"impute needs a model fitted by roughflow fit --family mixture, but {arguments.model} has "
            "another family"
        )
    _, chunks = chunks_for(model, arguments.data, CHUNK_ROWS)
    rows = np.concatenate(list(chunks))
    drawn = model.impute(rows, arguments.count, key=jax.random.key(arguments.seed))
    write_table(arguments.out, columns_of(model), (list(copy.T) for copy in drawn))
    return 0


def _blocks(
    model: rf.tables.Standardised | rf.tables.WithRelations | rf.tables.MixedDensity,
    count: int,
    key: jax.Array,
) -> Iterator[np.ndarray]:
    if count <= CHUNK_ROWS:
        yield np.asarray(model.sample(key=key, shape=(count,)))
        return
    for i, first in enumerate(range(0, count, CHUNK_ROWS)):
        # All chunks have the same size, because another size would cause recompilation; the last one is
        # truncated.
        rows = np.asarray(model.sample(key=jax.random.fold_in(key, i), shape=(CHUNK_ROWS,)))
        yield rows[: count - first]
