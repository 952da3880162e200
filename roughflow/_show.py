"""Short representations of objects in a terminal or notebook; `eqx.tree_pprint` shows the whole tree."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._checks import is_traced
from ._functions import trainable

ENDS = 5  # items shown at each end of a long list
HIDDEN = ("escape_rate", "max_steps")  # safeguards that do not affect the result


def is_known(*values: Any) -> bool:
    """Whether all values are concrete arrays: not traced, not shapes, not missing."""
    return all(isinstance(value, jax.Array | np.ndarray) and not is_traced(value) for value in values)


def number(value: Any) -> str:
    """A number as text with four significant digits; "?" if it is traced."""
    try:
        return f"{float(value):.4g}"
    except TypeError:  # also raised by JAX for a traced number
        return "?"


def count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def named(value: Any) -> str:
    """The name of a function, or of the class of any other object."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return "a lambda" if name == "<lambda>" else name


def settings(value: Any) -> str:
    """An object as text: its name, and those of its fields that are numbers or modules."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    parts = [(field.name, getattr(value, field.name, None)) for field in fields]
    plain = lambda part: named(part) if isinstance(part, eqx.Module) else f"{part:g}"
    shown = lambda name, part: name not in HIDDEN and isinstance(part, int | float | eqx.Module)
    texts = [f"{name}={plain(part)}" for name, part in parts if shown(name, part)]
    return f"{named(value)}({', '.join(texts)})"


def num_parameters(*trees: Any) -> int:
    """The number of trainable parameters."""
    parts = [eqx.filter(tree, trainable(tree)) for tree in trees]
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(parts))


def shortened(items: Sequence[str], max_items: int = 2 * ENDS) -> list[str]:
    """The items; if there are more than `max_items`, those in the middle are replaced by an ellipsis."""
    if len(items) <= max_items:
        return list(items)
    return [*items[: max_items // 2], "…", *items[-(max_items // 2) :]]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are right-aligned, except for the last one."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    side = lambda i: "<" if i == len(header) - 1 else ">"
    pad = lambda line: "  ".join(f"{cell:{side(i)}{widths[i]}}" for i, cell in enumerate(line))
    return [f"  {pad(line)}".rstrip() for line in lines]


def listed(title: str, parts: Iterable[tuple[str, str]]) -> str:
    """A title, followed by one line for each pair of a name and a text."""
    parts = list(parts)
    width = max((len(name) for name, _ in parts), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in parts)])
