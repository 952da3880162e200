"""Densities in one and two dimensions by the Fokker–Planck equation, on boxes that follow the density.

    ∂p/∂t = −∂ᵢ(μᵢ p) + ½ ∂ᵢ∂ⱼ((σσᵀ)ᵢⱼ p)

**Boxes.** Time is divided into segments. Over each, y ∈ [−1, 1)ᵈ and x = c + S w(y), with a box that holds
the density from the beginning to the end of the segment, as predicted by a linearised SDE. It is at rest, or
moves with constant velocity if the density moves by more than its width. Then the density is interpolated to
the next box. Units do not matter, and a narrow start costs a few more segments.

**Space.** Fourier collocation. The mesh is refined until the highest wavenumbers have negligible amplitudes.

**Time.** One exponential of the discretised operator L per segment where it does not change. Else two steps
of the commutator-free Magnus method of order four (Blanes & Moan 2006). In one dimension exponentials are
those of matrices. In two they are expanded in Faber polynomials of an ellipse around the numerical range
(Moret & Novati 2001), which takes O(√(h‖L‖)) products with L for stiff noise, and no linear systems. NumPy
does all this, without compilation; only gradients go through the same segments once more in JAX.

**Error.** A companion solution takes one step per segment, has fewer wavenumbers and, from a point, starts
later. The error at x is the largest relative difference between the two around x, plus the density at the
edges of the boxes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, PRNGKeyArray

from .._checks import NonFiniteError, as_real, check_positive, check_vector, is_traced
from .._functions import fixed_functions
from .._programs import in_double_precision, jit
from ..sde import AbstractSDE, noise_matrix, to_ito, with_explicit_parameters
from ._estimate import AbstractEstimator, Accuracy, Estimate

SIZES = {  # nodes per axis
    1: (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    2: (24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 240, 288),
}
GAUSS = 0.5 + np.array([-1, 1]) * math.sqrt(3) / 6  # nodes of the Gauss rule on [0, 1]
STAGES = np.append(0.5 * GAUSS, 0.5 + 0.5 * GAUSS)  # times of a segment of length one: two steps
BAND = (0.75, 0.66)  # share of the wavenumbers that the solution and its companion have
TERMS = 32  # of an expansion, in one program
BATCH = 4096  # points at which coefficients are evaluated at once
PROBES = 256  # nodes at which the dependence on time is checked
BASE_DRAWS = 4096  # from the base, for its first box
FIRST = 2.0**-12  # of the span: when the density from a point is normal; four times that for the companion
MAX_WORK = 2e8  # nodes times products with the operator, of all passes
FIRST_WORK = 0.25  # share of that for the first solution
DECAY = 30.0  # of amplitudes, over which their rate of decay is measured
MAX_ATTEMPTS = 16  # at one segment
MAX_SEGMENTS = 120  # of one solution
MAX_PASSES = 4
LOWEST = 1e-6  # share of the highest density that is to be known to the tolerance
FLOOR = 1e-7  # nats, of rounding and truncated expansions
OVERSHOOT = 8.0  # of an ellipse around a numerical range, to the right of zero
MARGIN = 1.05  # of a box around the density
MAX_MARGIN = 1.5
FAR = 1.0  # in roots of the covariance: how far a density moves through a box at rest
ACCEPTED_EDGE, ACCEPTED_TAIL = 12.0, 3.0  # times what a box and its mesh are planned for
SEGMENT_WORK = 5e5  # of any segment, in nodes times products with the operator
HOPELESS = 30.0  # times the amplitude of the highest wavenumbers that is allowed, on the largest mesh


Numbers = Any  # an array of JAX or NumPy, or a number


class Unresolved(RuntimeError):
    """Raised for a density that no mesh within the limits resolves."""


class Resolution(NamedTuple):
    """What a solution has to resolve: the amplitudes of the highest wavenumbers (`tail`) and the density at
    the edge of the box, relative to the highest density; the error of one segment in nats, and down to which
    share of the highest density; with which meshes."""

    tail: float
    edge: float
    time: float
    lowest: float
    sizes: tuple[int, ...]

    @staticmethod
    def of(tolerance: float, lowest: float, sizes: tuple[int, ...]) -> "Resolution":
        tail = max(0.15 * tolerance * lowest, 1e-10)
        return Resolution(tail, max(0.05 * tail, 5e-12), 0.2 * tolerance, lowest, sizes)


class Work:
    """The remaining work of an estimate, in nodes times products with the operator."""

    def __init__(self, left: float):
        self.left, self.spent = left, 0.0

    def spend(self, amount: float) -> None:
        self.left -= amount
        self.spent += amount
        if self.left < 0:
            raise Unresolved("the equation takes too much work")


class Box(NamedTuple):
    """x = centre + scale w(y), |yᵢ| ≤ 1; `scale` is lower triangular, and w is the warp of each axis."""

    centre: np.ndarray
    scale: np.ndarray
    skew: np.ndarray  # (d,)

    @staticmethod
    def around(
        x: np.ndarray, mean: np.ndarray, root: np.ndarray, margin: float, skewed: bool = True
    ) -> "Box":
        """The smallest box around points with sides along the columns of `root`, enlarged by a margin."""
        units = scipy.linalg.solve_triangular(root, (x - mean).T, lower=True)
        low, high = units.min(axis=1), units.max(axis=1)
        middle, half = 0.5 * (low + high), 0.5 * margin * (high - low)
        skew = skew_of(middle - half, middle + half) if skewed else 0 * mean
        return Box(mean + root @ middle, root * half, skew)

    def places(self, size: int) -> np.ndarray:
        return self.centre + warp(nodes(size, len(self.centre)), self.skew)[0] @ self.scale.T

    def within(self, x: np.ndarray) -> np.ndarray:
        """u with x = centre + scale u."""
        return scipy.linalg.solve_triangular(self.scale, (np.asarray(x) - self.centre).T, lower=True).T

    def log_volume(self, size: int) -> np.ndarray:
        """The volume element of x divided by that of y, on the mesh, `(nᵈ,)`."""
        slopes = warp(nodes(size, len(self.centre)), self.skew)[1]
        return np.sum(np.log(slopes), axis=1) + np.sum(np.log(np.diag(self.scale)))

    def to_fields(self, size: int) -> np.ndarray:
        """At each node, the matrix that maps μ and the lower triangle of σσᵀ of x to those of y, `(nᵈ, F,
        F)`."""
        d, inverse = len(self.centre), np.linalg.inv(self.scale)
        pairs = [(i, j) for i in range(d) for j in range(i + 1)]
        slope = warp(nodes(size, d), self.skew)[1]
        total = np.zeros((size**d, d + len(pairs), d + len(pairs)))
        total[:, :d, :d] = inverse / slope[:, :, None]
        for f, (i, j) in enumerate(pairs, d):
            for g, (a, b) in enumerate(pairs, d):
                image = inverse[i, a] * inverse[j, b] + (a != b) * inverse[i, b] * inverse[j, a]
                total[:, f, g] = image / (slope[:, i] * slope[:, j])
            if i == j:
                total[:, i] -= 0.5 * self.skew[i] * total[:, f]  # w″ = κ w′
        return total


def warp(y: Any, skew: Any, xp: Any = np) -> tuple[Any, Any]:
    """w(y) = (e^{κy} − cosh κ)/sinh κ, which maps ±1 to ±1, and its slope. It is used for densities with a
    long tail on one side, such as lognormal densities."""
    bend = xp.where(skew == 0, 1.0, skew)
    grown = xp.exp(bend * y) / xp.sinh(bend)
    return xp.where(skew == 0, y, grown - 1 / xp.tanh(bend)), xp.where(skew == 0, 1.0, bend * grown)


def unwarped(u: Any, skew: Any, xp: Any = np) -> Any:
    """y with w(y) = u."""
    bend = xp.where(skew == 0, 1.0, skew)
    return xp.where(skew == 0, u, xp.log(xp.cosh(bend) + u * xp.sinh(bend)) / bend)


def skew_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The skew that puts y = 0 at the origin of a box from low < 0 to high > 0; zero if nearly symmetric."""
    skew = 2 * np.arctanh(np.clip((low + high) / (high - low), -0.95, 0.95))
    return np.where(np.abs(skew) > 0.4, skew, 0)


class Segment(NamedTuple):
    """A span of time, its box and mesh, and those before, from which the density is interpolated."""

    times: np.ndarray  # (K,), of the stages and the end; of the beginning alone if no coefficient changes
    span: float
    box: Box  # at the end
    size: int
    velocity: np.ndarray  # (d,), of the box
    before: tuple[Box, int]
    rounding: float  # of exponentials, relative to the highest density
    additive: bool = False  # noise is the same everywhere

    @property
    def steady(self) -> bool:
        return len(self.times) == 1

    def coefficients(self, sde: AbstractSDE, size: int) -> Numbers:
        """μ and the lower triangle of σσᵀ on a mesh at the times: `(K, nᵈ, F)`."""
        moved = np.multiply.outer(self.times - self.times[-1], self.velocity)
        return coefficients(sde, self.times, self.box.places(size) + moved[:, None])

    @property
    def first(self) -> Box:
        return self.box._replace(centre=self.box.centre - self.span * self.velocity)

    def weights(self, companion: bool) -> np.ndarray:
        """Exponents of the Magnus method in the operators at the times, `(E, K)`.

        A step of length h is exp(h(βA₁ + αA₂)) exp(h(αA₁ + βA₂)), α = ¼ + √3/6, β = ¼ − √3/6, with the
        operators at the nodes of the Gauss rule. For the one step of the companion they are interpolated from
        the four.
        """
        if self.steady:
            return np.array([[self.span]])
        alpha, beta = 0.25 + math.sqrt(3) / 6, 0.25 - math.sqrt(3) / 6
        step = np.array([[alpha, beta], [beta, alpha]])
        stages = step @ extrapolation(GAUSS) if companion else 0.5 * np.kron(np.eye(2), step)
        return self.span * np.pad(stages, ((0, 0), (0, 1)))


def extrapolation(places: Any) -> np.ndarray:
    """The matrix from values at the stages to those of a cubic polynomial through them."""
    return np.vander(places, 4) @ np.linalg.inv(np.vander(STAGES, 4))


class GridDensity(eqx.Module):
    """The density of y on a mesh, with a relative error at each node and an error relative to the maximum."""

    values: Numbers  # (n,) or (n, n)
    relative: Numbers
    absolute: float
    box: Box
    extra: float  # nats

    def log_prob_and_error(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """log p at x `(N, d)` and its error, NaN and infinite outside the box or where p is below that."""
        box = (self.box.centre, np.linalg.inv(self.box.scale), self.box.skew)
        one = lambda x: _evaluate(self.values, self.relative, self.absolute, *box, x)
        value, error = in_batches(one, x, 1 << max(6, (min(len(x), BATCH) - 1).bit_length()))
        return value, error + self.extra

    @property
    def log_maximum(self) -> float:
        density = np.asarray(self.values).ravel() * np.exp(-self.box.log_volume(len(self.values)))
        return math.log(float(np.max(density)))


@functools.lru_cache(maxsize=64)
def nodes(size: int, dimension: int) -> np.ndarray:
    """The nodes of a mesh, `(nᵈ, d)`."""
    axis = -1 + 2 * np.arange(size) / size
    return np.stack([a.ravel() for a in np.meshgrid(*[axis] * dimension, indexing="ij")], axis=1)


def triangle(d: int) -> np.ndarray:
    """The indices of the entries of a symmetric matrix in its lower triangle, stored by rows."""
    return np.array([[max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for j in range(d)] for i in range(d)])


def in_batches(function: Callable, x: Any, size: int) -> Any:
    """Apply a function of `size` rows to any number of rows, in padded blocks."""
    rows = jax.tree.leaves(x)[0].shape[0]
    place = np.minimum(np.arange(-(-rows // size) * size), rows - 1).reshape(-1, size)
    parts = [function(jax.tree.map(lambda a, some=some: a[some], x)) for some in place]
    xp = jnp if any(is_traced(leaf) for leaf in jax.tree.leaves(parts[0])) else np
    return jax.tree.map(lambda *part: xp.concatenate(part)[:rows], *parts)


@functools.partial(jit, level=1)
def _evaluate(
    values: Numbers,
    relative: Numbers,
    absolute: Numbers,
    centre: Numbers,
    inverse: Numbers,
    skew: Numbers,
    x: Numbers,
) -> tuple[Numbers, Numbers]:
    size, d = values.shape[0], values.ndim
    u = (x - centre[None]) @ inverse.T
    inside = jnp.all(jnp.abs(u) < 1, axis=1)
    y = unwarped(jnp.where(inside[:, None], u, 0), skew[None], jnp)
    log_volume = jnp.sum(jnp.log(warp(y, skew[None], jnp)[1]), axis=1) - jnp.sum(jnp.log(jnp.diag(inverse)))
    k = jnp.asarray(np.pi * np.fft.fftfreq(size, 1 / size))
    waves = jnp.exp(1j * k[None, None] * (y[:, :, None] + 1))  # (N, d, n)
    spectrum = jnp.fft.fftn(values) / values.size
    total = waves[:, 0] * spectrum[None] if d == 1 else (waves[:, 0] @ spectrum) * waves[:, 1]
    p = jnp.real(jnp.sum(total, axis=1))
    place = jnp.clip(jnp.round(0.5 * (jax.lax.stop_gradient(y) + 1) * size), 0, size - 1).astype(int)
    share = relative[tuple(place.T)] + absolute * jnp.max(values) / jnp.where(p > 0, p, 1)
    known = inside & (p > 0) & (share < 0.5)
    value = jnp.where(known, jnp.log(jnp.where(known, p, 1)) - log_volume, jnp.nan)
    bar = jnp.where(known, -jnp.log1p(-jnp.where(known, share, 0)), jnp.inf)
    return value, jax.lax.stop_gradient(bar)


@functools.partial(jit, level=1)
def _coefficients(sde: AbstractSDE, t: Numbers, x: Numbers) -> Numbers:
    """μ and the lower triangle of σσᵀ at many points: `(N, F)`, F = d + d(d + 1)/2."""
    ito, d = to_ito(sde), x.shape[1]

    def one(t: Numbers, x: Numbers) -> Numbers:
        sigma = noise_matrix(sde.noise(t, x))
        products = [jnp.sum(sigma[i] * sigma[j]) for i in range(d) for j in range(i + 1)]
        return jnp.concatenate([ito.drift(t, x), jnp.stack(products)])

    return jax.vmap(one)(t, x)


def coefficients(sde: AbstractSDE, times: np.ndarray, x: np.ndarray) -> Numbers:
    """μ and the lower triangle of σσᵀ at points `(K, N, d)`, one set a time: `(K, N, F)`."""
    pairs = np.repeat(times, x.shape[1]), x.reshape(-1, x.shape[2])
    size = min(BATCH, 1 << (len(pairs[0]) - 1).bit_length())
    raw = in_batches(lambda pair: _coefficients(sde, *pair), pairs, size)
    return raw.reshape(*x.shape[:2], -1)


@functools.partial(jit, level=1)
def _combined(weights: Numbers, matrix: Numbers, raw: Numbers) -> Numbers:
    return jnp.einsum("ek,nfg,kng->efn", weights, matrix, jnp.where(jnp.isfinite(raw), raw, 0))


def exponents(raw: Numbers, segment: Segment, companion: bool) -> Numbers:
    """The drift and noise of y that each exponential of a segment takes: `(E, F, n, ...)`."""
    weights, matrix = segment.weights(companion), segment.box.to_fields(segment.size)
    d = len(segment.box.centre)
    raw = raw - np.pad(segment.velocity, (0, raw.shape[2] - d))[None, None]
    if is_traced(raw):
        total = _combined(weights, matrix, raw)
    else:
        mixed = np.tensordot(weights, np.where(np.isfinite(raw), raw, 0), 1)
        total = np.einsum("nfg,eng->efn", matrix, mixed)
    return total.reshape(*total.shape[:2], *[segment.size] * d)


class Expansion(NamedTuple):
    """exp(A) ≈ (Σ aₖ Fₖ((A/r + m)/γ))ʳ, Fₖ₊₁(z) = z Fₖ(z) − δ Fₖ₋₁(z): Faber polynomials of an ellipse with
    centre −m. The sum of its semi-axes is 2γ, and δ is their difference divided by their sum."""

    repeats: int  # r
    centre: float
    scale: float
    terms: np.ndarray  # (blocks, TERMS, 2): aₖ, and δ for each k

    @staticmethod
    def of(damping: float, frequency: float, rounding: float) -> "Expansion":
        """The expansion with the fewest terms for a numerical range within −damping ≤ Re ≤ 0, |Im| ≤
        frequency."""
        repeats = 1 << max(0, math.ceil(math.log2(1e-3 * (damping + frequency))))
        best = Expansion.repeated(repeats, damping, frequency, rounding)
        while repeats < 1 << 20:
            repeats *= 2
            other = Expansion.repeated(repeats, damping, frequency, rounding)
            if other.products >= best.products:
                break
            best = other
        return best

    @staticmethod
    def repeated(repeats: int, damping: float, frequency: float, rounding: float) -> "Expansion":
        centre = 0.5 * damping / repeats
        real = centre + OVERSHOOT
        imaginary = frequency / repeats / math.sqrt(1 - (centre / real) ** 2)
        scale, ratio = 0.5 * (real + imaginary), (real - imaginary) / (real + imaginary)
        count = 1 << math.ceil(math.log2(4 * scale + 200))
        u = np.exp(2j * np.pi * np.arange(count) / count)
        series = np.real(np.fft.fft(np.exp(scale * (u + ratio / u) - centre)))[: count // 2] / count
        used = 1 + int(np.max(np.nonzero(np.abs(series) > rounding)[0]))
        blocks = -(-used // TERMS)
        terms = np.zeros((blocks * TERMS, 2))
        terms[:used, 0] = series[:used]
        terms[1:, 1] = ratio
        terms[1:2, 1] = 2 * ratio
        return Expansion(repeats, centre, scale, terms.reshape(blocks, TERMS, 2))

    @property
    def products(self) -> int:
        return self.repeats * self.terms.size // 2


def waves(y: np.ndarray, count: int) -> np.ndarray:
    """Cosines and sines of the first `count` wavenumbers at the given places, `(..., 1 + 2 count)`."""
    angle = np.multiply.outer(np.pi * y, np.arange(1, 1 + count))
    return np.concatenate([np.ones((*y.shape, 1)), np.cos(angle), np.sin(angle)], axis=-1)


class Modes(NamedTuple):
    """Matrices between values at the nodes of an axis and amplitudes of its cosines and sines."""

    highest: int  # wavenumber
    values: np.ndarray  # (n, m), maps amplitudes to values
    plain: np.ndarray  # (m, n), maps values to amplitudes
    first: np.ndarray  # (m, n), maps values to the amplitudes of −∂ of them
    second: np.ndarray  # (m, n), maps values to the amplitudes of ½∂² of them
    slope: np.ndarray  # (m,), factors by which ∂ multiplies amplitudes, and the indices of these
    partner: np.ndarray

    @staticmethod
    @functools.cache
    def of(size: int, companion: bool) -> "Modes":
        count = math.floor(BAND[companion] * size / 2)
        values, k = waves(nodes(size, 1)[:, 0], count), np.arange(1, 1 + count)
        plain = np.append(1, np.full(2 * count, 2))[:, None] / size * values.T
        slope, partner = np.pi * np.concatenate([[0], k, -k]), np.concatenate([[0], k + count, k])
        first, second = -slope[:, None] * plain[partner], -0.5 * slope[:, None] ** 2 * plain
        return Modes(count, values, plain, first, second, slope, partner)


def operator(drift: Any, noise: Any, modes: Modes) -> Any:
    """The discretised operator in one dimension, `(m, m)`."""
    rates = lambda part: part[0][:, None] * modes.values
    return modes.first @ rates(drift) + modes.second @ rates(noise)


def product(now: Any, drift: Any, noise: Any, modes: Modes) -> Any:
    """The operator in two dimensions applied to a density: amplitudes of cosines and sines.

    Noise that is the same everywhere has one node."""
    q = modes.values @ now @ modes.values.T
    left, right = modes.first @ (drift[0] * q), modes.plain @ (drift[1] * q)
    if noise.size == 3:
        square, cross = modes.slope[:, None] ** 2, modes.slope[:, None] * modes.slope[None]
        rest = (-0.5 * (noise[0] * square + noise[2] * square.T)) * now
        rest = rest + (noise[1] * cross) * now[modes.partner][:, modes.partner]
        return left @ modes.plain.T + right @ modes.first.T + rest
    left = left + modes.second @ (noise[0] * q)
    right = right + modes.first @ (noise[1] * q)
    return left @ modes.plain.T + right @ modes.first.T + (modes.plain @ (noise[2] * q)) @ modes.second.T


def along_axes(matrix: np.ndarray, q: Any) -> Any:
    return matrix @ q if q.ndim == 1 else matrix @ q @ matrix.T


def term(state: Any, number: Any, apply: Callable, expansion: Any) -> Any:
    """Add one term of an expansion; the state contains the last two polynomials and the sum."""
    before, now, total = state
    after = (apply(now) + expansion[0] * now) / expansion[1] - number[1] * before
    return now, after, total + number[0] * now


def matrix_exponential(matrix: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return scipy.linalg.expm(matrix)


@functools.partial(jit, level=1)
def _terms(state: Any, drift: Any, noise: Any, size: int, expansion: Any, numbers: Any) -> Any:
    modes = Modes.of(size, False)
    if state[0].ndim == 1:
        matrix = operator(drift, noise + jnp.zeros_like(drift), modes)
        apply = lambda now: matrix @ now
    else:
        apply = lambda now: product(now, drift, noise, modes)
    step = lambda state, number: (term(state, number, apply, expansion), None)
    return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, numbers)[0]


def exponential(now: Numbers, drift: Numbers, noise: Numbers, expansion: Expansion, modes: Modes) -> Numbers:
    """exp(A) applied to amplitudes; differentiable if they are traced."""
    drift, noise, size = drift / expansion.repeats, noise / expansion.repeats, len(modes.values)
    ellipse = (expansion.centre, expansion.scale)
    zero = np.zeros(now.shape)
    for _ in range(expansion.repeats):
        state = (zero, now, zero)
        for numbers in expansion.terms:
            if is_traced(now) or is_traced(drift):
                state = _terms(state, drift, noise, size, ellipse, numbers)
                continue
            for number in numbers[: 1 + np.max(np.flatnonzero(numbers[:, 0]))]:
                state = term(state, number, lambda now: product(now, drift, noise, modes), ellipse)
        now = state[2]
    return now


def run(q: Numbers, raw: Numbers, segment: Segment, companion: bool, work: Work | None = None) -> Numbers:
    """The density at the end of a segment from the density at its beginning."""
    d, modes, traced = q.ndim, Modes.of(segment.size, companion), is_traced(raw) or is_traced(q)
    now = _along_axes(modes.plain, q) if traced else along_axes(modes.plain, q)
    for table in exponents(raw, segment, companion):
        drift, noise = table[:d], table[d:]
        if segment.additive:
            noise = noise[(slice(None), *[slice(1)] * d)]
        if d == 1 and not traced:
            if work is not None:
                work.spend(segment.size**3 / 30)
            now = matrix_exponential(operator(drift, noise + 0 * drift, modes)) @ now
            continue
        still = np.asarray(values_of(table))
        expansion = Expansion.of(*spectral_bounds(still[:d], still[d:], BAND[companion]), segment.rounding)
        if work is not None:
            work.spend(expansion.products * q.size * (1 if segment.additive else 2))
        now = exponential(now, drift, noise, expansion, modes)
    return _along_axes(modes.values, now) if traced else along_axes(modes.values, now)


_along_axes = jit(along_axes, level=1)


def spectral_bounds(drift: np.ndarray, noise: np.ndarray, share: float) -> tuple[float, float]:
    """Bounds of the numerical range of the discretised operator: its extent to the left, and up and down."""
    d, size = len(drift), drift.shape[1]
    top, axes = share * np.pi * size / 2, tuple(range(1, d + 1))
    damping = 0.5 * top**2 * float(np.sum(np.abs(noise[triangle(d).ravel()]), axis=0).max())
    # The jump of the periodic continuation of the drift adds to the bound.
    jump = max(float(np.abs(np.take(drift[i], 0, i) - np.take(drift[i], -1, i)).max()) for i in range(d))
    damping += 0.5 * top * jump
    slopes = np.gradient(noise, 2 / size, axis=axes)
    change = sum(np.abs(part).sum(axis=0) for part in (slopes if d > 1 else [slopes]))
    return damping, top * float((np.abs(drift).sum(axis=0) + change).max())


class Transfer(NamedTuple):
    """The interpolation of a density from the mesh of one box to the mesh of another."""

    rows: np.ndarray  # (n, n′), interpolation along the first axis
    waves: np.ndarray  # (n, n, m), interpolation along the second axis, for each row
    plain: np.ndarray  # (m, n′)
    volume: np.ndarray  # (n, ...), ratio of the volume elements of new and old box; zero outside the old box

    @staticmethod
    def to(segment: Segment) -> "Transfer":
        (old, before), new, size = segment.before, segment.first, segment.size
        u = old.within(new.places(size))
        y = unwarped(np.clip(u, -1, 1), old.skew)
        log_volume = np.sum(np.log(warp(y, old.skew)[1]), axis=1) + np.sum(np.log(np.diag(old.scale)))
        inside = np.all(np.abs(u) < 1, axis=1)
        volume = np.where(inside, np.exp(new.log_volume(size) - log_volume), 0)
        d, modes = u.shape[1], Modes.of(before, False)
        shape = (size,) * d
        places = y.reshape(*shape, d)
        last = waves(places[..., 1] if d > 1 else np.zeros(0), modes.highest)
        rows = waves(places[:, 0, 0] if d > 1 else y[:, 0], modes.highest) @ modes.plain
        return Transfer(rows, last, modes.plain, volume.reshape(shape))

    def __call__(self, q: Any) -> Any:
        if q.ndim == 1:
            return self.volume * (self.rows @ q)
        rows = self.rows @ q @ self.plain.T
        return self.volume * (self.waves @ rows[..., None])[..., 0]


_transfer = jit(lambda transfer, q: transfer(q), level=1)


def tails(q: np.ndarray) -> np.ndarray:
    """For each wavenumber, the approximate contribution of it and all higher wavenumbers to a density,
    relative to the maximum of the density."""
    spectrum = np.abs(np.fft.rfftn(q)) / q.size
    whole, half = np.fft.fftfreq(len(q), 1 / len(q)), np.fft.rfftfreq(len(q), 1 / len(q))
    shell = functools.reduce(np.maximum.outer, [np.abs(whole)] * (q.ndim - 1) + [half]).round().astype(int)
    energy = np.bincount(shell.ravel(), (spectrum**2).ravel())
    return 4 * np.sqrt(2 * np.cumsum(energy[::-1])[::-1]) / np.max(np.abs(q))


def tail(q: np.ndarray) -> float:
    """What the companion does not resolve."""
    return float(tails(q)[math.floor(BAND[1] * len(q) / 2) + 1])


def nodes_needed(q: np.ndarray, level: float) -> float:
    """Per axis, for the density to be resolved down to a level."""
    return 2 / BAND[1] * max(1, int(np.argmax(np.append(tails(q), 0) < level)))


def extrapolated_nodes(q: np.ndarray, level: float, lower: float) -> float:
    """Per axis, for a lower level, if amplitudes decay on as they do now."""
    above, now = nodes_needed(q, DECAY * level), nodes_needed(q, level)
    return now + (now - above) * math.log(level / lower) / math.log(DECAY)


def edge(q: np.ndarray) -> float:
    """The largest density on the faces of the box, relative to the maximum; ripples of the mesh are smoothed
    out."""
    smooth = q
    for axis in (*range(q.ndim), *range(q.ndim)):
        smooth = 0.5 * smooth + 0.25 * (np.roll(smooth, 1, axis) + np.roll(smooth, -1, axis))
    least = np.minimum(np.abs(q), np.abs(smooth))
    return float(max(np.max(np.take(least, [0, -1], axis)) for axis in range(q.ndim)) / np.max(np.abs(q)))


def is_uniform(noise: np.ndarray) -> bool:
    """Whether `(..., N, F)` is the same at all nodes."""
    return bool(np.ptp(noise, axis=-2).max() <= 1e-12 * np.abs(noise).max())


class Forecast(NamedTuple):
    """A forecast of a density by the nearest linear SDE, dZ = (drift + slope (Z − mean)) dt + noise."""

    mean: np.ndarray
    covariance: np.ndarray
    drift: np.ndarray
    slope: np.ndarray
    noise: np.ndarray  # σσᵀ
    units: np.ndarray  # (P, d), the farthest points of the density, in roots of the covariance
    additive: bool

    @staticmethod
    def of(q: np.ndarray, box: Box, raw: np.ndarray, level: float) -> "Forecast":
        """From the density on a mesh and the coefficients on it; the box ends at a level of the density."""
        d, x, weight = q.ndim, box.places(q.shape[0]), np.maximum(q.ravel(), 0)
        weight = weight / weight.sum()
        raw = np.where(np.isfinite(raw), raw, 0)
        mean = weight @ x
        away = x - mean
        covariance = (weight[:, None] * away).T @ away
        slope = np.linalg.solve(covariance, (weight[:, None] * away).T @ raw[:, :d]).T
        noise = (weight @ raw[:, d:])[triangle(d)]
        # Tails below the noise of the mesh are taken to be normal.
        seen = min(max(10 * float(-q.min() / q.max()), edge(q), level), 1e-2)
        root = np.linalg.cholesky(covariance)
        units = scipy.linalg.solve_triangular(root, away[q.ravel() > seen * q.max()].T, lower=True).T
        angle = np.linspace(0, 2 * np.pi, 64, endpoint=False)
        directions = np.array([[-1.0, 1.0]]) if d == 1 else np.array([np.cos(angle), np.sin(angle)])
        farthest = units[np.unique(np.argmax(units @ directions, axis=0))]
        farthest = math.sqrt(math.log(level) / math.log(seen)) * farthest
        return Forecast(mean, covariance, weight @ raw[:, :d], slope, noise, farthest, is_uniform(raw[:, d:]))

    def path(self, span: float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance at five times of a span (Van Loan 1978)."""
        d = len(self.mean)
        rate = np.zeros((2 * d + 2, 2 * d + 2))  # rate matrix of Z − mean and 1
        rate[:d, :d], rate[:d, d], rate[:d, d + 1 : -1] = -self.slope, -self.drift, self.noise
        rate[d + 1 :, d + 1 :] = -rate[: d + 1, : d + 1].T
        step = scipy.linalg.expm(0.25 * span * rate)
        push = step[d + 1 :, d + 1 :].T
        added = push @ step[: d + 1, d + 1 :]
        state, square = np.append(0 * self.mean, 1), np.pad(self.covariance, ((0, 1), (0, 1)))
        means, covariances = [self.mean], [self.covariance]
        for _ in range(4):
            state, square = push @ state, push @ square @ push.T + added
            means.append(self.mean + state[:d])
            covariances.append(square[:d, :d])
        return np.array(means), np.array(covariances)

    def box(self, span: float, margin: float, level: float) -> tuple[Box, np.ndarray, float]:
        """A box that holds the density over a span, at its end, its velocity, and the nodes that it takes."""
        means, covariances = self.path(span)
        move = means[-1] - means[0]
        # A box at rest takes fewer exponentials, if the density moves by no more than its width.
        move = move * (np.abs(np.linalg.solve(np.linalg.cholesky(self.covariance), move)).max() > FAR)
        means = means - np.multiply.outer(np.linspace(-1, 0, len(means)), move)
        middle = means.mean(axis=0)
        root = np.linalg.cholesky(covariances.mean(axis=0) + np.atleast_2d(np.cov(means.T, bias=True)))
        x = means[:, None] + self.units @ np.swapaxes(np.linalg.cholesky(covariances), 1, 2)
        box = Box.around(x.reshape(-1, len(middle)), middle, root, margin, not self.additive)
        return box, move / span, max(self.needed(box, level, each) for each in covariances)

    @staticmethod
    def needed(box: Box, level: float, covariance: np.ndarray) -> float:
        """The nodes per axis that a normal density takes in a box."""
        turned = box.scale.T @ np.linalg.inv(covariance) @ box.scale
        return math.sqrt(-2 * math.log(level) * float(np.diag(turned).max())) / (0.5 * np.pi * BAND[1])

    def plan(
        self, longest: float, margin: float, factor: float, cost: float, resolution: Resolution
    ) -> "Plan":
        """The span and the mesh that take the least work per time, for a density that takes `factor` times
        the nodes of a normal one; `cost` is that of the coefficients at a node."""
        best, least, d = None, math.inf, len(self.mean)
        for power in range(60):
            span = 0.7**power * longest
            try:
                with np.errstate(all="ignore"):
                    box, velocity, needed = self.box(span, margin, resolution.tail)
            except (np.linalg.LinAlgError, ValueError):
                continue
            size = next((size for size in resolution.sizes if size >= factor * needed), None)
            if size is None:
                continue
            inverse, top = np.linalg.inv(box.scale), 0.5 * np.pi * size
            damping = 0.5 * top**2 * np.abs(inverse @ self.noise @ inverse.T).sum()
            flows = inverse @ self.slope @ box.scale, inverse @ (self.drift - velocity)
            speed = sum(np.abs(flow).sum() for flow in flows)
            products = 40 + 4 * math.sqrt(span * damping) + span * top * speed if d == 2 else size**2 / 30
            work = (SEGMENT_WORK + 2 * (cost + products) * size**d) / span
            if work < least:
                best, least = Plan(span, size, margin), work
            elif work > 3 * least:
                break
        if best is None:
            raise Unresolved("no mesh is as fine as the density")
        return best


class Plan(NamedTuple):
    """For a segment: its span, its nodes per axis and the margin of its box."""

    span: float
    size: int
    margin: float
    widened: bool = False

    def shorter(self, excess: float) -> "Plan":
        return self._replace(span=min(0.75, max(0.2, 0.9 * excess**0.2)) * self.span)

    def finer(self, needed: float, sizes: tuple[int, ...]) -> "Plan":
        finer = [size for size in sizes if size > self.size]
        size = next((size for size in finer if size >= min(needed, 1.5 * self.size)), finer[-1])
        return self._replace(size=size)

    def wider(self, excess: float) -> "Plan":
        """Also shorter, if that was not enough."""
        wider = 1.1 * self.margin * excess
        span = (0.5 if self.widened or wider > MAX_MARGIN else 1.0) * self.span
        return Plan(span, self.size, min(wider, MAX_MARGIN), True)

    def revised(self, new: np.ndarray, error: float, last: bool, resolution: Resolution) -> "Plan":
        """A plan that resolves what this one did not, or this one; the error is that of the time steps. The
        last plans leave a density at the edge to the error bar."""
        ripples, edges = tail(new), edge(new)
        wide = edges > ACCEPTED_EDGE * resolution.edge and not last
        coarse = ripples > ACCEPTED_TAIL * resolution.tail
        if coarse and self.size < resolution.sizes[-1] and (ripples > edges or not wide):
            return self.finer(extrapolated_nodes(new, ripples, resolution.tail), resolution.sizes)
        if wide:
            return self.wider(math.sqrt(math.log(resolution.edge) / math.log(edges)))
        if ripples > HOPELESS * resolution.tail:
            raise Unresolved(f"{self.size} nodes per axis do not resolve the density")
        return self.shorter(resolution.time / error) if error > resolution.time and not coarse else self


class State(NamedTuple):
    """Solution and companion at a time, and proposals for the next segment."""

    time: float
    box: Box
    q: Numbers
    companion: Numbers
    raw: np.ndarray  # (nᵈ, F), coefficients on the mesh
    longest: float
    margin: float = MARGIN
    outside: float = 0.0  # the largest density at the edge so far, relative to the maximum


class Solution(NamedTuple):
    """A density, and the segments that led to it from its first box."""

    density: GridDensity
    segments: list[Segment]


def solve(sde: AbstractSDE, begin: Any, t1: float, resolution: Resolution, work: Work) -> Solution:
    """The density at t1 from `begin`, a `FromDensity` or `FromPoint`."""
    t, box = begin.time, begin.box(resolution.edge)
    q = np.zeros(0)
    for size in resolution.sizes:
        q = begin.density(box, size)
        if tail(q) < resolution.tail:
            break
    raw = coefficients(sde, np.array([t]), box.places(len(q))[None])[0]
    state, segments = State(t, box, q, q, raw, begin.longest, outside=edge(q)), []
    while state.time < t1:
        before, (state, segment) = state.time, next_state(sde, state, t1, resolution, work)
        segments.append(segment)
        if before < begin.later <= state.time:
            state = state._replace(companion=begin.after(state.time, state.box, segment.size))
        if len(segments) > MAX_SEGMENTS:
            raise Unresolved("the equation takes too many segments")
    error = relative_difference(state.q, state.companion)
    extra = FLOOR + begin.error(*segments[0].before)
    return Solution(GridDensity(state.q, error, 4 * state.outside + 1e-14, state.box, extra), segments)


def next_state(
    sde: AbstractSDE, state: State, t1: float, resolution: Resolution, work: Work
) -> tuple[State, Segment]:
    """One segment, with a box, a mesh and a span that resolve the density."""
    cost = evaluation_cost(sde)
    ahead, left = Forecast.of(state.q, state.box, state.raw, resolution.edge), t1 - state.time
    normal = ahead.needed(state.box, resolution.tail, ahead.covariance)
    longest = left if state.longest > 0.8 * left else state.longest
    plan = ahead.plan(
        longest, state.margin, nodes_needed(state.q, resolution.tail) / normal, cost, resolution
    )
    for attempt in range(MAX_ATTEMPTS):
        work.spend(SEGMENT_WORK)
        times = state.time + plan.span * np.append(STAGES, 1.0)
        times[-1] = t1 if plan.span == left else times[-1]
        box, velocity, _ = ahead.box(plan.span, plan.margin, resolution.tail)
        before, rounding = (state.box, len(state.q)), min(1e-10, 0.1 * resolution.edge)
        segment = Segment(times, plan.span, box, plan.size, velocity, before, rounding)
        segment, miss = checked_in_time(sde, segment)
        if miss > 20 * resolution.time:
            plan = plan.shorter(20 * resolution.time / miss)
            continue
        move = Transfer.to(segment)
        q, other = move(state.q), move(state.companion)
        if plan.size < resolution.sizes[-1] and tail(q) > ACCEPTED_TAIL * resolution.tail:
            plan = plan.finer(plan.size, resolution.sizes)
            continue
        work.spend(len(times) * q.size * cost)
        raw = segment.coefficients(sde, plan.size)
        segment = segment._replace(additive=ahead.additive and is_uniform(raw[..., q.ndim :]))
        new, companion = run(q, raw, segment, False, work), run(other, raw, segment, True, work)
        if not (np.all(np.isfinite(new)) and np.all(np.isfinite(companion))):
            plan = plan.shorter(0)
            continue
        if not np.all(np.isfinite(raw[:, new.ravel() > 1e-6 * new.max()])):
            raise NonFiniteError(f"drift or diffusion is not finite near z = {box.centre}: a grid needs both")
        error = log_gap(new, companion, resolution.lowest) - log_gap(q, other, resolution.lowest)
        error = 0.0 if segment.steady else max(error, 0.05 * miss)
        better = plan.revised(new, error, attempt >= MAX_ATTEMPTS // 2, resolution)
        if better == plan:
            longer = min(4.0, 0.9 * max(error / resolution.time, 1e-6) ** -0.2) * plan.span
            margin = max(MARGIN, (1.06 if edge(new) > 2 * resolution.edge else 0.98) * plan.margin)
            edges = max(state.outside, edge(new))
            return State(float(times[-1]), box, new, companion, raw[-1], longer, margin, edges), segment
        plan = better
    raise Unresolved("no box holds the density")


def checked_in_time(sde: AbstractSDE, segment: Segment) -> tuple[Segment, float]:
    """The segment, of one time if no coefficient depends on it; and the difference, in nats, between the
    coefficients at its end and those extrapolated from the stages: it detects fast changes between them."""
    d = len(segment.box.centre)
    size = round(PROBES ** (1 / d))
    central = np.sum(nodes(size, d) ** 2, axis=1) < 0.5
    raw = segment.coefficients(sde, size)[:, central]
    raw = np.where(np.isfinite(raw), raw, 0)
    if np.all(np.ptp(raw, axis=0) <= 1e-9 * np.abs(raw).max(axis=(0, 1))):
        return segment._replace(times=segment.times[-1:]), 0.0
    gap = raw[-1] - np.tensordot(extrapolation([1.0])[0], raw[:-1], 1)
    fields = np.abs(np.einsum("nfg,ng->nf", segment.box.to_fields(size)[central], gap)).max(axis=0)
    # In units of the box, of seven standard deviations, log p has slopes of up to 26 there.
    return segment, segment.span * float(26 * fields[:d].sum() + 340 * fields[d:].sum())


def evaluation_cost(sde: AbstractSDE) -> float:
    """The approximate cost of the coefficients at a point, in products with the operator; 150 parameters cost
    as much as one product."""
    return 1 + sum(leaf.size for leaf in jax.tree.leaves(sde) if eqx.is_array(leaf)) / 150


def log_gap(q: np.ndarray, other: np.ndarray, lowest: float) -> float:
    """The largest difference of logarithms where the density is above a share of its maximum."""
    where = q > lowest * q.max()
    return float(np.max(np.abs(q - other)[where] / q[where]))


def relative_difference(q: np.ndarray, other: np.ndarray) -> np.ndarray:
    """At each node, the error of the density relative to it: the largest relative difference, or the largest
    absolute difference divided by the density, among the node and its neighbours; the smaller of both."""

    def largest(gap: np.ndarray) -> np.ndarray:
        for axis in range(q.ndim):
            gap = np.max([np.roll(gap, shift, axis) for shift in (-1, 0, 1)], axis=0)
        return gap

    gap, size = np.abs(q - other), np.maximum(np.abs(q), 1e-300)
    return np.minimum(largest(gap / size), largest(gap) / size)


class FromDensity(eqx.Module):
    """An initial distribution: its log-density at points `(N, d)`, and draws from it."""

    log_prob: Callable[[Numbers], Numbers]
    draws: np.ndarray
    longest: float
    time = 0.0
    later = math.inf
    first_share = 1e-2

    def box(self, level: float) -> Box:
        """Where the density is above a level of its maximum."""
        mean, root = np.mean(self.draws, axis=0), np.linalg.cholesky(np.atleast_2d(np.cov(self.draws.T)))
        size = round(BATCH ** (1 / len(mean)))
        box = Box.around(self.draws, mean, root, 2.2, skewed=False)
        for _ in range(8):
            x, y = box.places(size), nodes(size, len(mean))
            logs = np.asarray(self.log_prob(x))
            above = logs > np.max(logs[np.isfinite(logs)], initial=-np.inf) + math.log(level)
            if not np.any(above):
                raise Unresolved("no box around its draws holds the base's density")
            reach = np.abs(y[above] + 1 / size).max(axis=0)
            fits = np.all(reach < 1 - 3 / size) and np.all(np.ptp(y[above], axis=0) > 0.5)
            box = Box.around(x[above], mean, root, 1.04 if fits else 1.5, skewed=bool(fits))
            if fits:
                break
        return box

    def density(self, box: Box, size: int) -> Numbers:
        return _on_mesh(self.log_prob(box.places(size)), box, size)

    def error(self, box: Box, size: int) -> float:
        """That of the integral over the box, which is one."""
        mass = float(np.mean(np.asarray(self.density(box, size)))) * 2 ** len(box.centre)
        return abs(math.log(mass)) if mass > 0 else math.inf


class FromPoint(eqx.Module):
    """A start from a point: a normal distribution a short while later, and later still for the companion."""

    sde: AbstractSDE
    point: Numbers
    time: float
    first_share = LOWEST  # most of the segments take little

    @property
    def later(self) -> float:
        return 4 * self.time

    @property
    def longest(self) -> float:
        return 8 * self.time

    def box(self, level: float) -> Box:
        mean, covariance = (np.asarray(a) for a in _moments(self.sde, self.point, self.time))
        if not (np.all(np.isfinite(covariance)) and np.all(np.linalg.eigvalsh(covariance) > 0)):
            raise Unresolved("there is no density from this point")
        return Box(mean, np.linalg.cholesky(covariance) * math.sqrt(-2.1 * math.log(level)), 0 * mean)

    def density(self, box: Box, size: int) -> Numbers:
        return self.after(self.time, box, size)

    def after(self, time: float, box: Box, size: int) -> Numbers:
        mean, covariance = _moments(self.sde, self.point, time)
        return _on_mesh(_normal(mean, covariance, box.places(size)), box, size)

    def error(self, box: Box, size: int) -> float:
        del box, size
        return 0.0


def _on_mesh(logs: Numbers, box: Box, size: int) -> Numbers:
    xp = jnp if is_traced(logs) else np
    return xp.reshape(xp.exp(logs + box.log_volume(size)), (size,) * len(box.centre))


@functools.partial(jit, level=1)
def _moments(sde: AbstractSDE, point: Numbers, t: Numbers) -> tuple[Numbers, Numbers]:
    """Mean and covariance a short time after a point: m′ = E μ and C′ = E[μ(Z − m)ᵀ + (Z − m)μᵀ + σσᵀ] from C
    = 0, with expectations expanded to second derivatives of μ and σσᵀ."""
    ito = to_ito(sde)

    def both(t: Numbers, z: Numbers) -> Numbers:
        sigma = noise_matrix(sde.noise(t, z))
        return jnp.concatenate([ito.drift(t, z)[None], sigma @ sigma.T])

    def rate(t: Numbers, state: Numbers) -> Numbers:
        mean, covariance = state[0], state[1:]
        slope = jax.jacfwd(both, 1)(t, mean)
        bend = jax.jacfwd(jax.jacfwd(both, 1), 1)(t, mean)
        value = both(t, mean) + 0.5 * jnp.einsum("kiab,ab->ki", bend, covariance)
        push = slope[0] @ covariance
        return jnp.concatenate([value[:1], value[1:] + push + push.T])

    def step(state: Numbers, now: Numbers) -> tuple[Numbers, None]:
        def stage(carry: tuple[Numbers, Numbers], part: Numbers) -> tuple[tuple[Numbers, Numbers], None]:
            last = rate(now + part[0], state + part[0] * carry[1])
            return (carry[0] + part[1] * last, last), None

        parts = h * jnp.asarray([[0, 1 / 6], [0.5, 1 / 3], [0.5, 1 / 3], [1, 1 / 6]])
        return jax.lax.scan(stage, (state, jnp.zeros_like(state)), parts)[0][0], None

    h = t / 4
    start = jnp.concatenate([point[None], jnp.zeros((point.size, point.size))])
    end = jax.lax.scan(step, start, h * jnp.arange(4.0))[0]
    return end[0], end[1:]


@functools.partial(jit, level=1)
def _normal(mean: Numbers, covariance: Numbers, x: Numbers) -> Numbers:
    return jax.vmap(lambda x: jax.scipy.stats.multivariate_normal.logpdf(x, mean, covariance))(x)


@functools.partial(jit, level=1)
def _log_prob(base: Any, x: Numbers) -> Numbers:
    return jax.vmap(base.log_prob)(x)


@functools.partial(jit, level=1)
def _draws(base: Any) -> Numbers:
    return base.sample(key=jax.random.key(0), shape=(BASE_DRAWS,))


class BaseLogProb(eqx.Module):
    """The log-density of a base at points `(N, d)`."""

    base: Any

    def __call__(self, x: Numbers) -> Numbers:
        return in_batches(lambda some: _log_prob(self.base, some), x, BATCH)


def values_of(tree: Any) -> Any:
    """The concrete values of arrays that are being differentiated."""
    tree = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, tree)
    if any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise TypeError("rf.density.Grid chooses its mesh from values: call it outside of jit and vmap")
    return tree


def replay(sde: AbstractSDE, begin: Any, solution: Solution) -> GridDensity:
    """The density of a solution, to be differentiated: with the same boxes, meshes and steps."""
    q = begin.density(*solution.segments[0].before)
    for segment in solution.segments:
        raw = segment.coefficients(sde, segment.size)
        q = run(_transfer(Transfer.to(segment), q), raw, segment, companion=False)
    return eqx.tree_at(lambda density: density.values, solution.density, q)


def log_prob_and_error(
    sde: AbstractSDE,
    begin: Any,
    t1: float,
    x: Numbers,
    tolerance: float,
    largest: int | None = None,
    max_work: float = MAX_WORK,
) -> tuple[Numbers, Numbers]:
    """log p at `(N, d)` and its error, from a mesh that is refined until the error is below the tolerance."""
    (still, start), points = values_of((sde, begin)), values_of(x)
    solution, value, error = None, np.full(len(x), np.nan), np.full(len(x), np.inf)
    # The share of the highest density that is to be known, and the part of the tolerance.
    lowest, part, left = begin.first_share, 1.0, max_work
    sizes = tuple(size for size in SIZES[points.shape[1]] if size <= (largest or math.inf))
    for _ in range(MAX_PASSES):
        # A first, coarse solution shows whether there is hope.
        first = solution is None and lowest > LOWEST
        meshes = sizes[: 1 + len(sizes) // 2] if first else sizes
        resolution, work = (
            Resolution.of(part * tolerance, lowest, meshes),
            Work((FIRST_WORK if first else 1) * left),
        )
        try:
            solution = solve(still, start, t1, resolution, work)
        except (Unresolved, np.linalg.LinAlgError):
            break
        value, error = (np.asarray(a) for a in solution.density.log_prob_and_error(points))
        # Points at which the density may be above the lowest share, but is not known.
        share = np.exp(np.where(np.isnan(value), -np.inf, value) - solution.density.log_maximum)
        inside = np.all(np.abs(solution.density.box.within(points)) < 1, axis=1)
        low = np.isnan(value) & inside & (lowest > LOWEST)
        unmet = ~(error <= tolerance) & (share > 0.5 * LOWEST)
        if not np.any(unmet | low):
            break
        needed = LOWEST if low.any() else max(LOWEST, 0.5 * np.min(share[unmet]))
        lowest, part = (needed, part) if needed < 0.9 * lowest else (lowest, 0.2 * part)
        left -= work.spent
        next_level = Resolution.of(part * tolerance, lowest, sizes).tail
        size = extrapolated_nodes(np.asarray(solution.density.values), resolution.tail, next_level)
        growth = size / len(solution.density.values)
        if size > sizes[-1] or work.spent * growth ** (points.shape[1] + 1) > 2 * left:
            break
    if solution is None or not any(is_traced(leaf) for leaf in jax.tree.leaves((sde, begin, x))):
        return value, error
    return replay(sde, begin, solution).log_prob_and_error(x)


def applies(flow: Any) -> str | None:
    """The reason why a grid cannot estimate the density of a flow; None if it can."""
    if flow.dimension not in SIZES:
        return f"a grid needs one or two dimensions, got {flow.dimension}"
    if not flow.noise_dimension:
        return "a grid needs noise, and this SDE has none: rf.PullBack(1) is exact"
    if not flow.driver.brownian:
        return f"a grid needs Brownian motion, got {type(flow.driver).__name__}"
    ends = getattr(getattr(flow.sde, "coordinates", None), "ends", ())
    if np.any(np.isfinite(np.array(ends, float))):
        return f"a grid needs a state space without boundaries, and {type(flow.sde).__name__} has some"
    return None


class Grid(AbstractEstimator):
    """log p(x) in one or two dimensions by the Fokker–Planck equation, without paths.

    `total_error` consists of `solver_error` only, the error of mesh and time steps. This error is infinite,
    and `log_prob` is NaN, if x is outside the box around the density, if the density is below its error
    (about 1e-8 of the maximum), or if no mesh resolves the density. Coefficients and base should be smooth.
    The result is differentiable, in reverse mode, in x and in the parameters of SDE and base. The mesh is
    chosen from values, so the estimator cannot be used inside `jit`.

    **Arguments:** `tolerance`, the total error to reach if `estimate` is called without one; `start`, a fixed
    initial state `(d,)` in place of the base; `largest`, the maximum number of nodes per axis.

    ```python
    import jax, jax.numpy as jnp
    import roughflow as rf

    sde = rf.ItoSDE(lambda t, z: jnp.sin(z), lambda t, z: jnp.ones((1, 1)))
    flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)))
    x = jnp.linspace(-3, 3, 5)[:, None]
    flow.estimate(x, key=jax.random.key(0), estimator=rf.density.Grid())
    ```
    """

    tolerance: float = 0.02
    start: Array | None = None
    largest: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_positive("tolerance", self.tolerance)

    def estimate(self, flow: Any, x: Array, *, key: PRNGKeyArray, accuracy: Accuracy) -> Estimate:
        """log p at `x` of shape `(..., d)`; the key is not used."""
        del key
        if (reason := applies(flow)) is not None:
            raise ValueError(reason)
        x = jnp.asarray(as_real("x", x))
        check_vector("x", x, flow.dimension)
        tolerance = self.tolerance if accuracy.tolerance is None else accuracy.tolerance
        with fixed_functions():
            value, error = estimate(flow, x, tolerance, self.start, self.largest)
        unmet = ~(error <= tolerance) & (accuracy.tolerance is not None)
        return Estimate.of(value, "grid", solver_error=error, unmet=unmet)


@in_double_precision
def estimate(
    flow: Any,
    x: Numbers,
    tolerance: float,
    start: Any = None,
    largest: int | None = None,
    max_work: float = MAX_WORK,
) -> tuple[Numbers, Numbers]:
    """log p at `x` `(..., d)` and its error; NaN and infinite if `max_work` does not suffice."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(()).dtype
    model = (explicit(flow.sde, flow.dimension), flow.base, None if start is None else jnp.asarray(start), x)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def values(parameters: Any) -> tuple[Numbers, Numbers]:
        double = jax.tree.map(lambda a: a.astype(float), parameters)
        sde, base, start, points = eqx.combine(double, rest)
        if start is None:
            begin = FromDensity(BaseLogProb(base), np.asarray(_draws(values_of(base))), flow.t1)
        else:
            begin = FromPoint(sde, jnp.asarray(start, float), FIRST * flow.t1)
        points = jnp.reshape(points, (-1, flow.dimension)).astype(float)
        value, error = log_prob_and_error(sde, begin, flow.t1, points, tolerance, largest, max_work)
        # The error includes rounding to the precision of x.
        error = error + jnp.finfo(dtype).eps * jnp.nan_to_num(jnp.abs(value))
        value, error = (jnp.reshape(part, x.shape[:-1]).astype(dtype) for part in (value, error))
        return value, error

    traced = any(is_traced(leaf) for leaf in jax.tree.leaves(parameters))
    return differentiated_in_double_precision(values)(parameters) if traced else values(parameters)


def differentiated_in_double_precision(function: Callable) -> Callable:
    """A function whose derivatives are computed in double precision, regardless of JAX's default
    precision."""
    outer = jax.custom_vjp(function)
    forward = in_double_precision(lambda parameters: jax.vjp(function, parameters))
    outer.defvjp(forward, in_double_precision(lambda pull, slopes: pull(slopes)))
    return outer


def explicit(sde: AbstractSDE, dimension: int) -> AbstractSDE:
    """The SDE in which arrays in closures of its functions that are being differentiated are parameters."""
    t, z = jnp.zeros(()), jnp.zeros(dimension)
    hidden = is_traced(values_of(sde).drift(t, z)) or is_traced(noise_matrix(values_of(sde).noise(t, z)))
    return with_explicit_parameters(sde, z) if hidden else sde
