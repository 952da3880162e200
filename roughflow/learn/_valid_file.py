"""Is what a file says a model that could have been made?"""

import collections.abc
import dataclasses
import types
import typing
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..flow import Normal, StochasticFlow
from ..sde import noise_dimension


def check_module(module: eqx.Module) -> None:
    """Raise unless the module's fields are of the kinds its class says, and pass the class's own checks."""
    cls = type(module)
    # Whoever writes a class of their own may put into a field what they like.
    for field in dataclasses.fields(cls) if cls.__module__.startswith("roughflow.") else ():
        value = getattr(module, field.name)
        if not _fits(value, field.type, static=bool(field.metadata.get("static"))):
            raise TypeError(f"{cls.__name__}.{field.name} is {_described(value)}")
    for parent in reversed(cls.__mro__):
        if "__check_init__" in vars(parent):
            vars(parent)["__check_init__"](module)
    if isinstance(module, StochasticFlow):
        _check_flow(module)


def _check_flow(flow: StochasticFlow) -> None:
    """What a flow checks when it is made: weights whose shapes do not match come to light."""
    if isinstance(flow.base, Normal) and flow.base.loc.ndim != 1:
        return  # many flows in one, as `eqx.filter_vmap` makes them: no one of them can be asked
    point = jax.eval_shape(lambda: flow.base.sample(key=jax.random.key(0)))
    sizes = (*point.shape, noise_dimension(flow.sde, flow.dimension))
    if sizes != (flow.dimension, flow.noise_dimension):
        raise ValueError(
            f"base and diffusion have sizes {sizes}, not {(flow.dimension, flow.noise_dimension)}"
        )


def _fits(value: Any, kind: Any, *, static: bool) -> bool:
    """Whether a value is of a kind. Numbers and arrays of them stand for one another, as they do in a
    model, but an array cannot be static. A kind this does not know fits all."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one, static=static) for one in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        same = len(kinds) == len(value)
        return same and all(_fits(part, one, static=static) for part, one in zip(value, kinds, strict=True))
    if collections.abc.Callable in (kind, origin):
        return callable(value)
    if kind in (None, types.NoneType):
        return value is None
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind is int:
        return isinstance(value, int | np.integer)
    if kind in (float, jax.Array, np.ndarray):
        return isinstance(value, int | float | np.number) or (not static and _is_numeric(value))
    if isinstance(kind, type) and issubclass(kind, eqx.Module):
        return isinstance(value, kind)
    return True


def _is_numeric(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and (
        jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool
    )


def _described(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of {value.dtype}"
    return repr(value)[:40]
