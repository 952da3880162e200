"""roughflow: densities for stochastic differential equations."""

import ast as _ast
import functools as _functools
import importlib as _importlib
import pkgutil as _pkgutil
import typing as _typing

if _typing.TYPE_CHECKING:
    from . import plots as plots
    from ._public import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> _typing.Any:
    """A public name, once it is asked for, with no more than its stage needs: JAX takes its time, and
    `roughflow --help` does not need it. `rf.plots` comes by itself: it needs matplotlib."""
    if name == "plots":
        return _importlib.import_module(".plots", __name__)
    if name not in _places():
        raise AttributeError(f"module 'roughflow' has no attribute {name!r}")
    place = _importlib.import_module(_places()[name], __name__)
    globals()[name] = value = getattr(place, name) if _places()[name] != f".{name}" else place
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_places(), "plots"})


@_functools.cache
def _places() -> dict[str, str]:
    """Which module has which public name, the stages' own among them: what `_public` says, without importing
    it."""
    text = _pkgutil.get_data(__name__, "_public.py")
    assert text is not None
    imports = [node for node in _ast.parse(text).body if isinstance(node, _ast.ImportFrom)]
    stages = {node.module: f".{node.module}" for node in imports if node.module}
    return stages | {a.name: f".{node.module or a.name}" for node in imports for a in node.names}
