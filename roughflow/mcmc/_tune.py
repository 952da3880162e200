"""Tune samplers: warm-up of step size and mass, and learned diffusions."""

from os import PathLike
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count, check_flag, check_key, check_number, finite_array, warn
from .._linear import log_abs_det
from .._programs import jit
from ..faq import see
from ..sde import (
    GIVEN,
    LocalDiffusion,
    LogDensity,
    Skew,
    as_target,
    noise_matrix,
    overdamped_langevin,
    targeted_sde,
)
from ..train import AbstractStatefulObjective, History, fit
from ._flow_sampler import FlowSampler, GradientState
from ._sampler import AbstractSampler, AdjustedSampler, SamplerState, accept

ACCEPTANCE = 0.574  # of Langevin proposals at their best, in many dimensions (Roberts & Rosenthal 1998)
ROUNDS = 4
CLIMB = 50  # steps of Newton's method
FAR = 3.0  # standard deviations
CLIMBERS = 4  # chains that climb
TRIALS = 16  # draws to judge a place by
DRAWS = 512  # from the normals of all climbers, to move chains to


class WarmedUp(NamedTuple):
    """What `rf.warm_up` returns: a `sampler`, and where its chains have got to, `z`, `(chains, d)`."""

    sampler: AdjustedSampler
    z: Array


def warm_up(
    log_density: LogDensity, z0: Array, *, key: PRNGKeyArray, num_steps: int = 2000, climb: bool = True
) -> WarmedUp:
    """MALA for a target: an `rf.AdjustedSampler` with constant noise, and where its chains have got to.

    First four of the chains climb towards a mode (Newton's method). Each place on their way, with the
    curvature there, makes a normal distribution; each climber keeps the one nearest to the target (by
    E[log p − log q], as Pathfinder has it, Zhang et al. 2022). That is not the mode where the mode is far
    from the mass, as in a funnel. The best of the four gives a first σ. Chains that start far below the
    log density of draws from their mixture are moved to such draws, chosen by importance resampling, with
    a warning; the others keep their starting points. Then, in four rounds, the chains move, the step dt
    follows their acceptance towards 0.574 (Robbins & Monro), and after each round but the last σσᵀ becomes
    the covariance of their places. Nothing is adapted after that, so the sampler's distribution is exact.

    **Arguments:** `log_density`; `z0`, `(chains, d)`, a few chains at least; `num_steps` in all, each a
    gradient a chain, hundreds of them; `climb`, whether to climb first: without, all chains begin at z0.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    target = lambda z: -0.5 * (z[0] ** 2 + (z[1] / 100) ** 2)
    warm = rf.warm_up(target, jnp.zeros((8, 2)), key=jax.random.key(0), num_steps=400)
    chain = rf.sample_chain(warm.sampler, warm.z, key=jax.random.key(1), num_steps=1000)
    ```
    """
    z = starts("z0", z0)
    check_callable("log_density", log_density, "z -> ()")
    check_flag("climb", climb)
    least = least_steps(*z.shape)
    if check_count("num_steps", num_steps) < least:
        raise ValueError(
            f"num_steps must be at least {least} for {z.shape[0]} chains in {z.shape[1]} dimensions, to find "
            f"the spread of their places, got {num_steps}{see('too-few-steps')}"
        )
    length = num_steps // ROUNDS
    scale, dt = jnp.eye(z.shape[1]), jnp.asarray(0.1)
    AdjustedSampler(overdamped_langevin(log_density, z.shape[1]), dt).check(z)
    key, key_climb = jax.random.split(check_key(key))
    if climb:
        scale, z, moved = _climb(log_density, z, key_climb)
        if moved:
            warn(
                f"{int(moved)} of {len(z)} starting points z0 lie far below the log density of the mass that "
                "was found, and were replaced by draws from there: climb=False keeps them"
                + see("moved-starts")
            )
        dt = jnp.asarray(z.shape[1] ** (-1 / 3))
    sampler = AdjustedSampler(overdamped_langevin(log_density, z.shape[1], scale=scale), dt)
    sampler.check(z)
    for i, key_round in enumerate(jax.random.split(key, ROUNDS)):
        states, dt = adapt(sampler, z, key_round, length)
        z = states[-1]
        if i < ROUNDS - 1:
            places = states[length // 2 :]
            # Chains that stood still say nothing about how far to go.
            moved = jnp.all(jnp.ptp(places, axis=(0, 1)) > 0)
            scale = jnp.where(moved, _spread(places), scale)
            # Steps are now in units of the target's own size.
            dt = jnp.asarray(z.shape[1] ** (-1 / 3))
        sampler = AdjustedSampler(overdamped_langevin(log_density, z.shape[1], scale=scale), dt)
    return WarmedUp(sampler, z)


def starts(name: str, z0: Any) -> Array:
    z = finite_array(name, z0)
    if z.ndim != 2 or not z.size:
        raise ValueError(f"{name} must have shape (chains, d), got {z.shape}")
    return z


def least_steps(chains: int, dimension: int) -> int:
    """Steps after which the later half of a round has places enough for a covariance: two a dimension."""
    each = -(-2 * (dimension + 1) // chains)
    return ROUNDS * (2 * each - 1)


@jit
def _climb(log_density: LogDensity, z: Array, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
    """A root of the covariance of the best normal, places for all chains, and how many were moved."""
    target = as_target(log_density)
    key_trial, key_draw = jax.random.split(key)
    trials = jax.random.normal(key_trial, (TRIALS, z.shape[1]), z.dtype)
    # Climbers from all over z0: those that begin in different modes find each its own.
    climbers = z[np.unique(np.linspace(0, len(z) - 1, CLIMBERS).round().astype(int))]
    # One after another: the matrices are small, and LAPACK takes no batches well.
    centres, roots, bounds = jax.lax.map(lambda y: _best_normal(target, y, trials), climbers)
    best = jnp.argmax(bounds)
    draws, heights = _resample(target, centres, roots, bounds, key_draw, len(z))
    fine = jnp.isfinite(bounds[best]) & jnp.all(jnp.isfinite(heights))
    # Twice as far below the highest draw as the lowest draw is.
    low = 2 * jnp.min(heights) - jnp.max(heights)
    moved = fine & (jax.vmap(target)(z) < low)
    scale = jnp.where(fine, roots[best], jnp.eye(z.shape[1], dtype=z.dtype))
    return scale, jnp.where(moved[:, None], draws, z), jnp.sum(moved)


def _best_normal(target: LogDensity, start: Array, trials: Array) -> tuple[Array, Array, Array]:
    """Of the normals on the way up from a start the one nearest to the target: its mean, a root of its
    covariance, and E[log p − log q] but for a constant, −inf if there is none."""
    lengths = 0.5 ** jnp.arange(10.0)

    def uphill(y: Array, _) -> tuple[Array, tuple[Array, Array, Array]]:
        """Newton's step, with the curvature's absolute value, as long as it pays best; the normal there."""
        covariance = _inverse_curvature(target, y)
        root = _root(covariance)
        step = covariance @ jax.grad(target)(y)
        values = jax.vmap(target)(y[None] + trials @ root.T)
        inside = jnp.isfinite(values)
        # Of a normal that is cut off at the edge of the support, by Jensen: log of the share inside.
        share = jnp.mean(inside)
        bound = jnp.sum(jnp.where(inside, values, 0)) / jnp.maximum(jnp.sum(inside), 1)
        bound += jnp.log(share) + jnp.linalg.slogdet(root)[1]
        bound = jnp.where(jnp.all(jnp.isfinite(root)), bound, -jnp.inf)
        tries = jnp.concatenate([y[None] + lengths[:, None] * step[None], y[None]])
        heights = jax.vmap(target)(tries)
        best = jnp.argmax(jnp.where(jnp.isnan(heights), -jnp.inf, heights))
        return tries[best], (y, root, jnp.where(jnp.isnan(bound), -jnp.inf, bound))

    normals = jax.lax.scan(uphill, start, length=CLIMB)[1]
    best = jnp.argmax(normals[2])
    return jax.tree.map(lambda leaf: leaf[best], normals)


def _resample(
    target: LogDensity, centres: Array, roots: Array, bounds: Array, key: PRNGKeyArray, count: int
) -> tuple[Array, Array]:
    """Draws from the mixture of the normals, chosen with weights p/q: places near the modes that were found,
    in proportion to their mass; and log p there, −inf where there is none."""
    key_unit, key_choose = jax.random.split(key)
    usable = jnp.isfinite(bounds)
    roots = jnp.where(usable[:, None, None], roots, jnp.eye(roots.shape[-1], dtype=roots.dtype)[None])
    unit = jax.random.normal(key_unit, (len(roots), DRAWS // len(roots), roots.shape[-1]), roots.dtype)
    draws = jnp.reshape(centres[:, None] + unit @ jnp.swapaxes(roots, 1, 2), (-1, roots.shape[-1]))
    own = jnp.repeat(usable, unit.shape[1])

    def log_normal(centre: Array, root: Array) -> Array:
        gaps = jax.scipy.linalg.solve_triangular(root, (draws - centre[None]).T, lower=True)
        return -0.5 * jnp.sum(gaps**2, axis=0) - jnp.sum(jnp.log(jnp.abs(jnp.diagonal(root))))

    log_parts = jnp.where(usable[:, None], jax.vmap(log_normal)(centres, roots), -jnp.inf)
    heights = jax.vmap(target)(draws)
    log_weight = heights - jax.nn.logsumexp(log_parts, axis=0)
    inside = own & jnp.isfinite(log_weight)
    weight = jax.nn.softmax(jnp.where(inside, log_weight, -jnp.inf))
    chosen = jax.random.choice(key_choose, len(draws), (count,), p=jnp.where(inside, weight, 0))
    return draws[chosen], jnp.where(jnp.any(inside), heights[chosen], -jnp.inf)


def climbing_gradients(dimension: int, chains: int) -> int:
    """What `_climb` takes, a Hessian counted as 2d gradients and a value as one."""
    return min(CLIMBERS, chains) * CLIMB * (2 * dimension + 12 + TRIALS) + DRAWS + chains


def _inverse_curvature(target: LogDensity, y: Array) -> Array:
    """The inverse of the Hessian's absolute value; I where there is none, as on a cone."""
    hessian = jax.hessian(target)(y)
    flat = ~jnp.all(jnp.isfinite(hessian)) | jnp.all(hessian == 0)
    values, vectors = jnp.linalg.eigh(jnp.where(flat, jnp.eye(y.shape[0], dtype=y.dtype), hessian))
    size = jnp.maximum(jnp.abs(values), 1e-12 * jnp.max(jnp.abs(values)))
    return (vectors / size[None]) @ vectors.T


@jit
def adapt(sampler: AbstractSampler, z: Array, key: PRNGKeyArray, length: int) -> tuple[Array, Array]:
    """Steps while dt follows the acceptance: the places of all chains after each, and the dt of the later
    half, on average."""

    def step(
        carry: tuple[SamplerState, Array], inputs: tuple[Array, PRNGKeyArray]
    ) -> tuple[tuple[SamplerState, Array], tuple[Array, Array]]:
        state, log_dt = carry
        i, key = inputs
        now = eqx.tree_at(lambda s: s.dt, sampler, jnp.exp(log_dt))
        state, info = jax.vmap(now.step)(jax.random.split(key, z.shape[0]), state)
        log_dt = log_dt + (1 + i) ** -0.6 * (jnp.mean(info.acceptance) - ACCEPTANCE)
        return (state, log_dt), (state.z, log_dt)

    start = jax.vmap(sampler.init)(z), jnp.log(jnp.asarray(sampler.dt, z.dtype))
    inputs = jnp.arange(length, dtype=z.dtype), jax.random.split(key, length)
    _, (places, log_dt) = jax.lax.scan(step, start, inputs)
    return places, jnp.exp(jnp.mean(log_dt[length // 2 :]))


def _spread(places: Array) -> Array:
    """A root of the covariance of the places, a little towards its diagonal.

    Places further than `FAR` robust standard deviations are drawn in along the line to the median: tails such
    as Cauchy's have no covariance, and this has.
    """
    rows = jnp.reshape(places, (-1, places.shape[-1]))
    low, middle, high = jnp.quantile(rows, jnp.array([0.25, 0.5, 0.75], rows.dtype), axis=0)
    gap = rows - middle[None]
    width = (high - low) / 1.349  # of a normal distribution, its standard deviation
    radius = jnp.sqrt(jnp.mean((gap / jnp.where(width > 0, width, 1)[None]) ** 2, axis=1))
    rows = gap * (FAR / jnp.maximum(radius, FAR))[:, None]
    covariance = jnp.atleast_2d(jnp.cov(rows.T))
    weight = places.shape[-1] / (places.shape[-1] + rows.shape[0])
    return _root((1 - weight) * covariance + weight * jnp.diag(jnp.diag(covariance)))


def _root(covariance: Array) -> Array:
    """The lower triangular root of a matrix that ought to be positive, and is made so."""
    width = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), jnp.finfo(covariance.dtype).tiny))
    values, vectors = jnp.linalg.eigh(0.5 * (covariance + covariance.T) / jnp.outer(width, width))
    size = jnp.sqrt(jnp.maximum(values, 1e-12 * jnp.max(values)))
    # A = M Mᵀ and Mᵀ = QR make A = RᵀR: no square is taken, so none of the digits are lost.
    lower = jnp.linalg.qr((vectors * size[None]).T, mode="r").T
    return width[:, None] * lower * jnp.sign(jnp.diagonal(lower))[None]


GRADIENTS = 3  # of the log density in a training step: one to move, and the derivative of another
WARM_UP, FINISH = 0.1, 0.05  # shares of the budget
SUBSTEPS = 2  # in training; twice as many after it
LINEAR = 5.0  # log a down to which a refusal counts in full
QUICK = 0.02  # rate at which the weight of the volume follows the acceptance


class Tuned(eqx.Module):
    """What `rf.tune_sampler` returns.

    - `sampler`: an `rf.mcmc.FlowSampler`; nothing in it changes any more.
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

    A tenth of the budget goes to `rf.warm_up`, which finds a constant σ. From there an
    `rf.sde.LocalDiffusion` learns, on chains that move along, to make the moves of `rf.mcmc.FlowSampler` as
    large as they can be for the share of them that is accepted (Titsias & Dellaportas 2019). The rest sets
    dt. Then all is fixed, so the sampler's distribution is the target's, however well it has learned.

    **Arguments:**

    - `log_density`: `z -> ()`, up to a constant, on all of space: take the logarithm of what must be
      positive, as `roughflow.interop.numpyro.target_from_model` does.
    - `z0`: `(chains, d)`, where chains begin; 32 to 128 of them are good. Where there are several modes begin
      near all: chains that stay in one of them have an R-hat far above 1.
    - `num_gradients`: the budget, in gradients of the log density, of all chains together. A step of the
      training takes three a chain.
    - `skew`: a Q for `rf.targeted_sde`, such as `rf.sde.SkewNetwork`, to learn along with σ.
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
