"""Conversion between Itô and Stratonovich SDEs.

    c(t, z) = ½ Σⱼ (Dσⱼ) σⱼ,   Stratonovich drift = Itô drift − c,

where σⱼ is the j-th column of σ and Dσⱼ its Jacobian in z (Evans 2012, p. 123).
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._checks import check_key, is_traced, warn
from ..faq import see
from ._noise import (
    Index,
    Noise,
    apply_noise,
    apply_transposed,
    axis,
    depends_on,
    diagonal_slopes,
    has_diagonal,
    noise_column,
    noise_matrix,
    noise_row,
    noise_shape,
    plain_noise,
    sum_over,
)
from ._sde import AbstractItoSDE, AbstractSDE, AbstractStratonovichSDE, ItoSDE, StratonovichSDE, check_sde


class AbstractCorrection(eqx.Module):
    """The interface of methods that compute the correction c."""

    @abc.abstractmethod
    def draw(self, shape: tuple[int, ...], noise_dimension: int, *, key: PRNGKeyArray | None) -> Array | None:
        """The random signs for one solve, or None if the method needs none."""

    @abc.abstractmethod
    def __call__(
        self, diffusion: Callable[[Array], Noise], z: Array, signs: Array | None
    ) -> tuple[Noise, Array]:
        """σ(z) and c(z)."""


class ExactCorrection(AbstractCorrection):
    """The exact correction c = ½ Σⱼ (Dσⱼ) σⱼ. It costs min(d, m) Jacobian–vector products, none if σ does not
    depend on z, and a single one for a diagonal operator whose i-th entry depends on zᵢ only.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.diag(1 + z**2))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), correction=rf.sde.ExactCorrection())
    ```
    """

    def draw(self, shape: tuple[int, ...], noise_dimension: int, *, key: PRNGKeyArray | None) -> None:
        del key, shape, noise_dimension

    def __call__(
        self, diffusion: Callable[[Array], Noise], z: Array, signs: Array | None
    ) -> tuple[Noise, Array]:
        del signs
        if not depends_on(diffusion, z):
            return diffusion(z), jnp.zeros_like(z)
        if has_diagonal(eqx.filter_eval_shape(diffusion, z)):
            entries, slopes = diagonal_slopes(diffusion, z)
            return lx.DiagonalLinearOperator(entries), 0.5 * entries * slopes
        # σ is linearised once, so that all products and the backward pass share its value.
        sigma, tangent = jax.linearize(diffusion, z)
        dimension, columns = noise_shape(sigma)

        # Σⱼ (Dσⱼ) σⱼ = Σₖ (∂ₖσ) (row k of σ)ᵀ: use the shorter sum. If both have the same length, use the
        # second: its directions eₖ are constant, so that the products of the first layer with them are shared
        # by a batch.
        def along_row(k: Index) -> Array:
            return apply_noise(tangent(axis(z, k)), noise_row(sigma, k))

        def along_column(j: Index) -> Array:
            return noise_column(tangent(noise_column(sigma, j)), j)

        term, terms = (along_row, dimension) if dimension <= columns else (along_column, columns)
        return sigma, 0.5 * sum_over(terms, term, jnp.zeros_like(z))


class SampledCorrection(AbstractCorrection):
    """The estimate c ≈ ½ D[σ(·) ε] (σ ε) with random signs ε. It costs one Jacobian–vector product for any m.

    It is unbiased over ε. However, ε is fixed along each path, and a drift that is correct only on average
    over paths gives a different distribution. A flow therefore uses it only if every ε gives the same result,
    that is, if each noise component acts on one coordinate and depends on that coordinate only. Otherwise the
    flow warns and uses `rf.sde.ExactCorrection()`.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: jnp.diag(1 + 0.1 * jnp.sin(z)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(20)), correction=rf.sde.SampledCorrection())
    path = flow.sample_path(key=jax.random.key(0))
    flow.log_prob_given_path(jnp.zeros(20), path, key=jax.random.key(1))
    ```
    """

    def draw(self, shape: tuple[int, ...], noise_dimension: int, *, key: PRNGKeyArray | None) -> Array:
        if key is None:
            message = "SampledCorrection needs a key for its random signs: pass key=jax.random.key(seed)"
            raise TypeError(message + see("keys"))
        return jax.random.rademacher(key, (*shape, noise_dimension), float)

    def __call__(
        self, diffusion: Callable[[Array], Noise], z: Array, signs: Array | None
    ) -> tuple[Noise, Array]:
        assert signs is not None
        sigma = diffusion(z)
        signs = signs.astype(z.dtype)
        direction = apply_noise(sigma, signs)
        _, change = jax.jvp(lambda y: apply_noise(diffusion(y), signs), (z,), (direction,))
        return sigma, 0.5 * change


def same_for_all_signs(sde: AbstractSDE, z: Array, *, key: PRNGKeyArray) -> bool:
    """Whether the sampled correction, with random signs, equals the exact one at the points z `(k, d)` and at
    two times."""
    times = jnp.array([0.1, 0.7], z.dtype)

    def gap(t: Array, point: Array, key: PRNGKeyArray) -> Array:
        noise = lambda y: sde.noise(t, y)
        sigma, exact = ExactCorrection()(noise, point, None)
        signs = SampledCorrection().draw((), noise_shape(sigma)[1], key=key)
        sampled = SampledCorrection()(noise, point, signs)[1]
        size = jnp.maximum(jnp.abs(sampled), jnp.abs(exact))
        return jnp.max(jnp.abs(sampled - exact) / jnp.where(size > 0, size, 1))

    keys = jax.random.split(key, len(z))
    gaps = jax.vmap(lambda t: jax.vmap(lambda point, k: gap(t, point, k))(z, keys))(times)
    return bool(jnp.all(gaps < 1e3 * jnp.finfo(z.dtype).eps))


def checked_correction(
    sde: AbstractSDE, correction: AbstractCorrection | None, base: Any
) -> AbstractCorrection:
    """The requested correction if it preserves the distribution; otherwise the exact one, with a warning.

    Signs that are fixed along each path change the distribution of the flow, unless every choice of signs
    gives the same correction.
    """
    if not isinstance(correction, SampledCorrection) or isinstance(sde, AbstractStratonovichSDE):
        return ExactCorrection() if correction is None else correction
    points = base.sample(key=jax.random.key(0), shape=(8,))
    if is_traced(points) or same_for_all_signs(sde, points, key=jax.random.key(1)):
        return correction
    warn(
        "SampledCorrection would change the distribution, because its random signs cancel only if each noise "
        "component moves one coordinate and depends only on it; ExactCorrection is used instead"
        + see("sampled-correction")
    )
    return ExactCorrection()


def stratonovich_coefficients(
    sde: AbstractSDE, correction: AbstractCorrection, t: Array, z: Array, signs: Array | None
) -> tuple[Array, Noise]:
    """The Stratonovich drift μ̃ and σ at one point; σ is evaluated once."""
    if isinstance(sde, AbstractStratonovichSDE):
        return sde.drift(t, z), sde.noise(t, z)
    sigma, change = correction(lambda y: sde.noise(t, y), z, signs)
    return sde.drift(t, z) - change, sigma


class CorrectedDrift(eqx.Module):
    """A drift converted from one calculus to the other: μ + sign · c."""

    sde: AbstractSDE
    sign: int = eqx.field(static=True)
    key: PRNGKeyArray | None

    def __call__(self, t: Array, z: Array) -> Array:
        def diffusion(y: Array) -> Noise:
            return self.sde.noise(t, y)

        if self.key is None:
            correction, signs = ExactCorrection(), None
        else:
            correction = SampledCorrection()
            columns = noise_shape(eqx.filter_eval_shape(diffusion, z))[1]
            signs = correction.draw((), columns, key=self.key)
        return self.sde.drift(t, z) + self.sign * correction(diffusion, z, signs)[1]


def to_stratonovich(sde: AbstractSDE, *, key: PRNGKeyArray | None = None) -> AbstractStratonovichSDE:
    """The Stratonovich SDE with the same solution, with drift μ − ½ Σⱼ (Dσⱼ) σⱼ.

    The conversion is exact without a `key`. With a key, the correction is estimated by ½ D[σ(·) ε] (σ ε) with
    random signs ε. This estimate is unbiased over keys and costs one Jacobian–vector product for any m. A
    Stratonovich SDE is returned unchanged.

    The result contains the parameters of the diffusion twice: in the new drift and in the diffusion itself.
    For training, keep the original SDE; a flow converts it on the fly.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.to_stratonovich(rf.ItoSDE(lambda t, z: 0.1 * z, lambda t, z: 0.3 * z[:, None]))
    sde.drift(0.0, jnp.ones(1))  # 0.1 − 0.3²/2 = 0.055
    ```
    """
    check_sde(sde)
    key = _typed(key)
    if isinstance(sde, AbstractStratonovichSDE):
        return sde
    return StratonovichSDE(CorrectedDrift(sde, -1, key), sde.noise)


def to_ito(sde: AbstractSDE, *, key: PRNGKeyArray | None = None) -> AbstractItoSDE:
    """The Itô SDE with the same solution, with drift μ̃ + ½ Σⱼ (Dσⱼ) σⱼ. See `to_stratonovich`.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    sde = rf.to_ito(rf.StratonovichSDE(lambda t, z: 0 * z, lambda t, z: z[:, None]))
    sde.drift(0.0, jnp.ones(1))  # 0.5
    ```
    """
    check_sde(sde)
    key = _typed(key)
    if isinstance(sde, AbstractItoSDE):
        return sde
    return ItoSDE(CorrectedDrift(sde, +1, key), sde.noise)


def _typed(key: PRNGKeyArray | None) -> PRNGKeyArray | None:
    return None if key is None else check_key(key)


class Spread(eqx.Module):
    """σ, `div σ` and c at one point; `div σ` and c are None if σ is constant."""

    sigma: Noise
    divergence: Array | None
    correction: Array | None

    def pull(self, slope: Array, weight: float | Array = 1.0) -> Array:
        """½ (σᵀ ∇log p + div σ): the drift without c, in units of the noise. `weight` multiplies the terms
        with derivatives of σ."""
        pull = 0.5 * apply_transposed(self.sigma, slope)
        return pull if self.divergence is None else pull + 0.5 * weight * self.divergence

    def drift(self, slope: Array, weight: float | Array = 1.0) -> Array:
        """D ∇log p + Γ, without Q."""
        drift = apply_noise(self.sigma, self.pull(slope, weight))
        return drift if self.correction is None else drift + weight * self.correction


def spread_at(noise: Callable[[Array], Noise], z: Array) -> Spread:
    """σ at z, `div σ` and c. If σ does not depend on z, no derivative is computed; if σ is diagonal, all
    results are vectors."""
    if not depends_on(noise, z):
        return Spread(plain_noise(noise(z)), None, None)
    if has_diagonal(eqx.filter_eval_shape(noise, z)):
        entries, slopes = diagonal_slopes(noise, z)
        return Spread(lx.DiagonalLinearOperator(entries), slopes, 0.5 * entries * slopes)
    sigma, tangent = jax.linearize(lambda y: noise_matrix(noise(y)), z)

    def along(k: Index) -> tuple[Array, Array]:
        change = tangent(axis(z, k))
        return change[k], 0.5 * apply_noise(change, sigma[k])

    divergence, correction = sum_over(z.size, along, (jnp.zeros_like(sigma[0]), jnp.zeros_like(z)))
    return Spread(sigma, divergence, correction)


def turn_at(skew: Callable[[Array], Array], z: Array, slope: Array) -> Array:
    """Q ∇log p + div Q, the contribution of a skew Q to the drift at z."""
    turn = skew(z) @ slope
    if not depends_on(skew, z):
        return turn
    # (div Q)ᵢ = Σⱼ ∂ⱼQᵢⱼ: the j-th column along the j-th axis.
    column = lambda j: jax.jvp(lambda y: skew(y)[:, j], (z,), (axis(z, j),))[1]
    return turn + jnp.sum(jax.vmap(column)(jnp.arange(z.size)), axis=0)
