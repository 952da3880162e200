"""Names by which a file knows classes and functions: public ones, which stay while code moves."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..faq import see
from ..sde import silu, tanh

# Where a class is looked for, in this order: by its own name, in the modules of its package that are public.
# No file makes any other module be imported.
NAMESPACES: dict[str, tuple[str, ...]] = {
    "roughflow": (
        "roughflow",
        "roughflow.sde",
        "roughflow.driver",
        "roughflow.flow",
        "roughflow.density",
        "roughflow.learn",
        "roughflow.mcmc",
        "roughflow.datasets",
    ),
    "diffrax": ("diffrax",),
    "equinox": ("equinox", "equinox.nn"),
    "lineax": ("lineax",),
    "optimistix": ("optimistix",),
}
# What classes and fields were called in older files.
RENAMED = {"Unadjusted": "UnadjustedSampler", "Adjusted": "AdjustedSampler", "AdjustedFlow": "FlowSampler"}
RENAMED_FIELDS = {
    ("Laplace", "starts"): "num_starts",
    ("HutchinsonDivergence", "law"): "distribution",
    ("StochasticFlow", "noise_dim"): "noise_dimension",
    ("Sobol", "replicates"): "num_replicates",
    ("Unbiased", "replicates"): "num_replicates",
    ("UpperBound", "fresh"): "num_paths",
    ("ReverseKL", "batch"): "batch_size",
    ("FlowSampler", "substeps"): "num_substeps",
    ("Chain", "gradients"): "num_gradients",
    ("Tuned", "gradients"): "num_gradients",
}
_ACTIVATIONS = (
    *("relu", "relu6", "elu", "selu", "celu", "leaky_relu", "hard_tanh", "hard_sigmoid", "hard_silu"),
    *("soft_sign", "softplus", "squareplus", "silu", "mish", "gelu", "sigmoid", "log_sigmoid", "identity"),
)
FUNCTIONS: dict[str, Callable] = {
    "tanh": tanh,
    "roughflow.silu": silu,
    "jax.tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "exp": jnp.exp,
    "rademacher": jax.random.rademacher,
    "normal": jax.random.normal,
    # What eqx.nn.MLP does after its last layer; equinox has no name for it.
    "equinox.identity": inspect.signature(eqx.nn.MLP.__init__).parameters["final_activation"].default,
    **{name: getattr(jax.nn, name) for name in _ACTIVATIONS},
}


class UnknownName(ValueError):
    """A file names a class that it may not, or that is not there."""


def name_of(cls: type) -> str:
    """`roughflow:Normal`, wherever in roughflow its code is; of a user's class the module and name."""
    package = cls.__module__.partition(".")[0]
    if package not in NAMESPACES:
        return f"{cls.__module__}:{cls.__qualname__}"
    for namespace in NAMESPACES[package]:
        if _found(namespace, cls.__name__) is cls:
            return f"{namespace}:{cls.__name__}"
    raise ValueError(f"{cls.__name__} is no public class of {package}, so a file cannot name it")


def class_of(name: str, known: dict[str, type]) -> type:
    """The class of this name: one of those the reader gave, or a public one of roughflow or of the libraries
    it stands on. Of an old private name, `roughflow.flow._base:Normal`, the last part counts."""
    if name in known:
        return known[name]
    module, _, qualified = name.partition(":")
    package = module.partition(".")[0]
    if package not in NAMESPACES:
        # A class that has moved since, or was defined in a notebook, is still known by its name.
        same = [cls for cls in known.values() if cls.__qualname__ == qualified]
        if len(same) == 1:
            return same[0]
        raise UnknownName(
            f"the file holds a {qualified} of {module}: give it, as load(path, classes=[{qualified}])"
            + see("loading")
        )
    qualified = RENAMED.get(qualified, qualified)
    found = [_found(namespace, qualified) for namespace in NAMESPACES[package]]
    there = [value for value in found if value is not None]
    if not there and qualified.isidentifier():
        raise UnknownName(f"the file holds {name}, which the installed {package} lacks{see('loading')}")
    if not (there and isinstance(there[0], type) and issubclass(there[0], eqx.Module)):
        raise UnknownName(f"the file names {name}, which is not a part of a model{see('loading')}")
    return there[0]


def function_name(value: Any) -> str | None:
    return next((name for name, function in FUNCTIONS.items() if function is value), None)


def _found(namespace: str, name: str) -> Any:
    # Not `getattr`: a module may import another when it is asked for an attribute. What it has imported is
    # no name of its own: the answer must not depend on what ran before.
    value = vars(importlib.import_module(namespace)).get(name)
    return None if inspect.ismodule(value) else value
