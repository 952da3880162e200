"""The history of a fit, and its progress bar."""

import sys
import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .._show import count


@dataclass(frozen=True)
class History:
    """Metrics of a fit as arrays.

    - `step`, `loss`: one number per step; NaN for skipped steps.
    - `metrics`: other metrics of the objective by name (`effective_paths`, …), one number per step.
    - `validation_step`, `validation_loss`: one number per validation check.
    - `ended`: the reason for stopping before the last step, or None.
    """

    loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    validation_step: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    validation_loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ended: str | None = None

    @property
    def step(self) -> np.ndarray:
        return np.arange(1, self.loss.size + 1)

    @property
    def skipped(self) -> int:
        """Number of steps skipped because the loss or a gradient was not finite."""
        return int(np.sum(np.isnan(self.loss)))

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss; None without validation."""
        if not np.any(np.isfinite(self.validation_loss)):
            return None
        return int(self.validation_step[np.nanargmin(self.validation_loss)])

    def with_steps(self, loss: np.ndarray, metrics: dict[str, np.ndarray]) -> "History":
        old = {name: self.metrics.get(name, np.zeros(0)) for name in metrics}
        joined = {name: np.concatenate([old[name], metrics[name]]) for name in metrics}
        return self._replace(loss=np.concatenate([self.loss, loss]), metrics=joined)

    def with_validation(self, step: int, loss: float) -> "History":
        return self._replace(
            validation_step=np.append(self.validation_step, step),
            validation_loss=np.append(self.validation_loss, loss),
        )

    def __repr__(self) -> str:
        return f"History: {self.summary()}"

    def summary(self) -> str:
        """A one-line summary."""
        parts = [count(self.loss.size, "step")]
        if self.loss.size:
            parts.append(f"loss {self.recent():.4f}")
        looks = self.validation_loss
        if self.best_step is not None:
            best = f"best {np.nanmin(looks):.4f} at step {self.best_step:,}"
            parts.append(f"validation {looks[-1]:.4f}, {best}")
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped")
        return ", ".join(parts) + (f"; ended {self.ended}" if self.ended else "")

    def recent(self, name: str | None = None, count: int = 100) -> float:
        """The mean of the most recent values of a metric."""
        last = (self.loss if name is None else self.metrics[name])[-count:]
        last = last[np.isfinite(last)]
        return float(last.mean()) if last.size else float("nan")

    def to_arrays(self) -> dict[str, np.ndarray]:
        # The reason for ending is known only at the end.
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("metrics", "ended")}
        return plain | {f"metrics/{name}": values for name, values in self.metrics.items()}

    @staticmethod
    def from_arrays(arrays: dict[str, np.ndarray]) -> "History":
        # Before version 0.2 metrics were called figures.
        split = [(n.partition("/"), a) for n, a in arrays.items()]
        metrics = {name: a for (kind, _, name), a in split if kind in ("metrics", "figures") and name}
        plain: dict[str, Any] = {name: values for name, values in arrays.items() if "/" not in name}
        return History(metrics=metrics, **plain)

    def _replace(self, **changes) -> "History":
        return History(**({f.name: getattr(self, f.name) for f in fields(self)} | changes))


MAX_LINES = 8  # maximum number per run, after the first
COMPILING = "compiling …"


def progress_bar(total: int, *, done: int = 0, name: str = "", unit: str = "step", shown: bool = True) -> Any:
    """The part of tqdm's interface that is used: `update`, `set_postfix_str` and a context manager."""
    if shown and not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return _Lines(total, done, name, unit)
    settings = {"total": total, "initial": done, "unit": unit, "disable": not shown}
    bar = tqdm(desc=name or None, dynamic_ncols=True, **settings)
    bar.set_postfix_str(COMPILING)
    return bar


class _Lines:
    """Progress for output to a file, where a bar would be hundreds of lines."""

    def __init__(self, total: int, done: int, name: str, unit: str):
        self.total, self.done, self.unit = total, done, unit
        self.name = f"{name}: " if name else ""
        self.reported = done
        self.began = time.monotonic()
        self.due = False
        self._say(COMPILING)

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_) -> None:
        if self.done > self.reported:
            self._report("")

    def update(self, count: int) -> None:
        self.done += count
        self.due = self.done == self.total or (self.done - self.reported) * MAX_LINES >= self.total

    def set_postfix_str(self, text: str) -> None:
        if self.due:
            self._report(f", {text}" if text else "")

    def _report(self, more: str) -> None:
        seconds = time.monotonic() - self.began
        self._say(f"{self.unit} {self.done} of {self.total} after {seconds:.0f} s{more}")
        self.reported, self.due = self.done, False

    def _say(self, text: str) -> None:
        print(self.name + text, file=sys.stderr, flush=True)
