"""Samplers that tune themselves."""

from os import PathLike
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count, check_flag, check_key, check_number
from .._linear import log_abs_det
from ..faq import see
from ..sde import GIVEN, LocalDiffusion, LogDensity, Skew, noise_matrix, targeted_sde
from ..train import AbstractStatefulObjective, History, fit
from ._flow_sampler import FlowSampler, GradientState
from ._sampler import accept
from ._warm_up import ACCEPTANCE, adapt, climbing_gradients, least_steps, starts, warm_up

GRADIENTS = 3  # of the log density in a training step: one to move, and the derivative of another
WARM_UP, FINISH = 0.1, 0.05  # shares of the budget
SUBSTEPS = 2  # in training; twice as many after it
LINEAR = 5.0  # log a down to which a refusal counts in full
QUICK = 0.02  # rate at which the weight of the volume follows the acceptance


class Tuned(eqx.Module):
    """What `rf.tune_sampler` returns.

    - `sampler`: an `rf.FlowSampler`; nothing in it changes any more.
    - `z`: where the chains have got to, `(chains, d)`, to start sampling from.
    - `num_gradients`: how many gradients of the log density it all took, of all chains together.
    - `history`: of the training: `metrics["acceptance"]` and `metrics["log_volume"]`, a number a step.
    - `interrupted`: whether it was stopped by hand before its time.
    """

    sampler: FlowSampler
    z: Array
    num_gradients: int
    history: History
    interrupted: bool


class SpeedMeasure(AbstractStatefulObjective):
    """−E[log min(1, a)] − β E[log |det σ(z)|] over chains that move as the sampler learns.

    The larger the moves, the fewer are accepted: the sampler is to have moves as large as it can, in every
    direction and at every place, for a given share that is accepted (Titsias & Dellaportas 2019). The weight
    β follows the acceptance until it is `ACCEPTANCE`.
    """

    chains: GradientState = eqx.field(metadata=GIVEN)  # where they begin
    uses_data: ClassVar[bool] = False

    def start(self, model: FlowSampler, *, key: PRNGKeyArray) -> tuple[GradientState, Array]:
        """The chains, and log β."""
        del model, key
        return self.chains, -jnp.log(jnp.asarray(self.chains.z.shape[1], float))

    def step(
        self, model: FlowSampler, x: Array | None, state: tuple[GradientState, Array], *, key: PRNGKeyArray
    ) -> tuple[Array, tuple[tuple[GradientState, Array], dict[str, Array]]]:
        del x
        chains, log_beta = state
        keys = jax.random.split(key, (2, chains.z.shape[0]))
        there, log_ratio, _ = jax.vmap(model.propose)(keys[0], chains)
        moved, info = jax.vmap(accept)(keys[1], log_ratio, there, chains)
        noise = jax.vmap(lambda z: noise_matrix(model.sde.noise(jnp.zeros((), z.dtype), z)))(chains.z)
        volume = jnp.mean(log_abs_det(noise))
        acceptance = jnp.mean(info.acceptance)
        loss = jnp.mean(_cost(log_ratio)) - jnp.exp(log_beta) * volume
        next_beta = log_beta + QUICK * (acceptance - ACCEPTANCE)
        state = jax.lax.stop_gradient((moved, next_beta))
        return loss, (state, {"acceptance": acceptance, "log_volume": volume})


def _cost(log_ratio: Array) -> Array:
    """−log min(1, a); beyond a point its logarithm only, so that a hopeless move does not outweigh the
    others, and nothing for a move that failed."""
    refused = jnp.where(jnp.isfinite(log_ratio), jnp.maximum(-log_ratio, 0), 0)
    return jnp.where(refused < LINEAR, refused, LINEAR * (1 + jnp.log(jnp.maximum(refused, LINEAR) / LINEAR)))


def tune_sampler(
    log_density: LogDensity,
    z0: Array,
    *,
    key: PRNGKeyArray,
    num_gradients: int = 500_000,
    skew: Skew | None = None,
    width: int = 32,
    learning_rate: float = 1e-2,
    climb: bool = True,
    checkpoint: str | PathLike | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Tuned:
    """Learn the noise σ(z) with which chains for a target move best, and return that sampler.

    A tenth of the budget goes to `rf.warm_up`, which finds a constant σ. From there an `rf.LocalDiffusion`
    learns, on chains that move along, to make the moves of `rf.FlowSampler` as large as they can be for the
    share of them that is accepted (Titsias & Dellaportas 2019). The rest sets dt. Then all is fixed, so
    the sampler's distribution is the target's, however well it has learned.

    **Arguments:**

    - `log_density`: `z -> ()`, up to a constant, on all of space: take the logarithm of what must be
      positive, as `roughflow.interop.numpyro.target_from_model` does.
    - `z0`: `(chains, d)`, where chains begin; 32 to 128 of them are good. Where there are several modes begin
      near all: chains that stay in one of them have an R-hat far above 1.
    - `num_gradients`: the budget, in gradients of the log density, of all chains together. A step of the
      training takes three a chain.
    - `skew`: a Q for `rf.targeted_sde`, such as `rf.SkewNetwork`, to learn along with σ.
    - `width` of the network; `learning_rate`.
    - `climb`: as in `rf.warm_up`. Starting points of a very low log density are replaced, with a warning;
      `climb=False` keeps them all.
    - `checkpoint`, `resume`, `progress`: as in `rf.fit`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    banana = lambda z: -0.5 * z[0] ** 2 - 0.25 * (z[1] + z[0] ** 2) ** 2
    z0, key = jax.random.normal(jax.random.key(0), (32, 2)), jax.random.key(1)
    tuned = rf.tune_sampler(banana, z0, key=key, num_gradients=10_000, progress=False)
    chain = rf.sample_chain(tuned.sampler, tuned.z, key=jax.random.key(2), num_steps=100)
    ```
    """
    z0 = starts("z0", z0)
    check_callable("log_density", log_density, "z -> ()")
    if skew is not None:
        check_callable("skew", skew, "(t, z) -> (d, d)")
    check_count("width", width)
    check_number("learning_rate", learning_rate, above=0)
    check_flag("climb", climb)
    if resume and checkpoint is None:
        raise ValueError("resume needs a checkpoint to go on from" + see("checkpoints"))
    chains, dimension = z0.shape
    climbing = climbing_gradients(dimension, chains) if climb else 0
    first, steps, last = _plan(check_count("num_gradients", num_gradients), climbing, *z0.shape)
    key_warm, key_net, key_fit, key_last = jax.random.split(check_key(key), 4)
    mala, z = warm_up(log_density, z0, key=key_warm, num_steps=first, climb=climb)
    scale = jnp.sqrt(mala.dt) * noise_matrix(mala.sde.noise(jnp.zeros(()), z[0]))
    diffusion = LocalDiffusion(dimension, centre=jnp.median(z, axis=0), scale=scale, width=width, key=key_net)
    sampler = FlowSampler(targeted_sde(log_density, diffusion, skew), 1.0, SUBSTEPS)
    sampler.check(z)
    objective = SpeedMeasure(jax.vmap(sampler.init)(z))
    fitted = fit(
        sampler,
        key=key_fit,
        objective=objective,
        steps=steps,
        learning_rate=learning_rate,
        clip=1.0,
        frozen=lambda s: s.sde.log_density,
        checkpoint=checkpoint,
        resume=resume,
        progress=progress,
    )
    chains_now, _ = fitted.state
    sampler, z = FlowSampler(fitted.model.sde, 1.0), chains_now.z
    taken = climbing + chains * (first + GRADIENTS * fitted.history.loss.size)
    if fitted.interrupted:
        return Tuned(sampler, z, taken, fitted.history, True)
    places, dt = adapt(sampler, z, key_last, last)
    return Tuned(FlowSampler(sampler.sde, dt), places[-1], taken + chains * last, fitted.history, False)


def _plan(budget: int, climbing: int, chains: int, dimension: int) -> tuple[int, int, int]:
    """Steps of the warm-up, of the training and of the end, of each chain."""
    each = (budget - climbing) // chains
    first, last = int(WARM_UP * each), int(FINISH * each)
    needed = least_steps(chains, dimension)
    if last < 1 or first < needed:
        least = climbing + chains * round(max(1 / FINISH, needed / WARM_UP))
        told = f"num_gradients must be at least {least} for {chains} chains, got {budget}"
        raise ValueError(told + see("too-few-steps"))
    return first, (each - first - last) // GRADIENTS, last
