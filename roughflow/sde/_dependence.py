"""What a function's outputs are computed from, seen in the program that JAX makes of it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import Jaxpr, Var
from jaxtyping import Array

# Entry by entry, for operands of one shape: entry i of the result has to do with entries i alone.
ENTRYWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos
    cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p
    logistic lt max min mul ne neg not or pow rem round rsqrt select_n sign sin sinh sqrt square stop_gradient
    sub tan tanh xor
    """.split()  # noqa: SIM905
)
CALLS = frozenset({"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"})


def depends_on(function: Callable[[Array], Any], z: Array) -> bool:
    """Whether any output of `function` is computed from `z`; errs on the side of yes."""
    jaxpr = _program(function, z)
    reached = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(isinstance(v, Var) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return any(isinstance(v, Var) and v in reached for v in jaxpr.outvars)


def is_entrywise(function: Callable[[Array], Array], z: Array) -> bool:
    """Whether output i is computed from zᵢ alone, for all i; errs on the side of no."""
    jaxpr = _program(function, z)
    return False not in _follow(jaxpr, [True])


def _program(function: Callable[[Array], Any], z: Array) -> Jaxpr:
    return jax.make_jaxpr(lambda y: jax.tree.leaves(eqx.filter(function(y), eqx.is_array)))(z).jaxpr


def _follow(jaxpr: Jaxpr, inputs: list[bool | None]) -> list[bool | None]:
    """Of each output: True if it follows z entry by entry, False if not, None if z is not in it."""
    found: dict[Any, bool | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    look = lambda v: found.get(v) if isinstance(v, Var) else None
    for equation in jaxpr.eqns:
        states = [look(v) for v in equation.invars]
        outputs: list[bool | None] = [False] * len(equation.outvars)
        inner = _called(equation) if equation.primitive.name in CALLS else None
        if all(state is None for state in states):
            outputs = [None] * len(outputs)
        elif inner is not None and len(inner.invars) == len(states):
            outputs = _follow(inner, states)
        elif equation.primitive.name in ENTRYWISE and False not in states:
            outputs = [True] * len(outputs)
        found |= dict(zip(equation.outvars, outputs, strict=True))
    return [look(v) for v in jaxpr.outvars]


def _called(equation: Any) -> Jaxpr | None:
    """The program that an equation calls."""
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(called, "jaxpr", called)
