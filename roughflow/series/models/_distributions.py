"""Transition distributions in closed form, and Bessel functions."""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from ..._checks import check_positive
from ..._linear import cholesky, solve_lower
from ...transition import AbstractCoordinates
from .._parameters import POSITIVE

SERIES_TERMS = 112  # number of terms of the power series
DEBYE_TERMS = 8  # number of terms of the asymptotic expansion
LARGE_ARGUMENT = 80.0  # for larger arguments, the error of the asymptotic expansion is below 1e-13


@jax.custom_jvp
def log_bessel_ie(order: Array, z: Array) -> Array:
    """log I_q(z) − z for q > −1 and z > 0, with derivatives in both.

    The power series is Σ (z/2)^{2k+q} / (k! Γ(k + q + 1)). For large q or z, Debye's expansion is used
    instead (Abramowitz & Stegun 1972, 9.7.7).
    """
    return _log_bessel_ie(order, z)


@log_bessel_ie.defjvp
def _log_bessel_ie_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Compute both partial derivatives once for all tangents, which also supports reverse mode despite the
    loop."""
    order, z = primals
    value, by_order = jax.jvp(lambda order: _log_bessel_ie(order, z), (order,), (jnp.ones_like(order),))
    by_z = jax.jvp(lambda z: _log_bessel_ie(order, z), (z,), (jnp.ones_like(z),))[1]
    return value, by_order * tangents[0] + by_z * tangents[1]


def _log_bessel_ie(order: Array, z: Array) -> Array:
    large = jnp.hypot(order, z) > LARGE_ARGUMENT
    # Each branch is evaluated only where it is valid, so that derivatives stay finite. The series has no
    # terms if all arguments are large.
    inner = _series(jnp.where(large, 1.0, order), jnp.where(large, 1.0, z), jnp.where(large, 0, SERIES_TERMS))
    outer = _debye(jnp.where(large, order, LARGE_ARGUMENT), jnp.where(large, z, LARGE_ARGUMENT))
    return jnp.where(large, outer, inner)


def _series(order: Array, z: Array, terms: Array) -> Array:
    # Horner's scheme with the ratio z²/(4 k (k + q)) of successive terms, all positive.
    quarter = 0.25 * z**2
    term = lambda i, rest: 1 + rest * quarter / ((SERIES_TERMS - i) * (SERIES_TERMS - i + order))
    total = jax.lax.fori_loop(0, jnp.max(terms), term, jnp.ones_like(quarter))
    return order * jnp.log(0.5 * z) - jax.scipy.special.gammaln(order + 1) + jnp.log(total) - z


def _debye(order: Array, z: Array) -> Array:
    root = jnp.hypot(order, z)
    square = (order / root) ** 2
    # Σ uₖ/qᵏ in terms that stay finite as q → 0: with p = q/root, uₖ has powers of p from k to 3k.
    terms = [jnp.polyval(jnp.asarray(row), square) for row in _coefficients()]
    rest = jnp.polyval(jnp.stack([*terms[::-1], jnp.zeros_like(root)]), 1 / root)
    exponent = order**2 / (root + z) - order * jnp.arcsinh(order / z)  # the exponent minus z
    return exponent - 0.5 * jnp.log(2 * jnp.pi * root) + jnp.log1p(rest)


def _coefficients() -> list[np.ndarray]:
    """Coefficients of uₖ(p)/pᵏ in p², highest first, by recursion (Abramowitz & Stegun 1972, 9.3.10)."""
    u, rows = np.polynomial.Polynomial([1.0]), []
    for k in range(1, DEBYE_TERMS + 1):
        grown = np.polynomial.Polynomial([0, 0, 0.5, 0, -0.5]) * u.deriv()
        u = grown + (np.polynomial.Polynomial([0.125, 0, -0.625]) * u).integ()
        rows.append(u.coef[k : 3 * k + 1 : 2][::-1])
    return rows


class AbstractDistribution(eqx.Module):
    """The distribution of a state `(d,)`."""

    @abc.abstractmethod
    def log_prob(self, x: Array) -> Array:
        """The log-density at a state `(d,)`."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Array:
        """A draw `(d,)`."""

    @abc.abstractmethod
    def cdf(self, x: Array) -> np.ndarray:
        """P(X ≤ x) `(N,)` for a batch of distributions with d = 1, at x of shape `(N, 1)`; uses NumPy."""


class Normal(AbstractDistribution):
    """N(mean, covariance)."""

    mean: Array  # (d,)
    covariance: Array  # (d, d)

    def log_prob(self, x: Array) -> Array:
        factor = cholesky(self.covariance)
        white = solve_lower(factor, x - self.mean)
        return jnp.sum(jax.scipy.stats.norm.logpdf(white) - jnp.log(jnp.diag(factor)))

    def sample(self, key: PRNGKeyArray) -> Array:
        root = cholesky(self.covariance, semidefinite=True)
        return self.mean + root @ jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def cdf(self, x: Array) -> np.ndarray:
        mean, variance = np.asarray(self.mean)[..., 0], np.asarray(self.covariance)[..., 0, 0]
        return scipy.stats.norm.cdf(np.asarray(x)[..., 0], mean, np.sqrt(variance))


class Transformed(AbstractDistribution):
    """The distribution of a state whose coordinates are normally distributed."""

    coordinates: AbstractCoordinates
    normal: Normal

    def log_prob(self, x: Array) -> Array:
        return self.normal.log_prob(self.coordinates.from_state(x)) + self.coordinates.log_volume(x)

    def sample(self, key: PRNGKeyArray) -> Array:
        """A draw of the state; NaN if the coordinates lie outside the range of the state space."""
        y = self.normal.sample(key)
        return jnp.where(self.coordinates.is_inside(y), self.coordinates.to_state(y), jnp.nan)

    def cdf(self, x: Array) -> np.ndarray:
        """The distribution function, for coordinates that increase with the state."""
        return self.normal.cdf(jax.vmap(self.coordinates.from_state)(x))


class NoncentralChiSquare(AbstractDistribution):
    """`scale` times a noncentral χ² variable with `df` > 0 degrees of freedom."""

    scale: Array
    df: Array
    noncentrality: Array

    def log_prob(self, x: Array) -> Array:
        order, v = 0.5 * self.df - 1, 0.5 * x[0] / self.scale
        near, far = jnp.sqrt(0.5 * self.noncentrality), jnp.sqrt(v)
        bessel = log_bessel_ie(order, 2 * near * far)
        return bessel - (near - far) ** 2 + order * jnp.log(far / near) - jnp.log(2 * self.scale)

    def sample(self, key: PRNGKeyArray) -> Array:
        """Draw a gamma variable whose shape is `df`/2 plus a Poisson variable."""
        key_count, key_gamma = jax.random.split(key)
        count = jax.random.poisson(key_count, 0.5 * self.noncentrality)
        return 2 * self.scale * jax.random.gamma(key_gamma, 0.5 * self.df + count)[None]

    def cdf(self, x: Array) -> np.ndarray:
        scale, df, noncentrality = (np.asarray(a) for a in (self.scale, self.df, self.noncentrality))
        return scipy.stats.ncx2.cdf(np.asarray(x)[..., 0] / scale, df, noncentrality)


class Gamma(AbstractDistribution):
    """The gamma distribution."""

    shape: Array
    scale: Array

    def log_prob(self, x: Array) -> Array:
        return jax.scipy.stats.gamma.logpdf(x[0], self.shape, scale=self.scale)

    def sample(self, key: PRNGKeyArray) -> Array:
        return self.scale * jax.random.gamma(key, self.shape)[None]

    def cdf(self, x: Array) -> np.ndarray:
        return scipy.stats.gamma.cdf(
            np.asarray(x)[..., 0], np.asarray(self.shape), scale=np.asarray(self.scale)
        )


class Beta(AbstractDistribution):
    """The beta distribution with a given mean and variance."""

    mean: Array
    variance: Array

    def _shapes(self) -> tuple[Array, Array]:
        total = self.mean * (1 - self.mean) / self.variance - 1
        return self.mean * total, (1 - self.mean) * total

    def log_prob(self, x: Array) -> Array:
        return jax.scipy.stats.beta.logpdf(x[0], *self._shapes())

    def sample(self, key: PRNGKeyArray) -> Array:
        drawn = jax.random.beta(key, *self._shapes())
        limits = jnp.finfo(drawn.dtype)
        return jnp.clip(drawn, limits.tiny, 1 - limits.epsneg)[None]

    def cdf(self, x: Array) -> np.ndarray:
        return scipy.stats.beta.cdf(np.asarray(x)[..., 0], *map(np.asarray, self._shapes()))


class Counts(eqx.Module):
    """Counts as observations of a state: y ~ Poisson(ρx), or negative binomial with mean m = ρx and variance
    m + m²/r. Pass an instance to `rf.fit_sde(..., observe=...)`.

    **Arguments:**

    - `components`: indices of the components of the state that are counted, one per column of the values.
    - `log`: whether the mean is ρeˣ.
    - `rate`, `dispersion`: starting values for the reported fraction ρ and for r, which are then estimated.
      By default, ρ = 1 and counts are Poisson.

    ```python
    import jax.numpy as jnp
    import roughflow as rf

    observe = rf.series.Counts(components=(1,), rate=0.8)
    observe(0.0, jnp.array([700.0, 20.0])).log_prob(jnp.array([15.0]))
    ```
    """

    rate: Array | None
    dispersion: Array | None
    components: tuple[int, ...] = eqx.field(static=True)
    log: bool = eqx.field(static=True)
    domains: ClassVar = dict.fromkeys(("rate", "dispersion"), POSITIVE)

    def __init__(
        self,
        components: tuple[int, ...] = (0,),
        *,
        log: bool = False,
        rate: float | None = None,
        dispersion: float | None = None,
    ):
        for name, value in (("rate", rate), ("dispersion", dispersion)):
            if value is not None:
                check_positive(name, value)
        self.rate, self.dispersion = (
            None if x is None else jnp.asarray(x, float) for x in (rate, dispersion)
        )
        self.components, self.log = tuple(components), log

    def __call__(self, t: Array, x: Array, u: Array | None = None) -> "CountDistribution":
        if max(self.components) >= len(x):
            raise ValueError(f"components must be below {len(x)}, got {self.components}")
        mean = x[np.array(self.components, int)]
        mean = jnp.exp(mean) if self.log else mean
        return CountDistribution(mean if self.rate is None else self.rate * mean, self.dispersion)


class CountDistribution(eqx.Module):
    """Independent Poisson or negative binomial distributions with means `(c,)`."""

    mean: Array
    dispersion: Array | None
    is_discrete: ClassVar = True

    def support(self, y: Array) -> Array:
        """Whether values are counts."""
        return (y >= 0) & (y == jnp.floor(y))

    def log_prob(self, y: Array) -> Array:
        if self.dispersion is None:
            return jax.scipy.special.xlogy(y, self.mean) - self.mean - jax.lax.lgamma(y + 1)
        r = self.dispersion
        ways = jax.lax.lgamma(y + r) - jax.lax.lgamma(r) - jax.lax.lgamma(y + 1)
        return (
            ways + jax.scipy.special.xlogy(y, self.mean) + r * jnp.log(r) - (y + r) * jnp.log(self.mean + r)
        )

    def cdf(self, y: Array) -> Array:
        """P(Y < y) + ½P(Y = y), whose mean is ½ as for a continuous distribution."""
        if self.dispersion is None:
            whole = jax.scipy.special.gammaincc(y + 1, self.mean)
        else:
            r = self.dispersion
            whole = jax.scipy.special.betainc(r, y + 1, r / (r + self.mean))
        return whole - 0.5 * jnp.exp(self.log_prob(y))


TAYLOR_TERMS = 13  # number of terms of a Taylor series in which each is at most half of the one before


MAX_DOUBLINGS = 32


def linear_moments(
    rate: Array, noise: Array, dt: Array, *, reverse: bool = True
) -> tuple[Array, Array, Array]:
    """e^{A t} − I, ∫₀ᵗ e^{A s} ds and ∫₀ᵗ e^{A s} Q e^{Aᵀ s} ds for `rate` A and `noise` Q, `(d, d)` each.

    The solution of dX = (A(X − μ) + b) dt + Q^½ dB satisfies X(t) − μ = e^{At}(X(0) − μ) + (∫₀ᵗ e^{As} ds) b
    + ε, where ε is normal with mean 0 and the covariance ∫₀ᵗ e^{As} Q e^{Aᵀs} ds. The method is a Taylor
    series over t/2ⁿ and n doublings, such as Σ(2h) = Σ(h) + e^{Ah} Σ(h) e^{Aᵀh}. Both terms are positive
    semi-definite, so doubling is stable for all A. The single exponential of Van Loan (1978) contains
    e^{−At}, which overflows or cancels if A is stiff. Forward-mode derivatives are faster than reverse-mode
    ones.
    """
    size = jax.lax.stop_gradient(dt * jnp.max(jnp.sum(jnp.abs(rate), axis=1)))
    doublings = jnp.clip(jnp.ceil(jnp.log2(jnp.maximum(size, 1e-30))) + 2, 0, MAX_DOUBLINGS)
    h = dt * jnp.exp2(-doublings)
    unit = jnp.eye(len(rate), dtype=rate.dtype)
    power, bend = h * unit, h * noise
    integral, covariance = power, bend
    for k in range(2, TAYLOR_TERMS + 2):
        power = h / k * _product(rate, power)
        half = h / k * _product(rate, bend)
        bend = half + half.T
        integral, covariance = integral + power, covariance + bend

    def double(i: Array, moments: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        change, integral, covariance = moments
        grow = change + unit
        twice = (
            2 * change + _product(change, change),  # keeps the digits of slow rates if others are fast
            integral + _product(grow, integral),
            covariance + _product(_product(grow, covariance), grow.T),
        )
        return jax.tree.map(lambda new, old: jnp.where(i < doublings, new, old), twice, moments)

    start = (_product(rate, integral), integral, covariance)
    return jax.lax.fori_loop(0, MAX_DOUBLINGS if reverse else doublings.astype(int), double, start)


def _product(a: Array, b: Array) -> Array:
    """Product of small matrices as explicit sums, which is faster for large batches."""
    return sum((a[:, k, None] * b[None, k] for k in range(1, len(b))), a[:, 0, None] * b[None, 0])


def linear_step(rate: Array, drift: Array, later: Array, noise: Array, dt: Array) -> tuple[Array, Array]:
    """Mean `(d,)` and covariance, at time dt, of the solution of dX = (A X + b + c t) dt + Q^½ dB from X(0) =
    0, for `rate` A, `drift` b, `later` c and `noise` Q."""
    if drift.size == 1:
        x = rate[0] * dt
        return dt * (drift * decayed(-x) + later * dt * _ramped(x)), noise * dt * decayed(-2 * rate * dt)
    # Time is treated as one more component.
    wide = lambda matrix, column: jnp.block([[matrix, column[:, None]], [jnp.zeros((1, drift.size + 1))]])
    moments = linear_moments(wide(rate, later), wide(noise, jnp.zeros_like(later)), dt, reverse=False)
    mean = moments[1] @ jnp.append(drift, 1.0)
    return mean[:-1], moments[2][:-1, :-1]


def _ramped(x: Array) -> Array:
    """(eˣ − 1 − x)/x²."""
    small = jnp.abs(x) < 0.1
    far = jnp.where(small, 1, x)
    near = jnp.polyval(jnp.array([1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2], x.dtype), x)
    return jnp.where(small, near, (jnp.expm1(far) - far) / far**2)


def decayed(x: Array) -> Array:
    """(1 − e⁻ˣ)/x, the mean of e⁻ˢ over 0 < s < x, with correct derivatives at zero."""
    small = jnp.abs(x) < 0.01
    far = jnp.where(small, 1, x)
    near = jnp.polyval(jnp.array([-1 / 720, 1 / 120, -1 / 24, 1 / 6, -1 / 2, 1], x.dtype), x)
    return jnp.where(small, near, -jnp.expm1(-far) / far)
