"""The progress of a fit: its history, a progress bar, and checkpoints to resume an interrupted run.

A checkpoint contains the state of a run and a fingerprint of everything that the run depends on.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from .._devices import is_leader
from .._show import count
from ..faq import see
from ..files import read_archive, write_archive


@dataclass(frozen=True)
class History:
    """The metrics of a fit, as arrays.

    - `step`, `loss`: one value per step; the loss of a skipped step is NaN.
    - `metrics`: other metrics of the objective by name (`effective_paths`, …), one value per step.
    - `validation_step`, `validation_loss`: one value per validation check.
    - `ended`: the reason for stopping before the last step, or None.
    """

    loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    validation_step: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    validation_loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ended: str | None = None

    @property
    def step(self) -> np.ndarray:
        return np.arange(1, self.loss.size + 1)

    @property
    def skipped(self) -> int:
        """Number of steps skipped because the loss or a gradient was not finite."""
        return int(np.sum(np.isnan(self.loss)))

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss; None without validation."""
        if not np.any(np.isfinite(self.validation_loss)):
            return None
        return int(self.validation_step[np.nanargmin(self.validation_loss)])

    def with_steps(self, loss: np.ndarray, metrics: dict[str, np.ndarray]) -> "History":
        old = {name: self.metrics.get(name, np.zeros(0)) for name in metrics}
        joined = {name: np.concatenate([old[name], metrics[name]]) for name in metrics}
        return self._replace(loss=np.concatenate([self.loss, loss]), metrics=joined)

    def with_validation(self, step: int, loss: float) -> "History":
        return self._replace(
            validation_step=np.append(self.validation_step, step),
            validation_loss=np.append(self.validation_loss, loss),
        )

    def __repr__(self) -> str:
        return f"History: {self.summary()}"

    def summary(self) -> str:
        """A one-line summary."""
        parts = [count(self.loss.size, "step")]
        if self.loss.size:
            parts.append(f"loss {self.recent():.4f}")
        losses = self.validation_loss
        if self.best_step is not None:
            best = f"best {np.nanmin(losses):.4f} at step {self.best_step:,}"
            parts.append(f"validation {losses[-1]:.4f}, {best}")
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped")
        return ", ".join(parts) + (f"; ended {self.ended}" if self.ended else "")

    def recent(self, name: str | None = None, count: int = 100) -> float:
        """The mean of the most recent values of the loss or of another metric."""
        last = (self.loss if name is None else self.metrics[name])[-count:]
        last = last[np.isfinite(last)]
        return float(last.mean()) if last.size else float("nan")

    def to_arrays(self) -> dict[str, np.ndarray]:
        # `ended` is not included, because it is known only at the end.
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("metrics", "ended")}
        return plain | {f"metrics/{name}": values for name, values in self.metrics.items()}

    @staticmethod
    def from_arrays(arrays: dict[str, np.ndarray]) -> "History":
        # Before version 0.2 metrics were called figures.
        split = [(n.partition("/"), a) for n, a in arrays.items()]
        metrics = {name: a for (kind, _, name), a in split if kind in ("metrics", "figures") and name}
        plain: dict[str, Any] = {name: values for name, values in arrays.items() if "/" not in name}
        return History(metrics=metrics, **plain)

    def _replace(self, **changes) -> "History":
        return History(**({f.name: getattr(self, f.name) for f in fields(self)} | changes))


MAX_LINES = 8  # maximum number of lines per run, after the first
COMPILING = "compiling …"


def progress_bar(total: int, *, done: int = 0, name: str = "", unit: str = "step", shown: bool = True) -> Any:
    """A progress bar: a context manager with the methods `update` and `set_postfix_str` of tqdm."""
    if shown and not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return _Lines(total, done, name, unit)
    settings = {"total": total, "initial": done, "unit": unit, "disable": not shown}
    bar = tqdm(desc=name or None, dynamic_ncols=True, **settings)
    bar.set_postfix_str(COMPILING)
    return bar


class _Lines:
    """Progress as a few lines of text, for output to a file, where a bar would fill hundreds of lines."""

    def __init__(self, total: int, done: int, name: str, unit: str):
        self.total, self.done, self.unit = total, done, unit
        self.name = f"{name}: " if name else ""
        self.reported = done
        self.began = time.monotonic()
        self.due = False
        self._say(COMPILING)

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_) -> None:
        if self.done > self.reported:
            self._report("")

    def update(self, count: int) -> None:
        self.done += count
        self.due = self.done == self.total or (self.done - self.reported) * MAX_LINES >= self.total

    def set_postfix_str(self, text: str) -> None:
        if self.due:
            self._report(f", {text}" if text else "")

    def _report(self, more: str) -> None:
        seconds = time.monotonic() - self.began
        self._say(f"{self.unit} {self.done} of {self.total} after {seconds:.0f} s{more}")
        self.reported, self.due = self.done, False

    def _say(self, text: str) -> None:
        print(self.name + text, file=sys.stderr, flush=True)


# Functions from these libraries are compared by name and arguments, not by source.
LIBRARIES = frozenset(
    {"builtins", "diffrax", "equinox", "jax", "jaxlib", "lineax", "math", "numpy", "optax", "optimistix"}
    | {"roughflow", "scipy"}
)
PLAIN_TYPES = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
# Global variables of a function are compared if they have one of these types. Objects of other types may
# change during a run.
COMPARED_TYPES = (int, float, complex, str, tuple, list, dict, types.FunctionType, functools.partial)
COMPARED_TYPES += (eqx.Module, jax.Array, np.ndarray, np.generic)
MAX_SHOWN_NUMBERS = 8  # longer lists of plain values are shown and compared as a digest


def fingerprint(value: Any, place: str) -> dict[str, str]:
    """A text for each part of a value, by path: numbers are written out, and arrays and source code are
    digests.

    The parts of a module are all its fields, including static ones. Those of a function are its source, its
    defaults, and the numbers and functions in its closure and globals. Bytecode depends on the Python
    version, so it is used only for functions without a source file.
    """
    return dict(_parts(value, place, {}))


def _parts(value: Any, place: str, seen: dict[int, tuple[int, Any]]) -> Iterator[tuple[str, str]]:
    if isinstance(value, PLAIN_TYPES):
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
        # Keep a reference to the object, so that its address is not reused.
        seen[id(value)] = len(seen), value
        kind, parts = _opened(value)
        yield place, kind
        yield from _within(parts, place, seen)


def _within(parts: Mapping[str, Any], place: str, seen: dict) -> Iterator[tuple[str, str]]:
    for name, part in parts.items():
        yield from _parts(part, f"{place}.{name}", seen)


def _opened(value: Any) -> tuple[str, dict[str, Any]]:
    """The kind of an object, and its parts by name."""
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
        if len(value) > MAX_SHOWN_NUMBERS and all(isinstance(part, PLAIN_TYPES) for part in value):
            return f"{kind} {_digest(repr(value).encode())}", {}
        return f"{kind} of {len(value)}", {str(i): part for i, part in enumerate(value)}
    if isinstance(value, Mapping):
        return kind, {str(name): value[name] for name in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        # The elements are sorted, because the order of a set differs between processes.
        return f"{kind} {_digest(*sorted(repr(fingerprint(part, '')).encode() for part in value))}", {}
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):  # for example a jitted function
        return kind, {"function": wrapped}
    if hasattr(value, "__dict__"):
        return kind, {name: vars(value)[name] for name in sorted(vars(value))}
    named = getattr(value, "__qualname__", None)
    return f"{kind} {named or re.sub(r' at 0x[0-9a-fA-F]+', '', repr(value))}", {}


def _function(function: types.FunctionType) -> dict[str, Any]:
    """The parts that a function depends on, by name."""
    code = function.__code__
    parts = {name: part for name, part in zip(code.co_freevars, _cells(function), strict=True)}
    parts |= {"its defaults": (function.__defaults__, function.__kwdefaults__)}
    if (function.__module__ or "").partition(".")[0] in LIBRARIES:
        return parts
    # Modules and classes among the globals are identified by their names, which are part of the code.
    found = {name: function.__globals__.get(name) for name in _names(code)}
    counted = {name: value for name, value in found.items() if isinstance(value, COMPARED_TYPES)}
    source = _source(code)
    return parts | counted | ({"its code": code} if source is None else {"its source": source.splitlines()})


def _source(code: types.CodeType) -> str | None:
    """The source code of a function, stripped of comments and formatting; None if it is not available."""
    try:
        tree = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, SyntaxError, IndexError):
        return None
    first = lambda node: min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and (first(node), getattr(node, "name", "<lambda>")) == (code.co_firstlineno, code.co_name)
    ]
    if len(found) > 1:  # several lambdas on one line, distinguished by column
        starts = {(line, column) for line, _, column, _ in code.co_positions()}
        begins = lambda node: (node.lineno, node.col_offset)
        found = [node for node in found if isinstance(node, ast.Lambda) and begins(node.body) in starts]
    return ast.unparse(found[0]) if len(found) == 1 else None


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None  # not assigned yet


def _names(code: types.CodeType) -> list[str]:
    """The names that code refers to, including nested code."""
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
    """A description of the first part that has changed; None if all parts are equal."""
    for place in [*now, *(place for place in before if place not in now)]:
        one, two = before.get(place), now.get(place)
        if _without_module(one) != _without_module(two):
            return f"{place} was {one}, now {two}" if _short(one) and _short(two) else f"{place} is different"
    return None


def _as_in_version_4(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts in the form of version 4: with the old names of fields, and without code, which version 4
    stored in another form."""
    kept = {place: text for place, text in parts.items() if not re.search(r"\.its (code|source)\b", place)}
    before = lambda place: place.replace(".solver", ".method").replace(".num_given", ".context")
    return {before(place): re.sub(r"^part \d+ again$", "again", text) for place, text in kept.items()}


def _without_removed(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts without the fields of objectives that version 0.2 removed, if these had their defaults."""
    removed = {("objective.stationary", "0.0"), ("objective.coupling", "None")}
    return {place: text for place, text in parts.items() if (place, text) not in removed}


def _without_module(text: str | None) -> str | None:
    """The name of a class or function of roughflow without its private module, since modules may be
    renamed."""
    return text and re.sub(r"\broughflow\.(\w+\.)*_\w+\.", "roughflow.", text)


def _short(text: str | None) -> bool:
    return text is not None and len(text) < 30


VERSION, OLDEST_VERSION = 5, 4  # version 4 compared bytecode instead of source
SECONDS_BETWEEN_WRITES = 30.0  # minimum time between two writes


@dataclass(frozen=True)
class Progress:
    """The state of a run: everything the next step depends on."""

    step: int
    parameters: Any
    optimiser: Any
    state: Any  # of the objective
    best: Any  # parameters at the lowest validation loss
    streak: int  # consecutive steps that were not finite
    history: History
    grid: int | None = None  # number of solver steps; None to use that of the model

    @staticmethod
    def start(parameters: Any, optimiser: Any, state: Any) -> "Progress":
        return Progress(0, parameters, optimiser, state, parameters, 0, History())

    def advanced(
        self, parameters: Any, optimiser: Any, state: Any, streak: int, history: History
    ) -> "Progress":
        return Progress(
            history.loss.size, parameters, optimiser, state, self.best, streak, history, self.grid
        )

    def validated(self, loss: float, parameters: Any) -> "Progress":
        """The state after a validation check with this loss. The parameters are kept if they are the best so
        far."""
        lowest = np.min(_ranked(self.history.validation_loss), initial=np.inf)
        best = parameters if loss < lowest else self.best
        history = self.history.with_validation(self.step, loss)
        return dataclasses.replace(self, best=best, history=history)

    @property
    def changing(self) -> tuple[Any, ...]:
        """The pytrees that change during a run."""
        return self.parameters, self.optimiser, self.state, self.best

    def moved(self, where: Callable[[Any], Any]) -> "Progress":
        """The state with all changing pytrees mapped by `where`, for example to other devices."""
        parameters, optimiser, state, best = (where(tree) for tree in self.changing)
        return dataclasses.replace(self, parameters=parameters, optimiser=optimiser, state=state, best=best)

    def stale_from(self, patience: int | None) -> int | None:
        """The step of the first validation check after which the last `patience` checks brought no
        improvement; None if there is none yet."""
        if patience is None:
            return None
        losses = _ranked(self.history.validation_loss)
        for i in range(losses.size):
            if i - int(np.argmin(losses[: i + 1])) >= patience:
                return int(self.history.validation_step[i])
        return None


def _ranked(losses: np.ndarray) -> np.ndarray:
    """Validation losses with NaN replaced by infinity, so that NaN is never the best."""
    return np.where(np.isnan(losses), np.inf, losses)


@dataclass
class Checkpoint:
    """A file with the state of a run, tied to the settings of that run."""

    path: Path
    settings: dict[str, str]
    written: float = 0.0

    @staticmethod
    def open(
        path: str | os.PathLike, settings: dict[str, Any], start: Progress, fixed: dict[str, Any]
    ) -> "Checkpoint":
        """The checkpoint of a run, which `settings` and `fixed` describe; `fixed` may contain arrays and
        functions."""
        described = {name: repr(value) for name, value in settings.items()}
        for name, value in fixed.items():
            described |= fingerprint(value, name)
        # For arrays that a run changes, only the shapes are compared.
        changed = {"parameters": start.parameters, "optimiser": start.optimiser, "state": start.state}
        for what, tree in changed.items():
            for place, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = jax.tree_util.keystr(place, simple=True, separator=".")
                described[f"shape of {what}.{name}"] = f"{leaf.dtype}{list(leaf.shape)}"
        return Checkpoint(Path(path), described)

    def begin(self, start: Progress) -> Progress:
        if self.path.exists():
            raise ValueError(
                f"checkpoint {self.path} exists: set resume=True to continue it; delete it or choose another "
                "file to start again" + see("checkpoints")
            )
        return start

    def load(self, start: Progress) -> Progress:
        """Load the state from the file. The initial state `start` has the same structure."""
        header, arrays = read_archive(self.path, "checkpoint", VERSION)
        if header["version"] < OLDEST_VERSION:
            raise ValueError(
                f"checkpoint {self.path} was written by an older version of roughflow, which did not record "
                "all settings: delete it or choose another file to start again" + see("checkpoints")
            )
        before, now = _without_removed(header["settings"]), self.settings
        if header["version"] < VERSION:
            before, now = _as_in_version_4(before), _as_in_version_4(now)
        changed = difference(before, now)
        if changed is not None:
            raise ValueError(f"checkpoint {self.path} belongs to another run: {changed}{see('checkpoints')}")
        leaves, structure = jax.tree.flatten(start.changing)
        restored = [jnp.asarray(arrays[f"leaf/{i}"], a.dtype) for i, a in enumerate(leaves)]
        parameters, optimiser, state, best = jax.tree.unflatten(structure, restored)
        series = {n.removeprefix("history/"): a for n, a in arrays.items() if n.startswith("history/")}
        history = History.from_arrays(series)
        at, streak, grid = header["step"], header["streak"], header.get("grid")
        return Progress(at, parameters, optimiser, state, best, streak, history, grid)

    def save(self, now: Progress, at_once: bool) -> None:
        if not is_leader() or (not at_once and time.monotonic() - self.written < SECONDS_BETWEEN_WRITES):
            return
        leaves = jax.tree.leaves(now.changing)
        arrays = {f"leaf/{i}": np.asarray(a) for i, a in enumerate(leaves)}
        arrays |= {f"history/{name}": a for name, a in now.history.to_arrays().items()}
        header = {"kind": "checkpoint", "version": VERSION, "step": now.step, "streak": now.streak}
        header |= {"grid": now.grid}
        write_archive(self.path, header | {"settings": self.settings}, arrays)
        self.written = time.monotonic()


def steps_of(path: Path) -> int:
    """The total number of training steps of the run in this file."""
    return int(read_archive(path, "checkpoint", VERSION)[0]["settings"]["steps"])
