"""Maximum likelihood for an SDE observed at some times."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from .._checks import check_count, check_key, check_positive
from .._programs import in_double_precision
from ..sde import AbstractSDE
from ..transition import AbstractCoordinates, Effort
from ._fitted import FittedSDE
from ._likelihood import (
    AbstractLikelihood,
    Likelihood,
    SeriesLikelihood,
    WholeLikelihood,
    check_noise,
    inner_states,
    measured,
)
from ._observed import Observed, check_dimension, check_inside, panel, transitions
from ._parameters import Domain, Parameters
from ._search import LOSS, climb, falls_at_boundary, polish
from ._transition import coordinates_of
from .models import AbstractNamedSDE, FractionalOrnsteinUhlenbeck

SPREAD = 0.5  # standard deviation of further starts, in the free parameters
REFINED = 3  # times that the effort is raised, at most
TOLERANCE = (0.02, 0.1)  # nats, without and with measurement noise


@in_double_precision
def fit_sde(
    sde: AbstractSDE | FractionalOrnsteinUhlenbeck | type[AbstractNamedSDE | FractionalOrnsteinUhlenbeck],
    times: Any,
    values: Any,
    *,
    key: PRNGKeyArray,
    domains: Mapping[str, Domain] | None = None,
    penalty: Mapping[str, float] | None = None,
    num_starts: int = 2,
    exact: bool = True,
    effort: Effort | None = None,
    tolerance: float | None = None,
    coordinates: AbstractCoordinates | None = None,
    measurement_noise: ArrayLike | None = None,
) -> FittedSDE:
    """Fit the parameters of an SDE to a series by maximum likelihood, given its first value.

    All floats in `sde` are parameters. The likelihood is the product of the transition densities
    (`rf.transition_log_prob`). A quasi-Newton method (BFGS) and then Newton's method maximise it, in
    coordinates without bounds and units; standard errors come from the observed information. Everything is
    computed in double precision, also in a process that uses single precision.

    **Arguments:**

    - `sde`: a named SDE such as `rf.CoxIngersollRoss(...)`, an SDE of your own whose fields are
      parameters, or `rf.ParametricSDE`, with starting values; or the class of a named SDE, to start from
      moments of the series (`from_series`). `rf.FractionalOrnsteinUhlenbeck` for a Hurst exponent, by the
      joint density of a series at even times.
    - `times`, `values`: `(N,)`, and `(N,)` or `(N, d)`. Times are numbers, timedeltas (in years) or dates (in
      years from the first date, in UTC if they have a time zone), as arrays, lists or from pandas. Missing
      values (NaN, masked, None) make longer gaps. Lists of both are a panel: independent series of one SDE,
      whose dates are counted from the first date of all.
    - `domains`: where parameters may lie, by name, such as `{"sigma": rf.series.Domain(low=0.0)}`; a named
      SDE knows its own.
    - `penalty`: λ by name, such as `{"network": 1.0}`: ½λθ² is taken from the log-likelihood for each of the
      parameters θ of that name or inside of that field. A network needs one, as a series does not determine
      all of its weights; it acts as a normal prior of variance 1/λ.
    - `num_starts`: the SDE as it is given, for a named SDE the moments of the series, then points near the
      first.
    - `exact`: whether to take exact transitions where the SDE knows them.
    - `effort`: functions, paths and steps of each transition; chosen, and raised until the log-likelihood at
      the maximum is known to `tolerance` nats, if None: 0.02 of them, or 0.1 with measurement noise.
    - `measurement_noise`: if values are states with normal errors, their standard deviation, a number or one
      of each column. It is where the search starts: they are parameters too, called `measurement_noise`.
      The states are integrated out, the first of them with a flat prior. Values may then lie outside the
      state space.

    ```python
    import jax, jax.numpy as jnp, numpy as np
    import roughflow as rf

    truth = rf.OrnsteinUhlenbeck(kappa=3.0, mu=0.5, sigma=0.2)
    x = rf.simulate(truth, jnp.full(1, 0.5), key=jax.random.key(0), t1=20.0, steps=240, trajectory=True)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck, np.arange(241) / 12, x, key=jax.random.key(1))
    print(result.summary())
    ```
    """
    tolerance = TOLERANCE[measurement_noise is not None] if tolerance is None else tolerance
    check_positive("tolerance", tolerance)
    check_count("num_starts", num_starts)
    start = as_floats(starting_point(sde, times, values))
    key_paths, key_starts = jax.random.split(check_key(key))
    options = {"exact": exact, "effort": effort, "coordinates": coordinates}
    series, noise = panel(times, values), measurement_noise
    likelihood = _likelihood(start, series, noise, domains or {}, penalty or {}, key_paths, options)
    moments = _moments(start, likelihood.parameters, times, values)
    maximum = _maximum(likelihood, moments, num_starts, key_starts)
    errors = maximum.likelihood.total_errors(maximum.free)
    for _ in range(REFINED):
        if np.hypot(*errors) < tolerance or effort is not None:
            break
        further = _raised(maximum.likelihood, errors, tolerance)
        if not np.hypot(*further.total_errors(maximum.free)) < np.hypot(*errors):  # more does not help
            break
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
    measurement_noise: ArrayLike | None,
    domains: Mapping[str, Domain],
    penalty: Mapping[str, float],
    key: PRNGKeyArray,
    options: dict[str, Any],
) -> AbstractLikelihood:
    """That of an SDE without memory, of one with, or of values with errors."""
    check_dimension(sde, series)
    space = coordinates_of(sde, options["coordinates"])
    own = sde.domains if isinstance(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck) else {}
    parameters = Parameters.of(sde, {**own, **domains})
    if not parameters.names:
        raise ValueError(f"{type(sde).__name__} has no floats among its fields: there is nothing to fit")
    penalties = parameters.penalties(penalty)
    if isinstance(sde, FractionalOrnsteinUhlenbeck):
        if measurement_noise is not None:
            raise ValueError("measurement_noise is for SDEs without memory")
        return WholeLikelihood.of(parameters, penalties, series)
    noise, states = None, series
    if measurement_noise is None:
        check_inside(space, series)
    else:
        noise = check_noise(measurement_noise, series[0].values.shape[1])
        states = inner_states(series, noise, space)
    of_sde = SeriesLikelihood.of(sde, transitions(states), key=key, **options)
    likelihood = Likelihood(parameters=parameters, of_sde=of_sde, penalty=penalties)  # pyright: ignore[reportCallIssue]
    if noise is None:
        return likelihood
    return measured(likelihood, series, states, noise, options["effort"])


@dataclasses.dataclass(frozen=True)
class _Maximum:
    """A likelihood, its maximum and the information there, and by how much it falls if a parameter is put on
    the lower or upper end of its domain, `(2, p)`."""

    likelihood: AbstractLikelihood
    free: np.ndarray
    information: np.ndarray
    falls: np.ndarray


def starting_point(sde: Any, times: Any, values: Any) -> Any:
    """The SDE from which a search starts: the one that is given, or what a class makes of the series."""
    if not isinstance(sde, type):
        return sde
    if issubclass(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck):
        return sde.from_series(times, values)
    raise TypeError(f"sde must be an SDE with starting values, got the class {sde.__name__}")


def as_floats(sde: Any) -> Any:
    """The SDE with plain floats among its fields as arrays, so that they can be replaced."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, float) else leaf, sde)


def _moments(sde: Any, parameters: Parameters, times: Any, values: Any) -> list[np.ndarray]:
    """Another start, from the moments of the series; none where they are not known, or outside a domain."""
    if not isinstance(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck):
        return []
    try:
        found = type(sde).from_series(times, values)
        noisy = isinstance(parameters.template, tuple)
        start = parameters.values((found, parameters.template[1]) if noisy else found)
        return [parameters.to_free(start)]
    except (TypeError, ValueError, np.linalg.LinAlgError):
        return []


def _maximum(
    likelihood: AbstractLikelihood, moments: list[np.ndarray], num_starts: int, key: PRNGKeyArray
) -> _Maximum:
    """The best end of quasi-Newton searches from `num_starts` places: the SDE as it is given, the moments of
    the series, and points near the first. Places under which the series is impossible are left out."""
    parameters = likelihood.parameters
    first = parameters.to_free(parameters.values(parameters.template))
    others = moments[: num_starts - 1]
    if np.isfinite(likelihood.total(first)[0]):
        likelihood, scaled = likelihood.rescaled(first)
        factor = parameters.scale / likelihood.parameters.scale
        first, others = scaled, [other * factor for other in others]
    noise = np.asarray(jax.random.normal(key, (num_starts - 1 - len(others), len(first))), float)
    starts = [first, *others, *(first + SPREAD * row for row in noise)]
    found = []
    for start in starts:
        if np.isfinite(likelihood.total(start)[0]):
            end = climb(likelihood.total, start, likelihood.quick_information)
            found.append((likelihood.total(end)[0], end))
    if not found:
        raise ValueError(
            "the likelihood is zero at the SDE as it is given: start from parameters under which the series "
            "is possible, or raise effort if its values are far apart in time"
        )
    return _polished(likelihood, max(found, key=lambda pair: pair[0])[1])


def _raised(
    likelihood: AbstractLikelihood, errors: tuple[float, float], tolerance: float
) -> AbstractLikelihood:
    assert likelihood.effort is not None  # it has errors
    return likelihood.with_effort(likelihood.effort.raised(*errors, tolerance))


def _polished(likelihood: AbstractLikelihood, free: np.ndarray) -> _Maximum:
    """The maximum near a point, and the parameters that lie on a boundary there."""
    likelihood, free = likelihood.rescaled(free)
    domains = likelihood.parameters.domains
    sides = np.isfinite([[domain.low for domain in domains], [domain.high for domain in domains]])
    falls, free = falls_at_boundary(likelihood.total, free, likelihood.quick_information(free), sides)
    inside = np.min(falls, axis=0) >= LOSS
    free, information = polish(likelihood.total, free, likelihood.information, inside)
    return _Maximum(likelihood, free, information, falls)
