"""The result of an estimator (log p(x) with error bars), and statistics of path weights."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_fields, check_positive, is_traced
from .._show import ENDS, count, is_known, table
from ..faq import see

FEW_PATHS = 5.0  # number of effective paths below which the standard error is unreliable
COARSE = 0.5  # in nats; truncation and solver errors above this are themselves unreliable

# The methods by which values are computed; `Estimate.rung` holds indices into this tuple.
METHODS = ("exact", "paths", "learned", "modes", "particles", "grid")

# Possible problems of an estimate: a short name, and the text of the warning.
REASONS = {
    "few paths": f"rest on fewer than {FEW_PATHS:.0f} effective paths (at worst {{worst:.1f}}): "
    + f"increase max_paths or use a smaller tolerance{see('few-effective-paths')}",
    "coarse": "have a large truncation or solver error: increase num_functions of the driver, or use more "
    "steps, rf.FixedGrid(steps=...)" + see("truncation-or-solver-error"),
    "steep": "lie where the SDE contracts strongly or far in a tail: some paths may have been missed"
    + see("strong-contraction"),
    "jump": "belong to an SDE with discontinuous coefficients, which the density given a path does not "
    "account for" + see("discontinuous-coefficients"),
    "fast in time": "belong to an SDE whose coefficients vary faster in time than the solver's steps: use "
    "more steps, rf.FixedGrid(steps=...)" + see("fast-coefficients"),
    "not finite": "are not finite: x may be outside the support" + see("not-finite"),
    "unmet": "did not reach the tolerance: increase max_paths, or the effort of transitions"
    + see("tolerance-not-reached"),
}


class Accuracy(eqx.Module):
    """The requested accuracy of log p(x): `tolerance`, the acceptable total error (None for the default);
    `max_paths`, the maximum number of paths per point; `errors`, whether error bars are needed.

    ```python
    import roughflow as rf

    accuracy = rf.density.Accuracy(tolerance=0.01, max_paths=4096)
    ```
    """

    tolerance: float | None = eqx.field(static=True, default=None)
    max_paths: int = eqx.field(static=True, default=2**16)
    errors: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        if self.tolerance is not None:
            check_positive("tolerance", self.tolerance)
        check_count("max_paths", self.max_paths)


class Estimate(eqx.Module):
    """log p(x) with its error bars; every field has the batch shape of x.

    - `log_prob`: the logarithm of the mean path weight, corrected for the bias due to the logarithm and for
      the truncation of the driver; or the value computed on a grid.
    - `standard_error`: the Monte Carlo error of `log_prob`, one standard deviation.
    - `truncation_error`: the error due to the finite number of driver functions and of solver steps,
      estimated from the change of log p when both numbers are doubled for the same paths; zero for a grid.
    - `solver_error`: the error of a grid, of the approximate density a short time after a fixed start, or of
      the solver steps of a flow without noise.
    - `total_error`: the sum of these three errors.
    - `effective_paths`: (Σw)²/Σw², the number of equally weighted paths whose mean would have the same
      variance; for particles, the effective number of 8 independent runs.
    - `num_paths`: number of paths used; 0 for a grid.
    - `escaped`: number of paths that do not reach x, which means that the backward solve along them diverges.
    - `rung`: index of the method that produced the value; `method` is its name: "exact", "paths" (drawn from
      the driver), "learned" (drawn from a proposal that was trained with the flow), "modes" (drawn around the
      most likely paths), "particles" (moved from there) or "grid".
    - `unmet`: whether the requested tolerance was not reached.
    - `steep`: whether paths may have been missed, because the weights of every method are uneven, or because
      two methods disagree.
    - `jump`, `fast`: whether the coefficients of the SDE jump, or vary faster in time than the solver's steps
      resolve.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.PullBack(num_paths=100))
    estimate.warning  # None, or one line that says which estimates are unreliable, and why
    ```
    """

    log_prob: Array
    standard_error: Array
    solver_error: Array
    truncation_error: Array
    effective_paths: Array
    num_paths: Array
    escaped: Array
    rung: Array
    unmet: Array
    steep: Array
    jump: Array
    fast: Array

    @staticmethod
    def of(log_prob: Array, method: str, **parts: Any) -> "Estimate":
        """An estimate with the given fields. Errors that are not given are zero, and flags that are not given
        are False."""
        blank = blank_parts(log_prob.shape, log_prob.dtype, method)
        return Estimate(**{**jax.device_put(blank), **parts, "log_prob": log_prob})

    @property
    def total_error(self) -> Array:
        """The sum of the Monte Carlo, truncation and solver errors."""
        return self.standard_error + self.solver_error + self.truncation_error

    @property
    def method(self) -> np.ndarray:
        """The name of the method that produced each value."""
        return np.array(METHODS)[np.asarray(self.rung)]

    @property
    def suspect(self) -> Array:
        """Whether each estimate is unreliable, for one of the reasons in `warning`."""
        suspect = jnp.zeros(self.log_prob.shape, bool)
        for _, bad, _ in self.reasons():
            suspect = suspect | bad
        return suspect

    @property
    def warning(self) -> str | None:
        """One line that says how many estimates are unreliable, why, and what to do; None if all are
        reliable."""
        warnings = Warnings()
        warnings.add(self)
        return warnings.line

    def reasons(self) -> list[tuple[str, Array, str]]:
        """For each possible problem: its name, the points that it affects, and the text of the warning."""
        few = self.effective_paths < jnp.minimum(FEW_PATHS, 0.99 * self.num_paths)
        worst = float(jnp.min(self.effective_paths)) if few.size and not is_traced(few) else 0.0
        finite = jnp.isfinite(self.total_error) & ~jnp.isnan(self.log_prob) & (self.log_prob < jnp.inf)
        where = {
            "few paths": few,
            "coarse": self.solver_error + self.truncation_error > COARSE,
            "steep": self.steep,
            "jump": self.jump,
            "fast in time": self.fast,
            "not finite": ~finite,
            "unmet": self.unmet,
        }
        return [(name, bad, REASONS[name].format(worst=worst)) for name, bad in where.items()]

    def __repr__(self) -> str:
        if not is_known(*jax.tree.leaves(self, is_leaf=lambda leaf: leaf is None)):
            return eqx.tree_pformat(self)
        # Inside a jit, even known numbers would be traced.
        with jax.ensure_compile_time_eval():
            size, warning = self.log_prob.size, self.warning
            lines = [f"Estimate of log p at {count(size, 'point')}"]
            if size:
                lines += self._table()
            if size > 1:
                lines.append(f"  {self._summary()}")
        return "\n".join(lines if warning is None else [*lines, f"  warning: {warning}"])

    def _table(self) -> list[str]:
        """One line per point; the middle ones are omitted if there are many."""
        flags = [(name, np.ravel(where)) for name, where, _ in self.reasons()]
        value, error, paths, methods = (
            np.ravel(part) for part in (self.log_prob, self.total_error, self.num_paths, self.method)
        )
        place = lambda i: ", ".join(str(int(k)) for k in np.unravel_index(i, self.log_prob.shape)) or "x"
        row = lambda i: (
            place(i),
            _number(value[i]),
            f"{error[i]:.2g}",
            f"{methods[i]} ({paths[i]})" if paths[i] else str(methods[i]),
            ", ".join(name for name, where in flags if where[i]),
        )
        shown = range(value.size) if value.size <= 2 * ENDS else [*range(ENDS), *range(-ENDS, 0)]
        rows = [row(i % value.size) for i in shown]
        if len(rows) < value.size:
            rows.insert(ENDS, ("…", "…", "…", "…", ""))
        return table(("point", "log_prob", "total error", "method (paths)", "flags"), rows)

    def _summary(self) -> str:
        error, suspect = jnp.max(self.total_error), int(jnp.sum(self.suspect))
        mean = f"mean log_prob {_number(jnp.mean(self.log_prob))}, largest total error {error:.2g}"
        return f"{mean}, {suspect or 'none'} of {self.log_prob.size} suspect"


def _number(value: Any) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def blank_parts(shape: tuple[int, ...], dtype: Any, method: str) -> dict[str, np.ndarray]:
    """The fields of an exact `Estimate` as NumPy arrays, because JAX would compile a program for each
    shape."""
    zero, none = np.zeros(shape, dtype), np.zeros(shape, bool)
    return {
        **dict.fromkeys(("log_prob", "standard_error", "solver_error", "truncation_error"), zero),
        "effective_paths": np.full(shape, np.inf, dtype),
        **dict.fromkeys(("num_paths", "escaped"), np.zeros(shape, int)),
        "rung": np.full(shape, METHODS.index(method)),
        **dict.fromkeys(("unmet", "steep", "jump", "fast"), none),
    }


class Warnings:
    """A collection of the warnings of estimates that are computed in parts and not stored."""

    def __init__(self):
        self.size, self.found = 0, {}

    def add(self, estimate: Estimate) -> None:
        self.size += estimate.log_prob.size
        for name, bad, text in estimate.reasons():
            if count := int(jnp.sum(bad)):
                before, said = self.found.get(name, (0, text))
                # Texts differ only in the smallest number of effective paths.
                self.found[name] = before + count, min(said, text)

    @property
    def line(self) -> str | None:
        parts = [f"{count} of {self.size} estimates {text}" for count, text in self.found.values()]
        return "; ".join(parts) or None


class AbstractEstimator(eqx.Module):
    """The interface of estimators of log p(x) of a flow, such as `rf.PullBack`."""

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def estimate(self, flow: Any, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        """log p at `x` of shape `(..., d)`."""


def log_mean(log_weights: Array) -> Array:
    """The logarithm of the mean of weights over the first axis, from their logarithms; −inf stands for a
    weight of zero."""
    top = jax.lax.stop_gradient(jnp.max(log_weights, axis=0))
    shift = jnp.where(jnp.isfinite(top), top, 0)
    mean = jnp.mean(jnp.exp(log_weights - shift[None]), axis=0)
    some = mean != 0  # NaN is kept
    return jnp.where(some, jnp.log(jnp.where(some, mean, 1)) + shift, -jnp.inf)


def effective_paths(weights: Any, xp: Any = jnp) -> Any:
    """(Σw)²/Σw² over the first axis; 0 if all weights are 0. `xp` is the array module, `jax.numpy` or
    `numpy`."""
    squares = xp.sum(weights**2, axis=0)
    return xp.where(squares > 0, xp.sum(weights, axis=0) ** 2 / xp.where(squares > 0, squares, 1), 0)


def weights_error(weights: Any, xp: Any = jnp) -> Any:
    """The standard error of the logarithm of the mean of K independent weights with mean 1, over the first
    axis.

    By the delta method it equals the standard error of the mean. Half the square of range/K is added to its
    square, to allow for a large weight that was not drawn. A further factor corrects for small K, as
    Student's t does: about 99.5 % of means of eight terms lie within three errors, if each term is a mean of
    32 lognormal weights whose logarithms have a standard deviation of up to 1.5. `xp` is the array module,
    `jax.numpy` or `numpy`.
    """
    count = weights.shape[0]
    if count == 1:
        return xp.full(weights.shape[1:], xp.inf, weights.dtype)
    spread = (xp.max(weights, axis=0) - xp.min(weights, axis=0)) / count
    variance = xp.var(weights, axis=0, ddof=1) / count + 0.5 * spread**2
    return xp.sqrt(variance) * (1 + 2.0 / (count - 1))
