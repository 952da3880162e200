"""Densities in one and two dimensions by the Fokker–Planck equation, on a mesh that moves with the density.

    ∂p/∂t = −∂ᵢ(μᵢ p) + ½ ∂ᵢ∂ⱼ((σσᵀ)ᵢⱼ p)

**Frame.** The mesh is fixed in y ∈ [−1, 1)ᵈ, and x = c(t) + S(t) w(y). Time is divided into segments. Over
each segment c and S move from the box around the density to the one that a linearised SDE predicts, or rest
if the two are close. The density of y obeys a Fokker–Planck equation with drift S⁻¹(μ − c′ − S′y) and noise
S⁻¹σ. The frame changes the cost, not the result: units do not matter, and a narrow start costs a few more
segments.

**Space.** Fourier collocation. The mesh is refined until the highest wavenumbers have negligible amplitudes.

**Time.** One exponential of the discretised operator L per segment where it does not change, for example in a
frame at rest if coefficients do not depend on time. Else two steps of the commutator-free Magnus method of
order four (Blanes & Moan 2006). In one dimension exponentials are those of matrices. In two they are expanded
in Faber polynomials of an ellipse around the numerical range (Moret & Novati 2001), which takes O(√(h‖L‖))
products with L for stiff noise, and no linear systems. NumPy does all this, without compilation; only
gradients go through the same segments once more in JAX.

**Error.** A companion solution takes one step per segment, has fewer wavenumbers and, from a point, starts
later. The error at x is the largest relative difference between the two around x, plus the density at the
edge of the box.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from scipy import linalg

from .._checks import NonFiniteError, as_real, check_positive, check_vector, is_traced
from .._functions import fixed_functions
from .._programs import in_double_precision, jit
from ..sde import AbstractSDE, noise_matrix, to_ito, with_explicit_parameters
from ._estimate import AbstractEstimator, Accuracy, Estimate

SIZES = {1: (64, 128, 256, 512, 1024), 2: (48, 72, 96, 144, 192, 288)}  # nodes per axis
COARSE = {1: 64, 2: 24}  # nodes per axis on which the dependence on time is checked
GAUSS = 0.5 + np.array([-1, 1]) * math.sqrt(3) / 6  # nodes of the Gauss rule on [0, 1]
STAGES = np.append(0.5 * GAUSS, 0.5 + 0.5 * GAUSS)  # times of a segment of length one: two steps
BAND = (0.75, 0.66)  # share of the wavenumbers that the solution and its companion have
TERMS = 32  # of an expansion, in one program
BATCH = 4096  # points at which coefficients are evaluated at once
BASE_DRAWS = 4096  # from the base, for its first box
FIRST = 2.0**-12  # of the span: when the density from a point is normal; four times that for the companion
MAX_WORK = 2e8  # nodes times products with the operator, of all passes
MAX_ATTEMPTS = 16  # at one segment
MAX_SEGMENTS = 120  # of one solution
MAX_PASSES = 4
LOWEST = 1e-6  # share of the highest density that is to be known to the tolerance
FLOOR = 1e-7  # nats, of rounding and truncated expansions
OVERSHOOT = 8.0  # of an ellipse around a numerical range, to the right of zero
HEADROOM = 1.2  # of the largest coefficients over those at the beginning of a segment
HOPELESS = 1e4  # times the amplitude of the highest wavenumbers that is allowed, on the largest mesh
MAX_MARGIN = 1.5  # the most by which a box is wider than predicted


Numbers = Any  # an array of JAX or NumPy, or a number


class Unresolved(RuntimeError):
    """A density that no mesh within the limits resolves."""


class Resolution(NamedTuple):
    """What a solution has to resolve: the amplitudes of the highest wavenumbers (`tail`) and the density at
    the edge of the box, relative to the highest density; the error of one segment in nats, and down to which
    share of the highest density."""

    tail: float
    edge: float
    time: float
    lowest: float


class Work:
    """The work left to an estimate, in nodes times products with the operator."""

    def __init__(self, left: float):
        self.left = left

    def spend(self, amount: float) -> None:
        self.left -= amount
        if self.left < 0:
            raise Unresolved("the equation takes too much work")


class Box(NamedTuple):
    """x = centre + scale w(y), |yᵢ| ≤ 1; the scale is lower triangular, w the warp of each axis."""

    centre: np.ndarray
    scale: np.ndarray
    skew: np.ndarray  # (d,)

    def places(self, size: int) -> np.ndarray:
        return self.centre + warp(nodes(size, len(self.centre)), self.skew, np)[0] @ self.scale.T

    def holds(self, x: np.ndarray) -> np.ndarray:
        """Whether points are inside."""
        u = np.linalg.solve(self.scale, (np.asarray(x) - self.centre).T)
        return np.all(np.abs(u) < 1, axis=0)

    def is_near(self, other: "Box") -> bool:
        """Whether the sides of another box are within a tenth of the width."""
        shift = np.linalg.solve(self.scale, other.centre - self.centre)
        ratio = np.linalg.solve(self.scale, other.scale) - np.eye(len(shift))
        bend = 0.5 * np.abs(self.skew - other.skew)
        return bool(np.all(np.abs(shift) + np.abs(ratio).sum(axis=1) + bend < 0.2))

    def joined(self, other: "Box") -> "Box":
        """A box in one dimension that holds this one and another, with the skew of the other."""
        ends = np.concatenate([box.centre + sign * box.scale[0] for box in (self, other) for sign in (-1, 1)])
        low, high = ends.min(), ends.max()
        return Box(np.array([0.5 * (low + high)]), np.array([[0.5 * (high - low)]]), other.skew)

    def log_volume(self, size: int) -> np.ndarray:
        """Of x over that of y, on the mesh, `(nᵈ,)`."""
        slopes = warp(nodes(size, len(self.centre)), self.skew, np)[1]
        return np.sum(np.log(slopes), axis=1) + np.sum(np.log(np.diag(self.scale)))


def warp(y: Any, skew: Any, xp: Any) -> tuple[Any, Any, Any]:
    """w(y) = (e^{κy} − cosh κ)/sinh κ, which keeps ±1, its slope, and its derivative in κ: for long tails on
    one side, such as those of lognormal densities."""
    if xp is np and not np.any(skew):
        y = np.broadcast_to(y, np.broadcast_shapes(y.shape, skew.shape))
        return y, np.ones(y.shape), 0.5 * (y**2 - 1)
    none = xp.abs(skew) < 1e-6
    k = xp.where(none, 1.0, skew)
    grown, sinh, cosh = xp.exp(k * y), xp.sinh(k), xp.cosh(k)
    w = (grown - cosh) / sinh
    by = y * grown / sinh - 1 - w * cosh / sinh
    return xp.where(none, y, w), xp.where(none, 1.0, k * grown / sinh), xp.where(none, 0.5 * (y**2 - 1), by)


def unwarped(u: Any, skew: Any, xp: Any) -> Any:
    """y with w(y) = u."""
    none = xp.abs(skew) < 1e-6
    bend = xp.where(none, 1, skew)
    return xp.where(none, u, xp.log(xp.cosh(bend) + u * xp.sinh(bend)) / bend)


def skew_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The skew that puts y = 0 at the origin of a box from low < 0 to high > 0; zero if nearly symmetric."""
    skew = 2 * np.arctanh(np.clip((low + high) / (high - low), -0.95, 0.95))
    return np.where(np.abs(skew) > 0.4, skew, 0)


class Segment(NamedTuple):
    """A span of time: its frame at the stages of the steps and at the end, and limits of the coefficients.

    Time runs as t = t₀ + ((1 + g)ˢ − 1) Δ/g, 0 ≤ s ≤ 1, where variances grow by g over the span Δ: segments
    of a process that starts from a point all look the same. The centre is linear in t. The scale is the
    product of a diagonal matrix, its logarithm linear in s, and a unit triangular one, linear in s.
    """

    times: np.ndarray  # (K,)
    pace: np.ndarray  # (K,), dt/ds
    centre: np.ndarray  # (K, d)
    velocity: np.ndarray  # (d,), of the centre, in t
    scale: np.ndarray  # (K, d, d)
    scale_rate: np.ndarray  # (K, d, d), in s
    skew: np.ndarray  # (K, d), linear in s
    skew_rate: np.ndarray  # (d,), in s
    size: int
    limits: tuple[float, float] = (math.inf, math.inf)  # of speed and noise; larger where there is no density
    additive: bool = False
    steady: bool = False  # in its frame no coefficient depends on time
    rounding: float = 1e-14  # of exponentials, relative to the highest density
    transfer: np.ndarray | None = None  # (n, n′) from the mesh of the segment before, if their boxes differ

    def weights(self, companion: bool) -> np.ndarray:
        """Exponents of the Magnus method in the operators at the stages, `(E, 4)`.

        A step of length h is exp(h(βA₁ + αA₂)) exp(h(αA₁ + βA₂)), α = ¼ + √3/6, β = ¼ − √3/6, with the
        operators at the nodes of the Gauss rule. For the one step of the companion they are interpolated from
        the four. One exponential is exact if they are all the same.
        """
        if self.steady:
            return np.array([[1.0, 0, 0, 0]])
        alpha, beta = 0.25 + math.sqrt(3) / 6, 0.25 - math.sqrt(3) / 6
        step = np.array([[alpha, beta], [beta, alpha]])
        if not companion:
            return 0.5 * np.kron(np.eye(2), step)
        return step @ np.vander(GAUSS, 4) @ np.linalg.inv(np.vander(STAGES, 4))

    @staticmethod
    def between(times: tuple[float, float], boxes: tuple[Box, Box], growth: float, size: int) -> "Segment":
        s, span = np.append(STAGES, 1.0), times[1] - times[0]
        part = np.expm1(s * math.log1p(growth)) / growth
        part[-1] = 1  # exactly, so that the last segment ends at t₁
        pace = span * math.log1p(growth) / growth * (1 + growth) ** s
        mix = lambda part, a, b: np.multiply.outer(1 - part, a) + np.multiply.outer(part, b)
        sizes = [np.diag(box.scale) for box in boxes]
        units = [box.scale / np.diag(box.scale)[:, None] for box in boxes]
        ratio = np.log(sizes[1] / sizes[0])
        diagonal = (sizes[0] * np.exp(np.multiply.outer(s, ratio)))[..., None]
        scale = diagonal * mix(s, *units)
        scale_rate = ratio[:, None] * scale + diagonal * (units[1] - units[0])
        centre, skew = mix(part, boxes[0].centre, boxes[1].centre), mix(s, boxes[0].skew, boxes[1].skew)
        velocity = (boxes[1].centre - boxes[0].centre) / span
        skew_rate = boxes[1].skew - boxes[0].skew
        return Segment(mix(part, *times), pace, centre, velocity, scale, scale_rate, skew, skew_rate, size)

    @staticmethod
    def at(time: float, box: Box, size: int) -> "Segment":
        """A single time."""
        one, still = np.ones(1), 0 * box.centre
        frame = (box.centre[None], still, box.scale[None], 0 * box.scale[None], box.skew[None], still)
        return Segment(time * one, one, *frame, size)


class GridDensity(eqx.Module):
    """The density of y on a mesh and its error: relative at each node, and relative to the maximum."""

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
    """The mesh, `(nᵈ, d)`."""
    axis = -1 + 2 * np.arange(size) / size
    return np.stack([a.ravel() for a in np.meshgrid(*[axis] * dimension, indexing="ij")], axis=1)


def wavenumbers(size: int, dimension: int) -> list[np.ndarray]:
    """Of the transform of real values on the mesh: one array an axis."""
    whole, half = np.fft.fftfreq(size, 1 / size), np.fft.rfftfreq(size, 1 / size)
    return list(np.pi * np.array(np.meshgrid(*[whole] * (dimension - 1), half, indexing="ij")))


def in_band(size: int, dimension: int, share: float) -> np.ndarray:
    """Whether each wavenumber is below a share of the largest."""
    return np.all([np.abs(k) <= share * np.pi * size / 2 for k in wavenumbers(size, dimension)], axis=0)


def triangle(d: int) -> np.ndarray:
    """The positions of the entries of a symmetric matrix in its lower triangle, stored by rows."""
    return np.array([[max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for j in range(d)] for i in range(d)])


def in_batches(function: Callable, x: Any, size: int) -> Any:
    """A function of `size` rows for any number of them."""
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


def coefficients(sde: AbstractSDE, segment: Segment) -> Numbers:
    """μ and the lower triangle of σσᵀ on the mesh, at the times of a segment: `(K, nᵈ, F)`."""
    y = nodes(segment.size, segment.centre.shape[1])
    u = warp(y[None], segment.skew[:, None], np)[0]
    x = (segment.centre[:, None] + np.einsum("kij,knj->kni", segment.scale, u)).reshape(-1, y.shape[1])
    raw = in_batches(lambda pair: _coefficients(sde, *pair), (np.repeat(segment.times, len(y)), x), BATCH)
    return raw.reshape(len(segment.times), len(y), -1)


def in_frame(
    raw: Any,
    pace: Any,
    inverse: Any,
    shift: Any,
    scale_rate: Any,
    skew: Any,
    skew_rate: Any,
    limits: Any,
    xp: Any = jnp,
) -> Any:
    """Coefficients for y and s from those for x and t: `(K, F, n, ...)`."""
    d = scale_rate.shape[1]
    size = round(raw.shape[1] ** (1 / d))
    u, slope, by = warp(nodes(size, d)[None], skew[:, None], xp)
    turned = lambda v, matrix: v @ xp.swapaxes(matrix, 1, 2)  # rows of v, by a matrix for each time
    raw = raw * pace[:, None, None]
    moved = raw[..., :d] - shift[:, None] - turned(u, scale_rate)
    pairs = [(i, j) for i in range(d) for j in range(i + 1)]
    # σσᵀ in the frame, by rows of its lower triangle.
    units = np.array([[[(a, b) in ((i, j), (j, i)) for b in range(d)] for a in range(d)] for i, j in pairs])
    images = xp.einsum("kia,rab,kjb->kijr", inverse, units * 1.0, inverse)
    rows = turned(raw[..., d:], xp.stack([images[:, i, j] for i, j in pairs], axis=1))
    rows = rows / xp.stack([slope[..., i] * slope[..., j] for i, j in pairs], axis=-1)
    own = xp.stack([rows[..., pairs.index((i, i))] for i in range(d)], axis=-1)
    velocity = (turned(moved, inverse) - skew_rate[None, None] * by) / slope
    velocity = velocity - 0.5 * skew[:, None] * own  # w″ = κ w′
    velocity, rows = (xp.where(xp.isfinite(part), part, 0) for part in (velocity, rows))
    shorter = lambda size, limit: xp.minimum(1, limit / xp.maximum(size, 1e-300))[..., None]
    velocity = velocity * shorter(xp.sum(xp.abs(velocity), axis=-1), limits[0])
    rows = rows * shorter(xp.sum(xp.abs(rows), axis=-1), limits[1])
    fields = xp.swapaxes(xp.concatenate([velocity, rows], axis=-1), 1, 2)
    return xp.reshape(fields, (*fields.shape[:2], *[size] * d))


_in_frame = jit(in_frame, level=1)


def fields_of(raw: Numbers, segment: Segment) -> Numbers:
    """The coefficients of a segment in its frame."""
    shift = np.multiply.outer(segment.pace, segment.velocity)
    frame = (segment.pace, np.linalg.inv(segment.scale), shift, segment.scale_rate, segment.skew)
    frame = (*frame, segment.skew_rate, segment.limits)
    return _in_frame(raw, *frame) if is_traced(raw) else in_frame(raw, *frame, xp=np)


class Expansion(NamedTuple):
    """exp(A) ≈ (Σ aₖ Fₖ((A/r + m)/γ))ʳ, Fₖ₊₁(z) = z Fₖ(z) − δ Fₖ₋₁(z): Faber polynomials of an ellipse with
    its centre at −m. The sum of its semi-axes is 2γ, their difference over their sum is δ."""

    repeats: int  # r
    centre: float
    scale: float
    terms: np.ndarray  # (blocks, TERMS, 2): aₖ, and δ for each k

    @staticmethod
    def of(damping: float, frequency: float, rounding: float) -> "Expansion":
        """For a numerical range within −damping ≤ Re ≤ 0, |Im| ≤ frequency, with the fewest terms."""
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


class Modes(NamedTuple):
    """Matrices between values at the nodes of an axis and amplitudes of its cosines and sines."""

    values: np.ndarray  # (n, m), from amplitudes
    plain: np.ndarray  # (m, n), to amplitudes
    first: np.ndarray  # (m, n), to those of −∂
    second: np.ndarray  # (m, n), to those of ½∂²
    slope: np.ndarray  # (m,), by which ∂ multiplies amplitudes, and where they come from
    partner: np.ndarray

    @staticmethod
    @functools.cache
    def of(size: int, companion: bool) -> "Modes":
        k = np.arange(1, 1 + math.floor(BAND[companion] * size / 2))
        angle = np.multiply.outer(np.pi * nodes(size, 1)[:, 0], k)
        one, place = np.ones((size, 1)), np.arange(1, 1 + len(k))
        values = np.concatenate([one, np.cos(angle), np.sin(angle)], axis=1)
        plain = np.append(1, np.full(2 * len(k), 2))[:, None] / size * values.T
        slope = np.pi * np.concatenate([[0], k, -k])
        partner = np.concatenate([[0], place + len(k), place])
        return Modes(
            values,
            plain,
            -slope[:, None] * plain[partner],
            -0.5 * slope[:, None] ** 2 * plain,
            slope,
            partner,
        )


def operator(table: Any, size: int, companion: bool, xp: Any) -> Any:
    """The discretised operator in one dimension, `(m, m)`."""
    modes, (drift, noise) = Modes.of(size, companion), table
    rates = lambda part: part[0][:, None] * modes.values
    return modes.first @ rates(drift) + modes.second @ rates(noise + xp.zeros_like(drift))


def product(now: Any, table: Any, size: int, companion: bool) -> Any:
    """The operator in two dimensions applied to a density: amplitudes of cosines and sines.

    The table has drift and noise. Noise that is the same everywhere has one node."""
    (drift, noise), modes = table, Modes.of(size, companion)
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


def through(matrix: np.ndarray, q: Any) -> Any:
    """A matrix applied along each axis."""
    return matrix @ q if q.ndim == 1 else matrix @ q @ matrix.T


def term(state: Any, number: Any, apply: Callable, expansion: Any) -> Any:
    """One more term of an expansion; the state has the last two polynomials and the sum."""
    before, now, total = state
    after = (apply(now) + expansion[0] * now) / expansion[1] - number[1] * before
    return now, after, total + number[0] * now


def exponential(
    q: np.ndarray, table: tuple[np.ndarray, np.ndarray], expansion: Expansion, companion: bool
) -> np.ndarray:
    """exp(A) of a density."""
    size, modes = len(q), Modes.of(len(q), companion)
    now = modes.plain @ q @ modes.plain.T
    numbers = expansion.terms.reshape(-1, 2)
    numbers = numbers[: 1 + np.max(np.flatnonzero(numbers[:, 0]))]
    table = table[0] / expansion.repeats, table[1] / expansion.repeats
    apply = lambda now: product(now, table, size, companion)
    for _ in range(expansion.repeats):
        state = (0 * now, now, 0 * now)
        for number in numbers:
            state = term(state, number, apply, (expansion.centre, expansion.scale))
        now = state[2]
    return modes.values @ now @ modes.values.T


@functools.partial(jit, level=1)
def _terms(state: Any, table: Any, size: int, expansion: Any, numbers: Any) -> Any:
    if table[0].ndim == 2:
        matrix = operator(table, size, False, jnp)
        apply = lambda now: matrix @ now
    else:
        apply = lambda now: product(now, table, size, False)
    step = lambda state, number: (term(state, number, apply, expansion), None)
    return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, numbers)[0]


@functools.partial(jit, level=1)
def _through(matrix: Numbers, q: Numbers) -> Numbers:
    return through(matrix, q)


def traced_exponential(q: Numbers, table: tuple[Numbers, Numbers], expansion: Expansion) -> Numbers:
    """exp(A) of a density, to be differentiated."""
    modes = Modes.of(len(q), False)
    now = _through(modes.plain, q)
    zero = np.zeros(now.shape, now.dtype)
    table = table[0] / expansion.repeats, table[1] / expansion.repeats
    for _ in range(expansion.repeats):
        state = (zero, now, zero)
        for numbers in expansion.terms:
            state = _terms(state, table, len(q), (expansion.centre, expansion.scale), numbers)
        now = state[2]
    return _through(modes.values, now)


def run(
    q: Numbers, fields: Numbers, segment: Segment, companion: bool, work: "Work | None" = None
) -> Numbers:
    """The density at the end of a segment from that at its beginning."""
    d, size, traced = q.ndim, segment.size, is_traced(fields) or is_traced(q)
    exponents = (jnp if traced else np).tensordot(segment.weights(companion), fields[: len(STAGES)], 1)
    for each in exponents:
        drift, noise = each[:d], each[d:]
        if segment.additive:
            noise = noise[(slice(None), *[slice(1)] * d)]
        if d == 1 and not traced:
            if work is not None:
                work.spend(size**3 / 30)
            modes = Modes.of(size, companion)
            rate = operator((drift, noise), size, companion, np)
            q = modes.values @ (linalg.expm(rate) @ (modes.plain @ np.asarray(q)))
            continue
        still = np.asarray(values_of(each))
        expansion = Expansion.of(*spectral_bounds(still[:d], still[d:], BAND[companion]), segment.rounding)
        if work is not None:
            work.spend(expansion.products * size**d * (1 if segment.additive else 2))
        q = (
            traced_exponential(q, (drift, noise), expansion)
            if traced
            else exponential(np.asarray(q), (drift, noise), expansion, companion)
        )
    return q


def spectral_bounds(drift: np.ndarray, noise: np.ndarray, share: float) -> tuple[float, float]:
    """How far the numerical range of the discretised operator extends to the left, and up and down."""
    d, size = len(drift), drift.shape[1]
    top, axes = share * np.pi * size / 2, tuple(range(1, d + 1))
    damping = 0.5 * top**2 * float(np.sum(np.abs(noise[triangle(d).ravel()]), axis=0).max())
    # Where the periodic continuation of the drift jumps.
    jump = max(float(np.abs(np.take(drift[i], 0, i) - np.take(drift[i], -1, i)).max()) for i in range(d))
    damping += 0.5 * top * jump
    slopes = np.gradient(noise, 2 / size, axis=axes)
    change = sum(np.abs(part).sum(axis=0) for part in (slopes if d > 1 else [slopes]))
    return damping, top * float((np.abs(drift).sum(axis=0) + change).max())


@functools.partial(jit, level=1)
def _resized(q: Numbers, other: Numbers) -> Numbers:
    """The same density on the larger mesh of another array."""
    new, old = other.shape[0], q.shape[0]
    spectrum = jnp.pad(jnp.fft.fftshift(jnp.fft.fftn(q)), [((new - old) // 2,) * 2] * q.ndim)
    return jnp.real(jnp.fft.ifftn(jnp.fft.ifftshift(spectrum))) * (new / old) ** q.ndim


def resized(q: Numbers, size: int) -> Numbers:
    return q if q.shape[0] == size else _resized(q, np.zeros((size,) * q.ndim))


def transfer(old: Box, new: Box, before: int, size: int) -> np.ndarray:
    """The matrix `(size, before)` that takes a density to the mesh of another box, in one dimension."""
    u = (new.places(size) - old.centre) / old.scale[0]
    inside = np.abs(u) < 1
    y = unwarped(np.where(inside, u, 0), old.skew, np)
    plain = Modes.of(before, False).plain
    angle = np.pi * y * np.arange(1, 1 + len(plain) // 2)
    waves = np.concatenate([np.ones((size, 1)), np.cos(angle), np.sin(angle)], axis=1)
    log_volume = np.log(warp(y, old.skew, np)[1] * old.scale[0])
    return np.where(inside, np.exp(new.log_volume(size)[:, None] - log_volume), 0) * (waves @ plain)


def tail(q: np.ndarray) -> float:
    """About how much of a density is in the outer wavenumbers, relative to its maximum."""
    spectrum = np.abs(np.fft.rfftn(q)) / q.size
    outer = spectrum[~in_band(q.shape[0], q.ndim, BAND[1])]
    return float(4 * np.sqrt(2 * np.sum(outer**2)) / np.max(np.abs(q)))


def edge(q: np.ndarray) -> float:
    """The largest value on the faces of the box, relative to the maximum, without ripples of the mesh."""
    smooth = q
    for axis in (*range(q.ndim), *range(q.ndim)):
        smooth = 0.5 * smooth + 0.25 * (np.roll(smooth, 1, axis) + np.roll(smooth, -1, axis))
    least = np.minimum(np.abs(q), np.abs(smooth))
    return float(max(np.max(np.take(least, [0, -1], axis)) for axis in range(q.ndim)) / np.max(np.abs(q)))


class Forecast(NamedTuple):
    """Where a density goes by the nearest linear SDE, dZ = (drift + slope (Z − mean)) dt + noise."""

    mean: np.ndarray
    covariance: np.ndarray
    drift: np.ndarray
    slope: np.ndarray
    noise: np.ndarray  # σσᵀ
    middle: np.ndarray  # of the box, from the mean, in units of the root of the covariance
    width: np.ndarray
    skew: np.ndarray

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
        root = np.linalg.cholesky(covariance)
        # Below the noise of the mesh the tails are taken to be normal.
        seen = min(max(10 * float(-q.min() / q.max()), edge(q), level), 1e-2)
        reach = math.sqrt(math.log(level) / math.log(seen))
        units = away[q.ravel() > seen * q.max()] @ np.linalg.inv(root).T
        low, high = reach * units.min(axis=0), reach * units.max(axis=0)
        now = np.diag(box.scale) / np.diag(root)
        width = np.clip(0.5 * (high - low) + 4 / q.shape[0] * now, 0.7 * now, 1.3 * now)
        noise = (weight @ raw[:, d:])[triangle(d)]
        # The mean is to be in the middle of the mesh, unless noise is additive.
        varied = np.ptp(raw[:, d:], axis=0).max() > 1e-12 * np.abs(raw[:, d:]).max()
        skew = box.skew + np.clip(skew_of(low, high) * varied - box.skew, -0.5, 0.5)
        return Forecast(mean, covariance, weight @ raw[:, :d], slope, noise, 0.5 * (low + high), width, skew)

    def path(self, span: float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance over a span, at 17 times."""
        h = span / 16
        states = [np.concatenate([0 * self.drift[:, None], self.covariance], axis=1)]
        for _ in range(16):
            v = states[-1]
            first = self._rate(v)
            second = self._rate(v + 0.5 * h * first)
            third = self._rate(v + 0.5 * h * second)
            states.append(v + h / 6 * (first + 2 * second + 2 * third + self._rate(v + h * third)))
        return self.mean + np.stack(states)[:, :, 0], np.stack(states)[:, :, 1:]

    def _rate(self, v: np.ndarray) -> np.ndarray:
        push = self.slope @ v
        spread = push[:, 1:] + push[:, 1:].T + self.noise
        return np.concatenate([self.drift[:, None] + push[:, :1], spread], axis=1)

    def box(self, span: float, margin: float) -> tuple[Box, float]:
        """The box after a span, and the growth g of a segment."""
        means, covariances = self.path(span)
        root, size, growth = np.linalg.cholesky(covariances[-1]), np.log(np.linalg.det(covariances)), 1e-3
        if size[-1] - size[0] > 0.5:
            share = np.interp(0.5 * (size[0] + size[-1]), size, np.linspace(0, 1, len(size)))
            growth = max(growth, (1 / share - 1) ** 2 - 1)
        return Box(means[-1] + root @ (margin * self.middle), root * (margin * self.width), self.skew), growth

    def span(self, longest: float) -> float:
        """How long a frame may follow it in one segment."""
        inverse, span = np.linalg.inv(np.linalg.cholesky(self.covariance)), longest
        for _ in range(60):
            with np.errstate(all="ignore"):
                means, covariances = self.path(span)
            if np.all(np.isfinite(covariances)):
                values = np.linalg.eigvalsh(inverse @ covariances[-1] @ inverse.T)
                chord = np.multiply.outer(np.linspace(0, 1, len(means)), means[-1] - means[0])
                bend = np.abs((means - means[0] - chord) @ inverse.T).max()
                if values[0] > 0.2 and values[-1] < 10 and bend < 0.4 * math.sqrt(max(1, values[0])):
                    break
            span = 0.6 * span
        return span


def with_limits(segment: Segment, raw: np.ndarray, q: np.ndarray, level: float) -> Segment:
    """A segment with limits of the coefficients just above those where there is some density."""
    d, values = q.ndim, q.ravel()
    if not np.all(np.isfinite(raw[:, values > 1e-6 * values.max()])):
        raise NonFiniteError(
            f"drift or diffusion is not finite near z = {segment.centre[0]}: a grid needs both"
        )
    fields = fields_of(raw, segment._replace(limits=(math.inf, math.inf)))
    where = q > 0.1 * level * q.max()
    speed, noise = (np.abs(part[..., where]).sum(axis=1).max() for part in (fields[:, :d], fields[:, d:]))
    additive = bool(np.ptp(raw[..., d:], axis=1).max() <= 1e-12 * np.abs(raw[..., d:]).max())
    additive = additive and not np.any(segment.skew)
    limits = (HEADROOM * float(speed), HEADROOM * float(noise))
    change = np.ptp(fields[: len(STAGES)], axis=0).max(axis=tuple(range(1, d + 1)))
    steady = bool(np.all(change <= 1e-9 * np.array([speed] * d + [noise] * (len(change) - d))))
    return segment._replace(limits=limits, additive=additive, steady=steady, rounding=min(1e-10, 0.1 * level))


def log_gap(q: np.ndarray, other: np.ndarray, lowest: float) -> float:
    """The largest difference of logarithms where the density is above a share of its maximum."""
    where = q > lowest * q.max()
    return float(np.max(np.abs(q - other)[where] / q[where]))


class State(NamedTuple):
    """Solution and companion at a time, the coefficients on the mesh, and proposals for the next segment."""

    time: float
    box: Box
    q: Numbers
    companion: Numbers
    raw: np.ndarray  # (nᵈ, F)
    span: float
    margin: float = 1.0
    outside: float = 0.0  # the largest density at the edge so far, relative to the maximum


class Solution(NamedTuple):
    """A density, and the segments that led to it from its first box."""

    density: GridDensity
    first: Box
    segments: list[Segment]


def solve(
    sde: AbstractSDE, begin: Any, t1: float, resolution: Resolution, largest: int | None, work: Work
) -> Solution:
    """The density at t1 from `begin`, a `FromDensity` or `FromPoint`."""
    t, box = begin.time, begin.box(resolution.edge)
    sizes = [size for size in SIZES[len(box.centre)] if size <= (largest or math.inf)]
    q = begin.density(box, sizes[0])
    for size in sizes[1:]:
        if tail(np.asarray(q)) < resolution.tail:
            break
        q = begin.density(box, size)
    raw = np.asarray(coefficients(sde, Segment.at(t, box, len(q)))[0])
    first, state, segments = box, State(t, box, q, q, raw, t1 - t), []
    while state.time < t1:
        before, (state, segment) = state.time, next_state(sde, state, t1, sizes, resolution, work)
        segments.append(segment)
        if before < begin.later <= state.time:
            state = state._replace(companion=begin.after(state.time, state.box, segment.size))
        if len(segments) > MAX_SEGMENTS:
            raise Unresolved("the equation takes too many segments")
    error = relative_difference(np.asarray(state.q), np.asarray(state.companion))
    density = GridDensity(
        state.q, error, 4 * state.outside + 1e-14, state.box, FLOOR + begin.error(first, segments[0].size)
    )
    return Solution(density, first, segments)


def next_state(
    sde: AbstractSDE, state: State, t1: float, sizes: list[int], resolution: Resolution, work: Work
) -> tuple[State, Segment]:
    """One segment, with a box, a mesh and a span that resolve the density."""
    q, other, margin = np.asarray(state.q), np.asarray(state.companion), max(1.0, 0.97 * state.margin)
    ahead, reached = Forecast.of(q, state.box, state.raw, resolution.edge), q
    span, before = ahead.span(min(state.span, t1 - state.time)), log_gap(q, other, resolution.lowest)
    may_rest = True  # coefficients that do not depend on time are exact in a frame that does not move
    frame, moved, taken, built = state.box, False, None, None
    shorter = lambda excess: min(0.75, max(0.2, 0.9 * excess**0.2))
    for _ in range(MAX_ATTEMPTS):
        end = t1 if span > 0.8 * (t1 - state.time) else state.time + span
        box, growth = ahead.box(end - state.time, margin)
        if moved and built == (margin, end, len(q)):
            box = frame
        elif moved:
            # A frame that holds the density throughout, at rest.
            box = frame = ahead.box(0.0, margin)[0].joined(box)
            taken, q, other = transferred(state, frame, [n for n in sizes if n >= len(q)], resolution)
            before, reached, built = log_gap(q, other, resolution.lowest), q, (margin, end, len(q))
        if moved or (may_rest and frame.is_near(box)):
            box, growth = frame, 1e-10
        segment = Segment.between((state.time, end), (frame, box), growth, len(q))._replace(transfer=taken)
        miss = extrapolation_error(sde, segment, reached)
        if miss > 20 * resolution.time:
            if q.ndim == 1 and box is not frame:
                moved = True  # such a frame would change faster than its segments can follow
            else:
                span = shorter(20 * resolution.time / miss) * (end - state.time)
            continue
        work.spend(len(segment.times) * q.size * evaluation_cost(sde))
        raw = np.asarray(coefficients(sde, segment))
        segment = with_limits(segment, raw, reached, resolution.edge)
        fields = fields_of(raw, segment)
        new, companion = solved(q, other, fields, segment, work)
        reached = np.maximum(reached, new)
        needed = with_limits(segment, raw, reached, resolution.edge).limits
        error = max(log_gap(new, companion, resolution.lowest) - before, 1e-300)
        if any(now > HEADROOM * old for now, old in zip(needed, segment.limits, strict=True)):
            continue  # the density reached places where coefficients are limited
        nodes_excess = tail(new) / resolution.tail if len(q) < sizes[-1] else 0.0
        may_widen = margin < (2 * MAX_MARGIN if moved else MAX_MARGIN)
        width_excess = edge(new) / (4 * resolution.edge) if may_widen else 0.0
        if nodes_excess > max(1.0, width_excess):
            size = sizes[sizes.index(len(q)) + 1]
            q, other, reached = (np.asarray(resized(part, size)) for part in (q, other, reached))
        elif width_excess > 1:
            wider = 1.0 if box is state.box else 1.25 if moved else 1.12
            margin, may_rest = wider * margin, False
        elif q.ndim == 1 and not moved and error > 1e3 * resolution.time:
            moved = True
        elif tail(new) > HOPELESS * resolution.tail:
            raise Unresolved(f"{len(q)} nodes per axis do not resolve the density")
        elif error > resolution.time and tail(new) <= resolution.tail:
            span = shorter(resolution.time / error) * (end - state.time)
        else:
            worst = max(error / resolution.time, 0.05 * miss / resolution.time, 1e-6)
            longer = min(4.0, 0.9 * worst**-0.2) * (end - state.time)
            edges = max(state.outside, edge(new))
            return State(end, box, new, companion, raw[-1], longer, margin, edges), segment
    raise Unresolved("no box holds the density")


def transferred(
    state: State, frame: Box, sizes: list[int], resolution: Resolution
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The map to another box, and both solutions there, with the fewest nodes that resolve them."""
    for size in sizes:
        taken = transfer(state.box, frame, len(state.q), size)
        q, other = (taken @ np.asarray(part) for part in (state.q, state.companion))
        if tail(q) < resolution.tail or size == sizes[-1]:
            return taken, q, other
    raise Unresolved("no mesh is as fine as that of the density")


def solved(
    q: np.ndarray, other: np.ndarray, fields: Any, segment: Segment, work: Work
) -> tuple[np.ndarray, np.ndarray]:
    """Both solutions after a segment."""
    new, companion = (np.asarray(run(v, fields, segment, c, work)) for v, c in ((q, False), (other, True)))
    if not (np.all(np.isfinite(new)) and np.all(np.isfinite(companion))):
        raise Unresolved("the solution is not finite")
    return new, companion


def evaluation_cost(sde: AbstractSDE) -> float:
    """About that of the coefficients at a point, in products with the operator: 150 parameters make one."""
    return 1 + sum(leaf.size for leaf in jax.tree.leaves(sde) if eqx.is_array(leaf)) / 150


def extrapolation_error(sde: AbstractSDE, segment: Segment, q: np.ndarray) -> float:
    """The difference, in nats on a coarse mesh, between the coefficients at the end of a segment and those
    extrapolated from the stages: it detects fast changes in time between the stages."""
    d, stride = q.ndim, len(q) // COARSE[q.ndim]
    coarse, q = segment._replace(size=COARSE[d]), q[(slice(None, None, stride),) * d]
    fields, where = fields_of(np.asarray(coefficients(sde, coarse)), coarse), q > 1e-3 * q.max()
    weights = np.vander([1.0], 4) @ np.linalg.inv(np.vander(STAGES, 4))
    gap = np.abs(fields[-1] - np.tensordot(weights[0], fields[:-1], 1))[:, where].max(axis=1)
    # In units of the box, of seven standard deviations, log p has slopes of up to 26 there.
    return float(26 * gap[:d].sum() + 340 * gap[d:].sum())


def relative_difference(q: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The largest difference at each node and its neighbours, relative to the density: that of relative or of
    absolute differences, which is smaller."""

    def largest(gap: np.ndarray) -> np.ndarray:
        for axis in range(q.ndim):
            gap = np.max([np.roll(gap, shift, axis) for shift in (-1, 0, 1)], axis=0)
        return gap

    gap, size = np.abs(q - other), np.maximum(np.abs(q), 1e-300)
    return np.minimum(largest(gap / size), largest(gap) / size)


class FromDensity(eqx.Module):
    """A start from a distribution: its log-density at points `(N, d)`, and draws of it."""

    log_prob: Callable[[Numbers], Numbers]
    draws: np.ndarray
    time: float

    @property
    def later(self) -> float:
        return math.inf

    def box(self, level: float) -> Box:
        """Where the density is above a level of its maximum."""
        mean, root = np.mean(self.draws, axis=0), np.linalg.cholesky(np.atleast_2d(np.cov(self.draws.T)))
        units = (self.draws - mean) @ np.linalg.inv(root).T
        low, high = 2.2 * units.min(axis=0), 2.2 * units.max(axis=0)
        size = round(BATCH ** (1 / len(mean)))
        for _ in range(8):
            middle, half = 0.5 * (low + high), 0.5 * (high - low)
            y = nodes(size, len(mean))
            logs = np.asarray(self.log_prob(Box(mean + root @ middle, root * half, 0 * mean).places(size)))
            finite = logs[np.isfinite(logs)]
            y = y[logs > np.max(finite, initial=-np.inf) + math.log(level)]
            if not y.size:
                raise Unresolved("no box around its draws holds the base's density")
            reach = np.array([y.min(axis=0), y.max(axis=0)]) + 2 / size * np.array([[-1], [1]])
            wrong = (np.abs(reach) > 1 - 2 / size) | (np.abs(reach[1] - reach[0]) < 0.5)
            low, high = middle + half * np.where(wrong, 1.5, 1) * reach
            if not wrong.any():
                break
        return Box(mean + root @ (0.5 * (low + high)), root * (0.52 * (high - low)), skew_of(low, high))

    def density(self, box: Box, size: int) -> Numbers:
        return _on_mesh(self.log_prob(box.places(size)), box, size)

    def error(self, box: Box, size: int) -> float:
        """That of the integral over the box, which is one."""
        mass = float(np.mean(np.asarray(self.density(box, size)))) * 2 ** len(box.centre)
        return abs(math.log(mass)) if mass > 0 else math.inf


class FromPoint(eqx.Module):
    """A start from a point at t₀: a normal distribution a short while later."""

    sde: AbstractSDE
    point: Numbers
    t0: float
    span: float

    @property
    def time(self) -> float:
        return self.t0 + FIRST * self.span

    @property
    def later(self) -> float:
        return self.t0 + 4 * FIRST * self.span

    def box(self, level: float) -> Box:
        mean, covariance = (np.asarray(a) for a in _moments(self.sde, self.point, self.t0, self.time))
        if not (np.all(np.isfinite(covariance)) and np.all(np.linalg.eigvalsh(covariance) > 0)):
            raise Unresolved("there is no density from this point")
        return Box(mean, np.linalg.cholesky(covariance) * math.sqrt(-2.1 * math.log(level)), 0 * mean)

    def density(self, box: Box, size: int) -> Numbers:
        return self.after(self.time, box, size)

    def after(self, time: float, box: Box, size: int) -> Numbers:
        mean, covariance = _moments(self.sde, self.point, self.t0, time)
        return _on_mesh(_normal(mean, covariance, box.places(size)), box, size)

    def error(self, box: Box, size: int) -> float:
        del box, size
        return 0.0


def _on_mesh(logs: Numbers, box: Box, size: int) -> Numbers:
    xp = jnp if is_traced(logs) else np
    return xp.reshape(xp.exp(logs + box.log_volume(size)), (size,) * len(box.centre))


@functools.partial(jit, level=1)
def _moments(sde: AbstractSDE, point: Numbers, t0: Numbers, t: Numbers) -> tuple[Numbers, Numbers]:
    """Mean and covariance a short while after a point: m′ = E μ and C′ = E[μ(Z − m)ᵀ + (Z − m)μᵀ + σσᵀ] from
    C = 0, with expectations by the second derivatives of μ and σσᵀ."""
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

    h = (t - t0) / 4
    start = jnp.concatenate([point[None], jnp.zeros((point.size, point.size))])
    end = jax.lax.scan(step, start, t0 + h * jnp.arange(4.0))[0]
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
    """The log-density of a base at `(N, d)`."""

    base: Any

    def __call__(self, x: Numbers) -> Numbers:
        return in_batches(lambda some: _log_prob(self.base, some), x, BATCH)


def values_of(tree: Any) -> Any:
    """The values of what is being differentiated."""
    tree = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, tree)
    if any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise TypeError("rf.density.Grid chooses its mesh from values: call it outside of jit and vmap")
    return tree


def replay(sde: AbstractSDE, begin: Any, solution: Solution) -> GridDensity:
    """The density of a solution, to be differentiated: with the same frames, meshes and steps."""
    segments = solution.segments
    taken = segments[0].transfer
    q = begin.density(solution.first, segments[0].size if taken is None else taken.shape[1])
    for segment in segments:
        fields = fields_of(coefficients(sde, segment), segment)
        q = _through(segment.transfer, q) if segment.transfer is not None else resized(q, segment.size)
        q = run(q, fields, segment, companion=False)
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
    # The share of the highest density that is to be known, first as for draws; and the part of the tolerance.
    lowest = min(1e-2, max(1e-5, 0.1 / max(1, len(x))))
    part, work = 1.0, Work(max_work)
    for _ in range(MAX_PASSES):
        low = max(0.15 * part * tolerance * lowest, 1e-10)
        resolution = Resolution(low, max(0.05 * low, 5e-12), 0.2 * part * tolerance, lowest)
        try:
            solution = solve(still, start, t1, resolution, largest, work)
        except Unresolved:
            break
        value, error = (np.asarray(a) for a in solution.density.log_prob_and_error(points))
        # Points at which the density may be above the lowest share, but is not known.
        share = np.exp(np.where(np.isnan(value), -np.inf, value) - solution.density.log_maximum)
        low = np.isnan(value) & solution.density.box.holds(points) & (lowest > LOWEST)
        unmet = ~(error <= tolerance) & (share > 0.5 * LOWEST)
        if not np.any(unmet | low):
            break
        needed = LOWEST if low.any() else max(LOWEST, 0.5 * np.min(share[unmet]))
        lowest, part = (needed, part) if needed < 0.9 * lowest else (lowest, 0.2 * part)
    if solution is None or not any(is_traced(leaf) for leaf in jax.tree.leaves((sde, begin, x))):
        return value, error
    return replay(sde, begin, solution).log_prob_and_error(x)


def applies(flow: Any) -> str | None:
    """Why a grid cannot estimate the density of a flow; None if it can."""
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

    `solver_error` is the error of the mesh and its steps; nothing else adds to `total_error`. It is infinite,
    and `log_prob` is NaN, where x is outside the box around the density, where the density is below its
    error, about 1e-8 of the maximum, and where no mesh resolves the density. Coefficients and base should be
    smooth. Differentiable in x and in the parameters of SDE and base, by reverse mode. The mesh is chosen
    from values, so it cannot be part of a `jit`.

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
    """log p at `x` `(..., d)` and its error; NaN and infinite where `max_work` does not suffice."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(()).dtype
    model = (explicit(flow.sde, flow.dimension), flow.base, None if start is None else jnp.asarray(start), x)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def values(parameters: Any) -> tuple[Numbers, Numbers]:
        double = jax.tree.map(lambda a: a.astype(float), parameters)
        sde, base, start, points = eqx.combine(double, rest)
        if start is None:
            begin = FromDensity(BaseLogProb(base), np.asarray(_draws(values_of(base))), 0.0)
        else:
            begin = FromPoint(sde, jnp.asarray(start, float), 0.0, flow.t1)
        points = jnp.reshape(points, (-1, flow.dimension)).astype(float)
        value, error = log_prob_and_error(sde, begin, flow.t1, points, tolerance, largest, max_work)
        # A value is rounded to the precision of x.
        error = error + jnp.finfo(dtype).eps * jnp.nan_to_num(jnp.abs(value))
        value, error = (jnp.reshape(part, x.shape[:-1]).astype(dtype) for part in (value, error))
        return value, error

    traced = any(is_traced(leaf) for leaf in jax.tree.leaves(parameters))
    return differentiated_in_double_precision(values)(parameters) if traced else values(parameters)


def differentiated_in_double_precision(function: Callable) -> Callable:
    """A function with derivatives in double precision, whatever the precision of the process."""
    outer = jax.custom_vjp(function)
    forward = in_double_precision(lambda parameters: jax.vjp(function, parameters))
    outer.defvjp(forward, in_double_precision(lambda pull, slopes: pull(slopes)))
    return outer


def explicit(sde: AbstractSDE, dimension: int) -> AbstractSDE:
    """The SDE with what is differentiated among its parameters, not in what its functions close over."""
    t, z = jnp.zeros(()), jnp.zeros(dimension)
    hidden = is_traced(values_of(sde).drift(t, z)) or is_traced(noise_matrix(values_of(sde).noise(t, z)))
    return with_explicit_parameters(sde, z) if hidden else sde
