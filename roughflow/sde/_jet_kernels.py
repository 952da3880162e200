"""Kernels for NVIDIA GPUs: a small tanh network, its derivatives along the axes, and the pull-back of both.

A batch goes through a network in blocks of rows, and what lies between its layers stays on the chip: memory
sees the points, the results and the weights alone. Written in Pallas, for its Triton backend, which takes
arrays whose sides are powers of two and cannot cut them into columns: points are lists of coordinates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Block = Array  # (rows,) or (rows, width)
# The first weights by rows, the hidden ones, the last ones by columns, the hidden biases.
Layers = tuple[list[Array], list[Array], list[Array], list[Array]]
# Rows of a block and warps that share it, as fast as any on an H200. One layer has no products of matrices,
# and a warp by itself need not wait for others to sum it up.
ONE_LAYER, LAYERS, BACKWARD = (32, 1), (64, 4), (16, 4)
WIDTHS = (16, 32, 64)
DEPTH, THIN = 4, 4  # hidden layers; inputs and outputs
STREAMS = 4  # products of one layer that fit into registers: a value and its derivatives


def fits(sizes: Sequence[int], order: int) -> bool:
    """Whether a network of these layers is small enough, for its derivatives up to `order`."""
    inputs, *hidden, outputs = sizes
    alike = len(set(hidden)) == 1 and hidden[0] in WIDTHS
    if not alike or len(hidden) > DEPTH or max(inputs, outputs) > THIN:
        return False
    return len(hidden) == 1 or count(inputs, order) <= STREAMS


def count(d: int, order: int) -> int:
    """How many there are of a value and its derivatives along d axes up to `order`."""
    return 1 + (d if order else 0) + (d * (d + 1) // 2 if order > 1 else 0)


def product(a: Block, b: Array, across: int = 0) -> Block:
    """a b, or a bᵀ across b's columns, by the tensor cores, which take bfloat16: three products of a number's
    first and second eight bits leave an error of 1e-5."""
    (a, fine_a), (b, fine_b) = _halves(a), _halves(b)
    return _dot(fine_a, b, 1, across) + _dot(a, fine_b, 1, across) + _dot(a, b, 1, across)


def _dot(a: Array, b: Array, *over: int) -> Array:
    dimensions = (((over[0],), (over[1],)), ((), ()))
    # "default" are ten bits of a float32: what the tensor cores take of it.
    how = jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dimensions, precision=how, preferred_element_type=jnp.float32)


def _halves(x: Array) -> tuple[Array, Array]:
    coarse = x.astype(jnp.bfloat16)
    return coarse, (x - coarse.astype(x.dtype)).astype(jnp.bfloat16)


@jax.custom_vjp
def product_to_pull_back(a: Block, b: Array) -> Block:
    """`product` with derivatives that run in a kernel, which cannot hold a custom rule by itself.

    Those in b are sums over the batch, in which rounding to ten bits cancels: on the paper's model it moves a
    gradient by 2e-6 of its size with a thousand points.
    """
    return product(a, b)


product_to_pull_back.defvjp(
    lambda a, b: (product(a, b), (a, b)),
    lambda kept, ct: (product(ct, kept[1], across=1), _dot(kept[0], ct, 0, 0)),
)


def jet_of_block(layers: Layers, z: list[Block], order: int, times: Callable) -> list[Block]:
    """The value of each output, then its derivatives along axis k, then those along k and i ≤ k.

    With p = x W + b of a layer, a = tanh p and s = 1 − a²: ∂ₖa = s ∂ₖp and ∂ₖᵢa = s ∂ₖᵢp − 2a s ∂ₖp ∂ᵢp.
    """
    # Repeated for each row once: a pull-back adds up what all uses make of a weight before it sums over rows,
    # for which threads must wait for each other.
    wide = lambda rows: [jnp.broadcast_to(row[None], (len(z[0]), len(row))) for row in rows]
    first, hidden, last, biases = wide(layers[0]), layers[1], wide(layers[2]), wide(layers[3])
    p = biases[0] + sum(z[k][:, None] * first[k] for k in range(len(z)))
    slopes = first if order else []
    jet = _activated(p, slopes, [jnp.zeros_like(p)] * (count(len(z), order) - 1 - len(slopes)))
    for weight, bias in zip(hidden, biases[1:], strict=True):
        a, ahead, bent = ([times(x, weight) for x in xs] for xs in jet)
        jet = _activated(a[0] + bias, ahead, bent)
    return [jnp.sum(x * w, axis=1) for xs in jet for x in xs for w in last]


def _activated(p: Block, slopes: list[Block], bends: list[Block]) -> tuple[list[Block], ...]:
    a = jnp.tanh(p)
    s = 1 - a * a
    ahead = [s * slope for slope in slopes]
    pairs = [(k, i) for k in range(len(slopes)) for i in range(k + 1)] if bends else []
    bent = [s * bend - 2 * a * ahead[k] * slopes[i] for bend, (k, i) in zip(bends, pairs, strict=True)]
    return [a], ahead, bent


def forward(z: Array, weights: Sequence[Array], biases: Sequence[Array], order: int, **how: Any) -> Array:
    """The jets `(B, m, n)` of a network at points `(B, d)`."""
    from jax.experimental import pallas as pl

    (batch, d), n = z.shape, weights[-1].shape[1]
    layers, (rows, warps) = _laid_out(weights, biases), LAYERS if len(biases) > 1 else ONE_LAYER
    z = _padded(z, rows)

    def kernel(z_ref: Any, *refs: Any) -> None:
        at = pl.ds(pl.program_id(0) * rows, rows)
        found = jet_of_block(_load(refs[:-1]), [z_ref[at, k] for k in range(d)], order, product)
        for j, column in enumerate(found):
            refs[-1][j, at] = column

    shape = jax.ShapeDtypeStruct((count(d, order) * n, len(z)), z.dtype)
    jets = _call(kernel, len(z) // rows, warps, out_shape=shape, **how)(z, *layers)
    return jnp.reshape(jets[:, :batch].T, (batch, -1, n))


def pull_back(
    z: Array, weights: Sequence[Array], biases: Sequence[Array], ct: Array, order: int, **how: Any
) -> tuple[Array, ...]:
    """What cotangents of the jets `(B, m, n)` make of the points, the weights and the biases.

    Each of as many programs as run at once goes through its share of the batch, and keeps sums for the
    weights as it goes.
    """
    from jax.experimental import pallas as pl

    (batch, d), layers, (rows, warps) = z.shape, _laid_out(weights, biases), BACKWARD
    z, ct = _padded(z, rows), _padded(jnp.reshape(ct, (batch, -1)), rows).T
    blocks = len(z) // rows
    programs = min(blocks, at_once())

    def kernel(z_ref: Any, ct_ref: Any, *refs: Any) -> None:
        held, (z_out, *outs) = refs[: len(layers)], refs[len(layers) :]
        network, place = _load(held), pl.program_id(0)
        jet = lambda network, z: jet_of_block(network, z, order, product_to_pull_back)

        def block(i: Array, total: Any) -> Any:
            at = pl.ds((place + i * programs) * rows, rows)
            _, pull = jax.vjp(jet, network, [z_ref[at, k] for k in range(d)])
            ours, points = pull([ct_ref[j, at] for j in range(len(ct))])
            for k in range(d):
                z_out[at, k] = points[k]
            return jax.tree.map(jnp.add, total, ours)

        mine = (blocks - place + programs - 1) // programs
        _store(outs, jax.lax.fori_loop(0, mine, block, jax.tree.map(jnp.zeros_like, network)))

    whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0,) * a.ndim)
    own = lambda a: pl.BlockSpec((None, *a.shape), lambda i: (i, *(0,) * a.ndim))
    shapes = [jax.ShapeDtypeStruct((programs, *a.shape), a.dtype) for a in layers]
    z_ct, *parts = _call(
        kernel,
        programs,
        warps,
        in_specs=[whole(a) for a in (z, ct, *layers)],
        out_specs=[whole(z), *map(own, layers)],
        out_shape=[jax.ShapeDtypeStruct(z.shape, z.dtype), *shapes],
        **how,
    )(z, ct, *layers)
    first, *hidden, last, all_biases = (jnp.sum(part, axis=0) for part in parts)
    return (z_ct[:batch], first, *hidden, last.T, *all_biases)


def at_once() -> int:
    """How many programs of a pull-back a GPU runs at once: two on each of its multiprocessors."""
    return 2 * getattr(jax.devices()[0], "core_count", 64)


def _laid_out(weights: Sequence[Array], biases: Sequence[Array]) -> tuple[Array, ...]:
    """Arrays whose last side is the network's width."""
    return (*weights[:-1], weights[-1].T, jnp.stack(biases))


def _load(refs: Sequence[Any]) -> Layers:
    by_rows = lambda ref: [ref[k, :] for k in range(ref.shape[0])]
    first, *hidden, last, biases = refs
    return by_rows(first), [ref[...] for ref in hidden], by_rows(last), by_rows(biases)


def _store(refs: Sequence[Any], layers: Layers) -> None:
    first, *hidden, last, biases = refs
    for ref, total in zip(hidden, layers[1], strict=True):
        ref[...] = total
    for ref, totals in ((first, layers[0]), (last, layers[2]), (biases, layers[3])):
        for k, total in enumerate(totals):
            ref[k, :] = total


def _padded(rows: Array, multiple: int) -> Array:
    return jnp.pad(rows, ((0, -len(rows) % multiple), (0, 0)))


def _call(kernel: Callable, programs: int, warps: int, **how: Any) -> Callable:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # The name before JAX 0.8.
    settings = getattr(triton, "CompilerParams", None) or getattr(triton, "TritonCompilerParams")  # noqa: B009
    parameters = settings(num_warps=warps, num_stages=1)
    return pl.pallas_call(kernel, grid=(programs,), compiler_params=parameters, **how)
