"""A model from its file, and the columns of a table that belong to it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import roughflow as rf

from .refused import Refused
from .rows import counted, table_name
from .table import read_chunks


def read_model(path: Path) -> rf.Standardised:
    """What `roughflow fit` wrote, or a plain flow that `rf.save` wrote."""
    model = rf.load(path)
    if isinstance(model, rf.StochasticFlow):
        model = rf.Standardised(model, np.zeros(model.dimension), np.eye(model.dimension))
    if not isinstance(model, rf.Standardised):
        raise Refused(f"{path} holds a {type(model).__name__}, not a density: make one with roughflow fit")
    return model


def columns_of(model: rf.Standardised) -> tuple[str, ...]:
    return model.columns or counted(model.flow.dimension)


def chunks_for(model: rf.Standardised, path: Path, size: int) -> tuple[int, Iterator[np.ndarray]]:
    """How many rows a table has, and the model's columns of them, `size` rows at a time: by name where both
    have names, otherwise by place."""
    by_name = model.columns and path.suffix.lower() != ".npy"
    columns, count, chunks = read_chunks(path, model.columns if by_name else None, size)
    if len(columns) != model.flow.dimension:
        raise Refused(
            f"{table_name(path)} has {len(columns)} columns, and the model {model.flow.dimension}: "
            f"{', '.join(columns_of(model))}"
        )
    return count, chunks
