"""What the library refuses, and the sentence it says: one line, the argument's name, the remedy."""

import re
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PRNGKeyArray

from .faq import see

# Packages between a warning and the user's program.
INTERNAL = ("roughflow.", "jax.", "equinox.", "sklearn.", "joblib.")
_told: set[tuple[str, int, str]] = set()


class NonFiniteError(RuntimeError):
    """The drift or the diffusion returned NaN or infinity where it should not."""


class OutOfStepsError(RuntimeError):
    """An adaptive solve used up its steps before it reached the end time."""


def is_traced(value: Any) -> bool:
    """Whether a value stands for one not known yet, inside a `jit`, `grad` or `vmap`."""
    return isinstance(value, Tracer)


def warn(message: str) -> None:
    """Warn of the line of the user's program that called the library, however deep within it this is. A
    search of scikit-learn over many fits warns once of each thing, whatever its numbers are."""
    frame, level, searching = sys._getframe(1), 2, False
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).startswith(INTERNAL):
        searching |= name.startswith("sklearn.model_selection")
        frame, level = frame.f_back, level + 1
    if searching:
        told = (frame.f_code.co_filename, frame.f_lineno, re.sub(r"[-+.\d]+", "", message))
        if told in _told:
            return
        _told.add(told)
    warnings.warn(message, stacklevel=level)


def check_key(key: Any, *, many: bool = False) -> PRNGKeyArray:
    """Return `key` if it is one typed key, or an array of them where `many` will do; else raise."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if many or key.shape == ():
            return key
        raise TypeError(f"key must be a single key, got an array of keys of shape {key.shape}{see('keys')}")
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32:
        raise TypeError(
            "key is an old-style uint32 key (jax.random.PRNGKey); make one with jax.random.key(seed)"
            + see("keys")
        )
    raise TypeError(f"key must come from jax.random.key(seed), got {type(key).__name__}{see('keys')}")


def check_count(name: str, value: Any) -> int:
    """Return `value` if it is a whole number of at least 1, else raise `ValueError`."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value}")
    return int(value)


def as_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple: a whole number stands for one axis."""
    axes = (shape,) if isinstance(shape, int | np.integer) else shape
    if not isinstance(axes, tuple | list) or not all(
        isinstance(n, int | np.integer) and n >= 0 for n in axes
    ):
        raise ValueError(f"shape must be a tuple of whole numbers that are not negative, got {shape!r}")
    return tuple(int(n) for n in axes)


def check_positive(name: str, value: Any) -> None:
    """Refuse a number, or array of numbers, that is not finite and above zero.

    A traced value cannot be looked at and passes.
    """
    if is_traced(value):
        return
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or not bool(np.all(np.isfinite(array) & (array > 0))):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def check_vector(name: str, value: Array | np.ndarray, dimension: int) -> None:
    """Refuse an array whose last axis is not `dimension` long."""
    shape = jnp.shape(value)
    if not shape or shape[-1] != dimension:
        told = f"{name} must have shape (..., {dimension}) to match the base distribution, got {shape}"
        raise ValueError(told + see("shapes"))


def check_finite(name: str, value: Array | np.ndarray) -> None:
    """Refuse NaN and infinity, naming the first row that has one. A traced value passes."""
    if is_traced(value):
        return
    # In NumPy: inside a jit, jnp would trace even a value that is known.
    rows = np.atleast_2d(np.isfinite(np.asarray(value)).all(axis=-1))
    if rows.all():
        return
    row = int(np.argmin(rows.ravel()))
    raise ValueError(f"{name} has a value that is not finite, first in row {row}")
