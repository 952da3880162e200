"""Maximum likelihood for an SDE observed at some times."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from .._checks import check_count, check_key, check_positive
from .._programs import in_double_precision
from ..sde import AbstractSDE
from ._coordinates import AbstractCoordinates
from ._ends import Effort
from ._fitted import FittedSDE
from ._likelihood import AbstractLikelihood, Likelihood
from ._measured_likelihood import check_noise, inner_states, measured
from ._observed import check_dimension, check_inside, panel, transitions
from ._parameters import Domain, Parameters
from ._search import LOSS, climb, falls_at_boundary, polish
from ._series_likelihood import SeriesLikelihood
from ._transition import coordinates_of
from ._whole_likelihood import WholeLikelihood
from .models import AbstractNamedSDE, FractionalOrnsteinUhlenbeck

SPREAD = 0.5  # standard deviation of further starts, in the free parameters
REFINED = 3  # times that the effort is doubled, at most
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

    All floats in `sde` are parameters, and start from where they are. The likelihood is the product of the
    transition densities (`rf.transition_log_prob`); it is maximised by a quasi-Newton method (BFGS) in
    coordinates without bounds, and polished by Newton's method with the observed information, from which the
    standard errors come.

    **Arguments:**

    - `sde`: a named SDE such as `rf.CoxIngersollRoss(...)`, an SDE of your own whose fields are
      parameters, or `rf.ParametricSDE`; `rf.FractionalOrnsteinUhlenbeck` for a Hurst exponent, by the joint
      density of a series at even times.
    - `times`, `values`: `(N,)`, and `(N,)` or `(N, d)`. Times are numbers, timedeltas (in years) or dates (in
      years from the first date, in UTC if they have a time zone), as arrays, lists or from pandas. Missing
      values (NaN, masked, None) make longer gaps. Lists of both are a panel: independent series of one SDE,
      whose dates are counted from the first date of all.
    - `domains`: where parameters may lie, by name, such as `{"sigma": rf.Domain(low=0.0)}`; a named SDE knows
      its own.
    - `penalty`: λ by name, such as `{"network": 1.0}`: ½λθ² is taken from the log-likelihood for each of the
      parameters θ of that name or inside of that field. A network needs one, as a series does not determine
      all of its weights; it acts as a normal prior of variance 1/λ.
    - `num_starts`: the first is the SDE as it is given, others are near it.
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

    times = np.arange(200) / 12
    true = rf.OrnsteinUhlenbeck(1.0, 0.5, 0.2)
    x = [0.5]
    for i in range(199):
        x.append(0.5 + (x[-1] - 0.5) * np.exp(-1 / 12) + 0.055 * np.sin(12.9898 * i**2) )
    result = rf.fit_sde(true, times, np.array(x), key=jax.random.key(0))
    print(result.summary())
    ```
    """
    tolerance = TOLERANCE[measurement_noise is not None] if tolerance is None else tolerance
    check_positive("tolerance", tolerance)
    check_count("num_starts", num_starts)
    sde = cast(Any, as_floats(starting_point(sde, times, values)))
    space = coordinates_of(sde, coordinates)
    series = panel(times, values)
    check_dimension(sde, series)
    noise, states = None, series
    if measurement_noise is None:
        check_inside(space, series)
    else:
        noise = check_noise(measurement_noise, series[0].values.shape[1])
        states = inner_states(series, noise, space)
    own = sde.domains if isinstance(sde, AbstractNamedSDE | FractionalOrnsteinUhlenbeck) else {}
    parameters = Parameters.of(sde, {**own, **(domains or {})})
    if not parameters.names:
        raise ValueError(f"{type(sde).__name__} has no floats among its fields: there is nothing to fit")
    key_paths, key_starts = jax.random.split(check_key(key))
    held = parameters.penalties(penalty or {})
    if isinstance(sde, FractionalOrnsteinUhlenbeck):
        if noise is not None:
            raise ValueError("measurement_noise is for SDEs without memory")
        likelihood = WholeLikelihood.of(parameters, held, series)
    else:
        options = {"exact": exact, "effort": effort, "coordinates": coordinates}
        of_sde = SeriesLikelihood.of(sde, transitions(states), key=key_paths, **options)
        likelihood = Likelihood(parameters=parameters, of_sde=of_sde, penalty=held)  # pyright: ignore[reportCallIssue]
        if noise is not None:
            likelihood = measured(likelihood, series, states, noise, effort)
    starts = [parameters.values(sde), *_moments(sde, parameters, times, values)]
    starts = [np.append(start, [] if noise is None else noise) for start in starts]
    maximum = _maximum(likelihood, starts, num_starts, key_starts)
    error = maximum.likelihood.error(maximum.free)
    for _ in range(REFINED):
        if error < tolerance or effort is not None:
            break
        further = maximum.likelihood.more()
        if not np.isfinite(further.total(maximum.free)[0]):
            break
        maximum = _polished(further, maximum.free)
        error = maximum.likelihood.error(maximum.free)
    return FittedSDE(
        maximum.likelihood,
        tuple(series),
        maximum.free,
        maximum.information,
        maximum.falls,
        error,
        tolerance,
    )


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
        start = parameters.values(type(sde).from_series(times, values))
        parameters.to_free(start)
    except (TypeError, ValueError, np.linalg.LinAlgError):
        return []
    return [start]


def _maximum(
    likelihood: AbstractLikelihood, points: list[np.ndarray], num_starts: int, key: PRNGKeyArray
) -> _Maximum:
    """The best end of quasi-Newton searches from all starts that are within reach: some points, and if they
    are fewer than `num_starts` others near the first."""
    parameters = likelihood.parameters
    first, *others = (parameters.to_free(values) for values in points[:num_starts])
    if np.isfinite(likelihood.total(first)[0]):
        likelihood, scaled = likelihood.rescaled(first)
        first, others = scaled, [other * parameters.scale / likelihood.parameters.scale for other in others]
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


def _polished(likelihood: AbstractLikelihood, free: np.ndarray) -> _Maximum:
    """The maximum near a point, and the parameters that lie on a boundary there."""
    likelihood, free = likelihood.rescaled(free)
    domains = likelihood.parameters.domains
    sides = np.isfinite([[domain.low for domain in domains], [domain.high for domain in domains]])
    falls, free = falls_at_boundary(likelihood.total, free, likelihood.quick_information(free), sides)
    inside = np.min(falls, axis=0) >= LOSS
    free, information = polish(likelihood.total, free, likelihood.information, inside)
    return _Maximum(likelihood, free, information, falls)
