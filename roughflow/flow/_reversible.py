"""A solve that can be undone step by step, so that its gradient needs no stored states.

McCallum & Foster (2024): any one-step method with increment Ψ becomes reversible on two copies y, w of
the state, both started at z₀,

    y′ = λ y + (1 − λ) w + Ψ(s → s′, w),        w′ = w − Ψ(s′ → s, y′),

undone by w = w′ + Ψ(s′ → s, y′) and y = (y′ − (1 − λ) w − Ψ(s → s′, w)) / λ.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._field import Field
from ._outcome import Outcome, Status, start_of
from ._runge_kutta import Span, runge_kutta

# The two copies, each a state (B, d) and the integral of the divergence (B,).
Pair = tuple[tuple[Array, Array], tuple[Array, Array]]


@eqx.filter_custom_vjp
def reversible_scan(
    differentiable: tuple[Field, Array], spans: Span, method: diffrax.AbstractERK, coupling: float
) -> Outcome:
    """Solve from z₀ over consecutive spans; differentiable in the field and z₀, in reverse mode."""
    return _solve(differentiable, spans, method, coupling)[0]


def _solve(
    differentiable: tuple[Field, Array], spans: Span, method: diffrax.AbstractERK, coupling: float
) -> tuple[Outcome, Pair]:
    field, z = differentiable
    start = start_of(z)
    copy = (z, start.log_change)

    def step(carry: tuple[Pair, Outcome], span: Span) -> tuple[tuple[Pair, Outcome], None]:
        pair, told = carry
        pair, status, time, culprit = _advance(field, pair, span, method, coupling)
        first = told.status == Status.FINE
        broke = (first & (status == Status.NON_FINITE))[:, None]
        told = Outcome(
            jnp.where(broke, culprit, told.z),
            told.log_change,
            jnp.where(first, status, told.status),
            jnp.where(first, time, told.time),
        )
        return (pair, told), None

    (pair, told), _ = jax.lax.scan(step, ((copy, copy), start), spans)
    (z, log_change), _ = pair
    z = jnp.where((told.status == Status.NON_FINITE)[:, None], told.z, z)
    return Outcome(z, log_change, told.status, told.time), pair


def _advance(
    field: Field, pair: Pair, span: Span, method: diffrax.AbstractERK, coupling: float
) -> tuple[Pair, Array, Array, Array]:
    y, w = pair
    there = runge_kutta(field, span, w[0], method)
    y = jax.tree.map(lambda a, b, c: coupling * a + (1 - coupling) * b + c, y, w, there[:2])
    back = runge_kutta(field, (span[1], span[0]), y[0], method)
    w = jax.tree.map(jnp.subtract, w, back[:2])
    first = there.status == Status.FINE
    status = jnp.where(first, back.status, there.status)
    time = jnp.where(first, back.time, there.time)
    return (y, w), status, time, jnp.where(first[:, None], back.culprit, there.culprit)


def _undo(field: Field, pair: Pair, span: Span, method: diffrax.AbstractERK, coupling: float) -> Pair:
    y, w = pair
    back = runge_kutta(field, (span[1], span[0]), y[0], method)
    w = jax.tree.map(jnp.add, w, back[:2])
    there = runge_kutta(field, span, w[0], method)
    y = jax.tree.map(lambda a, b, c: (a - (1 - coupling) * b - c) / coupling, y, w, there[:2])
    return y, w


@reversible_scan.def_fwd
def _forward(perturbed, differentiable, spans, method, coupling):
    del perturbed
    return _solve(differentiable, spans, method, coupling)


@reversible_scan.def_bwd
def _backward(pair, gradient, perturbed, differentiable, spans, method, coupling):
    """Undo a step, differentiate it, go on to the one before."""
    del perturbed
    field, _ = differentiable
    dynamic, static = eqx.partition(field, eqx.is_inexact_array)
    zero = jax.tree.map(jnp.zeros_like, pair[1])
    d_z = zero[0] if gradient.z is None else gradient.z
    d_log = zero[1] if gradient.log_change is None else gradient.log_change

    def step(carry, span):
        pair, d_pair, d_dynamic = carry
        pair = _undo(field, pair, span, method, coupling)

        def advance(dynamic, pair):
            return _advance(eqx.combine(dynamic, static), pair, span, method, coupling)[0]

        _, pull = jax.vjp(advance, dynamic, pair)
        more, d_pair = pull(d_pair)
        return (pair, d_pair, jax.tree.map(jnp.add, d_dynamic, more)), None

    carry = (pair, ((d_z, d_log), zero), jax.tree.map(jnp.zeros_like, dynamic))
    (_, (d_y, d_w), d_dynamic), _ = jax.lax.scan(step, carry, spans, reverse=True)
    return d_dynamic, d_y[0] + d_w[0]
