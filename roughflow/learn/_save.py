"""A model as one file."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..sde import tanh
from ._files import read_archive, write_archive

VERSION = 1
# Whose classes a file may name. Only subclasses of eqx.Module count, and none of their code is run.
PACKAGES = frozenset({"roughflow", "diffrax", "equinox", "lineax", "optimistix"})
FUNCTIONS: dict[str, Callable] = {
    "tanh": tanh,
    "jax.tanh": jnp.tanh,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "sigmoid": jax.nn.sigmoid,
    "rademacher": jax.random.rademacher,
    "normal": jax.random.normal,
}


def save(path: str | PathLike, model: Any) -> None:
    """Write a model to one file: its parameters, and all it takes to build it again.

    A model is built of modules (`rf.StochasticFlow`, `rf.MLP`, an `eqx.Module` of yours), numbers and
    arrays. A plain function, a lambda say, cannot be written down: make it an `eqx.Module`. The file is
    there whole or not at all, whatever happens while it is written.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(rf.MLP(2, 2, key=jax.random.key(0)), rf.ConstantDiffusion(jnp.eye(2)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)))
    rf.save("flow.rf", flow)
    flow = rf.load("flow.rf")
    ```
    """
    arrays: dict[str, np.ndarray] = {}
    structure = _encode(model, "model", arrays)
    write_archive(path, {"kind": "model", "version": VERSION, "structure": structure}, arrays)


def load(path: str | PathLike, *, classes: Iterable[type] = ()) -> Any:
    """Read a model that `rf.save` wrote. Nothing in the file is executed: it names classes of roughflow and
    of the libraries it stands on, and, of your own, those you give as `classes`.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    rf.save("base.rf", rf.Normal(jnp.zeros(2)))
    base = rf.load("base.rf")
    ```
    """
    header, arrays = read_archive(path, "model", VERSION)
    known = {_name(cls): cls for cls in classes}
    try:
        return _decode(header["structure"], arrays, known)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None


def _encode(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """A value as JSON, its arrays set aside; `place` says where it is, for a message."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if eqx.is_array(value) or isinstance(value, np.ndarray):
        name = f"array/{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"numpy" if isinstance(value, np.ndarray) else "array": name}
    if isinstance(value, eqx.Module):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        parts = {name: _encode(part, f"{place}.{name}", arrays) for name, part in fields.items()}
        return {"module": _name(type(value)), "fields": parts}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(part, f"{place}[{i}]", arrays) for i, part in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": {name: _encode(part, f"{place}[{name!r}]", arrays) for name, part in value.items()}}
    for name, function in FUNCTIONS.items():
        if value is function:
            return {"function": name}
    kind = getattr(value, "__qualname__", type(value).__name__)
    raise ValueError(
        f"{place} cannot be saved, it is {kind}: make it an eqx.Module with its numbers as fields"
    )


def _decode(value: Any, arrays: dict[str, np.ndarray], known: dict[str, type]) -> Any:
    if not isinstance(value, dict):
        return value
    if "numpy" in value:
        return arrays[value["numpy"]]
    if "array" in value:
        return jnp.asarray(arrays[value["array"]])
    if "function" in value:
        return FUNCTIONS[value["function"]]
    if "tuple" in value:
        return tuple(_decode(part, arrays, known) for part in value["tuple"])
    if "list" in value:
        return [_decode(part, arrays, known) for part in value["list"]]
    if "dict" in value:
        return {name: _decode(part, arrays, known) for name, part in value["dict"].items()}
    cls = _class(value["module"], known)
    parts = {name: _decode(part, arrays, known) for name, part in value["fields"].items()}
    return _build(cls, parts)


def _build(cls: type, parts: dict[str, Any]) -> Any:
    """An instance with these fields, as a pytree is unflattened: `__init__` is not called."""
    module = object.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in parts:
            object.__setattr__(module, field.name, parts.pop(field.name))
        elif field.default is dataclasses.MISSING:
            raise KeyError(f"{_name(cls)}.{field.name} is missing")
        else:
            object.__setattr__(module, field.name, field.default)
    if parts:
        raise KeyError(f"{_name(cls)} has no field {next(iter(parts))}")
    return module


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str, known: dict[str, type]) -> type:
    if name in known:
        return known[name]
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] not in PACKAGES:
        raise ValueError(
            f"the file holds a {qualified} of {module}: give it, as load(path, classes=[{qualified}])"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise ValueError(f"the file holds {name}, which the installed {module.split('.')[0]} lacks") from None
    if not (isinstance(found, type) and issubclass(found, eqx.Module)):
        raise ValueError(f"the file names {name}, which is not a part of a model")
    return found
