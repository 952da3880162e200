"""The density a short time after a point, as the base of a flow over the remaining time."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import as_shape, check_key
from .._linear import log_abs_det, solve
from .._programs import jit
from ..sde import AbstractSDE, noise_dimension
from ._bridges import transition_value
from ._coordinates import InCoordinates, Unchanged
from ._ends import Effort, Ends, Transition, linear

HALVINGS = 12  # maximum number of halvings to find the first part of a time interval
SAMPLES = 16  # number of end points at which the error over a first part is measured
FIRST_ERROR = 0.01  # in nats; acceptable root mean square error of log p after the first part
# Factor on the standard error that accounts for the Lévy areas that a driver with few functions omits if the
# noise is noncommutative.
UNSEEN = 4.0
REACH = 8.0  # in standard deviations from the mean; the SDE is linearised at points further away
FINE = 8  # factor by which the numbers of functions and steps are increased for draws


class ShortTime(eqx.Module):
    """The distribution of Z(dt) given Z(0) = x₀, for short times over which the SDE is nearly linear.

        p(x at T | x₀) = ∫ p_dt(z | x₀) p(x at T | z at dt) dz

    is the density at T − dt of a flow that starts from this distribution and follows `later`, the SDE from
    `dt` on. All estimators for flows therefore apply to fixed starts too.

    `log_prob` uses weighted paths around the most likely path to z. The random numbers are the same for all
    z, so `log_prob` is smooth. The SDE is linearised at points more than eight standard deviations from the
    mean and where no path is found. `sample` solves the SDE along paths with more functions.

    **Arguments:**

    - `sde`: the SDE.
    - `x0`: the initial state x₀, shape `(d,)`.
    - `dt`: the time of the distribution.
    - `effort`: the computational effort per log-density.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: jnp.sin(z), lambda t, z: jnp.ones((1, 1)))
    first = rf.transition.ShortTime(sde, jnp.zeros(1), 0.1)
    flow = rf.StochasticFlow(first.later, first, t1=1.9)  # from 0 to 2 in total
    flow.estimate(jnp.ones(1), key=jax.random.key(0), estimator=rf.PullBack(256))
    ```
    """

    sde: AbstractSDE
    x0: Array
    dt: float | Array
    effort: Effort = Effort()

    def log_prob(self, z: Array) -> Array:
        """The log-density at `z` `(d,)`."""
        return self.log_prob_and_error(z)[0]

    def log_prob_and_error(self, z: Array) -> tuple[Array, Array]:
        """The log-density at `z` `(d,)`, and the standard error of the weighted paths."""
        z = jnp.asarray(z, self.x0.dtype)
        mean, slope = linear(self._ends(self.effort), self._zeros(self.effort))
        covariance, away = slope @ slope.T, z - mean
        square = away @ solve(covariance[None], away[None, :, None])[0, :, 0]
        distance = jnp.sqrt(jnp.maximum(square, 1e-12))
        near = distance < REACH
        inside = jnp.where(near, z, mean + away * (REACH / distance))
        step = Transition(self.x0, inside, *self._times())
        near_value = transition_value(self.sde, Unchanged(), step, jax.random.key(0), self.effort)
        value, error = near_value.log_prob, near_value.error
        constant = log_abs_det(covariance[None])[0] + z.size * jnp.log(2 * jnp.pi)
        found = near & jnp.isfinite(value)
        return jnp.where(found, value, -0.5 * (square + constant)), jnp.where(found, error, jnp.inf)

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        """Draw points, as an array of shape `(*shape, d)`."""
        shape = as_shape(shape, self.x0.size)
        effort = Effort(FINE * self.effort.num_functions, 2, FINE * self.effort.num_steps)
        size = self._zeros(effort).size
        paths = jax.random.normal(check_key(key), (*shape, size), self.x0.dtype)
        drawn = jax.vmap(self._ends(effort))(jnp.reshape(paths, (-1, size)))
        return jnp.reshape(drawn, (*shape, self.x0.size))

    @property
    def later(self) -> InCoordinates:
        """The SDE with time counted from the end of the interval."""
        return InCoordinates(self.sde, time=self.dt)

    def _ends(self, effort: Effort) -> Ends:
        return Ends(self.sde, Unchanged(), Transition(self.x0, self.x0, *self._times()), effort, None)

    def _zeros(self, effort: Effort) -> Array:
        """The coefficients of a constant path."""
        size = effort.num_functions * noise_dimension(self.sde, self.x0.size)
        return jnp.zeros(size, self.x0.dtype)

    def _times(self) -> tuple[Array, Array]:
        return jnp.zeros((), self.x0.dtype), jnp.asarray(self.dt, self.x0.dtype)


def short_time(sde: AbstractSDE, start: Array, t1: float) -> tuple[ShortTime, float]:
    """The density after the first part of the interval [0, t1], and its error in nats.

    The first part is the longest of t1/2, t1/4, … with an error below `FIRST_ERROR` or, if there is none, the
    one with the smallest error.
    """
    # Fewer coefficients than dimensions cannot move the end in all directions.
    functions = max(Effort().num_functions, -(-start.size // noise_dimension(sde, start.size)) + 1)
    effort = Effort() if functions == Effort().num_functions else Effort(functions, 8, 2 * functions)
    spans = jnp.asarray(t1 * 0.5 ** np.arange(1, HALVINGS + 1), start.dtype)
    errors = UNSEEN * np.asarray(_first_errors(sde, start, spans, effort))
    good = errors < FIRST_ERROR
    chosen = int(np.argmax(good) if good.any() else np.argmin(errors))
    return ShortTime(sde, start, float(spans[chosen]), effort), float(errors[chosen])


@functools.partial(jit, level=1)
def _first_errors(sde: AbstractSDE, start: Array, spans: Array, effort: Effort) -> Array:
    """The root mean square standard error of log p after each time, over simulated end points."""

    def one(span: Array) -> Array:
        first = ShortTime(sde, start, span, effort)
        ends = first.sample(key=jax.random.key(1), shape=(SAMPLES,))
        return jnp.sqrt(jnp.mean(jax.vmap(first.log_prob_and_error)(ends)[1] ** 2))

    return jax.lax.map(one, spans)
