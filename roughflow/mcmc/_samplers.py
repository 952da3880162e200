"""Samplers: transition kernels of an SDE with or without Metropolis–Hastings correction, and their chains."""

import abc
import types
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import (
    check_callable,
    check_count,
    check_fields,
    check_instance,
    check_key,
    check_memory,
    check_number,
    finite_array,
    is_traced,
    warn,
)
from .._linear import log_abs_det, solve
from .._programs import jit
from .._show import count, is_known, table
from ..faq import see
from ..flow import AbstractScheme, EulerMaruyama
from ..sde import (
    AbstractSDE,
    LogDensity,
    Noise,
    TargetedSDE,
    apply_noise,
    as_target,
    known_density,
    noise_diagonal,
    noise_dimension,
    noise_log_det,
    noise_matrix,
    plain_noise,
    solve_noise,
)


class SamplerState(eqx.Module):
    """The position of a chain."""

    z: Array


class LocalNoise(eqx.Module):
    """The noise σ at the position of a chain."""

    sigma: Noise
    log_det: Array


class AdjustedState(SamplerState):
    """The position of a chain, and everything needed for a step from or to this position: the log density,
    the drift σ · pull + rest, and σ if it depends on the position. A constant σ is not included, because each
    chain would carry a copy."""

    log_density: Array
    pull: Array
    rest: Array | None
    noise: LocalNoise | None


class SamplerInfo(eqx.Module):
    """Whether a step was accepted, and its acceptance probability."""

    accepted: Array
    acceptance: Array


class AbstractSampler(eqx.Module):
    """A Markov chain with methods `init(z)` and `step(key, state) -> (state, info)`, for one point z of shape
    `(d,)`."""

    sde: eqx.AbstractVar[AbstractSDE]
    dt: eqx.AbstractVar[float | Array]

    def __check_init__(self):
        check_fields(self)
        if jnp.ndim(self.dt):
            raise ValueError(f"dt must be one number, got an array of shape {jnp.shape(self.dt)}")
        check_number("dt", self.dt, above=0)

    @abc.abstractmethod
    def init(self, z: Array) -> SamplerState:
        """The state of a chain that starts at z."""

    @abc.abstractmethod
    def step(self, key: PRNGKeyArray, state: SamplerState) -> tuple[SamplerState, SamplerInfo]:
        """One step, at the cost of one gradient of the log density."""

    @abc.abstractmethod
    def check(self, z: Array) -> None:
        """Raise an error if starting points or the target are invalid."""


class UnadjustedSampler(AbstractSampler):
    """A sampler that accepts every step of a numerical scheme for the SDE. It is fast, but has a
    discretisation bias that grows with `dt`.

    **Arguments:**

    - `sde`: any SDE whose stationary distribution is the target.
    - `dt`: the step size.
    - `scheme`: `rf.flow.EulerMaruyama()`, or `rf.flow.LinearlyImplicitEuler()` for stiff targets.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sampler = rf.UnadjustedSampler(rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2), dt=0.1)
    state = sampler.init(jnp.zeros(2))
    state, info = sampler.step(jax.random.key(0), state)
    ```
    """

    sde: AbstractSDE
    dt: float | Array
    scheme: AbstractScheme = EulerMaruyama()

    def check(self, z: Array) -> None:
        check_start("UnadjustedSampler", self.sde, z, square=False)
        if not is_traced(z):
            self.scheme.check(self.sde, jnp.reshape(z, (-1, z.shape[-1]))[0])

    def init(self, z: Array) -> SamplerState:
        return SamplerState(z)

    def step(self, key: PRNGKeyArray, state: SamplerState) -> tuple[SamplerState, SamplerInfo]:
        key_noise, key_batch = jax.random.split(key)
        z, t = state.z, jnp.zeros((), state.z.dtype)
        sde = with_minibatches(self.sde, key_batch)
        dt = jnp.asarray(self.dt, z.dtype)
        count = noise_dimension(sde, z.shape[0])
        increment = jnp.sqrt(dt) * jax.random.normal(key_noise, (count,), z.dtype)
        one = jnp.ones((), z.dtype)
        return SamplerState(self.scheme.step(sde, t, dt, z, increment)), SamplerInfo(one == 1, one)


class AdjustedSampler(AbstractSampler):
    """A sampler that proposes Euler–Maruyama steps, with Metropolis–Hastings correction:

        q(y | z) = N(y; z + μ(z) dt, dt σσᵀ(z)),     a = min(1, p(y) q(z | y)/p(z) q(y | z)).

    σ may depend on the state; for constant σ the sampler is MALA. The stationary distribution is exactly p
    for any dt.

    **Arguments:** `sde` is an `rf.targeted_sde` with as many noise components as dimensions, and `dt` is the
    step size.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    cauchy = lambda z: -jnp.log1p(z[0] ** 2)
    sde = rf.targeted_sde(cauchy, lambda t, z: jnp.sqrt(1 + z**2)[:, None])
    sampler = rf.AdjustedSampler(sde, dt=1.0)
    chain = rf.sample_chain(sampler, jnp.zeros(1), key=jax.random.key(0), num_steps=1000)
    ```
    """

    sde: TargetedSDE
    dt: float | Array

    def __check_init__(self):
        check_adjustable("AdjustedSampler", self.sde)

    def check(self, z: Array) -> None:
        check_start("AdjustedSampler", self.sde, z, square=True)
        # A constant σ is never inverted during sampling, so a singular one would go unnoticed.
        first = jnp.reshape(z, (-1, z.shape[-1]))[0]
        sigma = plain_noise(self.sde.noise(jnp.zeros((), z.dtype), first))
        entries = sigma if isinstance(sigma, jax.Array) else noise_diagonal(sigma)[:, None]
        if is_traced(z) or is_traced(entries):
            return
        if bool(jnp.any(jnp.all(entries == 0, axis=1))):
            message = f"needs a nonsingular σ, got a singular one at the start {first.tolist()}"
            raise ValueError(f"AdjustedSampler {message}: use rf.UnadjustedSampler" + see("no-adjustment"))

    def init(self, z: Array) -> AdjustedState:
        t = jnp.zeros((), z.dtype)
        log_density, slope = jax.value_and_grad(as_target(known_density(self.sde)))(z)
        spread, rest = self.sde.spread(t, z), self.sde.turn(t, z, slope)
        if spread.correction is None:
            return AdjustedState(z, log_density, spread.pull(slope), rest, None)
        rest = spread.correction if rest is None else spread.correction + rest
        noise = LocalNoise(spread.sigma, noise_log_det(spread.sigma))
        return AdjustedState(z, log_density, spread.pull(slope), rest, noise)

    def step(self, key: PRNGKeyArray, state: SamplerState) -> tuple[AdjustedState, SamplerInfo]:
        assert isinstance(state, AdjustedState)
        key_move, key_accept = jax.random.split(key)
        dt = jnp.asarray(self.dt, state.z.dtype)
        kick = jnp.sqrt(dt) * jax.random.normal(key_move, state.z.shape, state.z.dtype)
        # All quantities are in units of the noise, in which q has covariance dt I.
        move = dt * state.pull + kick
        sigma = self._sigma(state)
        y = state.z + apply_noise(sigma, move)
        there = self.init(y if state.rest is None else y + dt * state.rest)
        log_ratio = there.log_density - state.log_density
        if state.noise is not None and there.noise is not None:
            log_ratio += state.noise.log_det - there.noise.log_det
            move = solve_noise(there.noise.sigma, there.z - state.z + dt * _known(there.rest))
        elif state.rest is not None:
            move += solve_noise(sigma, dt * (state.rest + _known(there.rest)))
        back = move + dt * there.pull  # minus the noise of the reverse move
        log_ratio -= 0.5 * jnp.sum((back - kick) * (back + kick)) / dt
        return accept(key_accept, log_ratio, there, state)

    def _sigma(self, state: AdjustedState) -> Noise:
        if state.noise is not None:
            return state.noise.sigma
        return plain_noise(self.sde.noise(jnp.zeros((), state.z.dtype), state.z))


def _known(rest: Array | None) -> Array:
    assert rest is not None
    return rest


State = TypeVar("State", bound=SamplerState)


def accept(key: PRNGKeyArray, log_ratio: Array, there: State, here: State) -> tuple[State, SamplerInfo]:
    """Return the new state with probability min(1, a), else the old one. The new state is rejected if log a
    is not finite."""
    acceptance = jnp.where(jnp.isfinite(log_ratio), jnp.exp(jnp.minimum(log_ratio, 0)), 0)
    accepted = jax.random.uniform(key, (), acceptance.dtype) < acceptance
    new = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), there, here)
    return new, SamplerInfo(accepted, acceptance)


def check_adjustable(name: str, sde: AbstractSDE) -> None:
    """Raise an error if the stationary log density of an SDE is unknown or is estimated from minibatches."""
    if not isinstance(sde, TargetedSDE):
        message = f"{name} needs an SDE from rf.targeted_sde, got {type(sde).__name__}"
        raise TypeError(message + see("no-adjustment"))
    if sde.log_density is None:
        raise TypeError(
            f"{name} needs the log density, but its target has only a score: use rf.UnadjustedSampler"
            + see("no-adjustment")
        )
    if isinstance(sde.log_density, Minibatch):
        message = f"{name} needs the full log density, got rf.mcmc.Minibatch: use rf.UnadjustedSampler"
        raise TypeError(message + see("no-adjustment"))


def check_start(name: str, sde: AbstractSDE, z: Array, *, square: bool) -> None:
    """Raise an error if starting points or the target are invalid. With `square`, σ must be square."""
    if isinstance(sde, TargetedSDE) and sde.log_density is not None and sde.dimension in (None, z.shape[-1]):
        _check_log_density(sde.log_density, jnp.zeros(z.shape[-1], z.dtype))
    count = noise_dimension(sde, z.shape[-1], f"z0 has dimension {z.shape[-1]}")
    if square and count != z.shape[-1]:
        raise ValueError(
            f"{name} needs as many noise components as dimensions, got σ of shape ({z.shape[-1]}, {count}): "
            "use rf.UnadjustedSampler" + see("no-adjustment")
        )
    if isinstance(sde, TargetedSDE) and not is_traced(z):
        _check_target(sde, jnp.reshape(z, (-1, z.shape[-1])))


def _check_log_density(log_density: LogDensity, z: Array) -> None:
    """Raise an error unless a log-density can be differentiated at a point of this shape. JAX clamps indices
    that are out of range; therefore plain functions are also called with a NumPy array."""
    try:
        jax.eval_shape(jax.grad(as_target(log_density)), z)
        if isinstance(log_density, types.FunctionType):
            _raise_index_error(log_density, np.zeros(z.shape))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if reason.startswith("log_density must"):
            raise
        message = f"log_density, which must use jax.numpy, fails for z of shape {z.shape}: {reason}"
        raise ValueError(message + see("shapes")) from error


def _raise_index_error(function: Callable, z: np.ndarray) -> None:
    try:
        with np.errstate(all="ignore"):
            function(z)
    except IndexError:
        raise
    except Exception:
        return  # the function requires JAX arrays


def _check_target(sde: TargetedSDE, z: Array) -> None:
    if sde.log_density is not None:
        values = jax.vmap(as_target(sde.log_density))(z)
        bad = jnp.flatnonzero(~jnp.isfinite(values))
        if bad.size:
            i = int(bad[0])
            message = f"log_density is {values[i]} at the start {z[i]}: start where it is finite"
            raise ValueError(message + see("refused-start"))
    if sde.skew is None:
        return
    turn = sde.skew(jnp.zeros((), z.dtype), z[0])
    if turn.shape != (z.shape[1],) * 2 or not jnp.allclose(
        turn, -turn.T, atol=1e-6 * (1 + jnp.max(jnp.abs(turn)))
    ):
        raise ValueError(
            f"skew must return a {z.shape[1]} × {z.shape[1]} matrix with Qᵀ = −Q, got {turn.tolist()}"
            + see("skew-matrix")
        )


class Minibatch(eqx.Module):
    """The log density log p(z) + Σᵢ log p(dataᵢ | z), which `rf.UnadjustedSampler` estimates from a new
    minibatch of size n in each step:

        log p(z) + N/n Σ_{i in batch} log p(dataᵢ | z),

    for N rows of data. The gradient of this estimate is unbiased (Welling & Teh 2011). A call returns the
    full sum.

    **Arguments:**

    - `log_prior`: `z -> ()`.
    - `log_likelihood`: `(z, row) -> ()`, the log-likelihood of one row of data.
    - `data`: a pytree of arrays with one row per observation.
    - `batch_size`: the size n of a minibatch.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    data = 1 + jax.random.normal(jax.random.key(0), (1000,))
    log_prior, log_term = lambda z: -0.5 * z @ z, lambda z, y: -0.5 * (y - z[0]) ** 2
    target = rf.mcmc.Minibatch(log_prior, log_term, data, batch_size=50)
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

    def draw(self, *, key: PRNGKeyArray) -> Callable[[Array], Array]:
        """The estimate from one minibatch, drawn with replacement."""
        count = len(jax.tree.leaves(self.data)[0])
        chosen = jax.random.randint(key, (self.batch_size,), 0, count)
        rows = jax.tree.map(lambda leaf: leaf[chosen], self.data)
        return lambda z: self.log_prior(z) + count / self.batch_size * self._sum(z, rows)

    def _sum(self, z: Array, rows: Any) -> Array:
        return jnp.sum(jax.vmap(self.log_likelihood, in_axes=(None, 0))(z, rows))


def with_minibatches(tree: Any, key: PRNGKeyArray) -> Any:
    """Replace each `Minibatch` in the SDE of a sampler by a new estimate."""
    is_target = lambda node: isinstance(node, Minibatch)
    return jax.tree.map(lambda node: node.draw(key=key) if is_target(node) else node, tree, is_leaf=is_target)


MAX_NEWTON_STEPS = 8  # maximum number of Newton iterations
DIFFERENT_SOLUTION = 1e-3  # points further apart, relative to the noise, count as different solutions


class GradientState(SamplerState):
    """The position of a chain, its log density and gradient. The state does not depend on σ or dt, so both
    may change while a chain runs."""

    log_density: Array
    gradient: Array


class FlowSampler(AbstractSampler):
    """A sampler that proposes the end point of a random ODE and applies a Metropolis–Hastings–Green
    correction.

    Given ξ, the ODE dy/ds = σ(y) ξ, 0 ≤ s ≤ 1, maps z to y = Φ_ξ(z), and −ξ maps y back to z. With ξ ~ N(dt
    m(z), dt I) the proposal is accepted with probability min(1, a),

        a = p(y) N(−ξ; dt m(y), dt I) |det DΦ_ξ(z)| / p(z) N(ξ; dt m(z), dt I),

    which leaves p invariant for any σ, m and dt (Green 1995). The sampler sets m to σ⁻¹ times the
    Stratonovich drift of the SDE, that is, m = ½(σᵀ∇log p + div σ), plus σ⁻¹(Q∇log p + div Q) if there is a
    skew Q. The proposal is then a step of that SDE to first order in dt. For constant σ the sampler is MALA.
    If σ(T(u)) is the derivative of a map T at u, it is MALA for u, up to solver error. `rf.AdjustedSampler`
    proposes along straight lines instead, which limits the step size where σ varies quickly.

    The ODE is solved with `num_substeps` steps of the implicit midpoint method. It is reversible and its
    Jacobian determinant is known, so solver errors do not bias the chain. Newton's method solves the implicit
    equations up to rounding error. A move is rejected if Newton's method fails in either direction, or if the
    reverse move does not return to z. A step costs one gradient of the log density.

    **Arguments:** `sde` is an `rf.targeted_sde` with as many noise components as dimensions, `dt` is the step
    size, and `num_substeps` is the number of steps of the ODE solver.

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
        """A proposal, log a (−inf if the solve failed), and ξ; all are differentiable."""
        dt = jnp.asarray(self.dt, state.z.dtype)
        mean = dt * self._mean(state)
        xi = mean + jnp.sqrt(dt) * jax.random.normal(key, state.z.shape, state.z.dtype)
        y, log_det, found = self._flow(state.z, xi)
        # If the solve failed, use the current position, whose derivatives are finite.
        there = self.init(jnp.where(found, y, state.z))
        forth = -0.5 * jnp.sum((xi - mean) ** 2) / dt
        home = -0.5 * jnp.sum((xi + dt * self._mean(there)) ** 2) / dt
        log_ratio = there.log_density - state.log_density + jnp.where(found, log_det, 0) + home - forth
        return there, jnp.where(found, log_ratio, -jnp.inf), xi

    def _noise(self, z: Array) -> Array:
        return noise_matrix(self.sde.noise(jnp.zeros((), z.dtype), z))

    def _mean(self, state: GradientState) -> Array:
        """m(z) as defined in the docstring of the class."""
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
        """Solve m = z + σ(m) half for m by Newton's method. Return m, and whether the method converged. The
        tolerance in each coordinate is close to rounding error, because a larger one would bias the chain.

        The iterations are not differentiated; a final step provides the derivatives of the solution (implicit
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


FEW_ACCEPTED = 0.01  # mean acceptance below which there is a warning
MAX_SHOWN_COORDINATES = 8  # maximum number of coordinates in the printed summary


class Chain(eqx.Module):
    """The result of `rf.sample_chain`. `numpy.asarray(chain)` returns `chain.samples`.

    - `samples`: `(draws, d)`, or `(chains, draws, d)` for several starting points.
    - `acceptance`: mean acceptance probability of each chain.
    - `num_gradients`: number of gradients of the log density per chain.
    """

    samples: Array
    acceptance: Array
    num_gradients: int

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        del copy
        return np.asarray(self.samples, dtype)

    def __repr__(self) -> str:
        if not is_known(self.samples, self.acceptance):
            return eqx.tree_pformat(self)
        samples, dimension = self.samples, self.samples.shape[-1]
        samples = np.asarray(samples[None] if samples.ndim == 2 else samples)[..., :MAX_SHOWN_COORDINATES]
        size = f"{count(samples.shape[0], 'chain')} × {count(samples.shape[1], 'draw')} × {dimension}-D"
        accepted = np.asarray(self.acceptance)
        spread = f" ({accepted.min():.2f} to {accepted.max():.2f})" if np.ptp(accepted) > 0.005 else ""
        title = (
            f"Chain: {size}, acceptance {accepted.mean():.2f}{spread}, {self.num_gradients:,} gradients each"
        )
        with np.errstate(all="ignore"):  # diverged draws are included, without warnings
            rows = [
                (f"z[{i}]", f"{z.mean():.4g}", f"{z.std():.4g}", f"{rank_rhat(z):.3f}")
                for i, z in enumerate(np.moveaxis(samples, -1, 0).astype(float))
            ]
        more = (
            [f"  … and {dimension - MAX_SHOWN_COORDINATES} more"] if dimension > MAX_SHOWN_COORDINATES else []
        )
        return "\n".join([title, *table(("", "mean", "sd", "R-hat"), rows), *more])


def rank_rhat(draws: np.ndarray) -> float:
    """Rank-normalised R-hat of one coordinate `(chains, draws)`: the maximum of bulk and folded R-hat
    (Vehtari et al. 2021). It is near 1 if all chains have the same location and scale, and NaN with fewer
    than four draws per chain."""
    half = draws.shape[1] // 2
    if half < 2 or not np.isfinite(draws).all():
        return float("nan")
    parts = np.concatenate([draws[:, :half], draws[:, -half:]])
    return max(_rhat(parts), _rhat(np.abs(parts - np.median(parts))))


def _rhat(parts: np.ndarray) -> float:
    ranks = scipy.stats.rankdata(parts).reshape(parts.shape)
    normal = scipy.special.ndtri((ranks - 0.375) / (parts.size + 0.25))
    within, between = normal.var(axis=1, ddof=1).mean(), normal.mean(axis=1).var(ddof=1)
    if within == 0:
        return float("inf" if between else "nan")
    return float(np.sqrt(1 - 1 / parts.shape[1] + between / within))


def sample_chain(
    sampler: AbstractSampler | AbstractSDE,
    z0: Array,
    *,
    key: PRNGKeyArray,
    num_steps: int,
    dt: float | None = None,
    burn_in: int = 0,
    thin: int = 1,
) -> Chain:
    """Run one Markov chain from each row of `z0`, all in parallel.

    **Arguments:**

    - `sampler`: an `rf.mcmc.FlowSampler`, `rf.AdjustedSampler` or `rf.UnadjustedSampler`; an SDE is
      equivalent to `rf.UnadjustedSampler(sde, dt)`.
    - `z0`: starting points, `(d,)` or `(chains, d)`; samples of a trained flow give a warm start.
    - `num_steps`: number of steps after burn-in.
    - `dt`: step size, if `sampler` is an SDE.
    - `burn_in`: number of initial steps that are discarded.
    - `thin`: thinning interval; the last of every `thin` states is kept.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    chain = rf.sample_chain(sde, jnp.zeros((4, 2)), key=jax.random.key(0), num_steps=1000, dt=0.05)
    chain.samples.shape  # (4, 1000, 2)
    ```
    """
    num_steps, burn_in = check_count("num_steps", num_steps), check_count("burn_in", burn_in, least=0)
    thin = check_count("thin", thin)
    if thin > num_steps:
        raise ValueError(f"thin must be at most num_steps, {num_steps}, got {thin}")
    wanted = "a sampler such as rf.AdjustedSampler(sde, dt), or an SDE"
    check_instance("sampler", sampler, AbstractSampler | AbstractSDE, wanted)
    if isinstance(sampler, AbstractSDE):
        if dt is None:
            raise TypeError("sample_chain needs dt, the step size, for an SDE")
        sampler = UnadjustedSampler(sampler, dt)
    elif dt is not None:
        raise TypeError("the sampler already has a dt: omit dt, or pass the SDE instead of the sampler")
    z0 = finite_array("z0", z0)
    if z0.ndim not in (1, 2) or not z0.size:
        raise ValueError(f"z0 must have shape (d,) or (chains, d), got {z0.shape}")
    check_memory(f"num_steps={num_steps}", num_steps // thin * z0.size)
    sampler.check(z0)
    starts = jnp.atleast_2d(z0)
    samples, acceptance = _run(sampler, starts, check_key(key), burn_in, num_steps, thin)
    if z0.ndim == 1:
        samples, acceptance = samples[0], acceptance[0]
    _warn_of_bad_chains(samples, acceptance)
    return Chain(samples, acceptance, burn_in + num_steps)


def _warn_of_bad_chains(samples: Array, acceptance: Array) -> None:
    """Warn if chains diverged, or hardly ever move."""
    if is_traced(samples):
        return
    diverged = int(jnp.sum(~jnp.all(jnp.isfinite(samples), axis=(-2, -1))))
    still = int(jnp.sum(acceptance < FEW_ACCEPTED))
    advice = see("diverging-chains")
    if diverged:
        warn(f"{diverged} of {acceptance.size} chains diverged: reduce dt{advice}")
    if still:
        few = f"accept fewer than {FEW_ACCEPTED:.0%} of the proposals"
        remedy = "reduce dt, or start where the log density has a finite gradient"
        warn(f"{still} of {acceptance.size} chains {few}: {remedy}{advice}")


@jit
def _run(
    sampler: AbstractSampler, starts: Array, key: PRNGKeyArray, burn_in: int, num_steps: int, thin: int
) -> tuple[Array, Array]:
    def each(key: PRNGKeyArray) -> PRNGKeyArray:
        return jax.random.split(key, len(starts))

    def block(key: PRNGKeyArray) -> PRNGKeyArray:
        return jax.vmap(each)(jax.random.split(key, thin))

    def advance(state: SamplerState, keys: PRNGKeyArray) -> tuple[SamplerState, Array]:
        state, info = jax.vmap(sampler.step)(keys, state)
        return state, info.acceptance

    def record(state: SamplerState, keys: PRNGKeyArray) -> tuple[SamplerState, tuple[Array, Array]]:
        state, acceptance = jax.lax.scan(advance, state, keys, unroll=thin == 1)
        return state, (state.z, jnp.mean(acceptance, axis=0))

    key_burn, key_keep = jax.random.split(key)
    state = jax.vmap(sampler.init)(starts)
    if burn_in:
        burn = jax.random.split(key_burn, burn_in)
        state, _ = jax.lax.scan(lambda state, key: advance(state, each(key)), state, burn)
    keys = jax.random.split(key_keep, num_steps // thin)
    if thin == 1:
        # Splitting all keys at once is faster than splitting them step by step, and the keys need no more
        # memory than the draws.
        _, (samples, acceptance) = jax.lax.scan(record, state, jax.vmap(block)(keys))
    else:
        _, (samples, acceptance) = jax.lax.scan(lambda state, key: record(state, block(key)), state, keys)
    return jnp.swapaxes(samples, 0, 1), jnp.mean(acceptance, axis=0)
