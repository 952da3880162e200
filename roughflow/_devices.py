"""Where a batch is worked on: on one device, on several, or on those of several processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ._checks import check_count, shown
from .faq import see

# What collectives and the service that keeps processes together say when one of them does not answer.
LOST = ("Gloo", "NCCL", "coordination", "heartbeat", "Connection", "Socket closed")
DevicesLike = int | Sequence[jax.Device] | Mesh | None
# What is being traced: on which devices, and the arrays that its derivatives are for.
_AT_WORK: ContextVar[tuple[Mesh | None, list[Any]]] = ContextVar("_AT_WORK", default=(None, []))


def check_backend() -> None:
    """Raise where JAX has no device to work on, as with JAX_PLATFORMS=cuda and no GPU."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError):  # JAX itself fails in more ways than one
        wanted = jax.config.jax_platforms  # pyright: ignore
        raise RuntimeError(
            f"JAX finds no device of the platform {wanted!r} that JAX_PLATFORMS asks for: unset it to use "
            "what there is" + see("several-devices")
        ) from None


@dataclass(frozen=True)
class Devices:
    """The rows of a batch are split between the devices of a mesh; all else is on each of them. Without a
    mesh nothing is moved, and JAX does as it always does."""

    mesh: Mesh | None = None

    @staticmethod
    def of(devices: DevicesLike) -> "Devices":
        """So many devices of each process, these devices, or those of a mesh. If nothing is said, the one
        that JAX takes by itself, or all of them where there are several processes."""
        if isinstance(devices, Mesh):
            # `jax.make_mesh` makes one on which every operation has to say how its result is split.
            return Devices(Mesh(devices.devices, devices.axis_names))
        if devices is None:
            if jax.process_count() == 1:
                return Devices()
            chosen = jax.devices()
        elif isinstance(devices, Sequence):
            chosen = list(devices)
            if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
                raise ValueError(f"devices must be a number, devices of JAX or a mesh, got {shown(devices)}")
        else:
            chosen = _first(check_count("devices", devices))
        if {device.process_index for device in chosen} != set(range(jax.process_count())):
            raise ValueError("devices must have at least one of each process" + see("several-devices"))
        return Devices(Mesh(np.array(chosen), ("rows",)))

    def put(self, tree: Any) -> Any:
        """The arrays of a tree on every device; all processes must have the same."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda leaf: self._placed(leaf, PartitionSpec()), tree)

    def put_rows(self, rows: np.ndarray, axis: int) -> Any:
        """An array with the rows of batches along an axis: each device has its own, if they come out even."""
        if self.mesh is None:
            return jnp.asarray(rows)
        even = rows.shape[axis] % self.mesh.size == 0
        spec = PartitionSpec(*[None] * axis, self.mesh.axis_names) if even else PartitionSpec()
        return self._placed(rows, spec)

    def split(self, batch: Any) -> Any:
        """Inside a jit: each device works on its part of the rows; XLA fills up what does not come out
        even."""
        return self._constrained(batch, () if self.mesh is None else (self.mesh.axis_names,))

    @contextmanager
    def at_work(self, trained: Any = ()) -> Iterator[None]:
        """Inside a jit: what `by_rows` does in here it does on these devices, and it is the arrays of
        `trained` that it has derivatives in."""
        before = _AT_WORK.set((self.mesh, jax.tree.leaves(trained)))
        try:
            yield
        finally:
            _AT_WORK.reset(before)

    def same(self, tree: Any) -> Any:
        """Inside a jit: every device has all of it."""
        return self._constrained(tree, ())

    def back(self, tree: Any) -> Any:
        """The arrays of a tree that is the same on every device, as if there were one."""
        if self.mesh is None:
            return tree
        plain = lambda leaf: jnp.asarray(np.asarray(leaf)) if isinstance(leaf, jax.Array) else leaf
        return jax.tree.map(plain, tree)

    @property
    def own(self) -> list[Any]:
        """Those of this process; none if none was named."""
        return [] if self.mesh is None else list(self.mesh.local_devices)

    def agreed(self, numbers: Sequence[int]) -> list[int]:
        """The least that any process has of each number: what goes by a clock or a key press differs."""
        if not self.several:
            return list(numbers)
        return np.min(multihost_utils.process_allgather(np.array(numbers)), axis=0).tolist()

    @property
    def several(self) -> bool:
        """Whether there are several processes."""
        return self.mesh is not None and jax.process_count() > 1

    def _placed(self, leaf: Any, spec: PartitionSpec) -> Any:
        assert self.mesh is not None
        if not eqx.is_array_like(leaf) or isinstance(leaf, bool | int | float | complex):
            return leaf
        sharding = NamedSharding(self.mesh, spec)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = self._placed(jax.random.key_data(leaf), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        values = np.asarray(leaf)
        values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
        # Each process has its own part of the rows at hand: nothing is sent.
        return jax.make_array_from_callback(values.shape, sharding, lambda place: values[place])

    def _constrained(self, tree: Any, axes: tuple[Any, ...]) -> Any:
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        fix = lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding) if eqx.is_array(leaf) else leaf
        return jax.tree.map(fix, tree)


def by_rows(function: Callable[..., Any], shared: Any, *rows: Array) -> Any:
    """`function(shared, *rows)`, whose result has one entry for each row and depends on it alone: each device
    does its own rows, if they come out even.

    Left to XLA, the devices would add up derivatives in `shared` in every step of a loop, array by array.
    Here they do so at the end, all at once: an array each would be a message each between processes.
    """
    mesh, trained = _AT_WORK.get()
    if mesh is None or mesh.size == 1 or len(rows[0]) % mesh.size:
        return function(shared, *rows)
    known = {id(leaf) for leaf in trained}
    dynamic, static = eqx.partition(shared, eqx.is_array)
    # Arrays without entries are made anew: as an argument here they make JAX 0.11's compiler crash.
    full, empty = eqx.partition(dynamic, lambda leaf: leaf.size > 0)
    moving, fixed = eqx.partition(full, lambda leaf: id(leaf) in known)
    vector, back = ravel_pytree(moving)

    def part(vector: Array, fixed: Any, *rows: Array) -> Any:
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
        return function(eqx.combine(back(vector), fixed, blank, static), *rows)

    own = PartitionSpec(mesh.axis_names)
    everywhere = (PartitionSpec(), PartitionSpec())
    return _each(part, mesh, (*everywhere, *[own] * len(rows)), own)(vector, fixed, *rows)


def _each(function: Callable[..., Any], mesh: Mesh, ins: Any, out: Any) -> Callable[..., Any]:
    """`jax.shard_map`, under the name and with the option that this version of JAX has."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh, ins, out, check_rep=False)


def _first(count: int) -> list[Any]:
    """So many devices of each process."""
    there = [
        [device for device in jax.devices() if device.process_index == i] for i in range(jax.process_count())
    ]
    least = min(map(len, there))
    if not 1 <= count <= least:
        each = " in each process" if len(there) > 1 else ""
        told = f"devices must be between 1 and {least}, there are no more{each}; got {count}"
        raise ValueError(told + see("several-devices"))
    return [device for part in there for device in part[:count]]


def leads() -> bool:
    """Whether this process writes files and shows progress: the first, or the only one."""
    return jax.process_index() == 0


@contextmanager
def together() -> Iterator[None]:
    """Work that all processes take part in: if one of them is gone, the others say so."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        _take_turns()
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if jax.process_count() == 1 or not any(word in str(error) for word in LOST):
            raise
        told = "another process of this run is gone: start all of them again, to go on from the checkpoint"
        raise RuntimeError(told + see("several-devices")) from error


def _take_turns() -> None:
    """Let no thread of this process interrupt another the moment it wakes up, where the system has a way.

    The thread that carries Gloo's messages tries for a lock until it has it. If it displaced the one that
    holds it, on a core of their own or on a busy machine, it would do so for all of its time, some 4 ms for
    each sum over the processes, in place of 0.3.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended, or the system does not allow it
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
