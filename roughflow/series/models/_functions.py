"""An SDE from plain functions and a dictionary of parameters."""

from collections.abc import Callable, Mapping

from jaxtyping import Array

from ..._checks import check_callable, check_instance, finite_array
from ...sde import AbstractItoSDE


class ParametricSDE(AbstractItoSDE):
    """dX = μ(t, X; θ) dt + σ(t, X; θ) dB, in the Itô sense, with θ a dictionary of numbers or arrays.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.ParametricSDE(
        lambda t, x, p: p["a"] - p["b"] * x,
        lambda t, x, p: p["s"] * jnp.eye(1),
        {"a": 0.1, "b": 1.0, "s": 0.3},
    )
    ```
    """

    parameters: dict[str, Array]
    drift_function: Callable[[Array, Array, dict[str, Array]], Array]
    diffusion_function: Callable[[Array, Array, dict[str, Array]], Array]

    def __init__(self, drift: Callable, diffusion: Callable, parameters: Mapping[str, float | Array]):
        check_callable("drift", drift, "(t, x, parameters) -> (d,)")
        check_callable("diffusion", diffusion, "(t, x, parameters) -> (d, m)")
        check_instance("parameters", parameters, Mapping, "a dictionary of numbers by name")
        self.drift_function = drift
        self.diffusion_function = diffusion
        self.parameters = {name: finite_array(name, value) for name, value in parameters.items()}

    def drift(self, t: Array, z: Array) -> Array:
        return self.drift_function(t, z, self.parameters)

    def diffusion(self, t: Array, z: Array) -> Array:
        return self.diffusion_function(t, z, self.parameters)
