"""For the reference pages: what an `eqx.Module` takes is known when it runs, and griffe only reads.

griffe makes the signatures of dataclasses that are decorated as such; Equinox's modules are not.
"""

import dataclasses
import inspect
from typing import Any

import griffe

import roughflow


class Signatures(griffe.Extension):
    """Gives every public module without an `__init__` of its own the signature it has."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, value in vars(roughflow).items():
            concrete = dataclasses.is_dataclass(value) and not inspect.isabstract(value)
            if name.startswith("_") or not concrete or not inspect.isclass(value):
                continue
            found = pkg[name].final_target
            if "__init__" not in found.members:
                found.set_member("__init__", _init(value))


def _init(value: type) -> griffe.Function:
    told = inspect.signature(value).parameters.values()
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for parameter in told:
        default = None if parameter.default is parameter.empty else _shown(parameter.default)
        kind = griffe.ParameterKind.positional_or_keyword
        parameters.append(griffe.Parameter(parameter.name, kind=kind, default=default))
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 and not text.startswith("<") else "..."
