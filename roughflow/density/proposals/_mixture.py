"""What paths are drawn from: for each x a mixture of normal distributions, and a share of the prior."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._linear import log_abs_det, solve

SPARE = 1  # standard normal numbers beyond one for each coordinate of ξ: it chooses the component
# Where the surface of ways to x is curved, a tangent Gaussian is too narrow more often than too wide.
WIDER = 1.15
PRIOR_SHARE = 0.3  # of a distribution that may miss something
EDGE = 1e-3  # volume of a plane, as seen, below which it is seen edge on


class Mixture(eqx.Module):
    """Distributions of ω `(W,)`, the path's coefficients, for B points with M components each.

    Component m is ω = c + S u, S diagonal, u normal with precision I + GᵀG, G `(d, W)`. That is what a normal
    distribution of ξ = (start, path) on a plane, seen along the start, looks like: with N = (N₀, N₁)
    orthonormal directions across the plane, G = N₀⁻¹N₁, u = ε₁ − N₁ᵀ(N₀ε₀ + N₁ε₁), and its volume is
    |det N₀|. N = (I, 0) makes u standard normal. Beside the components there is the prior, with the share
    `prior`.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    mixture = rf.Mixture.of(jnp.zeros((3, 6)), jnp.ones((3, 6)), dimension=2)  # for three points, the prior
    mixture.log_prob(jnp.zeros((3, 10, 6))).shape  # (3, 10), of ten paths each
    ```
    """

    centre: Array  # c, (B, M, W)
    scale: Array  # S, (B, M, W)
    normal: Array  # N, (B, M, d, d + W)
    log_share: Array  # (B, M), of the components among themselves
    prior: Array  # (B,)
    missed: Array  # (B,): where no way to x was found, so that the prior stands in
    poor: Array  # (B,): where a few weights were so uneven that others would be too

    @staticmethod
    def of(centre: Array, scale: Array, dimension: int) -> "Mixture":
        """One component with independent normal coefficients, centre and scale `(B, W)`, and no prior."""
        batch, size = centre.shape
        frame = jnp.eye(dimension, dimension + size, dtype=centre.dtype)
        return Mixture(
            centre[:, None],
            scale[:, None],
            jnp.broadcast_to(frame, (batch, 1, *frame.shape)),
            jnp.zeros((batch, 1), centre.dtype),
            jnp.zeros(batch, centre.dtype),
            jnp.zeros(batch, bool),
            jnp.zeros(batch, bool),
        )

    @property
    def dimension(self) -> int:
        return self.normal.shape[2]

    @property
    def steepness(self) -> Array:
        """How far the start moves with the path, per unit and dimension: |det N₀|^(−1/d) of the steepest
        component, `(B,)`."""
        batch, count = self.log_share.shape
        start = jnp.reshape(self.normal[..., : self.dimension], (batch * count, *(self.dimension,) * 2))
        log_volume = jnp.reshape(log_abs_det(start), (batch, count))
        return jnp.exp(
            -jnp.min(jnp.where(jnp.isfinite(self.log_share), log_volume, 0), axis=1) / self.dimension
        )

    @property
    def modes(self) -> Array:
        """The ξ* whose paths the centres are, `(B, M, D)`: as points of least energy they are across the
        plane, ξ* = Nᵀa, so that the path says what a is."""
        start, path = jnp.split(self.normal, [self.dimension], axis=-1)
        flat = lambda a: jnp.reshape(a, (math.prod(a.shape[:2]), *a.shape[2:]))
        ridge = jnp.finfo(path.dtype).eps * jnp.eye(self.dimension, dtype=path.dtype)
        gram = flat(jnp.einsum("bmij,bmkj->bmik", path, path)) + ridge[None]
        across = solve(gram, flat(jnp.einsum("bmij,bmj->bmi", path, self.centre))[..., None])
        across = jnp.reshape(across, (*self.centre.shape[:2], self.dimension))
        return jnp.concatenate([jnp.einsum("bmij,bmi->bmj", start, across), self.centre], axis=-1)

    @property
    def middle(self) -> Array:
        """The mode with the largest share, `(B, D)`."""
        best = jnp.argmax(self.log_share, axis=1)[:, None, None]
        return jnp.take_along_axis(self.modes, best, axis=1)[:, 0]

    def seen_along(self, turn: Callable[[Array], Array]) -> "Mixture":
        """The same planes in other orthonormal coordinates of ξ, seen along the first d of these; no wider,
        and without the prior. What contains such a direction, and so is no plane there, is left out."""
        d = self.dimension
        normal = turn(self.normal)
        flat = jnp.reshape(normal[..., :d], (math.prod(normal.shape[:2]), d, d))
        across = jnp.reshape(log_abs_det(flat), self.log_share.shape) > math.log(EDGE)
        frame = jnp.eye(*normal.shape[2:], dtype=normal.dtype)
        kept = across & jnp.isfinite(self.log_share)
        none = ~jnp.any(kept, axis=1)
        log_share = jnp.where(kept | none[:, None], jnp.where(kept, self.log_share, 0), -jnp.inf)
        return Mixture(
            turn(self.modes)[..., d:],
            jnp.ones_like(self.scale),
            jnp.where(kept[..., None, None], normal, frame[None, None]),
            jax.nn.log_softmax(log_share, axis=1),
            jnp.where(none, 1, 0).astype(self.prior.dtype),
            none,
            self.poor,
        )

    def sample(self, noise: Array) -> Array:
        """ω `(B, K, W)` made from standard normal numbers `(B, K, d + W + SPARE)`."""
        centre, kick = self._drawn(noise, self._pick(noise))
        return centre + kick

    def log_prob(self, omega: Array) -> Array:
        """The log-density at ω `(B, K, W)`."""
        own = self.log_components(omega)
        share = self.prior[:, None]
        return jnp.logaddexp(_log(1 - share) + own, _log(share) + log_standard(omega))

    def log_components(self, omega: Array) -> Array:
        """The log-density without the prior's share."""
        return jax.nn.logsumexp(self._each(omega) + self.log_share[:, None], axis=-1)

    def autoregress(self, omega: Array, noise: Array, stay: Array) -> tuple[Array, Array]:
        """ω′ = c + ρ(ω − c) + √(1 − ρ²) S u, and the logarithm of the component's density at ω over that
        at ω′.

        The component is drawn, whatever ω is, and the move keeps its distribution (Neal 1998; Cotter et al.
        2013). `noise` is as for `sample`, `stay` is ρ, `(B, K, 1)`.
        """
        pick = self._pick(noise)
        centre, kick = self._drawn(noise, pick)
        moved = centre + stay * (omega - centre) + jnp.sqrt(1 - stay**2) * kick

        def log_density(at: Array) -> Array:
            own = jnp.sum(jnp.where(pick, self._each(at), 0), axis=-1)
            return jnp.where(jnp.any(pick, axis=-1), own, log_standard(at))

        return moved, log_density(omega) - log_density(moved)

    def _drawn(self, noise: Array, pick: Array) -> tuple[Array, Array]:
        """The centre of the component that was picked, and a draw from it less that."""
        noise, pick = noise[..., :-SPARE], pick.astype(noise.dtype)
        across = jnp.einsum("bmij,bkj->bkmi", self.normal, noise) * pick[..., None]
        path = noise[..., self.dimension :]
        unit = path - jnp.einsum("bkmi,bmij->bkj", across, self.normal[..., self.dimension :])
        # For the prior nothing is picked: centre 0 and scale 1.
        centre = jnp.einsum("bkm,bmw->bkw", pick, self.centre)
        scale = 1 + jnp.einsum("bkm,bmw->bkw", pick, self.scale - 1)
        return centre, scale * unit

    def _each(self, omega: Array) -> Array:
        """The log-density of every component at ω, `(B, K, M)`."""
        unit = (omega[:, :, None] - self.centre[:, None]) / self.scale[:, None]
        start, path = jnp.split(self.normal, [self.dimension], axis=-1)
        flat = lambda a: jnp.reshape(a, (math.prod(a.shape[:2]), *a.shape[2:]))
        slope = jnp.reshape(solve(flat(start), flat(path)), path.shape)
        across = jnp.einsum("bmij,bkmj->bkmi", slope, unit)
        squares = jnp.sum(unit**2, axis=-1) + jnp.sum(across**2, axis=-1)
        log_volume = jnp.reshape(log_abs_det(flat(start)), path.shape[:2])
        log_volume = log_volume + jnp.sum(jnp.log(self.scale), axis=-1)
        return -0.5 * squares - 0.5 * omega.shape[-1] * math.log(2 * math.pi) - log_volume[:, None]

    def defended(self) -> "Mixture":
        """Wider, and with a share of the prior."""
        share = jnp.where(self.missed, 1, PRIOR_SHARE).astype(self.prior.dtype)
        return eqx.tree_at(lambda d: (d.prior, d.scale), self, (share, WIDER * self.scale))

    def narrowed(self, where: Array) -> "Mixture":
        """As before it was defended, at the points `where`."""
        share = jnp.where(where, self.missed.astype(self.prior.dtype), self.prior)
        scale = jnp.where(where[:, None, None], self.scale / WIDER, self.scale)
        return eqx.tree_at(lambda d: (d.prior, d.scale), self, (share, scale))

    def _pick(self, noise: Array) -> Array:
        """Which component each draw is from, by its spare number: `(B, K, M)`, none for the prior."""
        uniform = uniform_of(noise[..., -1:])
        share = jnp.exp(self.log_share) * (1 - self.prior)[:, None]
        upper = jnp.cumsum(share, axis=1)
        lower = upper - share
        # Rounding must not leave a gap below 1 where the prior has no share.
        upper = jnp.where((self.prior == 0)[:, None] & (upper >= upper[:, -1:]), 2, upper)
        return (uniform >= lower[:, None]) & (uniform < upper[:, None]) & (share > 0)[:, None]


def uniform_of(normal: Array) -> Array:
    """The standard normal distribution function, to the rounding of 1 and not of its own size: all that a
    comparison needs, and compiled in a fraction of the time of one with exact tails."""
    return 0.5 * (1 + jax.lax.erf(normal / 2**0.5))


def log_standard(omega: Array) -> Array:
    """The standard normal log-density over the last axis."""
    return -0.5 * jnp.sum(omega**2, axis=-1) - 0.5 * omega.shape[-1] * math.log(2 * math.pi)


def _log(share: Array) -> Array:
    some = share > 0
    return jnp.where(some, jnp.log(jnp.where(some, share, 1)), -jnp.inf)
