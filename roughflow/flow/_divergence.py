"""The divergence of a vector field, which determines the change of log-density along a path."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count
from .._linear import UNROLL
from ..faq import see

VectorField = Callable[[Array], Array]


class AbstractDivergence(eqx.Module):
    """A method to compute div f(z) = tr Df(z)."""

    @abc.abstractmethod
    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> Array | None:
        """The random probes for one solve, or None if the method needs none."""

    @abc.abstractmethod
    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        """f(z) and div f(z)."""


class ExactDivergence(AbstractDivergence):
    """The exact trace tr Df in forward mode: d Jacobian-vector products that share one linearisation.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(2))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), divergence=rf.ExactDivergence())
    ```
    """

    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> None:
        del key, shape, dimension

    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        del probes
        # Linearised once rather than one jvp per direction: the backward pass then evaluates the field once,
        # not d times.
        value, tangent = jax.linearize(field, z)
        basis = np.eye(z.size, dtype=z.dtype)
        if z.size <= UNROLL:
            return value, sum((tangent(e)[i] for i, e in enumerate(basis)), jnp.zeros((), z.dtype))
        return value, jnp.trace(jax.vmap(tangent)(jnp.asarray(basis)))


class HutchinsonDivergence(AbstractDivergence):
    """Hutchinson's estimator tr Df ≈ mean over probes ε of ε·(Df ε): unbiased, at a cost that does not grow
    with d.

    **Arguments:**

    - `num_probes`: number of probes to average over.
    - `distribution`: `jax.random.rademacher` (default, least variance) or `jax.random.normal`.

    Probes are drawn for each sample of each solve and are constant along it, so that the field is a smooth
    function of time. Methods that use it need a `key`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: jnp.tanh(z), lambda t, z: jnp.eye(20))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(20)), divergence=rf.HutchinsonDivergence(num_probes=4))
    path = flow.sample_path(key=jax.random.key(0))
    flow.log_prob_given_path(jnp.zeros(20), path, key=jax.random.key(1))
    ```
    """

    num_probes: int = eqx.field(static=True)
    distribution: Callable = eqx.field(static=True)

    def __init__(self, num_probes: int = 1, distribution: Callable = jax.random.rademacher):
        check_count("num_probes", num_probes)
        check_callable("distribution", distribution, "(key, shape, dtype), such as jax.random.normal")
        self.num_probes = num_probes
        self.distribution = distribution

    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> Array:
        if key is None:
            raise TypeError(f"HutchinsonDivergence needs a key: pass key=jax.random.key(seed){see('keys')}")
        return self.distribution(key, (*shape, self.num_probes, dimension), float)

    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        assert probes is not None
        value, tangent = jax.linearize(field, z)
        probes = probes.astype(z.dtype)
        if self.num_probes <= UNROLL:
            terms = [jnp.dot(probe, tangent(probe)) for probe in probes]
            return value, sum(terms[1:], terms[0]) / self.num_probes
        return value, jnp.mean(jax.vmap(lambda probe: jnp.dot(probe, tangent(probe)))(probes))


class NoDivergence(AbstractDivergence):
    """No divergence, for samples without densities; returns zero."""

    def draw(self, shape: tuple[int, ...], dimension: int, *, key: PRNGKeyArray | None) -> None:
        del key, shape, dimension

    def __call__(self, field: VectorField, z: Array, probes: Array | None) -> tuple[Array, Array]:
        del probes
        return field(z), jnp.zeros((), z.dtype)
