"""Checks of arguments. Each raises an error whose one-line message names the argument and shows its value."""

import collections.abc
import dataclasses
import functools
import math
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PRNGKeyArray

from .faq import see

# Packages whose stack frames may lie between a warning and the user's program.
INTERNAL = ("roughflow.", "jax.", "equinox.", "sklearn.", "joblib.")
_shown_warnings: set[tuple[str, int, str]] = set()


class NonFiniteError(RuntimeError):
    """The drift or the diffusion returned NaN or infinity."""


class OutOfStepsError(RuntimeError):
    """An adaptive solve ran out of steps before it reached the end time."""


def is_traced(value: Any) -> bool:
    """Whether a value is a JAX tracer, as inside `jit`, `grad` or `vmap`."""
    return isinstance(value, Tracer)


def warn(message: str) -> None:
    """Issue a warning that points to the line of the user's program that called the library. During a
    scikit-learn search over many fits, warnings that differ only in numbers are shown once."""
    frame, level, searching = sys._getframe(1), 2, False
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).startswith(INTERNAL):
        searching |= name.startswith("sklearn.model_selection")
        frame, level = frame.f_back, level + 1
    if searching:
        warning = (frame.f_code.co_filename, frame.f_lineno, re.sub(r"[-+.\d]+", "", message))
        if warning in _shown_warnings:
            return
        _shown_warnings.add(warning)
    warnings.warn(message, stacklevel=level)


def check_key(key: Any, *, many: bool = False) -> PRNGKeyArray:
    """Return `key` if it is a typed key or, with `many`, an array of typed keys; otherwise raise an error."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if many or key.shape == ():
            return key
        raise TypeError(f"key must be a single key, got an array of keys of shape {key.shape}{see('keys')}")
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32:
        raise TypeError(
            "key is an old-style uint32 key (jax.random.PRNGKey); make one with jax.random.key(seed)"
            + see("keys")
        )
    raise TypeError(f"key must come from jax.random.key(seed), got {type(key).__name__}{see('keys')}")


def shown(value: Any) -> str:
    """A short description of a value for an error message, on one line."""
    if isinstance(value, type):
        return f"the class {value.__name__}: give an instance of it"
    if isinstance(value, jax.Array | np.ndarray) and value.size > 4:
        return f"an array of {value.dtype} of shape {value.shape}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if isinstance(value, eqx.Module):
        return type(value).__name__
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an `int`; raise a `ValueError` unless it is an integer and not less than `least`."""
    if not is_whole(value) or value < least:
        wanted = {0: "a non-negative whole number", 1: "a positive whole number"}.get(least)
        raise ValueError(
            f"{name} must be {wanted or f'a whole number of at least {least}'}, got {shown(value)}"
        )
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Raise a `ValueError` unless the value is a finite real number within the bounds. Traced values pass."""
    if is_traced(value):
        return
    number = np.asarray(value) if not isinstance(value, str | bytes) else np.asarray(None)
    fine = number.ndim == 0 and number.dtype.kind in "fiu" and np.isfinite(number)
    if fine and above < number < below and least <= number <= most:
        return
    low, high = max(above, least), min(below, most)
    if math.isfinite(low) and math.isfinite(high):
        wanted = f"lie between {low:g} and {high:g}"
    elif low == above == 0:
        wanted = "be positive and finite"
    else:
        wanted = "be a finite number" + f" of at least {low:g}" * math.isfinite(low)
    raise ValueError(f"{name} must {wanted}, got {shown(value)}")


def check_positive(name: str, value: Any) -> None:
    """Raise a `ValueError` unless all entries are finite and positive. Traced values pass."""
    if is_traced(value):
        return
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or not bool(np.all(np.isfinite(array) & (array > 0))):
        raise ValueError(f"{name} must be positive and finite, got {shown(value)}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_callable(name: str, value: Any, call: str) -> None:
    """Raise a `TypeError` unless the value is a function; `call` describes how it will be called."""
    if not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be a function {call}, got {shown(value)}")


def check_instance(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Raise a `TypeError` unless the value is an instance of `kind`, which `wanted` describes."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")


Arguments = typing.ParamSpec("Arguments")
Result = typing.TypeVar("Result")


def grouped_arguments(
    **options: type,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator for functions that take groups of options as dataclasses; `options` maps the name of each
    such argument to its dataclass. Passing a field of a dataclass as a separate argument raises a `TypeError`
    that says where the field belongs."""
    public_name = lambda kind: f"rf.{kind.__module__.split('.')[1]}.{kind.__name__}"
    places = {}
    for argument, kind in options.items():
        for field in dataclasses.fields(kind):
            example = f"{argument}={public_name(kind)}({field.name}=...)"
            places[field.metadata.get("was", field.name)] = example

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for name in kwargs:
                if name in places:
                    raise TypeError(f"{function.__name__} has no argument {name}: pass {places[name]}")
            for name, kind in options.items():
                value = kwargs.get(name)
                if value is not None:
                    check_instance(name, value, kind, f"an {public_name(kind)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def check_path(name: str, value: Any) -> Path:
    if (
        not isinstance(value, str | os.PathLike)
        or isinstance(os.fspath(value), bytes)
        or not os.fspath(value)
    ):
        raise TypeError(f"{name} must be the name of a file, got {shown(value)}")
    return Path(value)


def check_input_file(path: str | os.PathLike) -> None:
    """Raise an error unless the path is an existing file, not a folder, a device or a pipe."""
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, not a file")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    if not os.path.isfile(path):
        raise ValueError(f"{path} is a device or a pipe, not a file")


def check_fields(module: eqx.Module) -> None:
    """Raise a `TypeError` if a field of a module has the wrong type. Only classes of the library are checked,
    not those of users."""
    cls = type(module)
    if not cls.__module__.startswith("roughflow."):
        return
    for field in dataclasses.fields(cls):
        value = getattr(module, field.name)
        if not _fits(value, field.type, static=bool(field.metadata.get("static"))):
            raise TypeError(f"{field.name} must be {_wanted(field.type)}, got {shown(value)}")


def _wanted(kind: Any) -> str:
    """A description of a type for error messages."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_wanted(one) for one in typing.get_args(kind)))
    if collections.abc.Callable in (kind, typing.get_origin(kind)):
        return "a function"
    words = {bool: "True or False", str: "text", int: "a whole number", None: "None", types.NoneType: "None"}
    if kind in words:
        return words[kind]
    if kind in (float, jax.Array, np.ndarray):
        return "a real number" if kind is float else "an array of real numbers"
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _fits(value: Any, kind: Any, *, static: bool) -> bool:
    """Whether a value is of the given type. Numbers and arrays are interchangeable, except that the value of
    a static field cannot be an array. A type that is not handled here matches every value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one, static=static) for one in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        same = len(kinds) == len(value)
        return same and all(_fits(part, one, static=static) for part, one in zip(value, kinds, strict=True))
    if collections.abc.Callable in (kind, origin):
        return callable(value)
    if kind in (None, types.NoneType):
        return value is None
    if kind in (bool, str):
        return isinstance(value, kind | np.bool if kind is bool else kind)
    if kind is int:
        return is_whole(value)
    if kind in (float, jax.Array, np.ndarray):
        return (
            isinstance(value, int | float | np.number) and not isinstance(value, bool | np.complexfloating)
        ) or (not static and _is_numeric(value))
    if isinstance(kind, type) and issubclass(kind, eqx.Module):
        return isinstance(value, kind)
    return True


def _is_numeric(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and (
        jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool
    )


def as_shape(shape: Any, floats_per_entry: int = 1) -> tuple[int, ...]:
    """Return a shape as a tuple; an integer stands for a shape with one axis. Raise a `ValueError` if an
    array of this shape, with `floats_per_entry` floats per entry, would not fit in memory."""
    axes = (shape,) if is_whole(shape) else shape
    if not isinstance(axes, tuple | list) or not all(is_whole(n) and n >= 0 for n in axes):
        raise ValueError(f"shape must be a tuple of non-negative whole numbers, got {shown(shape)}")
    check_memory(f"shape {tuple(axes)}", math.prod(axes) * floats_per_entry)
    return tuple(int(n) for n in axes)


def check_memory(what: str, num_floats: int) -> None:
    """Raise a `ValueError` if `num_floats` floats do not fit in memory: XLA would terminate the process."""
    need = num_floats * jax.dtypes.canonicalize_dtype(float).itemsize
    if need > 2**28 and need > (have := _memory()):
        raise ValueError(
            f"{what} needs {need / 2**30:,.0f} GiB of memory, but only {have / 2**30:,.0f} GiB are available"
        )


def _memory() -> int:
    """The number of bytes available to arrays on JAX's default device."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize


def as_real(name: str, value: Any) -> Any:
    """Return a value as an array of real numbers, without changing its precision; JAX arrays and tracers are
    returned unchanged. Complex numbers, strings, masked values and ragged rows raise an error."""
    if isinstance(value, jax.Array):
        if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool):
            raise TypeError(f"{name} must be real numbers, got {value.dtype}")
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise ValueError(f"{name} must be real numbers, got complex numbers")
        return value
    if np.ma.is_masked(value):
        raise ValueError(f"{name} has masked values: fill or drop them")
    try:
        array = np.asarray(value)
        if array.dtype == object and array.ndim:
            array = array.astype(complex if any(map(np.iscomplexobj, array.flat)) else float)
    except (ValueError, TypeError):
        raise ValueError(f"{name} must be an array of real numbers, got {shown(value)}") from None
    if array.dtype.kind == "c":
        raise ValueError(f"{name} must be real numbers, got complex numbers")
    if array.dtype.kind not in "fiub" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be real numbers, got {shown(value)}")
    return array


def check_vector(name: str, value: Any, dimension: int) -> None:
    """Raise a `ValueError` unless the last axis of an array has length `dimension`."""
    shape = jnp.shape(value)
    if not shape or shape[-1] != dimension:
        message = f"{name} must have shape (..., {dimension}) to match the base distribution, got {shape}"
        raise ValueError(message + see("shapes"))


def check_finite(name: str, value: Any) -> None:
    """Raise a `ValueError` if an entry is NaN or infinite; the message gives the index of the first row with
    such an entry. Traced values pass."""
    if is_traced(value):
        return
    # NumPy is used, because jax.numpy would trace even a concrete value inside a jit.
    rows = np.atleast_2d(np.isfinite(np.asarray(value)).all(axis=-1))
    if rows.all():
        return
    row = int(np.argmin(rows.ravel()))
    raise ValueError(f"{name} has a value that is not finite, first in row {row}")


def finite_array(name: str, value: Any) -> Array:
    """Return a value as a JAX array in the default precision; raise an error unless all entries are finite
    and real."""
    array = as_real(name, value)
    if not is_traced(array) and not np.isfinite(np.asarray(array)).all():
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    return jnp.asarray(array, float)
