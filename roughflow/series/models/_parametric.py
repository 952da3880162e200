"""The interface of named SDEs, starting values from moments, and SDEs from plain functions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._checks import as_real, check_callable, check_instance, finite_array
from ...sde import AbstractItoSDE, AbstractSDE
from ...transition import AbstractCoordinates
from .._observed import Observed, is_partial, panel
from .._parameters import Domain
from ._distributions import AbstractDistribution

SLOWEST, FASTEST = 0.1, 3.0  # bounds of mean-reversion rates, per length of the series and per time step
MAX_ELASTICITY = 1.5


class Increments:
    """Values `x` `(N, d)`, the increments `dx` that follow them, and their time steps `dt` `(N,)`."""

    def __init__(self, times: Any, values: Any):
        series = panel(times, values)
        self.x = np.concatenate([one.values[:-1] for one in series])
        self.dx = np.concatenate([np.diff(one.values, axis=0) for one in series])
        self.dt = np.concatenate([np.diff(one.times) for one in series])

    def column(self, i: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The values, increments and time steps of one component, `(N,)` each."""
        return self.x[:, i], self.dx[:, i], self.dt

    def positive(self, i: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`column` for a positive component. Values that are negative because of measurement noise are
        replaced by 1 % of the median."""
        x, dx, dt = self.column(i)
        return np.maximum(x, 0.01 * np.median(np.abs(x))), dx, dt

    def residual_sizes(self, dx: np.ndarray, drift: np.ndarray) -> np.ndarray:
        """|dx − drift dt| / √dt, the absolute size of the noise in each increment."""
        return np.abs(dx - drift * self.dt) / np.sqrt(self.dt)


def regression(dx: np.ndarray, dt: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    """Fit a drift that is a linear combination of `terms` to increments, by weighted least squares. Return
    the coefficients, with one column per component for increments `(N, d)`."""
    root = np.sqrt(dt)
    return np.linalg.lstsq(np.stack(terms, axis=1) * root[:, None], (dx.T / root).T)[0]


def mean_reversion(x: np.ndarray, dx: np.ndarray, dt: np.ndarray) -> tuple[float, float]:
    """Estimate κ and μ in the drift κ(μ − x) by regression."""
    constant, slope = regression(dx, dt, np.ones_like(x), x)
    kappa = float(np.clip(-slope, SLOWEST / dt.sum(), FASTEST / np.median(dt)))
    return kappa, float(np.clip(constant / kappa, *np.quantile(x, [0.05, 0.95])))


def elasticity(x: np.ndarray, size: np.ndarray) -> float:
    """Estimate the exponent γ of noise proportional to x^γ by log-log regression."""
    log_size = np.log(np.maximum(size, 1e-3 * size.mean()))
    return float(np.clip(np.polyfit(np.log(x), log_size, 1)[0], 0.0, MAX_ELASTICITY))


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def parameter(value: float | Array) -> Array:
    """Convert a field of a model to a float array. Values of other types are returned unchanged, so that the
    error message of the model can name the field."""
    try:
        return jnp.asarray(as_real("parameter", value), float)
    except (TypeError, ValueError):
        return value  # pyright: ignore[reportReturnType]


class AbstractNamedSDE(AbstractItoSDE):
    """An Itô SDE whose fields are its parameters.

    `domains` contains the ranges of the parameters by name, `coordinates` the variables in which the SDE is
    solved, and `components` the names of the components of the state. `exact_transition` returns the
    distribution of X(t + dt) if it has a closed form, and `expansion` a series for log p(x₁ | x₀) over long
    times.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    class Logistic(rf.series.AbstractNamedSDE):
        rate: float
        capacity: float
        sigma: float
        domains = {name: rf.series.Domain(lower=0.0) for name in ("rate", "capacity", "sigma")}
        coordinates = rf.transition.Logarithm()

        def drift(self, t, z):
            return self.rate * z * (1 - z / self.capacity)

        def diffusion(self, t, z):
            return self.sigma * z[:, None]

    rf.transition_log_prob(Logistic(1.0, 2.0, 0.3), jnp.ones(1), jnp.ones(1), 0.1, key=jax.random.key(0))
    ```
    """

    domains: ClassVar[Mapping[str, Domain]]
    coordinates: eqx.AbstractClassVar[AbstractCoordinates]
    components: ClassVar[tuple[str, ...]] = ("value",)

    def __check_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("converter") is parameter or isinstance(
                value, float | jax.Array | np.ndarray
            ):
                finite_array(field.name, value)

    def exact_transition(self, x0: Array, dt: Array) -> AbstractDistribution | None:
        """The distribution of X(t + dt) given X(t) = x₀ `(d,)`; None (default) if it has no closed form.

        The result is a module with `log_prob(x1)` for x₁ of shape `(d,)`, `sample(key)` and, if d = 1,
        `cdf(x1)`.
        """
        return None

    def short_transition(self, x0: Array, dt: Array) -> AbstractDistribution | None:
        """A first-order approximation of the transition distribution for short dt, used in simulations. None
        (default) uses local linearisation in the coordinates of the SDE."""
        return None

    def expansion(self, x0: Array, x1: Array, dt: Array) -> tuple[Array, Array] | None:
        """log p(x₁ | x₀) as the sum of a truncated series, and the truncation error. The series converges
        fast if dt is long; if dt is short, the error is large. None (default) if there is no such series."""
        return None

    def stationary(self, unknown: tuple[int, ...]) -> AbstractDistribution | None:
        """The stationary distribution of the components whose indices are `unknown`; None (default) if it has
        no closed form."""
        return None

    @classmethod
    def from_series(cls, times: Any, values: Any) -> Self:
        """The SDE with parameters estimated from moments of a series. If the class is passed to `rf.fit_sde`,
        these parameters are the starting values. Missing values are interpolated, and hidden components are
        taken from `hidden_values`.

        ```python
        import numpy as np
        import roughflow as rf

        x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
        rf.CoxIngersollRoss.from_series(np.arange(60) / 12, x)
        ```
        """
        series = panel(times, values, partial=is_partial(values))
        increments = Increments([one.times for one in series], [cls._completed(one) for one in series])
        count, dimension = increments.x.shape[1], cls.dimension
        if isinstance(dimension, int) and count != dimension:
            raise ValueError(f"values have {count} columns, but {cls.__name__} has dimension {dimension}")
        return cls(**cls.starting_values(increments))

    @classmethod
    def _completed(cls, one: Observed) -> np.ndarray:
        """The values of a series, with missing values replaced by estimates."""
        whole = one.values.copy()
        hidden = [i for i in range(whole.shape[1]) if np.isnan(whole[:, i]).all()]
        guess = cls.hidden_values(one) if hidden else {}
        for i in range(whole.shape[1]):
            if i in hidden and i not in guess:
                raise ValueError(
                    f"{cls.__name__} has no starting values if component {i} is hidden: pass an SDE with "
                    f"starting values such as {cls.__name__}(...), not the class"
                )
            whole[:, i] = guess[i] if i in hidden else np.interp(one.times, *one.known(i))
        return whole

    @classmethod
    def hidden_values(cls, one: Observed) -> dict[int, np.ndarray]:
        """Rough estimates of hidden components `(N,)`, by index, from which starting values are computed;
        empty by default."""
        return {}

    @classmethod
    def starting_values(cls, increments: Increments) -> dict[str, Any]:
        """Starting values of the parameters by name, from the increments of a series."""
        raise TypeError(
            f"{cls.__name__} does not define starting_values: pass an SDE with starting values, such as "
            f"{cls.__name__}(...)"
        )


def exact_transition(sde: AbstractSDE, x0: Array, dt: Array) -> AbstractDistribution | None:
    """The exact transition distribution of an SDE; None if it has no closed form."""
    return sde.exact_transition(x0, dt) if isinstance(sde, AbstractNamedSDE) else None


def expansion(sde: AbstractSDE, x0: Array, x1: Array, dt: Array) -> tuple[Array, Array] | None:
    """The expansion of the log transition density of an SDE, with its error; None if there is none."""
    return sde.expansion(x0, x1, dt) if isinstance(sde, AbstractNamedSDE) else None


class ParametricSDE(AbstractItoSDE):
    """The Itô SDE dX = μ(t, X; θ) dt + σ(t, X; θ) dB, where θ is a dictionary of floats or arrays.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.ParametricSDE(
        lambda t, x, p: p["a"] - p["b"] * x,
        lambda t, x, p: p["s"] * jnp.eye(1),
        {"a": 0.1, "b": 1.0, "s": 0.3},
    )
    ```
    """

    parameters: dict[str, Array]
    drift_function: Callable[[Array, Array, dict[str, Array]], Array]
    diffusion_function: Callable[[Array, Array, dict[str, Array]], Array]

    def __init__(self, drift: Callable, diffusion: Callable, parameters: Mapping[str, float | Array]):
        check_callable("drift", drift, "(t, x, parameters) -> (d,)")
        check_callable("diffusion", diffusion, "(t, x, parameters) -> (d, m)")
        check_instance("parameters", parameters, Mapping, "a dictionary of numbers by name")
        self.drift_function = drift
        self.diffusion_function = diffusion
        self.parameters = {name: finite_array(name, value) for name, value in parameters.items()}

    def drift(self, t: Array, z: Array, *inputs: Array) -> Array:
        return self.drift_function(t, z, self.parameters, *inputs)

    def diffusion(self, t: Array, z: Array, *inputs: Array) -> Array:
        return self.diffusion_function(t, z, self.parameters, *inputs)
