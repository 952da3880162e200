"""Flows to train: neural SDEs, velocity fields, and noise for flows that were fitted without noise."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count, check_key, check_number, check_positive
from .._programs import split
from ..density import StochasticFlow
from ..faq import see
from ..flow import (
    LATE,
    AbstractIntegrator,
    ExactDivergence,
    FixedGrid,
    HutchinsonDivergence,
    Normal,
    default_steps,
    order_of,
)
from ..sde import (
    Activation,
    ConstantDiffusion,
    Diffusion,
    FadingDiffusion,
    FullDiffusion,
    ItoSDE,
    NoDiffusion,
    RestoringDrift,
    TransportSDE,
    VelocityNetwork,
    noise_matrix,
    silu,
    tanh,
)

STATE_DEPENDENT_DIMENSION = 2  # the dimension in which noise depends on the state by default
MIN_PROBED_DIMENSION = 17  # minimum dimension for Hutchinson's divergence estimator
VELOCITY_STEPS = 16  # solver steps for a velocity field


def neural_flow(
    dimension: int,
    width: int = 64,
    depth: int = 3,
    activation: Activation = tanh,
    *,
    time_dependent: bool = False,
    noise: float = 0.5,
    key: PRNGKeyArray,
) -> StochasticFlow:
    """A neural SDE with a standard normal base, which it leaves invariant before training.

    The drift is an `rf.sde.RestoringDrift`. The noise is an `rf.FullDiffusion` in two dimensions, otherwise a
    trainable constant matrix. In 17 or more dimensions the flow uses Hutchinson's divergence
    estimator.

    **Arguments:** `dimension`; `width` and `depth` of the drift network; `activation` and `time_dependent`,
    for all networks; `noise`, the scale λ of the noise, 0 for a continuous normalizing flow.

    ```python
    import jax
    import roughflow as rf

    flow = rf.neural_flow(2, noise=0.5, width=16, depth=2, key=jax.random.key(0))
    ```
    """
    check_count("dimension", dimension)
    check_number("noise", noise, least=0)
    key_drift, key_noise = split(check_key(key))
    drift = RestoringDrift(
        dimension, noise, width, depth, activation, time_dependent=time_dependent, key=key_drift
    )
    if noise == 0:
        diffusion = NoDiffusion()
    elif dimension == STATE_DEPENDENT_DIMENSION:
        diffusion = FullDiffusion(
            dimension, width, 1, activation, time_dependent=time_dependent, scale=noise, key=key_noise
        )
        diffusion = eqx.tree_at(lambda d: d.network.weights[-1], diffusion, replace_fn=_nothing)
    else:
        diffusion = ConstantDiffusion(jnp.asarray(noise * np.eye(dimension), float))
    divergence = HutchinsonDivergence() if dimension >= MIN_PROBED_DIMENSION else ExactDivergence()
    base = Normal(jnp.asarray(np.zeros(dimension), float))
    return StochasticFlow(ItoSDE(drift, diffusion), base, divergence=divergence)


def _nothing(weights: Array) -> Array:
    return jnp.asarray(np.zeros(weights.shape, weights.dtype))


def velocity_flow(
    dimension: int,
    width: int = 128,
    depth: int = 3,
    activation: Activation = silu,
    *,
    num_features: int = 64,
    num_given: int = 0,
    key: PRNGKeyArray,
) -> StochasticFlow:
    """A flow without noise for `rf.Interpolant` to train: an `rf.sde.VelocityNetwork` from a normal base.

    **Arguments:** those of `rf.sde.VelocityNetwork`. The given coordinates add `num_given` dimensions.

    ```python
    import jax
    import roughflow as rf

    flow = rf.train.velocity_flow(2, width=16, depth=2, key=jax.random.key(0))
    ```
    """
    velocity = VelocityNetwork(
        dimension, width, depth, activation, num_features=num_features, num_given=num_given, key=key
    )
    base = Normal(jnp.asarray(np.zeros(dimension + num_given), float))
    integrator = FixedGrid(steps=VELOCITY_STEPS, late=LATE)
    return StochasticFlow(ItoSDE(velocity, NoDiffusion()), base, integrator=integrator)


def with_noise(flow: Any, diffusion: Diffusion | float | None, *, fading: float | None = 0.5) -> Any:
    """The flow with different noise and the same distribution at every time: an `rf.sde.TransportSDE`.

    Noise can be chosen, changed or removed after training. It can also be trained on its own with any
    objective, with `frozen=lambda flow: flow.sde.transport`.

    The distribution is unchanged if velocity and score are consistent, as they are after training with
    `rf.Interpolant()`. Likelihood training with noise changes the velocity but not the score. A learned
    proposal is dropped, because it depends on the old noise.

    Fading noise and its score change fastest near the end. An `rf.FixedGrid` with equal steps is replaced by
    one with the same number of steps that shrink towards the end (`late=2`).

    **Arguments:**

    - `flow`: a flow with an `rf.sde.TransportSDE`, such as the result of `rf.fit` with `rf.Interpolant()`; or
      the result of `rf.fit_density` or its model, with noise in units of the standardised data.
    - `diffusion`: Σ(t, z), any diffusion; a number λ for λI on all coordinates but the given ones; an
      `rf.sde.FadingDiffusion`, to which no further fading is applied; None for no noise.
    - `fading`: p ≥ ½ in σ = (1 − t/T)^p Σ (`rf.sde.FadingDiffusion`); None for σ = Σ, which requires a score
      that is finite up to the end.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key = jax.random.key(0)
    transport = rf.sde.NormalTransport(rf.sde.VelocityNetwork(2, width=8, key=key), jnp.zeros(2), jnp.ones(2))
    flow = rf.StochasticFlow(rf.sde.TransportSDE(transport), rf.Normal(jnp.zeros(2)))
    noisy = rf.with_noise(flow, 0.5)
    other = rf.with_noise(noisy, rf.FullDiffusion(2, width=8, key=key))
    again = rf.with_noise(other, None)  # the ODE
    ```
    """
    if isinstance(diffusion, float | int):
        check_positive("diffusion", diffusion)
    elif diffusion is not None:
        check_callable("diffusion", diffusion, "(t, z) -> (d, m), a number or None")
    if fading is not None:
        check_number("fading", fading, least=0.5)
    if not isinstance(flow, StochasticFlow):
        if not hasattr(flow, "with_noise"):
            raise TypeError(
                f"flow must be an rf.StochasticFlow or a fitted density, got {type(flow).__name__}"
            )
        return flow.with_noise(diffusion, fading=fading)
    if not isinstance(flow.sde, TransportSDE):
        raise TypeError(
            f"with_noise needs a flow with a known score, i.e. with an rf.sde.TransportSDE, got "
            f"{type(flow.sde).__name__}: fit it with rf.Interpolant(), or give rf.sde.GivenTransport a score"
            + see("noise-afterwards")
        )
    if isinstance(diffusion, float | int):
        own = flow.dimension - flow.sde.transport.num_given
        diffusion = ConstantDiffusion(diffusion * jnp.eye(flow.dimension, own))
    if not (diffusion is None or fading is None or isinstance(diffusion, NoDiffusion | FadingDiffusion)):
        diffusion = FadingDiffusion(diffusion, flow.t1, fading)
    sde = TransportSDE(flow.sde.transport, diffusion)
    _check_given(sde, flow.dimension)
    return StochasticFlow(
        sde,
        flow.base,
        flow.t1,
        flow.driver,
        flow.divergence,
        flow.correction,
        _towards_the_end(flow) if isinstance(diffusion, FadingDiffusion) else flow.integrator,
    )


def _towards_the_end(flow: StochasticFlow) -> AbstractIntegrator:
    """The integrator of the flow, with steps that shrink towards the end if it has equal steps.

    For a flow fitted to star data with λ = 1 and 16 steps, errors of log p are 0.2 to 0.4 with equal steps,
    and 0.004 to 0.04 with shrinking ones.
    """
    grid = flow.integrator
    if not isinstance(grid, FixedGrid) or grid.late != 1:
        return grid
    # The first steps are twice as long as equal steps, so twice as many are needed to resolve the waves of
    # the driver.
    steps = grid.steps or 2 * default_steps(order_of(grid.solver), flow.driver, flow.dimension)
    return FixedGrid(grid.solver, steps, grid.gradient, grid.escape_rate, LATE)


def _check_given(sde: TransportSDE, dimension: int) -> None:
    """Reject noise on the given coordinates, which would change the distribution."""
    given = sde.transport.num_given
    if not given:
        return
    sigma = noise_matrix(sde.noise(jnp.zeros(()), jnp.zeros(dimension)))
    if jnp.any(sigma[-given:] != 0):
        raise ValueError(
            f"the last {given} of {dimension} coordinates are given, but this noise would move them: its "
            f"matrix must be zero in these rows"
        )


MIN_GAIN = 0.002  # minimum gain from noise, in nats per row
# Candidate sizes, and the number of rows on which they are compared.
NOISE_SIZES, NOISE_ROWS = (0.25, 0.5, 1.0), 500


def best_noise(flow: StochasticFlow, rows: Array, key: PRNGKeyArray) -> float:
    """The noise scale with the highest likelihood; 0 unless the gain is significant and not negligible."""
    rows = rows[:NOISE_ROWS]
    plain = flow.log_prob(rows, key=key)
    best, gain = 0.0, MIN_GAIN
    for size in NOISE_SIZES:
        gains = np.asarray(with_noise(flow, size).log_prob(rows, key=key) - plain)
        if gains.mean() > max(gain, 2 * gains.std() / len(gains) ** 0.5):
            best, gain = size, float(gains.mean())
    return best
