"""Transports: a velocity with the score of its distribution, and noise that preserves the distribution."""

import abc
from collections.abc import Callable
from typing import ClassVar, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from .._checks import check_count, check_fields, check_instance, check_positive, finite_array, is_traced
from ._correction import spread_at
from ._networks import GIVEN, FadingDiffusion, NoDiffusion, remaining
from ._noise import Noise
from ._sde import AbstractItoSDE, Diffusion, Drift, equation, noise_part, part


class AbstractTransport(eqx.Module):
    """A velocity v(t, z), and the score of the distribution p that it transports:

        ∇log p(t, z) = g(t, z)/(1 − t/t1),

    or g itself if `t1` is None. g is finite up to the end, where the score may be infinite.
    """

    velocity: eqx.AbstractVar[Drift]
    t1: eqx.AbstractVar[float | None]
    num_given: eqx.AbstractVar[int]  # number of given coordinates, which come last; noise must not move them

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def velocity_and_pull(self, t: Array, z: Array) -> tuple[Array, Array]:
        """v(t, z) and g(t, z), from one evaluation."""


class NormalTransport(AbstractTransport):
    """Transport from a normal distribution to data along straight lines; the velocity determines the score.

    If z ~ N(m, diag(c²)) and x ~ data are independent and v is the velocity of (1 − s) z + s x, s = t/T, then
    the distribution at time t has the score

        ∇log p(t, y) = (s T v(t, y) − y + m)/(c² (1 − s)).

    `rf.fit` with `rf.Interpolant()` returns a flow with such a transport.

    **Arguments:**

    - `velocity`: v, `(t, z) -> (d,)`, such as an `rf.sde.VelocityNetwork`.
    - `loc`, `scale`: m and c of the base, `(d,)` each.
    - `t1`: the end time T.
    - `num_given`: number of given coordinates, which come last and do not move.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    # N(0, 1) to N(0, 1): the distribution at time t has the variance a = (1 − t)² + t²
    velocity = lambda t, z: (2 * t - 1) / ((1 - t) ** 2 + t**2) * z
    transport = rf.sde.NormalTransport(velocity, jnp.zeros(1), jnp.ones(1))
    sde = rf.sde.TransportSDE(transport, rf.sde.FadingDiffusion(rf.ConstantDiffusion(jnp.eye(1))))
    ```
    """

    velocity: Drift
    loc: Array = eqx.field(metadata=GIVEN)
    scale: Array = eqx.field(metadata=GIVEN)
    t1: float
    num_given: int = eqx.field(static=True)

    def __init__(self, velocity: Drift, loc: Array, scale: Array, t1: float = 1.0, num_given: int = 0):
        check_positive("scale", scale)
        check_positive("t1", t1)
        check_count("num_given", num_given, least=0)
        loc = finite_array("loc", loc)
        if jnp.ndim(loc) != 1 or jnp.shape(loc) != jnp.shape(scale):
            raise ValueError(
                f"loc and scale must have the same shape (d,), got {jnp.shape(loc)} and {jnp.shape(scale)}"
            )
        self.velocity = velocity
        self.loc, self.scale = loc, jnp.asarray(scale, float)
        self.t1 = t1
        self.num_given = num_given

    def velocity_and_pull(self, t: Array, z: Array) -> tuple[Array, Array]:
        velocity = self.velocity(t, z)
        start = z - t * velocity  # E[z | y], because s T = t
        return velocity, (self.loc.astype(z.dtype) - start) / self.scale.astype(z.dtype) ** 2


class GivenTransport(AbstractTransport):
    """A transport with a known velocity and score, both finite at all times.

    **Arguments:** `velocity` and `score` are functions `(t, z) -> (d,)`. The score is not trained.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    # a standard normal distribution that widens to N(0, e²) over unit time
    transport = rf.sde.GivenTransport(lambda t, z: z, lambda t, z: -z * jnp.exp(-2 * t))
    sde = rf.sde.TransportSDE(transport, lambda t, z: jnp.sqrt(1 + z**2)[:, None])
    ```
    """

    velocity: Drift
    score: Drift = eqx.field(metadata=GIVEN)
    t1: None
    num_given: ClassVar[int] = 0

    def __init__(self, velocity: Drift, score: Drift):
        self.velocity = velocity
        self.score = score
        self.t1 = None

    def velocity_and_pull(self, t: Array, z: Array) -> tuple[Array, Array]:
        return self.velocity(t, z), self.score(t, z)


class TransportSDE(AbstractItoSDE):
    """The Itô SDE with noise σ(t, z), for any σ, whose distribution at every time is that of dZ = v(t, Z) dt:

        dZ = [v + ½ div(σσᵀ) + ½ σσᵀ ∇log p] dt + σ dB

    (Albergo, Boffi & Vanden-Eijnden 2023). If velocity and score are learned, errors of the velocity move
    samples away from p. The score term moves them back to where p is large, so the distribution is more
    accurate with noise than without.

    For a transport along straight lines the score has a factor 1/(1 − t/T). With an `rf.sde.FadingDiffusion`
    the drift is finite up to T; with any other σ the drift is infinite at T.

    Velocity and score come from one evaluation of one network, so training changes both.

    **Arguments:**

    - `transport`: a transport, such as an `rf.sde.NormalTransport`.
    - `diffusion`: σ, `(t, z) -> (d, m)`, as for `rf.ItoSDE`; None for no noise.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    transport = rf.sde.GivenTransport(lambda t, z: 0 * z, lambda t, z: -z)  # N(0, I) at all times
    sde = rf.sde.TransportSDE(transport, rf.ConstantDiffusion(jnp.eye(2)))
    sde.drift(0.0, jnp.ones(2))  # −½ z: an Ornstein–Uhlenbeck process
    ```
    """

    transport: AbstractTransport
    diffusion: Diffusion

    def __init__(self, transport: AbstractTransport, diffusion: Diffusion | None = None):
        check_instance(
            "transport", transport, AbstractTransport, "a transport such as rf.sde.NormalTransport"
        )
        self.transport = transport
        self.diffusion = NoDiffusion() if diffusion is None else diffusion

    def __check_init__(self):
        if not isinstance(self.diffusion, FadingDiffusion) or self.transport.t1 is None:
            return
        ends = self.transport.t1, self.diffusion.t1
        if not any(is_traced(end) for end in ends) and ends[0] != ends[1]:
            raise ValueError(f"the transport ends at t1 = {ends[0]}, but its noise fades until {ends[1]}")

    def equation(self) -> str:
        if isinstance(self.diffusion, NoDiffusion):
            return equation("v(t, Z)", self.diffusion)
        return equation("[v + ½ div(σσᵀ) + ½ σσᵀ ∇log p]", self.diffusion, sigma="σ")

    def parts(self) -> list[tuple[str, str]]:
        return [("v", part(self.transport)), *noise_part(self.diffusion)]

    def drift(self, t: Array, z: Array) -> Array:
        if isinstance(self.diffusion, NoDiffusion):
            return self.transport.velocity(t, z)
        velocity, pull = self.transport.velocity_and_pull(t, z)
        noise, square, quotient = self._faded(t, z)
        return velocity + spread_at(noise, z).drift(quotient * pull, square)

    def _faded(self, t: Array, z: Array) -> tuple[Callable[[Array], Noise], Array, Array]:
        """Σ, f² and f²/(1 − t/T) for σ = f Σ, computed without 0/0 at T."""
        diffusion, one = self.diffusion, jnp.ones((), z.dtype)
        end = cast(float | None, self.transport.t1)
        singular = end is not None
        if isinstance(diffusion, FadingDiffusion):
            square = diffusion.faded(t, z, 2 * diffusion.power)
            quotient = diffusion.faded(t, z, 2 * diffusion.power - singular)
            return lambda y: diffusion.diffusion(t, y), square, quotient
        quotient = one / remaining(t, end, z) if end is not None else one
        return lambda y: self.noise(t, y), one, quotient
