"""A small network's jets: its value and its derivatives along the axes of z, worked out together.

On a GPU `jets` is a kernel (`_jet_kernels`), and so is its pull-back. JAX differentiates a network once for
the correction, once for the divergence and once to train it, inside a `vmap`, so the kernels are primitives
with rules of their own: a derivative in z is a jet of the next order, a derivative in the weights a linear
map whose transpose is the pull-back kernel, and a `vmap` one more axis of points. Anything else (third
derivatives, weights that differ from point to point) goes the plain way, which is also what tests compare to.
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

from . import _jet_kernels as kernels

HIGHEST_ORDER = 2
# What `exact_products` says where the user says nothing. One who says "highest" has plain products.
PRECISIONS = (None, "float32")


def has_kernel(weights: Sequence[Array], z: Array) -> bool:
    """Whether a tanh network is best evaluated by a kernel: on one GPU of NVIDIA's that knows bfloat16, and
    in float32."""
    if jax.default_backend() != "gpu" or jax.device_count() > 1 or not _knows_bfloat16():
        return False
    said = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    single = all(a.dtype == jnp.float32 for a in (z, *weights))
    return single and said in PRECISIONS and weights[0].ndim == 2 and kernels.fits(_sizes(weights), 0)


def _knows_bfloat16() -> bool:
    """GPUs of other makers have no number here, those before Ampere a smaller one."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return capability[:1].isdigit() and float(capability) >= 8.0


def network(z: Array, weights: Sequence[Array], biases: Sequence[Array]) -> Array:
    """The last layer's products for z `(d,)`: the network's value but for its last bias."""
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
    """How jets move with the points and the weights: the second half of the arguments are tangents."""
    half = len(arguments) // 2
    return jax.jvp(functools.partial(plain_jets, order=order), arguments[:half], arguments[half:])[1]


def plain_pull_back(*arguments: Array, order: int) -> tuple[Array, ...]:
    """The transpose of that: what cotangents of the jets, the last argument, make of points and weights."""
    *primals, ct = arguments
    return jax.vjp(functools.partial(plain_jets, order=order), *primals)[1]((ct,))


def fused_jets(z: Array, *parameters: Array, order: int) -> tuple[Array]:
    weights, biases = _split(parameters)
    if not kernels.fits(_sizes(weights), order):
        return plain_jets(z, *parameters, order=order)
    jets = kernels.forward(jnp.reshape(z, (-1, z.shape[-1])), weights, biases, order)
    return (jnp.reshape(jets, (*z.shape[:-1], *jets.shape[1:])),)


def fused_pull_back(*arguments: Array, order: int) -> tuple[Array, ...]:
    z, *parameters, ct = arguments
    weights, biases = _split(parameters)
    if not kernels.fits(_sizes(weights), order):
        return plain_pull_back(*arguments, order=order)
    points, cts = jnp.reshape(z, (-1, z.shape[-1])), jnp.reshape(ct, (-1, *ct.shape[-2:]))
    z_ct, *rest = kernels.pull_back(points, weights, biases, cts, order)
    return (jnp.reshape(z_ct, z.shape), *rest)


def _split(parameters: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
    """The weights of all layers, and the biases of all but the last."""
    layers = len(parameters) // 2 + 1
    return parameters[:layers], parameters[layers:]


def _sizes(weights: Sequence[Array]) -> tuple[int, ...]:
    return (weights[0].shape[0], *(weight.shape[1] for weight in weights))


def _primitive(name: str, plain: Callable[..., tuple[Array, ...]]) -> Primitive:
    """An operation that is `plain` in every respect; what is better is registered afterwards."""
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
    """Where in a jet the derivative along axis i of its k-th row is, `[k][i]`."""
    first = [[1 + i for i in range(d)]]
    pair = lambda k, i: 1 + d + max(k, i) * (max(k, i) + 1) // 2 + min(k, i)
    return first + [[pair(k, i) for i in range(d)] for k in range(d)] * (order > 0)


def _transpose(cts: Sequence[Any], *arguments: Any, order: int) -> list[Any]:
    half = len(arguments) // 2
    found = pull_back_p.bind(*arguments[:half], ad.instantiate_zeros(cts[0]), order=order)
    wanted = map(ad.is_undefined_primal, arguments[half:])
    return [None] * half + [ct if want else None for ct, want in zip(found, wanted, strict=True)]


def _batch_points(primitive: Primitive, plain: Callable, copies: int) -> Callable:
    """A rule for a `vmap` over points alone, or over points and their tangents: arguments come in so many
    copies, points first."""

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
