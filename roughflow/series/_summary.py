"""A fit in words: a table, like those of R and statsmodels, and what not to trust."""

from typing import TYPE_CHECKING

import numpy as np

from .._show import table
from ..faq import see
from ._measured_likelihood import MeasuredLikelihood
from ._transition import DOUBTFUL

if TYPE_CHECKING:
    from ._fitted import FittedSDE


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
