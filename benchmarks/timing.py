"""Interleaved timing: every entry runs once per round, so that disturbances affect all entries alike."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Entry:
    """One entry of a comparison.

    `step` does one whole training step and returns when it is finished. `evaluate` returns the
    per-sample values and the flat gradient at the workload's initial weights.
    """

    step: Callable[[], object]
    evaluate: Callable[[], tuple[np.ndarray, np.ndarray]]
    hutchinson: bool = False  # compare with the reference that uses the same probe
    limit_s: float | None = None  # stop if the first call takes longer


def first_call(step: Callable[[], object], limit_s: float | None = None) -> float:
    """Seconds of the first call, including compilation."""
    with time_limit(limit_s):
        return timed(step)


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds` seconds (main thread, Unix)."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no result after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def interleave(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds per call, (rounds,) for each name, round-robin after one untimed round."""
    for step in steps.values():
        step()
    times = [[timed(step) for step in steps.values()] for _ in range(rounds)]
    return dict(zip(steps, np.array(times).T, strict=True))


def summary(seconds: np.ndarray, baseline: np.ndarray) -> list[str]:
    """Median and quartiles in milliseconds, and the ratio of medians to the baseline."""
    low, median, high = 1e3 * np.percentile(seconds, [25, 50, 75])
    ratio = median / (1e3 * np.median(baseline))
    return [f"{median:.0f}", f"{low:.0f}-{high:.0f}", f"{ratio:.2f}"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def verdict(holds: bool, claim: str, shown: str) -> str:
    """One line with a requirement, whether it is met, and the result."""
    return f"{'holds' if holds else 'FALLS SHORT'}: {claim}: {shown}"
