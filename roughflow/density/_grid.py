"""Densities in one and two dimensions by the Fokker–Planck equation, on a mesh that follows the density.

    ∂p/∂t = −∂ᵢ(μᵢ p) + ½ ∂ᵢ∂ⱼ((σσᵀ)ᵢⱼ p)

**Frame.** The mesh is fixed in y ∈ [−1, 1)ᵈ, and x = c(t) + S(t) y. Time is divided into segments. Over each
of them c and S move from the box around the density to the one that the nearest linear SDE predicts. The
density of y obeys a Fokker–Planck equation with drift S⁻¹(μ − c′ − S′y) and noise S⁻¹σ. The frame changes the
cost, not the result. In it all is relative to the spread of the process: units do not matter, and a narrow
start costs a few more segments.

**Space.** Fourier collocation. The mesh is refined until the outer wavenumbers hold next to nothing.

**Time.** Coefficients are tabulated at Chebyshev times of a segment. The steps are those of the classical
Runge–Kutta method with an integrating factor for the noise that all places have in common (Lawson 1967).

**Error.** A companion runs beside the solution, with longer steps, fewer wavenumbers, a table of lower degree
and, from a point, a later start. The error at x is the largest difference between the two around x, plus the
density at the edge of the box.
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

from .._checks import NonFiniteError, as_real, check_positive, check_vector, is_traced
from .._programs import in_double_precision, jit
from ..sde import AbstractSDE, noise_matrix, to_ito, with_explicit_parameters
from ._estimate import AbstractEstimator, Accuracy, Estimate

SIZES = {1: (64, 128, 256, 512, 1024, 2048), 2: (48, 72, 108, 160, 240, 360)}  # nodes per axis
COARSE = {1: 64, 2: 24}  # those on which tables are checked
TIMES = 6  # Chebyshev times of a table
PLACES = 64  # Chebyshev places per axis of the plane where coefficients are evaluated, on larger meshes
BLOCK = 8  # steps of one program
CHUNK = 4096  # points at which coefficients are evaluated at once
KEPT = (0.75, 0.66)  # share of the wavenumbers, of the solution and of its companion
DRAWS = 4096  # from the base, for its first box
FIRST = 2.0**-12  # of the span, when the density from a point is normal; for the companion four times that
WORK = 2e8  # nodes times steps of one solution
TRIES = 40  # of one segment
PASSES = 4
LOWEST = 1e-6  # share of the highest density that is to be known to the tolerance
HEADROOM = 1.2  # of the largest coefficients over those at the begin of a segment
MARGIN = 1.5  # the most by which a box is wider than predicted
HOPELESS = 1e4  # times the share of the outer wavenumbers that is allowed, on the largest mesh


Numbers = Any  # an array of JAX or NumPy, or a number


class Unresolved(RuntimeError):
    """A density that no mesh within the limits resolves."""


class Fineness(NamedTuple):
    """How fine a solution is: what the outer wavenumbers (`tail`) and the edge of the box may hold, relative
    to the highest density; the Courant number of a step; the error of a table, in nats."""

    tail: float
    edge: float
    step: float
    table: float


class Box(NamedTuple):
    """x = centre + scale w(y), |yᵢ| ≤ 1; the scale is lower triangular, w the warp of each axis."""

    centre: np.ndarray
    scale: np.ndarray
    skew: np.ndarray  # (d,)

    def places(self, size: int) -> np.ndarray:
        return self.centre + warp(nodes(size, len(self.centre)), self.skew, np)[0] @ self.scale.T

    def log_volume(self, size: int) -> np.ndarray:
        """Of x over that of y, on the mesh, `(nᵈ,)`."""
        slopes = warp(nodes(size, len(self.centre)), self.skew, np)[1]
        return np.sum(np.log(slopes), axis=1) + np.sum(np.log(np.diag(self.scale)))


def warp(y: Any, skew: Any, xp: Any) -> tuple[Any, Any, Any]:
    """w(y) = (e^{κy} − cosh κ)/sinh κ, which keeps ±1, its slope, and its derivative in κ: for long tails on
    one side, such as those of lognormal densities."""
    none = xp.abs(skew) < 1e-6
    k = xp.where(none, 1.0, skew)
    grown, sinh, cosh = xp.exp(k * y), xp.sinh(k), xp.cosh(k)
    w = (grown - cosh) / sinh
    by = y * grown / sinh - 1 - w * cosh / sinh
    return xp.where(none, y, w), xp.where(none, 1.0, k * grown / sinh), xp.where(none, 0.5 * (y**2 - 1), by)


class Segment(NamedTuple):
    """A span of time with its frame at the times of its table, and how the equation is solved over it.

    Time runs as t = t₀ + ((1 + g)ˢ − 1) Δ/g, 0 ≤ s ≤ 1, where variances grow by g over the span Δ: segments
    of a process that starts from a point all look the same. The centre is linear in t. The scale is the
    product of a diagonal matrix, its logarithm linear in s, and a unit triangular one, linear in s.
    """

    times: np.ndarray  # (K,)
    pace: np.ndarray  # (K,), dt/ds
    centre: np.ndarray  # (K, d)
    scale: np.ndarray  # (K, d, d)
    turn: np.ndarray  # (K, d, d), the derivative of the scale
    skew: np.ndarray  # (K, d), linear in s
    size: int
    caps: tuple[float, float] = (0.0, 0.0)  # of speed and noise; where they are larger there is no density
    noise: np.ndarray | None = None  # (K, d, d), that of the integrating factor; None where noise is additive
    blocks: int = 0
    sparse: bool = False

    @staticmethod
    def between(times: tuple[float, float], boxes: tuple[Box, Box], growth: float, size: int) -> "Segment":
        share, span = 0.5 - 0.5 * np.cos(np.pi * np.arange(TIMES) / (TIMES - 1)), times[1] - times[0]
        part = np.expm1(share * math.log1p(growth)) / growth
        part[-1] = 1  # to the bit, so that time ends where it should
        pace = span * math.log1p(growth) / growth * (1 + growth) ** share
        mix = lambda part, a, b: np.multiply.outer(1 - part, a) + np.multiply.outer(part, b)
        sizes = [np.diag(box.scale) for box in boxes]
        units = [box.scale / np.diag(box.scale)[:, None] for box in boxes]
        ratio = np.log(sizes[1] / sizes[0])
        diagonal = (sizes[0] * np.exp(np.multiply.outer(share, ratio)))[..., None]
        scale = diagonal * mix(share, *units)
        turn = ratio[:, None] * scale + diagonal * (units[1] - units[0])
        centre, skew = mix(part, boxes[0].centre, boxes[1].centre), mix(share, boxes[0].skew, boxes[1].skew)
        return Segment(mix(part, *times), pace, centre, scale, turn, skew, size)


class GridDensity(eqx.Module):
    """The density of y on a mesh, and its error."""

    values: Numbers  # (n,) or (n, n)
    error: Numbers
    box: Box
    extra: float  # nats

    def log_prob_and_error(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """log p at x `(N, d)` and its error, NaN and infinite outside the box or where p is below that."""
        box = (self.box.centre, np.linalg.inv(self.box.scale), self.box.skew)
        one = lambda x: _evaluate(self.values, self.error, *box, x)
        value, error = in_chunks(one, x, 1 << max(6, (min(len(x), CHUNK) - 1).bit_length()))
        return value, error + self.extra

    @property
    def log_maximum(self) -> float:
        density = np.asarray(self.values).ravel() * np.exp(-self.box.log_volume(len(self.values)))
        return math.log(float(np.max(density)))


def nodes(size: int, dimension: int) -> np.ndarray:
    """The mesh, `(nᵈ, d)`."""
    axis = -1 + 2 * np.arange(size) / size
    return np.stack([a.ravel() for a in np.meshgrid(*[axis] * dimension, indexing="ij")], axis=1)


def wavenumbers(size: int, dimension: int) -> list[np.ndarray]:
    """Of the transform of real values on the mesh: one array an axis."""
    whole, half = np.fft.fftfreq(size, 1 / size), np.fft.rfftfreq(size, 1 / size)
    return list(np.pi * np.array(np.meshgrid(*[whole] * (dimension - 1), half, indexing="ij")))


def kept(size: int, dimension: int, share: float) -> np.ndarray:
    """Which wavenumbers are below a share of the largest."""
    return np.all([np.abs(k) <= share * np.pi * size / 2 for k in wavenumbers(size, dimension)], axis=0)


def triangle(d: int) -> np.ndarray:
    """Where the entries of a symmetric matrix are among those of its lower triangle, by rows."""
    return np.array([[max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for j in range(d)] for i in range(d)])


def in_chunks(function: Callable, x: Any, size: int) -> Any:
    """A function of `size` rows for any number of them."""
    rows = jax.tree.leaves(x)[0].shape[0]
    place = np.minimum(np.arange(-(-rows // size) * size), rows - 1).reshape(-1, size)
    parts = [function(jax.tree.map(lambda a, some=some: a[some], x)) for some in place]
    xp = jnp if any(is_traced(leaf) for leaf in jax.tree.leaves(parts[0])) else np
    return jax.tree.map(lambda *part: xp.concatenate(part)[:rows], *parts)


@functools.partial(jit, level=1)
def _evaluate(
    values: Numbers, error: Numbers, centre: Numbers, inverse: Numbers, skew: Numbers, x: Numbers
) -> tuple[Numbers, Numbers]:
    size, d = values.shape[0], values.ndim
    u = (x - centre[None]) @ inverse.T
    none = jnp.abs(skew) < 1e-6
    bend = jnp.where(none, 1, skew)[None]
    inside = jnp.all(jnp.abs(u) < 1, axis=1)
    u = jnp.where(inside[:, None], u, 0)
    y = jnp.where(none[None], u, jnp.log(jnp.cosh(bend) + u * jnp.sinh(bend)) / bend)
    log_volume = jnp.sum(jnp.log(warp(y, skew[None], jnp)[1]), axis=1) - jnp.sum(jnp.log(jnp.diag(inverse)))
    k = jnp.asarray(np.pi * np.fft.fftfreq(size, 1 / size))
    waves = jnp.exp(1j * k[None, None] * (y[:, :, None] + 1))  # (N, d, n)
    spectrum = jnp.fft.fftn(values) / values.size
    total = waves[:, 0] * spectrum[None] if d == 1 else (waves[:, 0] @ spectrum) * waves[:, 1]
    p = jnp.real(jnp.sum(total, axis=1))
    place = jnp.clip(jnp.round(0.5 * (jax.lax.stop_gradient(y) + 1) * size), 0, size - 1).astype(int)
    bound = error[tuple(place.T)]
    known = inside & (p > 2 * bound)
    p = jnp.where(known, p, 1)
    value = jnp.where(known, jnp.log(p) - log_volume, jnp.nan)
    bar = jnp.where(known, -jnp.log1p(-jnp.where(known, bound / p, 0)), jnp.inf)
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


def tabulate(sde: AbstractSDE, segment: Segment) -> Numbers:
    """The coefficients on the mesh at the times of a table, `(K, nᵈ, F)`; by interpolation between Chebyshev
    places if they are `sparse`."""
    if segment.sparse:
        return spread(coefficients(sde, segment, chebyshev_places()), segment.size)
    return coefficients(sde, segment, nodes(segment.size, segment.centre.shape[1]))


def coefficients(sde: AbstractSDE, segment: Segment, y: np.ndarray) -> Numbers:
    """At places y `(M, d)` of the frame and the times of a table, `(K, M, F)`."""
    u = warp(y[None], segment.skew[:, None], np)[0]
    x = (segment.centre[:, None] + np.einsum("kij,knj->kni", segment.scale, u)).reshape(-1, y.shape[1])
    raw = in_chunks(lambda pair: _coefficients(sde, *pair), (np.repeat(segment.times, len(y)), x), CHUNK)
    return raw.reshape(len(segment.times), len(y), -1)


def chebyshev_places() -> np.ndarray:
    axis = np.cos(np.pi * (np.arange(PLACES) + 0.5) / PLACES)
    return np.stack([a.ravel() for a in np.meshgrid(axis, axis, indexing="ij")], axis=1)


def spread(few: Numbers, size: int) -> Numbers:
    """From Chebyshev places to a mesh of the plane."""
    xp = jnp if is_traced(few) else np
    vandermonde = np.polynomial.chebyshev.chebvander(nodes(size, 1)[:, 0], PLACES - 1)
    angles = np.pi * (np.arange(PLACES) + 0.5) / PLACES
    weights = vandermonde @ (2 / PLACES * np.cos(np.multiply.outer(np.arange(PLACES), angles)))
    weights = weights - 1 / PLACES  # half of the constant
    table = few.reshape(len(few), PLACES, PLACES, -1)
    table = xp.einsum("ai,kijf->kajf", weights, table)
    return xp.einsum("bj,kajf->kabf", weights, table).reshape(len(few), size**2, -1)


def in_frame(raw: Any, pace: Any, inverse: Any, drift: Any, turn: Any, skew: Any, xp: Any = jnp) -> Any:
    """Coefficients for y and s from those for x and t: `(K, F, n, ...)`. The centre moves with `drift`."""
    d = turn.shape[1]
    size = round(raw.shape[1] ** (1 / d))
    u, slope, by = warp(xp.asarray(nodes(size, d))[None], skew[:, None], xp)
    raw = raw * pace[:, None, None]
    moved = raw[..., :d] - drift[:, None] - xp.einsum("knj,kij->kni", u, turn)
    half = xp.einsum("kia,knab->knib", inverse, raw[..., d:][..., triangle(d)])
    noise = xp.einsum("knib,kjb->knij", half, inverse) / (slope[..., None] * slope[..., None, :])
    velocity = xp.einsum("kij,knj->kni", inverse, moved) - (skew[-1:] - skew[:1])[:, None] * by
    own = xp.stack([noise[..., i, i] for i in range(d)], axis=-1)
    velocity = velocity / slope - 0.5 * skew[:, None] * own  # w″ = κ w′
    rows = xp.stack([noise[..., i, j] for i in range(d) for j in range(i + 1)], axis=-1)
    fields = xp.swapaxes(xp.concatenate([velocity, rows], axis=-1), 1, 2)
    return xp.reshape(xp.where(xp.isfinite(fields), fields, 0), (*fields.shape[:2], *[size] * d))


_in_frame = jit(in_frame, level=1)


def fields_of(raw: Numbers, segment: Segment) -> Numbers:
    """The table of a segment in its frame."""
    way = (segment.centre[-1] - segment.centre[0]) / (segment.times[-1] - segment.times[0])
    drift = np.multiply.outer(segment.pace, way)
    frame = (segment.pace, np.linalg.inv(segment.scale), drift, segment.turn, segment.skew)
    return _in_frame(raw, *frame) if is_traced(raw) else in_frame(raw, *frame, xp=np)


@functools.partial(jit, level=1)
def _advance(
    q: Numbers,
    fields: Numbers,
    caps: Any,
    noise: Numbers | None,
    dt: Numbers,
    weights: Numbers,
    mask: Numbers,
) -> Numbers:
    """Steps with the weights `(steps, 3, K)` of the table at the begin, the middle and the end of each."""
    d, shape = q.ndim, q.shape
    k = [jnp.asarray(a) for a in wavenumbers(shape[0], d)]
    pairs = [(i, j) for i in range(d) for j in range(i + 1)]
    within = lambda size, cap: jnp.where(size > cap, cap / jnp.where(size > cap, size, 1), 1)
    drift = fields[:, :d] * within(jnp.sum(jnp.abs(fields[:, :d]), axis=1, keepdims=True), caps[0])
    own = [d + place for place, (i, j) in enumerate(pairs) if i == j]
    spread = fields[:, d:] * within(jnp.sum(fields[:, np.array(own)], axis=1, keepdims=True), caps[1])
    bends = jnp.stack([-(0.5 if i == j else 1.0) * k[i] * k[j] for i, j in pairs])
    if noise is None:
        common = spread.reshape(TIMES, len(pairs), -1)[..., 0]
        table, factors = drift, jnp.stack([-1j * a for a in k])
    else:
        common = jnp.stack([noise[:, i, j] for i, j in pairs], axis=1)
        rest = spread - jnp.reshape(common, (*common.shape, *[1] * d))
        table = jnp.concatenate([drift, rest], axis=1)
        factors = jnp.concatenate([jnp.stack([-1j * a for a in k]), bends + 0j])

    def slope(spectrum: Numbers, now: Numbers) -> Numbers:
        values = now * jnp.fft.irfftn(spectrum, s=shape)[None]
        return mask * jnp.sum(factors * jnp.fft.rfftn(values, axes=range(1, d + 1)), axis=0)

    # The integral of a quadratic over each half of a step, by its values at begin, middle and end.
    halves = dt / 24 * jnp.asarray([[5.0, 8.0, -1.0], [-1.0, 8.0, 5.0]])

    def step(p: Numbers, weight: Numbers) -> tuple[Numbers, None]:
        begin, middle, end = jnp.tensordot(weight, table, 1)
        early, late = jnp.exp(jnp.tensordot(halves @ weight @ common, bends, 1))
        first = slope(p, begin)
        second = slope(early * (p + 0.5 * dt * first), middle)
        third = slope(early * p + 0.5 * dt * second, middle)
        fourth = slope(late * (early * p + dt * third), end)
        p = late * (early * (p + dt / 6 * first) + dt / 3 * (second + third)) + dt / 6 * fourth
        return p, None

    spectrum = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), mask * jnp.fft.rfftn(q), weights)[0]
    return jnp.fft.irfftn(spectrum, s=shape)


def run(q: Numbers, fields: Numbers, segment: Segment, companion: bool = False) -> Numbers:
    """The density at the end of a segment."""
    blocks = -(-2 * segment.blocks // 3) if companion else segment.blocks
    times = (np.arange(blocks * BLOCK)[:, None] + np.array([0, 0.5, 1])) / (blocks * BLOCK)
    weights = chebyshev(2 * times - 1)[..., : TIMES - companion] @ inverse_chebyshev()[: TIMES - companion]
    mask = kept(segment.size, q.ndim, KEPT[companion])
    for block in weights.reshape(blocks, BLOCK, 3, TIMES):
        q = _advance(q, fields, segment.caps, segment.noise, 1 / len(times), block, mask)
    return q


def chebyshev(places: np.ndarray) -> np.ndarray:
    """Chebyshev polynomials at places in [−1, 1]."""
    return np.polynomial.chebyshev.chebvander(places, TIMES - 1)


def inverse_chebyshev() -> np.ndarray:
    """From the values at the times of a table to coefficients."""
    return np.linalg.inv(chebyshev(-np.cos(np.pi * np.arange(TIMES) / (TIMES - 1))))


@functools.partial(jit, level=1)
def _resized(q: Numbers, other: Numbers) -> Numbers:
    """The same density on the larger mesh of another array."""
    new, old = other.shape[0], q.shape[0]
    spectrum = jnp.pad(jnp.fft.fftshift(jnp.fft.fftn(q)), [((new - old) // 2,) * 2] * q.ndim)
    return jnp.real(jnp.fft.ifftn(jnp.fft.ifftshift(spectrum))) * (new / old) ** q.ndim


def resized(q: Numbers, size: int) -> Numbers:
    return q if q.shape[0] == size else _resized(q, np.zeros((size,) * q.ndim))


def tail(q: np.ndarray) -> float:
    """About how much of a density is in the outer wavenumbers, relative to its maximum."""
    spectrum = np.abs(np.fft.rfftn(q)) / q.size
    outer = spectrum[~kept(q.shape[0], q.ndim, KEPT[1])]
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
        wanted = 2 * np.arctanh(np.clip(0.5 * (low + high) / width, -0.8, 0.8)) * varied
        wanted = np.where(np.abs(wanted) > 0.4, wanted, 0)
        skew = box.skew + np.clip(wanted - box.skew, -0.5, 0.5)
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


def prepared(
    raw: np.ndarray, fields: Numbers, segment: Segment, q: np.ndarray, fineness: Fineness
) -> Segment:
    """A segment with its steps; q is where there is some density."""
    d, values = q.ndim, q.ravel()
    table = np.asarray(fields).reshape(*fields.shape[:2], -1)
    if not np.all(np.isfinite(raw[:, values > 1e-6 * values.max()])):
        raise NonFiniteError(
            f"drift or diffusion is not finite near z = {segment.centre[0]}: a grid needs both"
        )
    where = values > 0.1 * fineness.edge * values.max()
    cap = HEADROOM * float(np.abs(table[:, :d][..., where]).sum(axis=1).max())
    top = KEPT[0] * np.pi * segment.size / 2
    spread = np.moveaxis(table[:, d:], 1, -1)[..., triangle(d)]  # (K, N, d, d)
    most = HEADROOM * float(np.trace(spread[:, where], axis1=-1, axis2=-2).max())
    noise, rate = None, cap * top / fineness.step
    if np.ptp(spread, axis=1).max() > 1e-12 * np.abs(spread).max():
        noise = common_part(spread[:, values > 1e-4 * values.max()])
        rest = np.abs(spread[:, where] - noise[:, None]).sum(axis=(-1, -2)).max()
        rate = math.hypot(rate, HEADROOM * rest * top**2 / 5)
    blocks = max(1, math.ceil(rate / BLOCK))
    return segment._replace(caps=(cap, most), noise=noise, blocks=blocks)


def table_error(
    sde: AbstractSDE, segment: Segment, q: np.ndarray, fineness: Fineness
) -> tuple[float, Numbers | None]:
    """The error of interpolation in time, in nats, on a coarse mesh; and the coefficients at Chebyshev
    places, if interpolation between them does for a larger mesh."""
    d = q.ndim
    coarse = segment._replace(size=COARSE[d])
    place = np.arange(coarse.size) * len(q) // coarse.size
    where = q[np.ix_(*[place] * d)] > 0.1 * fineness.edge * q.max()
    # In units of the box log p has slopes of up to 49, seven deviations from its centre.
    nats = lambda gap: float(
        49 * np.abs(gap[..., :d, where]).max() + 1200 * np.abs(gap[..., d:, where]).max()
    )
    fields = np.asarray(fields_of(tabulate(sde, coarse), coarse))
    rough = nats(np.tensordot(inverse_chebyshev()[-1], fields, 1))
    if d == 1 or segment.size <= PLACES or rough > fineness.table:
        return rough, None
    few = coefficients(sde, segment, chebyshev_places())
    gap = nats(np.asarray(fields_of(spread(few, coarse.size), coarse)) - fields)
    return rough, few if gap < fineness.table else None


def common_part(spread: np.ndarray) -> np.ndarray:
    """The largest multiple of the mean over N of matrices `(K, N, d, d)` that none is below, `(K, d, d)`."""
    mean = np.mean(spread, axis=1)
    size = np.trace(mean, axis1=1, axis2=2)
    if np.any(np.linalg.det(mean) <= 1e-8 * size ** mean.shape[-1]):
        return 0 * mean
    inverse = np.linalg.inv(np.linalg.cholesky(mean))[:, None]
    least = np.linalg.eigvalsh(inverse @ spread @ np.swapaxes(inverse, -1, -2))[..., 0].min(axis=1)
    return np.maximum(least, 0)[:, None, None] * mean


class Solution(NamedTuple):
    """A density, and the segments that led to it from its first box."""

    density: GridDensity
    first: Box
    segments: list[Segment]


def solve(
    sde: AbstractSDE, begin: Any, t1: float, fineness: Fineness, largest: int | None = None
) -> Solution:
    """The density at t1 from `begin`, a `FromDensity` or `FromPoint`."""
    t, box = begin.time, begin.box(fineness.edge)
    sizes = [size for size in SIZES[len(box.centre)] if size <= (largest or math.inf)]
    q = begin.density(box, sizes[0])
    for size in sizes[1:]:
        if tail(np.asarray(q)) < fineness.tail:
            break
        q = begin.density(box, size)
    first, segments, outside = box, [], 0.0
    other, span, margin = begin.companion(q), t1 - t, 1.0
    scale = box.scale[None]
    still = Segment(np.array([t]), np.ones(1), box.centre[None], scale, scale, box.skew[None], q.shape[0])
    raw = tabulate(sde, still)
    while t < t1:
        ahead = Forecast.of(np.asarray(q), box, np.asarray(raw[-1]), fineness.edge)
        span = ahead.span(min(span, t1 - t))
        window = (t, t1, span, max(1.0, 0.9 * margin))
        (span, margin), box, segment, raw, fields, new = _segment(sde, ahead, window, box, q, sizes, fineness)
        outside = max(outside, edge(np.asarray(new)))
        if other is not None:
            other = run(resized(other, segment.size), fields, segment, companion=True)
        q, t = new, float(segment.times[-1])
        segments.append(segment)
        if sum(s.blocks * BLOCK * s.size**q.ndim for s in segments) > WORK:
            raise Unresolved("the equation takes too many steps")
        if other is None and t >= begin.later:
            other = begin.after(t, box, segment.size)
    error = _difference(np.asarray(q), np.asarray(other)) + (outside + 1e-14) * float(np.max(np.asarray(q)))
    return Solution(GridDensity(q, error, box, begin.error(first, segments[0].size)), first, segments)


def _segment(
    sde: AbstractSDE,
    ahead: Forecast,
    times: tuple[float, float, float, float],
    box: Box,
    q: Numbers,
    sizes: list[int],
    fineness: Fineness,
) -> tuple[tuple[float, float], Box, Segment, Numbers, Numbers, Numbers]:
    """One segment from t, at most to t₁, with a box, a mesh and a span that do for it. Returns how long the
    next may be and its margin, the box, the segment, its tables and the density."""
    (t, t1, span, margin), size = times, q.shape[0]
    somewhere, tables = np.asarray(q), {}
    for attempt in range(TRIES):
        end = t1 if span > 0.8 * (t1 - t) else t + span
        aim, growth = ahead.box(end - t, margin)
        segment = Segment.between((t, end), (box, aim), growth, size)
        if (end, margin) not in tables:
            tables[end, margin] = table_error(sde, segment, somewhere, fineness)
        rough, few = tables[end, margin]
        if rough > fineness.table and attempt < TRIES // 2:
            span = max(0.2, 0.9 * (fineness.table / rough) ** (1 / TIMES)) * (end - t)
            continue
        segment = segment._replace(sparse=few is not None)
        raw = tabulate(sde, segment) if few is None else spread(few, size)
        fields = fields_of(raw, segment)
        segment = prepared(np.asarray(raw), fields, segment, somewhere, fineness)
        if segment.blocks * BLOCK * size**q.ndim > WORK:
            raise Unresolved("the equation is too stiff")
        new = run(q, fields, segment)
        values = np.asarray(new)
        if not np.all(np.isfinite(values)):
            raise Unresolved("the solution is not finite")
        reached = np.maximum(somewhere, values)
        caps = prepared(np.asarray(raw), fields, segment, reached, fineness).caps
        if any(now > HEADROOM * old for now, old in zip(caps, segment.caps, strict=True)):
            somewhere = reached  # by the density, with coefficients above the caps
        elif edge(values) > 10 * fineness.edge and margin < MARGIN:
            margin = 1.12 * margin
        elif tail(values) > fineness.tail and size < sizes[-1]:
            size = sizes[sizes.index(size) + 1]
            q = resized(q, size)
            somewhere = np.asarray(resized(somewhere, size))
        elif tail(values) > HOPELESS * fineness.tail:
            raise Unresolved(f"{size} nodes per axis do not resolve the density")
        else:
            longer = min(4.0, 0.9 * (fineness.table / max(rough, 1e-300)) ** (1 / TIMES))
            return (longer * (end - t), margin), aim, segment, raw, fields, new
    raise Unresolved("no box holds the density")


def _difference(q: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The largest difference within two nodes of each."""
    gap = np.abs(q - other)
    for axis in range(q.ndim):
        gap = np.max([np.roll(gap, shift, axis) for shift in range(-2, 3)], axis=0)
    return gap


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
        size = round(CHUNK ** (1 / len(mean)))
        for _ in range(8):
            middle, half = 0.5 * (low + high), 0.5 * (high - low)
            y = nodes(size, len(mean))
            logs = np.asarray(self.log_prob(Box(mean + root @ middle, root * half, 0 * mean).places(size)))
            y = y[logs > np.nanmax(logs) + math.log(level)]
            reach = np.array([y.min(axis=0), y.max(axis=0)]) + 2 / size * np.array([[-1], [1]])
            wrong = (np.abs(reach) > 1 - 2 / size) | (np.abs(reach[1] - reach[0]) < 0.5)
            low, high = middle + half * np.where(wrong, 1.5, 1) * reach
            if not wrong.any():
                break
        return Box(mean + root @ (0.5 * (low + high)), root * (0.52 * (high - low)), 0 * mean)

    def density(self, box: Box, size: int) -> Numbers:
        return _on_mesh(self.log_prob(box.places(size)), box, size)

    def companion(self, q: Numbers) -> Numbers:
        return q

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

    def companion(self, q: Numbers) -> None:
        del q

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
    return base.sample(key=jax.random.key(0), shape=(DRAWS,))


class BaseLogProb(eqx.Module):
    """The log-density of a base at `(N, d)`."""

    base: Any

    def __call__(self, x: Numbers) -> Numbers:
        return in_chunks(lambda some: _log_prob(self.base, some), x, CHUNK)


def held(tree: Any) -> Any:
    """The values of what is being differentiated."""
    tree = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_inexact_array(a) else a, tree)
    if any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise TypeError("rf.density.Grid chooses its mesh from values: call it outside of jit and vmap")
    return tree


def replay(sde: AbstractSDE, begin: Any, solution: Solution) -> GridDensity:
    """The density of a solution, to be differentiated: with the same frames, meshes and steps."""
    segments = solution.segments
    q = begin.density(solution.first, segments[0].size)
    for segment in segments:
        raw = tabulate(sde, segment)
        q = run(resized(q, segment.size), fields_of(raw, segment), segment)
    return eqx.tree_at(lambda density: density.values, solution.density, q)


def log_prob_and_error(
    sde: AbstractSDE, begin: Any, t1: float, x: Numbers, tolerance: float, largest: int | None = None
) -> tuple[Numbers, Numbers]:
    """log p at `(N, d)` and its error, from a mesh that is refined until the error is below the tolerance."""
    (still, start), points = held((sde, begin)), held(x)
    solution, value, error = None, np.full(len(x), np.nan), np.full(len(x), np.inf)
    # The share of the highest density that is to be known, first as for draws; and the part of the tolerance.
    lowest, part = min(1e-2, max(1e-5, 0.1 / max(1, len(x)))), 1.0
    for _ in range(PASSES):
        step = 1.6 if lowest > 1e-3 else 1.2
        low = max(0.15 * part * tolerance * lowest, 1e-10)
        fineness = Fineness(low, max(0.1 * low, 1e-11), step * part**0.25, 0.3 * part * tolerance)
        try:
            solution = solve(still, start, t1, fineness, largest)
        except Unresolved:
            break
        value, error = (np.asarray(a) for a in solution.density.log_prob_and_error(points))
        unknown, unmet = np.isnan(value), ~(error <= tolerance)
        if not np.any(unmet & ~unknown) and (lowest == LOWEST or not unknown.any()):
            break
        needed = np.exp(np.min(value[unmet & ~unknown], initial=np.inf) - solution.density.log_maximum)
        needed = max(LOWEST, LOWEST if unknown.any() else needed)
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

    **Arguments:** `tolerance`, the total error to reach where none is given to `estimate`; `start`, a point
    `(d,)` to start from instead of the base; `largest`, the most nodes per axis.

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
        value, error = estimate(flow, x, tolerance, self.start, self.largest)
        unmet = ~(error <= tolerance) & (accuracy.tolerance is not None)
        return Estimate.of(value, "grid", solver_error=error, unmet=unmet)


@in_double_precision
def estimate(
    flow: Any, x: Numbers, tolerance: float, start: Any = None, largest: int | None = None
) -> tuple[Numbers, Numbers]:
    """log p at `x` `(..., d)` and its error."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(()).dtype
    model = (explicit(flow.sde, flow.dimension), flow.base, None if start is None else jnp.asarray(start), x)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def values(parameters: Any) -> tuple[Numbers, Numbers]:
        double = jax.tree.map(lambda a: a.astype(float), parameters)
        sde, base, start, points = eqx.combine(double, rest)
        if start is None:
            begin = FromDensity(BaseLogProb(base), np.asarray(_draws(held(base))), 0.0)
        else:
            begin = FromPoint(sde, jnp.asarray(start, float), 0.0, flow.t1)
        points = jnp.reshape(points, (-1, flow.dimension)).astype(float)
        pair = log_prob_and_error(sde, begin, flow.t1, points, tolerance, largest)
        value, error = (jnp.reshape(jnp.asarray(part), x.shape[:-1]).astype(dtype) for part in pair)
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
    hidden = is_traced(held(sde).drift(t, z)) or is_traced(noise_matrix(held(sde).noise(t, z)))
    return with_explicit_parameters(sde, z) if hidden else sde
