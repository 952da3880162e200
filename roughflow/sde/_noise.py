"""Operations on the values σ of a diffusion, which are matrices or lineax operators: products, derivatives,
and tests of their dependence on z."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.extend.core import Jaxpr, Var
from jaxtyping import Array

from .._linear import UNROLL, log_abs_det, solve

# Elementwise operations: entry i of the result depends only on entries i of the operands.
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
    """Whether any output of `function` depends on `z`; True if in doubt."""
    jaxpr = _program(function, z)
    reached = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(isinstance(v, Var) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return any(isinstance(v, Var) and v in reached for v in jaxpr.outvars)


def is_entrywise(function: Callable[[Array], Array], z: Array) -> bool:
    """Whether output i depends on zᵢ only, for all i; False if in doubt."""
    jaxpr = _program(function, z)
    return False not in _follow(jaxpr, [True])


def _program(function: Callable[[Array], Any], z: Array) -> Jaxpr:
    return jax.make_jaxpr(lambda y: jax.tree.leaves(eqx.filter(function(y), eqx.is_array)))(z).jaxpr


def _follow(jaxpr: Jaxpr, inputs: list[bool | None]) -> list[bool | None]:
    """For each output: True if it depends on z entry by entry, False if it depends on z in another way, None
    if it does not depend on z."""
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


Noise = Array | lx.AbstractLinearOperator


def noise_shape(sigma: Noise | np.ndarray | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape (d, m) of σ, also for results of `jax.eval_shape`."""
    if isinstance(sigma, lx.AbstractLinearOperator):
        return sigma.out_size(), sigma.in_size()
    return jnp.shape(sigma)


def apply_noise(sigma: Noise, increment: Array) -> Array:
    """σ v, in O(d) for a diagonal operator."""
    if isinstance(sigma, lx.AbstractLinearOperator):
        return sigma.mv(increment)
    if 0 < sigma.shape[1] <= UNROLL:
        # XLA fuses a sum with other operations, but not a product with a small matrix per sample.
        columns = [sigma[:, j] * increment[j] for j in range(sigma.shape[1])]
        return sum(columns[1:], columns[0])
    return sigma @ increment


def apply_transposed(sigma: Noise, v: Array) -> Array:
    """σᵀ v, in O(d) for a diagonal operator."""
    if isinstance(sigma, lx.AbstractLinearOperator):
        return sigma.T.mv(v)
    if 0 < sigma.shape[0] <= UNROLL:
        rows = [sigma[i] * v[i] for i in range(sigma.shape[0])]
        return sum(rows[1:], rows[0])
    return v @ sigma


def solve_noise(sigma: Noise, v: Array) -> Array:
    """σ⁻¹ v for square σ, in O(d) if diagonal; infinite or NaN where σ is singular."""
    if has_diagonal(sigma):
        return v / noise_diagonal(sigma)
    return solve(noise_matrix(sigma)[None], v[None, :, None])[0, :, 0]


def noise_log_det(sigma: Noise) -> Array:
    """log |det σ| for square σ, in O(d) if diagonal."""
    if has_diagonal(sigma):
        return jnp.sum(jnp.log(jnp.abs(noise_diagonal(sigma))))
    return log_abs_det(noise_matrix(sigma)[None])[0]


def has_diagonal(sigma: Noise | jax.ShapeDtypeStruct) -> bool:
    """Whether σ is a diagonal operator, also for results of `jax.eval_shape`."""
    return (
        isinstance(sigma, lx.AbstractLinearOperator)
        and lx.is_diagonal(sigma)
        and len(set(noise_shape(sigma))) == 1
    )


def noise_diagonal(sigma: Noise) -> Array:
    """The entries of a σ for which `has_diagonal` is True."""
    assert isinstance(sigma, lx.AbstractLinearOperator)
    return lx.diagonal(sigma)


def plain_noise(sigma: Noise) -> Noise:
    """σ as a lineax diagonal operator if it is diagonal, else as a matrix."""
    return lx.DiagonalLinearOperator(noise_diagonal(sigma)) if has_diagonal(sigma) else noise_matrix(sigma)


def noise_row(sigma: Noise, k: Array | np.integer) -> Array:
    """Row k of σ: the effect of each Brownian motion on the k-th coordinate."""
    return noise_matrix(sigma)[k]


def noise_column(sigma: Noise, j: Array | np.integer) -> Array:
    """Column σⱼ: the effect of the j-th Brownian motion."""
    return noise_matrix(sigma)[:, j]


def noise_matrix(sigma: Noise) -> Array:
    """σ as a dense (d, m) array."""
    return sigma.as_matrix() if isinstance(sigma, lx.AbstractLinearOperator) else sigma


def noise_sizes(sigma: Noise) -> Array:
    """The size of the noise in each coordinate: the norms of the rows of σ, `(d,)`."""
    if has_diagonal(sigma):
        return jnp.abs(noise_diagonal(sigma))
    return jnp.sqrt(jnp.sum(noise_matrix(sigma) ** 2, axis=1))


Index = Array | np.integer
Total = TypeVar("Total")


def axis(z: Array, k: Index) -> Array:
    """The unit vector eₖ with the shape of z."""
    return jnp.zeros_like(z).at[k].set(1)


def sum_over(count: int, term: Callable[[Index], Total], zero: Total) -> Total:
    """`zero` + Σₖ term(k), for k < `count`."""
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    if count <= UNROLL:
        for k in np.arange(count):
            zero = add(zero, term(k))
        return zero
    return jax.tree.map(lambda terms: jnp.sum(terms, axis=0), jax.vmap(term)(jnp.arange(count)))


def diagonal_slopes(noise: Callable[[Array], Noise], z: Array) -> tuple[Array, Array]:
    """The entries sₖ of diagonal noise diag(s) and their derivatives ∂ₖsₖ, by one Jacobian–vector product if
    each sₖ depends on zₖ only, and by d products otherwise."""
    entries = lambda y: noise_diagonal(noise(y))
    if is_entrywise(entries, z):
        return jax.jvp(entries, (z,), (jnp.ones_like(z),))
    values, tangent = jax.linearize(entries, z)
    indices = jnp.arange(z.size)
    own = lambda k: jnp.where(indices == k, tangent(axis(z, k)), 0)
    return values, sum_over(z.size, own, jnp.zeros_like(z))
