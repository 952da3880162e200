"""What may drive an SDE, and what may not."""

import jax.numpy as jnp

from ..driver import AbstractDriver
from ..faq import see
from ..sde import AbstractItoSDE, AbstractSDE, depends_on, noise_dimension

ROUGHEST = 1 / 3  # Hurst exponent, from which on a path and its areas determine the solution


def check_driven(sde: AbstractSDE, driver: AbstractDriver, dimension: int) -> None:
    """Refuse a driver that gives the SDE no meaning."""
    columns = noise_dimension(sde, dimension)
    if not columns:
        return
    if isinstance(sde, AbstractItoSDE) and not driver.brownian:
        raise ValueError(
            f"{type(driver).__name__} is not Brownian motion, and gives an Itô SDE no meaning: write it as a "
            "StratonovichSDE, whose solution is the limit along smooth paths" + see("other-drivers")
        )
    if driver.num_components not in (None, columns):
        raise ValueError(
            f"{type(driver).__name__} has {driver.num_components} components, but the diffusion has "
            f"{columns} columns" + see("other-drivers")
        )
    rough = driver.hurst <= ROUGHEST and columns > 1
    if rough and depends_on(lambda z: sde.noise(jnp.zeros((), z.dtype), z), jnp.zeros(dimension)):
        raise ValueError(
            f"a driver with hurst = {driver.hurst:g} is too rough for several noises that depend on the "
            "state: that takes more than 1/3; noise that does not, or one alone, takes any"
            + see("other-drivers")
        )
