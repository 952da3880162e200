"""Transition densities log p(x₁ | x₀) of an SDE, for many transitions at once."""

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
from ..density import METHODS, Estimate, StochasticFlow
from ..faq import see
from ..flow import Normal
from ..sde import AbstractSDE, check_sde, noise_dimension
from ..transition import (
    AbstractCoordinates,
    Effort,
    InCoordinates,
    Transition,
    Unchanged,
    boundary_share,
    curvature,
    largest_rate,
    log_probs,
)
from .models import AbstractNamedSDE, FractionalOrnsteinUhlenbeck, exact_transition, expansion

DOUBTFUL = 0.1  # nats, error above which a transition is suspect
TOLERANCE = 0.02  # nats, error of weighted paths above which another method is used
SHORT_STEP = 0.3  # rate times dt below which path estimates need no check
NEARLY_LINEAR = 0.05  # curvature below which path estimates need no check
STRONG_CURVATURE = 0.45  # curvature above which paths around the most likely one are unreliable
HIDDEN_ERROR = 0.2  # nats per squared curvature; allowance for errors that doubling the effort may not reveal
CONVERGED = 1e-3  # relative error of an expansion that is accepted
BOX_ERROR = 0.002  # nats; error due to the finite box of a grid, which refining the grid does not reduce
MAX_STARTS = 64  # maximum number of different pairs of start and time step that are solved one by one


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
    """Log transition density log p(x₁ at t₀ + dt | x₀ at t₀), batched.

    The density is exact if the SDE has a closed form and `exact` is True; otherwise it is estimated with
    weighted paths from x₀ to x₁. If dt is too long for paths, the Fokker–Planck equation is solved from x₀ in
    one or two dimensions; in more dimensions, the density after a first part of dt
    (`rf.transition.ShortTime`) is the base of a flow over the rest. A warning is issued if the error is still
    above 0.1; `rf.transition_estimate` returns the errors.

    The same key gives the same random numbers for all parameters of the SDE, so that a likelihood is smooth
    in the parameters and differentiable. Under `jax.jit` or `jax.grad` errors cannot be checked, so all
    transitions use paths, however long dt is.

    **Arguments:**

    - `x0`, `x1`: states of shape `(..., d)`.
    - `dt`, `t0`: duration and start time, scalars or arrays of the batch shape.
    - `exact`: whether to use a closed form or an expansion, if the SDE has one.
    - `effort`: the work per transition (paths only); by default, it depends on the rate of change of the
      drift over dt.
    - `coordinates`: the variables in which the SDE is solved; by default, those of a named SDE or the states
      themselves.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.CoxIngersollRoss(kappa=3.0, mu=0.3, sigma=0.2)
    x = jnp.array([[0.28], [0.31], [0.30]])
    rf.transition_log_prob(sde, x[:-1], x[1:], 1 / 12, key=jax.random.key(0))
    ```
    """
    options = {"t0": t0, "exact": exact, "effort": effort, "coordinates": coordinates}
    # Inside a traced program, errors cannot be reported.
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
) -> Estimate:
    """Log transition densities with their errors: an `rf.Estimate` with the arguments of
    `rf.transition_log_prob`.

    `method` is "exact" (also for a converged expansion), "modes" (paths around the most likely path), "grid"
    (the Fokker–Planck equation), or the method of a flow's estimate. `truncation_error` is the change when
    the effort is doubled, plus an allowance for other modes and for paths that touch a boundary. `unmet` and
    `suspect` mark total errors above 0.1.

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
) -> Estimate:
    check_no_memory(sde)
    check_sde(sde)
    check_key(key)
    batch, many = _broadcast(x0, x1, dt, t0)
    dimension = many.start.shape[-1]
    noise_dimension(sde, dimension, f"x0 and x1 have dimension {dimension}")
    coordinates = coordinates_of(sde, coordinates)
    check_effort(effort)
    check_inside(coordinates, many)
    known = exact_log_probs(sde, many) if exact else None
    if known is not None:
        found = Estimate.of(known, "exact")
    else:
        found = _by_paths(
            sde, coordinates, many, key, effort, checked, expansions(sde, many) if exact else None
        )
        if checked and effort is None:
            found = _where_too_long(sde, coordinates, many, key, found)
        if checked:
            found = eqx.tree_at(lambda e: e.unmet, found, ~(found.total_error < DOUBTFUL))
    return jax.tree.map(lambda part: jnp.reshape(part, batch), found)


def _broadcast(x0: ArrayLike, x1: ArrayLike, dt: ArrayLike, t0: ArrayLike) -> tuple[tuple, Transition]:
    """Broadcast the arguments. Return the batch shape, and all transitions along one axis."""
    check_positive("dt", dt)
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
    return batch, Transition(points(start), points(end), numbers(t0), numbers(dt))


def _by_paths(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    many: Transition,
    key: PRNGKeyArray,
    effort: Effort | None,
    checked: bool,
    expanded: tuple[Array, Array] | None,
) -> Estimate:
    """Estimate with weighted paths, or with an expansion that has converged."""
    converged = jnp.zeros(len(many.dt), bool) if expanded is None else expanded[1] < CONVERGED
    if expanded is not None and not is_traced(converged) and bool(jnp.all(converged)):
        return Estimate.of(expanded[0], "exact", solver_error=expanded[1])
    rate = largest_rate(sde, coordinates, many)
    effort = effort or Effort.for_stiffness(rate)
    drawn = log_probs(sde, coordinates, many, key, effort)
    value, moved = drawn.log_prob, jnp.zeros_like(drawn.error)
    if checked:
        value, moved = _checked(sde, coordinates, many, key, effort, value, rate)
    found = Estimate.of(
        value,
        "modes",
        standard_error=jnp.where(jnp.isnan(value), jnp.inf, drawn.error),
        truncation_error=jax.lax.stop_gradient(moved),
        effective_paths=drawn.effective,
        num_paths=jnp.full(value.shape, effort.num_paths),
        escaped=drawn.unfound,
    )
    if expanded is None:
        return found
    return where(converged, Estimate.of(expanded[0], "exact", solver_error=expanded[1]), found)


def where(condition: Array, one: Estimate, other: Estimate) -> Estimate:
    """Choose between two estimates, element by element."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _where_too_long(
    sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition, key: PRNGKeyArray, found: Estimate
) -> Estimate:
    """Replace inaccurate path estimates by solutions of the Fokker–Planck equation or of a flow from x₀."""
    poor = np.flatnonzero(~(np.asarray(found.total_error) <= TOLERANCE))
    if not poor.size:
        return found
    columns = [np.asarray(part)[poor] for part in (many.start, many.time[:, None], many.dt[:, None])]
    starts, group = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
    if len(starts) > MAX_STARTS:
        return found
    for number in range(len(starts)):
        which = poor[np.ravel(group) == number]
        part = lambda tree, which=which: jax.tree.map(lambda a: a[which], tree)
        old = part(found)
        new = _from_point(sde, coordinates, part(many), jax.random.fold_in(key, number))
        better = ~(new.total_error > old.total_error) & jnp.isfinite(new.log_prob)
        found = jax.tree.map(lambda a, b, at=which: a.at[at].set(b), found, where(better, new, old))
    return found


def _from_point(
    sde: AbstractSDE, coordinates: AbstractCoordinates, some: Transition, key: PRNGKeyArray
) -> Estimate:
    """Estimate transitions from one x₀ over one time step, by a flow in the given coordinates."""
    inner = InCoordinates(sde, coordinates, some.time[0])
    start, ends = coordinates.from_state(some.start[0]), jax.vmap(coordinates.from_state)(some.end)
    flow = StochasticFlow(inner, Normal(start), t1=float(some.dt[0]))
    estimate = flow.estimate(ends, key=key, start=start)
    volume = jax.vmap(coordinates.log_volume)(some.end)
    grid = estimate.rung == METHODS.index("grid")
    changed = estimate.log_prob + volume, estimate.solver_error + jnp.where(grid, BOX_ERROR, 0)
    return eqx.tree_at(lambda e: (e.log_prob, e.solver_error), estimate, changed)


@functools.partial(jit, level=1)
def expansions(sde: AbstractSDE, many: Transition) -> tuple[Array, Array] | None:
    """Log-densities by expansions, and their errors; None if the SDE has no expansion."""
    return jax.vmap(lambda step: expansion(sde, step.start, step.end, step.dt))(many)


def coordinates_of(sde: Any, coordinates: AbstractCoordinates | None) -> AbstractCoordinates:
    wanted = "an SDE such as rf.OrnsteinUhlenbeck(1.0, 0.0, 1.0)"
    check_instance("sde", sde, AbstractSDE | FractionalOrnsteinUhlenbeck, wanted)
    if coordinates is not None:
        wanted = "coordinates such as rf.transition.Logarithm()"
        check_instance("coordinates", coordinates, AbstractCoordinates, wanted)
        return coordinates
    return sde.coordinates if isinstance(sde, AbstractNamedSDE) else Unchanged()


def check_effort(effort: Any) -> None:
    if effort is not None:
        check_instance("effort", effort, Effort, "an rf.transition.Effort")


def check_no_memory(sde: Any) -> None:
    if isinstance(sde, FractionalOrnsteinUhlenbeck):
        raise TypeError(
            f"transition densities require Brownian motion, but {type(sde).__name__} has memory: "
            f"use rf.fit_sde{see('other-drivers')}"
        )


def check_inside(coordinates: AbstractCoordinates, many: Transition) -> None:
    """Raise an error if states lie outside the state space. Traced values are not checked."""
    if is_traced(many.start) or is_traced(many.end):
        return
    for name, x in (("x0", many.start), ("x1", many.end)):
        inside = np.asarray(coordinates.contains(x))
        if not inside.all():
            row = int(np.argmin(inside))
            raise ValueError(
                f"{name} has values outside the state space; the first is {np.asarray(x[row])} in row {row}"
            )


@functools.partial(jit, level=1)
def exact_log_probs(sde: AbstractSDE, many: Transition) -> Array | None:
    """Exact log-densities of many transitions; None if the SDE has no closed form."""

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
    """Errors `(N,)` of log-densities estimated with paths: the Monte Carlo `error` combined with the errors
    from `_checked`."""
    rate = largest_rate(sde, coordinates, many)
    error = jnp.hypot(error, _checked(sde, coordinates, many, key, effort, value, rate)[1])
    expanded = expansions(sde, many)
    if expanded is not None:
        error = jnp.where(expanded[1] < CONVERGED, expanded[1], error)
    return jnp.where(jnp.isnan(error), jnp.inf, error)


def _checked(
    sde: AbstractSDE,
    coordinates: AbstractCoordinates,
    many: Transition,
    key: PRNGKeyArray,
    effort: Effort,
    value: Array,
    rate: float | None,
) -> tuple[Array, Array]:
    """Refined values, and their errors other than the Monte Carlo error: the change when the effort is
    doubled (unless dt is short), the fraction of paths that touch a boundary, and an allowance for other
    modes."""
    bend, share = _curvatures_and_shares(sde, coordinates, many)
    other = HIDDEN_ERROR * bend**2 + share
    other = jnp.where(bend > STRONG_CURVATURE, jnp.maximum(other, DOUBTFUL), other)
    if rate is None or rate >= SHORT_STEP or is_traced(bend) or bool(jnp.any(bend > NEARLY_LINEAR)):
        more = log_probs(sde, coordinates, many, key, effort.more()).log_prob
        other, value = other + jnp.abs(more - value), more
    return value, jnp.where(jnp.isnan(other), jnp.inf, other)


@functools.partial(jit, level=0)
def _curvatures_and_shares(
    sde: AbstractSDE, coordinates: AbstractCoordinates, many: Transition
) -> tuple[Array, Array]:
    both = lambda step: (curvature(sde, coordinates, step), boundary_share(sde, coordinates, step))
    return jax.vmap(both)(many)
