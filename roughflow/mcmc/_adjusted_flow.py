"""Steps along the flow of the noise, with the correction of Metropolis."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_positive
from ..density import log_abs_det, solve
from ..sde import TargetedSDE, as_target, noise_matrix
from ._sampler import AbstractSampler, SamplerInfo, SamplerState, accept, check_adjustable, check_start

NEWTON = 12  # steps at most


class Climbing(SamplerState):
    """Where a chain is, how likely that is, and which way is up. Nothing here depends on σ or dt, so both may
    change while a chain runs."""

    log_density: Array
    gradient: Array


class AdjustedFlow(AbstractSampler):
    """A step along a random ODE, accepted with the probability of Metropolis, Hastings and Green.

    Given ξ, the ODE dy/ds = σ(y) ξ, 0 ≤ s ≤ 1, takes z to y = Φ_ξ(z), and −ξ takes y back to z. With
    ξ ~ N(dt m(z), dt I) the move is accepted with probability min(1, a),

        a = p(y) N(−ξ; dt m(y), dt I) |det DΦ_ξ(z)| / p(z) N(ξ; dt m(z), dt I),

    which keeps p exactly, whatever σ, m and dt are (Green 1995). m = σ⁻¹ times the Stratonovich drift of
    the SDE, m = ½(σᵀ∇log p + div σ) and with a skew Q also σ⁻¹(Q∇log p + div Q), makes it a step of that SDE
    to first order in dt. With constant σ it is MALA; where the columns of σ are those of the derivative
    of a map T, it is MALA for the law that T makes of p. `rf.Adjusted` proposes along straight lines instead,
    which must be short where σ turns: on Neal's funnel in ten dimensions, with the same σ, a hundred times
    more steps are needed.

    The ODE is solved by `substeps` of the implicit midpoint rule, which −ξ undoes exactly, by Newton's
    method; a move that does not come back is refused. A step takes one gradient of the log density.

    **Arguments:** `sde`, an `rf.targeted_sde` with as many noises as dimensions; `dt`; `substeps`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    cauchy = lambda z: -jnp.log1p(z[0] ** 2)
    sampler = rf.AdjustedFlow(rf.targeted_sde(cauchy, lambda t, z: jnp.sqrt(1 + z**2)[:, None]), dt=4.0)
    chain = rf.sample_chain(sampler, jnp.zeros(1), key=jax.random.key(0), num_steps=1000)
    ```
    """

    sde: TargetedSDE
    dt: float | Array
    substeps: int = eqx.field(static=True, default=4)

    def __check_init__(self):
        check_positive("dt", self.dt)
        check_count("substeps", self.substeps)
        check_adjustable("AdjustedFlow", self.sde)

    def check(self, z: Array) -> None:
        check_start("AdjustedFlow", self.sde, z, square=True)

    def init(self, z: Array) -> Climbing:
        return Climbing(z, *jax.value_and_grad(as_target(self.sde.log_density))(z))

    def step(self, key: PRNGKeyArray, state: SamplerState) -> tuple[Climbing, SamplerInfo]:
        assert isinstance(state, Climbing)
        key_move, key_accept = jax.random.split(key)
        there, log_ratio, xi = self.propose(key_move, state)
        back, _ = self._flow(there.z, -xi)
        size = 1 + jnp.maximum(jnp.max(jnp.abs(state.z)), jnp.max(jnp.abs(there.z)))
        returns = jnp.max(jnp.abs(back - state.z)) < 1e3 * jnp.finfo(back.dtype).eps * size
        return accept(key_accept, jnp.where(returns, log_ratio, -jnp.inf), there, state)

    def propose(self, key: PRNGKeyArray, state: Climbing) -> tuple[Climbing, Array, Array]:
        """A place to go to, log a, and ξ, if ξ found its way; gradients pass through all."""
        dt = jnp.asarray(self.dt, state.z.dtype)
        mean = dt * self._mean(state)
        xi = mean + jnp.sqrt(dt) * jax.random.normal(key, state.z.shape, state.z.dtype)
        y, log_det = self._flow(state.z, xi)
        there = self.init(y)
        forth = -0.5 * jnp.sum((xi - mean) ** 2) / dt
        home = -0.5 * jnp.sum((xi + dt * self._mean(there)) ** 2) / dt
        return there, there.log_density - state.log_density + log_det + home - forth, xi

    def _noise(self, z: Array) -> Array:
        return noise_matrix(self.sde.noise(jnp.zeros((), z.dtype), z))

    def _mean(self, state: Climbing) -> Array:
        """m of the class's formula."""
        z, up = state.z, state.gradient
        axes = jnp.eye(z.shape[0], dtype=z.dtype)
        slopes = jax.vmap(lambda axis: jax.jvp(self._noise, (z,), (axis,))[1])(axes)
        sigma = self._noise(z)
        mean = 0.5 * (sigma.T @ up + jnp.einsum("iij->j", slopes))
        if self.sde.skew is None:
            return mean
        skew = lambda y: self.sde.skew(jnp.zeros((), y.dtype), y)  # pyright: ignore[reportOptionalCall]
        turns = jax.vmap(lambda axis: jax.jvp(skew, (z,), (axis,))[1])(axes)
        along = skew(z) @ up + jnp.einsum("jij->i", turns)
        return mean + _solve(sigma, along[:, None])[:, 0]

    def _flow(self, z: Array, xi: Array) -> tuple[Array, Array]:
        """Φ_ξ(z) and log |det DΦ_ξ(z)|."""
        h, eye = 1 / self.substeps, jnp.eye(z.shape[0], dtype=z.dtype)

        def substep(carry: tuple[Array, Array], _) -> tuple[tuple[Array, Array], None]:
            z, log_det = carry
            middle = self._middle(z, 0.5 * h * xi)
            slope = jax.jacfwd(lambda m: self._noise(m) @ (0.5 * h * xi))(middle)
            log_det += log_abs_det((eye + slope)[None])[0] - log_abs_det((eye - slope)[None])[0]
            return (2 * middle - z, log_det), None

        start = z, jnp.zeros((), z.dtype)
        return jax.lax.scan(substep, start, length=self.substeps)[0]

    def _middle(self, z: Array, half: Array) -> Array:
        """The m with m = z + σ(m) half, by Newton's method with one matrix. The search is a constant to
        derivatives; a last step, of no length, has those of the solution (implicit function theorem)."""
        still = jax.lax.stop_gradient
        frozen, place, kick = jax.tree.map(
            lambda leaf: still(leaf) if eqx.is_inexact_array(leaf) else leaf, (self, z, half)
        )
        eye = jnp.eye(z.shape[0], dtype=z.dtype)
        slope = lambda m: jax.jacfwd(lambda y: frozen._noise(y) @ kick)(m)
        begin = place + frozen._noise(place) @ kick
        inverse = _solve(eye - slope(begin), eye)

        def go(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            m, _, count = state
            move = inverse @ (place + frozen._noise(m) @ kick - m)
            return m + move, jnp.max(jnp.abs(move)), count + 1

        def going(state: tuple[Array, Array, Array]) -> Array:
            m, move, count = state
            tolerance = jnp.finfo(m.dtype).eps ** 0.75 * (1 + jnp.max(jnp.abs(m)))
            return (count < NEWTON) & (move > tolerance)

        far = jnp.asarray(jnp.inf, z.dtype)
        m, _, _ = jax.lax.while_loop(going, go, (begin, far, jnp.asarray(0)))
        last = _solve(eye - slope(m), (z + self._noise(m) @ half - m)[:, None])[:, 0]
        return m + (last - still(last))


def _solve(matrix: Array, right: Array) -> Array:
    return solve(matrix[None], right[None])[0]
