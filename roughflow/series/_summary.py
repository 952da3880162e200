"""A fit as a table, like those of R and statsmodels."""

from typing import TYPE_CHECKING

import numpy as np

from .._show import table

if TYPE_CHECKING:
    from ._fitted import FittedSDE


def summary(result: "FittedSDE", level: float) -> str:
    """A table of estimates, standard errors and intervals, and what describes the fit."""
    head = ("parameter", "estimate", "std. error", "robust", "z", f"{100 * level:g} % interval")
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
            f"{robust[name]:.4g}",
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


def _how(result: "FittedSDE") -> str:
    if (effort := result.effort) is None:
        return "exact"
    return (
        f"{effort.num_functions} functions, {effort.num_paths} paths, {effort.num_steps} steps; "
        f"± {result.likelihood_error:.2g} nats"
    )
