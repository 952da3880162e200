"""Is what a file says a model that could have been made?"""

import equinox as eqx
import jax

from .._checks import check_fields
from ..density import StochasticFlow
from ..flow import Normal
from ..sde import noise_dimension


def check_module(module: eqx.Module) -> None:
    """Raise unless the module's fields are of the kinds its class says, and pass the class's own checks."""
    check_fields(module)
    for parent in reversed(type(module).__mro__):
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
