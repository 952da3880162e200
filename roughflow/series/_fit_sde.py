"""Maximum likelihood for an SDE observed at some times."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from .._checks import check_count, check_key, check_positive
from ..sde import AbstractSDE
from ._coordinates import AbstractCoordinates
from ._ends import Effort
from ._fitted import FittedSDE
from ._likelihood import AbstractLikelihood, Likelihood
from ._measured_likelihood import check_noise, inner_states, measured
from ._observed import check_dimension, check_inside, panel, transitions
from ._parameters import Domain, Parameters
from ._search import climb
from ._series_likelihood import SeriesLikelihood
from ._transition import coordinates_of
from ._whole_likelihood import WholeLikelihood
from .models import AbstractNamedSDE, FractionalOrnsteinUhlenbeck

SPREAD = 0.5  # of further starts, in the free parameters
NEWTON = 5  # steps to polish with
DECREMENT = 1e-6  # nats left to gain, at which polishing ends
REFINED = 3  # times at most
TOLERANCE = (0.02, 0.1)  # nats, without and with measurement noise


def fit_sde(
    sde: AbstractSDE | FractionalOrnsteinUhlenbeck,
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
    space = coordinates_of(sde, coordinates)
    series, sde = panel(times, values), as_floats(sde)
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
    parameters = likelihood.parameters
    start = parameters.to_free(parameters.values(parameters.template))
    free = _best(likelihood, _starts(start, check_count("num_starts", num_starts), key_starts))
    free, information = _polished(likelihood, free)
    error = likelihood.error(free)
    for _ in range(REFINED):
        if error < tolerance or effort is not None:
            break
        further = likelihood.more()
        if not np.isfinite(further.total(free)[0]):
            break
        likelihood = further
        free, information = _polished(likelihood, free)
        error = likelihood.error(free)
    return FittedSDE(likelihood, tuple(series), free, information, error, tolerance)


def as_floats(sde: Any) -> Any:
    """The SDE with plain floats among its fields as arrays, so that they can be replaced."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, float) else leaf, sde)


def _starts(first: np.ndarray, count: int, key: PRNGKeyArray) -> list[np.ndarray]:
    noise = np.asarray(jax.random.normal(key, (count - 1, len(first))), float)
    return [first, *(first + SPREAD * row for row in noise)]


def _best(likelihood: AbstractLikelihood, starts: list[np.ndarray]) -> np.ndarray:
    """The best end of quasi-Newton searches from all starts that are within reach."""

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
    return max(found, key=lambda pair: pair[0])[1]


def _polished(likelihood: AbstractLikelihood, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method from near the maximum, and the information there."""
    value, slope = likelihood.total(free)
    information = likelihood.information(free)
    for _ in range(NEWTON):
        if not _is_positive(information):
            break
        move = np.linalg.solve(information, slope)
        if 0.5 * slope @ move < DECREMENT:
            break
        new, new_slope = likelihood.total(free + move)
        if not new > value - 1e-3:
            break
        free, value, slope = free + move, new, new_slope
        information = likelihood.information(free)
    return free, information


def _is_positive(matrix: np.ndarray) -> bool:
    return bool(np.isfinite(matrix).all()) and float(np.linalg.eigvalsh(matrix)[0]) > 0
