"""A Metropolis–Hastings sampler whose proposals follow the flow of the noise."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_count, check_positive
from .._linear import log_abs_det, solve
from ..sde import TargetedSDE, as_target, known_density, noise_matrix, solve_noise
from ._sampler import AbstractSampler, SamplerInfo, SamplerState, accept, check_adjustable, check_start

MAX_NEWTON_STEPS = 8  # maximum number of Newton iterations
DIFFERENT_SOLUTION = 1e-3  # relative to the noise: a solution further away is a different one


class GradientState(SamplerState):
    """The position of a chain, its log density and gradient. Nothing here depends on σ or dt, so both may
    change while a chain runs."""

    log_density: Array
    gradient: Array


class FlowSampler(AbstractSampler):
    """Sampler that proposes the end point of a random ODE and applies a Metropolis–Hastings–Green correction.

    Given ξ, the ODE dy/ds = σ(y) ξ, 0 ≤ s ≤ 1, maps z to y = Φ_ξ(z), and −ξ maps y back to z. With ξ ~ N(dt
    m(z), dt I) the proposal is accepted with probability min(1, a),

        a = p(y) N(−ξ; dt m(y), dt I) |det DΦ_ξ(z)| / p(z) N(ξ; dt m(z), dt I),

    which leaves p invariant for any σ, m and dt (Green 1995). Choosing m = σ⁻¹ times the Stratonovich drift
    of the SDE, that is m = ½(σᵀ∇log p + div σ), plus σ⁻¹(Q∇log p + div Q) with a skew Q, makes it a step of
    that SDE to first order in dt. For constant σ it is MALA. If σ(T(u)) is the derivative of a map T at u, it
    is MALA for u, up to solver error. `rf.AdjustedSampler` proposes along straight lines instead, which
    limits the step size where σ varies quickly.

    The ODE is solved with `num_substeps` steps of the implicit midpoint rule. The rule is reversible and its
    determinant is known, so solver errors do not bias the chain. Newton's method solves its equations to
    rounding error. A move is rejected if this fails in either direction, or if the reverse move does not
    return to z. A step costs one gradient of the log density.

    **Arguments:** `sde`, an `rf.targeted_sde` with as many noise components as dimensions; `dt`;
    `num_substeps`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    cauchy = lambda z: -jnp.log1p(z[0] ** 2)
    sampler = rf.mcmc.FlowSampler(rf.targeted_sde(cauchy, lambda t, z: jnp.sqrt(1 + z**2)[:, None]), dt=4.0)
    chain = rf.sample_chain(sampler, jnp.zeros(1), key=jax.random.key(0), num_steps=1000)
    ```
    """

    sde: TargetedSDE
    dt: float | Array
    num_substeps: int = eqx.field(static=True, default=4)

    def __check_init__(self):
        check_positive("dt", self.dt)
        check_count("num_substeps", self.num_substeps)
        check_adjustable("FlowSampler", self.sde)

    def check(self, z: Array) -> None:
        check_start("FlowSampler", self.sde, z, square=True)

    def init(self, z: Array) -> GradientState:
        return GradientState(z, *jax.value_and_grad(as_target(known_density(self.sde)))(z))

    def step(self, key: PRNGKeyArray, state: SamplerState) -> tuple[GradientState, SamplerInfo]:
        assert isinstance(state, GradientState)
        key_move, key_accept = jax.random.split(key)
        there, log_ratio, xi = self.propose(key_move, state)
        # The reverse move must be found and lead back to z; otherwise detailed balance fails. Both searches
        # use the same criteria, so rejection is equally likely in either direction.
        back, _, found = self._flow(there.z, -xi)
        reach = jnp.linalg.norm(self._noise(state.z), axis=1)
        close = DIFFERENT_SOLUTION * reach + 1e3 * jnp.finfo(back.dtype).eps * jnp.abs(state.z)
        returns = found & jnp.all(jnp.abs(back - state.z) < close)
        return accept(key_accept, jnp.where(returns, log_ratio, -jnp.inf), there, state)

    def propose(self, key: PRNGKeyArray, state: GradientState) -> tuple[GradientState, Array, Array]:
        """A proposal, log a (−inf if there is none), and ξ; all are differentiable."""
        dt = jnp.asarray(self.dt, state.z.dtype)
        mean = dt * self._mean(state)
        xi = mean + jnp.sqrt(dt) * jax.random.normal(key, state.z.shape, state.z.dtype)
        y, log_det, found = self._flow(state.z, xi)
        # Without a proposal, use the current position, whose derivatives are finite.
        there = self.init(jnp.where(found, y, state.z))
        forth = -0.5 * jnp.sum((xi - mean) ** 2) / dt
        home = -0.5 * jnp.sum((xi + dt * self._mean(there)) ** 2) / dt
        log_ratio = there.log_density - state.log_density + jnp.where(found, log_det, 0) + home - forth
        return there, jnp.where(found, log_ratio, -jnp.inf), xi

    def _noise(self, z: Array) -> Array:
        return noise_matrix(self.sde.noise(jnp.zeros((), z.dtype), z))

    def _mean(self, state: GradientState) -> Array:
        """m, as in the docstring of the class."""
        t = jnp.zeros((), state.z.dtype)
        spread, turn = self.sde.spread(t, state.z), self.sde.turn(t, state.z, state.gradient)
        mean = spread.pull(state.gradient)
        return mean if turn is None else mean + solve_noise(spread.sigma, turn)

    def _flow(self, z: Array, xi: Array) -> tuple[Array, Array, Array]:
        """Φ_ξ(z), log |det DΦ_ξ(z)|, and whether the equations were solved."""
        half, eye = 0.5 / self.num_substeps * xi, jnp.eye(z.shape[0], dtype=z.dtype)

        def substep(carry: tuple[Array, Array, Array], _) -> tuple[tuple[Array, Array, Array], None]:
            z, log_det, found = carry
            middle, solved = self._middle(z, half)
            slope = jax.jacfwd(lambda m: self._noise(m) @ half)(middle)
            log_det += log_abs_det((eye + slope)[None])[0] - log_abs_det((eye - slope)[None])[0]
            return (2 * middle - z, log_det, found & solved), None

        start = z, jnp.zeros((), z.dtype), jnp.asarray(True)
        y, log_det, found = jax.lax.scan(substep, start, length=self.num_substeps)[0]
        return y, log_det, found & jnp.all(jnp.isfinite(y)) & jnp.isfinite(log_det)

    def _middle(self, z: Array, half: Array) -> tuple[Array, Array]:
        """Solve m = z + σ(m) half for m by Newton's method: m, and whether it converged. The tolerance is
        rounding error in each coordinate, because a larger one would bias the chain.

        The iterations are not differentiated; a final step carries the derivatives of the solution (implicit
        function theorem).
        """
        still = jax.lax.stop_gradient
        frozen, place, kick = jax.tree.map(
            lambda leaf: still(leaf) if eqx.is_inexact_array(leaf) else leaf, (self, z, half)
        )
        eye = jnp.eye(z.shape[0], dtype=z.dtype)
        first = frozen._noise(place)
        reach, eps = jnp.linalg.norm(first, axis=1), jnp.finfo(z.dtype).eps

        def change(m: Array, gap: Array) -> Array:
            slope = jax.jacfwd(lambda y: frozen._noise(y) @ kick)(m)
            return _solve(eye - slope, gap[:, None])[:, 0]

        def go(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            m, _, count = state
            move = change(m, place + frozen._noise(m) @ kick - m)
            # The next error of Newton's method is about the square of this step.
            done = jnp.all(jnp.abs(move) < eps**0.6 * reach + 10 * eps * jnp.abs(m))
            return m + move, done, count + 1

        going = lambda state: ~state[1] & (state[2] < MAX_NEWTON_STEPS)
        begin = place + first @ kick, jnp.asarray(False), jnp.asarray(0)
        m, found, _ = jax.lax.while_loop(going, go, begin)
        return m + change(m, z + self._noise(m) @ half - m), found


def _solve(matrix: Array, right: Array) -> Array:
    return solve(matrix[None], right[None])[0]
