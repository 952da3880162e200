"""Compiled programs: no more of them than need be, and never more than a process can hold."""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from ._checks import is_traced

# On Linux a process may have 65,530 memory maps; one too many, and the compiler dies of a segmentation fault.
# A compiled program takes about forty, and JAX keeps thousands of programs.
MAPS = Path("/proc/self/maps")
LIMIT = 15_000
EVERY = 32  # programs compiled between two looks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Held:
    """How many programs were compiled since the last look, and how many maps are too many."""

    fresh: int = 0
    limit: int = LIMIT


def jit(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """As `eqx.filter_jit`, for programs that may be asked for again and again with other numbers.

    Plain floats in the arguments, a rate or an end time in a module, are not compiled into the program, so
    that another number finds it compiled; only code that asks for their value (`if rate > 1`, `math.exp`) has
    a program for each. And when the programs of this process have become too many, they are dropped, to
    be compiled again as needed.
    """
    compiled = eqx.filter_jit(function)
    # What arguments look like to code that asks for the value of a float.
    asking: set[Any] = set()

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        drop_programs()
        leaves, structure = jax.tree.flatten((args, kwargs))
        if not any(_is_float(leaf) for leaf in leaves) or structure in asking:
            return compiled(*args, **kwargs)
        # A Python float stays one to the rules of promotion: it becomes a weakly typed array.
        dynamic = [jnp.asarray(leaf) if _is_float(leaf) else leaf for leaf in leaves]
        changed: tuple[Any, Any] = jax.tree.unflatten(structure, dynamic)
        try:
            return compiled(*changed[0], **changed[1])  # pyright: ignore[reportCallIssue]
        except jax.errors.JAXTypeError:
            result = compiled(*args, **kwargs)
            asking.add(structure)
            return result

    return call


def drop_programs() -> None:
    """Drop all compiled programs if they hold too many memory maps; between two calls, not within one."""
    if _Held.fresh < EVERY or is_traced(jnp.asarray(0.0)):
        return
    _Held.fresh = 0
    if memory_maps() < _Held.limit:
        return
    jax.clear_caches()
    gc.collect()
    # What somebody else holds stays: it should not make every call drop what the one before it compiled.
    _Held.limit = max(LIMIT, 2 * memory_maps())


def memory_maps() -> int:
    """How many memory maps this process has; 0 where there is no telling, and no such limit."""
    try:
        return MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float | np.floating)


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    if event.endswith("/backend_compile_duration"):
        _Held.fresh += 1


jax.monitoring.register_event_duration_secs_listener(_count)
