"""roughflow: densities for stochastic differential equations."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from . import plots as plots
    from ._public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> _typing.Any:
    """The public names, once one is asked for: JAX takes its time, and `roughflow --help` does not need it.
    `rf.plots` comes by itself: it needs matplotlib."""
    if name == "plots":
        return _importlib.import_module(".plots", __name__)
    _load()
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'roughflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    _load()
    return sorted({*globals(), "plots"})


def _load() -> None:
    public = vars(_importlib.import_module("._public", __name__))
    globals().update({name: value for name, value in public.items() if not name.startswith("_")})
