"""Splitting a batch between the devices of one or several processes."""

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

# Words in the error messages that collective operations and the coordination service raise if a process does
# not respond.
COLLECTIVE_ERRORS = ("Gloo", "NCCL", "coordination", "heartbeat", "Connection", "Socket closed")
DevicesLike = int | Sequence[jax.Device] | Mesh | None
# The devices of the current trace, and the arrays with respect to which it differentiates.
_AT_WORK: ContextVar[tuple[Mesh | None, list[Any]]] = ContextVar("_AT_WORK", default=(None, []))


def check_backend() -> None:
    """Raise an error if JAX has no device, as with JAX_PLATFORMS=cuda and no GPU."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError):  # JAX raises different errors
        wanted = jax.config.jax_platforms  # pyright: ignore
        raise RuntimeError(
            f"JAX finds no device of the platform {wanted!r} in JAX_PLATFORMS: unset it to use "
            "the available devices" + see("several-devices")
        ) from None


@dataclass(frozen=True)
class Devices:
    """The devices that a run uses. The rows of a batch are split between the devices of a mesh; everything
    else is replicated. Without a mesh, no array is moved."""

    mesh: Mesh | None = None

    @staticmethod
    def of(devices: DevicesLike) -> "Devices":
        """Construct `Devices` from a number of devices per process, a list of devices, or a mesh. The default
        is JAX's default device, or all devices if there are several processes."""
        if isinstance(devices, Mesh):
            # `jax.make_mesh` is not used, because its mesh may require explicit sharding of every result.
            return Devices(Mesh(devices.devices, devices.axis_names))
        if devices is None:
            if jax.process_count() == 1:
                return Devices()
            chosen = jax.devices()
        elif isinstance(devices, Sequence):
            chosen = list(devices)
            if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
                wanted = "a number, a list of JAX devices or a mesh"
                raise ValueError(f"devices must be {wanted}, got {shown(devices)}")
        else:
            chosen = _first(check_count("devices", devices))
        if {device.process_index for device in chosen} != set(range(jax.process_count())):
            raise ValueError(
                "devices must include at least one device from each process" + see("several-devices")
            )
        return Devices(Mesh(np.array(chosen), ("rows",)))

    def put(self, tree: Any) -> Any:
        """Replicate the arrays of a pytree on every device; all processes must pass the same arrays."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda leaf: self._placed(leaf, PartitionSpec()), tree)

    def put_rows(self, rows: np.ndarray, axis: int) -> Any:
        """Split the rows of an array between the devices; if their number is not a multiple of the number of
        devices, replicate the array."""
        if self.mesh is None:
            return jnp.asarray(rows)
        even = rows.shape[axis] % self.mesh.size == 0
        spec = PartitionSpec(*[None] * axis, self.mesh.axis_names) if even else PartitionSpec()
        return self._placed(rows, spec)

    def split(self, batch: Any) -> Any:
        """Split rows between the devices, inside a compiled function; XLA pads uneven parts."""
        return self._constrained(batch, () if self.mesh is None else (self.mesh.axis_names,))

    @contextmanager
    def at_work(self, trained: Any = ()) -> Iterator[None]:
        """A context, for use inside `jit`, that sets the devices for `by_rows` and the arrays `trained` with
        respect to which its result is differentiated."""
        before = _AT_WORK.set((self.mesh, jax.tree.leaves(trained)))
        try:
            yield
        finally:
            _AT_WORK.reset(before)

    def same(self, tree: Any) -> Any:
        """Replicate the arrays on every device; for use inside `jit`."""
        return self._constrained(tree, ())

    def back(self, tree: Any) -> Any:
        """Convert a replicated pytree to ordinary arrays on one device."""
        if self.mesh is None:
            return tree
        plain = lambda leaf: jnp.asarray(np.asarray(leaf)) if isinstance(leaf, jax.Array) else leaf
        return jax.tree.map(plain, tree)

    @property
    def own(self) -> list[Any]:
        """The devices of the mesh that belong to this process; empty without a mesh."""
        return [] if self.mesh is None else list(self.mesh.local_devices)

    def all_reduce_min(self, numbers: Sequence[int]) -> list[int]:
        """The minimum of each number over all processes, for values that differ between processes, such as
        clock times and key presses."""
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
        # Each process takes its own part of the rows, so no data are sent.
        return jax.make_array_from_callback(values.shape, sharding, lambda place: values[place])

    def _constrained(self, tree: Any, axes: tuple[Any, ...]) -> Any:
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        fix = lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding) if eqx.is_array(leaf) else leaf
        return jax.tree.map(fix, tree)


def by_rows(function: Callable[..., Any], shared: Any, *rows: Array) -> Any:
    """Return `function(shared, *rows)`, where each entry of the result depends on one row only. If the number
    of rows is a multiple of the number of devices, each device computes its own rows.

    Without this function, XLA would sum derivatives with respect to `shared` over devices in every step of a
    loop, array by array. Here they are summed once at the end, in one message between processes.
    """
    mesh, trained = _AT_WORK.get()
    if mesh is None or mesh.size == 1 or len(rows[0]) % mesh.size:
        return function(shared, *rows)
    known = {id(leaf) for leaf in trained}
    dynamic, static = eqx.partition(shared, eqx.is_array)
    # Empty arrays are created inside the function, because as arguments they make the compiler of JAX 0.11
    # crash.
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
    """Call `jax.shard_map` under the name and with the option that the installed version of JAX uses."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh, ins, out, check_rep=False)


def _first(count: int) -> list[Any]:
    """The first `count` devices of each process."""
    there = [
        [device for device in jax.devices() if device.process_index == i] for i in range(jax.process_count())
    ]
    least = min(map(len, there))
    if not 1 <= count <= least:
        each = " in each process" if len(there) > 1 else ""
        message = f"devices must be between 1 and {least}, the number available{each}; got {count}"
        raise ValueError(message + see("several-devices"))
    return [device for part in there for device in part[:count]]


def is_leader() -> bool:
    """Whether this process writes files and shows progress: true for the first of several processes, or for a
    single one."""
    return jax.process_index() == 0


@contextmanager
def together() -> Iterator[None]:
    """A context for computations in which all processes take part: if one of them ends, the others raise an
    error."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        _take_turns()
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if jax.process_count() == 1 or not any(word in str(error) for word in COLLECTIVE_ERRORS):
            raise
        message = "another process of this run ended: restart all processes to continue from the checkpoint"
        raise RuntimeError(message + see("several-devices")) from error


def _take_turns() -> None:
    """Prevent threads of this process from preempting each other when they wake up, if the system allows it.

    Gloo's communication thread spins on a lock. If, on a busy machine, it preempts the thread that holds the
    lock, it spins for its whole time slice: a sum over processes then takes 4 ms instead of 0.3 ms.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # the thread has ended, or the system does not allow it
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
