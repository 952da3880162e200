"""A flow of standardised data in the units of the data, and an SDE whose stationary distribution is that of
the data."""

import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, PRNGKeyArray
from numpy.typing import ArrayLike

from .._checks import (
    as_real,
    as_shape,
    check_count,
    check_finite,
    check_instance,
    check_key,
    check_number,
    check_vector,
    is_traced,
    shown,
)
from .._show import count, listed, shortened
from ..density import AbstractEstimator, Estimate, StochasticFlow
from ..faq import see
from ..sde import Diffusion, NormalTransport, TargetedSDE, TransportSDE, targeted_sde
from ..train import with_noise
from ._arrays import is_frame, real_numbers, take
from ._marginals import Gaussian, Marginals, check_full_rank


class Standardised(eqx.Module):
    """A flow for standardised data y, with x = m + L y and log p(x) = log p_y(L⁻¹(x − m)) − log |det L|.

    With `marginals`, a monotone map g of each column, g(x) = m + L y, and Σ log g′(x) is added to log p(x).

    With `num_given=k` the density is conditional on the last k coordinates. The flow does not change the base
    distribution N(0, I) of these, so p(y | given) is the joint density divided by theirs.

    **Arguments:** `flow`, the flow of y; `loc` m, shape `(d,)`; `matrix` L, `(d, d)`, lower triangular except
    in its last k columns, which contain the regression on the given columns; `columns`, the names of the
    coordinates, if any; `num_given`, k; `marginals`, an `rf.tables.Marginals` or None.
    `standardisation(data)` computes m and L.

    Columns of a DataFrame are matched by name if the model has `columns`; other columns are ignored.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    data = 100 + 5 * jax.random.normal(jax.random.key(0), (500, 2))
    loc, matrix = rf.tables.standardisation(data)
    model = rf.tables.Standardised(rf.neural_flow(2, key=jax.random.key(1)), loc, matrix)
    model.log_prob(data[:3], key=jax.random.key(2)).shape  # (3,)
    ```
    """

    flow: StochasticFlow
    loc: np.ndarray  # double precision, so that no digits of a small spread around a large mean are lost
    matrix: np.ndarray
    columns: tuple[str, ...] = eqx.field(static=True, default=())
    num_given: int = eqx.field(static=True, default=0)
    marginals: Marginals | None = None  # maps of the modelled columns

    def __check_init__(self):
        check_instance("flow", self.flow, StochasticFlow, "an rf.StochasticFlow")
        d = self.flow.dimension
        for name, part, shape in (("loc", self.loc, (d,)), ("matrix", self.matrix, (d, d))):
            # Leading axes belong to a stack of models, as made by `eqx.filter_vmap`.
            if np.shape(part)[-len(shape) :] != shape:
                raise ValueError(f"{name} must have shape {shape} for this flow, got {np.shape(part)}")
        if not is_traced(self.matrix) and np.any(np.diagonal(self.matrix, axis1=-2, axis2=-1) == 0):
            raise ValueError("matrix must have no zero on its diagonal")
        if check_count("num_given", self.num_given, least=0) >= d:
            raise ValueError(f"num_given must be below {d}, the dimension of the flow, got {self.num_given}")
        if self.columns and (len(self.columns) != d or len(set(self.columns)) < d):
            raise ValueError(f"columns must be {d} different names, got {shown(self.columns)}")

    def __repr__(self) -> str:
        own = self.flow.dimension - self.num_given
        names = self.columns or tuple(f"x{i + 1}" for i in range(self.flow.dimension))
        parts = [("columns", ", ".join(shortened([self._within(i, names[i]) for i in range(own)])))]
        if self.num_given:
            parts.append(("given", ", ".join(shortened(names[own:]))))
        if self.marginals is not None:
            parts.append(("marginals", f"maps to nearly normal columns, {self.marginals.x.shape[1]} knots"))
        title = f"Standardised: density of {count(own, 'column')} in units of the data"
        return f"{listed(title, parts)}\n{textwrap.indent(repr(self.flow), '  ')}"

    def _within(self, i: int, name: str) -> str:
        """The name of a column, with its bounds."""
        maps = self.marginals
        if maps is None or maps.lower is None or maps.upper is None:
            return name
        low, high = float(maps.lower[i]), float(maps.upper[i])
        left, right = (f"{low:g} < " if low > -np.inf else ""), (f" < {high:g}" if high < np.inf else "")
        return f"{left}{name}{right}"

    def standardise(self, x: ArrayLike, given: ArrayLike | None = None) -> Array:
        """y = L⁻¹(g(x) − m), in double precision if x is concrete."""
        return self.unit(self._checked(x, given))

    def unit(self, x: Array | np.ndarray) -> Array:
        """`standardise` for rows with the given columns last."""
        x = self._mapped(x)[0]
        if is_traced(x) or is_traced(self.matrix):
            offset = x - jnp.expand_dims(self.loc, range(x.ndim - 1))
            return jnp.einsum("ij,...j->...i", jnp.linalg.inv(jnp.asarray(self.matrix, offset.dtype)), offset)
        offset = np.asarray(x, np.float64) - self.loc
        return jnp.asarray(np.einsum("ij,...j->...i", np.linalg.inv(self.matrix), offset), float)

    def estimate(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray,
        given: ArrayLike | None = None,
        estimator: AbstractEstimator | None = None,
        tolerance: float | None = None,
        max_paths: int = 2**16,
    ) -> Estimate:
        """Estimate log p, as `StochasticFlow.estimate` does, in the units of the data."""
        rows = self._checked(x, given)
        y = self.unit(rows)
        estimate = self.flow.estimate(
            y,
            key=key,
            estimator=estimator,
            tolerance=tolerance,
            max_paths=max_paths,
        )
        own = self.flow.dimension - self.num_given
        # Divide by the density of the given coordinates, N(0, I) at all times.
        shift = self._log_slope(rows) - jnp.sum(jax.scipy.stats.norm.logpdf(y[..., own:]), axis=-1)
        return eqx.tree_at(lambda e: e.log_prob, estimate, replace_fn=lambda value: value + shift)

    def log_prob(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray,
        given: ArrayLike | None = None,
        estimator: AbstractEstimator | None = None,
    ) -> Array:
        """log p(x): the value of `estimate` without its errors."""
        return self.estimate(x, key=key, given=given, estimator=estimator).log_prob

    def sample(
        self, *, key: PRNGKeyArray, shape: tuple[int, ...] = (), given: ArrayLike | None = None
    ) -> Array:
        """Draw rows `(*shape, d)`; with `given` of shape `(..., k)`, `(*shape, ..., d)`."""
        shape, own = as_shape(shape), self.flow.dimension - self.num_given
        some = self._with(np.zeros(own), given)
        if not self.num_given:
            return self._rows_of(self.flow.sample(key=key, shape=shape))
        shape = (*shape, *some.shape[:-1])
        key_start, key_path = jax.random.split(check_key(key))
        start = self.flow.base.sample(key=key_start, shape=shape)[..., :own]
        return self.push_forward(start, given=given, key=key_path)

    def push_forward(self, z: ArrayLike, *, given: ArrayLike | None = None, key: PRNGKeyArray) -> Array:
        """The rows x(z) to which the flow maps points z of its base, `(..., d)`. With `given`, `(..., k)`, z
        has only the coordinates that are not given. `key` draws the path of a flow with noise."""
        own = self.flow.dimension - self.num_given
        z = jnp.asarray(z, float)
        some = self.unit(self._with(np.zeros(own), given))[..., own:] if self.num_given else z[..., own:]
        shape = jnp.broadcast_shapes(z.shape[:-1], some.shape[:-1])
        wide = lambda part: jnp.broadcast_to(part.astype(z.dtype), (*shape, part.shape[-1]))
        key_path, key_solve = jax.random.split(check_key(key))
        path = self.flow.sample_path(key=key_path, shape=shape)
        start = jnp.concatenate([wide(z), wide(some)], axis=-1)
        return self._rows_of(self.flow.push_forward(start, path, key=key_solve)[0])

    def pull_back(
        self, x: ArrayLike, *, given: ArrayLike | None = None, key: PRNGKeyArray
    ) -> tuple[Array, Array]:
        """The inverse of `push_forward`: z, and log |det ∂z/∂x|."""
        rows = self._checked(x, given)
        key_path, key_solve = jax.random.split(check_key(key))
        path = self.flow.sample_path(key=key_path, shape=np.shape(rows)[:-1])
        z, log_det = self.flow.pull_back(self.unit(rows), path, key=key_solve)
        return z[..., : self.flow.dimension - self.num_given], log_det + self._log_slope(rows)

    def _log_slope(self, rows: Array | np.ndarray) -> Array:
        """log |det ∂y/∂x| of the standardisation."""
        own = self.flow.dimension - self.num_given
        constant = -jnp.sum(jnp.log(jnp.abs(jnp.diagonal(jnp.asarray(self.matrix))[:own])))
        return constant + jnp.asarray(self._mapped(rows)[1], constant.dtype)

    def _rows_of(self, y: Array) -> Array:
        """Rows of the table from standardised rows, without given columns."""
        own = self.flow.dimension - self.num_given
        spread = jnp.einsum("ij,...j->...i", jnp.asarray(self.matrix, y.dtype), y)
        mapped = (jnp.expand_dims(jnp.asarray(self.loc, y.dtype), range(y.ndim - 1)) + spread)[..., :own]
        return mapped if self.marginals is None else self.marginals.inverse(mapped)

    def with_noise(self, diffusion: Any, *, fading: float | None = 0.5) -> "Standardised":
        """The same distribution as an SDE with noise, in units of the standardised data; see
        `rf.with_noise`."""
        return eqx.tree_at(lambda m: m.flow, self, with_noise(self.flow, diffusion, fading=fading))

    def _mapped(self, x: Array | np.ndarray) -> tuple[Any, Any]:
        """g(x), with given columns unchanged, and Σ log g′(x)."""
        if self.marginals is None:
            return x, 0.0
        own = self.flow.dimension - self.num_given
        u, log_slope = self.marginals.forward(x[..., :own])
        module = np if isinstance(u, np.ndarray) else jnp
        return module.concatenate([u, x[..., own:]], axis=-1), module.sum(log_slope, axis=-1)

    @property
    def num_columns(self) -> int:
        """Number of columns, including given columns."""
        return self.flow.dimension

    def _checked(self, x: Any, given: Any) -> Array | np.ndarray:
        return self.checked(x, given, self.columns, self.num_columns)

    def checked(self, x: Any, given: Any, columns: tuple[str, ...], total: int) -> Array | np.ndarray:
        """Checked rows of `total` columns, with the given columns last; columns of a DataFrame are selected
        by name."""
        own = total - self.num_given
        if self.num_given and given is None and columns and is_frame(x):
            given = take("x", x, columns[own:])
        x = _numbers("x", x, columns[:own])
        check_vector("x", x, own)
        check_finite("x", x)
        return self._with(x, given)

    def given_rows(self, given: Any) -> Array | np.ndarray:
        """The given columns as an array, after checks."""
        value = _numbers("given", given, self.columns[self.flow.dimension - self.num_given :])
        check_vector("given", value, self.num_given)
        check_finite("given", value)
        return value

    def _with(self, x: Array | np.ndarray, given: Any) -> Array | np.ndarray:
        """The rows with the given columns last."""
        if (given is not None) != bool(self.num_given):
            need = (
                f"needs given, with {self.num_given} columns" if self.num_given else "takes no given columns"
            )
            raise ValueError(f"the model {need}: it is a density of {self.flow.dimension} columns")
        if given is None:
            return x
        given = self.given_rows(given)
        batch = jnp.broadcast_shapes(np.shape(x)[:-1], np.shape(given)[:-1])
        module = jnp if is_traced(x) or is_traced(given) else np
        wide = lambda a: module.broadcast_to(a, (*batch, a.shape[-1]))
        return module.concatenate([wide(module.asarray(x)), wide(module.asarray(given))], axis=-1)


def _numbers(name: str, value: Any, columns: tuple[str, ...]) -> Array | np.ndarray:
    if columns and is_frame(value):
        value = take(name, value, columns)
    return real_numbers(name, value)


def standardisation(data: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the rows, and the lower triangular matrix L for which LLᵀ is their covariance.

    ```python
    import jax
    import roughflow as rf

    loc, matrix = rf.tables.standardisation(jax.random.normal(jax.random.key(0), (100, 3)))
    ```
    """
    rows = np.asarray(as_real("data", data), np.float64)
    if rows.ndim != 2 or len(rows) < 2:
        raise ValueError(f"data must have shape (rows, dimensions) with at least two rows, got {rows.shape}")
    check_finite("data", rows)
    if len(rows) <= rows.shape[1]:
        message = f"data has {len(rows)} rows for {rows.shape[1]} columns, so their covariance is singular"
        raise ValueError(f"{message}: use more rows, or fewer columns{see('no-density')}")
    check_full_rank(rows)
    gaussian = Gaussian.of(rows)
    return gaussian.loc, gaussian.matrix


# ------------------------------------------------------------------------------------------ a stationary SDE


class FittedScore(eqx.Module):
    """The score ∇log p of a model, slightly smoothed, in the units of the data."""

    transport: NormalTransport
    loc: Array
    matrix: Array
    time: float
    marginals: Marginals | None = None

    def __call__(self, x: Array) -> Array:
        """The score at x. With maps u = g(x), ∇ₓ log p(x) = g′(x) ∇ᵤ log p(u) + ∇ₓ log g′(x)."""
        maps = self.marginals
        if maps is None:
            return self._score(x)
        mapped, back = jax.vjp(lambda y: maps.forward(y)[0], x)
        bend = jax.grad(lambda y: jnp.sum(maps.forward(y)[1]))(x)
        return back(self._score(mapped))[0] + bend

    def _score(self, x: Array) -> Array:
        transport, s, left = self.transport, self.time, 1 - self.time
        matrix, start = self.matrix.astype(x.dtype), transport.loc.astype(x.dtype)
        unit = solve_triangular(matrix, x - self.loc.astype(x.dtype), lower=True)
        # At time s the data are scaled by s, so the score is evaluated at s·unit.
        t = jnp.asarray(s * transport.t1, x.dtype)
        _, pull = transport.velocity_and_pull(t, s * unit + left * start)
        return solve_triangular(matrix, s * pull / left, lower=True, trans="T")


def stationary_sde(
    model: Standardised | StochasticFlow, diffusion: Diffusion, *, time: float = 0.9
) -> TargetedSDE:
    """The SDE with a given diffusion whose stationary distribution is that of the data: `rf.targeted_sde`
    with the score of a model trained by regression.

    Its paths stay near the data for any length of time and any diffusion σ. Simulate them with `rf.simulate`,
    or with `rf.sample_chain` and `rf.UnadjustedSampler`.

    **Arguments:**

    - `model`: the model fitted by `rf.fit_density` with `likelihood_steps=0`, or by `rf.fit` with
      `rf.Interpolant()` from an `rf.Normal` base. Likelihood steps make the velocity and its score slightly
      inconsistent.
    - `diffusion`: σ, `(t, x) -> (d, m)`, as for `rf.ItoSDE`, in the units of the data.
    - `time`: time s < 1 at which the score is evaluated. At time s the score is that of the data plus noise
      with the distribution of (1 − s)/s times the base. With s close to 1 there is less smoothing, but errors
      of the velocity are amplified by 1/(1 − s).

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(500,))
    flow = rf.tables.FlowOptions(width=8, likelihood_steps=0)
    settings = {"flow": flow, "steps": 20, "progress": False}
    model = rf.fit_density(data, key=jax.random.key(1), **settings).model
    sde = rf.tables.stationary_sde(model, rf.ConstantDiffusion(jnp.eye(2)))
    path = rf.simulate(sde, data[0], key=jax.random.key(2), t1=5.0, steps=100, trajectory=True)
    ```
    """
    wanted = "a flow, or the model of a fitted density"
    check_instance("model", model, Standardised | StochasticFlow, wanted)
    check_number("time", time, above=0, below=1)
    flow = model.flow if isinstance(model, Standardised) else model
    transport = flow.sde.transport if isinstance(flow.sde, TransportSDE) else None
    if not isinstance(transport, NormalTransport):
        raise TypeError(
            "stationary_sde needs a model with a known score: fit it with rf.Interpolant() from an rf.Normal "
            "base, or give rf.targeted_sde a score" + see("noise-afterwards")
        )
    if transport.num_given:
        raise ValueError("stationary_sde does not support conditional densities")
    if isinstance(model, Standardised):
        loc, matrix = jnp.asarray(model.loc, float), jnp.asarray(model.matrix, float)
        score = FittedScore(transport, loc, matrix, float(time), model.marginals)
    else:
        score = FittedScore(transport, jnp.zeros(flow.dimension), jnp.eye(flow.dimension), float(time))
    return targeted_sde(score=score, diffusion=diffusion)
