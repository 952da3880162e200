"""The state of a run, and the file it is kept in."""

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._devices import leads
from ..faq import see
from ._files import read_archive, write_archive
from ._fingerprint import difference, fingerprint
from ._history import History

VERSION = 4
SECONDS = 30.0  # between two writes


@dataclass(frozen=True)
class Progress:
    """Where a run is: everything the next step depends on."""

    step: int
    parameters: Any
    optimiser: Any
    state: Any  # of the objective
    best: Any  # parameters at the lowest validation loss
    streak: int  # of steps that were not finite
    history: History
    grid: int | None = None  # steps that the model is solved with; None for its own

    @staticmethod
    def start(parameters: Any, optimiser: Any, state: Any) -> "Progress":
        return Progress(0, parameters, optimiser, state, parameters, 0, History())

    def advanced(
        self, parameters: Any, optimiser: Any, state: Any, streak: int, history: History
    ) -> "Progress":
        return Progress(
            history.loss.size, parameters, optimiser, state, self.best, streak, history, self.grid
        )

    def validated(self, loss: float, parameters: Any) -> "Progress":
        """With one more look at the validation data, with these parameters; the best are kept."""
        lowest = np.min(_ranked(self.history.validation_loss), initial=np.inf)
        best = parameters if loss < lowest else self.best
        history = self.history.with_validation(self.step, loss)
        return dataclasses.replace(self, best=best, history=history)

    @property
    def changing(self) -> tuple[Any, ...]:
        """The trees that steps change."""
        return self.parameters, self.optimiser, self.state, self.best

    def moved(self, where: Callable[[Any], Any]) -> "Progress":
        """The same run on other devices."""
        parameters, optimiser, state, best = (where(tree) for tree in self.changing)
        return dataclasses.replace(self, parameters=parameters, optimiser=optimiser, state=state, best=best)

    def stale_from(self, patience: int | None) -> int | None:
        """The step of the first look that came `patience` looks after the best one until then."""
        if patience is None:
            return None
        losses = _ranked(self.history.validation_loss)
        for i in range(losses.size):
            if i - int(np.argmin(losses[: i + 1])) >= patience:
                return int(self.history.validation_step[i])
        return None


def _ranked(losses: np.ndarray) -> np.ndarray:
    """A look that came to NaN is worse than any that did not."""
    return np.where(np.isnan(losses), np.inf, losses)


@dataclass
class Checkpoint:
    """A file that holds a run's state, for the run with these settings only."""

    path: Path
    settings: dict[str, str]
    written: float = 0.0

    @staticmethod
    def open(
        path: str | os.PathLike, settings: dict[str, Any], start: Progress, fixed: dict[str, Any]
    ) -> "Checkpoint":
        """For the run with these `settings`, of which `fixed` are not plain numbers."""
        described = {name: repr(value) for name, value in settings.items()}
        for name, value in fixed.items():
            described |= fingerprint(value, name)
        # Of what a run changes, the shapes.
        changed = {"parameters": start.parameters, "optimiser": start.optimiser, "state": start.state}
        for what, tree in changed.items():
            for place, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = jax.tree_util.keystr(place, simple=True, separator=".")
                described[f"shape of {what}.{name}"] = f"{leaf.dtype}{list(leaf.shape)}"
        return Checkpoint(Path(path), described)

    def begin(self, start: Progress) -> Progress:
        if self.path.exists():
            raise ValueError(
                f"checkpoint {self.path} exists: resume=True goes on from it; delete it or name another to "
                "start afresh" + see("checkpoints")
            )
        return start

    def load(self, start: Progress) -> Progress:
        """The state in the file; `start` says what it looks like."""
        header, arrays = read_archive(self.path, "checkpoint", VERSION)
        if header["version"] < VERSION:
            raise ValueError(
                f"checkpoint {self.path} was written by an older roughflow, which did not note all that a "
                "run depends on: delete it or name another to start afresh" + see("checkpoints")
            )
        told = difference(header["settings"], self.settings)
        if told is not None:
            raise ValueError(f"checkpoint {self.path} belongs to another run: {told}{see('checkpoints')}")
        leaves, structure = jax.tree.flatten(start.changing)
        restored = [jnp.asarray(arrays[f"leaf/{i}"], a.dtype) for i, a in enumerate(leaves)]
        parameters, optimiser, state, best = jax.tree.unflatten(structure, restored)
        series = {n.removeprefix("history/"): a for n, a in arrays.items() if n.startswith("history/")}
        history = History.from_arrays(series)
        at, streak, grid = header["step"], header["streak"], header.get("grid")
        return Progress(at, parameters, optimiser, state, best, streak, history, grid)

    def save(self, now: Progress, at_once: bool) -> None:
        if not leads() or (not at_once and time.monotonic() - self.written < SECONDS):
            return
        leaves = jax.tree.leaves(now.changing)
        arrays = {f"leaf/{i}": np.asarray(a) for i, a in enumerate(leaves)}
        arrays |= {f"history/{name}": a for name, a in now.history.to_arrays().items()}
        header = {"kind": "checkpoint", "version": VERSION, "step": now.step, "streak": now.streak}
        header |= {"grid": now.grid}
        write_archive(self.path, header | {"settings": self.settings}, arrays)
        self.written = time.monotonic()


def steps_of(path: Path) -> int:
    """How many steps the run in this file was to take."""
    return int(read_archive(path, "checkpoint", VERSION)[0]["settings"]["steps"])
