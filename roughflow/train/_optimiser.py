"""The optimiser: gradient clipping, learning-rate schedule, parameter averaging."""

import functools
import math
from collections import defaultdict
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from .._programs import jit

ADAM = optax.scale_by_adam()  # a single object, so that a second fit reuses its compiled program
MAX_WARM_UP_STEPS = 100  # maximum number of steps of linear warm-up


class Rate(eqx.Module):
    """A learning rate with linear warm-up and cosine decay to zero."""

    peak: float
    warm: float
    steps: float

    def __call__(self, count: Array) -> Array:
        rising = count / jnp.maximum(self.warm, 1.0)
        fallen = (count - self.warm) / (self.steps + 1 - self.warm)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(fallen, 0, 1)))
        return self.peak * jnp.where(count < self.warm, rising, falling)


class Optimiser(eqx.Module):
    """An update of the parameters from a gradient, with the interface of optax.

    Hyperparameters are fields, not closures, so changing the rate or the limit does not cause recompilation.
    """

    transform: optax.GradientTransformation
    rate: Rate | None  # None for a transformation with its own learning rate
    clip: float | None
    decay: float | None  # decay per step of the average of the parameters; None for no average

    def init(self, parameters: Any) -> tuple[Any, Array, Any]:
        """The state of the transformation, the number of steps, and the average."""
        average = None if self.decay is None else jax.tree.map(jnp.copy, parameters)
        return self.transform.init(parameters), jnp.asarray(0), average

    def step(
        self, slope: Any, state: tuple[Any, Array, Any], parameters: Any, share: Array
    ) -> tuple[Any, Any]:
        """The parameters and the state after a step along the gradient `slope`, with the learning rate
        multiplied by `share`."""
        inner, count, average = state
        if self.clip is not None:
            slope, _ = optax.clip_by_global_norm(self.clip).update(slope, optax.EmptyState())  # pyright: ignore[reportArgumentType]
        updates, inner = self.transform.update(slope, inner, parameters)
        share = share if self.rate is None else -share * self.rate(count)
        updates = jax.tree.map(lambda u: share.astype(u.dtype) * u, updates)
        parameters = optax.apply_updates(parameters, updates)
        if self.decay is not None:
            # The average decays faster at first, so that it soon forgets the initial parameters.
            decay = jnp.minimum(self.decay, (1 + count) / (10 + count))
            mix = lambda old, new: old + (1 - decay).astype(old.dtype) * (new - old)
            average = jax.tree.map(mix, average, parameters)
        return parameters, (inner, count + 1, average)

    def packing(self, parameters: Any) -> "Packing":
        """The form in which parameters and state are carried from step to step: packed if the transformation
        is elementwise."""
        return Packing(None if self.rate is None else parameters)

    def back_to(self, parameters: Any, state: tuple[Any, Array, Any]) -> tuple[Any, Array, Any]:
        """The state of a run that continues from these parameters."""
        inner, count, _ = state
        return inner, count, None if self.decay is None else parameters

    def settled(self, parameters: Any, state: tuple[Any, Array, Any]) -> Any:
        """The parameters to validate and return: the average, if there is one."""
        return parameters if self.decay is None else state[2]


@functools.partial(jit, level=0)
def start_of(optimiser: Optimiser, parameters: Any) -> tuple[Any, Array, Any]:
    """The initial state of a run."""
    return optimiser.init(parameters)


class Packing:
    """Packs pytrees with the structure of the parameters into one vector per dtype. An update then needs a
    few operations in total instead of a few per array, which would dominate compilation time."""

    def __init__(self, like: Any):
        self.leaves, self.structure = jax.tree.flatten(like)

    def __call__(self, tree: Any) -> Any:
        """Pack every part with the structure of the parameters; a single array is left unchanged."""
        return tree if len(self.leaves) < 2 else jax.tree.map(self._packed, tree, is_leaf=self._alike)

    def undone(self, tree: Any) -> Any:
        if len(self.leaves) < 2:
            return tree
        return jax.tree.map(self._unpacked, tree, is_leaf=lambda part: isinstance(part, _Packed))

    def _alike(self, part: Any) -> bool:
        return jax.tree.structure(part) == self.structure

    def _packed(self, part: Any) -> Any:
        if not self._alike(part):
            return part
        by_type: dict[np.dtype, list[Array]] = {}
        for leaf in jax.tree.leaves(part):
            by_type.setdefault(leaf.dtype, []).append(jnp.ravel(leaf))
        return _Packed([jnp.concatenate(leaves) for leaves in by_type.values()])

    def _unpacked(self, part: Any) -> Any:
        if not isinstance(part, _Packed):
            return part
        vectors, done, leaves = {vector.dtype: vector for vector in part.vectors}, defaultdict(int), []
        for leaf in self.leaves:
            start = done[leaf.dtype]
            done[leaf.dtype] = start + leaf.size
            leaves.append(jnp.reshape(vectors[leaf.dtype][start : start + leaf.size], leaf.shape))
        return jax.tree.unflatten(self.structure, leaves)


class _Packed(eqx.Module):
    vectors: list[Array]


def make_optimiser(
    transform: optax.GradientTransformation | None,
    learning_rate: float,
    steps: int,
    clip: float,
    average: float,
) -> Optimiser:
    """Adam with warm-up and decay, or the given optax transformation."""
    rate = None
    if transform is None:
        rate = Rate(learning_rate, float(min(MAX_WARM_UP_STEPS, steps // 10)), float(steps))
    limit = clip if math.isfinite(clip) else None
    return Optimiser(ADAM if transform is None else transform, rate, limit, average or None)
