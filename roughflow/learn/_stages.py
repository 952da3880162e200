"""The two stages of a fit to a table: regression, then likelihood."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import PRNGKeyArray

from .._checks import check_count
from .._devices import Devices, DevicesLike
from ..density import StochasticFlow
from ..flow import HutchinsonDivergence
from ._checkpoint import steps_of
from ._fit import Fitted, fit
from ._interpolant import Interpolant
from ._maximum_likelihood import MaximumLikelihood

MANY = 8  # columns above which likelihood is trained with probes of the divergence
LOOKED_AT = 4096  # rows to validate the regression on: those set aside, as often as it takes
LIKELIHOOD_ROWS = 1000  # rows to validate likelihood on, at most: each takes a solve
SHARES = {"regression": 0.75, "likelihood": 0.25}  # of a budget of seconds
TIMED = 40  # steps that say how many a budget of seconds allows
LOOKS = {"regression": 20, "likelihood": 10}  # at them
APART = {"regression": 25, "likelihood": 1}  # steps from one to the next, at least: patience counts looks


@dataclasses.dataclass(frozen=True)
class Stages:
    """Regression, then likelihood, on the same rows."""

    train: Any  # an array, `Smoothed` rows or `UnitBatches`
    held_out: Any
    learning_rate: float
    patience: int | None
    progress: bool
    resume: bool
    seconds: float | None
    checkpoint: Path | None
    devices: DevicesLike

    def both(
        self,
        flow: StochasticFlow,
        context: int,
        batch_size: int,
        steps: int,
        likelihood_steps: int,
        key: PRNGKeyArray,
        key_likelihood: PRNGKeyArray,
    ) -> Fitted:
        """What the last stage ended with, and the history of each."""
        settings = (flow, context, batch_size, key)
        last = self._stage(self.regression, settings, self.checkpoint, steps)
        histories = {"regression": last.history}
        if likelihood_steps and not last.interrupted:
            file = None if self.checkpoint is None else second_file(self.checkpoint)
            last = self._stage(self.likelihood, (last.model, key_likelihood), file, likelihood_steps)
            histories["likelihood"] = last.history
        return dataclasses.replace(last, stages=histories)

    def _stage(
        self, stage: Callable[..., Fitted], settings: tuple[Any, ...], file: Path | None, steps: int
    ) -> Fitted:
        if self.seconds is not None:
            steps = self._affordable(self.seconds, stage, settings, file)
        return stage(*settings, file, steps)

    def _affordable(
        self, seconds: float, stage: Callable[..., Fitted], settings: tuple[Any, ...], file: Path | None
    ) -> int:
        """How many steps of a stage its share of the seconds pays for; a run that is resumed keeps what it
        began with."""
        if self.resume and file is not None and file.exists():
            return steps_of(file)
        quiet = partial(stage.__func__, dataclasses.replace(self, progress=False, resume=False))  # pyright: ignore[reportFunctionMemberAccess]
        quiet(*settings, None, TIMED)  # compiles
        began = time.perf_counter()
        quiet(*settings, None, TIMED)
        afforded = int(SHARES[stage.__name__] * seconds * TIMED / (time.perf_counter() - began))
        return Devices.of(self.devices).agreed([max(1, afforded)])[0]

    def regression(
        self,
        flow: StochasticFlow,
        context: int,
        batch_size: int,
        key: PRNGKeyArray,
        file: Path | None,
        steps: int,
    ) -> Fitted:
        # A row is seen at one time and with one start of the base: few rows must be seen often.
        often = max(1, LOOKED_AT // max(1, len(self.held_out)))
        return fit(
            flow,
            self.train,
            key=key,
            objective=Interpolant(context=context),
            steps=steps,
            batch_size=batch_size,
            learning_rate=self.learning_rate,
            average=0.999,
            **self._shared("regression", steps, np.tile(self.held_out, (often, 1)), file),
        )

    def likelihood(self, flow: StochasticFlow, key: PRNGKeyArray, file: Path | None, steps: int) -> Fitted:
        if flow.dimension > MANY:
            flow = eqx.tree_at(lambda f: f.divergence, flow, HutchinsonDivergence())
        return fit(
            flow,
            self.train,
            key=key,
            objective=MaximumLikelihood(1),
            steps=check_count("likelihood_steps", steps),
            batch_size=256,
            learning_rate=self.learning_rate / 4,
            average=0.98,
            frozen=lambda flow: flow.base,
            **self._shared("likelihood", steps, np.asarray(self.held_out)[:LIKELIHOOD_ROWS], file),
        )

    def _shared(self, name: str, steps: int, held_out: np.ndarray, file: Path | None) -> dict[str, Any]:
        some = len(held_out) > 0
        return {
            "validation": held_out if some else 0.0,
            "every": max(APART[name], -(-steps // LOOKS[name])),
            "patience": self.patience if some else None,
            "progress": name if self.progress else False,
            "checkpoint": file,
            "devices": self.devices,
            "resume": self.resume and file is not None and file.exists(),
        }


def second_file(checkpoint: Path) -> Path:
    """Where the second stage of a run that is kept in `checkpoint` is kept."""
    return checkpoint.with_name(checkpoint.name + ".likelihood")
