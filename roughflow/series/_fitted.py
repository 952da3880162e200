"""What a fit of an SDE found, and how well it is known."""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray
from scipy import stats

from .._checks import check_count, check_key
from .._show import table
from ..faq import see
from ._coordinates import AbstractCoordinates
from ._diagnostics import Residuals, forecast, residuals
from ._ends import Effort
from ._filter import PARTICLES, Filtered, filtered_residuals, particle_filter
from ._measured import AnyLikelihood, MeasuredLikelihood, smoothed
from ._observed import Observed
from ._transition import choose_effort, coordinates_of

NEAR = 0.05  # of a standard error: a search that would move further has not converged
SINGULAR = 1e-7  # least eigenvalue of the information, relative to the largest in units of its diagonal


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

    likelihood: AnyLikelihood
    series: tuple[Observed, ...]
    free: np.ndarray
    free_information: np.ndarray
    likelihood_error: float  # how far the log-likelihood moves with twice the effort
    tolerance: float

    @cached_property
    def sde(self) -> Any:
        """The SDE with the estimates as its parameters."""
        return self.likelihood.sde(jnp.asarray(self.free, float))

    @cached_property
    def estimates(self) -> np.ndarray:
        """The parameters, `(p,)`."""
        return np.asarray(self.likelihood.parameters.from_free(jnp.asarray(self.free, float)), float)

    @property
    def names(self) -> tuple[str, ...]:
        return self.likelihood.parameters.names

    @property
    def params(self) -> dict[str, float]:
        return dict(zip(self.names, self.estimates.tolist(), strict=True))

    @cached_property
    def _scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.likelihood.scores(self.free)

    @property
    def log_likelihood(self) -> float:
        return float(self._scores[0].sum())

    @property
    def num_transitions(self) -> int:
        return len(self.likelihood.steps.dt)

    @property
    def effort(self) -> Effort | None:
        """The work that went into each transition, and into states with errors; None if all is exact."""
        return self.likelihood.effort

    @property
    def aic(self) -> float:
        return 2 * len(self.names) - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        return len(self.names) * float(np.log(self.num_transitions)) - 2 * self.log_likelihood

    @cached_property
    def covariance(self) -> np.ndarray:
        """Of the estimates, from the observed information; NaN where they are not identified."""
        scale = self._jacobian()
        return self._inverse() * np.outer(scale, scale)

    @cached_property
    def robust_covariance(self) -> np.ndarray:
        """Of the estimates, from the sandwich of the information and the scores; NaN with measurement noise,
        where values have no scores of their own."""
        if self._measured is not None:
            return np.full_like(self.free_information, np.nan)
        scores, scale = self._scores[1], self._jacobian()
        inverse = self._inverse()
        return inverse @ (scores.T @ scores) @ inverse * np.outer(scale, scale)

    @property
    def correlation(self) -> np.ndarray:
        """Of the estimates, `(p, p)`."""
        error = np.sqrt(np.diag(self.covariance))
        return self.covariance / np.outer(error, error)

    @property
    def standard_errors(self) -> dict[str, float]:
        return dict(zip(self.names, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))

    @property
    def robust_errors(self) -> dict[str, float]:
        return dict(zip(self.names, np.sqrt(np.diag(self.robust_covariance)).tolist(), strict=True))

    def confint(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Intervals by name. They are made where the parameter has no bounds, so that a positive parameter's
        interval is positive."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        width = stats.norm.ppf(0.5 + 0.5 * level) * np.sqrt(np.diag(self._inverse()))
        domains = self.likelihood.parameters.domains
        ends = zip(self.names, domains, self.free - width, self.free + width, strict=True)
        return {name: (float(d.from_free(low)), float(d.from_free(high))) for name, d, low, high in ends}

    @property
    def identified(self) -> bool:
        """Whether the information is positive definite; if not, the series cannot tell parameters apart."""
        matrix = self.free_information
        if not np.isfinite(matrix).all() or not (np.diag(matrix) > 0).all():
            return False
        scale = 1 / np.sqrt(np.diag(matrix))
        values = np.linalg.eigvalsh(matrix * np.outer(scale, scale))
        return bool(values[0] > SINGULAR * values[-1])

    @property
    def distance(self) -> float:
        """How far Newton's method would still move the estimates, in standard errors."""
        slope = self._scores[1].sum(axis=0)
        return float(np.sqrt(max(slope @ self._inverse() @ slope, 0))) if self.identified else np.nan

    @property
    def converged(self) -> bool:
        return self.identified and self.distance < NEAR

    @property
    def warning(self) -> str | None:
        """One line where the estimates should not be trusted, else None."""
        if not self.identified:
            return (
                "the parameters are not identified: the information is singular at the estimates, so there "
                f"are no standard errors; fix a parameter, or fit a simpler SDE{see('not-identified')}"
            )
        if not self.converged:
            told = f"the search did not converge: it would move by {self.distance:.2g} standard errors more"
            return told + see("not-converged")
        if self.likelihood_error > self.tolerance:
            known = f"the log-likelihood is known only to {self.likelihood_error:.2g} nats"
            uneven = "" if self._measured is None else ", as draws of the states have uneven weights"
            return f"{known}{uneven}: raise effort, or tolerance{see('not-converged')}"
        return None

    def _jacobian(self) -> np.ndarray:
        """The derivatives of the parameters in the free ones, each of its own."""
        slope = lambda domain, value: float(jax.grad(domain.from_free)(float(value)))
        return np.array(
            [slope(*pair) for pair in zip(self.likelihood.parameters.domains, self.free, strict=True)]
        )

    def _inverse(self) -> np.ndarray:
        if not self.identified:
            return np.full_like(self.free_information, np.nan)
        return np.linalg.inv(self.free_information)

    def residuals(self, *, key: PRNGKeyArray) -> Residuals:
        """Uniform under the model, with tests that they are."""
        if self._measured is not None:
            return filtered_residuals(self._filtered(key, PARTICLES))
        return residuals(self.sde, self._coordinates, self.likelihood.steps, self._effort, check_key(key))

    def forecast(self, times: Any, *, key: PRNGKeyArray, num_paths: int = 1000) -> np.ndarray:
        """Paths `(num_paths, T, d)` of the SDE from the last value, at `times` `(T,)` counted from it; with
        measurement noise from what is known of the last state."""
        ahead = np.atleast_1d(np.asarray(times, float))
        if not (np.diff(ahead, prepend=0.0) > 0).all():
            raise ValueError("times must be positive, counted from the last value, and increase")
        key, when = check_key(key), self.series[-1].times[-1]
        last = jnp.asarray(self.series[-1].values[-1:], float)
        if self._measured is not None:
            key, key_filter = jax.random.split(key)
            last = self._filtered(key_filter, max(num_paths, PARTICLES)).last
        start = jnp.resize(last, (check_count("num_paths", num_paths), last.shape[1]))
        # In steps no longer than those of the series, for which the effort was chosen.
        longest = float(np.max(self.likelihood.steps.dt))
        parts = np.ceil(np.diff(ahead, prepend=0.0) / longest).astype(int)
        grid = np.interp(np.arange(parts.sum() + 1), np.cumsum([0, *parts]), np.concatenate([[0.0], ahead]))
        model = (self.sde, self._coordinates, start, jnp.asarray(when + grid))
        paths = forecast(*model, self._effort, key)
        return np.asarray(paths)[:, np.cumsum(parts) - 1]

    def likelihood_ratio(self, simpler: "FittedSDE") -> tuple[float, float]:
        """Twice the difference to the log-likelihood of a nested model, fitted to the same series, and its
        p-value by the χ² distribution (Wilks 1938)."""
        more = len(self.names) - len(simpler.names)
        if more <= 0 or self.num_transitions != simpler.num_transitions:
            raise ValueError(
                "likelihood_ratio needs a model with fewer parameters, fitted to the same series"
            )
        statistic = 2 * (self.log_likelihood - simpler.log_likelihood)
        return statistic, float(stats.chi2.sf(max(statistic, 0.0), more))

    @property
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

    def _filtered(self, key: PRNGKeyArray, count: int) -> Filtered:
        assert self._measured is not None
        joint = self._measured.joint(jnp.asarray(self.free, float))
        return particle_filter(joint, check_key(key), count)

    @property
    def _coordinates(self) -> AbstractCoordinates:
        return coordinates_of(self.sde, self.likelihood.coordinates)

    @property
    def _effort(self) -> Effort:
        return self.effort or choose_effort(self.sde, self._coordinates, self.likelihood.steps)

    def summary(self, level: float = 0.95) -> str:
        """A table of estimates, standard errors and intervals, and what describes the fit."""
        errors, intervals = self.standard_errors, self.confint(level)
        robust = None if self._measured is not None else self.robust_errors
        rows = [
            (
                name,
                f"{value:.6g}",
                f"{errors[name]:.4g}",
                *([] if robust is None else [f"{robust[name]:.4g}"]),
                f"{value / errors[name]:.2f}" if np.isfinite(errors[name]) else "nan",
                f"[{intervals[name][0]:.5g}, {intervals[name][1]:.5g}]",
            )
            for name, value in self.params.items()
        ]
        kinds = ("std. error",) if robust is None else ("std. error", "robust")
        head = ("parameter", "estimate", *kinds, "z", f"{100 * level:g} % interval")
        how = self.likelihood.described()
        how += "" if self.effort is None else f"; ± {self.likelihood_error:.2g} nats"
        lines = [
            f"{type(self.sde).__name__} by maximum likelihood, {self.num_transitions:,} transitions",
            *table(head, rows),
            f"  log-likelihood {self.log_likelihood:.4f}   AIC {self.aic:.2f}   BIC {self.bic:.2f}",
            f"  transitions: {how}",
        ]
        return "\n".join(lines if self.warning is None else [*lines, f"  warning: {self.warning}"])

    def __repr__(self) -> str:
        return self.summary()
