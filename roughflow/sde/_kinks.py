"""Kinks and jumps of drift and diffusion, found in the traced program."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._functions import flat_operations
from .._programs import in_double_precision, jit
from ..faq import see
from ._sde import AbstractItoSDE, AbstractSDE

# Activations of jax.nn with a discontinuous derivative, by their names in traces. They are rejected by name,
# because zero initial weights can hide their kinks.
KINKED = {"relu", "relu6", "leaky_relu", "hard_tanh", "hard_sigmoid", "hard_silu", "selu"}
# Smooth functions that contain comparisons or absolute values.
SMOOTH = frozenset(
    """
    gelu log_sigmoid log_softmax logaddexp logaddexp2 logsumexp mish norm sigmoid silu sinc softmax softplus
    squareplus swish
    """.split()  # noqa: SIM905
)
# Operations that switch between branches, with a function that returns the branch of an input.
BRANCHES: dict[str, Callable[..., Any]] = {
    **{name: lambda x, **_: x < 0 for name in ("abs", "sign")},
    **{name: lambda x, y, **_: x < y for name in ("max", "min", "lt", "le", "gt", "ge")},
    "clamp": lambda low, x, high, **_: 1 * (x < low) + 2 * (x > high),
    **{name: lambda x, **_: jnp.floor(x) for name in ("floor", "ceil")},
    "round": lambda x, **_: jnp.floor(x + 0.5),
    "rem": lambda x, y, **_: jnp.floor(x / y),
    **{
        name: lambda x, *_, **__: jnp.argsort(jnp.ravel(x))
        for name in ("argmax", "argmin", "reduce_max", "reduce_min", "sort", "cummax", "cummin", "top_k")
    },
}
RAYS, STEPS = 16, 240  # number of search lines, and number of points on each
DECADES = 12.0  # distances from the origin lie between 10^−DECADES and 10^DECADES
NUM_ROUNDS = 6  # each round shrinks a bracket by a factor of STEPS
JUMP, KINK = 1e-5, 1e-3  # relative differences of values and of slopes on the two sides
OFFSET = 1e-7  # distance from a switch at which both sides are compared, as a fraction of the first bracket


class Kink(NamedTuple):
    """A jump of a coefficient, or of its derivative, and its position."""

    part: str  # "drift" or "diffusion"
    kind: str  # "jump" or "kink"
    operation: str  # name in JAX
    point: tuple[float, ...]

    def __str__(self) -> str:
        place = ", ".join(f"{value:.4g}" for value in self.point)
        return f"{self.part} has a {self.kind} ({self.operation}) at z = [{place}]"


def kinks(
    sde: AbstractSDE, dimension: int, *, t1: float = 1.0, points: Array | None = None
) -> tuple[Kink, ...]:
    """Find the jumps and kinks of drift and diffusion as functions of the state z, at most one of each kind
    per type of operation.

    Operations that switch between branches, such as `abs`, `maximum`, `where` or `floor`, are found in the
    program of each coefficient. Their switching points are located by searching along rays from the origin
    and, if `points` of shape `(k, d)` is given, also between those points. Values and slopes on both sides
    are then compared. Coefficients without such operations need only one trace. Switches inside `lax.scan`
    and `lax.while_loop` are not detected.
    """
    found = []
    for part, function in (("drift", sde.drift), ("diffusion", sde.noise)):
        found += _kinks(part, function, dimension, float(t1), points)
    return tuple(found)


def check_kinks(sde: AbstractSDE, dimension: int) -> None:
    """Raise a `ValueError` if the diffusion of an Itô SDE has a kink or a jump.

    The random ODE contains Dσ, and its log-density the derivative of Dσ: a delta function at a kink, which
    automatic differentiation misses. A drift or a Stratonovich diffusion is differentiated only once, so it
    may have kinks.
    """
    if not isinstance(sde, AbstractItoSDE):
        return
    jaxpr = jax.make_jaxpr(_arrays(sde.noise))(jnp.zeros(()), jnp.zeros(dimension)).jaxpr
    names = sorted(KINKED.intersection(_names(jaxpr)))
    wrong = "so the derivative of the Itô correction would be silently wrong; use a smooth "
    if names:
        raise ValueError(
            f"diffusion has the activation {names[0]}, whose derivative is discontinuous, {wrong}"
            f"one such as tanh, softplus, silu or gelu{see('kinks')}"
        )
    found = _kinks("diffusion", sde.noise, dimension, 1.0, None)
    if found:
        raise ValueError(f"{found[0]}, {wrong}function, or an rf.StratonovichSDE{see('kinks')}")


def _arrays(function: Callable) -> Callable:
    return lambda t, z: jax.tree.leaves(eqx.filter(function(t, z), eqx.is_array))


@in_double_precision
def _kinks(part: str, function: Callable, dimension: int, t1: float, points: Array | None) -> list[Kink]:
    t = jnp.asarray(0.37 * t1)
    try:
        operations, _, switches = _switches(function, t, jnp.zeros(dimension))
    except Exception:  # the coefficient does not support double precision
        return []
    names = [operations[i].equation.primitive.name for i in switches]
    found: dict[tuple[str, str], Kink] = {}
    lines = _lines(dimension, points) if names else []
    for index, name in enumerate(names):
        for bracket in _brackets(function, t, index, lines):
            kind = _compare(function, t, *bracket)
            if kind is not None:
                point = np.where(np.abs(bracket[0][0]) < 1e-6 * np.abs(bracket[1][0]), 0.0, bracket[0][0])
                found.setdefault((kind, name), Kink(part, kind, name, tuple(point.tolist())))
                break
    return list(found.values())


def _switches(function: Callable, t: Array, z: Array) -> tuple[list[Any], list[Any], list[int]]:
    """The operations of a coefficient, its constants, and the indices of the operations that switch with the
    state."""
    operations, numbers = flat_operations(_arrays(function), (t, z), opaque=SMOOTH)
    depends, count, switches = {1}, 2, []
    for i, operation in enumerate(operations):
        outputs = range(count, count + len(operation.equation.outvars))
        count = outputs.stop
        if depends.intersection(place for place in operation.inputs if isinstance(place, int)):
            depends.update(outputs)
            if operation.equation.primitive.name in BRANCHES:
                switches.append(i)
    return operations, numbers, switches


@functools.partial(jit, level=0)
def _branches(function: Callable, t: Array, points: Array) -> Array:
    """The branch that each switch takes at each point, `(points, switches)`."""

    def one(z: Array) -> Array:
        operations, numbers, switches = _switches(function, t, z)
        values, branches = [t, z], []
        for i, operation in enumerate(operations):
            inputs = operation.read(values, numbers)
            if i in switches:
                branch = BRANCHES[operation.equation.primitive.name]
                branches.append(jnp.ravel(branch(*inputs, **operation.equation.params)).astype(float))
            values.extend(operation.run(inputs))
        return jnp.stack([_code(branch) for branch in branches])

    return jax.vmap(one)(points)


def _code(branch: Array) -> Array:
    """A single number that identifies the branches of all entries."""
    return branch @ jnp.sqrt(2.0 + jnp.arange(branch.size))


def _lines(dimension: int, points: Array | None) -> list[np.ndarray]:
    """Arrays of points along lines, `(steps, d)` each. The lines pass through the origin and cover many
    orders of magnitude, or connect given points."""
    rng = np.random.default_rng(0)
    sizes = np.logspace(-DECADES, DECADES, STEPS // 2)
    steps = np.concatenate([-sizes[::-1], sizes])[:, None]
    lines = [steps * rng.normal(size=dimension) for _ in range(RAYS)]
    if points is not None and len(points) > 1:
        share = np.linspace(0, 1, STEPS)[:, None]
        ends = np.asarray(points, float)[rng.integers(len(points), size=(RAYS, 2))]
        lines += [start + share * (end - start) for start, end in ends]
    return lines


def _brackets(
    function: Callable, t: Array, index: int, lines: list[np.ndarray]
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]:
    """Find switching points on the lines. Yield for each a narrow bracket, two points between which the
    branch changes, and the initial wide bracket around it."""
    branch = lambda line: np.asarray(_branches(function, t, jnp.asarray(line)))[:, index]
    for line in lines:
        flips = np.flatnonzero(np.diff(branch(line)))
        for flip in flips[:: max(1, len(flips) // 2)][:3]:
            low, high = around = line[flip], line[flip + 1]
            for _ in range(NUM_ROUNDS):
                inner = low + np.linspace(0, 1, STEPS)[:, None] * (high - low)
                inside = np.flatnonzero(np.diff(branch(inner)))
                if not len(inside):
                    break
                low, high = inner[inside[0]], inner[inside[0] + 1]
            yield (low, high), around


@functools.partial(jit, level=0)
def _values_and_slopes(function: Callable, t: Array, points: Array, direction: Array) -> tuple[Array, Array]:
    """Values and slopes of all entries of a coefficient, `(points, entries)` each."""
    value = lambda z: jnp.concatenate([jnp.ravel(array) for array in _arrays(function)(t, z)])
    return jax.vmap(lambda z: jax.jvp(value, (z,), (direction,)))(points)


def _compare(
    function: Callable, t: Array, sides: tuple[np.ndarray, np.ndarray], around: tuple[np.ndarray, np.ndarray]
) -> str | None:
    """Return "jump" if the values on the two sides of a switch differ, "kink" if only the slopes differ, and
    None if the coefficient is smooth or not finite."""
    direction = around[1] - around[0]
    points = np.array([sides[0] - OFFSET * direction, sides[1] + OFFSET * direction, *around])
    evaluated = _values_and_slopes(function, t, jnp.asarray(points), jnp.asarray(direction))
    values, slopes = map(np.asarray, evaluated)
    if not (np.isfinite(values).all() and np.isfinite(slopes).all()):
        return None
    # Entry by entry, because entries may have different units.
    differ = lambda parts, share: np.any(np.abs(parts[1] - parts[0]) > share * np.max(np.abs(parts), axis=0))
    if differ(values, JUMP):
        return "jump"
    if differ(slopes, KINK):
        return "kink"
    return None


def _names(jaxpr: Any) -> Iterator[str]:
    """The names of all functions called in a trace."""
    for equation in jaxpr.eqns:
        name = equation.params.get("name")
        if isinstance(name, str):
            yield name
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = leaf if hasattr(leaf, "eqns") else getattr(leaf, "jaxpr", None)
            if hasattr(inner, "eqns"):
                yield from _names(inner)
