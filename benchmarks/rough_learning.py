"""Neural SDEs with the right Hurst exponent and with H = ½. Part of `python -m benchmarks.rough`.

The data are transitions of dX = (X − X³) dt + 0.6 dB, where B is fractional with H = 0.4. Starting points are
uniform on [−1.5, 1.5], and time spans are 0.02, 0.1 and 0.5; the noise starts at the beginning of each
transition. Each span has 1000 transitions for training and 2000 for testing. The drift of the model is a
network that does not depend on time, and σ is learned. The models with the right H and with H = ½ differ only
in the driver. With a single span, σ could compensate for H; with several spans, the variances ∝ T^2H identify
H. With the right σ for the middle span, a normal distribution with H = ½ loses about (0.1 log 5)² = 0.026
nats on each of the other spans. The same experiment on data with H = ½ checks that the rougher model does not
always win.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

import roughflow as rf
from benchmarks.ends import log_prob_along
from benchmarks.tables import standard_error, verdict

ROUGH, BROWNIAN, SCALE = 0.4, 0.5, 0.6
SPANS = (0.02, 0.1, 0.5)
FINE, ROWS, HELD = 64, 1000, 2000  # time steps per span, training rows and test rows
FUNCTIONS, STEPS, NEWTON = 3, 3, 2
TRAINING, BATCH, RATE = 500, 192, 1e-2


def data(hurst: float, count: int, key: PRNGKeyArray) -> Array:
    """Rows (x₀, x₁, span), grouped by span."""
    sde = rf.StratonovichSDE(lambda t, z: z - z**3, lambda t, z: jnp.full((1, 1), SCALE))
    rows = []
    for span, key_span in zip(SPANS, jax.random.split(key, len(SPANS)), strict=True):
        key_start, key_noise = jax.random.split(key_span)
        noise = rf.driver.fractional_noise(hurst, FINE, key=key_noise, shape=(count,), t1=span)[..., None]
        start = jax.random.uniform(key_start, (count, 1), minval=-1.5, maxval=1.5)
        end = rf.simulate(sde, start, t1=span, increments=noise)
        rows.append(jnp.concatenate([start, end, jnp.full((count, 1), span)], axis=1))
    return jnp.concatenate(rows)


def model(hurst: float) -> rf.StochasticFlow:
    drift = rf.MLP(1, 1, 16, 2, time_dependent=False, key=jax.random.key(0))
    sde = rf.StratonovichSDE(drift, rf.ConstantDiffusion(jnp.eye(1)))
    driver, grid = rf.driver.FractionalLegendre(hurst, FUNCTIONS), rf.FixedGrid(rf.flow.RK4(), steps=STEPS)
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=driver, integrator=grid)


def log_prob(flow: rf.StochasticFlow, rows: Array, key: PRNGKeyArray, pairs: int) -> Array:
    """log p(x₁ | x₀) of rows `(B, 3)`, each from antithetic pairs of paths."""
    half = jax.random.normal(key, (len(rows), pairs, FUNCTIONS, 1))
    start, end, span = (jnp.tile(column[:, None], (1, 2 * pairs)) for column in rows.T)
    path = flow.driver.path(jnp.concatenate([half, -half], axis=1), span)
    first = jnp.eye(FUNCTIONS)[0]
    each = log_prob_along(flow, start, end, path, first, newton=NEWTON)
    return jax.nn.logsumexp(each, axis=1) - jnp.log(2 * pairs)


@eqx.filter_jit
def fitted(flow: rf.StochasticFlow, rows: Array, key: PRNGKeyArray) -> rf.StochasticFlow:
    params, static = eqx.partition(flow, eqx.is_inexact_array)
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, TRAINING))

    def loss(params: rf.StochasticFlow, key: PRNGKeyArray) -> Array:
        key_rows, key_paths = jax.random.split(key)
        batch = rows[jax.random.choice(key_rows, len(rows), (BATCH,))]
        return -jnp.mean(log_prob(eqx.combine(params, static), batch, key_paths, 1))

    def step(state: tuple, key: PRNGKeyArray) -> tuple[tuple, None]:
        params, moments = state
        change, moments = optimiser.update(jax.grad(loss)(params, key), moments)
        return (eqx.apply_updates(params, change), moments), None

    keys = jax.random.split(key, TRAINING)
    (params, _), _ = jax.lax.scan(step, (params, optimiser.init(params)), keys)
    return eqx.combine(params, static)


@eqx.filter_jit
def scores(flow: rf.StochasticFlow, rows: Array) -> Array:
    """log p of the held-out rows, `(spans, rows)`."""
    keys = jax.random.split(jax.random.key(2), len(rows) // HELD)
    parts = jnp.reshape(rows, (-1, HELD, 3))
    return jax.lax.map(lambda part: log_prob(flow, *part, 8), (parts, keys))


def learn() -> Iterator[str]:
    for truth, other in ((ROUGH, BROWNIAN), (BROWNIAN, ROUGH)):
        key_train, key_held, key_fit = jax.random.split(jax.random.key(0), 3)
        rows, held = data(truth, ROWS, key_train), data(truth, HELD, key_held)
        found = {}
        for hurst in (truth, other):
            flow = fitted(model(hurst), rows, key_fit)
            found[hurst] = np.asarray(scores(flow, held))
            sigma = abs(float(flow.sde.diffusion.matrix[0, 0]))
            means = ", ".join(f"{part.mean():.4f}" for part in found[hurst])
            print(
                f"  data H = {truth:g}, model H = {hurst:g}: log p by span {means}; σ = {sigma:.3f}",
                flush=True,
            )
        gain = found[truth] - found[other]
        told = lambda a: f"{a.mean():.4f} ± {standard_error(a):.4f}"
        for span, part in zip(SPANS, gain, strict=True):
            print(f"    span {span:g}: gain {told(part)}")
        every = gain.ravel()
        claim = f"data with H = {truth:g}: that H gains {told(every)} nats per transition over H = {other:g}"
        yield verdict(every.mean() > 2 * standard_error(every), claim)
