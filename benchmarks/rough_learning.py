"""A neural SDE with the right Hurst exponent against one with H = ½. Part of `python -m benchmarks.rough`.

Data are transitions of dX = (X − X³) dt + 0.6 dB with H = 0.4, from starts N(0, 1), over spans of 0.02, 0.1
and 0.5, the noise beginning with each: 3000 to learn from and 6000 held out. The model is a network for the
drift, which does not see the time, and a learned σ; one with the right H and one with H = ½ have the same
number of parameters, and differ only in the driver. Over one span σ would make up for H: it is the spans'
variances, as T^2H, that tell. Transition densities are those of the endpoint: given the other coefficients,
the first is solved for.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

import roughflow as rf
from benchmarks.tables import standard_error, verdict

HURST, SCALE = 0.4, 0.6
SPANS = np.array([0.02, 0.1, 0.5])
FINE, ROWS, HELD = 64, 1000, 2000  # of each span
FUNCTIONS, STEPS, NEWTON = 3, 6, 4
TRAINING, RATE = 1500, 3e-3


class Model(eqx.Module):
    drift: rf.MLP
    log_scale: Array
    hurst: float = eqx.field(static=True)

    def end(self, start: Array, omega: Array, span: Array) -> Array:
        """Where the random ODE ends, by the classical Runge–Kutta method."""
        driver = rf.FractionalLegendre(self.hurst, FUNCTIONS)
        scale = jnp.exp(self.log_scale) * span**self.hurst
        slope = lambda s: scale * driver.slope(jnp.asarray(s), omega[:, None])[0]
        field = lambda s, x: span * self.drift(jnp.zeros(()), x[None])[0] + slope(s)
        h = 1 / STEPS

        def step(x: Array, s: Array) -> tuple[Array, None]:
            a = field(s, x)
            b = field(s + h / 2, x + h / 2 * a)
            c = field(s + h / 2, x + h / 2 * b)
            return x + h / 6 * (a + 2 * b + 2 * c + field(s + h, x + h * c)), None

        return jax.lax.scan(step, start, h * jnp.arange(STEPS))[0]

    def log_prob(self, row: Array, others: Array) -> Array:
        """log p(x₁ | x₀) of a row (x₀, x₁, span), with the other coefficients `(K, n − 1)` drawn."""
        start, end, span = row

        def one(rest: Array) -> Array:
            reach = lambda first: self.end(start, jnp.concatenate([first[None], rest]), span)

            def newton(first: Array, _: None) -> tuple[Array, Array]:
                value, slope = jax.jvp(reach, (first,), (jnp.ones(()),))
                return first - (value - end) / slope, slope

            first, slopes = jax.lax.scan(newton, jnp.zeros(()), None, length=NEWTON)
            slope = slopes[-1]
            return jax.scipy.stats.norm.logpdf(first) - jnp.log(jnp.abs(slope))

        return jax.nn.logsumexp(jax.vmap(one)(others)) - jnp.log(len(others))


def data(seed: int, count: int) -> np.ndarray:
    """Rows (x₀, x₁, span)."""
    key_start, *keys = jax.random.split(jax.random.key(seed), len(SPANS) + 1)
    sde = rf.StratonovichSDE(lambda t, z: z - z**3, lambda t, z: jnp.full((1, 1), SCALE))
    rows = []
    for span, key, key_x in zip(SPANS, keys, jax.random.split(key_start, len(SPANS)), strict=True):
        noise = rf.fractional_noise(HURST, FINE, key=key, shape=(count,), t1=span)[..., None]
        start = jax.random.normal(key_x, (count, 1))
        end = rf.simulate(sde, start, t1=float(span), increments=noise)
        rows.append(np.column_stack([start, end, np.full(count, span)]))
    return np.concatenate(rows)


def fitted(hurst: float, rows: np.ndarray) -> Model:
    network = rf.MLP(1, 1, 16, 2, time_dependent=False, key=jax.random.key(0))
    model = Model(network, jnp.asarray(0.0), hurst)
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, TRAINING))
    state, rows = optimiser.init(eqx.filter(model, eqx.is_inexact_array)), jnp.asarray(rows)

    @eqx.filter_jit
    def step(model, state, key):
        key_rows, key_paths = jax.random.split(key)
        batch = rows[jax.random.choice(key_rows, len(rows), (256,))]
        half = jax.random.normal(key_paths, (256, 2, FUNCTIONS - 1))
        others = jnp.concatenate([half, -half], axis=1)
        loss = lambda model: -jnp.mean(jax.vmap(model.log_prob)(batch, others))
        value, slopes = eqx.filter_value_and_grad(loss)(model)
        change, state = optimiser.update(slopes, state)
        return eqx.apply_updates(model, change), state, value

    for key in jax.random.split(jax.random.key(1), TRAINING):
        model, state, _ = step(model, state, key)
    return model


def learn() -> Iterator[str]:
    rows, held = data(0, ROWS), jnp.asarray(data(1, HELD))
    others = jax.random.normal(jax.random.key(2), (len(held), 64, FUNCTIONS - 1))
    scores = {}
    for hurst in (HURST, 0.5):
        model = fitted(hurst, rows)
        score = lambda a, model=model: model.log_prob(*a)
        scores[hurst] = np.asarray(jax.lax.map(score, (held, others), batch_size=500))
        each = " ".join(f"{part.mean():8.4f}" for part in np.split(scores[hurst], len(SPANS)))
        sigma = float(jnp.exp(model.log_scale))
        print(
            f"  H = {hurst:g}: log p {scores[hurst].mean():.4f}, by span {each}; σ = {sigma:.3f}", flush=True
        )
    gain = scores[HURST] - scores[0.5]
    claim = f"H = 0.4 gains {gain.mean():.4f} ± {standard_error(gain):.4f} nats a transition over H = ½"
    yield verdict(gain.mean() > 2 * standard_error(gain), claim)
