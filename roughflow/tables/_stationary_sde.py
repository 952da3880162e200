"""An SDE whose stationary distribution is that of the data."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from .._checks import check_instance, check_number
from ..density import StochasticFlow
from ..faq import see
from ..sde import Diffusion, NormalTransport, TargetedSDE, TransportSDE, targeted_sde
from ._closed_form import Marginals
from ._standardised import Standardised


class FittedScore(eqx.Module):
    """∇log p of the data under a model, slightly smoothed, in the units of the data."""

    transport: NormalTransport
    loc: Array
    matrix: Array
    time: float
    marginals: Marginals | None = None

    def __call__(self, x: Array) -> Array:
        """With maps g of the columns, u = g(x): ∇ₓ = g′(x) ∇ᵤlog p(u) + ∇ₓ log g′(x)."""
        maps = self.marginals
        if maps is None:
            return self._score(x)
        mapped, back = jax.vjp(lambda y: maps.forward(y)[0], x)
        bend = jax.grad(lambda y: jnp.sum(maps.forward(y)[1]))(x)
        return back(self._score(mapped))[0] + bend

    def _score(self, x: Array) -> Array:
        transport, s, left = self.transport, self.time, 1 - self.time
        matrix, start = self.matrix.astype(x.dtype), transport.loc.astype(x.dtype)
        unit = solve_triangular(matrix, x - self.loc.astype(x.dtype), lower=True)
        # At time s the data are scaled by s, so the smoothing is around s·unit.
        t = jnp.asarray(s * transport.t1, x.dtype)
        _, pull = transport.velocity_and_pull(t, s * unit + left * start)
        return solve_triangular(matrix, s * pull / left, lower=True, trans="T")


def stationary_sde(
    model: Standardised | StochasticFlow, diffusion: Diffusion, *, time: float = 0.9
) -> TargetedSDE:
    """The SDE with a given diffusion whose stationary distribution is that of the data: `rf.targeted_sde`
    with the score of a model trained by regression.

    Its paths stay near the data for any length of time and any diffusion σ. Use `rf.simulate`, or
    `rf.sample_chain` with `rf.UnadjustedSampler`, to follow them.

    **Arguments:**

    - `model`: the result of `rf.fit_density` with `likelihood_steps=0`, or of `rf.fit` with
      `rf.Interpolant()` from an `rf.Normal` base. Likelihood steps make the velocity and its score slightly
      inconsistent.
    - `diffusion`: σ, `(t, x) -> (d, m)`, as for `rf.ItoSDE`, in the units of the data.
    - `time`: time s < 1 at which the score is evaluated. It is the score of the data with (1 − s)/s times the
      base added as noise. Close to 1 there is less smoothing, but errors of the velocity are amplified by
      1/(1 − s).

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    data = rf.datasets.Banana().sample(key=jax.random.key(0), shape=(500,))
    flow = rf.tables.FlowOptions(width=8, likelihood_steps=0)
    settings = {"flow": flow, "steps": 20, "progress": False}
    model = rf.fit_density(data, key=jax.random.key(1), **settings).model
    sde = rf.tables.stationary_sde(model, rf.ConstantDiffusion(jnp.eye(2)))
    path = rf.simulate(sde, data[0], key=jax.random.key(2), t1=5.0, steps=100, trajectory=True)
    ```
    """
    wanted = "a flow, or the result of rf.fit_density"
    check_instance("model", model, Standardised | StochasticFlow, wanted)
    check_number("time", time, above=0, below=1)
    flow = model.flow if isinstance(model, Standardised) else model
    transport = flow.sde.transport if isinstance(flow.sde, TransportSDE) else None
    if not isinstance(transport, NormalTransport):
        raise TypeError(
            "stationary_sde needs a model with a known score: fit it with rf.Interpolant() from an rf.Normal "
            "base, or give rf.targeted_sde a score" + see("noise-afterwards")
        )
    if transport.num_given:
        raise ValueError("stationary_sde does not support conditional densities")
    if isinstance(model, Standardised):
        loc, matrix = jnp.asarray(model.loc, float), jnp.asarray(model.matrix, float)
        score = FittedScore(transport, loc, matrix, float(time), model.marginals)
    else:
        score = FittedScore(transport, jnp.zeros(flow.dimension), jnp.eye(flow.dimension), float(time))
    return targeted_sde(score=score, diffusion=diffusion)
