"""Signatures and docstrings of classes for the reference pages.

griffe reads the code without running it, so it does not see the constructors of Equinox modules, or a
docstring that is taken from another class.
"""

import dataclasses
import importlib
import inspect
from typing import Any

import griffe

import roughflow


class Signatures(griffe.Extension):
    """Adds to every public class its docstring and, if it has no `__init__` of its own, its signature."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, place in roughflow._places().items():
            value = getattr(importlib.import_module(place, "roughflow"), name, None)
            if not inspect.isclass(value):
                continue
            found = pkg[f"{place[1:]}.{name}"]
            found = found.final_target if found.is_alias else found
            if found.docstring is None and value.__doc__:
                found.docstring = griffe.Docstring(inspect.getdoc(value) or "", parent=found)
            concrete = dataclasses.is_dataclass(value) and not inspect.isabstract(value)
            if concrete and "__init__" not in found.members:
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
