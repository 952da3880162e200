"""The encoder, the Gaussian marginals of the posterior process, the decoder, and the parts of a latent
model."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._linear import solve_lower
from ..sde import GIVEN, MLP, AbstractItoSDE, AbstractSDE, DiagonalDiffusion, to_ito
from ..series.hidden._state_space import driven_by


class InputTable(eqx.Module):
    """Piecewise linear inputs u(t) `(m,)`: `times` `(..., K)` and `columns` `(..., K, m)`. Inputs jump where
    a time is repeated."""

    times: Array
    columns: Array

    def __call__(self, t: Array) -> Array:
        return jax.vmap(lambda column: jnp.interp(t, self.times, column), in_axes=1)(self.columns)

    def integral(self, scaling: Array) -> "InputTable":
        """The integral of (u − location)/scale, with both in `scaling` `(2, m)`, up to each of the times."""
        scaled = (self.columns - scaling[:1]) / scaling[1:]
        areas = 0.5 * (scaled[1:] + scaled[:-1]) * jnp.diff(self.times)[:, None]
        return InputTable(self.times, jnp.pad(jnp.cumsum(areas, axis=0), ((1, 0), (0, 0))))


class Series(eqx.Module):
    """One series, or a batch of series of a common length: `times` `(..., N)`, `values` and `seen`
    `(..., N, p)`, and inputs, if there are any.

    Missing values are interpolated in time, and `seen` is False for them. A shorter series is padded by
    repeating its last time.
    """

    times: Array
    values: Array
    seen: Array
    inputs: InputTable | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The number of times at which inputs are given, and the number of inputs."""
        return (0, 0) if self.inputs is None else self.inputs.columns.shape[-2:]

    def rows(self) -> np.ndarray:
        """Flatten each series to one row, `(..., N (1 + 2p) + K (1 + m))`, the format of training batches."""
        tables: list[tuple[Array, ...]] = [(self.times, self.values, self.seen)]
        if self.inputs is not None:
            tables.append((self.inputs.times, self.inputs.columns))
        joined = [np.concatenate([np.asarray(t)[..., None], *rest], axis=-1) for t, *rest in tables]
        return np.concatenate([table.reshape(*table.shape[:-2], -1) for table in joined], axis=-1)

    def split(self, count: int) -> tuple["Series", "Series"]:
        """The series split into its first `count` observations and the others."""
        leaves = self.times, self.values, self.seen
        first, rest = ([leaf[part] for leaf in leaves] for part in (slice(count), slice(count, None)))
        return Series(*first, inputs=self.inputs), Series(*rest, inputs=self.inputs)

    @staticmethod
    def of_rows(rows: Array, columns: int, input_shape: tuple[int, ...] = (0, 0)) -> "Series":
        """The inverse of `rows`, for `columns` observed columns and inputs of shape (K, m)."""
        count, size = input_shape
        end = rows.shape[-1] - count * (1 + size)
        table = jnp.reshape(rows[..., :end], (*rows.shape[:-1], -1, 1 + 2 * columns))
        inputs = None
        if count:
            more = jnp.reshape(rows[..., end:], (*rows.shape[:-1], count, 1 + size))
            inputs = InputTable(more[..., 0], more[..., 1:])
        return Series(table[..., 0], table[..., 1 : 1 + columns], table[..., 1 + columns :] > 0.5, inputs)


class Gaussian(eqx.Module):
    """N(mean, root rootᵀ), with a lower triangular root."""

    mean: Array
    root: Array

    def log_prob_at(self, u: Array) -> Array:
        """The log-density at mean + root u."""
        size = jnp.sum(jnp.log(jnp.diagonal(self.root)))
        return -0.5 * jnp.sum(u**2) - 0.5 * u.size * math.log(2 * math.pi) - size

    def log_prob(self, z: Array) -> Array:
        return self.log_prob_at(solve_lower(self.root, z - self.mean))


class Encoder(eqx.Module):
    """Two recurrent networks that read a series forwards and backwards.

    Each observation becomes a row of standardised values, flags for observed values, the time since the
    previous row, and the means of the inputs during this time.

    **Arguments:**

    - `location`, `scale`: location and scale of the values, shape `(p,)`.
    - `width`: width of the networks.
    - `unit`: a unit of time in which time differences are of order 1.
    - `input_scaling`: locations and scales of m inputs, shape `(2, m)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    encoder = rf.latent.Encoder(jnp.zeros(3), jnp.ones(3), 16, key=jax.random.key(0))
    encoder.standardised(jnp.ones(3)).shape  # (3,)
    ```
    """

    location: Array = eqx.field(metadata=GIVEN)
    scale: Array = eqx.field(metadata=GIVEN)
    unit: float = eqx.field(metadata=GIVEN)
    forwards: eqx.nn.GRUCell
    backwards: eqx.nn.GRUCell
    input_scaling: Array | None = eqx.field(metadata=GIVEN, default=None)

    def __init__(
        self,
        location: ArrayLike,
        scale: ArrayLike,
        width: int,
        *,
        unit: float = 1.0,
        input_scaling: ArrayLike | None = None,
        key: PRNGKeyArray,
    ):
        self.location, self.scale, self.unit = jnp.asarray(location), jnp.asarray(scale), unit
        self.input_scaling = None if input_scaling is None else jnp.asarray(input_scaling)
        inputs, keys = 2 * self.location.size + 1 + self.num_inputs, jax.random.split(key)
        self.forwards = eqx.nn.GRUCell(inputs, width, key=keys[0])
        self.backwards = eqx.nn.GRUCell(inputs, width, key=keys[1])

    @property
    def num_inputs(self) -> int:
        return 0 if self.input_scaling is None else self.input_scaling.shape[1]

    def standardised(self, values: Array) -> Array:
        return (values - self.location) / self.scale

    def __call__(self, series: Series) -> Array:
        """The states of both networks at the observations, `(N, 2 width)`."""
        gap = jnp.diff(series.times, prepend=series.times[:1]) / self.unit
        seen = jnp.asarray(series.seen, series.values.dtype)
        values = jax.vmap(self.standardised)(series.values)
        inputs = jnp.concatenate([values, seen, jnp.log1p(gap)[:, None]], axis=1)
        if self.input_scaling is not None and series.inputs is not None:
            total = jax.vmap(series.inputs.integral(self.input_scaling))(series.times) / self.unit
            gained = jnp.diff(total, axis=0, prepend=total[:1])
            positive = (gap > 0)[:, None]
            mean = jnp.where(positive, gained / jnp.where(positive, gap[:, None], 1), 0)
            inputs = jnp.concatenate([inputs, mean], axis=1)
        # Padding rows do not change the states.
        real = jnp.any(series.seen, axis=1)

        def scan(cell: eqx.nn.GRUCell, reverse: bool) -> Array:
            def step(state: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
                state = jnp.where(row[1], cell(row[0], state), state)
                return state, state

            blank = jnp.zeros(cell.hidden_size, inputs.dtype)
            return jax.lax.scan(step, blank, (inputs, real), reverse=reverse)[1]

        return jnp.concatenate([scan(self.forwards, False), scan(self.backwards, True)], axis=1)


class Reading(eqx.Module):
    """The `features` `(N, k)` of one series at its `times` `(N,)`, and the integral of its inputs."""

    times: Array
    features: Array
    integral: InputTable | None


class Posterior(eqx.Module):
    """Gaussian marginals q(z | t) = N(m(t), L(t) L(t)ᵀ) of the states, given a series.

    Features of the series are interpolated linearly between observations, so m and L are continuous with
    kinks at observations, as in the exact posterior of a linear model. A third output, the skew matrix A(t),
    does not change the marginals: it rotates u = L⁻¹(z − m) by u′ = A u. Without A, the process could not
    follow the rotations of an SDE.

    **Arguments:**

    - `encoder`: an `rf.latent.Encoder`.
    - `direct`: a linear map `(p, d)` from standardised values to states.
    - `width`: width of the network.
    - `length`: initial value of the time over which features are averaged.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    keys = jax.random.split(jax.random.key(0))
    encoder = rf.latent.Encoder(jnp.zeros(3), jnp.ones(3), 16, key=keys[0])
    posterior = rf.latent.Posterior(encoder, jnp.ones((3, 2)), 16, 0.05, key=keys[1])
    posterior.dimension  # 2
    ```
    """

    encoder: Encoder
    direct: Array  # (p, d)
    head: MLP
    log_length: Array
    dimension: int = eqx.field(static=True)

    def __init__(self, encoder: Encoder, direct: ArrayLike, width: int, length: float, *, key: PRNGKeyArray):
        self.log_length = jnp.asarray(math.log(length))
        self.encoder, self.direct = encoder, jnp.asarray(direct)
        self.dimension = d = self.direct.shape[1]
        inputs = 2 * encoder.forwards.hidden_size + 1 + encoder.num_inputs
        self.head = MLP(inputs, d + d * d, width, 2, activation=jax.nn.silu, scale=0.1, key=key)

    def read(self, series: Series) -> Reading:
        direct = jax.vmap(self.encoder.standardised)(series.values) @ self.direct
        features = jnp.concatenate([direct, self.encoder(series)], axis=1)
        # Features are averaged over a time of `exp(log_length)`, so that marginals do not jump between two
        # observations that are close in time. Padding rows have zero weight.
        real = jnp.diff(series.times, prepend=series.times[:1] - 1) > 0
        distance = jnp.abs(series.times[:, None] - series.times[None])
        logits = jnp.where(real[None], -distance / jnp.exp(self.log_length), -jnp.inf)
        scaling, inputs = self.encoder.input_scaling, series.inputs
        integral = None if scaling is None or inputs is None else inputs.integral(scaling)
        return Reading(series.times, jax.nn.softmax(logits, axis=1) @ features, integral)

    def at(self, reading: Reading, t: Array) -> tuple[Gaussian, Array]:
        """The marginal at time t, and A."""
        times, d = reading.times, self.dimension
        # The interval that contains t, or the last one before the series repeats its last time.
        before = jnp.minimum(jnp.sum(times <= t), jnp.sum(jnp.diff(times) > 0)) - 1
        gap = times[before + 1] - times[before]
        share = (t - times[before]) / gap
        features = (1 - share) * reading.features[before] + share * reading.features[before + 1]
        # A time coordinate that is 0 at observations, for continuity, and varies slowly between close
        # observations.
        clock = share * (1 - share) * gap / (gap + jnp.exp(self.log_length))
        clock = clock * jnp.sqrt(1 + gap / self.encoder.unit)
        extra = [clock[None]]
        if reading.integral is not None:
            # Inputs may jump, but marginals are continuous. The network is therefore given the integral of
            # the inputs, minus its linear interpolation between the two observations.
            start, end = reading.integral(times[before]), reading.integral(times[before + 1])
            bend = reading.integral(t) - (1 - share) * start - share * end
            extra.append(bend / self.encoder.unit)
        out = self.head(t, jnp.concatenate([features[d:], *extra]))
        mean, square = features[:d] + out[:d], jnp.reshape(out[d:], (d, d))
        # Entries on and below the diagonal are those of the root, entries above it those of the skew matrix.
        upper = jnp.triu(square, 1)
        root = jnp.tril(square, -1) + jnp.diag(jnp.exp(jnp.diagonal(square) - 1.5))
        return Gaussian(mean, root), (upper - upper.T) / self.encoder.unit

    def moving(self, reading: Reading, t: Array) -> tuple[Gaussian, Gaussian, Array]:
        """The marginal at time t, its derivative in t, and A."""
        along = lambda s: self.at(reading, s)
        (now, turn), (change, _) = jax.jvp(along, (t,), (jnp.ones_like(t),))
        return now, change, turn


class DrivenSDE(AbstractItoSDE):
    """The default SDE with inputs, dZ = (N(Z, u(t)) − ½ Z) dt + σ(Z) dB, with a network N that is initially
    zero and a diagonal σ. Inputs are standardised.

    **Arguments:** `dimension` is the number of states, `input_scaling` is that of `rf.latent.Encoder`, and
    `width` is the width of the networks.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    scaling = jnp.array([[0.0], [1.0]])  # one input with mean 0 and standard deviation 1
    sde = rf.latent.DrivenSDE(2, scaling, 16, key=jax.random.key(0))
    sde.drift(0.0, jnp.ones(2), jnp.ones(1))  # -0.5
    ```
    """

    network: MLP
    scale: DiagonalDiffusion
    input_scaling: Array = eqx.field(metadata=GIVEN)

    def __init__(self, dimension: int, input_scaling: ArrayLike, width: int, *, key: PRNGKeyArray):
        keys, self.input_scaling = jax.random.split(key), jnp.asarray(input_scaling)
        # The network is bounded (tanh), so the restoring drift dominates far away.
        size = dimension + self.input_scaling.shape[1]
        self.network = MLP(size, dimension, width, 2, scale=0.0, key=keys[0])
        self.scale = DiagonalDiffusion(dimension, width, key=keys[1])

    def drift(self, t: Array, z: Array, *inputs: Array) -> Array:
        scaled = (inputs[0] - self.input_scaling[0]) / self.input_scaling[1]
        return self.network(t, jnp.concatenate([z, scaled])) - 0.5 * z

    def diffusion(self, t: Array, z: Array, *inputs: Array) -> Any:
        return self.scale(t, z)


class IndependentNormal(eqx.Module):
    """Independent normal distributions, with one log-density per entry.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    normal = rf.latent.IndependentNormal(jnp.zeros(3), jnp.ones(3))
    normal.log_prob(jnp.zeros(3)).shape  # (3,)
    ```
    """

    mean: Array
    deviation: Array

    def log_prob(self, y: Array) -> Array:
        residual = (y - self.mean) / self.deviation
        return -0.5 * residual**2 - jnp.log(self.deviation) - 0.5 * math.log(2 * math.pi)

    def sample(self, key: PRNGKeyArray) -> Array:
        return self.mean + self.deviation * jax.random.normal(key, self.mean.shape, self.mean.dtype)


class NormalDecoder(eqx.Module):
    """Observations y = a + s (C z + N(z)) + noise with a network N, initially zero, and independent normal
    noise with trained standard deviations.

    **Arguments:**

    - `location`, `scale`: a and s, shape `(p,)`.
    - `loadings`: C, shape `(p, d)`.
    - `deviation`: initial standard deviation of the noise, in units of s.
    - `width`, `depth`: width and depth of the network; with depth 0, there is no network.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    decoder = rf.latent.NormalDecoder(jnp.zeros(3), jnp.ones(3), jnp.ones((3, 2)), key=jax.random.key(0))
    decoder(jnp.zeros(2)).mean.shape  # (3,)
    ```
    """

    location: Array = eqx.field(metadata=GIVEN)
    scale: Array = eqx.field(metadata=GIVEN)
    loadings: Array
    network: MLP | None
    log_deviation: Array

    def __init__(
        self,
        location: ArrayLike,
        scale: ArrayLike,
        loadings: ArrayLike,
        *,
        deviation: float = 0.5,
        width: int = 64,
        depth: int = 1,
        key: PRNGKeyArray,
    ):
        self.location, self.scale = jnp.asarray(location, float), jnp.asarray(scale, float)
        self.loadings = jnp.asarray(loadings, float)
        p, d = self.loadings.shape
        self.network = MLP(d, p, width, depth, activation=jax.nn.silu, scale=0.0, key=key) if depth else None
        self.log_deviation = jnp.full(p, math.log(deviation), self.loadings.dtype)

    def __call__(self, z: Array) -> IndependentNormal:
        mean = self.loadings @ z
        if self.network is not None:
            mean = mean + self.network(jnp.zeros((), z.dtype), z)
        return IndependentNormal(self.location + self.scale * mean, self.scale * jnp.exp(self.log_deviation))


class AbstractLatentSDE(eqx.Module):
    """The parts of a model that the bound and particles need: a prior SDE, the distribution of its first
    state, a decoder and a posterior."""

    sde: eqx.AbstractVar[AbstractSDE]
    initial: eqx.AbstractVar[Any]
    decoder: eqx.AbstractVar[Any]
    posterior: eqx.AbstractVar[Posterior]

    @property
    def dimension(self) -> int:
        """The number of hidden states."""
        return self.posterior.dimension

    @property
    def columns(self) -> int:
        """The number of observed columns."""
        return self.posterior.encoder.location.size

    def driven(self, inputs: InputTable | None) -> Any:
        """The model whose SDE is driven by these inputs."""
        return self if inputs is None else eqx.tree_at(lambda m: m.sde, self, driven_by(self.sde, inputs))

    def drift(self, t: Array, z: Array) -> Array:
        """The Itô drift."""
        return to_ito(self.sde).drift(t, z)

    def observed(self, z: Array, values: Array, seen: Array) -> Array:
        """The log-density of the values at one time that are observed, given the state z."""
        return jnp.sum(jnp.where(seen, self.decoder(z).log_prob(values), 0))
