"""The model: a prior SDE, a decoder, and a posterior that is trained with both."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_key
from .._programs import jit
from ..density import weights_error
from ..sde import GIVEN, AbstractSDE
from ..series import Inputs, Observed, panel
from ._bound import lower_bound
from ._particles import particle_filter, resampled, simulated
from ._posterior import AbstractLatentSDE, InputTable, Posterior, Series

ROUNDS = 8  # number of independent runs of particles, from which the error is estimated
AT_ONCE = 16  # number of series that are evaluated at once
MAX_ERROR = 0.5  # nats; with a larger error, a single run may dominate the estimate
MAX_ROUNDING = 0.02  # rounding error of values in standard deviations, or of times in gaps
PRECISION = 'subtract a constant, or call jax.config.update("jax_enable_x64", True) first'
MAX_CHANGE = 0.2  # time step times the rate of the drift; variances are then wrong by about 1 %


class LikelihoodEstimate(NamedTuple):
    """Log-likelihoods of several series, each with a standard error.

    `bound` is the mean over runs of the logarithms of the estimates; its expectation is a lower bound that
    increases with the number of particles. `effective_particles` is the smallest effective number of
    particles of a run at any observation.

    ```python
    import numpy as np
    import roughflow as rf

    values, errors = np.array([-10.0, -12.0]), np.array([0.1, 0.9])
    estimate = rf.latent.LikelihoodEstimate(values, errors, values - errors, np.ones(2))
    estimate.total, estimate.total_error
    estimate.suspect  # [False, True]
    ```
    """

    log_likelihood: np.ndarray
    standard_error: np.ndarray
    bound: np.ndarray
    effective_particles: np.ndarray

    @property
    def suspect(self) -> np.ndarray:
        """Whether the runs differ so much that the value and its error are unreliable."""
        return ~(self.standard_error <= MAX_ERROR)

    @property
    def warning(self) -> str | None:
        """One line that says how many estimates are unreliable, or None."""
        if not self.suspect.any():
            return None
        return (
            f"{self.suspect.sum()} of {len(self.suspect)} log-likelihoods are unreliable, with errors up to "
            f"{np.nanmax(self.standard_error):.2g}: raise num_particles, or train longer or on more series"
        )

    @property
    def total(self) -> float:
        """The log-likelihood of all series together."""
        return float(np.sum(self.log_likelihood))

    @property
    def total_error(self) -> float:
        """The error of `total`: the combined standard errors, plus the bias. On average, the logarithm of a
        mean over runs is too low. For eight runs that differ little, this bias is a seventh of the distance
        from `bound`. The biases of several series add up."""
        bias = np.sum(self.log_likelihood - self.bound) / (ROUNDS - 1)
        return float(np.sqrt(np.sum(self.standard_error**2)) + bias)


class LatentPaths(NamedTuple):
    """Paths `(n, N, d)` of the hidden states and `(n, N, p)` of the observed values at `times`.

    ```python
    import numpy as np
    import roughflow as rf

    paths = rf.latent.LatentPaths(np.arange(3.0), np.zeros((100, 3, 2)), np.zeros((100, 3, 5)))
    np.quantile(paths.values, [0.05, 0.95], axis=0).shape  # bands: (2, 3, 5)
    ```
    """

    times: np.ndarray
    states: np.ndarray
    values: np.ndarray


class LatentSDE(AbstractLatentSDE):
    """A latent SDE: hidden states Z that follow an SDE, and observations y at discrete times:

        Z(0) ~ initial,    dZ = μ(t, Z) dt + σ(t, Z) dB,    yᵢ ~ decoder(Z(tᵢ)).

    `rf.fit_latent` trains the model together with a `posterior` of the states given a series.

    **Arguments:**

    - `sde`: an SDE with a square matrix σ.
    - `initial`: the distribution of the states at the first observation, such as an `rf.MultivariateNormal`.
    - `decoder`: a function from a state to a distribution of the `p` observed values, which is an object with
      `log_prob(y)` of shape `(p,)` and `sample(key)`, such as a NumPyro distribution.
    - `posterior`: an `rf.latent.Posterior`.
    - `unit`: the unit of time of the SDE; each series then starts at time 0. If None, the SDE uses the times
      of the data.
    - `max_step`: longest time step of simulations, as in `log_likelihood` and `sample`, in units of the SDE.
      If the drift changes faster, steps are shorter.

    ```python
    import jax, numpy as np
    import roughflow as rf

    rng, times, key = np.random.default_rng(0), np.arange(20.0), jax.random.key(0)
    values = [np.cumsum(rng.normal(size=(20, 3)), axis=0) for _ in range(16)]
    model = rf.fit_latent([times] * 16, values, dimension=2, key=key, steps=20, progress=False).model
    model.sample(times, key=key, num_samples=4).states.shape  # (4, 20, 2)
    ```
    """

    sde: AbstractSDE
    initial: Any
    decoder: Any
    posterior: Posterior
    unit: float | None = eqx.field(metadata=GIVEN)
    max_step: float = eqx.field(static=True)

    def log_likelihood(
        self,
        times: Any,
        values: Any,
        *,
        key: PRNGKeyArray,
        num_particles: int = 256,
        inputs: Any = None,
    ) -> LikelihoodEstimate:
        """Estimate the log-likelihood of one series or a list of them, with eight runs of a particle filter.

        Particles move in steps of at most `max_step`. Between two observations, 80 % of them follow the SDE
        conditioned on an approximation of the next observation, and the others follow the SDE itself. Weights
        correct for the difference, and particles are resampled if their weights are uneven. The mean weight
        is an unbiased estimate of the likelihood of the discretised SDE; the standard error is that of its
        logarithm. `log_prob` of the decoder must be twice differentiable. `inputs` are as in `rf.fit_latent`.
        """
        series, steps = self.arrays(times, values, inputs)
        check_count("num_particles", num_particles)
        logs, fewest = _likelihoods(self, series, num_particles, steps, check_key(key))
        return combined(np.asarray(logs, float), np.asarray(fewest))

    def lower_bound(
        self, times: Any, values: Any, *, key: PRNGKeyArray, num_times: int = 1024, inputs: Any = None
    ) -> np.ndarray:
        """An unbiased estimate, for each series, of the bound that training maximises."""
        series, _ = self.arrays(times, values, inputs)
        return np.asarray(_bounds(self, series, check_count("num_times", num_times), check_key(key)))

    def smoothed(
        self, times: Any, values: Any, *, key: PRNGKeyArray, num_samples: int = 256, inputs: Any = None
    ) -> LatentPaths:
        """Draw the states and values of one series at its observation times, given all observations.

        Missing values are drawn and observed values are kept, so each draw is an imputation of the series.
        """
        series, steps = self._one(times, values, inputs)
        key_states, key_values = jax.random.split(check_key(key))
        states = _posterior_paths(self, series, num_samples, steps, key_states)
        drawn = _decoded(self, states, key_values)
        kept = jnp.where(series.seen[None], series.values[None], drawn)
        return LatentPaths(self._shown(times, values), np.asarray(states), np.asarray(kept))

    def forecast(
        self,
        times: Any,
        values: Any,
        ahead: Any,
        *,
        key: PRNGKeyArray,
        num_samples: int = 256,
        inputs: Any = None,
    ) -> LatentPaths:
        """Draw the states and values after the last observation. The times `ahead` are numbers, counted from
        the last observation, or dates. `inputs` must cover these times too.

        The state at the last observation is drawn from the trained posterior. If the SDE does not describe
        the data well, this works better than filtering the states, and `rf.fit_latent(..., num_given=...)`
        trains the model for it.
        """
        later = panel(times, values, partial=True, fewest=2)[0].ahead(ahead)
        series, _ = self._one(times, values, inputs, float(later[-1]))
        key_states, key_paths, key_values = jax.random.split(check_key(key), 3)
        last = _last_states(self, series, check_count("num_samples", num_samples), key_states)
        when = np.concatenate([[0.0], later]) / (self.unit or 1.0)
        model, when = self.driven(series.inputs), series.times[-1] + jnp.asarray(when)
        states = _simulated(model, last, when, model.num_steps(when), key_paths)[:, 1:]
        return LatentPaths(later, np.asarray(states), np.asarray(_decoded(self, states, key_values)))

    def sample(
        self, times: Any, *, key: PRNGKeyArray, num_samples: int = 1, inputs: Any = None
    ) -> LatentPaths:
        """Draw states and values at `times`, numbers or dates; the state at the first time is drawn from the
        initial distribution."""
        parts = panel(times, np.zeros(np.shape(times)), partial=True, fewest=2)
        numbers = parts[0].times
        when = (numbers - numbers[0]) / self.unit if self.unit else numbers
        keys = jax.random.split(check_key(key), 3)
        start = self.initial.sample(key=keys[0], shape=(check_count("num_samples", num_samples),))
        table = self._table(inputs, parts)
        given = None if table is None else jax.tree.map(lambda leaf: leaf[0], table)
        model, when = self.driven(given), jnp.asarray(when)
        states = _simulated(model, start, when, model.num_steps(when), keys[1])
        return LatentPaths(numbers, np.asarray(states), np.asarray(_decoded(self, states, keys[2])))

    def arrays(self, times: Any, values: Any, inputs: Any = None, ahead: float = 0.0) -> tuple[Series, int]:
        """Return the series, padded to a common length and with times in units of the SDE, and the number of
        steps between observations. The inputs must cover the series and a time `ahead` after them."""
        parts = panel(times, values, partial=True, fewest=2)
        if parts[0].values.shape[1] != self.columns:
            given = parts[0].values.shape[1]
            raise ValueError(f"values have {given} columns, but the model has {self.columns}")
        table = self._table(inputs, parts, ahead)
        series = padded(parts, self.unit, np.asarray(self.posterior.encoder.location), table)
        return series, self.num_steps(series.times, series.inputs)

    def _table(self, inputs: Any, parts: list[Observed], ahead: float = 0.0) -> InputTable | None:
        table = input_table(inputs, parts, self.unit, self.max_step, ahead)
        count, fitted = 0 if table is None else table.columns.shape[-1], self.posterior.encoder.num_inputs
        if count != fitted:
            raise ValueError(f"inputs must have {fitted} columns, as in the fit; got {count}")
        return table

    def _one(self, times: Any, values: Any, inputs: Any = None, ahead: float = 0.0) -> tuple[Series, int]:
        series, steps = self.arrays(times, values, inputs, ahead)
        if len(series.times) > 1:
            raise ValueError(f"pass one series at a time, got {len(series.times)}")
        return jax.tree.map(lambda leaf: leaf[0], series), steps

    def _shown(self, times: Any, values: Any) -> np.ndarray:
        return panel(times, values, partial=True, fewest=2)[0].times

    def num_steps(self, times: Array, inputs: InputTable | None = None) -> int:
        """The number of time steps between two of the `times` `(..., N)`, which are in units of the SDE: a
        power of 2, so that few programs are compiled."""
        rates = np.asarray(_rates(self, times, inputs))
        rates = rates[np.isfinite(rates)]
        fastest = float(np.quantile(rates, 0.9)) if rates.size else 0.0
        span = float(np.max(np.diff(np.asarray(times))))
        return 2 ** max(0, math.ceil(math.log2(span * max(1 / self.max_step, fastest / MAX_CHANGE))))


def combined(logs: np.ndarray, fewest: np.ndarray) -> LikelihoodEstimate:
    """Combine the log-likelihoods `(S, ROUNDS)` from independent runs into one estimate per series."""
    largest = logs.max(axis=1, keepdims=True)
    weights = np.exp(logs - largest)
    mean = weights.mean(axis=1)
    total, error = largest[:, 0] + np.log(mean), weights_error((weights / mean[:, None]).T, np)
    # If runs differ by several nats, one of them dominates the mean, and the standard error is too small.
    # Logarithms of particle estimates are approximately normal (Bérard, Del Moral and Doucet 2014), so the
    # logarithm of the mean can also be estimated as that of a lognormal distribution, with another error.
    bound, variance = logs.mean(axis=1), logs.var(axis=1, ddof=1)
    lognormal = np.sqrt(variance / ROUNDS + variance**2 / (2 * (ROUNDS - 1)))
    error = np.maximum(error, lognormal + np.abs(bound + 0.5 * variance - total))
    return LikelihoodEstimate(total, error, bound, fewest)


def input_table(
    inputs: Any, parts: list[Observed], unit: float | None, max_step: float, ahead: float = 0.0
) -> InputTable | None:
    """Convert inputs, given once for all series or once per series, to tables of a common length that begin
    with the series. Functions are tabulated at two times per `max_step`."""
    if inputs is None:
        return None
    each = list(inputs) if isinstance(inputs, list) else [inputs] * len(parts)
    if len(each) != len(parts):
        raise ValueError(
            f"inputs must have one entry per series, or one for all: got {len(each)} for {len(parts)} series"
        )
    tables = []
    for given, part in zip(map(Inputs.of, each), parts, strict=True):
        start, end = part.times[0], part.times[-1] + ahead
        if isinstance(given, Inputs):
            times = given.numbers([replace(part, times=np.append(part.times, end))])
            columns = np.asarray(given.columns, float)
            if given.held:
                times, columns = np.repeat(times, 2)[1:], np.repeat(columns, 2, axis=0)[:-1]
            first, last = np.searchsorted(times, start, "right") - 1, np.searchsorted(times, end)
            times, columns = times[first : last + 1], columns[first : last + 1]
        else:
            count = 2 + math.ceil(2 * (end - start) / (max_step * (unit or 1.0)))
            times = np.linspace(start, end, count)
            columns = np.asarray(jax.vmap(lambda t: jnp.atleast_1d(given(t)))(jnp.asarray(times)))  # noqa: B023
        tables.append(((times - start) / unit if unit else times, columns))
    sizes = {columns.shape[1] for _, columns in tables}
    if len(sizes) > 1:
        raise ValueError(f"all series must have the same number of inputs, got {sorted(sizes)}")
    # A power of 2, so that few programs are compiled.
    longest = 2 ** math.ceil(math.log2(max(len(times) for times, _ in tables)))
    kind = jax.dtypes.canonicalize_dtype(float)
    leaves = [
        np.stack([filled(leaf, longest).astype(kind) for leaf in each]) for each in zip(*tables, strict=True)
    ]
    return InputTable(*map(jnp.asarray, leaves))


def padded(
    parts: list[Observed],
    unit: float | None,
    location: np.ndarray,
    inputs: InputTable | None = None,
    length: int = 0,
) -> Series:
    """Convert series to arrays of a common length, with `length` as its minimum. Missing values are
    interpolated in time, or set to `location` in a column without values."""
    length = max(length, *(len(part.times) for part in parts))
    rows = [_padded(part, length, unit, location) for part in parts]
    return Series(*(jnp.asarray(np.stack(leaves)) for leaves in zip(*rows, strict=True)), inputs=inputs)


def _padded(part: Observed, length: int, unit: float | None, location: np.ndarray) -> tuple[np.ndarray, ...]:
    times = part.times if unit is None else (part.times - part.times[0]) / unit
    seen = np.isfinite(part.values)
    columns = zip(part.values.T, seen.T, location, strict=True)
    known = [np.interp(times, times[s], v[s]) if s.any() else np.full(len(times), a) for v, s, a in columns]
    kind = jax.dtypes.canonicalize_dtype(float)
    gaps = np.diff(times.astype(kind).astype(float))
    if np.any(gaps <= 0) or np.max(np.abs(gaps - np.diff(times))) > MAX_ROUNDING * np.median(gaps):
        raise ValueError(f"times are too far from zero for JAX's precision, {kind}: {PRECISION}")
    values = filled(np.stack(known, axis=1), length).astype(kind)
    return filled(times.astype(kind), length), values, filled(seen, length, "constant")


def filled(array: np.ndarray, length: int, mode: Any = "edge") -> np.ndarray:
    """Pad an array with rows at its end, up to the given length."""
    return np.pad(array, ((0, length - len(array)), *[(0, 0)] * (array.ndim - 1)), mode=mode)


@jit
def _rates(model: LatentSDE, times: Array, inputs: InputTable | None) -> Array:
    """The largest singular values of the Jacobian of the drift, at the given times and at states drawn from
    the initial distribution."""

    def of_one(times: Array, inputs: InputTable | None) -> Array:
        z = model.initial.sample(key=jax.random.key(0), shape=times.shape)
        slopes = jax.vmap(jax.jacfwd(model.driven(inputs).drift, argnums=1))(times, z)
        return jnp.linalg.norm(slopes, ord=2, axis=(1, 2))

    return (jax.vmap(of_one) if times.ndim > 1 else of_one)(times, inputs)


@jit
def _likelihoods(
    model: LatentSDE, series: Series, num_particles: int, num_steps: int, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Log-likelihoods `(S, ROUNDS)` of all series, and the smallest effective numbers of particles `(S,)`."""

    def one(inputs: tuple[Series, PRNGKeyArray]) -> tuple[Array, Array]:
        given, key = inputs
        run = lambda key: particle_filter(model, given, num_particles, num_steps, key=key, keep=False)
        clouds = jax.vmap(run)(jax.random.split(key, ROUNDS))
        return clouds.log_likelihood, jnp.min(clouds.fewest)

    keys = jax.random.split(key, len(series.times))
    return jax.lax.map(one, (series, keys), batch_size=min(AT_ONCE, len(series.times)))


@jit
def _bounds(model: LatentSDE, series: Series, num_times: int, key: PRNGKeyArray) -> Array:
    one = lambda inputs: lower_bound(model, inputs[0], num_times, key=inputs[1])
    keys = jax.random.split(key, len(series.times))
    return jax.lax.map(one, (series, keys), batch_size=min(AT_ONCE, len(series.times)))


@jit
def _posterior_paths(
    model: LatentSDE, series: Series, num_samples: int, num_steps: int, key: PRNGKeyArray
) -> Array:
    """Draws of the states at the observations, from a particle filter."""
    key_run, key_pick = jax.random.split(key)
    cloud = particle_filter(model, series, max(num_samples, 256), num_steps, key=key_run)
    return resampled(cloud, key_pick, share=math.inf).history[:num_samples]


@jit
def _last_states(model: LatentSDE, series: Series, num_samples: int, key: PRNGKeyArray) -> Array:
    """Draws of the state at the last observation, from the trained posterior."""
    last, _ = model.posterior.at(model.posterior.read(series), series.times[-1])
    normals = jax.random.normal(key, (num_samples, model.dimension), series.times.dtype)
    return last.mean[None] + normals @ last.root.T


@jit
def _simulated(model: LatentSDE, start: Array, times: Array, num_steps: int, key: PRNGKeyArray) -> Array:
    run = lambda z, key: simulated(model, z, times, num_steps, key=key)
    return jax.vmap(run)(start, jax.random.split(key, len(start)))


@jit
def _decoded(model: LatentSDE, states: Array, key: PRNGKeyArray) -> Array:
    """One draw of the values for each state."""
    flat = jnp.reshape(states, (-1, states.shape[-1]))
    drawn = jax.vmap(lambda z, key: model.decoder(z).sample(key))(flat, jax.random.split(key, len(flat)))
    return jnp.reshape(drawn, (*states.shape[:-1], -1))
