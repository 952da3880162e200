"""The seam between flows and what estimates their density: an estimate, how good it should be, and who makes
it. The density stage has the makers; a stage below cannot name one above."""

import abc
import importlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_fields, check_flag, check_positive, is_traced
from .._show import ENDS, count, is_known, table
from ..faq import see

# Fewer effective paths than this, and a standard error estimated from them means little.
FEW_PATHS = 5.0
# Above this the mean weight converges too slowly for its standard error to mean much.
HEAVY = 0.7
UNFOUND = 0.05  # of the paths searched for: more than this that were not found may hide a good part of p(x)
# Nats by which the solver's steps, or the driver's functions, may move log p: beyond, the difference itself
# is a guess.
COARSE = 0.5

# What may be wrong with an estimate: in a word, and what is said of it.
REASONS = {
    "few paths": f"rest on fewer than {FEW_PATHS:.0f} effective paths (the worst on {{worst:.1f}}): "
    + f"raise num_paths{see('few-effective-paths')}",
    "heavy tail": f"have weights with a heavy tail (Pareto k > {HEAVY}): raise num_paths{see('heavy-tail')}",
    "from the prior": "found no likely path and drew from the prior: x may be out of reach"
    + see("no-likely-path"),
    "unfound paths": "miss paths that a search did not find: use rf.Tempered or rf.PullBack"
    + see("unfound-paths"),
    "coarse steps": "depend on the solver's steps: take more, rf.FixedGrid(steps=...), or rf.Adaptive"
    + see("coarse-steps"),
    "few functions": "depend on the driver's functions, or do not tell how much: take more, or rf.Richardson"
    + see("few-functions"),
    "steep": "lie where the SDE contracts strongly, so that paths may be missed: compare with rf.Endpoint"
    + see("strong-contraction"),
    "few probes": "are biased by the divergence's probes: raise num_probes" + see("few-probes"),
    "not finite": "have a value or an error bar that is not finite" + see("not-finite"),
    "unmet": "did not meet the tolerance within max_paths: raise either" + see("tolerance-not-met"),
}


class Accuracy(eqx.Module):
    """How well log p(x) is to be known: the arguments of `StochasticFlow.estimate` as one record.

    ```python
    import roughflow as rf

    accuracy = rf.Accuracy(tolerance=0.01, truncation=True)
    ```
    """

    tolerance: float | None = eqx.field(static=True, default=None)
    max_paths: int = eqx.field(static=True, default=2**16)
    truncation: bool = eqx.field(static=True, default=False)
    solver: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        if self.tolerance is not None:
            check_positive("tolerance", self.tolerance)
        check_count("max_paths", self.max_paths)
        check_flag("truncation", self.truncation)
        check_flag("solver", self.solver)


class Estimate(eqx.Module):
    """log p(x) with its error bars; every field has the batch shape of x.

    - `log_prob`: the logarithm of the mean importance weight, and half the variance of that mean, by
      which its logarithm is low on average.
    - `standard_error`: the Monte Carlo error of `log_prob`, one standard deviation, with an allowance for the
      skewness of few weights.
    - `solver_error`: how far `log_prob` moves when the solver takes steps half as long, seen on a few of the
      paths that matter most. None if it was not looked at.
    - `divergence_error`: what a divergence estimated by probes adds to `log_prob` on average; 0 for an exact
      one.
    - `truncation_error`: what the driver's finite number of functions leaves out, if it was asked for;
      else None. It is twice the change of `log_prob` when the driver's functions are doubled along the same
      paths, which is the whole of it if it falls as 1/n, and more than that if it falls faster.
    - `total_error`: the sum of those that are known.
    - `effective_paths`: (Σw)²/Σw², how many equally weighted paths the estimate is worth.
    - `num_paths`: how many paths were used.
    - `escaped`: how many of them have no weight, because their solve left for infinity: x is not in the
      image of their flow.
    - `unfound`: how many have no weight because a search for one that ends at x failed (`rf.Endpoint`); there
      may be one all the same.
    - `pareto_k`: the shape of the weights' tail; their variance is finite below ½. NaN with fewer than
      25 paths, and where particles were moved, whose weights are bounded.
    - `fell_back`: where the proposal found no way to x, so that paths were drawn from the prior.
    - `tempered`: where importance weights were poor, so that particles were moved to the paths that lead
      to x.
    - `unmet`: where the tolerance asked for was not met.
    - `steep`: where particles were moved, and a backward solve spreads so much that they may have missed some
      of the paths, also of those that were bent to x. None if it was not looked at.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.PullBack(num_paths=100))
    estimate.warning  # None, or one line that says what to distrust
    ```
    """

    log_prob: Array
    standard_error: Array
    divergence_error: Array
    effective_paths: Array
    num_paths: Array
    escaped: Array
    unfound: Array
    pareto_k: Array
    fell_back: Array
    tempered: Array
    unmet: Array
    solver_error: Array | None = None
    truncation_error: Array | None = None
    steep: Array | None = None

    @property
    def total_error(self) -> Array:
        """One bar for everything that is known: Monte Carlo, solver, divergence and truncation."""
        parts = (self.solver_error, self.divergence_error, self.truncation_error)
        return sum((part for part in parts if part is not None), self.standard_error)

    @property
    def suspect(self) -> Array:
        """Where the estimate should not be trusted, for one of the reasons in `warning`."""
        suspect = jnp.zeros(self.log_prob.shape, bool)
        for _, bad, _ in self.reasons():
            suspect = suspect | bad
        return suspect

    @property
    def warning(self) -> str | None:
        """One line when some estimates should not be trusted, else None."""
        warnings = Warnings()
        warnings.add(self)
        return warnings.line

    def reasons(self) -> list[tuple[str, Array, str]]:
        """What may be wrong in a word, where, and the remedy."""
        few = self.effective_paths < jnp.minimum(FEW_PATHS, 0.99 * self.num_paths)
        worst = float(jnp.min(self.effective_paths)) if few.size and not is_traced(few) else 0.0
        none = jnp.zeros(self.log_prob.shape, bool)
        beyond = lambda error: none if error is None else error > COARSE
        finite = jnp.isfinite(self.total_error) & ~jnp.isnan(self.log_prob) & (self.log_prob < jnp.inf)
        where = {
            "few paths": few,
            "heavy tail": self.pareto_k > HEAVY,
            "from the prior": self.fell_back,
            "unfound paths": self.unfound > UNFOUND * self.num_paths,
            "coarse steps": beyond(self.solver_error),
            "few functions": beyond(self.truncation_error),
            "steep": none if self.steep is None else self.steep,
            "few probes": beyond(self.divergence_error),
            "not finite": ~finite,
            "unmet": self.unmet,
        }
        return [(name, bad, REASONS[name].format(worst=worst)) for name, bad in where.items()]

    def __repr__(self) -> str:
        needed = (self.log_prob, self.standard_error, self.effective_paths, self.num_paths, self.tempered)
        if not is_known(*needed, *jax.tree.leaves(self)):
            return eqx.tree_pformat(self)
        # Inside a jit even numbers that are known would be traced.
        with jax.ensure_compile_time_eval():
            size, warning = self.log_prob.size, self.warning
            lines = [f"Estimate of log p at {count(size, 'point')}"]
            if size:
                lines += self._table()
            if size > 1:
                lines.append(f"  {self._summary()}")
        return "\n".join(lines if warning is None else [*lines, f"  warning: {warning}"])

    def _table(self) -> list[str]:
        """The points one a line, those in the middle left out if there are many."""
        reasons = [*self.reasons(), ("tempered", self.tempered, "")]
        flags = [(name, np.ravel(where)) for name, where, _ in reasons]
        value, error, paths, most = (
            np.ravel(part) for part in (self.log_prob, self.total_error, self.effective_paths, self.num_paths)
        )
        place = lambda i: ", ".join(str(int(k)) for k in np.unravel_index(i, self.log_prob.shape)) or "x"
        row = lambda i: (
            place(i),
            f"{value[i]:.4f}",
            f"{error[i]:.2g}",
            f"{paths[i]:.1f} of {most[i]}",
            ", ".join(name for name, where in flags if where[i]),
        )
        shown = range(value.size) if value.size <= 2 * ENDS else [*range(ENDS), *range(-ENDS, 0)]
        rows = [row(i % value.size) for i in shown]
        if len(rows) < value.size:
            rows.insert(ENDS, ("…", "…", "…", "…", ""))
        return table(("point", "log_prob", "total error", "effective paths", "flags"), rows)

    def _summary(self) -> str:
        error, suspect = jnp.max(self.total_error), int(jnp.sum(self.suspect))
        mean = f"mean log_prob {jnp.mean(self.log_prob):.4f}, largest total error {error:.2g}"
        return f"{mean}, {suspect or 'none'} of {self.log_prob.size} suspect"


class Warnings:
    """What is to be said of estimates that come in parts, without keeping them."""

    def __init__(self):
        self.size, self.found = 0, {}

    def add(self, estimate: Estimate) -> None:
        self.size += estimate.log_prob.size
        for name, bad, text in estimate.reasons():
            if count := int(jnp.sum(bad)):
                before, said = self.found.get(name, (0, text))
                # Texts differ in one digit at most, that of the fewest effective paths.
                self.found[name] = before + count, min(said, text)

    @property
    def line(self) -> str | None:
        told = "; ".join(f"{count} {text}" for count, text in self.found.values())
        return f"of {self.size} estimates, {told}" if told else None


class AbstractEstimator(eqx.Module):
    """Estimates log p(x) of a flow; `rf.Tempered` and `rf.PullBack` are two."""

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def estimate(self, flow: Any, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        """log p at `x` of shape `(..., d)`."""


def default_estimator(flow: Any) -> AbstractEstimator:
    """What the density stage chooses for this flow: the one look ahead in the pipeline, at call time."""
    return importlib.import_module("roughflow.density").default_estimator(flow)
