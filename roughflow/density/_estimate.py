"""An estimate of log p(x), and how far to trust it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

# Fewer effective paths than this, and a standard error estimated from them means little.
FEW_PATHS = 5.0


class Estimate(eqx.Module):
    """log p(x) with its error bars; every field has the batch shape of x.

    - `log_prob`: the logarithm of the mean importance weight.
    - `standard_error`: Monte Carlo standard error of `log_prob` by the delta method: the relative standard
      error of the mean weight. It does not contain what the finite driver leaves out.
    - `effective_paths`: (Σw)²/Σw², how many equally weighted paths the estimate is worth.
    - `escaped`: how many paths had no weight, because their solve left for infinity or no path with
      those coefficients ends at x.
    - `num_paths`: how many paths were used.

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
    num_paths: int = eqx.field(static=True)

    @property
    def suspect(self) -> Array:
        """Where the estimate should not be trusted: it rests on too few effective paths."""
        return self.effective_paths < min(FEW_PATHS, self.num_paths)

    @property
    def warning(self) -> str | None:
        """One line when some estimates should not be trusted, else None."""
        bad = int(jnp.sum(self.suspect))
        if not bad:
            return None
        worst = float(jnp.min(self.effective_paths))
        return (
            f"{bad} of {self.log_prob.size} estimates rest on fewer than {FEW_PATHS:.0f} effective paths "
            f"(the worst on {worst:.1f}): raise num_paths, or try another estimator"
        )


def from_log_weights(log_weights: Array) -> Estimate:
    """The estimate that log-weights of shape `(K, ...)` make; −inf is a path without weight."""
    count = log_weights.shape[0]
    top = jax.lax.stop_gradient(jnp.max(log_weights, axis=0))
    shift = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(log_weights - shift[None])
    mean = jnp.mean(weights, axis=0)
    some = mean > 0
    log_prob = jnp.where(some, jnp.log(jnp.where(some, mean, 1)) + shift, -jnp.inf)
    relative = jax.lax.stop_gradient(weights / jnp.where(some, mean, 1)[None])
    spread = jnp.sum((relative - jnp.mean(relative, axis=0)[None]) ** 2, axis=0)
    return Estimate(
        log_prob=log_prob,
        standard_error=jnp.sqrt(spread / (count * max(count - 1, 1))),
        effective_paths=jnp.where(some, count / jnp.maximum(jnp.mean(relative**2, axis=0), 1), 0),
        escaped=jnp.sum(jnp.isneginf(log_weights), axis=0),
        num_paths=count,
    )
