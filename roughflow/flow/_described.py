"""A flow in a few lines."""

from typing import Any

import equinox as eqx

from .._show import listed, named, num_parameters, number, settings
from ..sde import AbstractSDE
from ._divergence import ExactDivergence


def described(flow: Any) -> str:
    """The SDE, where it starts, and how it is solved; `eqx.tree_pprint` shows every array."""
    if not isinstance(flow.sde, AbstractSDE):  # a tree of something else, in the shape of a flow
        return eqx.tree_pformat(flow)
    start = f"Z(0) ~ {named(flow.base)}({flow.dimension}-D), t in [0, {number(flow.t1)}]"
    parts = flow.sde.parts()
    if flow.noise_dimension:
        parts.append(("driver", f"{settings(flow.driver)}, {flow.noise_dimension}-D noise"))
    parts.append(("integrator", settings(flow.integrator)))
    if not isinstance(flow.divergence, ExactDivergence):
        parts.append(("divergence", settings(flow.divergence)))
    if flow.proposal is not None:
        parts.append(("proposal", named(flow.proposal)))
    parts.append(("parameters", f"{num_parameters(flow):,}"))
    return listed(f"{type(flow).__name__}: {flow.sde.equation()}, {start}", parts)
