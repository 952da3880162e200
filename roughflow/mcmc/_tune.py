"""Tuning of samplers: warm-up of step size and mass matrix, and learned diffusions."""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    check_callable,
    check_count,
    check_flag,
    check_key,
    grouped_arguments,
)
from .._linear import log_abs_det
from .._programs import jit
from ..faq import see
from ..sde import (
    GIVEN,
    LocalDiffusion,
    LogDensity,
    Skew,
    noise_matrix,
    overdamped_langevin,
    targeted_sde,
)
from ..train import AbstractStatefulObjective, History, RunOptions, TrainingOptions, fit
from ._samplers import AbstractSampler, AdjustedSampler, FlowSampler, GradientState, SamplerState, accept
from ._starting_points import climbing_gradients, replace_far_points, root_of, starting_points

# Optimal acceptance rate of Langevin proposals in high dimension (Roberts & Rosenthal 1998).
TARGET_ACCEPTANCE = 0.574
NUM_ROUNDS = 4  # rounds of warm-up
ROBUST_RANGE = 3.0  # in robust standard deviations from the median; positions further away are pulled in


class WarmedUp(NamedTuple):
    """The result of `rf.warm_up`: a `sampler`, and the final positions of its chains, `z`, `(chains, d)`."""

    sampler: AdjustedSampler
    z: Array


def warm_up(
    log_density: LogDensity, z0: Array, *, key: PRNGKeyArray, num_steps: int = 2000, climb: bool = True
) -> WarmedUp:
    """Tune MALA for a target. Return an `rf.AdjustedSampler` with constant noise, and the positions of its
    chains.

    Four of the chains first climb towards a mode with Newton's method. Each point on the way, with the
    curvature there, defines a normal distribution. Each climbing chain keeps the distribution that is closest
    to the target in the sense of E[log p − log q], as in Pathfinder (Zhang et al. 2022). It may be far from
    the mode, as in a funnel. The best of the four gives the initial σ. If the log density at a starting point
    is far below that of draws from the mixture of these normal distributions, the chain is moved to such a
    draw by importance resampling, with a warning; the other chains keep their starting points. Then, in four
    rounds, dt is adjusted towards an acceptance rate of 0.574 (Robbins–Monro). After each round except the
    last, σσᵀ is set to the covariance of the positions. Adaptation then stops, so the stationary distribution
    is exact.

    **Arguments:**

    - `log_density`: `z -> ()`, up to a constant.
    - `z0`: starting points of several chains, `(chains, d)`.
    - `num_steps`: total number of steps, several hundred or more; each takes one gradient per chain.
    - `climb`: whether chains first climb towards a mode; if False, all chains start at `z0`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    target = lambda z: -0.5 * (z[0] ** 2 + (z[1] / 100) ** 2)
    warm = rf.warm_up(target, jnp.zeros((8, 2)), key=jax.random.key(0), num_steps=400)
    chain = rf.sample_chain(warm.sampler, warm.z, key=jax.random.key(1), num_steps=1000)
    ```
    """
    z = starting_points(z0)
    check_callable("log_density", log_density, "z -> ()")
    check_flag("climb", climb)
    least = least_steps(*z.shape)
    num_steps = check_count("num_steps", num_steps)
    if num_steps < least:
        raise ValueError(
            f"num_steps must be at least {least} for {z.shape[0]} chains in {z.shape[1]} dimensions, to "
            f"estimate their covariance, got {num_steps}{see('too-few-steps')}"
        )
    length = num_steps // NUM_ROUNDS
    scale, dt = jnp.eye(z.shape[1]), jnp.asarray(0.1)
    AdjustedSampler(overdamped_langevin(log_density, z.shape[1]), dt).check(z)
    key, key_climb = jax.random.split(check_key(key))
    if climb:
        scale, z = replace_far_points(log_density, z, key_climb)
        dt = jnp.asarray(z.shape[1] ** (-1 / 3))
    sampler = AdjustedSampler(overdamped_langevin(log_density, z.shape[1], scale=scale), dt)
    sampler.check(z)
    for i, key_round in enumerate(jax.random.split(key, NUM_ROUNDS)):
        states, dt = adapt(sampler, z, key_round, length)
        z = states[-1]
        if i < NUM_ROUNDS - 1:
            places = states[length // 2 :]
            # Chains that did not move give no information about the step size.
            moved = jnp.all(jnp.ptp(places, axis=(0, 1)) > 0)
            scale = jnp.where(moved, _spread(places), scale)
            # Steps are now in units of the scale of the target.
            dt = jnp.asarray(z.shape[1] ** (-1 / 3))
        sampler = AdjustedSampler(overdamped_langevin(log_density, z.shape[1], scale=scale), dt)
    return WarmedUp(sampler, z)


def least_steps(chains: int, dimension: int) -> int:
    """The minimum number of steps for which the second half of each round has enough positions to estimate a
    covariance: about two per dimension."""
    each = -(-2 * (dimension + 1) // chains)
    return NUM_ROUNDS * (2 * each - 1)


@jit
def adapt(sampler: AbstractSampler, z: Array, key: PRNGKeyArray, length: int) -> tuple[Array, Array]:
    """Take steps while adapting dt to the acceptance rate. Return the positions of all chains after each
    step, and the mean dt over the second half of the steps."""

    def step(
        carry: tuple[SamplerState, Array], inputs: tuple[Array, PRNGKeyArray]
    ) -> tuple[tuple[SamplerState, Array], tuple[Array, Array]]:
        state, log_dt = carry
        i, key = inputs
        now = eqx.tree_at(lambda s: s.dt, sampler, jnp.exp(log_dt))
        state, info = jax.vmap(now.step)(jax.random.split(key, z.shape[0]), state)
        log_dt = log_dt + (1 + i) ** -0.6 * (jnp.mean(info.acceptance) - TARGET_ACCEPTANCE)
        return (state, log_dt), (state.z, log_dt)

    start = jax.vmap(sampler.init)(z), jnp.log(jnp.asarray(sampler.dt, z.dtype))
    inputs = jnp.arange(length, dtype=z.dtype), jax.random.split(key, length)
    _, (places, log_dt) = jax.lax.scan(step, start, inputs)
    return places, jnp.exp(jnp.mean(log_dt[length // 2 :]))


def _spread(places: Array) -> Array:
    """A square root of the covariance of the positions, shrunk towards its diagonal.

    Positions beyond `ROBUST_RANGE` robust standard deviations are pulled in towards the median, because
    heavy-tailed distributions such as the Cauchy distribution have no covariance.
    """
    rows = jnp.reshape(places, (-1, places.shape[-1]))
    low, middle, high = jnp.quantile(rows, jnp.array([0.25, 0.5, 0.75], rows.dtype), axis=0)
    gap = rows - middle[None]
    width = (high - low) / 1.349  # standard deviation, for a normal distribution
    radius = jnp.sqrt(jnp.mean((gap / jnp.where(width > 0, width, 1)[None]) ** 2, axis=1))
    rows = gap * (ROBUST_RANGE / jnp.maximum(radius, ROBUST_RANGE))[:, None]
    covariance = jnp.atleast_2d(jnp.cov(rows.T))
    weight = places.shape[-1] / (places.shape[-1] + rows.shape[0])
    return root_of((1 - weight) * covariance + weight * jnp.diag(jnp.diag(covariance)))


GRADIENTS_PER_STEP = 3  # gradients per training step: one to move, two for a derivative of a gradient
WARM_UP, FINISH = 0.1, 0.05  # fractions of the budget for the warm-up and the final adaptation
TRAINING_SUBSTEPS = 2  # substeps per move during training; doubled afterwards
LINEAR_LOSS = 5.0  # the loss grows logarithmically where −log a exceeds this value
VOLUME_RATE = 0.02  # learning rate of log β, the weight of the volume


class Tuned(eqx.Module):
    """The result of `rf.tune_sampler`.

    - `sampler`: a tuned `rf.mcmc.FlowSampler`; it no longer adapts.
    - `z`: final positions of the chains, `(chains, d)`, from which to start sampling.
    - `num_gradients`: total number of gradients of the log density, over all chains.
    - `history`: training history, with `metrics["acceptance"]` and `metrics["log_volume"]` for each step.
    - `interrupted`: whether the user interrupted the tuning.
    """

    sampler: FlowSampler
    z: Array
    num_gradients: int
    history: History
    interrupted: bool


class SpeedMeasure(AbstractStatefulObjective):
    """The loss −E[log min(1, a)] − β E[log |det σ(z)|], averaged over chains that run during training.

    Larger moves are accepted less often. Minimising the loss maximises the size of moves in all directions
    for a given acceptance rate (Titsias & Dellaportas 2019). The weight β is adapted until this rate is
    `TARGET_ACCEPTANCE`. Where a = 0, as outside the support, the loss is E[log |det σ(z)|].
    """

    chains: GradientState = eqx.field(metadata=GIVEN)  # initial states
    uses_data: ClassVar[bool] = False

    def start(self, model: FlowSampler, *, key: PRNGKeyArray) -> tuple[GradientState, Array]:
        """The initial state: the chains, and log β."""
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
        volumes, acceptance = log_abs_det(noise), jnp.mean(info.acceptance)
        # log a = −∞ has no gradient: where a move left the support or was not found, σ is made smaller.
        parts = _cost(log_ratio) - jnp.exp(log_beta) * volumes
        loss, volume = jnp.mean(jnp.where(jnp.isfinite(log_ratio), parts, volumes)), jnp.mean(volumes)
        next_beta = log_beta + VOLUME_RATE * (acceptance - TARGET_ACCEPTANCE)
        state = jax.lax.stop_gradient((moved, next_beta))
        return loss, (state, {"acceptance": acceptance, "log_volume": volume})


def _cost(log_ratio: Array) -> Array:
    """−log min(1, a). Beyond a threshold it grows only logarithmically, so that a move with a very small a
    does not dominate; it is zero where a = 0."""
    loss = jnp.where(jnp.isfinite(log_ratio), jnp.maximum(-log_ratio, 0), 0)
    return jnp.where(
        loss < LINEAR_LOSS,
        loss,
        LINEAR_LOSS * (1 + jnp.log(jnp.maximum(loss, LINEAR_LOSS) / LINEAR_LOSS)),
    )


@grouped_arguments(training=TrainingOptions, run=RunOptions)
def tune_sampler(
    log_density: LogDensity,
    z0: Array,
    *,
    key: PRNGKeyArray,
    num_gradients: int = 500_000,
    skew: Skew | None = None,
    width: int = 32,
    climb: bool = True,
    progress: bool = True,
    training: TrainingOptions | None = None,
    run: RunOptions | None = None,
) -> Tuned:
    """Learn a noise σ(z) for which chains mix fast, and return the tuned sampler.

    A tenth of the budget is spent on `rf.warm_up`, which finds a constant σ. Starting from this σ, an
    `rf.sde.LocalDiffusion` is trained while the chains run, to make the moves of `rf.mcmc.FlowSampler` as
    large as possible at a given acceptance rate (Titsias & Dellaportas 2019). The last 5 % of the budget
    is used to adapt dt. Adaptation then stops, so the stationary distribution is exact, however well σ was
    learned.

    **Arguments:**

    - `log_density`: `z -> ()`, up to a constant, on all of Rᵈ: use the logarithm of positive variables, as
      `roughflow.interop.numpyro.target_from_model` does.
    - `z0`: starting points, `(chains, d)`; 32 to 128 chains work well. With several modes, start near each of
      them: chains that stay in one mode have an R-hat far above 1.
    - `num_gradients`: the budget, the total number of gradients of the log density over all chains. A
      training step takes three gradients per chain.
    - `skew`: the skew matrix Q for `rf.targeted_sde`, such as an `rf.sde.SkewNetwork`, which is trained
      together with σ.
    - `width`: width of the network.
    - `climb`: as in `rf.warm_up`. Starting points with a very low log density are replaced, with a warning;
      `climb=False` keeps all starting points.
    - `progress`, `training`, `run`: as in `rf.fit`. By default, the learning rate is 0.01 and gradients are
      clipped at 1.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    banana = lambda z: -0.5 * z[0] ** 2 - 0.25 * (z[1] + z[0] ** 2) ** 2
    z0, key = jax.random.normal(jax.random.key(0), (32, 2)), jax.random.key(1)
    tuned = rf.tune_sampler(banana, z0, key=key, num_gradients=10_000, progress=False)
    chain = rf.sample_chain(tuned.sampler, tuned.z, key=jax.random.key(2), num_steps=100)
    ```
    """
    z0 = starting_points(z0)
    check_callable("log_density", log_density, "z -> ()")
    if skew is not None:
        check_callable("skew", skew, "(t, z) -> (d, d)")
    check_count("width", width)
    check_flag("climb", climb)
    chains, dimension = z0.shape
    climbing = climbing_gradients(dimension, chains) if climb else 0
    first, steps, last = _plan(check_count("num_gradients", num_gradients), climbing, *z0.shape)
    key_warm, key_net, key_fit, key_last = jax.random.split(check_key(key), 4)
    mala, z = warm_up(log_density, z0, key=key_warm, num_steps=first, climb=climb)
    scale = jnp.sqrt(mala.dt) * noise_matrix(mala.sde.noise(jnp.zeros(()), z[0]))
    diffusion = LocalDiffusion(dimension, centre=jnp.median(z, axis=0), scale=scale, width=width, key=key_net)
    sampler = FlowSampler(targeted_sde(log_density, diffusion, skew), 1.0, TRAINING_SUBSTEPS)
    sampler.check(z)
    objective = SpeedMeasure(jax.vmap(sampler.init)(z))
    fitted = fit(
        sampler,
        key=key_fit,
        objective=objective,
        steps=steps,
        frozen=lambda s: s.sde.log_density,
        progress=progress,
        training=(training or TrainingOptions()).with_defaults({"learning_rate": 1e-2, "clip": 1.0}),
        run=run,
    )
    chains_now, _ = fitted.state
    sampler, z = FlowSampler(fitted.model.sde, 1.0), chains_now.z
    taken = climbing + chains * (first + GRADIENTS_PER_STEP * fitted.history.loss.size)
    if fitted.interrupted:
        return Tuned(sampler, z, taken, fitted.history, True)
    places, dt = adapt(sampler, z, key_last, last)
    return Tuned(FlowSampler(sampler.sde, dt), places[-1], taken + chains * last, fitted.history, False)


def _plan(budget: int, climbing: int, chains: int, dimension: int) -> tuple[int, int, int]:
    """The number of steps per chain for the warm-up, the training and the final adaptation."""
    each = (budget - climbing) // chains
    first, last = int(WARM_UP * each), int(FINISH * each)
    needed = least_steps(chains, dimension)
    if last < 1 or first < needed:
        least = climbing + chains * round(max(1 / FINISH, needed / WARM_UP))
        message = f"num_gradients must be at least {least} for {chains} chains, got {budget}"
        raise ValueError(message + see("too-few-steps"))
    return first, (each - first - last) // GRADIENTS_PER_STEP, last
