"""How far a run is: a bar on a terminal and in a notebook, a few plain lines elsewhere."""

import sys
import time
from typing import Any

from tqdm.auto import tqdm

LINES = 8  # of one run, after the first
COMPILING = "compiling …"


def progress_bar(total: int, *, done: int = 0, name: str = "", unit: str = "step", shown: bool = True) -> Any:
    """What `tqdm` gives, as far as `update` and `set_postfix_str` go, and as a context."""
    if shown and not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return _Lines(total, done, name, unit)
    settings = {"total": total, "initial": done, "unit": unit, "disable": not shown}
    bar = tqdm(desc=name or None, dynamic_ncols=True, **settings)
    bar.set_postfix_str(COMPILING)
    return bar


class _Lines:
    """A bar in a file would be hundreds of lines."""

    def __init__(self, total: int, done: int, name: str, unit: str):
        self.total, self.done, self.unit = total, done, unit
        self.name = f"{name}: " if name else ""
        self.told = done
        self.began = time.monotonic()
        self.due = False
        self._say(COMPILING)

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_) -> None:
        if self.done > self.told:
            self._tell("")

    def update(self, count: int) -> None:
        self.done += count
        self.due = self.done == self.total or (self.done - self.told) * LINES >= self.total

    def set_postfix_str(self, text: str) -> None:
        if self.due:
            self._tell(f", {text}" if text else "")

    def _tell(self, more: str) -> None:
        seconds = time.monotonic() - self.began
        self._say(f"{self.unit} {self.done} of {self.total} after {seconds:.0f} s{more}")
        self.told, self.due = self.done, False

    def _say(self, text: str) -> None:
        print(self.name + text, file=sys.stderr, flush=True)
