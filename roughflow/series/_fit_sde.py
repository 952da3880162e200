"""Maximum-likelihood estimation of an SDE from a time series."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from .._checks import check_count, check_key, check_positive
from .._programs import in_double_precision
from ..sde import AbstractSDE, check_sde
from ..transition import AbstractCoordinates, Effort
from ._fitted import FittedSDE
from ._likelihood import NOISE, AbstractLikelihood, Likelihood, SeriesLikelihood, WholeLikelihood
from ._observed import Observed, check_dimension, check_inside, is_partial, panel, transitions
from ._parameters import POSITIVE, Domain, Parameters
from ._search import LOSS, climb, falls_at_boundary, is_regular, polish
from ._transition import check_no_memory, coordinates_of
from ._varying import LogNormal, VaryingLikelihood, varying_likelihood
from .hidden._likelihood import (
    GRID,
    PARTICLES,
    HiddenLikelihood,
    HiddenSeries,
    Observation,
    Setup,
    check_noise,
)
from .models import AbstractNamedSDE, FractionalOrnsteinUhlenbeck

SPREAD = 0.5  # standard deviation of random starting points around the first, in free parameters
# In each pair, the first value applies to observed states and the second to hidden states.
REFINED = (3, 5)  # maximum number of times that the effort is raised
TOLERANCE = (0.02, 0.1)  # nats


@in_double_precision
def fit_sde(
    sde: AbstractSDE | FractionalOrnsteinUhlenbeck | type[AbstractNamedSDE | FractionalOrnsteinUhlenbeck],
    times: Any,
    values: Any,
    *,
    key: PRNGKeyArray,
    domains: Mapping[str, Domain] | None = None,
    penalty: Mapping[str, float] | None = None,
    fixed: Sequence[str] = (),
    varying: Mapping[str, LogNormal] | None = None,
    num_starts: int = 2,
    exact: bool = True,
    effort: Effort | None = None,
    tolerance: float | None = None,
    coordinates: AbstractCoordinates | None = None,
    measurement_noise: ArrayLike | list | None = None,
    observe: Callable | None = None,
    initial: Any = None,
    inputs: Any = None,
    steps: int | None = None,
) -> FittedSDE:
    """Fit the parameters of an SDE to a time series by maximum likelihood, conditional on the first value.

    All floats in `sde` are parameters. The likelihood is the product of the transition densities
    (`rf.transition_log_prob`). BFGS and then Newton's method maximise it over unconstrained, dimensionless
    parameters. Standard errors come from the observed information. All computations use double precision,
    even if JAX is set to single precision.

    **Arguments:**

    - `sde`: a named SDE such as `rf.CoxIngersollRoss(...)`, your own SDE whose fields are the parameters, or
      an `rf.ParametricSDE`; its parameters are the starting values. If `sde` is the class of a named SDE, its
      method `from_series` computes starting values from moments of the series.
      `rf.FractionalOrnsteinUhlenbeck` also estimates a Hurst exponent, from the joint density of an evenly
      spaced series, some of whose values may be missing.
    - `times`, `values`: `(N,)`, and `(N,)` or `(N, d)`. Times are numbers, timedeltas (converted to years) or
      dates (years since the first date; in UTC if they have a time zone), as arrays, lists or pandas objects.
      Missing values (NaN, masked, None) are skipped, which lengthens the gap between values. A column of NaN
      stands for a hidden component of the state. Individual components of a value may also be missing. Both
      are integrated out. For a panel (independent series of the same SDE), pass a list of times and a list of
      values; dates are counted from the earliest date in the panel.
    - `domains`: the range of each parameter by name, such as `{"sigma": rf.series.Domain(lower=0.0)}`; named
      SDEs define their own.
    - `penalty`: λ by name, such as `{"network": 1.0}`. For each parameter θ that has that name or lies inside
      the field with that name, ½λθ² is subtracted from the log-likelihood; this is equivalent to a normal
      prior with mean 0 and variance 1/λ. Networks need a penalty, because a series does not determine all of
      their weights.
    - `fixed`: names of parameters that keep the value they have in `sde`, such as `["s"]`.
    - `varying`: parameters that vary between the series of a panel, such as `{"kappa":
      rf.series.LogNormal()}`. The estimate of `kappa` is then the median of the population, and the estimate
      of `kappa_spread` the standard deviation of log κ; `FittedSDE.varying` gives the values for each series.
    - `num_starts`: number of starting points of the search. The first point is given by the parameters of
      `sde`, the second by the moments of the series (named SDEs); all others are random points near the
      first.
    - `exact`: whether to use exact transition densities if the SDE has them.
    - `effort`: number of driver functions, paths and steps per transition. If None, it is chosen
      automatically and raised until the error of the maximum log-likelihood is below `tolerance` nats
      (default 0.02, or 0.1 with hidden states). With hidden states, the effort determines the number of
      particles (four per path) and the number of steps per gap.
    - `measurement_noise`: starting value for the standard deviation of normal measurement errors, either one
      for all columns or one per column. The standard deviation is estimated along with the other parameters,
      as `measurement_noise`. An array with the shape of `values` gives known standard deviations, one per
      value. With measurement noise, values may lie outside the state space.
    - `observe`: a function g(t, x), or g(t, x, u) with inputs, that returns the distribution of a value given
      the state: an object with `log_prob`, such as a NumPyro distribution. If the function is an
      `eqx.Module`, its float fields are estimated too.
    - `steps`: number of Euler steps from one value to the next, for models in discrete time. If None
      (default), the likelihood is that of the SDE in continuous time.
    - `initial`: the hidden components of the first state: None (a flat prior), their values (noisy values at
      the first time are then ignored), a distribution, "stationary", `rf.series.Estimated(values)`, or a
      function of the SDE that returns values or a distribution.
    - `inputs`: u(t), given as a function, as a tuple (times, columns) for inputs that are constant from one
      time to the next, or as an `rf.series.Inputs`. u is the last argument of drift and diffusion.

    For linear SDEs with hidden components, missing cells, known errors or inputs, the Kalman filter computes
    the exact likelihood. For other SDEs a filter on a grid integrates out one hidden component if the others
    are observed without error; choose `coordinates` in which the noise of the hidden component is nearly
    constant. Otherwise the likelihood is estimated by particles that are guided by the most likely states.

    ```python
    import jax, jax.numpy as jnp, numpy as np
    import roughflow as rf

    truth = rf.OrnsteinUhlenbeck(kappa=3.0, mu=0.5, sigma=0.2)
    x = rf.simulate(truth, jnp.full(1, 0.5), key=jax.random.key(0), t1=20.0, steps=240, trajectory=True)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck, np.arange(241) / 12, x, key=jax.random.key(1))
    print(result.summary())
    ```
    """
    check_count("num_starts", num_starts)
    start = as_floats(starting_point(sde, times, values, observe))
    key_paths, key_starts = jax.random.split(check_key(key))
    options = {"exact": exact, "effort": effort, "coordinates": coordinates}
    observation = Observation(measurement_noise, observe, initial, inputs, _check_steps(steps))
    hidden = observation.given or is_partial(values)
    tolerance = TOLERANCE[hidden] if tolerance is None else tolerance
    check_positive("tolerance", tolerance)
    memory = isinstance(start, FractionalOrnsteinUhlenbeck)
    series = panel(times, values, partial=hidden and not memory)
    of = lambda series: _likelihood(
        start, series, observation, domains or {}, penalty or {}, fixed, key_paths, options
    )
    likelihood = of(series)
    if varying:
        likelihood = varying_likelihood(likelihood, [of([one]) for one in series], varying)
    moments = [] if observe is not None else _moments(start, likelihood.parameters, times, values)
    maximum = _maximum(likelihood, moments, num_starts, key_starts)
    errors = maximum.likelihood.total_errors(maximum.free)
    for _ in range(REFINED[hidden]):
        if np.hypot(*errors) < tolerance or effort is not None:
            break
        further = _raised(maximum, errors, tolerance)
        if not np.hypot(*further.total_errors(maximum.free)) < np.hypot(*errors):  # more effort does not help
            break
        if isinstance(further, HiddenLikelihood) and np.hypot(*errors) < CLOSE:
            maximum = _continued(further, maximum)
        else:
            maximum = _polished(further, maximum.free)
        errors = maximum.likelihood.total_errors(maximum.free)
    return FittedSDE(
        maximum.likelihood,
        tuple(series),
        maximum.free,
        maximum.information,
        maximum.falls,
        float(np.hypot(*errors)),
        tolerance,
    )


def _likelihood(
    sde: Any,
    series: list[Observed],
    observation: Observation,
    domains: Mapping[str, Domain],
    penalty: Mapping[str, float],
    fixed: Sequence[str],
    key: PRNGKeyArray,
    options: dict[str, Any],
) -> AbstractLikelihood:
    """The likelihood of a series or a panel as a function of the parameters that are not fixed."""
    found = _of_all(sde, series, observation, domains, penalty, key, options)
    if not fixed:
        return found
    parameters, kept = found.parameters.without(fixed)
    return dataclasses.replace(found, parameters=parameters, penalty=found.penalty[kept])


def _of_all(
    sde: Any,
    series: list[Observed],
    observation: Observation,
    domains: Mapping[str, Domain],
    penalty: Mapping[str, float],
    key: PRNGKeyArray,
    options: dict[str, Any],
) -> AbstractLikelihood:
    """The likelihood as a function of all parameters, for a Markov SDE, a process with memory, or a partially
    observed series."""
    space = coordinates_of(sde, options["coordinates"])
    hidden = observation.given or any(np.isnan(one.values).any() for one in series)
    if not hidden or isinstance(sde, FractionalOrnsteinUhlenbeck):
        check_dimension(sde, series)
    own = sde.domains if isinstance(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck) else {}
    parts = (observation.observe, observation.initial)
    extra = (
        {"initial", *(name for part in parts for name in getattr(part, "__dict__", ()))} if hidden else set()
    )
    parameters = Parameters.of(sde, {**own, **{k: v for k, v in domains.items() if k not in extra}})
    if not parameters.names:
        raise ValueError(f"{type(sde).__name__} has no float fields, so there are no parameters to fit")
    penalties = parameters.penalties(penalty)
    if isinstance(sde, FractionalOrnsteinUhlenbeck):
        parameters, penalties = _with_errors(parameters, penalties, observation, series)
        return WholeLikelihood.of(parameters, penalties, series)
    exact, effort = options["exact"], options["effort"]
    if hidden:
        setup = Setup(sde, series, observation, space, key, exact, effort)
        return setup.likelihood(parameters, penalties, domains)
    check_inside(space, series)
    of_sde = SeriesLikelihood.of(sde, transitions(series), key=key, **options)
    return Likelihood(parameters=parameters, of_sde=of_sde, penalty=penalties)  # pyright: ignore[reportCallIssue]


def _with_errors(
    parameters: Parameters, penalties: np.ndarray, observation: Observation, series: list[Observed]
) -> tuple[Parameters, np.ndarray]:
    """Add the standard deviation of measurement errors, if there are any, to the parameters of a process with
    memory. Return the parameters and their penalties."""
    if observation.besides_noise:
        raise ValueError(f"{observation.besides_noise[0]} requires an SDE without memory")
    if observation.measurement_noise is None:
        return parameters, penalties
    noise, errors = check_noise(observation.measurement_noise, series)
    if errors is not None or noise is None or noise.ndim:
        raise ValueError(f"{NOISE} of a process with memory must be one number")
    place = len(jax.tree.leaves(parameters.template)), ()
    joined = Parameters(
        (*parameters.names, NOISE), (*parameters.domains, POSITIVE), (*parameters.entries, place),
        (parameters.template, {NOISE: noise}), np.append(parameters.scale, 1.0),
    )  # fmt: skip
    return joined, np.append(penalties, 0.0)


@dataclasses.dataclass(frozen=True)
class _Maximum:
    """A maximum of the likelihood, and the information matrix there. `falls` `(2, p)` contains the drops in
    log-likelihood when each parameter is moved to the lower or upper end of its domain."""

    likelihood: AbstractLikelihood
    free: np.ndarray
    information: np.ndarray
    falls: np.ndarray


def _check_steps(steps: int | None) -> int | None:
    return None if steps is None else check_count("steps", steps)


def starting_point(sde: Any, times: Any, values: Any, observe: Callable | None) -> Any:
    """The SDE from which the search starts: `sde` itself or, if `sde` is a class, the result of
    `from_series`."""
    if not isinstance(sde, type):
        return sde
    if observe is not None:
        raise ValueError(f"observe requires starting values: pass an SDE such as {sde.__name__}(...)")
    if issubclass(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck):
        return sde.from_series(times, values)
    raise TypeError(f"sde must be an SDE with starting values, got the class {sde.__name__}")


def as_floats(sde: Any) -> Any:
    """Convert the floats and float arrays in an SDE to double-precision arrays."""
    inexact = lambda leaf: isinstance(leaf, float) or eqx.is_inexact_array(leaf)
    return jax.tree.map(lambda leaf: np.asarray(leaf, float) if inexact(leaf) else leaf, sde)


def _moments(sde: Any, parameters: Parameters, times: Any, values: Any) -> list[np.ndarray]:
    """A list with the starting point from the moments of the series; empty if it is not inside the
    domains."""
    if not isinstance(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck):
        return []
    try:
        found = type(sde).from_series(times, values)
        noisy = isinstance(parameters.template, tuple)
        start = parameters.values((as_floats(found), parameters.template[1]) if noisy else found)
        return [parameters.to_free(start)]
    except (TypeError, ValueError, np.linalg.LinAlgError):
        return []


def _maximum(
    likelihood: AbstractLikelihood, moments: list[np.ndarray], num_starts: int, key: PRNGKeyArray
) -> _Maximum:
    """The best result of quasi-Newton searches from `num_starts` points: the given SDE, the moments of the
    series, and random points near the first. Points with zero likelihood are skipped."""
    parameters = likelihood.parameters
    first = parameters.to_free(parameters.values(parameters.template))
    others = moments[: num_starts - 1]
    if np.isfinite(likelihood.smooth.total(first)[0]):
        likelihood, scaled = likelihood.rescaled(first)
        factor = parameters.scale / likelihood.parameters.scale
        first, others = scaled, [other * factor for other in others]
    noise = np.asarray(jax.random.normal(key, (num_starts - 1 - len(others), len(first))), float)
    starts = [first, *others, *(first + SPREAD * row for row in noise)]
    found = []
    for start in starts:
        if np.isfinite(likelihood.smooth.total(start)[0]):
            found.append(_searched(likelihood, start))
    if not found:
        raise ValueError(
            "the likelihood is zero at the given parameters: start from parameters under which the series "
            "is possible, or raise effort if the observations are far apart in time"
        )
    return _polished(*max(found, key=lambda pair: pair[0].smooth.total(pair[1])[0]))


SETTLED = 0.01  # nats; a search ends after a round that changes the log-likelihood by less
# Newton steps with particles: their maximum number, the length (in standard errors) below which they have
# converged, and the length from which finite differences are too inaccurate.
MAX_TILTS, SMALL_STEP, LONG_STEP = 3, 0.3, 2.0
# In nats. If a likelihood with hidden states has a smaller error, its information matrix is reused after
# raising the effort.
CLOSE = 1.0
MOVES, FEW = 8, 8  # maximum number of rounds of BFGS with a moving grid, and of iterations per round


def _searched(likelihood: AbstractLikelihood, free: np.ndarray) -> tuple[AbstractLikelihood, np.ndarray]:
    """Maximise by BFGS. The grid of hidden states, or the nodes of varying parameters, are moved after each
    round, until the log-likelihood no longer changes. Return the likelihood and its maximiser."""
    if isinstance(likelihood, VaryingLikelihood):
        found, free = _searched_by_rounds(likelihood, free)
        wider = found.widened(free)
        return _searched_by_rounds(found, wider) if (wider != free).any() else (found, free)
    if isinstance(likelihood, HiddenLikelihood) and likelihood.of_sde.method == GRID:
        return _searched_by_rounds(likelihood, free)
    return likelihood, climb(likelihood.smooth.total, free, likelihood.quick_information)


def _searched_by_rounds(likelihood: Any, free: np.ndarray) -> tuple[Any, np.ndarray]:
    last = np.inf
    for _ in range(MOVES):
        free = climb(likelihood.total, free, likelihood.quick_information, rounds=1, iterations=FEW)
        likelihood = likelihood.moved_to(free)
        value = likelihood.total(free)[0]
        if abs(value - last) < SETTLED:
            break
        last = value
    return likelihood, free


def _raised(maximum: _Maximum, errors: tuple[float, float], tolerance: float) -> AbstractLikelihood:
    likelihood, free = maximum.likelihood, maximum.free
    if isinstance(likelihood, VaryingLikelihood) and errors[0] >= errors[1]:
        return likelihood.with_nodes().moved_to(free)
    assert likelihood.effort is not None  # the effort is None only if the likelihood is exact
    if (
        isinstance(likelihood, HiddenLikelihood)
        and likelihood.of_sde.method == GRID
        and errors[0] > errors[1]
    ):
        return likelihood.moved_to(free).with_nodes()
    return likelihood.with_effort(likelihood.effort.raised(*errors, tolerance))


def _continued(likelihood: AbstractLikelihood, last: _Maximum) -> _Maximum:
    """The maximum of `likelihood`, by Newton's method from the last maximum with the information matrix from
    there."""
    known, inside = last.information, np.min(last.falls, axis=0) >= LOSS
    free, _ = polish(likelihood.smooth.total, last.free, lambda _: known, inside)
    return _by_particles(dataclasses.replace(last, likelihood=likelihood, free=free))


def _by_particles(last: _Maximum) -> _Maximum:
    """The maximum of the particle likelihood, by Newton steps from that of Laplace's approximation. For other
    methods, `last` is returned unchanged."""
    likelihood, free, inside = last.likelihood, last.free, np.min(last.falls, axis=0) >= LOSS
    inner = last.information[np.ix_(inside, inside)]
    if not (isinstance(likelihood, HiddenLikelihood) and likelihood.of_sde.method == PARTICLES):
        return last
    if not is_regular(inner):
        return last
    root = np.zeros((len(free), inside.sum()))
    root[inside] = np.linalg.cholesky(np.linalg.inv(inner))
    for _ in range(MAX_TILTS):
        likelihood = likelihood.tilted(free, root)
        slope = likelihood.smooth.total(free)[1] + (0 if likelihood.tilt is None else likelihood.tilt)
        move = np.zeros(len(free))
        move[inside] = np.linalg.solve(inner, slope[inside])
        length = float(np.sqrt(slope @ move))
        if not (length < LONG_STEP and np.isfinite(likelihood.smooth.total(free + move)[0])):
            break  # the fit then has a warning
        free = free + move
        if length < SMALL_STEP:
            break
    return dataclasses.replace(last, likelihood=likelihood, free=free)


def _polished(likelihood: AbstractLikelihood, free: np.ndarray) -> _Maximum:
    """The maximum near a point. Parameters are moved to a boundary if that does not lower the likelihood."""
    likelihood, free = likelihood.rescaled(free)
    domains, smooth = likelihood.parameters.domains, likelihood.smooth
    sides = np.isfinite([[domain.lower for domain in domains], [domain.upper for domain in domains]])
    falls, free = falls_at_boundary(smooth.total, free, likelihood.quick_information(free), sides)
    inside = np.min(falls, axis=0) >= LOSS
    free, information = polish(smooth.total, free, likelihood.information, inside)
    return _by_particles(_Maximum(likelihood, free, information, falls))


def series_likelihood(
    sde: AbstractSDE,
    times: Any,
    values: Any,
    *,
    key: PRNGKeyArray,
    exact: bool = True,
    effort: Effort | None = None,
    coordinates: AbstractCoordinates | None = None,
    measurement_noise: ArrayLike | list | None = None,
    observe: Callable | None = None,
    initial: Any = None,
    inputs: Any = None,
    steps: int | None = None,
) -> SeriesLikelihood | HiddenSeries:
    """The log-likelihood that `rf.fit_sde` maximises, as a function `sde -> ()`, for instance for MCMC.

    The function is smooth and deterministic, and supports `jax.jit`, `jax.vmap` and `jax.grad`: effort and
    random numbers are the same in every call. Derivatives use forward mode even under `jax.grad`, which is
    faster for few parameters. If a transition has zero density the value is −inf, with zero derivatives.

    **Arguments:** `sde` must have the same type as the SDEs at which the function will be evaluated, and
    similar parameters. It determines whether transitions are exact and, if not, the effort. The other
    arguments are those of `rf.fit_sde`.

    Hidden components are integrated out; `measurement_noise` and `initial` are fixed.
    `FittedSDE.series_likelihood` reuses the effort of the fit. With hidden components, `with_error(sde)`
    returns the log-likelihood and its error. The grid for one hidden component is replaced if it does not
    cover the states of an SDE, but not inside `jax.jit`. If you use `jax.jit`, check `with_error` for SDEs
    far from the given `sde`. With particles, derivatives are those of Laplace's approximation.

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
    observation = Observation(measurement_noise, observe, initial, inputs, _check_steps(steps))
    hidden = observation.given or is_partial(values)
    series, space = panel(times, values, partial=hidden), coordinates_of(sde, coordinates)
    if hidden:
        setup = Setup(sde, series, observation, space, check_key(key), exact, effort)
        return setup.settled(TOLERANCE[hidden])
    check_dimension(sde, series)
    check_inside(space, series)
    options = {"exact": exact, "effort": effort, "coordinates": coordinates}
    return SeriesLikelihood.of(sde, transitions(series), key=check_key(key), **options)
