"""A lower bound on the log-likelihood of a latent SDE, computed without simulation."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._linear import solve_upper
from ..sde import solve_noise, spread_at
from ..train import AbstractObjective
from ._particles import simulated
from ._posterior import AbstractLatentSDE, Reading, Series


def mismatch(model: AbstractLatentSDE, reading: Reading, t: Array, u: Array) -> tuple[Array, Array]:
    """½ |σ⁻¹(f − μ)|² at z = m(t) + L(t) u: the rate at which the Kullback–Leibler divergence between
    posterior and prior paths grows; and f.

    f is the Itô drift with which a process with noise σ has the posterior marginals:

        f = m′ + (L′ + L A) u + ½ D ∇log q + ½ div D,    D = σσᵀ,    ∇log q = −L⁻ᵀ u

    (Bartosh, Vetrov and Naesseth 2025; A is explained in `Posterior`).
    """
    now, change, turn = model.posterior.moving(reading, t)
    z = now.mean + now.root @ u
    velocity = change.mean + (change.root + now.root @ turn) @ u
    spread = spread_at(lambda y: model.sde.noise(t, y), z)
    f = velocity + spread.drift(-solve_upper(now.root, u))
    return 0.5 * jnp.sum(solve_noise(spread.sigma, f - model.drift(t, z)) ** 2), f


def lower_bound(model: AbstractLatentSDE, series: Series, num_times: int, *, key: PRNGKeyArray) -> Array:
    """An unbiased estimate of the bound for one series:

        E log p(y | z) − KL(q(z at the first time) | p) − ∫ E ½ |σ⁻¹(f − μ)|² dt ≤ log p(y).

    The integral is estimated at stratified random times, with one draw of z at each. Padding repeats the last
    time of a series and does not change the bound.
    """
    keys, model = jax.random.split(key, 3), model.driven(series.inputs)
    reading, times = model.posterior.read(series), series.times
    draws = jax.random.normal(keys[0], (len(times), model.dimension), times.dtype)
    strata = (jnp.arange(num_times) + jax.random.uniform(keys[1], (num_times,), times.dtype)) / num_times
    span = times[-1] - times[0]
    between = jax.random.normal(keys[2], (num_times, model.dimension), times.dtype)
    cost = span * jnp.mean(
        jax.vmap(lambda t, u: mismatch(model, reading, t, u)[0])(times[0] + span * strata, between)
    )
    marginals = jax.vmap(lambda t: model.posterior.at(reading, t)[0])(times)
    z = marginals.mean + jnp.einsum("nij,nj->ni", marginals.root, draws)
    first = jax.tree.map(lambda leaf: leaf[0], marginals)
    start = model.initial.log_prob(z[0]) - first.log_prob_at(draws[0])
    return jnp.sum(jax.vmap(model.observed)(z, series.values, series.seen)) + start - cost


class SDEMatching(AbstractObjective):
    """The negative lower bound on the log-likelihood of an `rf.latent.LatentSDE`, per observed value.

    **Arguments:**

    - `columns`: number of observed columns.
    - `num_times`: number of random times per series at which the drifts of posterior and prior are compared.
    - `input_shape`: number of times at which inputs are given, and number of inputs.

    ```python
    import roughflow as rf

    objective = rf.latent.SDEMatching(columns=3, num_times=16)
    ```
    """

    columns: int = eqx.field(static=True)
    num_times: int = eqx.field(static=True, default=32)
    input_shape: tuple[int, ...] = eqx.field(static=True, default=(0, 0))
    uses_data: ClassVar[bool] = True

    def __call__(self, model: Any, x: Array | None, *, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        assert x is not None
        series = Series.of_rows(x, self.columns, self.input_shape)
        bound = jax.vmap(lambda one, k: lower_bound(model, one, self.num_times, key=k))
        return -jnp.sum(bound(series, jax.random.split(key, len(x)))) / jnp.sum(series.seen), {}


class Forecasting(AbstractObjective):
    """The mean of two losses: that of `rf.latent.SDEMatching`, and the negative, per observed value, of the
    following bound for a forecast from the first n = `num_given` observations:

        bound on log p(y₁, …, yₙ) + E log p(yₙ₊₁, … | z).

    Here z is drawn from the posterior at the last given observation and then follows the prior SDE, which is
    simulated with `num_steps` steps between two observations. The second term is also a lower bound on a
    log-likelihood, and training with it fine-tunes a model for long forecasts. The first loss preserves the
    accuracy of the posterior given a whole series.

    ```python
    import roughflow as rf

    objective = rf.latent.Forecasting(columns=3, num_given=5, num_steps=2)
    ```
    """

    columns: int = eqx.field(static=True)
    num_given: int = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)
    num_times: int = eqx.field(static=True, default=32)
    input_shape: tuple[int, ...] = eqx.field(static=True, default=(0, 0))
    uses_data: ClassVar[bool] = True

    def __call__(self, model: Any, x: Array | None, *, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        assert x is not None
        series = Series.of_rows(x, self.columns, self.input_shape)

        def bound(one: Series, key: PRNGKeyArray) -> Array:
            keys = jax.random.split(key, 4)
            given, later = one.split(self.num_given)
            last, _ = model.posterior.at(model.posterior.read(given), given.times[-1])
            z = last.mean + last.root @ jax.random.normal(keys[0], (model.dimension,), x.dtype)
            times = jnp.concatenate([given.times[-1:], later.times])
            z = simulated(model.driven(one.inputs), z, times, self.num_steps, key=keys[1])[1:]
            forecast = jnp.sum(jax.vmap(model.observed)(z, later.values, later.seen))
            forecast = forecast + lower_bound(model, given, self.num_times, key=keys[2])
            return 0.5 * (forecast + lower_bound(model, one, self.num_times, key=keys[3]))

        bounds = jax.vmap(bound)(series, jax.random.split(key, len(x)))
        return -jnp.sum(bounds) / jnp.sum(series.seen), {}
