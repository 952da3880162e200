"""What a value is, in words that are the same in another process: no addresses, no order of a hash."""

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

# Libraries whose functions are known by their names: what counts is what they were called with.
LIBRARIES = frozenset(
    {"builtins", "diffrax", "equinox", "jax", "jaxlib", "lineax", "math", "numpy", "optax", "optimistix"}
    | {"roughflow", "scipy"}
)
PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
# What counts of the globals a function looks up; other objects may well change while a run goes on.
COUNTED = (int, float, complex, str, tuple, list, dict, types.FunctionType, functools.partial, eqx.Module)
COUNTED += (jax.Array, np.ndarray, np.generic)
FEW = 8  # numbers that are shown one by one


def fingerprint(value: Any, place: str) -> dict[str, str]:
    """Each part of a value by its place: numbers as they are, arrays and code by their digests.

    All fields of a module count, static ones too; of a function its code, its defaults, and the numbers and
    functions that it closes over or finds in its module.
    """
    return dict(_parts(value, place, {}))


def _parts(value: Any, place: str, seen: dict[int, tuple[int, Any]]) -> Iterator[tuple[str, str]]:
    if isinstance(value, PLAIN):
        yield place, repr(value)
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        yield place, _array(value)
    elif isinstance(value, type | types.ModuleType):
        yield place, f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    elif isinstance(value, types.CodeType):
        yield place, _digest(value.co_code, " ".join(value.co_names).encode())
        yield from _within({"constants": value.co_consts}, place, seen)
    elif id(value) in seen:
        yield place, f"part {seen[id(value)][0]} again"
    else:
        # Kept, so that no other object comes to the same address meanwhile.
        seen[id(value)] = len(seen), value
        kind, parts = _opened(value)
        yield place, kind
        yield from _within(parts, place, seen)


def _within(parts: Mapping[str, Any], place: str, seen: dict) -> Iterator[tuple[str, str]]:
    for name, part in parts.items():
        yield from _parts(part, f"{place}.{name}", seen)


def _opened(value: Any) -> tuple[str, dict[str, Any]]:
    """What kind of object it is, and its parts by name."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, functools.partial):
        return kind, {"function": value.func, "arguments": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return kind, {"function": value.__func__, "self": value.__self__}
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}", _function(value)
    if dataclasses.is_dataclass(value):
        return kind, {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        if len(value) > FEW and all(isinstance(part, PLAIN) for part in value):
            return f"{kind} {_digest(repr(value).encode())}", {}
        return f"{kind} of {len(value)}", {str(i): part for i, part in enumerate(value)}
    if isinstance(value, Mapping):
        return kind, {str(name): value[name] for name in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        # In an order of their own: that of a set of words differs between processes.
        return f"{kind} {_digest(*sorted(repr(fingerprint(part, '')).encode() for part in value))}", {}
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):  # a jitted function, say
        return kind, {"function": wrapped}
    if hasattr(value, "__dict__"):
        return kind, {name: vars(value)[name] for name in sorted(vars(value))}
    named = getattr(value, "__qualname__", None)
    return f"{kind} {named or re.sub(r' at 0x[0-9a-fA-F]+', '', repr(value))}", {}


def _function(function: types.FunctionType) -> dict[str, Any]:
    """What a function depends on."""
    code = function.__code__
    parts = {name: part for name, part in zip(code.co_freevars, _cells(function), strict=True)}
    parts |= {"its defaults": (function.__defaults__, function.__kwdefaults__)}
    if (function.__module__ or "").partition(".")[0] in LIBRARIES:
        return parts
    # Of what it finds in its module: modules and classes are known by their names, which are in the code.
    found = {name: function.__globals__.get(name) for name in _names(code)}
    counted = {name: value for name, value in found.items() if isinstance(value, COUNTED)}
    return parts | counted | {"its code": code}


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None  # not filled yet


def _names(code: types.CodeType) -> list[str]:
    """The names that code looks up, and the code within it."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return sorted({*code.co_names, *inner})


def _array(value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
        if value.ndim == 1:
            return str(value.tolist())
    values = np.asarray(value)
    return f"{values.dtype}{list(values.shape)} {_digest(values.tobytes())}"


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first part that is not what it was, in a few words."""
    for place in [*now, *(place for place in before if place not in now)]:
        one, two = before.get(place), now.get(place)
        if one != two:
            return f"{place} was {one}, now {two}" if _short(one) and _short(two) else f"{place} is different"
    return None


def _short(text: str | None) -> bool:
    return text is not None and len(text) < 30
