"""The result of `fit_sde`: estimates, standard errors, intervals, tests, forecasts, and a summary."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._checks import check_callable, check_count, check_instance, check_key, warn
from .._programs import in_double_precision
from .._show import table
from ..faq import see
from ..sde import AbstractSDE
from ..transition import AbstractCoordinates, Effort
from ._likelihood import (
    NOISE,
    AbstractLikelihood,
    Likelihood,
    SeriesLikelihood,
    SeriesPosterior,
    WholeLikelihood,
)
from ._observed import Observed, same_data
from ._parameters import Domain
from ._search import (
    LOSS,
    HigherError,
    boundary_p_value,
    check_level,
    climb,
    is_regular,
    profile_interval,
    undetermined,
    unit_root_p_value,
)
from ._simulation import Residuals, check_memory, forecast, residuals, tested
from ._transition import DOUBTFUL, coordinates_of
from ._varying import SPREAD, VaryingLikelihood
from .hidden._likelihood import HiddenLikelihood, HiddenSeries
from .models import BrownianMotion, OrnsteinUhlenbeck


def _rows(result: "FittedSDE", level: float) -> list[tuple[str, ...]]:
    """The rows of the summary table, one per parameter without a penalty. Penalised parameters, such as the
    weights of a network, have no individual meaning."""
    errors, robust, intervals = result.standard_errors, result.robust_errors, result.confint(level)
    penalties = zip(result.names, result.likelihood.penalty, strict=True)
    free = [name for name, penalty in penalties if not penalty]
    return [
        (
            name,
            f"{result.params[name]:.6g}",
            f"{errors[name]:.4g}",
            *([f"{robust[name]:.4g}"] if _has_robust(result) else []),
            f"{result.params[name] / errors[name]:.2f}" if np.isfinite(errors[name]) else "nan",
            f"[{intervals[name][0]:.5g}, {intervals[name][1]:.5g}]",
        )
        for name in free
    ]


def _penalised(result: "FittedSDE") -> list[str]:
    number = np.count_nonzero(result.likelihood.penalty)
    if not number:
        return []
    count = result.num_effective - (len(result.names) - number)
    return [f"  and {number} penalised parameters, {count:.1f} effective"]


def _has_robust(result: "FittedSDE") -> bool:
    """Whether robust errors exist. With hidden states they do not, because individual values have no
    scores."""
    return not isinstance(result.likelihood, HiddenLikelihood)


def _how(result: "FittedSDE") -> str:
    how = result.likelihood.described()
    return how if result.effort is None else f"{how}; ± {result.likelihood_error:.2g} nats"


def fault(result: "FittedSDE") -> str | None:
    """A one-line message if the estimates are unreliable, else None."""
    # Check the accuracy of the likelihood first, because inaccuracy may cause all other failures.
    suspect = int(np.sum(~(result.transition_errors < DOUBTFUL))) if _has_robust(result) else 0
    if suspect:
        count = f"{suspect} of {result.num_transitions}"
        message = f"{count} transition densities are inaccurate, because their time steps are too long"
        return f"{message}: raise effort{see('long-transitions')}"
    if not result.identified:
        message = f"{_joined(result.unidentified)} not identified: the information matrix is singular, so "
        message += "there are no standard errors; fix a parameter, fit a simpler SDE, or set penalty"
        return message + see("not-identified")
    if not result.converged:
        step = f"{result.distance:.2g} standard errors"
        return f"the search did not converge: the next Newton step is {step} long{see('not-converged')}"
    if result.likelihood_error > result.tolerance:
        known = f"the log-likelihood is known only to {result.likelihood_error:.2g} nats"
        return f"{known}: raise effort or tolerance{see('not-converged')}"
    return None


def _joined(names: tuple[str, ...]) -> str:
    """The subject and verb of a sentence about these parameters, such as "a and b are"."""
    if not 0 < len(names) <= MAX_NAMES:
        return "the parameters are"
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def _boundary(result: "FittedSDE") -> str | None:
    if result.boundary:
        names = " and ".join(f"{name} = {result.params[name]:g}" for name in result.boundary)
        message = f"the maximum is on a boundary, {names}: a model without this parameter fits equally well"
        return message + see("on-a-boundary")
    if result.near_boundary:
        name, (end, fall) = next(iter(result.near_boundary.items()))
        message = (
            f"{name} is not distinguishable from {end:g}: the log-likelihood there is {fall:.2g} nats lower"
        )
        return message + see("on-a-boundary")
    return None


MAX_NAMES = 5  # maximum number of names in a message
DISTINGUISHABLE_DROP = 1.35  # nats, half the 5 % critical value of ½χ²₀ + ½χ²₁ (Chernoff 1954)
CONVERGED_DISTANCE = 0.05  # in standard errors; a search whose next step is longer has not converged


@dataclasses.dataclass(frozen=True, repr=False)
class FittedSDE:
    """An SDE fitted by `rf.fit_sde`.

    `params`, `standard_errors` and `robust_errors` are dictionaries by parameter name. `standard_errors` come
    from the observed information. `robust_errors` come from the sandwich estimator (White 1982), which is
    valid even if the SDE is misspecified. `sde` is the SDE with the estimated parameters; `log_likelihood`,
    `aic` and `bic` compare models of the same series.

    ```python
    import jax, numpy as np
    import roughflow as rf

    x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12, x, key=jax.random.key(0))
    result.params, result.standard_errors, result.confint(), result.aic
    ```
    """

    likelihood: AbstractLikelihood
    series: tuple[Observed, ...]
    free: np.ndarray
    free_information: np.ndarray
    falls: np.ndarray  # (2, p), drop in log-likelihood at the ends of each parameter's domain, in nats
    likelihood_error: float  # Monte Carlo and discretisation error of the log-likelihood
    tolerance: float

    @property
    def sde(self) -> Any:
        """The SDE with the estimated parameters."""
        return _in_default_precision(self._sde)

    @cached_property
    @in_double_precision
    def _sde(self) -> Any:
        return self.likelihood.sde(jnp.asarray(self.free, float))

    @cached_property
    @in_double_precision
    def estimates(self) -> np.ndarray:
        """The estimated parameters, `(p,)`; an estimate on a bound has exactly the value of that bound."""
        parameters = self.likelihood.parameters
        inside = np.asarray(parameters.from_free(jnp.asarray(self.free, float)), float)
        ends = np.array([domain.upper if side > 0 else domain.lower for domain, side in self._domains()])
        return np.where(self.sides == 0, inside, ends)

    def _domains(self) -> Iterable[tuple[Domain, int]]:
        return zip(self.likelihood.parameters.domains, self.sides, strict=True)

    @cached_property
    def sides(self) -> np.ndarray:
        """−1 or 1 for a parameter at the lower or upper end of its domain, else 0, `(p,)`."""
        return np.where(self.falls[0] < LOSS, -1, np.where(self.falls[1] < LOSS, 1, 0))

    @property
    def boundary(self) -> tuple[str, ...]:
        """Names of the parameters whose estimate lies on the boundary of their domain."""
        return tuple(name for name, side in zip(self.names, self.sides, strict=True) if side)

    @property
    def near_boundary(self) -> dict[str, tuple[float, float]]:
        """For each parameter that is not significantly different (5 % level) from an end of its domain: that
        end, and the drop in log-likelihood there, in nats."""
        found = {}
        for name, (domain, _), falls in zip(self.names, self._domains(), self.falls.T, strict=True):
            end = domain.lower if falls[0] <= falls[1] else domain.upper
            if LOSS <= falls.min() < DISTINGUISHABLE_DROP:
                found[name] = end, float(falls.min())
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return self.likelihood.parameters.names

    @property
    def params(self) -> dict[str, float]:
        return self._by_name(self.estimates)

    def _by_name(self, numbers: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, numbers.tolist(), strict=True))

    @cached_property
    @in_double_precision
    def _scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.likelihood.scores(self.free)

    @property
    def log_likelihood(self) -> float:
        return float(self._scores[0].sum())

    @cached_property
    @in_double_precision
    def transition_errors(self) -> np.ndarray:
        """The error of the log-density of each transition, `(N,)`; with hidden states, that of each value or
        series."""
        return self.likelihood.errors(self.free)

    @property
    def num_transitions(self) -> int:
        return len(self.likelihood.steps.dt)

    @property
    def effort(self) -> Effort | None:
        """The effort spent on each transition and on hidden states; None if all transitions are exact."""
        return self.likelihood.effort

    @property
    def aic(self) -> float:
        return 2 * self.num_effective - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        return self.num_effective * float(np.log(self.num_transitions)) - 2 * self.log_likelihood

    @property
    def num_effective(self) -> float:
        """Effective number of parameters. Each penalised parameter contributes its part of tr(I −
        λ(information)⁻¹) (Moody 1992); every other parameter counts as one."""
        penalty = self.likelihood.penalty
        if not penalty.any():
            return len(self.names)
        return len(self.names) - float(penalty @ np.diag(self._inverse()))

    @cached_property
    def covariance(self) -> np.ndarray:
        """Covariance matrix of the estimates `(p, p)`, from the observed information; NaN if the parameters
        are not identified. Parameters on a boundary are treated as known, and their rows and columns are
        NaN."""
        return self._inverse() * self._scale()

    @cached_property
    def robust_covariance(self) -> np.ndarray:
        """Sandwich covariance matrix of the estimates `(p, p)`; NaN with hidden states, because individual
        values have no scores."""
        if self._hidden is not None:
            return np.full_like(self.free_information, np.nan)
        scores, inverse = self._scores[1], self._inverse()
        return inverse @ (scores.T @ scores) @ inverse * self._scale()

    @property
    def correlation(self) -> np.ndarray:
        """Correlation matrix of the estimates, `(p, p)`."""
        error = np.sqrt(np.diag(self.covariance))
        return self.covariance / np.outer(error, error)

    @property
    def standard_errors(self) -> dict[str, float]:
        """Standard errors by name, from the observed information; NaN for parameters that are not identified
        or on a boundary. Parameters on a boundary are treated as known."""
        return self._by_name(np.sqrt(np.diag(self.covariance)))

    @property
    def robust_errors(self) -> dict[str, float]:
        """Sandwich standard errors by name; NaN with hidden states or measurement noise, because individual
        values have no scores."""
        return self._by_name(np.sqrt(np.diag(self.robust_covariance)))

    def confint(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Confidence intervals by name, computed on the unconstrained scale, so that the interval of a
        positive parameter is positive. Parameters on or near a boundary have profile-likelihood intervals; if
        a profile rises above the fit, there is a warning and the interval is NaN."""
        width = scipy.stats.norm.ppf(0.5 + 0.5 * check_level(level)) * np.sqrt(np.diag(self._inverse()))
        low, high = (self._values(self.free + side * width) for side in (-1, 1))
        found = dict(zip(self.names, zip(low.tolist(), high.tolist(), strict=True), strict=True))
        by_profile = (*self.boundary, *self.near_boundary) if self.identified else ()
        for name in by_profile:
            try:
                found[name] = self.profile(name, level)
            except ValueError as error:
                found[name] = (np.nan, np.nan)
                warn(str(error))
        return found

    @in_double_precision
    def _values(self, free: np.ndarray) -> np.ndarray:
        return np.asarray(self.likelihood.parameters.from_free(jnp.asarray(free, float)), float)

    @in_double_precision
    def profile(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Profile-likelihood interval of one parameter: all values that a likelihood-ratio test does not
        reject. It is more accurate than `confint` if the likelihood is skewed, but slower, because it
        maximises over the other parameters many times. The interval extends to the end of the domain if the
        likelihood does not drop far enough."""
        if name not in self.names:
            raise ValueError(f"no parameter is called {name}; the parameters are {', '.join(self.names)}")
        if not self.identified:
            raise ValueError(f"{name} has no profile likelihood: {self.warning}")
        place = self.names.index(name)
        total, free = self.likelihood.smooth.total, self.free
        if self.likelihood.smooth is not self.likelihood:
            free = climb(total, free, lambda _: self.free_information)  # maximum of the smooth likelihood
        fit = (free, self.free_information, self.falls, place)
        try:
            low, high = profile_interval(total, *fit, check_level(level))
        except HigherError as error:
            higher = climb(total, error.free, lambda _: self.free_information)
            there = self._by_name(self._values(higher)).items()
            raise ValueError(
                f"the fit is not at the maximum: the log-likelihood is "
                f"{total(higher)[0] - total(free)[0]:.2g} nats higher at "
                f"{', '.join(f'{name} = {value:.4g}' for name, value in there)}; fit again from there"
            ) from None
        ends = [
            self._values(np.where(np.arange(len(self.free)) == place, end, self.free)) for end in (low, high)
        ]
        return float(ends[0][place]), float(ends[1][place])

    @in_double_precision
    def delta_method(self, function: Callable[[Any], ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
        """The value of a smooth function of the fitted SDE, such as a half-life or the drift on a grid, and
        its standard errors by the delta method. The function must return a scalar or an array.

        ```python
        import jax, jax.numpy as jnp, numpy as np
        import roughflow as rf

        x = 1 + 0.3 * np.sin(np.arange(60) ** 2)
        result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), np.arange(60) / 12, x, key=jax.random.key(0))
        half_life, error = result.delta_method(lambda sde: jnp.log(2) / sde.kappa)
        ```
        """
        check_callable("function", function, "of the fitted SDE")
        of_free = lambda free: jnp.asarray(function(self.likelihood.sde(free)))
        at = jnp.asarray(self.free, float)
        slope = np.asarray(jax.jacfwd(of_free)(at))
        return np.asarray(of_free(at)), np.sqrt(np.sum(slope @ self._inverse() * slope, axis=-1))

    @property
    def identified(self) -> bool:
        """Whether the information matrix of the parameters inside their domains is positive definite. If not,
        the series does not determine all parameters."""
        inside = self.sides == 0
        return is_regular(self.free_information[np.ix_(inside, inside)])

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Names of the parameters that the series does not determine, or of which it determines only a
        combination; empty if all are identified or none can be singled out."""
        inside = np.flatnonzero(self.sides == 0)
        if self.identified:
            return ()
        names = np.array(self.names)[inside]
        return tuple(names[undetermined(self.free_information[np.ix_(inside, inside)])].tolist())

    @property
    def distance(self) -> float:
        """The length of the next Newton step in standard errors (root mean square)."""
        slope = self._scores[1].sum(axis=0) - self.likelihood.penalty * self.free
        slope = np.where(self.sides == 0, slope, 0.0)
        square = max(slope @ self._inverse() @ slope, 0) if self.identified else np.nan
        return float(np.sqrt(square / len(slope)))

    @property
    def converged(self) -> bool:
        return self.identified and self.distance < CONVERGED_DISTANCE

    @property
    def warning(self) -> str | None:
        """A one-line message if the estimates are unreliable or on a boundary, else None."""
        return fault(self) or _boundary(self)

    @property
    def reliable(self) -> bool:
        """Whether the parameters are identified, the search has converged, and the likelihood error is below
        the tolerance."""
        return fault(self) is None

    @in_double_precision
    def _scale(self) -> np.ndarray:
        """Factors `(p, p)` that convert a covariance of the free parameters to one of the parameters; NaN for
        parameters on a boundary."""
        slopes = np.diag(jax.jacfwd(self.likelihood.parameters.from_free)(jnp.asarray(self.free, float)))
        slopes = np.where(self.sides == 0, slopes, np.nan)
        return np.outer(slopes, slopes)

    def _inverse(self) -> np.ndarray:
        """Covariance of the free parameters; zero for parameters on a boundary, which are treated as
        known."""
        if not self.identified:
            return np.full_like(self.free_information, np.nan)
        inside = np.ix_(self.sides == 0, self.sides == 0)
        found = np.zeros_like(self.free_information)
        found[inside] = np.linalg.inv(self.free_information[inside])
        return found

    @in_double_precision
    def residuals(self, *, key: PRNGKeyArray) -> Residuals:
        """Generalised residuals, uniform under the model, with tests of uniformity and independence."""
        if isinstance(self.likelihood, VaryingLikelihood):
            raise ValueError("residuals require the same parameters for all series: fit without varying=")
        if self._hidden is not None:
            uniform = self._hidden.residuals(self.free, check_key(key))
            return tested(uniform, None, self.likelihood.penalty)
        if isinstance(self.likelihood, WholeLikelihood):
            uniform = self.likelihood.residuals(self.free)
        else:
            uniform = residuals(self._sde, self._coordinates, self.likelihood.steps, check_key(key))
        return tested(uniform, self._scores[1], self.likelihood.penalty)

    @in_double_precision
    def forecast(
        self,
        times: Any,
        *,
        key: PRNGKeyArray,
        num_paths: int = 1000,
        series: int | None = None,
        parameter_uncertainty: bool = False,
    ) -> np.ndarray:
        """Simulated paths `(num_paths, T, d)` of the fitted SDE from the last value, at `times` `(T,)`.

        With hidden states, paths start from draws of the last state given all values.

        **Arguments:**

        - `times`: dates if the series has dates; otherwise numbers or timedeltas, counted from the last
          value.
        - `series`: index of the series to continue, if the data are a panel.
        - `parameter_uncertainty`: whether to draw the parameters of each path from their asymptotic normal
          distribution on the unconstrained scale, as in `confint`.

        ```python
        import jax, numpy as np
        import roughflow as rf

        x, months = 1 + 0.3 * np.sin(np.arange(60) ** 2), np.datetime64("2020-01") + np.arange(60)
        result = rf.fit_sde(rf.OrnsteinUhlenbeck(1.0, 1.0, 1.0), months, x, key=jax.random.key(0))
        paths = result.forecast(np.array(["2025-01", "2025-07"], "datetime64"), key=jax.random.key(1))
        low, median, high = np.quantile(paths[..., 0], [0.05, 0.5, 0.95], axis=0)
        ```
        """
        place, key = self._place(series), check_key(key)
        one = self.series[place]
        ahead = one.ahead(times)
        check_memory(check_count("num_paths", num_paths) * len(ahead) * one.values.shape[1])
        free = None
        if parameter_uncertainty:
            key, key_parameters = jax.random.split(key)
            free = self._draw_free(key_parameters, num_paths)
        if isinstance(self.likelihood, VaryingLikelihood):
            key, key_varying = jax.random.split(key)
            normal = jax.random.normal(key_varying, (num_paths, len(self.likelihood.places)))
            free = self.likelihood.drawn(self.free if free is None else free, np.asarray(normal), place)
        if isinstance(self.likelihood, WholeLikelihood):
            return self.likelihood.forecast(self.free if free is None else free, ahead, key, num_paths, place)
        last = jnp.asarray(one.values[-1:], float)
        if self._hidden is not None:
            key, key_filter = jax.random.split(key)
            last = self._hidden.last_states(self.free, key_filter, num_paths, place)
        start = jnp.resize(last, (num_paths, last.shape[1]))
        when = jnp.asarray(one.times[-1] + np.append(0.0, ahead))
        of_free = self.likelihood.sde if self._hidden is None else self._hidden.driven
        at = jnp.asarray(self.free if free is None else free, float)
        sde = of_free(at) if free is None else eqx.filter_vmap(of_free)(at)
        return forecast(sde, self._coordinates, start, when, key, each=free is not None)

    def _draw_free(self, key: PRNGKeyArray, count: int) -> np.ndarray:
        """Draws `(count, p)` from the normal distribution of the free parameters."""
        if not self.identified:
            raise ValueError(f"cannot draw parameters: {self.warning}")
        values, vectors = np.linalg.eigh(self._inverse())
        normal = np.asarray(jax.random.normal(key, (count, len(self.free))), float)
        return self.free + (normal * np.sqrt(np.maximum(values, 0.0))) @ vectors.T

    def _place(self, series: int | None) -> int:
        """Validate `series`, the index of a series in a panel, and return it."""
        count = len(self.series)
        if series is None and count == 1:
            return 0
        if not isinstance(series, int | np.integer) or not 0 <= series < count:
            given = "none" if series is None else repr(series)
            raise ValueError(f"series must be an index from 0 to {count - 1}; got {given}")
        return int(series)

    def likelihood_ratio(self, simpler: "FittedSDE") -> tuple[float, float]:
        """The likelihood-ratio statistic against a nested model fitted to the same series, and its p-value
        from the χ² distribution (Wilks 1938). Two null hypotheses are treated separately. If the simpler
        model has no measurement noise or no varying parameter, it lies on the boundary of the larger one, and
        the distribution is a mixture of χ² distributions. For Brownian motion against an Ornstein–Uhlenbeck
        process (a unit root), the distribution is simulated."""
        check_instance("simpler", simpler, FittedSDE, "the result of rf.fit_sde")
        more = len(self.names) - len(simpler.names)
        if more <= 0:
            raise ValueError(
                f"likelihood_ratio needs a model with fewer than {len(self.names)} parameters, "
                f"got one with {len(simpler.names)}"
            )
        if not same_data(self.series, simpler.series):
            raise ValueError(
                "likelihood_ratio needs two fits of the same data, but these have different times or values"
            )
        if self.likelihood.penalty.any() or simpler.likelihood.penalty.any():
            raise ValueError("likelihood_ratio does not support penalties: compare aic instead")
        statistic = 2 * (self.log_likelihood - simpler.log_likelihood)
        if isinstance(self._sde, OrnsteinUhlenbeck) and isinstance(simpler._sde, BrownianMotion):
            return statistic, unit_root_p_value(statistic, simpler.likelihood.steps, *simpler.estimates)
        added = set(self.names) - set(simpler.names)
        noise = [name.startswith(NOISE) or name.endswith(SPREAD) for name in added].count(True)
        return statistic, boundary_p_value(statistic, more, noise)

    @property
    def series_likelihood(self) -> SeriesLikelihood | HiddenSeries:
        """The log-likelihood of this series as a function of the SDE, like `rf.series_likelihood`, with the
        effort of the fit. Parameters outside the SDE, such as the measurement noise, are fixed at their
        estimates."""
        if self._hidden is not None:
            return _in_default_precision(self._hidden.at_estimates(self.free))
        if not isinstance(self.likelihood, Likelihood):
            raise ValueError("series_likelihood does not support processes with memory or varying parameters")
        return _in_default_precision(self.likelihood.of_sde)

    def posterior(self, log_prior: Callable[[AbstractSDE], Array] | None = None) -> SeriesPosterior:
        """Log-density of the parameters given the series, for a sampler. `log_prior` is a function `sde ->
        ()`; the default is flat in the parameters. Penalties of the fit are included."""
        if log_prior is not None:
            check_callable("log_prior", log_prior, "sde -> ()")
        if not self.identified:
            raise ValueError(f"cannot sample from the posterior: {self.warning}")
        if self.boundary:
            raise ValueError(f"cannot sample from the posterior: {self.warning}")
        place = (jnp.asarray(part, float) for part in (self.free, np.linalg.cholesky(self._inverse())))
        likelihood = (
            self.series_likelihood if self._hidden is None else _in_default_precision(self._hidden.of_sde)
        )
        about = (_in_default_precision(self.likelihood.parameters), likelihood, log_prior)
        return SeriesPosterior(*about, jnp.asarray(self.likelihood.penalty), *place)

    @cached_property
    @in_double_precision
    def smoothed(self) -> tuple[np.ndarray, np.ndarray]:
        """The means `(n, d)` of the states given all values, and their standard deviations, at the times of
        the series.

        They are computed by a Kalman smoother for a linear model, otherwise on the grid or by particles. With
        a flat prior, states before the first value are NaN. The states of a panel are concatenated.
        """
        if isinstance(self.likelihood, WholeLikelihood) and self.likelihood.noisy:
            return self.likelihood.smoothed(self.free)
        return self._with_hidden("smoothed").smoothed(self.free)

    @cached_property
    @in_double_precision
    def filtered(self) -> tuple[np.ndarray, np.ndarray]:
        """The means `(n, d)` of the states given the values up to each time, and their standard deviations:
        by the Kalman filter for a linear model, otherwise on the grid or by particles. As long as the values
        do not determine a state with a flat prior, its mean is NaN and its standard deviation infinite."""
        return self._with_hidden("filtered").filtered(self.free, jax.random.key(0))

    def _with_hidden(self, name: str) -> HiddenLikelihood:
        if self._hidden is None:
            raise ValueError(
                f"{name} requires hidden states: include a column of NaN or set measurement_noise. Without "
                "either, the states are taken to be observed exactly"
            )
        return self._hidden

    @cached_property
    @in_double_precision
    def varying(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The parameters that vary between series, by name: their means and standard deviations `(S,)` given
        each series and the estimated population."""
        if not isinstance(self.likelihood, VaryingLikelihood):
            raise ValueError("no parameter varies between series: set varying= in rf.fit_sde")
        return self.likelihood.own(self.free)

    @property
    def has_hidden_states(self) -> bool:
        """Whether the states differ from the values. If so, `smoothed` estimates them."""
        return NOISE in self.names or self._hidden is not None

    @property
    def _hidden(self) -> HiddenLikelihood | None:
        return self.likelihood if isinstance(self.likelihood, HiddenLikelihood) else None

    @property
    def _coordinates(self) -> AbstractCoordinates:
        return coordinates_of(self._sde, self.likelihood.coordinates)

    def summary(self, level: float = 0.95) -> str:
        """A table of estimates, standard errors and intervals, and a description of the fit."""
        kinds = ("std. error", "robust") if _has_robust(self) else ("std. error",)
        head = ("parameter", "estimate", *kinds, "z", f"{100 * level:g} % interval")
        lines = [
            f"{type(self.sde).__name__} by maximum likelihood, {self.num_transitions:,} transitions",
            *table(head, _rows(self, level)),
            *_penalised(self),
            f"  log-likelihood {self.log_likelihood:.4f}   AIC {self.aic:.2f}   BIC {self.bic:.2f}",
            f"  transitions: {_how(self)}",
        ]
        return "\n".join(lines if self.warning is None else [*lines, f"  warning: {self.warning}"])

    def __repr__(self) -> str:
        return self.summary()


def _in_default_precision(tree: Any) -> Any:
    """Convert double-precision arrays to JAX's default precision. Fits always use double precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float) if eqx.is_inexact_array(leaf) else leaf, tree)
