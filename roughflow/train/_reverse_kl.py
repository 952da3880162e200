"""Fit a flow to an unnormalised density, and bound its normalising constant from below."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, check_callable, check_count, check_instance, check_key, check_number
from .._programs import jit
from ..density import AbstractProposal, Amortised, Laplace, Prior, StochasticFlow, UpperBound
from ..faq import see
from ..sde import GIVEN, LogDensity, TargetedSDE, as_target
from ._objective import LOST_POINT_LOSS, AbstractObjective


class ReverseKL(AbstractObjective):
    """KL(p_T ‖ p) for an unnormalised density p, bounded from above on samples of the flow:

        E[log 1/(K+1) (w₀ + … + w_K) − log p(Z)] ≥ KL(p_T ‖ p) − log ∫ exp(log_density),

    with wₖ = p_T(Z | ωₖ) φ(ωₖ)/q(ωₖ | Z), where ω₀ is the path that generated Z and ω₁, …, ω_K are drawn from
    a proposal q (Sobolev & Vetrov 2019; `rf.density.UpperBound`). The bound holds for every q, and a q
    trained with the flow tightens it. The negative loss is a lower bound on the log evidence,
    `evidence_bound` in the history.

    A sample that escapes counts as 1000 nats, so that a flow does not improve by losing samples.

    **Arguments:**

    - `log_density`: `z -> ()`.
    - `num_paths`: K.
    - `batch_size`: samples per step.
    - `l1`: weight of the sum of the absolute values of all parameters.
    - `proposal`: by default an `rf.Amortised` proposal, created and trained by `rf.fit`. With `rf.Prior()`
      and K = 0, the objective is the loss of Hodgkinson et al. (2020), which penalises all information that
      the path carries about Z and so drives σ to zero.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    key, target = jax.random.key(0), lambda z: -0.5 * jnp.sum((z - 1) ** 2)
    sde = rf.targeted_sde(target, rf.ConstantDiffusion(jnp.eye(1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    objective = rf.ReverseKL(target, num_paths=4, batch_size=32)
    fitted = rf.fit(flow, key=key, objective=objective, steps=5, frozen=lambda f: f.base, progress=False)
    ```
    """

    log_density: LogDensity = eqx.field(metadata=GIVEN)
    bound: UpperBound
    learns_proposal: bool = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)
    l1: float = eqx.field(static=True)
    uses_data: ClassVar[bool] = False
    solves: ClassVar[bool] = True

    def __init__(
        self,
        log_density: LogDensity,
        num_paths: int = 16,
        batch_size: int = 256,
        l1: float = 0.0,
        proposal: AbstractProposal | None = None,
    ):
        check_callable("log_density", log_density, "z -> ()")
        check_number("l1", l1, least=0)
        self.log_density = log_density
        self.bound = UpperBound(num_paths, Prior() if proposal is None else proposal)
        self.learns_proposal = proposal is None
        self.batch_size = check_count("batch_size", batch_size)
        self.l1 = float(l1)

    def prepare(self, model: StochasticFlow, *, key: PRNGKeyArray) -> "ReverseKL":
        """The objective with a proposal for this model."""
        if not self.learns_proposal or model.noise_dimension == 0:
            return self
        return eqx.tree_at(lambda o: o.bound.proposal, self, Amortised(model, width=64, key=key))

    def leave(self, model: StochasticFlow) -> StochasticFlow:
        """The model with the learned proposal."""
        proposal = self.bound.proposal
        return model.with_proposal(proposal) if isinstance(proposal, Amortised) else model

    def __call__(
        self, model: StochasticFlow, x: Array | None, *, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array]]:
        del x
        gaps = self.gaps(model, key=key)
        lost = jnp.isnan(gaps)
        divergence = jnp.mean(jnp.where(lost, LOST_POINT_LOSS, gaps))
        metrics = {"evidence_bound": -divergence, "lost": jnp.mean(lost)}
        return divergence + self.l1 * _size(model), metrics

    def gaps(self, model: StochasticFlow, *, key: PRNGKeyArray) -> Array:
        """The term of the bound for each of `batch_size` samples; NaN for a sample that escaped."""
        z, log_prob = self.bound(model.without_errors(), key=key, shape=(self.batch_size,))
        lost = jnp.isneginf(log_prob)
        value = log_prob - jax.vmap(as_target(self.log_density))(jnp.where(lost[:, None], 0, z))
        return jnp.where(lost, jnp.nan, value)


def _size(model: StochasticFlow) -> Array:
    """The sum of the absolute values of all trainable parameters, without the arrays of a target."""
    sde = model.sde
    parts = (sde.diffusion, sde.skew) if isinstance(sde, TargetedSDE) else sde
    leaves = jax.tree.leaves(eqx.filter(parts, eqx.is_inexact_array))
    return sum((jnp.sum(jnp.abs(leaf)) for leaf in leaves), jnp.zeros(()))


EVIDENCE_CHUNK = 64  # samples per call


class EvidenceBound(eqx.Module):
    """The result of `rf.train.evidence_bound`: the `value` of the bound, and its `standard_error`."""

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
    """A lower bound on log ∫ exp(log_density), the log evidence of a model, from samples of a flow:

        log Z ≥ E[log p(Z_T) − log 1/(K+1) Σₖ wₖ],

    the negative loss of `rf.ReverseKL`. The gap is KL(p_T ‖ p) plus the gap of the estimate of log p_T with K
    paths (`rf.density.UpperBound`).

    **Arguments:** `flow`, whose distribution should be close to the target, such as an SDE that leaves the
    target invariant (`rf.targeted_sde`) with a similar normal base; `log_density`; `num_samples`, the number
    of samples of the flow; `num_paths`, K.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    target = lambda z: -0.5 * jnp.sum((z - 0.2) ** 2)  # the integral is 2π
    flow = rf.StochasticFlow(rf.overdamped_langevin(target, 2), rf.Normal(jnp.zeros(2)), t1=2.0)
    bound = rf.train.evidence_bound(flow, target, key=jax.random.key(0), num_samples=128)  # log 2π = 1.838
    ```
    """
    check_instance("flow", flow, StochasticFlow, "an rf.StochasticFlow")
    check_count("num_samples", num_samples, least=2)
    chunks = -(-num_samples // EVIDENCE_CHUNK)
    proposal = flow.proposal if isinstance(flow.proposal, AbstractProposal) else Laplace()
    objective = ReverseKL(
        log_density, num_paths, batch_size=min(EVIDENCE_CHUNK, num_samples), proposal=proposal
    )
    values = [_values(objective, flow, k) for k in jax.random.split(check_key(key), chunks)]
    values = jnp.concatenate(values)[:num_samples]
    lost = int(jnp.sum(~jnp.isfinite(values)))
    if lost:
        raise NonFiniteError(
            f"{lost} of {values.size} samples escaped or have no finite density: give the flow more solver "
            f"steps, such as integrator=rf.FixedGrid(steps=16), or a smaller t1" + see("escaped-samples")
        )
    return EvidenceBound(jnp.mean(values), jnp.std(values, ddof=1) / values.size**0.5)


@jit
def _values(objective: ReverseKL, flow: StochasticFlow, key: PRNGKeyArray) -> Array:
    return -objective.gaps(flow, key=key)
