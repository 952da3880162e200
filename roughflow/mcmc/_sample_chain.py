"""Run several Markov chains in parallel."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_instance, check_key, check_memory, finite_array
from .._programs import jit
from .._show import count, is_known, table
from ..sde import AbstractSDE
from ._kernels import AbstractSampler, SamplerState, UnadjustedSampler

MAX_SHOWN_COORDINATES = 8  # maximum number of coordinates in the printed summary


class Chain(eqx.Module):
    """The result of `rf.sample_chain`. `numpy.asarray(chain)` returns `chain.samples`.

    - `samples`: `(draws, d)`, or `(chains, draws, d)` for several starting points.
    - `acceptance`: mean acceptance probability of each chain.
    - `num_gradients`: number of gradients of the log density per chain.
    """

    samples: Array
    acceptance: Array
    num_gradients: int

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        del copy
        return np.asarray(self.samples, dtype)

    def __repr__(self) -> str:
        if not is_known(self.samples, self.acceptance):
            return eqx.tree_pformat(self)
        samples, dimension = self.samples, self.samples.shape[-1]
        samples = np.asarray(samples[None] if samples.ndim == 2 else samples)[..., :MAX_SHOWN_COORDINATES]
        size = f"{count(samples.shape[0], 'chain')} × {count(samples.shape[1], 'draw')} × {dimension}-D"
        accepted = np.asarray(self.acceptance)
        spread = f" ({accepted.min():.2f} to {accepted.max():.2f})" if np.ptp(accepted) > 0.005 else ""
        title = (
            f"Chain: {size}, acceptance {accepted.mean():.2f}{spread}, {self.num_gradients:,} gradients each"
        )
        with np.errstate(all="ignore"):  # diverged draws are included, without warnings
            rows = [
                (f"z[{i}]", f"{z.mean():.4g}", f"{z.std():.4g}", f"{rank_rhat(z):.3f}")
                for i, z in enumerate(np.moveaxis(samples, -1, 0).astype(float))
            ]
        more = (
            [f"  … and {dimension - MAX_SHOWN_COORDINATES} more"] if dimension > MAX_SHOWN_COORDINATES else []
        )
        return "\n".join([title, *table(("", "mean", "sd", "R-hat"), rows), *more])


def rank_rhat(draws: np.ndarray) -> float:
    """Rank-normalised R-hat of one coordinate `(chains, draws)`: the maximum of bulk and folded R-hat
    (Vehtari et al. 2021). It is near 1 if all chains have the same location and scale, and NaN with fewer
    than four draws per chain."""
    half = draws.shape[1] // 2
    if half < 2 or not np.isfinite(draws).all():
        return float("nan")
    parts = np.concatenate([draws[:, :half], draws[:, -half:]])
    return max(_rhat(parts), _rhat(np.abs(parts - np.median(parts))))


def _rhat(parts: np.ndarray) -> float:
    ranks = scipy.stats.rankdata(parts).reshape(parts.shape)
    normal = scipy.special.ndtri((ranks - 0.375) / (parts.size + 0.25))
    within, between = normal.var(axis=1, ddof=1).mean(), normal.mean(axis=1).var(ddof=1)
    if within == 0:
        return float("inf" if between else "nan")
    return float(np.sqrt(1 - 1 / parts.shape[1] + between / within))


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
    """Run one Markov chain from each row of `z0`, all in parallel.

    **Arguments:**

    - `sampler`: an `rf.mcmc.FlowSampler`, `rf.AdjustedSampler` or `rf.UnadjustedSampler`; an SDE is
      equivalent to `rf.UnadjustedSampler(sde, dt)`.
    - `z0`: starting points, `(d,)` or `(chains, d)`; samples of a trained flow give a warm start.
    - `num_steps`: number of steps after burn-in.
    - `dt`: step size, if `sampler` is an SDE.
    - `burn_in`: number of initial steps that are discarded.
    - `thin`: thinning interval; the last of every `thin` states is kept.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    chain = rf.sample_chain(sde, jnp.zeros((4, 2)), key=jax.random.key(0), num_steps=1000, dt=0.05)
    chain.samples.shape  # (4, 1000, 2)
    ```
    """
    check_count("num_steps", num_steps)
    check_count("burn_in", burn_in, least=0)
    if check_count("thin", thin) > num_steps:
        raise ValueError(f"thin must be at most num_steps, {num_steps}, got {thin}")
    wanted = "a sampler such as rf.AdjustedSampler(sde, dt), or an SDE"
    check_instance("sampler", sampler, AbstractSampler | AbstractSDE, wanted)
    if isinstance(sampler, AbstractSDE):
        if dt is None:
            raise TypeError("sample_chain needs dt, the step size, for an SDE")
        sampler = UnadjustedSampler(sampler, dt)
    elif dt is not None:
        raise TypeError("the sampler already has a dt: omit dt, or pass the SDE instead of the sampler")
    z0 = finite_array("z0", z0)
    if z0.ndim not in (1, 2) or not z0.size:
        raise ValueError(f"z0 must have shape (d,) or (chains, d), got {z0.shape}")
    check_memory(f"num_steps={num_steps}", num_steps // thin * z0.size)
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
    def each(key: PRNGKeyArray) -> PRNGKeyArray:
        return jax.random.split(key, len(starts))

    def block(key: PRNGKeyArray) -> PRNGKeyArray:
        return jax.vmap(each)(jax.random.split(key, thin))

    def advance(state: SamplerState, keys: PRNGKeyArray) -> tuple[SamplerState, Array]:
        state, info = jax.vmap(sampler.step)(keys, state)
        return state, info.acceptance

    def record(state: SamplerState, keys: PRNGKeyArray) -> tuple[SamplerState, tuple[Array, Array]]:
        state, acceptance = jax.lax.scan(advance, state, keys, unroll=thin == 1)
        return state, (state.z, jnp.mean(acceptance, axis=0))

    key_burn, key_keep = jax.random.split(key)
    state = jax.vmap(sampler.init)(starts)
    if burn_in:
        burn = jax.random.split(key_burn, burn_in)
        state, _ = jax.lax.scan(lambda state, key: advance(state, each(key)), state, burn)
    keys = jax.random.split(key_keep, num_steps // thin)
    if thin == 1:
        # Splitting all keys at once is faster than splitting them step by step, and the keys need no more
        # memory than the draws.
        _, (samples, acceptance) = jax.lax.scan(record, state, jax.vmap(block)(keys))
    else:
        _, (samples, acceptance) = jax.lax.scan(lambda state, key: record(state, block(key)), state, keys)
    return jnp.swapaxes(samples, 0, 1), jnp.mean(acceptance, axis=0)
