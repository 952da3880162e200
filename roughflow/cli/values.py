"""What the values of options may be: each reads a text, or says what is wanted."""

import argparse
import math
from collections.abc import Callable
from typing import Any


def _number(kind: Callable, accept: Callable[[float], bool], description: str) -> Callable[[str], float]:
    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accept(value)):
            raise argparse.ArgumentTypeError(f"{description} is wanted, got {text!r}")
        return value

    return read


count = _number(int, lambda n: n >= 1, "a whole number of at least 1")
# JAX takes a seed of 32 bits where 64 are not switched on.
seed_number = _number(int, lambda n: 0 <= n < 2**31, f"a whole number from 0 to {2**31 - 1}")
whole = _number(int, lambda n: n >= 0, "a whole number of at least 0")
positive = _number(float, lambda v: v > 0, "a number above 0")
not_negative = _number(float, lambda v: v >= 0, "a number of at least 0")
share = _number(float, lambda v: 0 <= v < 1, "a share, from 0 to below 1,")


def noise(text: str) -> float | str:
    return text if text == "best" else _size(text)


_size = _number(float, lambda v: v >= 0, "best, or a number of at least 0,")


def _by_column(text: str, value: Callable[[str], Any], example: str) -> dict[str, Any]:
    """Values by the names of columns: A=VALUE,B=VALUE."""
    parts = [part.rpartition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in parts]
    try:
        if not all(names) or len(set(names)) < len(names):
            raise ValueError
        return {name: value(part) for name, (_, _, part) in zip(names, parts, strict=True)}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"different columns with their values, {example}, are wanted, got {text!r}"
        ) from None


def bounds(text: str) -> dict[str, tuple[float | None, float | None]]:
    def limits(part: str) -> tuple[float | None, float | None]:
        low, colon, high = part.partition(":")
        if not colon or not (low + high).strip():
            raise ValueError
        limits = tuple(float(limit) if limit.strip() else None for limit in (low, high))
        if limits[0] is not None and limits[1] is not None and not limits[0] < limits[1]:
            told = "are reversed" if limits[0] > limits[1] else "leave nothing between them"
            raise argparse.ArgumentTypeError(f"the bounds {part} {told}, got {text!r}")
        return limits  # pyright: ignore

    return _by_column(text, limits, "share=0:1,income=0:")


def rounding(text: str) -> dict[str, float] | str:
    return text if text == "auto" else _by_column(text, float, "age=1,height=0.5")


def names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"different names with commas between them are wanted, got {text!r}")
    return names


def process(text: str) -> tuple[str, int, int]:
    """One of several processes: where the first is, which this is, and how many there are."""
    try:
        address, which, count = text.split(",")
        if ":" not in address or not 0 <= int(which) < int(count):
            raise ValueError
        return address, int(which), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"HOST:PORT,I,N with I below N is wanted, got {text!r}") from None
