"""Stage 6, files: save and load models as single files; archives, locks, and atomic writes."""

import contextlib
import dataclasses
import errno
import importlib
import inspect
import io
import json
import os
import signal
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_fields, check_input_file, check_instance, check_path
from ._devices import check_backend
from .density import StochasticFlow
from .faq import see
from .flow import Normal
from .sde import noise_dimension, silu, tanh


class Interrupt:
    """A context in which the first Ctrl-C (SIGINT or SIGTERM) only sets `wanted`; a second one interrupts the
    program."""

    def __init__(self):
        self.wanted = False
        self.pressed = signal.SIGINT
        self._before: dict = {}

    def __enter__(self) -> "Interrupt":
        # Only the main thread can handle signals.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number, frame) -> None:
        del frame
        self.wanted, self.pressed = True, number
        signal.signal(number, self._before[number])


class Held(Interrupt):
    """A context that delays the first Ctrl-C until its end, so that files are written completely."""

    def __exit__(self, *_) -> None:
        super().__exit__()
        if self.wanted:
            signal.raise_signal(self.pressed)


# Maximum ratio of the size of the unpacked content to that of the file. Archives are not compressed, because
# arrays of floats hardly compress.
MAX_EXPANSION = 100
MIN_UNPACKED_BYTES = 2**20  # bytes; any archive may unpack to this size
# The exceptions that zipfile, json and NumPy raise for invalid bytes.
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    KeyError,
    ValueError,
    EOFError,
    OSError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A context that yields a temporary file next to `path`, which replaces `path` atomically when the block
    ends without an error.

    The old file is unchanged if there is an error, the process is killed, or the disk is full. Folders are
    created as needed. If `path` is a link, its target is replaced.

    ```python
    import roughflow as rf

    with rf.files.whole_file("notes.txt") as draft:
        draft.write_text("all of it, or none")
    ```
    """
    path = Path(os.path.realpath(check_path("path", path)))
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{path} is {kind}, not a file to write")
    # The temporary file is in the same folder, because moves are atomic only within a file system, and has
    # the same extension, because the extension may determine the format.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    except OSError as error:
        raise OSError(error.errno, f"cannot write here: {error.strerror}", str(path)) from None
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        # Temporary files are private; the final file has the user's default permissions.
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_archive(
    path: str | os.PathLike, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a zip file with `header.json` and each array as an `.npy` file. It has no dates, so the same
    content gives the same bytes."""
    with Held(), whole_file(path) as draft, zipfile.ZipFile(draft, "w") as archive:
        archive.writestr(zipfile.ZipInfo("header.json"), json.dumps(header, indent=1))
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, np.asarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())


def read_archive(path: str | os.PathLike, kind: str, version: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Read the header and the arrays of a file of this `kind`. Nothing in the file is executed."""
    check_input_file(check_path("path", path))
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(archive, os.path.getsize(path))
            header = json.loads(archive.read("header.json"))
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            read = lambda name: np.load(io.BytesIO(archive.read(name)), allow_pickle=False)
            arrays = {name.removesuffix(".npy"): read(name) for name in names}
    except RecursionError:
        message = f"{path} is damaged: it is nested too deeply"
        raise ValueError(message + see("loading")) from None
    except UNREADABLE as error:
        message = f"{path} is not a roughflow {kind}, or is damaged ({error})"
        raise ValueError(message + see("loading")) from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise ValueError(f"{path} is not a roughflow {kind}{see('loading')}")
    if not isinstance(header.get("version"), int) or header["version"] > version:
        raise ValueError(
            f"{path} was written by a later roughflow (format {header.get('version')}; this version reads "
            f"formats up to {version}): upgrade to read it{see('loading')}"
        )
    return header, arrays


def _check_size(archive: zipfile.ZipFile, size: int) -> None:
    """Raise an error if an archive would unpack to far more than its size; zipfile checks the size of each
    part."""
    unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > MAX_EXPANSION * size + MIN_UNPACKED_BYTES:
        raise ValueError(f"{size} bytes that unpack to {unpacked}")


try:
    import fcntl
except ImportError:  # Windows, which has no such locks
    fcntl = None


@contextlib.contextmanager
def file_lock(path: str | os.PathLike, refusal: str) -> Iterator[None]:
    """Lock `path` during the block, with a hidden file beside it. Raise a `ValueError` with the message
    `refusal` if another run holds the lock. The lock of a killed run is released."""
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock")
    if fcntl is None:
        yield
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = _open_lock(lock, refusal)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _open_lock(lock: Path, refusal: str) -> int:
    assert fcntl is not None
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ValueError(refusal) from None
        except OSError:  # a file system without locks
            return handle
        # The previous holder removes the lock file, so the opened file may no longer be the one on disk.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        os.close(handle)


# Public modules in which names of classes are looked up, in this order. No other module is imported for a
# file.
NAMESPACES: dict[str, tuple[str, ...]] = {
    "roughflow": (
        "roughflow",
        "roughflow.sde",
        "roughflow.driver",
        "roughflow.flow",
        "roughflow.density",
        "roughflow.train",
        "roughflow.tables",
        "roughflow.mcmc",
        "roughflow.transition",
        "roughflow.series",
        "roughflow.latent",
        "roughflow.rough",
        "roughflow.datasets",
    ),
    "diffrax": ("diffrax",),
    "equinox": ("equinox", "equinox.nn"),
    "lineax": ("lineax",),
    "optimistix": ("optimistix",),
}
# New names of classes and fields, by the names that older files use.
RENAMED = {"Unadjusted": "UnadjustedSampler", "Adjusted": "AdjustedSampler", "AdjustedFlow": "FlowSampler"}
RENAMED_FIELDS = {
    ("Laplace", "starts"): "num_starts",
    ("HutchinsonDivergence", "law"): "distribution",
    ("StochasticFlow", "noise_dim"): "noise_dimension",
    ("Sobol", "replicates"): "num_replicates",
    ("UpperBound", "fresh"): "num_paths",
    ("ReverseKL", "batch"): "batch_size",
    ("FlowSampler", "substeps"): "num_substeps",
    ("Chain", "gradients"): "num_gradients",
    ("Tuned", "gradients"): "num_gradients",
    ("FixedGrid", "method"): "solver",
    ("VelocityNetwork", "context"): "num_given",
    ("NormalTransport", "context"): "num_given",
    ("Interpolant", "context"): "num_given",
    ("Standardised", "context"): "num_given",
    ("FittedScore", "at"): "time",
}
_ACTIVATIONS = (
    *("relu", "relu6", "elu", "selu", "celu", "leaky_relu", "hard_tanh", "hard_sigmoid", "hard_silu"),
    *("soft_sign", "softplus", "squareplus", "silu", "mish", "gelu", "sigmoid", "log_sigmoid", "identity"),
)
FUNCTIONS: dict[str, Callable] = {
    "tanh": tanh,
    "roughflow.silu": silu,
    "jax.tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "exp": jnp.exp,
    "rademacher": jax.random.rademacher,
    "normal": jax.random.normal,
    # The default final activation of eqx.nn.MLP, which has no public name in equinox.
    "equinox.identity": inspect.signature(eqx.nn.MLP.__init__).parameters["final_activation"].default,
    **{name: getattr(jax.nn, name) for name in _ACTIVATIONS},
}


class UnknownName(ValueError):
    """Raised if a file names a class that is not allowed or does not exist."""


def name_of(cls: type) -> str:
    """The public name of a class, such as `roughflow:Normal`; for a user's class, its module and name."""
    package = cls.__module__.partition(".")[0]
    if package not in NAMESPACES:
        return f"{cls.__module__}:{cls.__qualname__}"
    for namespace in NAMESPACES[package]:
        if _found(namespace, cls.__name__) is cls:
            return f"{namespace}:{cls.__name__}"
    raise ValueError(f"{cls.__name__} is not a public class of {package}")


def class_of(name: str, known: dict[str, type]) -> type:
    """Look up a class by name, among those passed by the user and the public classes of roughflow and of the
    libraries that it uses. Only the last part of an old private name, such as `roughflow.flow._base:Normal`,
    is used."""
    if name in known:
        return known[name]
    module, _, qualified = name.partition(":")
    package = module.partition(".")[0]
    if package not in NAMESPACES:
        # A class that has moved, or was defined in a notebook, is found by its name.
        same = [cls for cls in known.values() if cls.__qualname__ == qualified]
        if len(same) == 1:
            return same[0]
        raise UnknownName(
            f"the file contains an object of {module}.{qualified}: pass its class, as in "
            f"load(path, classes=[{qualified}])" + see("loading")
        )
    qualified = RENAMED.get(qualified, qualified)
    found = [_found(namespace, qualified) for namespace in NAMESPACES[package]]
    there = [value for value in found if value is not None]
    if not there and qualified.isidentifier():
        raise UnknownName(f"the file holds {name}, which the installed {package} lacks{see('loading')}")
    if not (there and isinstance(there[0], type) and issubclass(there[0], eqx.Module)):
        raise UnknownName(f"the file refers to {name}, which is not a part of a model{see('loading')}")
    return there[0]


def function_name(value: Any) -> str | None:
    return next((name for name, function in FUNCTIONS.items() if function is value), None)


def _found(namespace: str, name: str) -> Any:
    # `getattr` is not used, because a module may import another one on attribute access; modules are
    # excluded, because the result must not depend on earlier imports.
    value = vars(importlib.import_module(namespace)).get(name)
    return None if inspect.ismodule(value) else value


def check_module(module: eqx.Module) -> None:
    """Check the types of the fields of a module, and run the checks of its class."""
    check_fields(module)
    for parent in reversed(type(module).__mro__):
        if "__check_init__" in vars(parent):
            vars(parent)["__check_init__"](module)
    if isinstance(module, StochasticFlow):
        _check_flow(module)


def _check_flow(flow: StochasticFlow) -> None:
    """Run the checks that a flow makes at construction, which detect weights whose shapes do not match."""
    if isinstance(flow.base, Normal) and flow.base.loc.ndim != 1:
        return  # a stack of flows, as made by `eqx.filter_vmap`, cannot be checked
    point = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
    sizes = (*point.shape, noise_dimension(flow.sde, flow.dimension))
    if sizes != (flow.dimension, flow.noise_dimension):
        raise ValueError(
            f"base and diffusion have sizes {sizes}, not {(flow.dimension, flow.noise_dimension)}"
        )


# Version 1 used private module names, and did not store the dtype of NumPy scalars.
VERSION = 2
MAX_DEPTH = 100  # maximum nesting of modules
# Arrays with dtypes that .npy does not support are stored as bytes, with the name of the dtype.
EXTENDED_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
KEY_IMPLEMENTATIONS = frozenset({"fry", "threefry2x32", "rbg", "unsafe_rbg"})


def save(path: str | PathLike, model: Any) -> None:
    """Save a model to one file: its parameters and its structure.

    A model consists of modules (`rf.StochasticFlow`, `rf.MLP`, your own `eqx.Module`), numbers and arrays,
    and activation functions of `jax.nn`. Other plain functions, such as lambdas, cannot be saved: use an
    `eqx.Module`. Writing is atomic. The file uses the public names of roughflow's classes, so that later
    versions can read it.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(rf.MLP(2, 2, key=jax.random.key(0)), rf.ConstantDiffusion(jnp.eye(2)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)))
    rf.save("flow.rf", flow)
    flow = rf.load("flow.rf")
    ```
    """
    check_path("path", path)
    for part in ("model", "sde"):
        if not isinstance(model, eqx.Module) and isinstance(getattr(model, part, None), eqx.Module):
            message = f"the result of a fit contains more than a model: save its .{part}"
            raise ValueError(message + see("saving"))
    arrays: dict[str, np.ndarray] = {}
    structure = _encode(model, "model", arrays)
    write_archive(path, {"kind": "model", "version": VERSION, "structure": structure}, arrays)


def load(path: str | PathLike, *, classes: Iterable[type] = ()) -> Any:
    """Load a model saved with `rf.save`. Nothing in the file is executed. It can only refer to classes of
    roughflow, of the libraries that roughflow uses, and to those passed as `classes`.

    Files that are incomplete or inconsistent, or that unpack to more than a hundred times their size, raise a
    `ValueError`.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    rf.save("base.rf", rf.Normal(jnp.zeros(2)))
    base = rf.load("base.rf")
    ```
    """
    check_instance("classes", classes, Iterable, "a collection of your classes, such as (MyDrift,)")
    header, arrays = read_archive(path, "model", VERSION)
    known = {name_of(cls): cls for cls in classes}
    check_backend()
    try:
        return _decode(header["structure"], arrays, known, 0)
    except UnknownName:
        raise
    except Exception as error:
        # Any error means that the file was not written by `save`.
        raise ValueError(f"{path} is damaged: {_one_line(error)}{see('loading')}") from None


def _encode(value: Any, place: str, arrays: dict[str, np.ndarray], depth: int = 0) -> Any:
    """Encode a value as JSON, and add its arrays to `arrays`; `place` is the position of the value in the
    model, for messages."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the model cannot be saved: it is nested more than {MAX_DEPTH} levels deep")
    within = lambda part, where: _encode(part, where, arrays, depth + 1)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _encode_array(value, place, arrays)
    if isinstance(value, eqx.Module):
        module, names = _public_name(type(value), place), [f.name for f in dataclasses.fields(value)]
        return {"module": module, "fields": {n: within(getattr(value, n), f"{place}.{n}") for n in names}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [within(part, f"{place}[{i}]") for i, part in enumerate(value)]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: within(part, f"{place}[{name!r}]") for name, part in value.items()}}
    function = function_name(value)
    if function is not None:
        return {"function": function}
    kind = getattr(value, "__qualname__", type(value).__name__)
    raise ValueError(
        f"{place} cannot be saved: it is {kind}; make it an eqx.Module with its parameters as fields"
        + see("saving")
    )


def _public_name(cls: type, place: str) -> str:
    try:
        return name_of(cls)
    except ValueError as error:
        raise ValueError(
            f"{place} cannot be saved: {error}; make it an eqx.Module with its parameters as fields"
            + see("saving")
        ) from None


def _encode_array(
    value: np.generic | np.ndarray | jax.Array, place: str, arrays: dict[str, np.ndarray]
) -> dict[str, str]:
    tag = "array" if isinstance(value, jax.Array) else "numpy" if isinstance(value, np.ndarray) else "scalar"
    more = {}
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        more = {"key": str(jax.random.key_impl(value))}
        value = jax.random.key_data(value)
    plain = np.asarray(value)
    if plain.dtype.name in EXTENDED_DTYPES:
        more = {"dtype": plain.dtype.name}
        plain = plain.view(f"u{plain.dtype.itemsize}")
    if plain.dtype.kind not in "biufc" or more.get("key", "fry") not in KEY_IMPLEMENTATIONS:
        raise ValueError(f"{place} cannot be saved: it is an array of {value.dtype}{see('saving')}")
    name = f"array/{len(arrays)}"
    arrays[name] = plain
    return {tag: name} | more


def _decode(value: Any, arrays: dict[str, np.ndarray], known: dict[str, type], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    within = lambda part: _decode(part, arrays, known, depth + 1)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if "array" in value or "numpy" in value or "scalar" in value:
        return _decode_array(value, arrays)
    if "complex" in value:
        return complex(*value["complex"])
    if "function" in value:
        return FUNCTIONS[value["function"]]
    if "tuple" in value:
        return tuple([within(part) for part in value["tuple"]])
    if "list" in value:
        return [within(part) for part in value["list"]]
    if "dict" in value:
        return {name: within(part) for name, part in value["dict"].items()}
    cls = class_of(value["module"], known)
    parts = ((RENAMED_FIELDS.get((cls.__name__, n)) or n, part) for n, part in value["fields"].items())
    return _build(cls, {name: within(part) for name, part in parts})


def _decode_array(value: dict[str, str], arrays: dict[str, np.ndarray]) -> Any:
    if "dtype" in value and value["dtype"] not in EXTENDED_DTYPES:
        raise TypeError(f"there is no dtype {value['dtype']}")
    as_kept = lambda array: array.view(jnp.dtype(value["dtype"])) if "dtype" in value else array
    if "scalar" in value:
        return as_kept(arrays[value["scalar"]])[()]
    if "numpy" in value:
        return as_kept(arrays[value["numpy"]])
    array = jnp.asarray(as_kept(arrays[value["array"]]))
    return jax.random.wrap_key_data(array, impl=value["key"]) if "key" in value else array


def _build(cls: type, parts: dict[str, Any]) -> Any:
    """Create an instance of a class with the given fields, without calling `__init__`."""
    module = object.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in parts:
            object.__setattr__(module, field.name, parts.pop(field.name))
        elif field.default is dataclasses.MISSING:
            raise KeyError(f"{cls.__name__}.{field.name} is missing")
        else:
            object.__setattr__(module, field.name, field.default)
    if parts:
        raise KeyError(f"{cls.__name__} has no field {next(iter(parts))}")
    check_module(module)
    return module


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".split("\n")[0]
