"""Compilation of programs, and a cache of compiled programs. No other module deals with compilation."""

import functools
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from ._checks import is_traced
from ._functions import MissingSignature, is_users_function, opened

try:
    from jax import enable_x64
except ImportError:  # JAX before 0.8
    from jax.experimental import enable_x64  # pyright: ignore

# Maximum number of cached programs; the least recently used programs are dropped. On Linux a process may have
# 65,530 memory maps, and the compiler crashes if none is left; a compiled program takes about forty.
MAX_PROGRAMS = 512

# On a CPU, optimisation level 1 without fusion emitters takes a third of the time to compile. A first
# estimate took 11.0 s of processor time without these options and 4.2 s with them (3.7 s at level 0); a
# second one took 0.71 s without and 0.85 s with them.
EMITTERS, LEVEL = "xla_cpu_use_fusion_emitters", "xla_backend_optimization_level"
# On a GPU most compilation time is spent tuning Triton kernels for matrix products. The kernels of cuBLAS are
# as fast here; with them, a first fit or estimate takes between a third and a half of the time.
ON_GPU: Mapping[str, bool | int] = {"xla_gpu_enable_triton_gemm": False}

MESSAGE_AFTER = 3.0  # seconds of compilation, after which a message is shown

_programs: OrderedDict[Any, "_Program"] = OrderedDict()
# Properties of programs that were found in earlier calls: the signatures with which they call users'
# functions, and whether their code reads the values of floats.
_signatures: OrderedDict[Any, dict[Any, list[Any]]] = OrderedDict()
_asking: OrderedDict[Any, bool] = OrderedDict()

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def jit(function: Callable[Arguments, Result], *, level: int | None = None) -> Callable[Arguments, Result]:
    """Like `eqx.filter_jit`, for programs that are called repeatedly with different values of floats.

    Floats in the arguments, such as a rate or an end time in a module, are not compiled into the program, nor
    are the numerical constants in users' functions (`roughflow._functions`). Code that reads the value of a
    float (`if rate > 1`, `math.exp`) is compiled again for each value. The number of cached programs is
    bounded. On a CPU, `level` is the optimisation level of the compiler: 0 for programs with little work, 1
    for programs with more, and None (full optimisation) for long-running programs.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with exact_products():
            return _with_opened_functions(function, level, (args, kwargs))

    return call


def _with_opened_functions(function: Callable, level: int | None, arguments: tuple) -> Any:
    """Call a program. Users' functions among its arguments are replaced by `Opened` functions, traced for the
    signatures that the program requires."""
    leaves, structure = jax.tree.flatten(arguments)
    users = [i for i, leaf in enumerate(leaves) if is_users_function(leaf)]
    if not users:
        return _with_dynamic_floats(function, level, leaves, structure)
    key = (function, structure, *(None if i in users else _kind(leaf) for i, leaf in enumerate(leaves)))
    signatures = _entry(_signatures, key, dict)
    while True:
        given = list(leaves)
        for i in users:
            wanted = signatures.setdefault(i, [])
            replaced = None if None in wanted else opened(leaves[i], wanted, (function.__qualname__, i))
            given[i] = leaves[i] if replaced is None else replaced
        flat = jax.tree.flatten(jax.tree.unflatten(structure, given))
        try:
            return _with_dynamic_floats(function, level, *flat)
        except MissingSignature as missing:
            name, i = missing.name
            if name != function.__qualname__:
                raise
            signatures[i].append(missing.signature)


def _with_dynamic_floats(function: Callable, level: int | None, leaves: list, structure: Any) -> Any:
    """Call a program with floats converted to arrays, unless its code reads their values."""
    if not any(map(_is_float, leaves)):
        return _run(function, level, leaves, structure)
    key = (function, structure)
    if _entry(_asking, key, bool):
        return _run(function, level, leaves, structure)
    # A Python float becomes a weakly typed array, so that type promotion is unchanged.
    dynamic = [jnp.asarray(leaf) if _is_float(leaf) else leaf for leaf in leaves]
    try:
        return _run(function, level, dynamic, structure)
    except jax.errors.JAXTypeError:
        result = _run(function, level, leaves, structure)
        _asking[key] = True
        return result


def _run(function: Callable, level: int | None, leaves: list, structure: Any) -> Any:
    """Call the program for arguments of these shapes and types; compile it if necessary."""
    dynamic = [leaf for leaf in leaves if eqx.is_array(leaf)]
    traced = is_traced(jnp.asarray(0.0)) or any(map(is_traced, dynamic))
    # A nested program cannot have compiler options.
    options = {} if traced else known_options(level)
    config: Any = jax.config
    key = (function, structure, tuple(map(_kind, leaves)), tuple(options.items()), config.jax_enable_x64)
    static = [None if eqx.is_array(leaf) else leaf for leaf in leaves]
    program = _entry(_programs, key, lambda: _Program(function, structure, static, options))
    try:
        with nullcontext() if traced or program.is_compiled else _message(), _quiet_callbacks():
            return program(dynamic, wait=not traced)
    except ValueError as error:
        # The program is nested after all: traced values may be hidden in closures.
        if "compiler_options" not in str(error):
            raise
        return _Program(function, structure, static, {})(dynamic, wait=False)


class _Program:
    """A function of arrays, compiled on its first call. Deleting the object frees the memory of the
    program."""

    def __init__(self, function: Callable, structure: Any, static: list, options: dict[str, bool | int]):
        rest: list[Any] = []

        def run(dynamic: list) -> Any:
            arrays = iter(dynamic)
            leaves = [next(arrays) if take else leaf for take, leaf in zip(places, static, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            result, rest[:] = _halves(function(*args, **kwargs))
            return result

        places = [leaf is None for leaf in static]
        run.__name__ = run.__qualname__ = getattr(function, "__name__", "program")
        self._rest = rest
        self._compiled = jax.jit(run, compiler_options=options or None)

    @property
    def is_compiled(self) -> bool:
        return bool(self._rest)

    def __call__(self, dynamic: list, *, wait: bool) -> Any:
        try:
            result = self._compiled(dynamic)
            if wait:
                jax.block_until_ready(result)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            _, found, text = str(error).rpartition("_EquinoxRuntimeError: ")
            if not found:
                raise
            raise eqx.EquinoxRuntimeError(text.split("\n\n\n---")[0]) from None
        return eqx.combine(result, self._rest[0])


def _halves(result: Any) -> tuple[Any, list[Any]]:
    """Split a result into its arrays and everything else, which is returned in a list of length one."""
    arrays, rest = eqx.partition(result, eqx.is_array)
    return arrays, [rest]


def _entry(table: OrderedDict, key: Any, make: Callable[[], Any]) -> Any:
    """Return the entry of `table` for `key`; if there is none, create it with `make`. A table has at most
    `MAX_PROGRAMS` entries; the least recently used ones are dropped."""
    if key not in table:
        table[key] = make()
        while len(table) > MAX_PROGRAMS:
            table.popitem(last=False)
    table.move_to_end(key)
    return table[key]


def drop_programs() -> None:
    """Drop all compiled programs that the library holds."""
    for table in (_programs, _signatures, _asking):
        table.clear()


def _kind(leaf: Any) -> Any:
    """The properties of an argument that a program depends on."""
    if eqx.is_array(leaf):
        return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
    return (type(leaf), leaf.hex() if isinstance(leaf, float) else leaf)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float | np.floating)


def in_double_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A decorator that runs a function in double precision, regardless of the precision of the process."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with enable_x64(True):
            return function(*args, **kwargs)

    return call


def differentiated_in_double_precision(function: Callable) -> Callable:
    """A function whose derivatives are computed in double precision, regardless of the precision of the
    process."""
    outer = jax.custom_vjp(function)
    forward = in_double_precision(lambda parameters: jax.vjp(function, parameters))
    outer.defvjp(forward, in_double_precision(lambda pull, slopes: pull(slopes)))
    return outer


def exact_products() -> AbstractContextManager[object]:
    """A context in which matrix products have full precision, unless the user has set another precision. By
    default, GPUs use ten mantissa bits of float32, which causes errors of 0.01 nats in a log-density and
    saves little or no time.

    The context sets "float32", a synonym of "highest": the kernels of small networks (`sde/_jets.py`), with
    errors of 1e-5, are not used if the user has set "highest"."""
    is_set = jax.config.jax_default_matmul_precision is not None  # pyright: ignore[reportAttributeAccessIssue]
    if is_set or jax.default_backend() == "cpu":
        return nullcontext()
    return jax.default_matmul_precision("float32")


@functools.cache
def known_options(level: int | None) -> dict[str, bool | int]:
    """The options for fast compilation that the installed XLA supports and that the user has not set."""
    backend, options = jax.default_backend(), {}
    if backend == "cpu" and level is not None:
        options = {EMITTERS: False, LEVEL: level}
    elif backend == "gpu":
        options = dict(ON_GPU)
    given = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in options.items() if name not in given}
    if _are_known(options):
        return options
    return {name: value for name, value in options.items() if _are_known({name: value})}


def _are_known(options: Mapping[str, bool | int]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except (RuntimeError, ValueError):
        return False
    return True


class _Burst:
    """Programs that are compiled in direct succession; one message reports all of them."""

    began = ended = -np.inf
    reported = False


@contextmanager
def _message() -> Iterator[None]:
    """In interactive use, print one line to stderr if compilation takes more than three seconds."""
    if not _is_interactive():
        yield
        return
    now = time.monotonic()
    if now - _Burst.ended > 1:
        _Burst.began, _Burst.reported = now, False

    def report() -> None:
        if not _Burst.reported:
            _Burst.reported = True
            print("roughflow: compiling …", file=sys.stderr, flush=True)

    timer = threading.Timer(max(0.0, MESSAGE_AFTER - (now - _Burst.began)), report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _Burst.ended = time.monotonic()


def _is_interactive() -> bool:
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())


class _NoCallbackErrors(logging.Filter):
    """A filter for JAX's log messages about errors that are raised anyway."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.getMessage() != "jax.pure_callback failed"


@contextmanager
def _quiet_callbacks() -> Iterator[None]:
    logger, unwanted = logging.getLogger("jax._src.callback"), _NoCallbackErrors()
    logger.addFilter(unwanted)
    try:
        yield
    finally:
        logger.removeFilter(unwanted)


@partial(jit, level=0)
def split(key: PRNGKeyArray, count: int = 2) -> tuple[PRNGKeyArray, ...]:
    """Split a key, like `jax.random.split`."""
    return tuple(jax.random.split(key, count))


@partial(jit, level=0)
def fold_in(key: PRNGKeyArray, number: Array | int) -> PRNGKeyArray:
    """Fold a number into a key, like `jax.random.fold_in`."""
    return jax.random.fold_in(key, number)
