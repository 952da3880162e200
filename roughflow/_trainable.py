"""Which numbers of a model are its parameters."""

import dataclasses
from typing import Any

import equinox as eqx
import jax


def trainable(tree: Any) -> Any:
    """For each leaf, whether it is a parameter: a floating-point array, and not of a part that is just given.

    A gradient of zero would not do to hold a target still: an optimiser that decays weights moves them all.
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
