"""Work for some of the points of a batch, at a cost in proportion to how many they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def for_some(chosen: Array, function: Callable[[Any], Any], batch: Any, old: Any, block: int) -> Any:
    """`old`, with the entries that are `chosen` replaced by `function(batch)`.

    `batch` and `old` are pytrees with one entry of the leading axis per point. The chosen ones are gathered
    `block` at a time, in a loop on the device that ends with the last of them: which they are need not be
    known when the program is compiled, so the same work is done inside a `jit` and outside.
    """
    size = len(chosen)
    block = min(block, size)
    order = jnp.argsort(~chosen)
    count = jnp.sum(chosen)
    order = jnp.concatenate([order, jnp.zeros(block, order.dtype)])

    def step(i: Array, new: Any) -> Any:
        places = jax.lax.dynamic_slice_in_dim(order, i * block, block)
        result = function(jax.tree.map(lambda a: a[places], batch))
        # Entries beyond the last chosen one are written to no place.
        target = jnp.where(i * block + jnp.arange(block) < count, places, size)
        return jax.tree.map(lambda a, b: a.at[target].set(b, mode="drop"), new, result)

    return jax.lax.fori_loop(0, -(-count // block), step, old)


def in_blocks(
    function: Callable[[Any], Any], batch: Any, count: Array | np.ndarray | None, block: int
) -> Any:
    """`function(batch)` for the first `count` entries, which the others repeat: `block` of them at a time, at
    a cost in proportion to `count`, which need not be known when the program is compiled. For all at once if
    it is None.

    Unlike `for_some` it has derivatives backwards: its loop has a fixed length, and skips empty blocks.
    """
    if count is None:
        return function(batch)
    size = len(jax.tree.leaves(batch)[0])
    parts = jax.tree.map(lambda a: jnp.reshape(a, (size // block, block, *a.shape[1:])), batch)
    once = jax.jit(function)  # traced once, for its shapes and for its work
    like = jax.eval_shape(once, jax.tree.map(lambda a: a[0], parts))

    def step(_, at: tuple[Array, Any]) -> tuple[None, Any]:
        first, part = at
        skip = lambda _: jax.tree.map(lambda a: jax.lax.full_like(a, 0), like)
        return None, jax.lax.cond(first < count, once, skip, part)

    _, done = jax.lax.scan(step, None, (jnp.arange(0, size, block), parts))
    repeated = jnp.arange(size) % count
    return jax.tree.map(lambda a: jnp.reshape(a, (size, *a.shape[2:]))[repeated], done)
