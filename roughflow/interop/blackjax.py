"""roughflow's samplers with the interface of BlackJAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from blackjax.base import SamplingAlgorithm
from jaxtyping import Array, PRNGKeyArray

import roughflow as rf

from .._checks import check_instance


class BlackJAXState(NamedTuple):
    """A state with the field names that BlackJAX expects."""

    position: Array
    state: rf.mcmc.SamplerState


class BlackJAXInfo(NamedTuple):
    """Information about a step, with the field names that BlackJAX expects."""

    acceptance_rate: Array
    is_accepted: Array


def as_blackjax(sampler: rf.mcmc.AbstractSampler) -> SamplingAlgorithm:
    """Convert a sampler to a BlackJAX algorithm with `init(position)` and `step(rng_key, state)`, for use
    with BlackJAX's adaptations and loops.

    ```python
    import blackjax, jax, jax.numpy as jnp
    import roughflow as rf
    from roughflow.interop.blackjax import as_blackjax

    sampler = rf.AdjustedSampler(rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2), dt=1.0)
    kernel = as_blackjax(sampler)
    state, (states, infos) = blackjax.util.run_inference_algorithm(
        jax.random.key(0), kernel, num_steps=100, initial_position=jnp.zeros(2)
    )
    ```
    """

    check_instance(
        "sampler", sampler, rf.mcmc.AbstractSampler, "a sampler such as rf.AdjustedSampler(sde, dt)"
    )

    def init(position: Array, rng_key: PRNGKeyArray | None = None) -> BlackJAXState:
        del rng_key
        return BlackJAXState(position, sampler.init(position))

    def step(rng_key: PRNGKeyArray, state: BlackJAXState) -> tuple[BlackJAXState, BlackJAXInfo]:
        typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
        key = rng_key if typed else jax.random.wrap_key_data(rng_key)
        new, info = sampler.step(key, state.state)
        return BlackJAXState(new.z, new), BlackJAXInfo(info.acceptance, info.accepted)

    return SamplingAlgorithm(init, step)  # pyright: ignore[reportArgumentType]
