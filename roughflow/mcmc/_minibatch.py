"""Log densities of posteriors that see a part of the data at a time."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count


class Minibatch(eqx.Module):
    """log p(z) + Σᵢ log p(dataᵢ | z), of which `rf.UnadjustedSampler` sees a fresh minibatch in each step:

        log p(z) + N/n Σ_{i in batch} log p(dataᵢ | z),

    whose gradient is right on average (Welling & Teh 2011). Called, it is the whole sum.

    **Arguments:** `log_prior`, `z -> ()`; `log_likelihood`, `(z, row) -> ()`; `data`, a pytree of arrays
    with one row an observation; `batch_size`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    data = 1 + jax.random.normal(jax.random.key(0), (1000,))
    target = rf.Minibatch(lambda z: -0.5 * z @ z, lambda z, y: -0.5 * (y - z[0]) ** 2, data, batch_size=50)
    sde = rf.overdamped_langevin(target, 1)
    chain = rf.sample_chain(sde, jnp.zeros(1), key=jax.random.key(1), num_steps=100, dt=1e-3)
    ```
    """

    log_prior: Callable[[Array], Array]
    log_likelihood: Callable[[Array, Any], Array]
    data: Any
    batch_size: int = eqx.field(static=True)

    def __init__(
        self,
        log_prior: Callable[[Array], Array],
        log_likelihood: Callable[[Array, Any], Array],
        data: Any,
        batch_size: int,
    ):
        check_callable("log_prior", log_prior, "z -> ()")
        check_callable("log_likelihood", log_likelihood, "(z, row) -> ()")
        self.log_prior = log_prior
        self.log_likelihood = log_likelihood
        self.data = jax.tree.map(jnp.asarray, data)
        self.batch_size = check_count("batch_size", batch_size)
        if len({len(leaf) for leaf in jax.tree.leaves(self.data)}) != 1:
            raise ValueError("all arrays of data must have the same number of rows")

    def __call__(self, z: Array) -> Array:
        return self.log_prior(z) + self._sum(z, self.data)

    def draw(self, key: PRNGKeyArray) -> Callable[[Array], Array]:
        """The estimate from one minibatch, drawn with replacement."""
        count = len(jax.tree.leaves(self.data)[0])
        chosen = jax.random.randint(key, (self.batch_size,), 0, count)
        rows = jax.tree.map(lambda leaf: leaf[chosen], self.data)
        return lambda z: self.log_prior(z) + count / self.batch_size * self._sum(z, rows)

    def _sum(self, z: Array, rows: Any) -> Array:
        return jnp.sum(jax.vmap(self.log_likelihood, in_axes=(None, 0))(z, rows))


def with_minibatches(tree: Any, key: PRNGKeyArray) -> Any:
    """A sampler's SDE with each `Minibatch` in it replaced by a fresh estimate."""
    is_target = lambda node: isinstance(node, Minibatch)
    return jax.tree.map(lambda node: node.draw(key) if is_target(node) else node, tree, is_leaf=is_target)
