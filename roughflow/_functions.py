"""Users' functions represented as data: a sequence of operations, and the numerical constants in them.

A function that is defined again, in a loop over a parameter or in a notebook cell that runs twice, is a new
object for JAX, which would recompile every program that calls it. Yet its operations are the same; only the
numerical constants differ. `Opened` holds the operations as static data, compared by structure, and the
constants as arrays (`numbers`). A program is compiled for the operations and takes the constants as
arguments.
"""

import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from ._checks import is_traced

# Functions of these packages are not converted to `Opened`; they are compared by identity.
LIBRARIES = frozenset(
    """
    blackjax diffrax equinox jax jaxlib jaxtyping lineax numpy numpyro optax optimistix roughflow scipy
    """.split()  # noqa: SIM905
)
# Names of operations that call other programs, which are inlined; the names depend on the version of JAX.
INLINED = frozenset({"closed_call", "core_call", "jit", "pjit"})
CUSTOM_RULES = {"custom_jvp_call": jax.jvp, "custom_vjp_call": jax.vjp, "custom_vjp_call_jaxpr": jax.vjp}
# Immutable types: a function that refers to a value of such a type will always see the same value.
FIXED = (bool, bytes, complex, float, int, np.generic, str, type, types.ModuleType, types.NoneType)


class Signature(NamedTuple):
    """The properties that a trace depends on: structure, shapes and dtypes of the arguments, and settings of
    JAX."""

    structure: Any
    types: tuple[tuple[tuple[int, ...], Any, bool], ...]  # shape, dtype, and whether the dtype is weak
    config: tuple[Any, ...]


class MissingSignature(BaseException):
    """An `Opened` function was called with arguments for which it has not been traced.

    The signature is None if an argument is neither a number nor an array. The class does not derive from
    `Exception`, so that code that handles exceptions of a user's function does not catch it.
    """

    def __init__(self, name: Any, signature: Signature | None):
        super().__init__(f"{name} has not been traced for {signature}")
        self.name = name
        self.signature = signature


class Opened(eqx.Module):
    """A function, represented by its operations and its numerical constants, for arguments of given shapes
    and dtypes."""

    numbers: tuple[tuple[Array, ...], ...]
    traces: tuple["Trace", ...] = eqx.field(static=True)
    name: Any = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            signature, arrays = signature_of(args, kwargs)
        except TypeError:
            raise MissingSignature(self.name, None) from None
        for trace, numbers in zip(self.traces, self.numbers, strict=True):
            if trace.signature == signature:
                return trace.run(numbers, arrays)
        raise MissingSignature(self.name, signature)


class Operation(NamedTuple):
    """One operation of a trace. Each input is the index of an earlier value, ("number", i) for the i-th
    numerical constant, or ("literal", x)."""

    equation: Any  # a JaxprEqn
    inputs: Sequence[Any]

    def read(self, values: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """Look up the values of the inputs."""
        kinds = {"number": lambda i: numbers[i], "literal": lambda atom: atom.val}
        return [
            values[place] if isinstance(place, int) else kinds[place[0]](place[1]) for place in self.inputs
        ]

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        primitive, context = self.equation.primitive, getattr(self.equation, "ctx", None)
        bound: Any = primitive.get_bind_params(self.equation.params)
        functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
        if context is None:
            result = primitive.bind(*functions, *inputs, **parameters)
        else:
            with context.manager:
                result = primitive.bind(*functions, *inputs, **parameters)
        return result if primitive.multiple_results else [result]


class Trace:
    """The operations of a function for one signature. Equal traces are the same object."""

    def __init__(self, signature: Signature, operations: list[Operation], outputs: Any, rebuild: Callable):
        self.signature = signature
        self.operations = operations
        self.outputs = outputs
        self.rebuild = rebuild

    def run(self, numbers: Sequence[Array], arrays: Sequence[Array]) -> Any:
        values = [jnp.asarray(array) for array in arrays]
        for operation in self.operations:
            values.extend(operation.run(operation.read(values, numbers)))
        outputs = Operation(None, self.outputs).read(values, numbers)
        return self.rebuild([jnp.asarray(output) for output in outputs])


_traces: weakref.WeakValueDictionary[Any, Trace] = weakref.WeakValueDictionary()
_opened: weakref.WeakKeyDictionary[Any, tuple[Any, dict]] = weakref.WeakKeyDictionary()


# The functions traced inside the context `fixed_functions`, with their traces; None outside the context.
_session: ContextVar[dict[int, tuple[Any, dict]] | None] = ContextVar("session", default=None)


@contextmanager
def fixed_functions() -> Iterator[None]:
    """A context in which each function of the user is traced only once, for a computation that calls many
    programs. Outside the context, a function whose closure cannot be compared is traced again at every call,
    which takes milliseconds."""
    token = _session.set({} if _session.get() is None else _session.get())
    try:
        yield
    finally:
        _session.reset(token)


def is_users_function(leaf: Any) -> bool:
    """Whether a leaf is a function that may be defined again: neither one of a library nor a module-level
    function of an imported module."""
    if not callable(leaf) or isinstance(leaf, type | jax.Array | np.ndarray):
        return False
    module = getattr(leaf, "__module__", None) or ""
    if isinstance(leaf, functools.partial):
        return is_users_function(leaf.func)
    if module.split(".")[0] in LIBRARIES:
        return False
    found: Any = sys.modules.get(module)
    for part in getattr(leaf, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    return module == "__main__" or found is not leaf


def signature_of(args: tuple, kwargs: dict) -> tuple[Signature, list[Any]]:
    leaves, structure = jax.tree.flatten((args, kwargs))
    avals = [jax.typeof(leaf) for leaf in leaves]
    types = tuple((aval.shape, aval.dtype, getattr(aval, "weak_type", False)) for aval in avals)
    config: Any = jax.config
    return Signature(structure, types, (config.jax_enable_x64, config.jax_default_matmul_precision)), leaves


def opened(function: Callable, signatures: Sequence[Signature], name: Any = None) -> Opened | None:
    """Trace a function for the given signatures, and leave out those for which tracing fails; None if all
    fail."""
    state, session = _state(function), _session.get()
    known: dict[Signature, tuple[Trace, tuple[Array, ...]]] = {}
    if state is not None and function in _opened and _opened[function][0] == state:
        known = _opened[function][1]
    elif state is None and session is not None:
        known = session.setdefault(id(function), (function, known))[1]
    found = []
    for signature in signatures:
        if signature not in known:
            try:
                traced = trace(function, signature)
            except Exception:
                continue  # the compiled program will report the error
            if any(map(is_traced, traced[1])) or (state is None and session is None):
                found.append(traced)
                continue
            known[signature] = traced
            if state is not None:
                _opened[function] = (state, known)
        found.append(known[signature])
    if signatures and not found:
        return None
    return Opened(tuple(numbers for _, numbers in found), tuple(trace for trace, _ in found), name)


def explicit(function: Callable, *arguments: Array) -> Opened:
    """Convert a function to an `Opened`, in which the arrays of its closure are explicit parameters, for
    arguments with the shapes and dtypes of `arguments`.

    Custom derivative rules of the solvers differentiate only with respect to explicit arguments.
    """
    operations, numbers = _trace(function, signature_of(arguments, {})[0])
    return Opened((numbers,), (Trace(*operations),), None)


def trace(function: Callable, signature: Signature) -> tuple[Trace, tuple[Array, ...]]:
    """Trace a function: return its operations and its numerical constants."""
    (_, operations, outputs, rebuild), numbers = _trace(function, signature)
    key = (
        signature,
        tuple((number.shape, number.dtype) for number in numbers),
        rebuild.key,
        tuple(map(_place_key, outputs)),
        tuple(
            (step.equation.primitive, tuple(map(_place_key, step.inputs)), _parameters_key(step.equation))
            for step in operations
        ),
    )
    same = _traces.get(key)
    if same is None:
        same = _traces[key] = Trace(signature, operations, outputs, rebuild)
    return same, numbers


class _Rebuild(NamedTuple):
    """A function that rebuilds a result from its arrays. It stores the structure and the leaves of the
    result, with None in place of arrays."""

    structure: Any
    leaves: tuple[Any, ...]

    @property
    def key(self) -> Any:
        return (self.structure, tuple((type(leaf), leaf) for leaf in self.leaves))

    def __call__(self, arrays: Sequence[Array]) -> Any:
        left = iter(arrays)
        return jax.tree.unflatten(
            self.structure, [next(left) if leaf is None else leaf for leaf in self.leaves]
        )


def _trace(function: Callable, signature: Signature) -> tuple[Any, tuple[Array, ...]]:
    """Trace a function: return the constructor arguments of a `Trace`, and the numerical constants."""
    results: list[_Rebuild] = []

    def flat(*arrays: Array) -> list[Array]:
        args, kwargs = jax.tree.unflatten(signature.structure, arrays)
        leaves, structure = jax.tree.flatten(function(*args, **kwargs))
        rest = tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves)
        results.append(_Rebuild(structure, rest))
        return [leaf for leaf in leaves if eqx.is_array(leaf)]

    examples = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in signature.types]
    closed = jax.make_jaxpr(flat)(*examples)
    flattened = _Flattened(len(examples))
    outputs = flattened.add(closed.jaxpr, closed.consts, list(range(len(examples))))
    return (signature, flattened.operations, outputs, results[-1]), tuple(flattened.numbers)


def flat_operations(
    function: Callable, arguments: Sequence[Array], *, opaque: frozenset[str] = frozenset()
) -> tuple[list[Operation], list[Any]]:
    """Return the operations and the numerical constants of a function of arrays. Functions with custom
    derivative rules are inlined too, but each function named in `opaque` remains one operation."""
    closed = jax.make_jaxpr(function)(*arguments)
    flattened = _Flattened(len(arguments), INLINED | CUSTOM_RULES.keys() | {"checkpoint", "remat"}, opaque)
    flattened.add(closed.jaxpr, closed.consts, list(range(len(arguments))))
    return flattened.operations, flattened.numbers


def name_of(equation: JaxprEqn) -> str:
    """The name of the function that an equation calls; if there is none, the name of its primitive."""
    called: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    debug_info = getattr(getattr(called, "jaxpr", called), "debug_info", None)
    inner = equation.params.get("name", getattr(debug_info, "func_name", None))
    return inner if isinstance(inner, str) else equation.primitive.name


class _Flattened:
    """Collects the operations of a program and of the programs that it calls, in order."""

    def __init__(
        self, arguments: int, inlined: frozenset[str] = INLINED, opaque: frozenset[str] = frozenset()
    ):
        self.count = arguments
        self.inlined = inlined
        self.opaque = opaque
        self.numbers: list[Any] = []
        self.operations: list[Operation] = []

    def add(self, jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Append the operations of a program; return its outputs in the form of `Operation.inputs`."""
        places: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            places[variable] = self._number(constant)
        for equation in jaxpr.eqns:
            called = self._inlined(equation)
            read = lambda i, equation=equation: self._read(places, equation, i)
            at = [read(i) for i in range(len(equation.invars))]
            if called is not None:
                outputs = self.add(called.jaxpr, called.consts, at)
            else:
                self.operations.append(Operation(equation, tuple(at)))
                outputs = range(self.count, self.count + len(equation.outvars))
                self.count += len(equation.outvars)
            places.update(zip(equation.outvars, outputs, strict=True))
        return [self._literal(atom) if isinstance(atom, Literal) else places[atom] for atom in jaxpr.outvars]

    def _inlined(self, equation: JaxprEqn) -> ClosedJaxpr | None:
        """The program that an equation calls, if it is to be inlined; else None."""
        if equation.primitive.name not in self.inlined or name_of(equation) in self.opaque:
            return None
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        return ClosedJaxpr(called, ()) if isinstance(called, Jaxpr) else called

    def _read(self, places: dict[Var, Any], equation: JaxprEqn, i: int) -> Any:
        atom = equation.invars[i]
        if not isinstance(atom, Literal):
            return places[atom]
        # Squares and roots are faster than general powers, so an integer or half-integer exponent remains
        # part of the operation.
        if equation.primitive.name == "pow" and i == 1 and float(2 * atom.val).is_integer():
            return ("literal", atom)
        return self._literal(atom)

    def _literal(self, atom: Literal) -> Any:
        _, dtype = _shape_and_type(atom)
        if not jnp.issubdtype(dtype, jnp.floating):
            return ("literal", atom)
        return self._number(np.asarray(atom.val, dtype))

    def _number(self, value: Any) -> tuple[str, int]:
        self.numbers.append(value if isinstance(value, jax.Array) else np.asarray(value))
        return ("number", len(self.numbers) - 1)


class _Identity:
    """A wrapper that compares a value by identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _place_key(place: Any) -> Any:
    if isinstance(place, int) or place[0] == "number":
        return place
    return _literal_key(place[1])


def _literal_key(atom: Literal) -> Any:
    return ("literal", _shape_and_type(atom), np.asarray(atom.val).tobytes())


def _shape_and_type(atom: Literal | Var) -> tuple[tuple[int, ...], Any]:
    aval: Any = atom.aval
    return getattr(aval, "shape", ()), getattr(aval, "dtype", type(aval))


def _parameters_key(equation: JaxprEqn, within: tuple = ()) -> Any:
    parameters, name = dict(equation.params), equation.primitive.name
    if name not in CUSTOM_RULES:
        return _key(parameters, within)
    called = parameters.get("call_jaxpr", parameters.get("fun_jaxpr"))
    plain = _key(called, within)
    return plain if plain in within else (plain, _rule_key(equation, (*within, plain)))


def _rule_key(equation: JaxprEqn, within: tuple) -> Any:
    """A key that compares custom derivative rules by the programs that they compute."""
    inputs = [_shape_and_type(atom) for atom in equation.invars]
    if not all(jnp.issubdtype(dtype, jnp.floating) for _, dtype in inputs):
        return _Identity(equation)
    examples = [jax.ShapeDtypeStruct(*shape_and_type) for shape_and_type in inputs]
    value = lambda *inputs: list(Operation(equation, ()).run(inputs))

    def derivative(primals: list[Array], tangents: list[Array]) -> Any:
        if CUSTOM_RULES[equation.primitive.name] is jax.jvp:
            return jax.jvp(value, primals, tangents)
        results, pull = jax.vjp(value, *primals)
        return results, pull([jnp.ones_like(result) for result in results])

    return _key(jax.make_jaxpr(derivative)(examples, examples), within)


def _key(value: Any, within: tuple) -> Any:
    """A hashable key for a parameter of an operation; a parameter that is not hashable is compared by
    identity."""
    if isinstance(value, ClosedJaxpr):
        return (_jaxpr_key(value.jaxpr, within), tuple(map(_Identity, value.consts)))
    if isinstance(value, Jaxpr):
        return _jaxpr_key(value, within)
    if isinstance(value, dict):
        return tuple((name, _key(part, within)) for name, part in sorted(value.items()))
    if isinstance(value, tuple | list):
        return (type(value), *(_key(part, within) for part in value))
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes())
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return (type(value), value)


def _jaxpr_key(jaxpr: Jaxpr, within: tuple) -> Any:
    """A hashable key for a program inside an operation, including its literals."""
    places: dict[Var, int] = {}
    define = lambda variables: [places.setdefault(variable, len(places)) for variable in variables]
    read = lambda atom: _literal_key(atom) if isinstance(atom, Literal) else places[atom]
    define([*jaxpr.constvars, *jaxpr.invars])
    arguments = tuple(map(_shape_and_type, places))
    steps = []
    for equation in jaxpr.eqns:
        inputs = tuple(map(read, equation.invars))
        define(equation.outvars)
        steps.append((equation.primitive, inputs, _parameters_key(equation, within)))
    return (arguments, tuple(steps), tuple(map(read, jaxpr.outvars)))


def _state(function: Any, seen: tuple = ()) -> Any:
    """The code of a function and the objects to which it refers, to detect changes; None if changes cannot be
    detected."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return None
    referred: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            referred.append(cell.cell_contents)
        except ValueError:  # a cell that is not set yet
            return None
    codes = [function.__code__]
    for code in codes:
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        referred.extend(function.__globals__[name] for name in code.co_names if name in function.__globals__)
    state: list[Any] = [function.__code__]
    for value in referred:
        if isinstance(value, types.FunctionType) and is_users_function(value):
            inner = _state(value, (*seen, function))
            if inner is None:
                return None
            state.append(inner)
        elif isinstance(value, FIXED) or _is_constant(value):
            state.append(_Identity(value))
        else:
            return None
    return tuple(state)


def _is_constant(value: Any) -> bool:
    """Whether a value cannot change: a JAX array, a module of such arrays, or a function of a library."""
    if isinstance(value, eqx.Module):
        return all(isinstance(leaf, FIXED) or _is_constant(leaf) for leaf in jax.tree.leaves(value))
    if isinstance(value, jax.Array):
        return not is_traced(value)
    return callable(value) and not is_users_function(value)


def trainable(tree: Any) -> Any:
    """A mask of the trainable parameters in a pytree: all floating-point arrays, except those in fields that
    are marked as given.

    A zero gradient would not suffice to keep a target fixed, because weight decay changes all parameters.
    """
    part = lambda node: node is not tree and isinstance(node, eqx.Module)
    mark = lambda node: trainable(node) if part(node) else eqx.is_inexact_array(node)
    mask = jax.tree.map(mark, tree, is_leaf=part)
    fields = dataclasses.fields(tree) if isinstance(tree, eqx.Module) else ()
    for name in [field.name for field in fields if field.metadata.get("given")]:
        still = jax.tree.map(lambda _: False, getattr(tree, name))
        if jax.tree.leaves(still):
            mask = eqx.tree_at(lambda node, name=name: getattr(node, name), mask, still)
    return mask
