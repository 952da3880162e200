"""Check and write output files, check the input before JAX is imported, and read models."""

import argparse
import importlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import roughflow as rf
from roughflow.faq import see

from .series import read_inputs, read_series
from .startup import Refused
from .tables import (
    STANDARD,
    check_readable,
    counted,
    is_array,
    is_text,
    read_chunks,
    read_mixed,
    read_table,
    table_name,
)


def check_writable(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise an error before any work is done if the output path is unusable."""
    if path == STANDARD:
        raise Refused("this output cannot be written to standard output (-): choose a file")
    if path.is_dir():
        raise Refused(f"{path} is a folder: choose a file in it")
    if path.exists() and not path.is_file():
        raise Refused(f"{path} is a device or a pipe: choose a regular file")
    if any(path.resolve() == source.resolve() for source in inputs):
        raise Refused(f"{path} is also the input: choose another output file")
    if path.exists() and not force:
        raise Refused(f"{path} exists: use --force, or choose another file{see('files-that-exist')}")
    folder = path.resolve().parent
    check_folder(folder, path)
    try:
        # Checking permissions is not enough, because a file system may be read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Refused(f"cannot write {path}: {error.strerror} in {folder}") from None


def check_folder(folder: Path, path: Path) -> None:
    """Raise an error if the folder does not exist, because its name may be a typo."""
    if not folder.exists():
        raise Refused(f"cannot write {path}: there is no folder {folder}; create it first (mkdir -p)")
    if not folder.is_dir():
        raise Refused(f"cannot write {path}: {folder} is a file, not a folder")


def with_figures(module: str) -> Any:
    """Import a module that needs matplotlib, or report why matplotlib does not work."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("roughflow"):
            raise
        why = f"{error.name.partition('.')[0]}: pip install 'roughflow[plots]'"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"matplotlib, which fails to load here ({type(error).__name__}: {first}): reinstall it"
    raise Refused(f"figures need {why}{see('not-installed')}")


def check_table(path: Path | None, what: str, *, arrays: bool, force: bool, inputs: Iterable[Path]) -> None:
    """`check_writable` for a table, which may also go to standard output (no name, or `-`)."""
    if path is None or path == STANDARD:
        return
    check_writable(path, force=force, inputs=inputs)
    if not (is_text(path) or (arrays and is_array(path))):
        endings = ".csv, .tsv, .csv.gz, .tsv.gz or .npy" if arrays else ".csv, .tsv, .csv.gz or .tsv.gz"
        raise Refused(f"{path}: {what} must end in {endings}")


def look_at_input(arguments: argparse.Namespace) -> None:
    """Raise an error if a file does not exist or cannot be read. A text table or a series is read here and
    kept for the command, because standard input cannot be read twice."""
    arguments.table = None
    if arguments.command in ("score", "sample", "impute"):
        _check_model(arguments.model)
    if arguments.command in ("score", "estimate", "fit", "impute") and arguments.data != STANDARD:
        check_readable(arguments.data)
    if arguments.command == "fit" and arguments.join is None:
        check_writable(arguments.out, force=arguments.force, inputs=[arguments.data])
        if arguments.data == STANDARD or is_text(arguments.data):
            read = read_mixed if arguments.family == "mixture" else read_table
            arguments.table = read(arguments.data, wanted_columns(arguments))
    if arguments.command == "estimate":
        arguments.table = read_series(arguments.data, arguments.time, arguments.value, arguments.scale)
        if arguments.inputs is not None:
            check_readable(arguments.inputs)
            arguments.inputs = read_inputs(arguments.inputs, arguments.time)


def wanted_columns(arguments: argparse.Namespace) -> list[str] | None:
    """The columns that --columns, --given and --groups name; None for all columns."""
    if arguments.columns is None:
        return None
    group = [] if arguments.groups is None else [arguments.groups]
    return list(dict.fromkeys([*arguments.columns, *(arguments.given or ()), *group]))


def _check_model(path: Path) -> None:
    if path.is_dir():
        raise Refused(f"{path} is a folder, not a model")
    if not path.exists():
        raise Refused(f"there is no file {path}")
    if not path.is_file():
        raise Refused(f"{path} is a device or a pipe, not a file")


def read_model(path: Path) -> "rf.tables.Standardised | rf.tables.WithRelations | rf.tables.MixedDensity":
    """Read a model written by `roughflow fit`, or a flow written by `rf.save`."""
    model = rf.load(path)
    if isinstance(model, rf.StochasticFlow):
        model = rf.tables.Standardised(model, np.zeros(model.dimension), np.eye(model.dimension))
    if not isinstance(model, rf.tables.Standardised | rf.tables.WithRelations | rf.tables.MixedDensity):
        raise Refused(
            f"{path} holds a {type(model).__name__}, not a density: pass a model written by roughflow fit"
        )
    return model


def columns_of(
    model: "rf.tables.Standardised | rf.tables.WithRelations | rf.tables.MixedDensity",
) -> tuple[str, ...]:
    return model.columns or counted(model.num_columns)


def chunks_for(
    model: "rf.tables.Standardised | rf.tables.WithRelations | rf.tables.MixedDensity", path: Path, size: int
) -> tuple[int, Iterator[np.ndarray]]:
    """The number of rows of a table, and an iterator over chunks of `size` rows with the columns of the
    model. Columns are matched by name if both have names, otherwise by position."""
    by_name = model.columns and path.suffix.lower() != ".npy"
    wanted = model.columns if by_name else None
    if isinstance(model, rf.tables.MixedDensity):
        table = read_mixed(path, wanted)
        columns, count = table.columns, len(table.rows)
        chunks = (table.rows[i : i + size] for i in range(0, count, size))
    else:
        columns, count, chunks = read_chunks(path, wanted, size)
    if len(columns) != model.num_columns:
        raise Refused(
            f"{table_name(path)} has {len(columns)} columns, but the model has {model.num_columns}: "
            f"{', '.join(columns_of(model))}"
        )
    return count, chunks
