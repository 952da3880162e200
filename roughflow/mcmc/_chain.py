"""Many steps of many chains."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key
from .._programs import jit
from ..sde import AbstractSDE
from ._sampler import AbstractSampler, SamplerState, UnadjustedSampler


class Chain(eqx.Module):
    """What `rf.sample_chain` returns; `numpy.asarray` of it is `samples`.

    - `samples`: `(draws, d)`, or `(chains, draws, d)` if it started at several points.
    - `acceptance`: the mean probability of accepting a step, of each chain.
    - `gradients`: how many gradients of the log density each chain took.
    """

    samples: Array
    acceptance: Array
    gradients: int

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        del copy
        return np.asarray(self.samples, dtype)


def sample_chain(
    sampler: AbstractSampler | AbstractSDE,
    z0: Array,
    *,
    key: PRNGKeyArray,
    num_steps: int,
    dt: float | None = None,
    burn_in: int = 0,
    thin: int = 1,
) -> Chain:
    """Run a sampler from z0, one chain for each row of it, all at once.

    **Arguments:**

    - `sampler`: `rf.FlowSampler`, `rf.AdjustedSampler` or `rf.UnadjustedSampler`; or an SDE, for
      `rf.UnadjustedSampler(sde, dt)`.
    - `z0`: `(d,)`, or `(chains, d)`; a trained flow's `sample` is a warm start.
    - `num_steps`: steps kept, after `burn_in` that are not; of these every `thin`-th.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    chain = rf.sample_chain(sde, jnp.zeros((4, 2)), key=jax.random.key(0), num_steps=1000, dt=0.05)
    chain.samples.shape  # (4, 1000, 2)
    ```
    """
    check_count("num_steps", num_steps)
    check_count("thin", thin)
    if thin > num_steps or burn_in < 0:
        raise ValueError(f"thin must be at most num_steps and burn_in not below 0, got {thin} and {burn_in}")
    if isinstance(sampler, AbstractSDE):
        if dt is None:
            raise TypeError("sample_chain needs dt, the size of a step")
        sampler = UnadjustedSampler(sampler, dt)
    elif dt is not None:
        raise TypeError("dt belongs to the sampler: leave it out, or pass the SDE instead")
    z0 = jnp.asarray(z0, float)
    if z0.ndim not in (1, 2):
        raise ValueError(f"z0 must have shape (d,) or (chains, d), got {z0.shape}")
    sampler.check(z0)
    starts = jnp.atleast_2d(z0)
    samples, acceptance = _run(sampler, starts, check_key(key), burn_in, num_steps, thin)
    if z0.ndim == 1:
        samples, acceptance = samples[0], acceptance[0]
    return Chain(samples, acceptance, burn_in + num_steps)


@jit
def _run(
    sampler: AbstractSampler, starts: Array, key: PRNGKeyArray, burn_in: int, num_steps: int, thin: int
) -> tuple[Array, Array]:
    def advance(state: SamplerState, key: PRNGKeyArray) -> tuple[SamplerState, Array]:
        state, info = jax.vmap(sampler.step)(jax.random.split(key, len(starts)), state)
        return state, info.acceptance

    def record(state: SamplerState, key: PRNGKeyArray) -> tuple[SamplerState, tuple[Array, Array]]:
        state, acceptance = jax.lax.scan(advance, state, jax.random.split(key, thin))
        return state, (state.z, jnp.mean(acceptance, axis=0))

    key_burn, key_keep = jax.random.split(key)
    state = jax.vmap(sampler.init)(starts)
    if burn_in:
        state, _ = jax.lax.scan(advance, state, jax.random.split(key_burn, burn_in))
    _, (samples, acceptance) = jax.lax.scan(record, state, jax.random.split(key_keep, num_steps // thin))
    return jnp.swapaxes(samples, 0, 1), jnp.mean(acceptance, axis=0)
