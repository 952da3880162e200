"""An estimate of log p(x), and how far to trust it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._pareto import HEAVY, pareto_k

# Fewer effective paths than this, and a standard error estimated from them means little.
FEW_PATHS = 5.0


class Estimate(eqx.Module):
    """log p(x) with its error bars; every field has the batch shape of x.

    - `log_prob`: the logarithm of the mean importance weight.
    - `standard_error`: Monte Carlo standard error of `log_prob` by the delta method: the relative standard
      error of the mean weight. It does not contain what the finite driver leaves out.
    - `truncation_error`: an estimate of what it leaves out, if it was asked for; else None. It is twice
      the change of `log_prob` when the driver's functions are doubled along the same paths, which is
      the whole of it if it falls as 1/n, and more than that if it falls faster.
    - `effective_paths`: (Σw)²/Σw², how many equally weighted paths the estimate is worth.
    - `escaped`: how many paths had no weight, because their solve left for infinity or no path with
      those coefficients ends at x.
    - `num_paths`: how many paths were used.
    - `pareto_k`: the shape of the weights' tail; their variance is finite below ½. NaN with fewer than
      25 paths.
    - `fell_back`: where the proposal found no way to x, so that paths were drawn from the prior.
    - `unmet`: where the tolerance asked for was not met.

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
    effective_paths: Array
    escaped: Array
    num_paths: Array
    pareto_k: Array
    fell_back: Array
    unmet: Array
    truncation_error: Array | None = None

    @property
    def suspect(self) -> Array:
        """Where the estimate should not be trusted, for one of the reasons in `warning`."""
        return self._few | self.fell_back | self.unmet | self._heavy

    @property
    def _few(self) -> Array:
        return self.effective_paths < jnp.minimum(FEW_PATHS, self.num_paths)

    @property
    def _heavy(self) -> Array:
        return self.pareto_k > HEAVY

    @property
    def warning(self) -> str | None:
        """One line when some estimates should not be trusted, else None."""
        worst = float(jnp.min(self.effective_paths)) if self.effective_paths.size else 0.0
        reasons = [
            (self._few, f"rest on fewer than {FEW_PATHS:.0f} effective paths (the worst on {worst:.1f})"),
            (self._heavy, f"have weights with a heavy tail (Pareto k above {HEAVY})"),
            (self.fell_back, "found no likeliest path and drew from the prior"),
            (self.unmet, "did not meet the tolerance within max_paths"),
        ]
        found = [f"{int(jnp.sum(bad))} {text}" for bad, text in reasons if bool(jnp.any(bad))]
        if not found:
            return None
        return (
            f"of {self.log_prob.size} estimates, {'; '.join(found)}: raise num_paths or max_paths, or try "
            "another estimator"
        )


def log_mean(log_weights: Array) -> Array:
    """The logarithm of the mean weight over the first axis; −inf is a weight of zero."""
    top = jax.lax.stop_gradient(jnp.max(log_weights, axis=0))
    shift = jnp.where(jnp.isfinite(top), top, 0)
    mean = jnp.mean(jnp.exp(log_weights - shift[None]), axis=0)
    some = mean != 0  # a NaN stays one
    return jnp.where(some, jnp.log(jnp.where(some, mean, 1)) + shift, -jnp.inf)


def relative_weights(log_weights: Array, group: int) -> Array:
    """Weights over their mean, those of a group averaged: independent, with mean 1; `(K / group, ...)`."""
    value = jax.lax.stop_gradient(log_mean(log_weights))
    relative = jnp.exp(jax.lax.stop_gradient(log_weights) - jnp.where(jnp.isfinite(value), value, 0)[None])
    return jnp.mean(jnp.reshape(relative, (-1, group, *relative.shape[1:])), axis=1)


def standard_error(terms: Array) -> Array:
    """Of the mean of independent terms over the first axis; infinite for a single one."""
    if terms.shape[0] == 1:
        return jnp.full(terms.shape[1:], jnp.inf, terms.dtype)
    return jnp.std(terms, axis=0, ddof=1) / terms.shape[0] ** 0.5


def from_log_weights(log_weights: Array, group: int, fell_back: Array) -> Estimate:
    """The estimate that log-weights of shape `(K, ...)` make, in independent groups of `group` paths."""
    count = log_weights.shape[0]
    relative = relative_weights(log_weights, 1)
    some = jnp.any(jnp.isfinite(log_weights), axis=0)
    return Estimate(
        log_prob=log_mean(log_weights),
        standard_error=jnp.where(some, standard_error(relative_weights(log_weights, group)), jnp.inf),
        effective_paths=jnp.where(some, count / jnp.maximum(jnp.mean(relative**2, axis=0), 1), 0),
        escaped=jnp.sum(jnp.isneginf(log_weights), axis=0),
        num_paths=jnp.full(log_weights.shape[1:], count),
        pareto_k=pareto_k(jax.lax.stop_gradient(log_weights)),
        fell_back=fell_back,
        unmet=jnp.zeros(log_weights.shape[1:], bool),
    )
