"""The log-likelihood of a series as a function of the SDE."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key
from .._programs import jit
from ..sde import AbstractSDE, check_sde
from ..transition import (
    CHUNK,
    AbstractCoordinates,
    Effort,
    Transition,
    choose_effort,
    forwards,
    in_chunks,
    keys_of,
    transition_value,
)
from ._observed import check_dimension, check_inside, panel, transitions
from ._transition import CONVERGED, check_effort, check_no_memory, coordinates_of, exact_log_probs
from .models import exact_transition, expansion


class SeriesLikelihood(eqx.Module):
    """What `rf.series_likelihood` returns: called with an SDE it is Σ log p(xᵢ₊₁ | xᵢ).

    `effort` is the work that goes into each transition, None if they are exact; `key` makes the random
    numbers, the same in every call.

    ```python
    import jax, numpy as np
    import roughflow as rf

    sde, x = rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), 1 + 0.3 * np.sin(np.arange(60) ** 2)
    likelihood = rf.series_likelihood(sde, np.arange(60) / 12, x, key=jax.random.key(0))
    likelihood(rf.OrnsteinUhlenbeck(2.0, 1.0, 1.0)), likelihood.effort
    ```
    """

    steps: Transition
    key: PRNGKeyArray
    effort: Effort | None
    coordinates: AbstractCoordinates | None

    @staticmethod
    def of(
        sde: AbstractSDE,
        steps: Transition,
        *,
        key: PRNGKeyArray,
        exact: bool,
        effort: Effort | None,
        coordinates: AbstractCoordinates | None,
    ) -> "SeriesLikelihood":
        """With exact transitions, or the effort that is given or does for this SDE."""
        check_effort(effort)
        if exact and exact_log_probs(sde, steps) is not None:
            return SeriesLikelihood(steps, key, None, coordinates)
        effort = effort or choose_effort(sde, coordinates_of(sde, coordinates), steps)
        return SeriesLikelihood(steps, key, effort, coordinates)

    def __call__(self, sde: AbstractSDE) -> Array:
        """The log-likelihood; −inf, with derivatives of zero, where a transition is out of reach."""
        return _total(self, sde)

    def log_probs(self, sde: AbstractSDE) -> tuple[Array, Array]:
        """log p `(N,)` of each transition, and its error."""
        return self.of_each(lambda step, key: self.log_prob(sde, step, key))

    def log_prob(self, sde: AbstractSDE, step: Transition, key: PRNGKeyArray) -> tuple[Array, Array]:
        """log p of one transition, and its error."""
        if self.effort is None:
            known = exact_transition(sde, step.start, step.dt)
            if known is None:
                raise ValueError(
                    f"the transitions of {type(sde).__name__} are not known exactly, and this likelihood is "
                    "of an SDE whose are: make one by rf.series_likelihood for each kind of SDE"
                )
            value = known.log_prob(step.end)
            return value, jnp.zeros_like(value)
        coordinates = coordinates_of(sde, self.coordinates)
        drawn = transition_value(sde, coordinates, step, key, self.effort)
        far = expansion(sde, step.start, step.end, step.dt)
        if far is None:
            return drawn.log_prob, drawn.error
        converged = far[1] < CONVERGED
        return jnp.where(converged, far[0], drawn.log_prob), jnp.where(converged, far[1], drawn.error)

    def of_each(self, function: Callable[[Transition, PRNGKeyArray], Any]) -> Any:
        """A function of a transition and its key, for all of them."""
        items = (self.steps, keys_of(self.key, self.steps))
        return in_chunks(lambda item: function(*item), items, len(self.steps.dt), CHUNK)


@functools.partial(jit, level=1)
def _total(likelihood: SeriesLikelihood, sde: AbstractSDE) -> Array:
    return forwards(sde, function=_Total(likelihood))


class _Total(eqx.Module):
    likelihood: SeriesLikelihood

    def __call__(self, sde: AbstractSDE) -> Array:
        total = jnp.sum(self.likelihood.log_probs(sde)[0])
        return jnp.where(jnp.isfinite(total), total, -jnp.inf)


def series_likelihood(
    sde: AbstractSDE,
    times: Any,
    values: Any,
    *,
    key: PRNGKeyArray,
    exact: bool = True,
    effort: Effort | None = None,
    coordinates: AbstractCoordinates | None = None,
) -> SeriesLikelihood:
    """The log-likelihood that `rf.fit_sde` maximises, as a function `sde -> ()` for a sampler.

    It is a smooth function without randomness, for `jax.jit`, `jax.vmap` and `jax.grad`: effort and random
    numbers are the same in every call. Derivatives are made in forward mode even under `jax.grad`, which is
    quicker for few parameters. Where a transition is out of reach it is −inf, with derivatives of zero.

    **Arguments:** `sde`, one of the kind that it will be called with, near where it matters: it says whether
    transitions are known exactly, and if not what effort does; the others as in `rf.fit_sde`. The
    `series_likelihood` of a fit has the effort that the fit has found to do.

    ```python
    import jax, numpy as np
    import roughflow as rf

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    start = rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0)
    likelihood = rf.series_likelihood(start, np.arange(60) / 12, x, key=jax.random.key(0))
    jax.grad(lambda kappa: likelihood(rf.OrnsteinUhlenbeck(kappa, 1.0, 1.0)))(2.0)
    ```
    """
    check_no_memory(sde)
    check_sde(sde)
    series = panel(times, values)
    check_dimension(sde, series)
    check_inside(coordinates_of(sde, coordinates), series)
    options = {"exact": exact, "effort": effort, "coordinates": coordinates}
    return SeriesLikelihood.of(sde, transitions(series), key=check_key(key), **options)
