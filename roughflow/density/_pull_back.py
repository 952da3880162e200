"""The paper's estimator: the mean of p(x | path) over paths."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count
from ..flow import StochasticFlow
from ._estimator import AbstractImportanceEstimator
from ._latent import Latent, Target
from ._mode import Mode
from ._prior import Prior
from ._proposal import AbstractLaw, AbstractProposal


class PullBack(AbstractImportanceEstimator):
    """p(x) = E p(x | path) (Hodgkinson et al. 2020), over paths ω drawn from a proposal q:

        p(x) = E [ p(x | ω) φ(ω) / q(ω) ],

    each weight by one solve backwards from x. Unbiased for p(x), for any noise, and cheap a path. From
    `rf.Prior()`, the default, its weights are very uneven where p(x | ω) is concentrated, and paths are
    lost whose backward solve escapes: look at `effective_paths`. `rf.Laplace()` cures most of that.

    With `rf.HutchinsonDivergence` each path has probes of its own and log p(x | ω) is unbiased, p(x | ω) is
    not: use enough probes that log p(x | ω) varies little with them.

    **Arguments:** `num_paths`, how many paths a point; `proposal`, `rf.Prior()`, `rf.Laplace()` or an
    `rf.Amortised(...)`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.eye(1)), rf.Normal(jnp.ones(1)))
    estimate = flow.estimate(jnp.zeros(1), key=jax.random.key(0), estimator=rf.PullBack(num_paths=1000))
    estimate.log_prob, estimate.standard_error
    ```
    """

    num_paths: int = eqx.field(
        static=True, converter=lambda count: check_count("num_paths", count), default=1000
    )
    proposal: AbstractProposal = Prior()

    def starts(self, x: Array) -> None:
        del x

    def check(self, flow: StochasticFlow) -> None:
        del flow

    def verify(self, law: AbstractLaw) -> AbstractLaw:
        return law

    def rows(self, latent: Latent, target: Target, mode: Mode | None) -> Array:
        """What is solved for is the start."""
        del mode
        d = latent.flow.dimension
        return jnp.broadcast_to(
            jnp.eye(d, latent.size, dtype=target.x.dtype), (len(target.x), d, latent.size)
        )

    def log_joint(
        self,
        flow: StochasticFlow,
        latent: Latent,
        target: Target,
        rows: Array,
        delta: Array,
        guess: Array,
        keys: PRNGKeyArray,
    ) -> Array:
        del rows, guess
        coefficients = latent.coefficients(delta)
        path = flow.driver.path(coefficients, flow.t1)
        return flow.log_prob_given_path(target.x, path, key=keys) + flow.driver.log_prob(coefficients)
