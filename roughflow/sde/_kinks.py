"""Kinks in a diffusion: what they would spoil, and how they are found."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._sde import AbstractItoSDE, AbstractSDE

# The activations of jax.nn whose derivative jumps, by the names that traces know them by.
KINKED = {"relu", "relu6", "leaky_relu", "hard_tanh", "hard_sigmoid", "hard_silu", "selu"}


def check_kinks(sde: AbstractSDE, dimension: int) -> None:
    """Refuse an Itô SDE with a kinked activation in its diffusion, whosever network it is in.

    The random ODE has Dσ in it, and its log-density the derivative of Dσ: a delta function at a kink, which
    automatic differentiation does not see. A drift, or a Stratonovich diffusion, is differentiated once.
    """
    if not isinstance(sde, AbstractItoSDE):
        return
    leaves = lambda t, z: jax.tree.leaves(eqx.filter(sde.noise(t, z), eqx.is_array))
    jaxpr = jax.make_jaxpr(leaves)(jnp.zeros(()), jnp.zeros(dimension)).jaxpr
    found = sorted(KINKED.intersection(_names(jaxpr)))
    if found:
        raise ValueError(
            f"diffusion has the activation {found[0]}, whose derivative jumps, so the Itô correction's own "
            "derivative would be silently wrong; use a smooth one such as tanh, softplus, silu or gelu"
        )


def _names(jaxpr: Any) -> Iterator[str]:
    """The names of all functions that a trace calls."""
    for equation in jaxpr.eqns:
        name = equation.params.get("name")
        if isinstance(name, str):
            yield name
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = leaf if hasattr(leaf, "eqns") else getattr(leaf, "jaxpr", None)
            if hasattr(inner, "eqns"):
                yield from _names(inner)
