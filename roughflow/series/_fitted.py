"""The result of `fit_sde`: estimates, errors, intervals, tests, forecasts, and a summary."""

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

from .._checks import check_callable, check_count, check_instance, check_key
from .._programs import in_double_precision
from .._show import table
from ..faq import see
from ..sde import AbstractSDE
from ..transition import AbstractCoordinates, Effort
from ._forecast import check_memory, forecast
from ._hidden_states import PARTICLES, Filtered, filtered_residuals, particle_filter
from ._likelihood import (
    NAME as NOISE,
    AbstractLikelihood,
    Likelihood,
    MeasuredLikelihood,
    SeriesLikelihood,
    SeriesPosterior,
    WholeLikelihood,
    smoothed,
    stacked,
)
from ._observed import Observed, same_data
from ._parameters import Domain
from ._residuals import Residuals, residuals, tested
from ._search import LOSS, boundary_p_value, check_level, is_regular, profile_interval, unit_root_p_value
from ._transition import DOUBTFUL, coordinates_of
from .models import BrownianMotion, OrnsteinUhlenbeck


def summary(result: "FittedSDE", level: float) -> str:
    """A table of estimates, standard errors and intervals, and what describes the fit."""
    kinds = ("std. error", "robust") if _has_robust(result) else ("std. error",)
    head = ("parameter", "estimate", *kinds, "z", f"{100 * level:g} % interval")
    lines = [
        f"{type(result.sde).__name__} by maximum likelihood, {result.num_transitions:,} transitions",
        *table(head, _rows(result, level)),
        *_penalised(result),
        f"  log-likelihood {result.log_likelihood:.4f}   AIC {result.aic:.2f}   BIC {result.bic:.2f}",
        f"  transitions: {_how(result)}",
    ]
    return "\n".join(lines if result.warning is None else [*lines, f"  warning: {result.warning}"])


def _rows(result: "FittedSDE", level: float) -> list[tuple[str, ...]]:
    """Of all parameters but those with a penalty, the weights of a network, which mean nothing each."""
    errors, robust, intervals = result.standard_errors, result.robust_errors, result.confint(level)
    free = [name for name, held in zip(result.names, result.likelihood.penalty, strict=True) if not held]
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
    held = np.count_nonzero(result.likelihood.penalty)
    if not held:
        return []
    count = result.num_effective - (len(result.names) - held)
    return [f"  and {held} parameters with a penalty, as good as {count:.1f} without"]


def _has_robust(result: "FittedSDE") -> bool:
    """Not so with measurement noise: values have no scores of their own."""
    return not isinstance(result.likelihood, MeasuredLikelihood)


def _how(result: "FittedSDE") -> str:
    how = result.likelihood.described()
    return how if result.effort is None else f"{how}; ± {result.likelihood_error:.2g} nats"


def warning(result: "FittedSDE") -> str | None:
    """One line where the estimates should not be trusted or are on a boundary, else None."""
    return fault(result) or _boundary(result)


def fault(result: "FittedSDE") -> str | None:
    """One line where the estimates should not be trusted, else None."""
    # Values that are not known may explain all that follows.
    errors = result.transition_errors
    if _has_robust(result) and (suspect := int(np.sum(~(errors < DOUBTFUL)))):
        told = f"{suspect} of {result.num_transitions} transitions are too long for their paths"
        return f"{told}: raise effort{see('long-transitions')}"
    if not result.identified:
        told = "the parameters are not identified: the information is singular at the estimates, so there "
        told += "are no standard errors; fix one, fit a simpler SDE, or give a penalty"
        return told + see("not-identified")
    if not result.converged:
        told = f"the search did not converge: it would move by {result.distance:.2g} standard errors more"
        return told + see("not-converged")
    if result.likelihood_error > result.tolerance:
        known = f"the log-likelihood is known only to {result.likelihood_error:.2g} nats"
        uneven = "" if _has_robust(result) else ", as draws of the states have uneven weights"
        return f"{known}{uneven}: raise effort, or tolerance{see('not-converged')}"
    return None


def _boundary(result: "FittedSDE") -> str | None:
    if result.boundary:
        names = " and ".join(f"{name} = {result.params[name]:g}" for name in result.boundary)
        told = f"the maximum is on a boundary, {names}: a model without does as well"
        return told + see("on-a-boundary")
    if result.near_boundary:
        name, (end, fall) = next(iter(result.near_boundary.items()))
        told = (
            f"{name} is not distinguishable from {end:g}: the log-likelihood there is {fall:.2g} nats lower"
        )
        return told + see("on-a-boundary")
    return None


TOLD_APART = 1.35  # nats: half of the quantile of ½χ²₀ + ½χ²₁ at the level of 5 % (Chernoff 1954)
NEAR = 0.05  # of a standard error: a search that would move further has not converged


@dataclasses.dataclass(frozen=True, repr=False)
class FittedSDE:
    """An SDE fitted by `rf.fit_sde`.

    `params`, `standard_errors` and `robust_errors` are dictionaries by name: the second from the observed
    information, the third from the sandwich of it and the scores (White 1982), right even if the SDE is not.
    `sde` is the SDE with the estimates in it; `log_likelihood`, `aic` and `bic` compare models of one series.

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
    falls: np.ndarray  # (2, p), nats by which the likelihood falls at the ends of a parameter's domain
    likelihood_error: float  # of the log-likelihood: Monte Carlo error, and how far finer paths move it
    tolerance: float

    @property
    def sde(self) -> Any:
        """The SDE with the estimates as its parameters."""
        return _in_default_precision(self._sde)

    @cached_property
    @in_double_precision
    def _sde(self) -> Any:
        return self.likelihood.sde(jnp.asarray(self.free, float))

    @cached_property
    @in_double_precision
    def estimates(self) -> np.ndarray:
        """The parameters, `(p,)`; those on a boundary are there exactly."""
        parameters = self.likelihood.parameters
        inside = np.asarray(parameters.from_free(jnp.asarray(self.free, float)), float)
        ends = np.array([domain.high if side > 0 else domain.low for domain, side in self._domains()])
        return np.where(self.sides == 0, inside, ends)

    def _domains(self) -> Iterable[tuple[Domain, int]]:
        return zip(self.likelihood.parameters.domains, self.sides, strict=True)

    @cached_property
    def sides(self) -> np.ndarray:
        """−1 or 1 for a parameter on the lower or upper end of its domain, else 0, `(p,)`."""
        return np.where(self.falls[0] < LOSS, -1, np.where(self.falls[1] < LOSS, 1, 0))

    @property
    def boundary(self) -> tuple[str, ...]:
        """The parameters whose estimate lies on the boundary of their domain."""
        return tuple(name for name, side in zip(self.names, self.sides, strict=True) if side)

    @property
    def near_boundary(self) -> dict[str, tuple[float, float]]:
        """The parameters that a test at the level of 5 % cannot tell from an end of their domain, with that
        end and the nats by which the log-likelihood is lower there."""
        found = {}
        for name, (domain, _), falls in zip(self.names, self._domains(), self.falls.T, strict=True):
            end = domain.low if falls[0] <= falls[1] else domain.high
            if LOSS <= falls.min() < TOLD_APART:
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
        """The error of each transition's log-density, `(N,)`; of each series' with measurement noise."""
        return self.likelihood.errors(self.free)

    @property
    def num_transitions(self) -> int:
        return len(self.likelihood.steps.dt)

    @property
    def effort(self) -> Effort | None:
        """The work that went into each transition, and into states with errors; None if all is exact."""
        return self.likelihood.effort

    @property
    def aic(self) -> float:
        return 2 * self.num_effective - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        return self.num_effective * float(np.log(self.num_transitions)) - 2 * self.log_likelihood

    @property
    def num_effective(self) -> float:
        """How many parameters the series determines: all of them, but for those with a penalty, which count
        by the part tr(I − λ(information)⁻¹) that is not the penalty's (Moody 1992)."""
        penalty = self.likelihood.penalty
        if not penalty.any():
            return len(self.names)
        return len(self.names) - float(penalty @ np.diag(self._inverse()))

    @cached_property
    def covariance(self) -> np.ndarray:
        """Of the estimates, from the observed information; NaN where they are not identified, and for
        parameters on a boundary, given which the others are."""
        return self._inverse() * self._scale()

    @cached_property
    def robust_covariance(self) -> np.ndarray:
        """Of the estimates, from the sandwich of the information and the scores; NaN with measurement noise,
        where values have no scores of their own."""
        if self._measured is not None:
            return np.full_like(self.free_information, np.nan)
        scores, inverse = self._scores[1], self._inverse()
        return inverse @ (scores.T @ scores) @ inverse * self._scale()

    @property
    def correlation(self) -> np.ndarray:
        """Of the estimates, `(p, p)`."""
        error = np.sqrt(np.diag(self.covariance))
        return self.covariance / np.outer(error, error)

    @property
    def standard_errors(self) -> dict[str, float]:
        return self._by_name(np.sqrt(np.diag(self.covariance)))

    @property
    def robust_errors(self) -> dict[str, float]:
        return self._by_name(np.sqrt(np.diag(self.robust_covariance)))

    def confint(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Intervals by name. They are made where the parameter has no bounds, so that a positive parameter's
        interval is positive. A parameter on or near a boundary has the interval of its profile likelihood."""
        width = scipy.stats.norm.ppf(0.5 + 0.5 * check_level(level)) * np.sqrt(np.diag(self._inverse()))
        low, high = (self._values(self.free + side * width) for side in (-1, 1))
        found = dict(zip(self.names, zip(low.tolist(), high.tolist(), strict=True), strict=True))
        by_profile = (*self.boundary, *self.near_boundary) if self.identified else ()
        return found | {name: self.profile(name, level) for name in by_profile}

    @in_double_precision
    def _values(self, free: np.ndarray) -> np.ndarray:
        return np.asarray(self.likelihood.parameters.from_free(jnp.asarray(free, float)), float)

    @in_double_precision
    def profile(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """The interval of one parameter by its profile likelihood: all that a likelihood-ratio test would not
        reject. Better than `confint` where the likelihood is skewed, and slower: a search for each end of it
        that is tried. An end is that of the parameter's domain if the likelihood does not fall far enough."""
        if name not in self.names:
            raise ValueError(f"no parameter is called {name}: there are {', '.join(self.names)}")
        if not self.identified:
            raise ValueError(f"there is no profile of {name}: {self.warning}")
        place = self.names.index(name)
        fit = (self.free, self.free_information, self.falls, place)
        low, high = profile_interval(self.likelihood.total, *fit, check_level(level))
        ends = [
            self._values(np.where(np.arange(len(self.free)) == place, end, self.free)) for end in (low, high)
        ]
        return float(ends[0][place]), float(ends[1][place])

    @in_double_precision
    def delta_method(self, function: Callable[[Any], ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
        """A smooth function of the fitted SDE, a number or an array, and its standard errors, to the first
        order in those of the parameters: a half-life, or the drift on a grid, say.

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
        """Whether the information of the parameters that are not on a boundary is positive definite; if not,
        the series cannot tell them apart."""
        inside = self.sides == 0
        return is_regular(self.free_information[np.ix_(inside, inside)])

    @property
    def distance(self) -> float:
        """How far Newton's method would still move the estimates, in standard errors: the root of the mean
        square."""
        slope = self._scores[1].sum(axis=0) - self.likelihood.penalty * self.free
        slope = np.where(self.sides == 0, slope, 0.0)
        square = max(slope @ self._inverse() @ slope, 0) if self.identified else np.nan
        return float(np.sqrt(square / len(slope)))

    @property
    def converged(self) -> bool:
        return self.identified and self.distance < NEAR

    @property
    def warning(self) -> str | None:
        """One line where the estimates should not be trusted or are on a boundary, else None."""
        return warning(self)

    @property
    def reliable(self) -> bool:
        """Whether the fit is identified, has converged, and knows its log-likelihood to the tolerance."""
        return fault(self) is None

    @in_double_precision
    def _scale(self) -> np.ndarray:
        """What turns a covariance of the free parameters into one of the parameters, `(p, p)`."""
        slopes = np.diag(jax.jacfwd(self.likelihood.parameters.from_free)(jnp.asarray(self.free, float)))
        slopes = np.where(self.sides == 0, slopes, np.nan)
        return np.outer(slopes, slopes)

    def _inverse(self) -> np.ndarray:
        """The covariance of the free parameters, 0 for those on a boundary, which count as known."""
        if not self.identified:
            return np.full_like(self.free_information, np.nan)
        inside = np.ix_(self.sides == 0, self.sides == 0)
        found = np.zeros_like(self.free_information)
        found[inside] = np.linalg.inv(self.free_information[inside])
        return found

    @in_double_precision
    def residuals(self, *, key: PRNGKeyArray) -> Residuals:
        """Uniform under the model, with tests that they are."""
        if self._measured is not None:
            uniform = filtered_residuals(self._filtered(key, PARTICLES))
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
        """Paths `(num_paths, T, d)` of the SDE from the last value at `times` `(T,)`.

        With measurement noise they start from draws of the last state given all values, at the estimates.

        **Arguments:**

        - `times`: dates if the series had dates; or numbers or timedeltas counted from the last value.
        - `series`: which series of a panel to continue, 0 for the first.
        - `parameter_uncertainty`: whether each path has parameters of its own, drawn from the normal
          distribution of the estimates where they have no bounds, as in `confint`.

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
        if isinstance(self.likelihood, WholeLikelihood):
            return self.likelihood.forecast(self.free if free is None else free, ahead, key, num_paths, place)
        last = jnp.asarray(one.values[-1:], float)
        if self._measured is not None:
            key, key_filter = jax.random.split(key)
            last = self._filtered(key_filter, max(num_paths, PARTICLES), place).last
        start = jnp.resize(last, (num_paths, last.shape[1]))
        when = jnp.asarray(one.times[-1] + np.append(0.0, ahead))
        sde = self._sde if free is None else eqx.filter_vmap(self.likelihood.sde)(jnp.asarray(free))
        return forecast(sde, self._coordinates, start, when, key, each=free is not None)

    def _draw_free(self, key: PRNGKeyArray, count: int) -> np.ndarray:
        """Draws `(count, p)` from the normal distribution of the free parameters."""
        if not self.identified:
            raise ValueError(f"there is no distribution of the parameters: {self.warning}")
        values, vectors = np.linalg.eigh(self._inverse())
        normal = np.asarray(jax.random.normal(key, (count, len(self.free))), float)
        return self.free + (normal * np.sqrt(np.maximum(values, 0.0))) @ vectors.T

    def _place(self, series: int | None) -> int:
        """Which series of a panel is meant."""
        count = len(self.series)
        if series is None and count == 1:
            return 0
        if not isinstance(series, int | np.integer) or not 0 <= series < count:
            given = "none" if series is None else repr(series)
            raise ValueError(f"series must be one of 0 to {count - 1}, a series of the panel; got {given}")
        return int(series)

    def likelihood_ratio(self, simpler: "FittedSDE") -> tuple[float, float]:
        """Twice the difference to the log-likelihood of a nested model, fitted to the same series, and its
        p-value by the χ² distribution (Wilks 1938). Two tests have another: that there is no measurement
        noise, which is on the boundary of its domain (a mixture of χ² distributions), and that an
        Ornstein–Uhlenbeck process is Brownian motion, a unit root (by simulation)."""
        check_instance("simpler", simpler, FittedSDE, "what rf.fit_sde returns")
        more = len(self.names) - len(simpler.names)
        if more <= 0:
            raise ValueError(
                f"likelihood_ratio needs a model with fewer than {len(self.names)} parameters, "
                f"got one with {len(simpler.names)}"
            )
        if not same_data(self.series, simpler.series):
            raise ValueError(
                "likelihood_ratio needs two fits of the same data, and these have other times or values"
            )
        if self.likelihood.penalty.any() or simpler.likelihood.penalty.any():
            raise ValueError("likelihood_ratio is for fits without a penalty: compare aic")
        statistic = 2 * (self.log_likelihood - simpler.log_likelihood)
        if isinstance(self._sde, OrnsteinUhlenbeck) and isinstance(simpler._sde, BrownianMotion):
            return statistic, unit_root_p_value(statistic, simpler.likelihood.steps, *simpler.estimates)
        noise = (
            [name.startswith(NOISE) for name in self.names].count(True) if simpler._measured is None else 0
        )
        return statistic, boundary_p_value(statistic, more, noise)

    @property
    def series_likelihood(self) -> SeriesLikelihood:
        """The log-likelihood of this series as a function of the SDE, as by `rf.series_likelihood`, with the
        effort of the fit."""
        if not isinstance(self.likelihood, Likelihood):
            raise ValueError("with measurement noise or memory the likelihood is no product of transitions")
        return _in_default_precision(self.likelihood.of_sde)

    def posterior(self, log_prior: Callable[[AbstractSDE], Array] | None = None) -> SeriesPosterior:
        """The log-density, for a sampler, of the parameters given the series and a log prior `sde -> ()`, by
        default one that is flat in the parameters. The penalties of the fit are part of it."""
        if log_prior is not None:
            check_callable("log_prior", log_prior, "sde -> ()")
        if not self.identified:
            raise ValueError(f"there is no posterior to sample from: {self.warning}")
        if self.boundary:
            raise ValueError(f"there is no posterior to sample from: {self.warning}")
        place = (jnp.asarray(part, float) for part in (self.free, np.linalg.cholesky(self._inverse())))
        about = (_in_default_precision(self.likelihood.parameters), self.series_likelihood, log_prior)
        return SeriesPosterior(*about, jnp.asarray(self.likelihood.penalty), *place)

    @property
    @in_double_precision
    def smoothed(self) -> tuple[np.ndarray, np.ndarray]:
        """With measurement noise, the likeliest states `(n, d)` given all values, those of one series after
        those of another; and their standard deviations."""
        if self._measured is None:
            raise ValueError("smoothed is for fits with measurement_noise: without it values are the states")
        path, deviation = smoothed(self._measured, jnp.asarray(self.free, float))
        return np.asarray(path), np.asarray(deviation)

    @property
    def _measured(self) -> MeasuredLikelihood | None:
        return self.likelihood if isinstance(self.likelihood, MeasuredLikelihood) else None

    def _filtered(self, key: PRNGKeyArray, count: int, place: int | None = None) -> Filtered:
        """Of all series, or of one."""
        assert self._measured is not None
        joint = self._measured.joint(jnp.asarray(self.free, float))
        if place is not None:
            joint = dataclasses.replace(joint, observed=stacked([self.series[place]]))
        return particle_filter(joint, check_key(key), count)

    @property
    def _coordinates(self) -> AbstractCoordinates:
        return coordinates_of(self._sde, self.likelihood.coordinates)

    def summary(self, level: float = 0.95) -> str:
        """A table of estimates, standard errors and intervals, and what describes the fit."""
        return summary(self, level)

    def __repr__(self) -> str:
        return self.summary()


def _in_default_precision(tree: Any) -> Any:
    """Arrays of double precision as the user's process has them: a fit is in double precision always."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float) if eqx.is_inexact_array(leaf) else leaf, tree)
