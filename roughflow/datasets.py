"""Two-dimensional distributions with known densities, to generate data and to compare fits with the truth.

Shapes and scales follow the data sets that are common in papers on normalizing flows. All densities are known
exactly, so one can compute by how much a model's loss exceeds the entropy.

```python
import jax
from roughflow.datasets import DISTRIBUTIONS

distribution = DISTRIBUTIONS["two-spirals"]
data = distribution.sample(key=jax.random.key(0), shape=(1000,))  # (1000, 2)
-distribution.log_prob(data).mean()  # the loss of the true density on these data
distribution.entropy  # its expected loss, 2.5406 nats, the minimum for any model
```
"""

import abc
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from ._checks import as_real, as_shape, check_key

__all__ = [
    "DISTRIBUTIONS",
    "AbstractDistribution",
    "AbstractSmoothDistribution",
    "Banana",
    "Checkerboard",
    "EightGaussians",
    "Moons",
    "Pinwheel",
    "Rings",
    "Star",
    "SwissRoll",
    "TwoSpirals",
    "Window",
]

Window = tuple[float, float, float, float]


class AbstractDistribution(eqx.Module):
    """A distribution on the plane with a known density. The distributions in this module have no parameters,
    so that results are comparable.

    - `entropy`: −E log p(Z) in nats, the minimum of the expected negative log-likelihood of a model.
    - `extent`: (left, right, bottom, top) of a window that shows the distribution.

    A distribution has the interface of a base distribution, so it can also be the base of a flow.

    ```python
    import jax
    from roughflow.datasets import Moons

    distribution = Moons()
    x = distribution.sample(key=jax.random.key(0), shape=(100,))  # (100, 2)
    distribution.log_prob(x).shape  # (100,)
    ```
    """

    extent: eqx.AbstractClassVar[Window]

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Array:
        """Draw points, as an array of shape `(*shape, 2)`."""
        return self._sample(check_key(key), as_shape(shape, 2))

    def log_prob(self, z: Array) -> Array:
        """Log-density at `z` of shape `(..., 2)`, in the precision of `z`; −inf where the density is zero."""
        z = jnp.asarray(as_real("z", z))
        if z.shape[-1:] != (2,):
            raise ValueError(f"z must have shape (..., 2), got {z.shape}")
        return self._log_prob(z if jnp.issubdtype(z.dtype, jnp.floating) else z.astype(float))

    @property
    @abc.abstractmethod
    def entropy(self) -> float: ...

    @abc.abstractmethod
    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array: ...

    @abc.abstractmethod
    def _log_prob(self, z: Array) -> Array: ...


class AbstractSmoothDistribution(AbstractDistribution):
    """A distribution with a smooth density near the origin. Its entropy is computed by numerical integration
    on a grid."""

    extent: ClassVar[Window] = (-4.0, 4.0, -4.0, 4.0)

    @property
    def entropy(self) -> float:
        return entropy_on_grid(self)


@functools.lru_cache
def entropy_on_grid(distribution: AbstractDistribution) -> float:
    """−∫ p log p by the trapezoidal rule, with an error of up to 2e-5 for the star and 1e-6 for other
    distributions."""
    side, step = np.linspace(-5, 5, 161, retstep=True)
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    with jax.ensure_compile_time_eval():
        log_prob = np.asarray(jax.jit(distribution.log_prob)(jnp.asarray(grid)), float)
    density = np.exp(log_prob)
    return float(-np.sum(density * np.where(density > 0, log_prob, 0)) * step**2)


LOG_2PI = math.log(2 * math.pi)


def log_normal(residual: Array, scale: float) -> Array:
    return -0.5 * (residual / scale) ** 2 - 0.5 * LOG_2PI - math.log(scale)


def noisy(centres: Array, noise: float, key: PRNGKeyArray) -> Array:
    return centres + noise * jax.random.normal(key, centres.shape)


def quadrature(num_nodes: int) -> tuple[Array, Array]:
    """Gauss–Legendre nodes and weights on [0, 1]."""
    nodes, weights = scipy.special.roots_legendre(num_nodes)
    return jnp.asarray(0.5 * (nodes + 1)), jnp.asarray(0.5 * weights)


def log_mixture(z: Array, centres: Array, weights: Array, noise: float) -> Array:
    """log Σₖ wₖ N(z; cₖ, noise² I), the log-density of a mixture or, with quadrature nodes and weights, of a
    noisy curve.

    The centres are processed in blocks, which are recomputed for the gradient, so that memory does not grow
    with the number of centres, even under `vmap`.
    """
    points = jnp.reshape(z, (-1, 2)) / noise
    block = math.gcd(weights.size, 32)
    centres = jnp.reshape(centres.astype(z.dtype) / noise, (-1, block, 2))
    log_weights = jnp.reshape(jnp.log(weights.astype(z.dtype)), (-1, block))

    @jax.checkpoint
    def add(total, part):
        centre, log_weight = part
        square = jnp.sum((points[:, None] - centre[None]) ** 2, axis=-1)
        return jnp.logaddexp(total, jax.nn.logsumexp(log_weight[None] - 0.5 * square, axis=-1)), None

    nothing = jnp.full(points.shape[:1], -jnp.inf, z.dtype)
    total, _ = jax.lax.scan(add, nothing, (centres, log_weights))
    return jnp.reshape(total, z.shape[:-1]) - LOG_2PI - 2 * math.log(noise)


def with_mirror_image(centres: Array, weights: Array) -> tuple[Array, Array]:
    """The nodes and weights of a curve and of its point reflection, each with half of the mass."""
    return jnp.concatenate([centres, -centres]), 0.5 * jnp.concatenate([weights, weights])


def mirror_at_random(z: Array, key: PRNGKeyArray) -> Array:
    return z * jax.random.rademacher(key, (*z.shape[:-1], 1), z.dtype)


def polar(radius: Array, angle: Array) -> Array:
    return jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)


def radius_of(z: Array) -> Array:
    """|z|, with gradient zero at the origin."""
    square = jnp.sum(z**2, axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def rotate(z: Array, angle: Array) -> Array:
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos * z[..., 0] - sin * z[..., 1], sin * z[..., 0] + cos * z[..., 1]], axis=-1)


class Banana(AbstractDistribution):
    """x ~ N(0, 1), y | x ~ N(−x², 2), with entropy 1 + ln 2π + ½ ln 2."""

    extent: ClassVar[Window] = (-3.5, 3.5, -11.0, 4.0)

    @property
    def entropy(self) -> float:
        return 1 + LOG_2PI + 0.5 * math.log(2)

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        x, noise = jax.random.normal(key, (2, *shape))
        return jnp.stack([x, math.sqrt(2) * noise - x**2], axis=-1)

    def _log_prob(self, z: Array) -> Array:
        x, y = z[..., 0], z[..., 1]
        return log_normal(x, 1.0) + log_normal(y + x**2, math.sqrt(2))


class Checkerboard(AbstractDistribution):
    """The uniform distribution on eight of the sixteen squares of side 2 in [−4, 4]², arranged as on a
    checkerboard, with entropy ln 32."""

    extent: ClassVar[Window] = (-4.5, 4.5, -4.5, 4.5)

    @property
    def entropy(self) -> float:
        return math.log(32)

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_column, key_row, key_inside = jax.random.split(key, 3)
        column = jax.random.randint(key_column, shape, -2, 2)
        row = 2 * jax.random.randint(key_row, shape, -1, 1) + column % 2
        return 2 * (jnp.stack([column, row], axis=-1) + jax.random.uniform(key_inside, (*shape, 2)))

    def _log_prob(self, z: Array) -> Array:
        square = jnp.floor(z / 2)
        on = jnp.all((square >= -2) & (square < 2), axis=-1) & (jnp.sum(square, axis=-1) % 2 == 0)
        return jnp.where(on, -math.log(32), -jnp.inf).astype(z.dtype)


class EightGaussians(AbstractSmoothDistribution):
    """A mixture of eight normal distributions with scale 1/√8 and equal weights, centred on a circle of
    radius √8."""

    noise: ClassVar[float] = 8**-0.5

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_which, key_noise = jax.random.split(key)
        centres = self._centre(jax.random.randint(key_which, shape, 0, 8))
        return noisy(centres, self.noise, key_noise)

    def _log_prob(self, z: Array) -> Array:
        return log_mixture(z, self._centre(jnp.arange(8)), jnp.full(8, 1 / 8), self.noise)

    def _centre(self, which: Array) -> Array:
        return polar(jnp.asarray(8**0.5), which * (math.pi / 4))


class Moons(AbstractSmoothDistribution):
    """Two interleaved half circles of radius 2 with noise N(0, 0.2² I)."""

    noise: ClassVar[float] = 0.2

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_curve, key_side, key_noise = jax.random.split(key, 3)
        moon = self._moon(jax.random.uniform(key_curve, shape))
        return mirror_at_random(noisy(moon, self.noise, key_noise), key_side)

    def _log_prob(self, z: Array) -> Array:
        u, weights = quadrature(128)
        return log_mixture(z, *with_mirror_image(self._moon(u), weights), self.noise)

    def _moon(self, u: Array) -> Array:
        x, y = 2 * jnp.cos(math.pi * u), 2 * jnp.sin(math.pi * u)
        return jnp.stack([x - 1, y - 0.5], axis=-1)


class Pinwheel(AbstractSmoothDistribution):
    """A mixture of five normal distributions, elongated along rays from the origin and then twisted.

    A point w of the mixture, with means 2 (cos 2πk/5, sin 2πk/5) and scales 0.6 along the ray and 0.2 across
    it, is rotated by the angle ½ ln(1 + |w|²). The angle depends on the radius only, so the twist preserves
    areas, and the density at z is that of the mixture at the untwisted z.
    """

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_which, key_noise = jax.random.split(key)
        along, across = jax.random.normal(key_noise, (2, *shape))
        blade = jnp.stack([2 + 0.6 * along, 0.2 * across], axis=-1)
        w = rotate(blade, jax.random.randint(key_which, shape, 0, 5) * (2 * math.pi / 5))
        return rotate(w, self._twist(w))

    def _log_prob(self, z: Array) -> Array:
        w = rotate(z, -self._twist(z))
        blades = [rotate(w, jnp.asarray(-2 * math.pi * k / 5, z.dtype)) for k in range(5)]
        terms = [log_normal(w[..., 0] - 2, 0.6) + log_normal(w[..., 1], 0.2) for w in blades]
        return jax.nn.logsumexp(jnp.stack(terms), axis=0) - math.log(5)

    def _twist(self, z: Array) -> Array:
        # ½ ln(1 + |z|²), without overflow.
        return jnp.log(jnp.hypot(jnp.hypot(1.0, z[..., 0]), z[..., 1]))


class Rings(AbstractSmoothDistribution):
    """Four circles of radius R = ¾, 1½, 2¼, 3 with equal weights and noise N(0, 0.08² I).

    Each circle contributes N(z; c, σ² I), averaged over its points c: exp(−(|z|² + R²)/2σ²) I₀(|z| R/σ²) /
    2πσ².
    """

    noise: ClassVar[float] = 0.08

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_radius, key_angle, key_noise = jax.random.split(key, 3)
        radius = 0.75 * jax.random.randint(key_radius, shape, 1, 5)
        angle = jax.random.uniform(key_angle, shape, maxval=2 * math.pi)
        return noisy(polar(radius, angle), self.noise, key_noise)

    def _log_prob(self, z: Array) -> Array:
        radius = radius_of(z)
        # i0e(x) = e⁻ˣ I₀(x), so that the remaining exponent is a square and cannot overflow.
        rings = [
            -0.5 * ((radius - ring) / self.noise) ** 2
            + jnp.log(jax.scipy.special.i0e(radius * (ring / self.noise**2)))
            for ring in (0.75, 1.5, 2.25, 3.0)
        ]
        return jax.nn.logsumexp(jnp.stack(rings), axis=0) - math.log(4) - LOG_2PI - 2 * math.log(self.noise)


class Star(AbstractSmoothDistribution):
    """θ ~ U(−π, π), r | θ ~ N(2/√(1 + ½ sin 10θ), 0.15²), z = r (cos θ, sin θ): ten thin petals.

    A point z has the polar coordinates (|z|, θ) and (−|z|, θ + π), so that
    p(z) = (p(|z| | θ) + p(−|z| | θ + π)) / (2π |z|).
    """

    noise: ClassVar[float] = 0.15

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_angle, key_noise = jax.random.split(key)
        angle = jax.random.uniform(key_angle, shape, minval=-math.pi, maxval=math.pi)
        return polar(noisy(self._petal(angle), self.noise, key_noise), angle)

    def _log_prob(self, z: Array) -> Array:
        radius = radius_of(z)
        # The angle at the origin does not matter, but its derivative must not be NaN.
        mean = self._petal(jnp.arctan2(z[..., 1], jnp.where(radius > 0, z[..., 0], 1)))
        # sin 10(θ + π) = sin 10θ, so r has the same mean in both representations.
        along = jnp.logaddexp(log_normal(radius - mean, self.noise), log_normal(-radius - mean, self.noise))
        # The factor 1/|z| is infinite at the origin, where the other factor is below e⁻⁵⁰. The lower bound on
        # |z| keeps plots finite.
        return along - LOG_2PI - jnp.log(jnp.maximum(radius, 1e-4))

    def _petal(self, angle: Array) -> Array:
        return 2 / jnp.sqrt(1 + 0.5 * jnp.sin(10 * angle))


class SwissRoll(AbstractSmoothDistribution):
    """A spiral of one and a half turns, r = t/5 for t ~ U(3π/2, 9π/2), with noise N(0, 0.2² I)."""

    noise: ClassVar[float] = 0.2

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_curve, key_noise = jax.random.split(key)
        return noisy(self._roll(jax.random.uniform(key_curve, shape)), self.noise, key_noise)

    def _log_prob(self, z: Array) -> Array:
        u, weights = quadrature(320)
        return log_mixture(z, self._roll(u), weights, self.noise)

    def _roll(self, u: Array) -> Array:
        angle = 1.5 * math.pi * (1 + 2 * u)
        return polar(angle / 5, angle)


class TwoSpirals(AbstractSmoothDistribution):
    """Two spirals of one and a half turns, r = t/3 for t = 3π√u and u ~ U(0, 1), with noise N(0, 0.1² I)."""

    noise: ClassVar[float] = 0.1

    def _sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        key_curve, key_side, key_noise = jax.random.split(key, 3)
        arm = self._arm(jnp.sqrt(jax.random.uniform(key_curve, shape)))
        return mirror_at_random(noisy(arm, self.noise, key_noise), key_side)

    def _log_prob(self, z: Array) -> Array:
        # The integral is over s = √u, which has density 2s, because the spiral is smooth in s but not in u.
        s, weights = quadrature(512)
        return log_mixture(z, *with_mirror_image(self._arm(s), 2 * s * weights), self.noise)

    def _arm(self, s: Array) -> Array:
        return polar(math.pi * s, math.pi * (1 - 3 * s))


DISTRIBUTIONS: Mapping[str, AbstractDistribution] = MappingProxyType(
    {
        "banana": Banana(),
        "star": Star(),
        "moons": Moons(),
        "eight-gaussians": EightGaussians(),
        "checkerboard": Checkerboard(),
        "two-spirals": TwoSpirals(),
        "pinwheel": Pinwheel(),
        "rings": Rings(),
        "swiss-roll": SwissRoll(),
    }
)
"""The nine distributions by name."""
