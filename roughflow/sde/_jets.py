"""Jets of a small network: its value and its derivatives along the axes of z, computed together.

On a GPU, `jets` and its pull-back are kernels. JAX differentiates a network for the correction, for the
divergence and for training, inside a `vmap`, so the kernels are primitives with their own rules: a derivative
in z is a jet of the next order, a derivative in the weights is a linear map whose transpose is the pull-back
kernel, and a `vmap` adds an axis of points. All other cases (third derivatives, weights that differ between
points) use a plain JAX implementation, against which the tests check the kernels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Block = Array  # (rows,) or (rows, width)
# The rows of the first weight matrix, the weight matrices between hidden layers, the columns of the last
# weight matrix, and the biases of the hidden layers.
Layers = tuple[list[Array], list[Array], list[Array], list[Array]]
# Numbers of rows and of warps per block, tuned on an H200. A network with one hidden layer has no matrix
# products, and with a single warp a reduction need not wait for other warps.
ONE_LAYER, LAYERS, BACKWARD = (32, 1), (64, 4), (16, 4)
WIDTHS = (16, 32, 64)
DEPTH, THIN = 4, 4  # maximum number of hidden layers, and of inputs or outputs
# Maximum number of products per layer (for a value and its derivatives) that fit in registers.
MAX_PRODUCTS = 4


def fits(sizes: Sequence[int], order: int) -> bool:
    """Whether a network with layers of the given sizes is small enough for the kernel with derivatives up to
    `order`."""
    inputs, *hidden, outputs = sizes
    alike = len(set(hidden)) == 1 and hidden[0] in WIDTHS
    if not alike or len(hidden) > DEPTH or max(inputs, outputs) > THIN:
        return False
    return len(hidden) == 1 or count(inputs, order) <= MAX_PRODUCTS


def count(d: int, order: int) -> int:
    """The number of derivatives along d axes up to `order`, including the value."""
    return 1 + (d if order else 0) + (d * (d + 1) // 2 if order > 1 else 0)


def product(a: Block, b: Array, across: int = 0) -> Block:
    """a b, or a bᵀ if `across` is 1, on tensor cores. Each float is split into two bfloat16 parts; three
    products of these parts give a relative error of 1e-5."""
    (a, fine_a), (b, fine_b) = _halves(a), _halves(b)
    return _dot(fine_a, b, 1, across) + _dot(a, fine_b, 1, across) + _dot(a, b, 1, across)


def _dot(a: Array, b: Array, *over: int) -> Array:
    dimensions = (((over[0],), (over[1],)), ((), ()))
    # The precision "default" uses ten mantissa bits of a float32.
    how = jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dimensions, precision=how, preferred_element_type=jnp.float32)


def _halves(x: Array) -> tuple[Array, Array]:
    coarse = x.astype(jnp.bfloat16)
    return coarse, (x - coarse.astype(x.dtype)).astype(jnp.bfloat16)


@jax.custom_vjp
def product_to_pull_back(a: Block, b: Array) -> Block:
    """`product` with a custom derivative rule, for use in a pull-back kernel.

    Derivatives with respect to b are sums over the batch, computed with ten mantissa bits because rounding
    errors average out: with a thousand points, the relative error of a gradient of the model of Hodgkinson et
    al. (2020) is 2e-6.
    """
    return product(a, b)


product_to_pull_back.defvjp(
    lambda a, b: (product(a, b), (a, b)),
    lambda kept, ct: (product(ct, kept[1], across=1), _dot(kept[0], ct, 0, 0)),
)


def jet_of_block(layers: Layers, z: list[Block], order: int, times: Callable) -> list[Block]:
    """The values of the outputs, then their derivatives along each axis k, then those along k and i ≤ k.

    For a layer with p = x W + b, a = tanh p and s = 1 − a²: ∂ₖa = s ∂ₖp and ∂ₖᵢa = s ∂ₖᵢp − 2a s ∂ₖp ∂ᵢp.
    """
    # Broadcast to rows once, so that a pull-back adds all contributions to a weight before its single
    # reduction over rows, which synchronises threads.
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
    """Pull cotangents of the jets, `(B, m, n)`, back to the points, the weights and the biases.

    Each program processes a part of the batch and accumulates the gradients of the weights; all programs run
    concurrently.
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
    """Number of pull-back programs that a GPU runs concurrently: two per multiprocessor."""
    return 2 * getattr(jax.devices()[0], "core_count", 64)


def _laid_out(weights: Sequence[Array], biases: Sequence[Array]) -> tuple[Array, ...]:
    """The parameters as arrays whose last axis is the width of the network."""
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

    # Before JAX 0.8 the class was called TritonCompilerParams.
    settings = getattr(triton, "CompilerParams", None) or getattr(triton, "TritonCompilerParams")  # noqa: B009
    parameters = settings(num_warps=warps, num_stages=1)
    return pl.pallas_call(kernel, grid=(programs,), compiler_params=parameters, **how)


HIGHEST_ORDER = 2
# Values of jax_default_matmul_precision for which kernels are used: JAX's default, and that of
# `exact_products`. For "highest", the plain implementation is used.
PRECISIONS = (None, "float32")


def has_kernel(weights: Sequence[Array], z: Array) -> bool:
    """Whether a kernel can evaluate this tanh network. This requires float32 and a single NVIDIA GPU with
    bfloat16 support."""
    if jax.default_backend() != "gpu" or jax.device_count() > 1 or not _knows_bfloat16():
        return False
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    single = all(a.dtype == jnp.float32 for a in (z, *weights))
    return single and precision in PRECISIONS and weights[0].ndim == 2 and fits(_sizes(weights), 0)


def _knows_bfloat16() -> bool:
    """Whether the GPU supports bfloat16, as NVIDIA's GPUs do from compute capability 8 (Ampere)."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return capability[:1].isdigit() and float(capability) >= 8.0


def network(z: Array, weights: Sequence[Array], biases: Sequence[Array]) -> Array:
    """The output of the last layer for z `(d,)`, without its bias."""
    return jets_p.bind(z, *weights, *biases, order=0)[0][0]


def plain_jets(z: Array, *parameters: Array, order: int) -> tuple[Array]:
    """The value, its derivatives along each axis k, and those along k and i ≤ k: `(..., m, n)` for points
    `(..., d)`."""
    weights, biases = _split(parameters)

    def value(y: Array) -> Array:
        for weight, bias in zip(weights[:-1], biases, strict=True):
            y = jnp.tanh(y @ weight + jnp.expand_dims(bias, range(y.ndim - 1)))
        return y @ weights[-1]

    axes = np.eye(z.shape[-1], dtype=z.dtype)
    along = lambda f, axis: lambda y: jax.jvp(f, (y,), (jnp.broadcast_to(axis, y.shape),))[1]
    first = [along(value, axis) for axis in axes] if order else []
    second = [along(first[k], axes[i]) for k in range(len(first)) for i in range(k + 1)] if order > 1 else []
    with jax.default_matmul_precision("highest"):
        return (jnp.stack([f(z) for f in (value, *first, *second)], axis=-2),)


def plain_tangent(*arguments: Array, order: int) -> tuple[Array]:
    """The derivative of the jets with respect to points, weights and biases; the second half of the arguments
    consists of tangents."""
    half = len(arguments) // 2
    return jax.jvp(functools.partial(plain_jets, order=order), arguments[:half], arguments[half:])[1]


def plain_pull_back(*arguments: Array, order: int) -> tuple[Array, ...]:
    """The transpose of `plain_tangent`: maps cotangents of the jets, the last argument, to cotangents of
    points, weights and biases."""
    *primals, ct = arguments
    return jax.vjp(functools.partial(plain_jets, order=order), *primals)[1]((ct,))


def fused_jets(z: Array, *parameters: Array, order: int) -> tuple[Array]:
    weights, biases = _split(parameters)
    if not fits(_sizes(weights), order):
        return plain_jets(z, *parameters, order=order)
    jets = forward(jnp.reshape(z, (-1, z.shape[-1])), weights, biases, order)
    return (jnp.reshape(jets, (*z.shape[:-1], *jets.shape[1:])),)


def fused_pull_back(*arguments: Array, order: int) -> tuple[Array, ...]:
    z, *parameters, ct = arguments
    weights, biases = _split(parameters)
    if not fits(_sizes(weights), order):
        return plain_pull_back(*arguments, order=order)
    points, cts = jnp.reshape(z, (-1, z.shape[-1])), jnp.reshape(ct, (-1, *ct.shape[-2:]))
    z_ct, *rest = pull_back(points, weights, biases, cts, order)
    return (jnp.reshape(z_ct, z.shape), *rest)


def _split(parameters: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
    """The weights of all layers, and the biases of all but the last."""
    layers = len(parameters) // 2 + 1
    return parameters[:layers], parameters[layers:]


def _sizes(weights: Sequence[Array]) -> tuple[int, ...]:
    return (weights[0].shape[0], *(weight.shape[1] for weight in weights))


def _primitive(name: str, plain: Callable[..., tuple[Array, ...]]) -> Primitive:
    """A primitive with rules derived from the function `plain`; faster rules replace some of them below."""
    primitive = Primitive(f"roughflow_{name}")
    primitive.multiple_results = True

    @functools.cache
    def program(order: int) -> Callable[..., list[Array]]:
        return jax.jit(lambda *arguments: primitive.bind(*arguments, order=order))

    @primitive.def_abstract_eval
    def _(*avals: Any, order: int) -> list[Any]:
        like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        out = jax.eval_shape(functools.partial(plain, order=order), *like)
        return [ShapedArray(one.shape, one.dtype) for one in out]

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, order: int) -> tuple[Any, Any]:
        known = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(functools.partial(plain, order=order), tuple(primals), known)

    primitive.def_impl(lambda *arguments, order: program(order)(*arguments))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = functools.partial(_batch, plain)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    return primitive


def _batch(plain: Callable, arguments: Sequence[Array], axes: Sequence[int | None], *, order: int):
    out = jax.vmap(functools.partial(plain, order=order), in_axes=tuple(axes))(*arguments)
    return out, [0] * len(out)


jets_p = _primitive("jets", plain_jets)
tangent_p = _primitive("jets_tangent", plain_tangent)
pull_back_p = _primitive("jets_pull_back", plain_pull_back)
mlir.register_lowering(jets_p, mlir.lower_fun(fused_jets, multiple_results=True), platform="cuda")
mlir.register_lowering(pull_back_p, mlir.lower_fun(fused_pull_back, multiple_results=True), platform="cuda")


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, order: int) -> tuple[Any, Any]:
    z, *parameters = primals
    if order < HIGHEST_ORDER and all(type(tangent) is ad.Zero for tangent in tangents[1:]):
        (higher,) = jets_p.bind(z, *parameters, order=order + 1)
        d = z.shape[-1]
        rows = _derivatives(d, order)
        along = lambda i: jnp.stack([higher[..., row[i], :] for row in rows], axis=-2)
        changes = [tangents[0][..., None, None, i] * along(i) for i in range(d)]
        return [higher[..., : len(rows), :]], [sum(changes[1:], changes[0])]
    known = map(ad.instantiate_zeros, tangents)
    return jets_p.bind(*primals, order=order), tangent_p.bind(*primals, *known, order=order)


def _derivatives(d: int, order: int) -> list[list[int]]:
    """Entry `[k][i]` is the index, in a jet, of the derivative of its k-th row along axis i."""
    first = [[1 + i for i in range(d)]]
    pair = lambda k, i: 1 + d + max(k, i) * (max(k, i) + 1) // 2 + min(k, i)
    return first + [[pair(k, i) for i in range(d)] for k in range(d)] * (order > 0)


def _transpose(cts: Sequence[Any], *arguments: Any, order: int) -> list[Any]:
    half = len(arguments) // 2
    found = pull_back_p.bind(*arguments[:half], ad.instantiate_zeros(cts[0]), order=order)
    wanted = map(ad.is_undefined_primal, arguments[half:])
    return [None] * half + [ct if want else None for ct, want in zip(found, wanted, strict=True)]


def _batch_points(primitive: Primitive, plain: Callable, copies: int) -> Callable:
    """A batching rule for a `vmap` over points (`copies=1`), or over points and their tangents (`copies=2`).
    The arguments consist of `copies` sequences of points, weights and biases."""

    def batch(arguments: Sequence[Array], axes: Sequence[int | None], *, order: int):
        points = range(0, len(arguments), len(arguments) // copies)
        if any(axis is not None for place, axis in enumerate(axes) if place not in points):
            return _batch(plain, arguments, axes, order=order)
        size = next(a.shape[axis] for a, axis in zip(arguments, axes, strict=True) if axis is not None)
        moved = list(arguments)
        for place in points:
            a, axis = arguments[place], axes[place]
            same = axis is None
            moved[place] = jnp.broadcast_to(a, (size, *a.shape)) if same else jnp.moveaxis(a, axis, 0)
        return primitive.bind(*moved, order=order), [0]

    return batch


ad.primitive_jvps[jets_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[jets_p] = _batch_points(jets_p, plain_jets, 1)
batching.primitive_batchers[tangent_p] = _batch_points(tangent_p, plain_tangent, 2)
