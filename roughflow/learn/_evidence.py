"""The integral of a density, from below."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, check_count, check_instance, check_key
from .._programs import jit
from ..density import AbstractProposal, Laplace, StochasticFlow
from ..faq import see
from ..sde import LogDensity
from ._reverse_kl import ReverseKL

CHUNK = 64  # samples at a time


class EvidenceBound(eqx.Module):
    """What `rf.evidence_bound` returns: the bound's `value`, and the `standard_error` of that."""

    value: Array
    standard_error: Array


def evidence_bound(
    flow: StochasticFlow,
    log_density: LogDensity,
    *,
    key: PRNGKeyArray,
    num_samples: int = 1024,
    num_paths: int = 64,
) -> EvidenceBound:
    """A lower bound on log ∫ exp(log_density), a model's log evidence, from samples of a flow:

        log Z ≥ E[log p(Z_T) − log 1/(K+1) Σₖ wₖ],

    minus the loss of `rf.ReverseKL`. It falls short by KL(p_T ‖ p), and by what K paths leave open
    (`rf.UpperBound`).

    **Arguments:** `flow`, one that comes near the target, such as an SDE that keeps it (`rf.targeted_sde`)
    from a normal distribution that is near; `log_density`; `num_samples` of the flow; `num_paths`, K.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    target = lambda z: -0.5 * jnp.sum((z - 0.2) ** 2)  # the integral is 2π
    flow = rf.StochasticFlow(rf.overdamped_langevin(target, 2), rf.Normal(jnp.zeros(2)), t1=2.0)
    bound = rf.evidence_bound(flow, target, key=jax.random.key(0), num_samples=128)  # log 2π = 1.838
    ```
    """
    check_instance("flow", flow, StochasticFlow, "an rf.StochasticFlow")
    check_count("num_samples", num_samples, least=2)
    chunks = -(-num_samples // CHUNK)
    proposal = flow.proposal if isinstance(flow.proposal, AbstractProposal) else Laplace()
    objective = ReverseKL(log_density, num_paths, batch_size=min(CHUNK, num_samples), proposal=proposal)
    values = [_values(objective, flow, k) for k in jax.random.split(check_key(key), chunks)]
    values = jnp.concatenate(values)[:num_samples]
    lost = int(jnp.sum(~jnp.isfinite(values)))
    if lost:
        raise NonFiniteError(
            f"{lost} of {values.size} samples escaped, or have no finite density: give the flow more solver "
            "steps, integrator=rf.FixedGrid(steps=16) say, or a smaller t1" + see("escaped-samples")
        )
    return EvidenceBound(jnp.mean(values), jnp.std(values, ddof=1) / values.size**0.5)


@jit
def _values(objective: ReverseKL, flow: StochasticFlow, key: PRNGKeyArray) -> Array:
    return -objective.gaps(flow, key=key)
