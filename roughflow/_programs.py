"""Compiled programs: no more of them than need be, and never more than a process can hold."""

import contextvars
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from ._checks import is_traced

try:
    from jax import enable_x64
except ImportError:  # JAX before 0.8
    from jax.experimental import enable_x64  # pyright: ignore

# On Linux a process may have 65,530 memory maps; one too many, and the compiler dies of a segmentation fault.
# A compiled program takes about forty, and JAX keeps thousands of programs.
MAPS = Path("/proc/self/maps")
LIMIT = 15_000
EVERY = 32  # programs compiled between two looks

# On a CPU these take half the time to compile. But at level 1 a solve with networks takes half as long again,
# an estimate or a simulation twice as long and more, a chain up to five times; at level 0 a solve takes three
# times as long. At level 1 that is for want of the fusion emitters: with them it runs as fast as at any, and
# takes five seconds more to compile an estimate. Not every version of XLA knows all of them.
EMITTERS = "xla_cpu_use_fusion_emitters"
QUICK: Mapping[str, bool | int] = {EMITTERS: False, "xla_cpu_parallel_codegen_split_count": 2}
LEVEL = "xla_backend_optimization_level"
# On a GPU most of the time to compile goes into kernels for every product, written in Triton and tried out
# in dozens of forms. Those of cuBLAS run as fast here, and a first fit or estimate takes a third to a half of
# the time.
ON_GPU: Mapping[str, bool | int] = {"xla_gpu_enable_triton_gemm": False}

_long: contextvars.ContextVar[bool] = contextvars.ContextVar("long", default=False)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Held:
    """How many programs were compiled since the last look, and how many maps are too many."""

    fresh: int = 0
    limit: int = LIMIT


def jit(function: Callable[Arguments, Result], *, level: int | None = None) -> Callable[Arguments, Result]:
    """As `eqx.filter_jit`, for programs that may be asked for again and again with other numbers.

    Plain floats in the arguments, a rate or an end time in a module, are not compiled into the program, so
    that another number finds it compiled; only code that asks for their value (`if rate > 1`, `math.exp`) has
    a program for each. And when the programs of this process have become too many, they are dropped, to
    be compiled again as needed. On a CPU, with a `level`, 1 or 0, less time goes into compiling: 0 for
    programs that do little; more of it again where there is much to do (`runs_long`).
    """
    compiled = _with_options(function, level)
    # What arguments look like to code that asks for the value of a float.
    asking: set[Any] = set()

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        leaves, structure = jax.tree.flatten((args, kwargs))
        if not any(_is_float(leaf) for leaf in leaves) or structure in asking:
            return compiled(*args, **kwargs)
        # A Python float stays one to the rules of promotion: it becomes a weakly typed array.
        dynamic = [jnp.asarray(leaf) if _is_float(leaf) else leaf for leaf in leaves]
        changed: tuple[Any, Any] = jax.tree.unflatten(structure, dynamic)
        try:
            return compiled(*changed[0], **changed[1])  # pyright: ignore[reportCallIssue]
        except jax.errors.JAXTypeError:
            result = compiled(*args, **kwargs)
            asking.add(structure)
            return result

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        drop_programs()
        with exact_products():
            return run(*args, **kwargs)

    return call


@contextmanager
def runs_long(long: bool) -> Iterator[None]:
    """Programs that are called within are worth the time to compile them well, if `long`."""
    before = _long.set(long)
    try:
        yield
    finally:
        _long.reset(before)


def in_double_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function in double precision, whatever the precision of the user's process."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with enable_x64(True):
            return function(*args, **kwargs)

    return call


def exact_products() -> AbstractContextManager[object]:
    """Products of matrices to the precision of their type, where the user has not said otherwise. GPUs keep
    ten bits of float32 by default, which is 0.01 nats of a log-density, for little or no time gained.

    "float32" is "highest" by another name: kernels of small networks, with errors of 1e-5, are for users who
    have said nothing (`sde/_jets.py`)."""
    said = jax.config.jax_default_matmul_precision is not None  # pyright: ignore[reportAttributeAccessIssue]
    if said or jax.default_backend() == "cpu":
        return nullcontext()
    return jax.default_matmul_precision("float32")


def _with_options(function: Callable[Arguments, Result], level: int | None) -> Callable[Arguments, Result]:
    """As `eqx.filter_jit`, with options that only a program of its own can have: not one that becomes part of
    another, inside a `jit` or `grad`."""
    plain = eqx.filter_jit(function)

    @functools.cache
    def alone(long: bool) -> Callable[Arguments, Result]:
        options = known_options(level)
        if long:
            options = {name: value for name, value in options.items() if name != EMITTERS}
        if not options:
            return plain
        return eqx.filter_jit(function, compiler_options=options)  # pyright: ignore[reportCallIssue]

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if is_traced(jnp.asarray(0.0)) or any(map(is_traced, jax.tree.leaves((args, kwargs)))):
            return plain(*args, **kwargs)
        try:
            return alone(_long.get())(*args, **kwargs)
        except ValueError as error:
            # What is differentiated may hide in a function that closes over it.
            if "compiler_options" not in str(error):
                raise
            return plain(*args, **kwargs)

    return call


@functools.cache
def known_options(level: int | None) -> dict[str, bool | int]:
    """Those of the options for a quick compilation that this version of XLA knows, and none that the user has
    set."""
    backend, options = jax.default_backend(), {}
    if backend == "cpu" and level is not None:
        options = {**QUICK, LEVEL: level}
    elif backend == "gpu":
        options = ON_GPU
    given = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in options.items() if name not in given}
    if _are_known(options):
        return options
    return {name: value for name, value in options.items() if _are_known({name: value})}


def _are_known(options: dict[str, bool | int]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except (RuntimeError, ValueError):
        return False
    return True


def drop_programs() -> None:
    """Drop all compiled programs if they hold too many memory maps; between two calls, not within one."""
    if _Held.fresh < EVERY or is_traced(jnp.asarray(0.0)):
        return
    _Held.fresh = 0
    if memory_maps() < _Held.limit:
        return
    jax.clear_caches()
    gc.collect()
    # What somebody else holds stays: it should not make every call drop what the one before it compiled.
    _Held.limit = max(LIMIT, 2 * memory_maps())


def memory_maps() -> int:
    """How many memory maps this process has; 0 where there is no telling, and no such limit."""
    try:
        return MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float | np.floating)


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    if event.endswith("/backend_compile_duration"):
        _Held.fresh += 1


jax.monitoring.register_event_duration_secs_listener(_count)
