"""Transition densities: log p(x₁ | x₀) of an SDE a span of time later, for many transitions at once."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._checks import (
    as_real,
    check_finite,
    check_instance,
    check_key,
    check_positive,
    finite_array,
    is_traced,
    warn,
)
from .._programs import jit
from ..faq import see
from ..sde import AbstractSDE, check_sde, noise_dimension
from ..transition import (
    AbstractCoordinates,
    Effort,
    Transition,
    Unchanged,
    boundary_share,
    choose_effort,
    largest_rate,
    log_probs,
)
from .models import AbstractNamedSDE, FractionalOrnsteinUhlenbeck, exact_transition

DOUBTFUL = 0.1  # nats, the error of a transition that is suspect
SHORT = 0.3  # the rate, times dt, below which paths need no check


class TransitionEstimate(eqx.Module):
    """log p(x₁ | x₀) with its error; every field but `effort` has the batch shape.

    `log_prob`, NaN where no path was found; `standard_error`, one standard deviation, with the weight that
    paths not found may have had, the change with twice the effort unless the span is short, and the share of
    paths by way of a boundary of the state space; `unfound`, how many of the paths to x₁ were not found;
    `effort`, functions, paths and steps of each, None if the density is known exactly. `suspect` says where
    not to trust it: paths are drawn around the likeliest one, so a span in which the SDE forgets its start,
    or may take another way, is too long. `warning` says so in words.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.CKLS(0.2, 0.07, 0.8, 1.4)
    x = jnp.array([[0.05], [0.06]])
    rf.transition_estimate(sde, x[0], x[1], 1 / 12, key=jax.random.key(0))
    ```
    """

    log_prob: Array
    standard_error: Array
    unfound: Array
    effort: Effort | None

    @property
    def suspect(self) -> Array:
        """Where the error is above 0.1, or not known."""
        return ~(self.standard_error < DOUBTFUL)

    @property
    def warning(self) -> str | None:
        """One line where some transitions should not be trusted, else None."""
        count = int(jnp.sum(self.suspect))
        if not count:
            return None
        which = f"{count} of {self.suspect.size} transitions have errors above {DOUBTFUL:g}"
        return f"{which}: they are too long for paths around the likeliest one{see('long-transitions')}"


def transition_log_prob(
    sde: AbstractSDE,
    x0: ArrayLike,
    x1: ArrayLike,
    dt: ArrayLike,
    *,
    key: PRNGKeyArray,
    t0: ArrayLike = 0.0,
    exact: bool = True,
    effort: Effort | None = None,
    coordinates: AbstractCoordinates | None = None,
) -> Array:
    """log p(x₁ at t₀ + dt | x₀ at t₀), batched.

    Exact where the SDE knows its transitions and `exact` is True; else by weighted paths from x₀ to x₁. The
    same key gives the same random numbers whatever the parameters of the SDE, so that a likelihood is smooth
    in them; it may be differentiated. Where a span is too long for that there is a warning, unless it is part
    of another program: `rf.transition_estimate` has the errors.

    **Arguments:** `x0` and `x1` of shape `(..., d)`; `dt` and `t0` numbers, or arrays of the batch shape;
    `effort`, how much work goes into each transition, chosen from how fast the drift changes over dt if None;
    `coordinates`, the variables to solve in, those of a named SDE or the states themselves if None.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.CoxIngersollRoss(kappa=3.0, mu=0.3, sigma=0.2)
    x = jnp.array([[0.28], [0.31], [0.30]])
    rf.transition_log_prob(sde, x[:-1], x[1:], 1 / 12, key=jax.random.key(0))
    ```
    """
    options = {"t0": t0, "exact": exact, "effort": effort, "coordinates": coordinates}
    # Errors of a part of another program would be lost.
    traced = any(is_traced(leaf) for leaf in jax.tree.leaves((sde, x0, x1, dt, t0)))
    estimate = _estimate(sde, x0, x1, dt, key=key, checked=not traced, **options)
    if not is_traced(estimate.log_prob) and estimate.warning is not None:
        warn(estimate.warning)
    return estimate.log_prob


def transition_estimate(
    sde: AbstractSDE,
    x0: ArrayLike,
    x1: ArrayLike,
    dt: ArrayLike,
    *,
    key: PRNGKeyArray,
    t0: ArrayLike = 0.0,
    exact: bool = True,
    effort: Effort | None = None,
    coordinates: AbstractCoordinates | None = None,
) -> TransitionEstimate:
    """As `rf.transition_log_prob`, with the error of each number.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.CoxIngersollRoss(kappa=3.0, mu=0.3, sigma=0.2)
    rf.transition_estimate(sde, jnp.full(1, 0.28), jnp.full(1, 0.3), 0.1, key=jax.random.key(0), exact=False)
    ```
    """
    options = {"t0": t0, "exact": exact, "effort": effort, "coordinates": coordinates}
    return _estimate(sde, x0, x1, dt, key=key, checked=True, **options)


def _estimate(
    sde: AbstractSDE,
    x0: ArrayLike,
    x1: ArrayLike,
    dt: ArrayLike,
    *,
    key: PRNGKeyArray,
    t0: ArrayLike,
    exact: bool,
    effort: Effort | None,
    coordinates: AbstractCoordinates | None,
    checked: bool,
) -> TransitionEstimate:
    check_no_memory(sde)
    check_sde(sde)
    check_positive("dt", dt)
    check_key(key)
    finite_array("t0", t0)
    start, end = (jnp.asarray(as_real(name, x), float) for name, x in (("x0", x0), ("x1", x1)))
    if not start.ndim or not end.ndim or start.shape[-1] != end.shape[-1]:
        raise ValueError(
            f"x0 and x1 must have shapes (..., d) with the same d, got {start.shape} and {end.shape}"
        )
    for name, value in (("x0", start), ("x1", end)):
        check_finite(name, value)
    batch = jnp.broadcast_shapes(start.shape[:-1], end.shape[:-1], jnp.shape(dt), jnp.shape(t0))
    points = lambda x: jnp.reshape(jnp.broadcast_to(x, (*batch, x.shape[-1])), (-1, x.shape[-1]))
    numbers = lambda t: jnp.reshape(jnp.broadcast_to(jnp.asarray(t, start.dtype), batch), (-1,))
    many = Transition(points(start), points(end), numbers(t0), numbers(dt))
    noise_dimension(sde, start.shape[-1], f"x0 and x1 have dimension {start.shape[-1]}")
    coordinates = coordinates_of(sde, coordinates)
    check_effort(effort)
    check_inside(coordinates, many)
    if exact and (known := exact_log_probs(sde, many)) is not None:
        zero = jnp.zeros(batch, start.dtype)
        return TransitionEstimate(jnp.reshape(known, batch), zero, zero.astype(int), None)
    effort = effort or choose_effort(sde, coordinates, many)
    value, error, unfound = log_probs(sde, coordinates, many, check_key(key), effort)
    if checked:
        error = jax.lax.stop_gradient(full_errors(sde, coordinates, many, key, effort, value, error))
    value, error, unfound = (jnp.reshape(part, batch) for part in (value, error, unfound))
    return TransitionEstimate(value, error, unfound, effort)


def coordinates_of(sde: Any, coordinates: AbstractCoordinates | None) -> AbstractCoordinates:
    wanted = "an SDE such as rf.OrnsteinUhlenbeck(1.0, 0.0, 1.0)"
    check_instance("sde", sde, AbstractSDE | FractionalOrnsteinUhlenbeck, wanted)
    if coordinates is not None:
        wanted = "coordinates such as rf.Logarithm()"
        check_instance("coordinates", coordinates, AbstractCoordinates, wanted)
        return coordinates
    return sde.coordinates if isinstance(sde, AbstractNamedSDE) else Unchanged()


def check_effort(effort: Any) -> None:
    if effort is not None:
        check_instance("effort", effort, Effort, "an rf.Effort")


def check_no_memory(sde: Any) -> None:
    if isinstance(sde, FractionalOrnsteinUhlenbeck):
        raise TypeError(
            f"transitions need Brownian motion, and {type(sde).__name__} has memory: rf.fit_sde takes the "
            "series as a whole" + see("other-drivers")
        )


def check_inside(coordinates: AbstractCoordinates, many: Transition) -> None:
    """Refuse states outside the state space. Traced values pass."""
    if is_traced(many.start) or is_traced(many.end):
        return
    for name, x in (("x0", many.start), ("x1", many.end)):
        inside = np.asarray(coordinates.contains(x))
        if not inside.all():
            row = int(np.argmin(inside))
            raise ValueError(
                f"{name} has a value outside the state space, first {np.asarray(x[row])} in row {row}"
            )


@functools.partial(jit, level=1)
def exact_log_probs(sde: AbstractSDE, many: Transition) -> Array | None:
    """The densities of many transitions, if the SDE knows them."""

    def one(step: Transition) -> Array | None:
        known = exact_transition(sde, step.start, step.dt)
        return None if known is None else known.log_prob(step.end)

    return jax.vmap(one)(many)


def full_errors(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    many: Transition,
    key: PRNGKeyArray,
    effort: Effort,
    value: Array,
    error: Array,
) -> Array:
    """Errors `(N,)` of log-densities: the Monte Carlo `error`, the share of paths by way of a boundary and,
    unless spans are short, how far twice the effort moves them."""
    error = error + _boundary_shares(sde, coordinates, many)
    rate = largest_rate(sde, coordinates, many)
    if rate is None or rate >= SHORT:
        error = jnp.hypot(error, log_probs(sde, coordinates, many, key, effort.more())[0] - value)
    return jnp.where(jnp.isnan(error), jnp.inf, error)


@functools.partial(jit, level=0)
def _boundary_shares(sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition) -> Array:
    return jax.vmap(lambda step: boundary_share(sde, coordinates, step))(many)
