"""SDEs with a given stationary distribution."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_callable, check_count, check_number, check_positive, finite_array
from ..faq import see
from ._correction import Spread, spread_at, turn_at
from ._networks import GIVEN, MLP, Activation, ConstantDiffusion, tanh
from ._sde import AbstractItoSDE, Diffusion, ItoSDE, equation, noise_part, part

LogDensity = Callable[[Array], Array]
Score = Callable[[Array], Array]
Skew = Callable[[Array, Array], Array]


class TargetedSDE(AbstractItoSDE):
    """The result of `rf.targeted_sde`. σ and Q are stored once and used by drift and diffusion, so training
    changes both consistently."""

    log_density: LogDensity | None = eqx.field(metadata=GIVEN)
    diffusion: Diffusion
    skew: Skew | None
    score: Score | None = eqx.field(metadata=GIVEN, default=None)

    def __init__(
        self,
        log_density: LogDensity | None,
        diffusion: Diffusion,
        skew: Skew | None = None,
        score: Score | None = None,
    ):
        self.log_density = log_density
        self.diffusion = diffusion
        self.skew = skew
        self.score = score

    def __check_init__(self):
        if (self.log_density is None) == (self.score is None):
            raise TypeError("pass exactly one of log_density and score")

    def equation(self) -> str:
        plain, turned = "½ σσᵀ ∇log p + ½ div(σσᵀ)", "(½ σσᵀ + Q) ∇log p + div(½ σσᵀ + Q)"
        return equation(f"[{plain if self.skew is None else turned}]", self.diffusion, sigma="σ")

    def parts(self) -> list[tuple[str, str]]:
        target = ("p", part(self.log_density)) if self.score is None else ("∇log p", part(self.score))
        skew = [] if self.skew is None else [("Q", part(self.skew))]
        return [target, *noise_part(self.diffusion), *skew]

    def drift(self, t: Array, z: Array) -> Array:
        slope = self._slope(z)
        drift, turn = self.spread(t, z).drift(slope), self.turn(t, z, slope)
        return drift if turn is None else drift + turn

    def spread(self, t: Array, z: Array) -> Spread:
        """σ, and those of its derivatives that enter the drift."""
        return spread_at(lambda y: self.noise(t, y), z)

    def turn(self, t: Array, z: Array, slope: Array) -> Array | None:
        """Q ∇log p + div Q, or None without Q."""
        skew = self.skew
        return None if skew is None else turn_at(lambda y: skew(t, y), z, slope)

    def _slope(self, z: Array) -> Array:
        """∇log p(z)."""
        if self.score is None:
            return jax.grad(as_target(known_density(self)))(z)
        slope = jnp.asarray(still(self.score)(z))
        if slope.shape != z.shape:
            raise ValueError(f"score must return shape {z.shape} for z of that shape, got {slope.shape}")
        return slope


def targeted_sde(
    log_density: LogDensity | None = None,
    diffusion: Diffusion | None = None,
    skew: Skew | None = None,
    *,
    score: Score | None = None,
) -> TargetedSDE:
    """The SDE with noise σ that leaves p ∝ exp(log_density) invariant, for any σ and Q:

        dZ = [(D + Q) ∇log p + Γ] dt + σ dB,     D = ½ σσᵀ,     Γᵢ = Σⱼ ∂ⱼ(D + Q)ᵢⱼ

    (Ma, Chen & Fox 2015), in the Itô sense. σ and Q may be networks. They determine how fast the SDE
    converges to p, but do not change p.

    **Arguments:**

    - `log_density`: `z -> ()`, up to a constant.
    - `diffusion`: σ, `(t, z) -> (d, m)`, as for `rf.ItoSDE`.
    - `skew`: Q, `(t, z) -> (d, d)` with Qᵀ = −Q, or None; `rf.sde.SkewNetwork` is trainable.
    - `score`: ∇log p, `z -> (d,)`, instead of `log_density`, for example if it was learned from data.
      Samplers with Metropolis–Hastings correction need `log_density`.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    cauchy = lambda z: -jnp.log1p(z[0] ** 2)
    sde = rf.targeted_sde(cauchy, lambda t, z: jnp.sqrt(1 + z**2)[:, None])
    sde.drift(0.0, jnp.array([3.0]))  # 0: this σ needs no drift
    # Leave N(0, I) invariant:
    rf.targeted_sde(diffusion=rf.ConstantDiffusion(jnp.eye(2)), score=lambda z: -z)
    ```
    """
    if log_density is not None:
        check_callable("log_density", log_density, "z -> ()")
    if score is not None:
        check_callable("score", score, "z -> (d,)")
    if skew is not None:
        check_callable("skew", skew, "(t, z) -> (d, d)")
    if diffusion is None:
        raise TypeError("targeted_sde needs a diffusion, such as rf.ConstantDiffusion(jnp.eye(2))")
    return TargetedSDE(log_density, diffusion, skew, score)


def known_density(sde: TargetedSDE) -> LogDensity:
    """The log-density of the target; raises a `TypeError` if only the score is known."""
    if sde.log_density is None:
        raise TypeError(
            "this needs the log density, but the target has only a score: use "
            "rf.UnadjustedSampler, or pass log_density to rf.targeted_sde" + see("no-adjustment")
        )
    return sde.log_density


def overdamped_langevin(
    log_density: LogDensity, dimension: int, *, scale: float | Array = 1.0
) -> TargetedSDE:
    """Overdamped Langevin dynamics dZ = ½ SSᵀ ∇log p dt + S dB. S = `scale` is a number, the diagonal `(d,)`
    of a matrix, or a matrix (a preconditioner).

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.overdamped_langevin(lambda z: -0.5 * z @ z, 2)
    ```
    """
    check_count("dimension", dimension)
    scale = finite_array("scale", scale)
    if scale.ndim and scale.shape[0] != dimension:
        wanted = f"a number, or have shape ({dimension},) or ({dimension}, m)"
        raise ValueError(f"scale must be {wanted} in {dimension} dimensions, got {scale.shape}")
    return targeted_sde(
        log_density, ConstantDiffusion(jnp.full(dimension, scale) if scale.ndim == 0 else scale)
    )


class WithMomenta(eqx.Module):
    """The log-density log π(q) − p²/2M of the state (q, p)."""

    log_density: LogDensity
    mass: float

    def __call__(self, z: Array) -> Array:
        q, p = jnp.split(z, 2)
        return as_target(self.log_density)(q) - 0.5 * (p @ p) / self.mass


class Rotation(eqx.Module):
    """Q = [[0, −I], [I, 0]], for which Q ∇log p is the right-hand side of Hamilton's equations."""

    def __call__(self, t: Array, z: Array) -> Array:
        del t
        zero, one = jnp.zeros((z.shape[0] // 2,) * 2, z.dtype), jnp.eye(z.shape[0] // 2, dtype=z.dtype)
        return jnp.block([[zero, -one], [one, zero]])


def underdamped_langevin(
    log_density: LogDensity, dimension: int, *, friction: float = 1.0, mass: float = 1.0
) -> TargetedSDE:
    """Underdamped Langevin dynamics with friction C and mass M: the state is (q, p), of size 2d, and

        dq = p/M dt,     dp = (∇log π(q) − C p/M) dt + √(2C) dB,

    the SDE of `rf.targeted_sde` with D = diag(0, C) and Q = [[0, −I], [I, 0]] for the distribution π(q)
    exp(−p²/2M).

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.underdamped_langevin(lambda q: -0.5 * q @ q, 2, friction=2.0)
    sde.drift(0.0, jnp.array([1.0, 0.0, 0.0, 3.0]))  # [0, 3, -1, -6]
    ```
    """
    check_count("dimension", dimension)
    check_callable("log_density", log_density, "z -> ()")
    check_positive("friction", friction)
    check_positive("mass", mass)
    return targeted_sde(WithMomenta(log_density, mass), _kicks(dimension, friction), Rotation())


def sghmc(
    log_density: LogDensity,
    dimension: int,
    *,
    friction: float = 1.0,
    gradient_noise: float = 0.0,
    mass: float = 1.0,
) -> ItoSDE:
    """`rf.underdamped_langevin` for minibatch gradients: SGHMC (Chen, Fox & Guestrin 2014).

    A minibatch adds noise of variance 2B per unit of time to dp, where B = `gradient_noise`. Therefore the
    noise of the SDE is reduced to √(2(C − B)) dB, while the friction stays C.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.sde.sghmc(lambda q: -0.5 * q @ q, 2, friction=2.0, gradient_noise=0.5)
    ```
    """
    check_number("gradient_noise", gradient_noise)
    if not 0 <= gradient_noise < friction:
        raise ValueError(f"gradient_noise must lie between 0 and friction, got {gradient_noise}")
    exact = underdamped_langevin(log_density, dimension, friction=friction, mass=mass)
    return ItoSDE(exact.drift, _kicks(dimension, friction - gradient_noise))


def _kicks(dimension: int, friction: float) -> ConstantDiffusion:
    """A diffusion that acts on the momenta only."""
    kick = (2 * friction) ** 0.5 * jnp.eye(dimension)
    return ConstantDiffusion(jnp.concatenate([jnp.zeros((dimension, dimension)), kick]))


class SkewNetwork(eqx.Module):
    """A skew-symmetric matrix Q(t, z), computed by a network, for `rf.targeted_sde`. It adds rotation without
    noise.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    skew = rf.sde.SkewNetwork(3, width=16, key=jax.random.key(0))
    skew(0.0, jnp.ones(3)) + skew(0.0, jnp.ones(3)).T  # zero
    ```
    """

    network: MLP

    def __init__(
        self,
        dimension: int,
        width: int = 64,
        depth: int = 1,
        activation: Activation = tanh,
        *,
        time_dependent: bool = False,
        scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        check_count("dimension", dimension)
        size = dimension * (dimension - 1) // 2
        self.network = MLP(
            dimension, size, width, depth, activation, time_dependent=time_dependent, scale=scale, key=key
        )

    def __call__(self, t: Array, z: Array) -> Array:
        lower = jnp.tril_indices(z.shape[0], -1)
        matrix = jnp.zeros((z.shape[0],) * 2, z.dtype).at[lower].set(self.network(t, z))
        return matrix - matrix.T


def still(target: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The same function, with gradients stopped at the arrays inside it, such as the data of a posterior."""
    fix = lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(fix, target)


def as_target(log_density: LogDensity) -> LogDensity:
    """`still(log_density)`, with a check that it returns a scalar."""
    log_density = still(log_density)

    def checked(z: Array) -> Array:
        value = jnp.asarray(log_density(z))
        if value.shape != ():
            raise ValueError(
                f"log_density must return one number for z of shape {z.shape}, got {value.shape}"
            )
        return value

    return checked
